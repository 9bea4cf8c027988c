"""The disk tier: whatever happens to its files, it returns correct K/V or none."""

import errno
import json
import logging
import os
import resource
import stat
import subprocess
import sys
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import tier_kills
from helpers.tiers import SIZE, blocks, read, write

from kvcore import InputError, PluginError, StorageError
from kvcore.units import format_bytes
from kvcore_tiers.tier import Disk, disk

SLOTS = 8
GAPS = [0, 1, 2, 4, 5, 7]
"""Slots with gaps between them."""


def opened(path, slots=SLOTS, identity=b"model", **options):
    """Open a store that closes at the end of a `with`."""
    tier = Disk(path=path, memory=slots * SIZE, **options)
    return closing(tier.open(slots, SIZE, identity))


def found(path, **options):
    """Return the keys of the blocks that a new run can use."""
    with opened(path, **options) as store:
        return sorted(block.key for block in list(store.recover()) if read(store, [block]))


def filled(path):
    """Write a path of blocks into all slots."""
    with opened(path) as store:
        write(store, blocks(range(SLOTS)))


def file_of(path, suffix):
    """Return the only file with this suffix."""
    (file,) = path.glob(f"*.{suffix}")
    return file


def kills(how, path, **options):
    """Return the command and options of a program that writes into a tier and is killed."""
    tests = Path(tier_kills.__file__).parents[1]
    command = [sys.executable, tier_kills.__file__, how, str(path)]
    return command, {"env": os.environ | {"PYTHONPATH": str(tests)}, **options}


def test_a_process_killed_at_any_write_leaves_whole_blocks(tmp_path):
    """A process killed before, during or after any write leaves whole blocks only.

    Every header that is recovered belongs to correct K/V, and slots that it did not write keep
    theirs.
    """
    command, options = kills("all", tmp_path)
    results = json.loads(subprocess.check_output(command, **options))
    assert len(results) >= 3 * 9
    untouched = {"0-1", "0-4", "0-5"}
    for result in results:
        assert result["right"] == len(result["found"])
        assert untouched <= set(result["found"])
    assert {"1-0", "1-3"} <= set(results[-1]["found"])


def test_the_directory_of_a_killed_process_can_be_opened(tmp_path):
    """A directory in use is refused with the id of its process until that is killed.

    Afterwards all blocks that it left can be read.
    """
    command, options = kills("on", tmp_path, stdout=subprocess.PIPE)
    for lines in (1, 7):
        with subprocess.Popen(command, **options) as writer:
            try:
                for _ in range(lines):
                    assert writer.stdout.readline()
                with pytest.raises(InputError, match=f"in use by process {writer.pid} on "):
                    opened(tmp_path)
            finally:
                writer.kill()
        with opened(tmp_path) as store:
            blocks_left = list(store.recover())
            assert blocks_left
            assert all(read(store, [block]) for block in blocks_left)


def test_a_directory_in_use_is_refused(tmp_path):
    """A second store of the same process in a directory is refused while the first is open.

    The name of an earlier process, however long it is, is not left beside that of this one.
    """
    (tmp_path / "lock").write_text("process 1 on " + 100 * "far away ")
    with opened(tmp_path), pytest.raises(InputError, match="in use by this process"):
        opened(tmp_path, identity=b"another")
    opened(tmp_path).thing.close()


def test_of_the_owner_of_a_directory_the_first_200_characters_are_named(tmp_path):
    """A directory is in use by what its lock says, of which a long text is cut."""
    with opened(tmp_path):
        (tmp_path / "lock").write_text(250 * "x")
        with pytest.raises(InputError, match=f"in use by {200 * 'x'}: wait"):
            opened(tmp_path)


@pytest.mark.parametrize("call", range(1, 9))
def test_a_write_to_a_full_disk_raises_an_error(tmp_path, monkeypatch, call):
    """A write to a full disk raises OSError, and none of its blocks is read wrongly.

    Other blocks can still be read, and writing works again once there is space.
    """
    filled(tmp_path)
    pwrite, calls = os.pwrite, 0

    def full(file, data, at):
        nonlocal calls
        calls += 1
        if calls >= call:
            if calls == call:
                return pwrite(file, data[: len(data) // 2], at)
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(file, data, at)

    new = blocks([2, 3, 6, 7], text=1)
    with opened(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(OSError, match="No space left"):
                write(store, new)
        for block in [*blocks(range(SLOTS)), *new]:
            read(store, [block])
        assert [read(store, [block]) for block in blocks([0, 1])] == [1, 1]
    assert {"0-0", "0-1", "0-4", "0-5"} <= set(found(tmp_path))
    with opened(tmp_path) as store:
        write(store, new)
        assert read(store, new) == len(new)


def test_a_tier_above_the_limit_of_file_sizes_is_refused(tmp_path):
    """A tier larger than the process's limit of file sizes is refused when it is opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOTS * SIZE - 1, hard))
    try:
        with pytest.raises(InputError, match="File too large"):
            opened(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_tier_larger_than_the_free_space_is_refused(tmp_path, monkeypatch):
    """More memory than the file system has free is refused.

    Space that the tier's own files occupy counts as free, and all that is free can be taken.
    """
    filled(tmp_path)
    own = 512 * file_of(tmp_path, "slots").stat().st_blocks
    for lacks, slots in ((1, SLOTS), (0, 3 * SLOTS)):
        free = 3 * SLOTS * SIZE - own - lacks
        monkeypatch.setattr(disk, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if lacks:
            with pytest.raises(StorageError, match=r"has room for .* give it less memory"):
                opened(tmp_path, slots=3 * SLOTS)
        assert len(found(tmp_path, slots=slots)) == SLOTS


def test_short_writes_are_continued(tmp_path, monkeypatch):
    """System calls that write or read only a part are repeated for the rest."""
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:700], at))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:700]], at))
    filled(tmp_path)
    assert len(found(tmp_path)) == SLOTS


def test_headers_are_written_after_their_blocks(tmp_path, monkeypatch):
    """Old headers are erased, then K/V are written, then new headers.

    With `sync` the K/V are on the disk before the new headers are written; by default not.
    """
    filled(tmp_path)
    pwrite, calls = os.pwrite, []

    def name(file):
        return Path(f"/proc/self/fd/{file}").readlink().suffix

    def spy(file, data, at):
        calls.append(f"void{name(file)}" if not any(data) else f"write{name(file)}")
        return pwrite(file, data, at)

    for options, expected in (
        ({}, "void.headers write.slots write.headers"),
        ({"sync": True}, "void.headers write.slots sync.slots write.headers"),
    ):
        with opened(tmp_path, **options) as store, monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", spy)
            patch.setattr(os, "fdatasync", lambda file: calls.append(f"sync{name(file)}"))
            calls.clear()
            write(store, blocks([1]))
        assert " ".join(calls) == expected


@pytest.mark.parametrize("size", [0, 1, 700, SIZE + 1])
@pytest.mark.parametrize("suffix", ["slots", "headers"])
def test_only_whole_slots_of_a_truncated_file_are_used(tmp_path, suffix, size):
    """Only whole slots of a truncated file are used, whenever it was cut."""
    filled(tmp_path)
    with opened(tmp_path) as store:
        os.truncate(file_of(tmp_path, suffix), size)
        for block in blocks(range(SLOTS)):
            read(store, [block])
    # The file of headers has one of its own first; only the beginning of each is used.
    whole = size // SIZE if suffix == "slots" else -(-size // disk.HEADER_BYTES) - 1
    assert found(tmp_path) == [f"0-{index}" for index in range(whole)]


def test_damaged_headers_are_counted(tmp_path, caplog):
    """Damaged headers are dropped, counted and logged once."""
    filled(tmp_path)
    with file_of(tmp_path, "headers").open("r+b") as file:
        file.seek(2 * disk.HEADER_BYTES)
        file.write(b"garbage" * 100)
    with opened(tmp_path) as store:
        assert len(list(store.recover())) == SLOTS - 2
        assert store.damaged == 2
    assert "2 headers are damaged" in caplog.text
    with opened(tmp_path) as store:
        assert len(list(store.recover())) == SLOTS - 2
        assert store.damaged == 0


def test_only_headers_that_say_something_are_erased(tmp_path, monkeypatch):
    """A slot that is dropped is written to only if it has a header, in whichever run."""
    with opened(tmp_path) as store:
        write(store, blocks([1, 4]))
    pwrite, erased = os.pwrite, []

    def spy(file, data, at):
        erased.append(at // disk.HEADER_BYTES - 1)
        return pwrite(file, data, at)

    with opened(tmp_path) as store:
        assert len(list(store.recover())) == 2
        monkeypatch.setattr(os, "pwrite", spy)
        for _ in range(2):
            store.drop(range(SLOTS))
    assert erased == [1, 4]


def test_headers_in_other_slots_are_damaged(tmp_path):
    """A header copied to another slot counts as damaged, and that slot is not read."""
    filled(tmp_path)
    with file_of(tmp_path, "headers").open("r+b") as file:
        file.seek(disk.HEADER_BYTES)
        first = file.read(disk.HEADER_BYTES)
        file.write(first)
    with opened(tmp_path) as store:
        assert read(store, blocks(range(SLOTS))) == 1
        assert len(list(store.recover())) == SLOTS - 1
        assert store.damaged == 1


@pytest.mark.parametrize(("identity", "usable"), [(b"model", SLOTS), (b"another", 0)])
def test_slots_of_another_model_are_damaged(tmp_path, identity, usable):
    """Headers copied from the files of another model count as damaged, and are not used.

    Those from other files of the same model are used.
    """
    for name, model in (("one", identity), ("two", b"model")):
        with opened(tmp_path / name, identity=model) as store:
            write(store, blocks(range(SLOTS)))
    source, target = file_of(tmp_path / "one", "headers"), file_of(tmp_path / "two", "headers")
    first = target.read_bytes()[: disk.HEADER_BYTES]
    target.write_bytes(first + source.read_bytes()[disk.HEADER_BYTES :])
    with opened(tmp_path / "two") as store:
        assert read(store, blocks(range(SLOTS))) == usable
        assert len(list(store.recover())) == usable
        assert store.damaged == SLOTS - usable


def test_a_damaged_file_is_kept_aside(tmp_path, caplog):
    """Files with a damaged beginning are renamed, and neither used nor overwritten."""
    filled(tmp_path)
    before = file_of(tmp_path, "slots").read_bytes()
    with file_of(tmp_path, "headers").open("r+b") as file:
        file.write(b"not a tier")
    assert not found(tmp_path)
    assert "was damaged: it is kept as" in caplog.text
    assert file_of(tmp_path, "slots.damaged-1").read_bytes() == before
    filled(tmp_path)
    file_of(tmp_path, "headers").write_bytes(b"again")
    assert not found(tmp_path)
    assert file_of(tmp_path, "headers.damaged-2").read_bytes() == b"again"


def test_files_of_another_format_are_not_changed(tmp_path, monkeypatch, caplog):
    """Files of another format are neither used nor changed; the log names their size."""
    filled(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    monkeypatch.setattr(disk, "SCHEMA", disk.SCHEMA + 1)
    with caplog.at_level(logging.WARNING):
        assert not found(tmp_path)
    taken = sum(file.stat().st_blocks for file in before if file.suffix == ".slots")
    assert f"also has {format_bytes(512 * taken)} of other models or layouts" in caplog.text
    filled(tmp_path)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_names_of_the_files_are_those_of_every_version(tmp_path):
    """The files of a model have the same names in every version that reads their format."""
    filled(tmp_path)
    names = {"lock", "1ade2954ef6e45d9.headers", "1ade2954ef6e45d9.slots"}
    assert {file.name for file in tmp_path.iterdir()} == names


@pytest.mark.parametrize("slots", [3, SLOTS, 20])
def test_blocks_survive_a_change_of_memory(tmp_path, slots):
    """More memory keeps all blocks; less memory keeps those whose slots remain."""
    filled(tmp_path)
    there = found(tmp_path, slots=slots)
    assert there == [f"0-{index}" for index in range(min(slots, SLOTS))]
    assert file_of(tmp_path, "slots").stat().st_size == slots * SIZE


def test_headers_are_read_in_chunks_up_to_the_last(tmp_path, monkeypatch):
    """The blocks of a file with more headers than fit in a chunk are all found."""
    filled(tmp_path)
    monkeypatch.setattr(disk, "CHUNK_BYTES", 3 * disk.HEADER_BYTES)
    assert found(tmp_path) == [f"0-{index}" for index in range(SLOTS)]


@pytest.mark.parametrize(
    ("blocks_in_call", "slots", "runs"),
    [
        (0.2, GAPS, [1] * 6),
        (1, GAPS, [1] * 6),
        (2, GAPS, [2, 1, 2, 1]),
        (2.5, GAPS, [2, 1, 2, 1]),
        (SLOTS, GAPS, [3, 2, 1]),
        (None, range(400), [2**20 // SIZE, 400 - 2**20 // SIZE]),
    ],
)
def test_a_call_moves_a_bounded_number_of_adjacent_blocks(
    tmp_path, monkeypatch, blocks_in_call, slots, runs
):
    """A call moves adjacent slots: a block at least, and up to a MiB or another limit."""
    sizes = {"pwrite": [], "preadv": []}
    real = {name: getattr(os, name) for name in sizes}

    def spy(name, file, buffers, offset):
        size = len(buffers) if name == "pwrite" else len(buffers[0])
        if Path(f"/proc/self/fd/{file}").readlink().suffix == ".slots":
            sizes[name].append(size // SIZE)
        return real[name](file, buffers, offset)

    for name in sizes:
        monkeypatch.setattr(os, name, partial(spy, name))
    if blocks_in_call is not None:
        monkeypatch.setattr(disk, "CHUNK_BYTES", int(blocks_in_call * SIZE))
    path = blocks(slots)
    with opened(tmp_path, slots=1 + max(slots)) as store:
        write(store, path)
        assert read(store, path) == len(path)
    assert sizes == {"pwrite": runs, "preadv": runs}


def test_only_the_owner_can_read_the_files(tmp_path):
    """Only the owner can read the directory and its files, since K/V reveal prompts."""
    path = tmp_path / "deep" / "kv"
    filled(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_a_link_in_place_of_a_file_is_refused(tmp_path):
    """A link in place of a file raises InputError; a link to the directory is followed."""
    filled(tmp_path / "kv")
    slots = file_of(tmp_path / "kv", "slots")
    (tmp_path / "link").symlink_to("kv")
    assert len(found(tmp_path / "link")) == SLOTS
    victim = tmp_path / "victim"
    slots.rename(victim)
    slots.symlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(InputError, match="it is a link"):
        opened(tmp_path / "kv")
    assert victim.read_bytes() == before


@pytest.mark.parametrize("suffix", ["slots", "headers", "lock"])
def test_a_hard_link_in_place_of_a_file_is_refused(tmp_path, suffix):
    """A file that has another name is refused, and its content stays as it was."""
    filled(tmp_path / "kv")
    file = next(each for each in (tmp_path / "kv").iterdir() if each.name.endswith(suffix))
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    file.unlink()
    file.hardlink_to(victim)
    with pytest.raises(InputError, match="hard link"):
        opened(tmp_path / "kv")
    assert victim.read_bytes() == b"precious"
    file.unlink()
    with opened(tmp_path / "kv"):  # nothing has stayed locked
        pass


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o720, 0o702])
def test_a_directory_that_others_may_write_is_refused(tmp_path, mode):
    """A directory in which other users may write is refused: they could choose the K/V."""
    path = tmp_path / "kv"
    filled(path)
    path.chmod(mode)
    told = rf"can be written by others \(mode {mode & 0o777:o}\), .*chmod go-w"
    with pytest.raises(InputError, match=told):
        opened(path)
    path.chmod(0o755)
    assert len(found(path)) == SLOTS


@pytest.mark.parametrize(("owner", "refused"), [(0, False), (1, True), (1000, False)])
def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch, owner, refused):
    """A directory of user 1 is refused to user 1000; that of root and its own are not."""
    real = Path.stat

    def owned(path, **options):
        fields = [*real(path, **options)]
        fields[stat.ST_UID] = owner
        return os.stat_result(fields)

    monkeypatch.setattr(Path, "stat", owned)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    told = pytest.raises(InputError, match="can be written by others")
    with told if refused else nullcontext():
        filled(tmp_path)


@pytest.mark.parametrize("what", ["file", "pipe", "nothing"])
def test_a_path_that_is_no_directory_is_refused(tmp_path, what):
    """A file as directory, a pipe as file, or no path raises InputError with the reason."""
    path, expected = tmp_path / "kv", "cannot be used"
    if what == "file":
        path.write_text("mine")
        expected = "it is a file"
    elif what == "pipe":
        filled(path)
        file_of(path, "slots").unlink()
        os.mkfifo(file_of(path, "headers").with_suffix(".slots"))
    else:
        path, expected = None, "needs a directory"
    with pytest.raises(InputError, match=expected):
        opened(path)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch, number):
    """A read-only, forbidden or full directory raises InputError with the reason and file."""

    def refuse(path, *_):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InputError, match=f"lock cannot be used: {os.strerror(number)}"):
        opened(tmp_path)


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    """A tier on a file system without locks raises InputError with the system's reason."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    with pytest.raises(InputError, match=os.strerror(errno.ENOLCK)):
        opened(tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "damaged"), StorageError("too large")])
def test_a_refused_store_leaves_no_file_open(tmp_path, monkeypatch, error):
    """A store that is refused closes its files, and the directory can be used."""

    def refuse(*_):
        raise error

    before = len([*Path("/proc/self/fd").iterdir()])
    with monkeypatch.context() as patch:
        patch.setattr(disk.DiskStore, "_fit", refuse)
        with pytest.raises((InputError, StorageError)):
            opened(tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    filled(tmp_path)


def test_a_read_error_of_the_disk_raises_oserror(tmp_path, monkeypatch):
    """A read error of the disk raises OSError, as the contract of stores allows."""

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    filled(tmp_path)
    monkeypatch.setattr(os, "preadv", broken)
    with opened(tmp_path) as store, pytest.raises(OSError, match=os.strerror(errno.EIO)):
        read(store, blocks([0]))


def test_a_missing_xxhash_is_reported(tmp_path, monkeypatch):
    """Without `xxhash` opening the tier raises PluginError that names the extra to install."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(PluginError, match=r"xxhash.*pip install 'kvcore\[torch\]'"):
        opened(tmp_path)
