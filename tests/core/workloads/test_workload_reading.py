"""Reading workload files: compression, formats, JSON arrays, checks and digests."""

import gzip
import hashlib
from copy import copy
from pathlib import Path

import pytest
import zstandard
from helpers.requests import keyed

from kvcore import Plugins
from kvcore.errors import InputError
from kvcore.files import refuse_overwrite
from kvcore.request import chain_keys
from kvcore.workloads import (
    Workload,
    checked,
    file_digest,
    find_workload,
    lines,
    recognise,
)
from kvcore_plugins.workload import Azure, Chat, Jsonl, Mooncake, Weka, Zipf

BUILT_IN = [Azure, Jsonl, Mooncake, Weka, Zipf]
FIRST_LINES = {
    Azure: b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n",
    Jsonl: b'{"n":0,"t":0,"event":"HEADER","schema":1}\n',
    Mooncake: b'{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[]}\n',
    Weka: b'{"id":"a","block_size":64,"hash_id_scope":"local","requests":[]}\n',
}
PACK = {
    "plain": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "two gzip members": lambda data: gzip.compress(data[:3]) + gzip.compress(data[3:]),
    "two zstd frames": lambda data: zstandard.compress(data[:3]) + zstandard.compress(data[3:]),
}
# So long and hard to compress that a cut falls inside the compressed stream.
LONG = b"".join(hashlib.blake2b(b"%d" % n).hexdigest().encode() + b"\n" for n in range(4_000))


class Listed(Workload):
    """A workload of the given requests."""

    name = "listed"
    key_tokens = 16
    digest = "00"

    def __init__(self, *requests):
        self.requests = requests

    def __iter__(self):
        """Yield the requests."""
        yield from self.requests


class Twin(Mooncake):
    """A format that recognises the files of Mooncake."""

    name = "twin"


def request(name, keys=(), arrival=0):
    """Return a request of block keys."""
    return keyed(name, keys, 16, more=1, arrival=arrival)


@pytest.fixture
def rows(tmp_path):
    """Return a function that writes the file `rows`, and returns its path."""

    def write(content):
        path = tmp_path / "rows"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.mark.parametrize("pack", PACK)
def test_lines_are_read_whatever_the_compression(rows, pack):
    """Compression is recognised by content, and a file may have several streams."""
    path = rows(PACK[pack](b"one\ntwo\n\nfour"))
    assert list(lines(path)) == [(1, b"one\n"), (2, b"two\n"), (4, b"four")]


@pytest.mark.parametrize("pack", PACK)
def test_lines_across_buffers_are_read_whole(rows, pack):
    """Lines across the borders of buffers are read whole."""
    path = rows(PACK[pack](LONG))
    assert b"".join(line for _, line in lines(path)) == LONG


@pytest.mark.parametrize(
    ("pack", "name"), [(gzip.compress, "gzip"), (zstandard.compress, "zstd")]
)
def test_cut_file_yields_lines_before_the_cut(tmp_path, pack, name):
    """A cut compressed file yields the lines before the cut, then raises InputError."""
    path = tmp_path / "rows"
    packed = pack(LONG)
    path.write_bytes(packed[: len(packed) // 2])
    read = []
    with pytest.raises(InputError) as caught:
        read.extend(number for number, _ in lines(path))
    assert len(read) > 1_000
    assert f"rows:{len(read) + 1}: the {name} stream stops early" in str(caught.value)


@pytest.mark.parametrize(
    ("pack", "name", "place"), [(gzip.compress, "gzip", -8), (zstandard.compress, "zstd", 5)]
)
def test_damaged_file_is_reported(tmp_path, pack, name, place):
    """Damaged compressed data raises InputError with file and line."""
    path = tmp_path / "rows"
    packed = bytearray(pack(LONG))
    packed[place] ^= 0xFF
    path.write_bytes(packed)
    with pytest.raises(InputError, match=rf"rows:\d+: the {name} stream is damaged: "):
        list(lines(path))


@pytest.mark.parametrize("content", [b"", b"\n \r\n", gzip.compress(b"", mtime=0)])
def test_empty_file_is_refused(rows, content):
    """A file with no line, or only blank ones, raises InputError."""
    path = rows(content)
    with pytest.raises(InputError, match="rows: the file is empty"):
        list(lines(path))


@pytest.mark.parametrize("use", [lambda path: list(lines(path)), file_digest])
def test_unreadable_file_is_named(tmp_path, use):
    """A missing file or a directory raises InputError with its path and the reason."""
    with pytest.raises(InputError, match="gone: cannot be read: No such file or directory"):
        use(tmp_path / "gone")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        use(tmp_path)


@pytest.mark.parametrize("cls", [Mooncake, Weka, Azure, Jsonl])
def test_every_format_reports_a_missing_file(tmp_path, cls):
    """Every format raises InputError with the path of a missing file."""
    with pytest.raises(InputError, match="gone: cannot be read"):
        list(cls(tmp_path / "gone"))


def test_digest_is_that_of_the_bytes(rows):
    """Without options the digest is the BLAKE2b of the file; options change it."""
    path = rows(b"one\n")
    assert file_digest(path) == hashlib.blake2b(b"one\n", digest_size=16).hexdigest()
    assert file_digest(path, seed=1) == file_digest(path, seed=1) != file_digest(path)


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("cls", FIRST_LINES)
def test_formats_are_recognised(rows, cls, pack):
    """Each format is recognised by its first line, whatever the compression."""
    path = rows(PACK[pack](FIRST_LINES[cls]))
    workload = recognise(path, BUILT_IN)
    assert type(workload) is cls
    assert workload.path == path


@pytest.mark.parametrize("line", [b"a,b,c\n", b"[1]\n", b'{"a":1}\n', b"\xfa\xfb\n"])
def test_unknown_format_lists_the_known_ones(rows, line):
    """An unknown format raises InputError with the known formats and the first line."""
    path = rows(line)
    with pytest.raises(
        InputError, match=r"(?s)formats:\n  azure      TIMESTAMP, .*\n  weka       id, block"
    ) as caught:
        recognise(path, BUILT_IN)
    assert repr(line.decode(errors="replace").rstrip()) in str(caught.value)
    assert "is not JSON" not in str(caught.value)


def test_a_first_line_that_is_almost_json_is_reported(rows):
    """A first line that begins like JSON but is invalid, as with NaN, is reported as such."""
    path = rows('{"id":"a","block_size":64,"requests":[{"t":NaN}]}\n')
    with pytest.raises(InputError, match=r"is not JSON: .* \(column \d+\); formats:\n  azure"):
        recognise(path, BUILT_IN)


@pytest.mark.parametrize("pack", PACK)
def test_a_byte_order_mark_is_skipped(rows, pack):
    """A byte order mark before the first line is skipped."""
    path = rows(PACK[pack](b"\xef\xbb\xbf" + FIRST_LINES[Azure]))
    assert list(lines(path)) == [(1, FIRST_LINES[Azure])]
    assert type(recognise(path, BUILT_IN)) is Azure


def test_a_broken_link_is_reported_with_its_target(tmp_path):
    """An error about a broken link names the link and its target."""
    link = tmp_path / "link"
    link.symlink_to("nowhere")
    with pytest.raises(InputError, match=r"link: cannot be read: .* it is a link to nowhere"):
        list(lines(link))


def test_keys_in_errors_are_hexadecimal_digits():
    """Errors show keys of bytes as hexadecimal digits."""
    one, two, three = (bytes([n]) * 16 for n in range(1, 4))
    twice = Listed(request("a", [one, two]), request("b", [three, two]))
    with pytest.raises(InputError, match=f"key {two.hex()} stands after key {three.hex()}"):
        list(checked(twice))


def test_an_ambiguous_format_is_refused(rows):
    """A file that two formats recognise raises InputError that names both."""
    path = rows(FIRST_LINES[Mooncake])
    with pytest.raises(InputError, match=r"mooncake and twin .* as in 'mooncake:path="):
        recognise(path, [Twin, *BUILT_IN])


def test_checked_reads_one_request_at_a_time():
    """`checked` yields a request before it reads the next one."""
    first = request("a", [1])
    assert next(checked(Listed(first, request("a")))) is first


@pytest.mark.parametrize(
    ("requests", "complaint"),
    [
        (
            [request(1, arrival=7), request(2, arrival=6)],
            "request 2: arrives at 6 ns, after .* 7",
        ),
        ([request(1, arrival=-1)], "request 1: arrives at -1 ns"),
        ([request("a"), request("b"), request("a")], "request 'a': an earlier request has the"),
        (
            [request(1, [7, 8]), request(2, [9, 8])],
            "request 2, number 2: key 8 stands after key 9, in an earlier request after key 7",
        ),
        (
            [request(1, [7, 8]), request(2, [8])],
            "request 2, number 2: key 8 stands at the start, in an earlier request after key 7",
        ),
        (
            [request(1, [8]), request(2, [7, 8])],
            "request 2, number 2: key 8 stands after key 7, in an earlier request at the start",
        ),
        (
            [request(1, [7, 7])],
            "request 1, number 1: key 7 stands after key 7, and also at the start",
        ),
        (
            [request(1, [5, [7], 6])],
            "request 1, number 1: a key cannot be looked up: .*unhashable",
        ),
    ],
)
def test_checked_refuses_invalid_requests(requests, complaint):
    """Decreasing arrivals, repeated ids and keys with two parents raise InputError."""
    with pytest.raises(InputError, match=f"workload listed: {complaint}"):
        list(checked(Listed(*requests)))


@pytest.mark.parametrize("written", ["rows", "./rows", "link", Path("rows")])
def test_writing_to_the_file_of_the_workload_is_refused(tmp_path, monkeypatch, written):
    """Writing to the workload's own file is refused, whatever path leads to it."""
    monkeypatch.chdir(tmp_path)
    Path("rows").touch()
    Path("link").symlink_to("rows")
    with pytest.raises(InputError, match=r"cannot write .*: the requests come from rows; name"):
        refuse_overwrite(written, Mooncake("rows").options().values())


def test_writing_is_refused_if_the_part_file_is_the_workload(tmp_path):
    """Writing is refused if `<path>.part` is the workload's own file."""
    part = tmp_path / "run.jsonl.part"
    part.touch()
    with pytest.raises(InputError, match=r"the requests come from .*run.jsonl.part"):
        refuse_overwrite(tmp_path / "run.jsonl", Jsonl(part).options().values())


def test_other_files_may_be_written(tmp_path):
    """Any file that the workload does not read may be written."""
    rows, other = tmp_path / "rows", tmp_path / "other"
    rows.touch()
    refuse_overwrite(other, Mooncake(rows).options().values())
    other.touch()
    refuse_overwrite(other, Mooncake(rows).options().values())
    refuse_overwrite(rows, Mooncake().options().values())
    refuse_overwrite(rows, Zipf().options().values())


class Generated(Workload):
    """A workload with a plain constructor and the default digest."""

    name = "generated"
    key_tokens = 16

    def __init__(self, requests: int = 3, path: Path | None = None) -> None:
        """Store the options."""
        self.requests = requests
        self.path = path

    def __iter__(self):
        """Yield nothing."""
        return iter(())


def test_the_default_digest_depends_on_the_options(tmp_path):
    """The default digest depends on the options, and on the content of files they name."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a")
    two.write_text("a")
    assert Generated(3).digest == Generated(3).digest != Generated(4).digest
    assert Generated(path=one).digest == Generated(path=two).digest
    two.write_text("b")
    assert Generated(path=one).digest != Generated(path=two).digest


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        (b'{"timestamp":0,"input_length":1,"output_length":1}', "mooncake: it lacks hash_ids;"),
        (b'{"id":1,"t":0,"prompt":40,"output":8}', "jsonl: it lacks event;"),
        (b"TIMESTAMP,ContextTokens,Generated", "azure: it lacks GeneratedTokens;"),
        (b'{"messages":"hello"}', "chat: a field is of another type;"),
        (b"time,prompt,completion", "chat: its lines are JSON objects;"),
    ],
)
def test_a_near_miss_of_a_format_is_named(rows, line, hint):
    """The error for a file that is nearly of a format names what it lacks."""
    formats = [Chat, *BUILT_IN] if "chat" in hint else BUILT_IN
    with pytest.raises(InputError, match=f"; nearly {hint} formats:"):
        recognise(rows(line), formats)


def test_a_single_common_field_is_no_near_miss(rows):
    """A single field in common with a format is no near miss."""
    path = rows(b'{"event":"start","name":"x"}')
    with pytest.raises(InputError) as caught:
        recognise(path, BUILT_IN)
    assert "nearly" not in str(caught.value)


ELEMENTS = [b'{"a": "]}, {\\" \xc3\xa9"}', b"{}", b'{\n  "b": [[1], {"c": null}]\n}']
ARRAY = b" [\n" + b" ,\n".join(ELEMENTS) + b"\n]\n"


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("chunk", [5, 1 << 16])
def test_elements_of_a_json_array_are_lines(rows, monkeypatch, pack, chunk):
    """The elements of a JSON array are read one at a time, wherever buffers end."""
    monkeypatch.setattr("kvcore.files.CHUNK_BYTES", chunk)
    monkeypatch.setattr("kvcore.workloads.files.CHUNK_BYTES", chunk)
    path = rows(PACK[pack](ARRAY))
    assert list(lines(path)) == [*enumerate(ELEMENTS, 1)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'[{"a":1},', "rows:2: the JSON array stops early"),
        (b'[{"a":1} {"b":2}]', "rows:2: commas at this place of the JSON array: 0; expected 1"),
        (
            b'[{"a":1},,{"b":2}]',
            "rows:2: commas at this place of the JSON array: 2; expected 1",
        ),
        (b'[{"a":1},]', "rows:2: commas at this place of the JSON array: 1; expected 0"),
        (b'[{"a":1}]\n{"b":2}', "rows:2: other text follows the JSON array"),
    ],
)
def test_a_damaged_array_is_refused(rows, content, complaint):
    """A JSON array that is cut, continues or lacks a comma raises InputError.

    Its elements before the damage are yielded.
    """
    path = rows(content)
    source = lines(path)
    assert next(source) == (1, b'{"a":1}')
    with pytest.raises(InputError, match=complaint):
        next(source)


@pytest.mark.parametrize("content", [b"{%s}", b"[{%s}]", b"{\n%s}"])
def test_a_row_of_too_many_values_is_refused(rows, content):
    """A row takes no more memory than a line may, be it an element of an array or an object."""
    path = rows(content % (b'"a":[' + b"1," * 1_100_000 + b"1]"))
    with pytest.raises(InputError, match="rows:1: the line has 1,100,002 values"):
        list(lines(path))


@pytest.mark.parametrize(
    ("content", "rest"), [(b'[{"a":1}, {"b": nope]', b'{"b": nope]'), (b'{\n"a":1}\n]', b"]")]
)
def test_an_invalid_element_is_yielded_unchanged(rows, content, rest):
    """Text that is no element of an array or of indented JSON is yielded unchanged."""
    assert [line for _, line in lines(rows(content))][1:] == [rest]


def test_a_file_nested_too_deep_is_of_no_known_format(tmp_path):
    """A file with an element nested too deep is of no known format."""
    path = tmp_path / "rows"
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    path.write_bytes(b"[" + deep + b"]")
    with pytest.raises(InputError, match="no known workload format"):
        recognise(path, BUILT_IN)


def test_a_chained_key_depends_on_all_hashes_before():
    """A chained key depends on all hashes before it, and differs between text and numbers."""
    assert chain_keys([7, 8])[1] == chain_keys([7, 8, 9])[1] != chain_keys([6, 8])[1]
    assert chain_keys([1]) != chain_keys(["1"])
    hashes = [[1, 2], [3, 2], [2, 2]]
    chained = (request(n, chain_keys(each)) for n, each in enumerate(hashes))
    assert len(list(checked(Listed(*chained)))) == 3


def test_a_workload_may_be_a_class_in_a_file(tmp_path):
    """`my.py:Class:option=value` names a class in a file, and `my.py` the only one there."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from kvcore import Request, Workload\n"
        "class Mine(Workload):\n"
        "    name, key_tokens = 'mine', 16\n"
        "    def __init__(self, key: int = 1):\n"
        "        self.key = key\n"
        "    def __iter__(self):\n"
        "        tokens = dict(prompt_tokens=16, output_tokens=1, key_tokens=16)\n"
        "        yield Request(id=0, arrival=0, keys=[self.key], **tokens)\n"
    )
    for text, key in ((f"{path}:Mine:key=7", 7), (str(path), 1)):
        assert [list(request.keys) for request in find_workload(text, Plugins())] == [[key]]


MOONCAKE = b'{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}\n'
AZURE = FIRST_LINES[Azure] + b"2024-05-10 00:00:00.0,8,1\n"
AGAIN = {
    "iteration": list,
    "digest": lambda workload: workload.digest,
    "copy": lambda workload: list(copy(workload)),
}


@pytest.mark.parametrize(("cls", "content"), [(Azure, AZURE), (Mooncake, MOONCAKE)])
@pytest.mark.parametrize("again", AGAIN)
def test_a_file_that_has_grown_since_it_was_read_is_refused(rows, cls, content, again):
    """A workload is that of one state of its file, also as a copy."""
    path = rows(content)
    workload = cls(path)
    assert len(list(workload)) == 1
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(InputError, match="rows: the file has changed since it was first read"):
        AGAIN[again](workload)


def test_a_file_that_grows_while_it_is_read_again_yields_no_more_requests(rows):
    """The error of a file that has changed comes before a request that was not there before."""
    path = rows(MOONCAKE)
    workload = Mooncake(path)
    list(workload)
    requests = iter(workload)
    with path.open("ab") as file:
        file.write(MOONCAKE)
    with pytest.raises(InputError, match="the file has changed since it was first read"):
        list(zip(requests, [1], strict=True))
