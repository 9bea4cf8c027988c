"""A policy that fails: the error names it, and the cache is as if the call had not been."""

from contextlib import suppress
from random import Random

import attrs
import pytest

from kvcore import KVCache, PolicyError, Request, ScoreEviction, Trace
from kvcore.testing import EVEN, FORKS, Driver, Traffic, random_steps, snapshot
from kvcore.trace import check_trace
from kvcore_plugins.prefix import Radix

BLOCK = 4
NAME = r"eviction plugin 'failing' \(.*\.Failing\)"
TOLD = [
    "on_insert", "on_access", "on_extend", "on_split", "on_pin", "on_release",
    "on_leaf", "on_trim", "on_remove", "on_miss",
]  # fmt: skip


@attrs.define(slots=False, eq=False)
class Failing(ScoreEviction):
    """Least recently used, as long as `fails`, called after each method, does not raise."""

    name = "failing"

    fails = attrs.field(default=lambda _method: None)
    answer = attrs.field(default=None)

    def score(self, span, _now):
        """Return when it was last released."""
        return span.released_order

    def victim(self, now):
        """Fail, answer as told, or answer well."""
        self.fails("victim")
        return super().victim(now) if self.answer is None else self.answer()


def _failing_after(method):
    def told(self, *args):
        getattr(super(Failing, self), method)(*args)
        self.fails(method)

    return told


for _method in TOLD:
    setattr(Failing, _method, _failing_after(_method))


def fail_in(*methods):
    """Return what makes a policy raise in `methods`."""

    def fails(method):
        if method in methods:
            msg = f"no luck in {method}"
            raise RuntimeError(msg)

    return fails


def ask(keys, **fields):
    """Return a request with a block for each letter of `keys`; its id is `keys`."""
    chain = [keys[: end + 1] for end in range(len(keys))]
    fields = {"prompt_tokens": len(keys) * BLOCK} | fields
    return Request(id=keys, keys=chain, key_tokens=BLOCK, **fields)


def make(blocks):
    """Make a cache that counts keys, of a policy that does not fail yet."""
    return KVCache(blocks, BLOCK, eviction=Failing(), prefix=Radix(), count="keys", ids=True)


def serve(cache, keys):
    """Open, commit and close a request."""
    seq = cache.open(ask(keys))
    cache.commit(seq, seq.tokens - seq.computed)
    cache.close(seq)


def full():
    """Return a full cache of 8 blocks: ab, below it cd and e, and apart from it xyz."""
    cache = make(8)
    for keys in ("abcd", "abe", "xyz"):
        serve(cache, keys)
    assert cache.pool.free == 0
    return cache


def spans(cache):
    """Return the spans by their last key."""
    return {span.keys()[-1]: span for span in cache.prefix.spans()}


def blocks(cache):
    """Return what is known of each cached block, by key and position."""
    ratio = cache.geometry.ratio
    return {
        (span.path_keys[position // ratio], position): (
            None if span.ids is None else span.ids[position - span.start],
            *(getattr(span, name) for name in HISTORY),
        )
        for span in cache.prefix.spans()
        for position in range(span.start, span.end)
    }


HISTORY = (
    "created_order",
    "last_hit_order",
    "last_request",
    "last_access",
    "hit_count",
    "released_order",
    "priority",
    "ref_count",
)


def rest(cache):
    """Return the rest of the state: sequences and statistics."""
    return snapshot(cache)[3:]


def assert_only_evicted(cache, before):
    """Check that nothing has changed since but evictions, whose blocks are free."""
    cache.check_integrity()
    known, others, free = before
    left = blocks(cache)
    assert left.items() <= known.items()
    assert rest(cache) == others
    assert cache.pool.free == free + len(known) - len(left)


def state(cache):
    """Return what `assert_only_evicted` compares with."""
    return blocks(cache), rest(cache), cache.pool.free


@pytest.mark.parametrize(
    ("method", "keys", "evicted"),
    [
        ("on_split", "abc!", 0),
        ("on_pin", "abcd!", 0),
        ("victim", "abcd!", 0),
        ("on_trim", "ab!", 1),
        ("on_remove", "ab!!", 2),
        ("on_leaf", "!!!!!!", 3),
        ("on_miss", "abc!!", 0),
        ("on_access", "abc!", 1),
    ],
)
def test_raising_in_open(method, keys, evicted):
    """Nobody is admitted, and nothing is different but the evictions already made."""
    cache = full()
    before = state(cache)
    parts = len(spans(cache))
    cache.eviction.fails = fail_in(method)
    with pytest.raises(PolicyError, match=rf"{NAME} raised RuntimeError in {method}\(\): no"):
        cache.open(ask(keys))
    assert_only_evicted(cache, before)
    assert cache.prefix.evicted == evicted
    assert not cache.sequences
    assert len(spans(cache)) <= parts, "what was split is joined again"


@pytest.mark.parametrize("method", ["on_insert", "on_extend", "on_split", "on_pin"])
def test_raising_in_commit(method):
    """The blocks are shared all the same, and the sequence goes on."""
    cache = make(12)
    first, second = (cache.open(ask(keys)) for keys in ("abcd", "abx"))
    cache.commit(first, BLOCK)
    if method in {"on_split", "on_pin"}:
        cache.commit(first, (1 if method == "on_pin" else 2) * BLOCK)
        cache.close(first)
    seq = first if method == "on_extend" else second
    cache.eviction.fails = fail_in(method)
    with pytest.raises(PolicyError, match=rf"{NAME} raised RuntimeError in {method}"):
        cache.commit(seq, 2 * BLOCK if method != "on_insert" else 3 * BLOCK)
    cache.check_integrity()
    cache.eviction.fails = fail_in()
    cache.commit(seq, seq.tokens - seq.computed)
    assert seq.private_blocks == 0
    cache.close(seq)
    cache.check_integrity()


def test_raising_in_close():
    """The sequence is closed, and everything it held is released."""
    cache = full()
    seq = cache.open(ask("abcd"))
    cache.eviction.fails = fail_in("on_release")
    with pytest.raises(PolicyError, match=f"{NAME} raised RuntimeError in on_release"):
        cache.close(seq)
    cache.check_integrity()
    assert not cache.sequences
    assert cache.prefix.unpinned == cache.prefix.cached == 8


def test_raising_while_it_is_told_of_an_undo():
    """A policy that fails again when a split is joined hides nothing of the first failure."""
    cache = full()
    before = state(cache)
    cache.eviction.fails = fail_in("on_access", "joined", "on_release")
    with pytest.raises(PolicyError, match="in on_access"):
        cache.open(ask("abc"))
    assert_only_evicted(cache, before)


def pinned(cache):
    """Return a span that an open sequence holds."""
    cache.open(ask("xyz"))
    return spans(cache)["xyz"]


def inner(cache):
    """Return a span with children."""
    return spans(cache)["ab"]


def foreign(_cache):
    """Return a span of another cache."""
    return spans(full())["abcd"]


def removed(cache):
    """Return a span that has been evicted."""
    span = spans(cache)["abcd"]
    cache.open(ask("!!"))
    assert span.parent is None
    return span


def root(cache):
    """Return the empty span above all others."""
    return cache.prefix.root


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (pinned, "which is pinned"),
        (inner, "which has children: only leaves can go"),
        (foreign, "of another cache"),
        (removed, "which has left the cache"),
        (root, "which"),
        (lambda _: "abcd", "'abcd', which is no span"),
        (lambda _: None, "None, which is no span"),
    ],
)
@pytest.mark.parametrize("call", ["open", "extend"])
def test_wrong_victims(answer, fault, call):
    """The error says what is wrong with the answer; the caller has got nothing."""
    cache = full()
    if call == "extend":
        seq = cache.open(ask(""))
    wrong = answer(cache)
    before = state(cache)
    cache.eviction.answer = lambda: wrong
    with pytest.raises(PolicyError, match=rf"{NAME} answered victim\(\) with .*{fault}"):
        cache.open(ask("!!!")) if call == "open" else cache.extend(seq, 3 * BLOCK)
    assert_only_evicted(cache, before)


@pytest.mark.parametrize("call", ["open", "extend"])
def test_a_wrong_victim_after_a_right_one(call):
    """The valid eviction stands: its blocks are free."""
    cache = full()
    if call == "extend":
        seq = cache.open(ask(""))
    before = state(cache)
    answers = iter([spans(cache)["abe"], spans(cache)["ab"]])
    cache.eviction.answer = lambda: next(answers)
    with pytest.raises(PolicyError, match="only leaves can go"):
        cache.open(ask("!!!")) if call == "open" else cache.extend(seq, 3 * BLOCK)
    assert_only_evicted(cache, before)
    assert cache.pool.free == 1


def now_and_then(seed, share):
    """Return what makes a policy raise in a `share` of all calls."""
    random = Random(seed)  # noqa: S311 - nothing secret

    def fails(method):
        if random.random() < share:
            msg = f"no luck in {method}"
            raise RuntimeError(msg)

    return fails


@pytest.mark.parametrize("count", ["keys", "tokens"])
@pytest.mark.parametrize("mix", [EVEN, FORKS])
@pytest.mark.parametrize("seed", range(15))
def test_failing_now_and_then(seed, mix, count):
    """Whatever fails, an open that failed has admitted nobody, and the cache goes on."""
    policy = Failing()
    cache = KVCache(
        45, BLOCK, eviction=policy, prefix=Radix(), count=count, key_tokens=3 * BLOCK, ids=True
    )
    policy.fails = now_and_then(seed, 0.1)
    driver = Driver(cache)
    failed = 0
    for step in random_steps(seed, 200, Traffic(key_tokens=3 * BLOCK, hints=True, mix=mix)):
        before = state(cache)
        try:
            driver.step(step)
        except PolicyError:
            failed += 1
            cache.check_integrity()
            if step.action in {"open", "extend"}:
                assert_only_evicted(cache, before)
    assert failed
    policy.fails = fail_in()
    while driver.sequences:
        cache.close(driver.sequences.pop(), driver.now)
    cache.check_integrity()
    assert cache.prefix.unpinned == cache.prefix.cached == 45 - cache.pool.free


@pytest.mark.parametrize("seed", range(5))
def test_a_failing_policy_leaves_a_trace_that_replays(seed, tmp_path):
    """What is written of a call that fails is what stands of it."""
    policy = Failing()
    steps = random_steps(seed, 150, Traffic(key_tokens=BLOCK, hints=True))
    with Trace(tmp_path / "trace.jsonl") as trace:
        cache = KVCache(12, BLOCK, eviction=policy, prefix=Radix(), trace=trace)
        policy.fails = now_and_then(seed, 0.1)
        driver = Driver(cache)
        for step in steps:
            with suppress(PolicyError):
                driver.step(step)
    report = check_trace(tmp_path / "trace.jsonl")
    assert report.complete
    assert report.pool["free"] == cache.pool.free
    assert report.pool["cached"] == cache.prefix.cached
