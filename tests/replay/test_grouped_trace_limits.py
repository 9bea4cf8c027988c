"""Limits of a hostile trace of cache groups: it takes neither long nor much memory."""

import pytest
from helpers.requests import keyed
from helpers.traces import lines, seal

from kvcore import Trace, TraceError
from kvcore.serving import Batching, simulate
from kvcore_plugins.cache_groups import GroupedCache, LayerGroup
from kvcore_replay.check.trace import check_trace
from kvcore_replay.misses.explain import explain
from kvcore_tiers.grouped import GroupTiers

HUGE = 2**61


@pytest.fixture
def recorded(tmp_path):
    """Return the path of a small trace of cache groups above a tier, and its lines."""
    path = tmp_path / "trace.jsonl"
    groups = [LayerGroup("window", 4, 9), LayerGroup("state", 4)]
    with Trace(path) as trace:
        cache = GroupedCache(groups, 40, key_tokens=4, trace=trace)
        GroupTiers(cache, ["host:memory=99,write=through,load=never"], 1)
        for name in range(3):
            keys = [1, 2, 3, 10 + name]
            cache.compute(keyed(name, keys, more=1), 8)
    return path, lines(path)


def changed(recorded, change):
    """Write the trace with `change` applied to its lines; return the path."""
    path, found = recorded
    change(found)
    return seal(path, found)


def coarse_keys(found):
    """Make a key stand for so many blocks that their positions cannot be counted."""
    found[0]["key_tokens"] = HUGE
    for line in found:
        if line["event"] == "REQUEST":
            line |= {"key_tokens": HUGE, "prompt": 2**62}


def far_state(found):
    """Put the first state at a position that no list of blocks could have."""
    line = next(each for each in found if each["event"] == "ALLOC" and each["group"] == 1)
    line["first"] = HUGE


def many_groups(found):
    """Give the header more groups than a model has."""
    groups = found[0]["cache_groups"]["groups"]
    found[0]["cache_groups"]["groups"] = groups * 1000


def sizes_apart(found):
    """Give a group blocks that do not divide those of the header."""
    found[0]["cache_groups"]["groups"][0]["block_size"] = HUGE + 1


def no_group(found):
    """Name a group that the header does not have."""
    next(each for each in found if each["event"] == "ALLOC")["group"] = 2


def twice(found):
    """Allocate a block that is in use to another group."""
    first, second, *_ = (each for each in found if each["event"] == "ALLOC")
    second["runs"] = [[first["runs"][0][0], 1]]


def no_first(found):
    """Let a window pass blocks, and do not say where it begins."""
    del next(each for each in found if each.get("reason") == "passed")["first"]


def many_names(found):
    """Give more blocks names than the sequence has."""
    next(each for each in found if each["event"] == "COMMIT")["blocks"] = 2**40


def windowless(found):
    """Take the window from a group that has one."""
    found[0]["cache_groups"]["groups"][0]["window"] = None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (coarse_keys, "name 2,101,248 blocks: too many"),
        (far_state, "group 1 \\(state\\): 3 is not next"),
        (many_groups, "cache groups; the most is 64"),
        (sizes_apart, "blocks of groups have"),
        (no_group, "no group 2"),
        (many_names, "COMMIT: request 0 has names for 4 blocks"),
        (twice, "the pool gives"),
        (windowless, "a window or a chunk, and no other kind, has a window"),
    ],
)
def test_a_hostile_trace_is_refused(recorded, change, problem):
    """A trace whose numbers no run has is refused at its line, by the check at once."""
    path = changed(recorded, change)
    with pytest.raises(TraceError, match=problem):
        check_trace(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (coarse_keys, "name 2,101,248 blocks: too many"),
        (far_state, "FREE: it does not fit the lines before it"),
        (twice, "FREE: it does not fit the lines before it"),
        (no_first, "FREE: what has passed is of no group, or has no first block after it"),
    ],
)
def test_what_trusts_a_trace_ends_too(recorded, change, problem):
    """A reader that trusts the file refuses it at once, at the line that it cannot follow."""
    path = changed(recorded, change)
    with pytest.raises(TraceError, match=problem):
        explain(path)


def test_a_load_of_a_long_prompt_is_no_hostile_one(tmp_path):
    """The check of a load counts steps by the blocks of its prompt, not by their square."""
    path, blocks = tmp_path / "trace.jsonl", 3000
    first, other = ([part * blocks + index for index in range(blocks)] for part in (0, 1))
    half = [*first[: blocks // 2], *range(2 * blocks, 2 * blocks + blocks // 2)]
    with Trace(path) as trace:
        cache = GroupedCache([LayerGroup("full", 4)], blocks + 9, key_tokens=4, trace=trace)
        GroupTiers(cache, [f"host:memory={2 * blocks},load=always"], 1)
        requests = [
            keyed(name, keys, more=1, output_tokens=1, arrival=name)
            for name, keys in enumerate((first, other, half))
        ]
        simulate(requests, cache=cache, batching=Batching(max_seqs=1))
    assert check_trace(path).tiers[0]["loaded_blocks"] > blocks // 3


def test_long_prompts_are_no_hostile_ones(tmp_path, monkeypatch):
    """The keys of requests, which take room in the file, allow the steps that they cost."""
    path, keys = tmp_path / "trace.jsonl", [*range(400)]
    with Trace(path) as trace:
        cache = GroupedCache([LayerGroup("full", 4)], 900, key_tokens=4, trace=trace)
        for name in range(5):
            cache.compute(keyed(name, keys, more=1), 400)
    monkeypatch.setattr("kvcore_replay.state.groups.WORK", 0)
    monkeypatch.setattr("kvcore_replay.state.groups.WORK_OF_LINE", 10)
    assert check_trace(path).hit["hit_blocks"] == 1600
