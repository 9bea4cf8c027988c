"""Traces without names: what is hashed, and that they stay traces of the same run."""

import pytest
from helpers.commands import run_here
from helpers.requests import keyed
from helpers.traces import lines, seal, serve_tiers
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from kvcore.errors import InputError
from kvcore_plugins.traces.keyed import KeyedNames
from kvcore_plugins.workload.recorded import TraceWorkload
from kvcore_replay.anonymise import KEYS, NAMES, anonymise
from kvcore_replay.check.trace import check_trace

SECRETS = {"salt": "TOP-SECRET", "tenant": "Alice GmbH", "session": "alice@example.org"}


@pytest.fixture
def trace(tmp_path):
    """Return the path of the trace of a run with tiers, whose requests have names."""
    path = serve_tiers(tmp_path / "day.jsonl")
    found = lines(path)
    known = {line["id"] for line in found if line["event"] == "REQUEST"}
    for line in found:
        if line["event"] == "REQUEST":
            line.update(SECRETS, tool="search of Alice", id=f"alice-{line['id']}")
        for field in ("request", "for"):
            if line.get(field) in known:
                line[field] = f"alice-{line[field]}"
    return seal(path, found)


def keys_of(path):
    """Return all keys of blocks in a trace, in order."""
    return [key for line in lines(path) for name in KEYS for key in line.get(name, [])]


def test_no_name_is_left(trace, tmp_path):
    """Names, ids and keys of the trace are not in the anonymised one."""
    out = tmp_path / "shared.jsonl"
    assert anonymise(trace, out, KeyedNames()) == len(out.read_text().splitlines())
    text = out.read_text()
    for name in (*SECRETS.values(), "alice", "Alice", "search"):
        assert name in trace.read_text()
        assert name not in text
    assert not set(keys_of(trace)) & set(keys_of(out))
    assert lines(out)[0]["workload"] is None


def test_the_run_stays_the_same(trace, tmp_path):
    """Times, lengths and decisions stay, and the check of the trace accepts them."""
    out = tmp_path / "shared.jsonl.gz"
    anonymise(trace, out, KeyedNames())
    assert check_trace(out).complete
    gone = {*NAMES, *KEYS, "id", "request", "for", "after", "workload", "digest", "anonymised"}
    plain, shared = (
        [{name: value for name, value in line.items() if name not in gone} for line in found]
        for found in (lines(trace), lines(out))
    )
    assert plain == shared


@pytest.mark.parametrize(
    ("eviction", "options", "said"),
    [
        ("random", {}, "It differs all the same: its names are hashes"),
        ("lru", {}, ""),
        ("lru", {"eviction": "fifo"}, "run it again as recorded to see"),
    ],
    ids=["draws", "as before", "another policy"],
)
def test_a_what_if_says_where_hashes_of_names_may_decide(tmp_path, eviction, options, said):
    """A note tells where plugins may draw otherwise, from the hashes of ids of requests."""
    run, out = tmp_path / "run.jsonl", tmp_path / "shared.jsonl"
    requests = [
        keyed(f"alice-{index}", [index % 7 * 10 + key for key in range(8)], arrival=index)
        for index in range(60)
    ]
    kvcore.simulate(requests, eviction=eviction, blocks=24, block_size=4, trace=run)
    anonymise(run, out, KeyedNames(bytes(range(32))))
    for trace, note in ((run, ""), (out, said)):
        shown = " ".join(str(kvcore.whatif(trace, **options)).split())
        assert note in shown
        assert bool(note) == ("names are hashes" in shown)


def test_equal_names_stay_equal(trace, tmp_path):
    """Keys that differ in the trace differ in the anonymised one, and equal keys are equal."""
    out = tmp_path / "shared.jsonl"
    anonymise(trace, out, KeyedNames())
    before, after = list(TraceWorkload(trace)), list(TraceWorkload(out))
    numbers = {}
    for one, two in zip(before, after, strict=True):
        for a, b in zip(one.keys, two.keys, strict=True):
            assert numbers.setdefault(a, b) == b
    assert len(set(numbers.values())) == len(numbers)


def test_a_key_in_a_file_gives_the_same_hashes_again(trace, tmp_path):
    """With one key two traces have equal hashes; with a drawn one none does."""
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    outs = [tmp_path / f"{index}.jsonl" for index in range(4)]
    given = (["--key", key], ["--key", key], [], [])
    for out, more in zip(outs, given, strict=True):
        done = run_here("export", trace, "--anonymise", "--out", out, *more)
        assert (done.returncode, done.stderr) == (0, "")
    assert outs[0].read_bytes() == outs[1].read_bytes()
    assert len({out.read_bytes() for out in outs}) == 3
    assert all(bytes(range(32)).hex() not in out.read_text() for out in outs)


@pytest.mark.parametrize(
    "words",
    [
        ["--anonymise"],
        ["--anonymise", "--to", "vllm", "--out", "a"],
        ["--anonymise", "--replica", "0", "--out", "a"],
        ["--to", "mooncake", "--key", "key", "--out", "a"],
    ],
)
def test_options_that_do_not_belong_together_are_refused(trace, tmp_path, words):
    """The error says which options belong together, and nothing is written."""
    (tmp_path / "key").write_bytes(bytes(32))
    done = run_here("export", trace, *words, cwd=tmp_path)
    assert done.returncode == 2
    assert "--anonymise" in done.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"short", "5 bytes can be guessed"),
        (bytes(2**20 + 1), "at most 1 MiB"),
        (None, "No"),
    ],
)
def test_a_key_that_can_be_guessed_is_refused(tmp_path, data, why):
    """A file without a key, or with a short or an endless one, is refused by name."""
    path = tmp_path / "key"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match=f"{path}: .*{why}"):
        KeyedNames.from_file(path)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**63 - 1))
def test_a_key_has_one_hash_in_each_form(key, number):
    """A key as bytes and as hex digits is one key; an integer is another one."""
    keyed = KeyedNames()
    left, right, third = keyed.keys([key, key.hex(), number])
    assert left == right != third
    assert left != key
