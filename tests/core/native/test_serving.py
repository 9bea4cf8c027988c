"""The core in C decides what the loop in Python decides, and hands over to it at any turn."""

import gc
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
from helpers.native import core, examples, left_by, needs_core, random_server
from helpers.requests import keyed
from hypothesis import given
from hypothesis import strategies as st

from kvcore import (
    InputError,
    KVCache,
    LatencyModel,
    PolicyError,
    Request,
    Rules,
    Scheduler,
)
from kvcore.serving import Batching, simulate
from kvcore.serving import native as serving
from kvcore.serving.loop import ServingLoop
from kvcore_plugins.eviction import LRU
from kvcore_plugins.rules import VLLM, SGLang

pytestmark = needs_core


def in_python(serve):
    """Return what a run leaves without the core."""
    with core(used=False):
        return left_by(serve)


@examples
@given(st.integers(0, 2**32))
def test_both_cores_leave_the_same(seed):
    """A run by the core leaves the records, counts and spans of one in Python."""
    serve = random_server(seed)
    with core():
        assert left_by(serve) == in_python(serve)


@examples
@given(st.integers(0, 2**32), st.integers(0, 300))
def test_a_run_goes_on_in_python_at_any_turn(seed, turns):
    """A run that the core begins and Python ends leaves the same as one in Python."""
    serve = random_server(seed)
    with core(turns=turns):
        assert left_by(serve) == in_python(serve)


@examples
@given(st.integers(0, 2**32))
def test_python_serves_requests_that_need_more(seed):
    """Where a request has hints, the run goes on in Python, and leaves the same."""
    serve = random_server(seed, hints=True)
    with core():
        assert left_by(serve) == in_python(serve)


def test_a_plain_run_is_served_by_the_core(monkeypatch):
    """`simulate` with its defaults runs no turn of the loop in Python but an empty last one."""
    turns = Counter()
    begin = ServingLoop.begin
    monkeypatch.setattr(
        ServingLoop, "begin", lambda loop: turns.update(["begin"]) or begin(loop)
    )
    requests = [
        Request(id=n, prompt_tokens=100, output_tokens=5, key_tokens=16) for n in range(9)
    ]
    with core():
        result = simulate(requests, cache=KVCache(100, 16))
    assert len(result.log.ids) == len(requests)
    assert turns["begin"] == 1


class Own(Rules):
    """Preempts the job that arrived last."""

    name = "own"

    def victim(self, jobs, state, requester):
        """Return the job that arrived last."""
        return max(jobs, key=lambda job: job.serial)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"latency": "roofline:model=gpt-oss-20b"}, "attention windows"),
        ({"latency": "roofline:frontend=0.1"}, ""),
        ({"batching": Batching(rules=VLLM())}, ""),
        ({"batching": Batching(rules=SGLang())}, "rules by future tokens"),
        ({"batching": Batching(rules=Own())}, "rules that decide by methods of their own"),
        ({"drafter": "acceptance"}, "a SpeculativeSimulator"),
        ({"scheduler": "srpt"}, "a scheduler that pauses or plans"),
        ({"jumps": False}, "single steps"),
        ({"rate_scale": 2.0**62}, ""),
        ({"rate_scale": 1e-18}, ""),
        ({"rate_scale": 2.0**64}, "a scale of the rate with many digits"),
        ({"rate_scale": 1e-19}, "a scale of the rate with many digits"),
    ],
)
def test_what_the_core_lacks_is_served_in_python(options, reason, monkeypatch):
    """A loop that the core does not run says why."""
    reasons = []
    monkeypatch.setattr(
        serving,
        "run",
        lambda loop: reasons.append((serving.reason(loop), serving.serves(loop))),
    )
    request = Request(id=0, prompt_tokens=100, output_tokens=5, key_tokens=16)
    simulate([request], cache=KVCache(100, 16), **options)
    assert reasons == [(reason, not reason)]


class Steep(LatencyModel):
    """A latency model whose steps take 1 ns, and more by the context of those that decode."""

    name = "steep"

    def __init__(self, *lines):
        """Store the lines of the picoseconds in the context."""
        self.lines = lines

    def pieces(self, *_):
        """Return the lines."""
        return self.lines


@pytest.mark.parametrize("count", [8, 9])
def test_a_time_of_many_lines_is_what_python_computes(count):
    """Steps whose time is the highest of many lines take as long as in Python."""
    latency = partial(Steep, *((9000 - 20 * n * n, 99 * n) for n in range(count)))
    request = Request(id=0, prompt_tokens=9, output_tokens=90, key_tokens=16)
    ends = []
    for used in (True, False):
        with core(used=used):
            run = simulate([request], cache=KVCache(9, 16), latency=latency())
            ends.append(run.log.finish[0])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("line", [(1000, 1 << 63), (1 << 64, 1), (10**40, 0)])
@pytest.mark.parametrize("rules", [None, VLLM()])
def test_a_time_with_many_digits_is_refused_in_the_same_words(line, rules):
    """A decode step that takes too long is an error with the time that Python computes."""
    requests = [
        Request(id=n, prompt_tokens=2000, output_tokens=99, key_tokens=16) for n in range(3)
    ]

    def serve():
        with pytest.raises(InputError, match="by latency model 'steep'") as caught:
            simulate(
                requests, cache=KVCache(900, 16), latency=Steep(line),
                batching=Batching(rules=rules),
            )  # fmt: skip
        return str(caught.value)

    with core():
        found = serve()
    with core(used=False):
        assert found == serve()


class ByBlocks(Scheduler):
    """Orders jobs by what a job of Python alone says: its blocks, and its tokens so far."""

    name = "by-blocks"

    def priority(self, job, now):
        """Return the blocks that it holds, and the tokens that it has."""
        held = 0 if job.seq is None else job.seq.blocks - job.seq.hit_blocks
        return held, job.generated, job.length, job.stage, job.recomputes


def test_a_scheduler_sees_whole_jobs():
    """A scheduler that reads the blocks of running jobs preempts the same ones."""

    def serve():
        requests = [
            Request(id=n, prompt_tokens=50 + n, output_tokens=90, keys=[n % 3], key_tokens=16)
            for n in range(30)
        ]
        return simulate(requests, cache=KVCache(30, 16), scheduler=ByBlocks())

    with core():
        left = left_by(serve)
    assert any(left["columns"]["recomputes"])
    assert left == in_python(serve)


class Level(Scheduler):
    """A scheduler to which all jobs are equal."""

    name = "level"

    def priority(self, job, now):
        """Return one number."""
        return 0


@pytest.mark.parametrize(("ties", "victim"), [("last", 1), ("first", 0)])
def test_ties_selects_which_of_two_equal_jobs_the_core_preempts(ties, victim):
    """Of two equal jobs, the core takes the blocks of the one that `ties` selects."""
    requests = [
        Request(id=n, prompt_tokens=16, output_tokens=90, key_tokens=16) for n in range(2)
    ]
    options = {"scheduler": Level(), "batching": Batching(rules=Rules(ties=ties))}
    with core():
        log = simulate(requests, cache=KVCache(8, 16), **options).log
    assert {log.ids[row] for row in range(2) if log.recomputes[row]} == {victim}


HOOKS = "on_insert", "on_access", "on_split", "on_pin", "on_release", "on_remove", "on_trim"


def wrong_run(method, call, act):
    """Serve a workload under pressure with a policy that does something wrong."""
    policy = type(
        "Wrong", (LRU,), {"name": "wrong", method: _once(getattr(LRU, method), call, act)}
    )()
    cache = KVCache(40, 16, eviction=policy, key_tokens=16)
    paths = [[*range(n % 7), *range(100 * n, 100 * n + n % 5 + 1)] for n in range(60)]
    requests = [keyed(n, path, 16, more=3, output_tokens=40) for n, path in enumerate(paths)]
    return simulate(requests, cache=cache)


def _once(method, call, act):
    calls = Counter()

    def wrong(self, *arguments):
        calls["all"] += 1
        return act(self, *arguments) if calls["all"] == call else method(self, *arguments)

    return wrong


def fails(*_):
    """Raise an error."""
    msg = "no idea"
    raise ValueError(msg)


def interrupts(*_):
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("method", [*HOOKS, "victim"])
@pytest.mark.parametrize("call", [1, 5])
def test_a_policy_that_raises_ends_the_run_in_the_same_words(method, call):
    """The error of a run by the core is that of a run in Python, at each call of a policy."""
    with core(used=False):
        expected = left_by(partial(wrong_run, method, call, fails))
    with core():
        assert left_by(partial(wrong_run, method, call, fails)) == expected
    assert "no idea" in expected[1]


@pytest.mark.parametrize("slot", ["parent", "children", "path_keys", "start", "end"])
@pytest.mark.parametrize("value", [None, -(10**9), "deleted"])
@pytest.mark.parametrize("method", ["on_insert", "on_access", "on_release", "on_trim"])
def test_what_a_policy_writes_into_a_span_is_never_read_as_something_else(method, slot, value):
    """A policy that breaks the tree ends the run with an error, or not; never the process."""

    def writes(*call):
        if value == "deleted":
            delattr(call[1], slot)
        else:
            setattr(call[1], slot, value)

    with core(), suppress(Exception):
        wrong_run(method, 3, writes)


def test_a_policy_that_cuts_the_tree_is_told_so():
    """A span without a parent ends the run with an error that names the policy."""

    def cuts(*call):
        call[1].parent = None

    with core(), pytest.raises(PolicyError, match=r"'wrong' .* answered `parent` of a span"):
        wrong_run("on_release", 3, cuts)


@pytest.mark.parametrize("method", HOOKS)
def test_a_method_that_cannot_be_called_is_an_error_of_its_policy(method):
    """A method that takes other arguments is named, although no line of it has run."""
    policy = type("Short", (LRU,), {"name": "short", method: lambda _: None})()
    path = [*range(9)]
    requests = [keyed(n, [*path[: n + 1], 100 + n], 16, output_tokens=40) for n in range(9)]
    with core(), pytest.raises(PolicyError, match=rf"'short' .* TypeError in {method}\(\)"):
        simulate(requests, cache=KVCache(14, 16, eviction=policy, key_tokens=16))


@pytest.mark.parametrize(
    "answer",
    [
        lambda *_: None,
        lambda *_: 7,
        lambda *_: (1, 2),
        lambda policy, _: (next(iter(policy._order)),),
        lambda policy, _: next(iter(policy._order)).parent,
        lambda policy, _: next(reversed(policy._order)),
    ],
    ids=["none", "number", "tuple", "span in a tuple", "parent", "newest"],
)
def test_a_wrong_victim_is_refused_in_the_same_words(answer):
    """A victim that is no unpinned leaf ends the run with the error that Python gives."""
    with core(used=False):
        expected = left_by(partial(wrong_run, "victim", 3, answer))
    with core():
        assert left_by(partial(wrong_run, "victim", 3, answer)) == expected


def test_ctrl_c_ends_a_run():
    """KeyboardInterrupt of a callback comes through as it is."""
    with core(), pytest.raises(KeyboardInterrupt):
        wrong_run("on_release", 5, interrupts)


def test_nothing_is_kept_after_a_run():
    """The objects of a run are free once it has ended, as well if it failed."""

    def objects():
        gc.collect()
        return Counter(type(each).__name__ for each in gc.get_objects())

    def runs():
        for seed in range(6):
            left_by(random_server(seed))
            left_by(partial(wrong_run, "victim", seed, fails))

    with core():
        runs()
        before = objects()
        runs()
        after = objects()
    kept = {name: after[name] - before[name] for name in ("Span", "Request", "Job", "list")}
    assert max(kept.values()) <= 2, kept
