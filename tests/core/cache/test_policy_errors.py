"""A plugin that raises or answers wrongly: the error names it, and the cache is unusable."""

import re
import sys
from asyncio import CancelledError
from copy import copy

import attrs
import pytest
from helpers.caches import BLOCK, ask, compute, make, serve, spans

from kvcore import (
    KVCache,
    PolicyError,
    PrefixIndex,
    RetentionPolicy,
    ScoreEviction,
)
from kvcore.testing import EVEN, FORKS, Driver, Traffic, random_steps
from kvcore_plugins.prefix import Radix

NAME = r"eviction plugin 'failing' \(.*\.Failing\)"
CALLBACKS = [
    "on_insert", "on_access", "on_extend", "on_split", "on_pin", "on_release", "on_leaf",
    "on_trim", "on_remove", "on_miss",
]  # fmt: skip


@attrs.define(slots=False, eq=False)
class Failing(ScoreEviction):
    """An LRU policy that calls `fails` after each method, and so may raise there."""

    name = "failing"

    fails = attrs.field(default=lambda _method: None)
    answer = attrs.field(default=None)

    def score(self, span, _now):
        """Return when the span was last released."""
        return span.released_order

    def victim(self, now):
        """Call `fails`; return what `answer` returns, or else the least recently used span."""
        self.fails("victim")
        return super().victim(now) if self.answer is None else self.answer()


def _failing_after(method):
    def called(self, *args):
        getattr(super(Failing, self), method)(*args)
        self.fails(method)

    return called


for _method in CALLBACKS:
    setattr(Failing, _method, _failing_after(_method))


def fail_in(*methods):
    """Return a function for `Failing.fails` that raises in `methods`."""

    def fails(method):
        if method in methods:
            msg = f"no luck in {method}"
            raise RuntimeError(msg)

    return fails


def full():
    """Return a full cache of 8 blocks: ab with the children cd and e, and beside it xyz."""
    cache = make(8, Failing(), accounting="keys")
    serve(cache, "abcd", "abe", "xyz")
    assert cache.pool.free_blocks == 0
    return cache


def assert_poisoned(cache, error, *sequences):
    """Check that every call raises the first error again, even if the policy works again."""
    if isinstance(cache.eviction, Failing):
        cache.eviction.fails = fail_in()
    request = ask("q")
    calls = [
        lambda: cache.probe(request),
        lambda: cache.open(request),
        cache.check_integrity,
    ]
    for seq in sequences:
        calls += [
            lambda seq=seq: cache.extend(seq, 1),
            lambda seq=seq: cache.commit(seq, 0),
            lambda seq=seq: cache.fork(seq),
            lambda seq=seq: cache.rollback(seq, 0),
            lambda seq=seq: cache.close(seq),
            lambda seq=seq: cache.block_table(seq),
            lambda seq=seq: cache.reserve(seq, 0),
            lambda seq=seq: cache.grow([(0, seq)]),
            lambda: cache.free_ahead(1, "other", 0),
        ]
    for call in calls:
        with pytest.raises(PolicyError) as again:
            call()
        assert str(again.value) == str(error)
        assert again.value.__cause__ is error, "the first error is kept, with its cause"


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("on_split", "abc!"),
        ("on_pin", "abcd!"),
        ("victim", "abcd!"),
        ("on_trim", "ab!"),
        ("on_remove", "ab!!"),
        ("on_leaf", "!!!!!!"),
        ("on_miss", "abc!!"),
        ("on_access", "abc!"),
    ],
)
def test_an_error_during_open_names_the_policy(method, keys):
    """An error in a policy during `open` names plugin, method and cause, at once and later."""
    cache = full()
    seq = cache.open(ask(""))
    cache.eviction.fails = fail_in(method)
    with pytest.raises(
        PolicyError, match=rf"{NAME} raised RuntimeError in {method}\(\): no"
    ) as caught:
        cache.open(ask(keys))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_poisoned(cache, caught.value, seq)


@pytest.mark.parametrize("method", ["on_insert", "on_extend", "on_split", "on_pin"])
def test_an_error_during_commit_names_the_policy(method):
    """An error in a policy during `commit` names plugin and method.

    The commit inserts a span, extends one, splits one or switches to a cached one.
    """
    cache = make(12, Failing(), accounting="keys")
    first, second = (cache.open(ask(keys)) for keys in ("abcd", "abx"))
    cache.commit(first, BLOCK)
    if method in {"on_split", "on_pin"}:
        cache.commit(first, (1 if method == "on_pin" else 2) * BLOCK)
        cache.close(first)
    seq = first if method == "on_extend" else second
    cache.eviction.fails = fail_in(method)
    with pytest.raises(PolicyError, match=rf"{NAME} raised RuntimeError in {method}") as caught:
        cache.commit(seq, 2 * BLOCK if method != "on_insert" else 3 * BLOCK)
    assert_poisoned(cache, caught.value, seq)


def test_an_error_during_extend_or_close_names_the_policy():
    """An error in a policy during `extend` or `close` names plugin and method."""
    cache = full()
    seq = cache.open(ask(""))
    cache.eviction.fails = fail_in("victim")
    with pytest.raises(PolicyError, match=f"{NAME} raised RuntimeError in victim") as caught:
        cache.extend(seq, 3 * BLOCK)
    assert_poisoned(cache, caught.value, seq)
    cache = full()
    seq = cache.open(ask("abcd"))
    cache.eviction.fails = fail_in("on_release")
    with pytest.raises(PolicyError, match=f"{NAME} raised RuntimeError in on_rel") as caught:
        cache.close(seq)
    assert_poisoned(cache, caught.value)


def test_a_policy_is_not_called_after_its_first_error():
    """After its first error a policy is not called again."""
    cache = full()
    seq = cache.open(ask("xyz"))
    called = []

    def fails(method):
        called.append(method)
        if method == "on_miss":
            msg = "no luck"
            raise RuntimeError(msg)

    cache.eviction.fails = fails
    with pytest.raises(PolicyError, match=r"in on_miss\(\): no luck"):
        cache.open(ask("abc!"))
    assert called[-1] == "on_miss"
    called.clear()
    for call in (
        *(lambda: cache.open(ask("!")), lambda: cache.match(ask("!"), 0)),
        *(lambda: cache.close(seq), cache.check_integrity),
    ):
        with pytest.raises(PolicyError, match=r"in on_miss\(\): no luck"):
            call()
    assert called == []


def test_sys_exit_in_a_policy_makes_the_cache_unusable():
    """A policy that calls `sys.exit()` makes the cache unusable, but the program goes on."""
    cache = full()
    cache.eviction.fails = lambda _method: sys.exit(0)
    with pytest.raises(PolicyError, match=rf"{NAME} raised SystemExit in on_split") as caught:
        cache.open(ask("abc!"))
    assert_poisoned(cache, caught.value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, CancelledError])
@pytest.mark.parametrize("method", ["on_miss", "victim", "on_pin"])
def test_an_interrupt_in_a_policy_makes_the_cache_unusable(method, error):
    """An error that is no failure of a policy passes unchanged; later calls are refused."""

    def interrupted(called):
        if called == method:
            raise error

    cache = full()
    cache.eviction.fails = interrupted
    with pytest.raises(error) as caught:
        cache.open(ask("abcd!"))
    assert caught.value.__cause__ is None
    cache.eviction.fails = fail_in()
    with pytest.raises(PolicyError, match=rf"{NAME} raised {error.__name__} in {method}"):
        cache.check_integrity()


def test_an_error_in_attach_names_the_policy():
    """An error in `attach` is raised when the cache is made, and names the policy."""

    class Loose(Failing):
        def attach(self, blocks, block_size):
            raise KeyError(blocks, block_size)

    with pytest.raises(PolicyError, match=r"'failing' .* raised KeyError in attach\(\)"):
        make(8, Loose())


def test_a_score_without_a_value_is_refused():
    """A `score` that returns None raises PolicyError with a hint at the missing `return`."""

    class Forgetful(ScoreEviction):
        name = "forgetful"

        def score(self, span, now):
            span.hit_count + now

    cache = make(8, Forgetful())
    with pytest.raises(
        PolicyError,
        match=r"'forgetful' .* in on_release\(\): score\(\) of .* is None.*`return`",
    ) as caught:
        serve(cache, "ab")
    assert_poisoned(cache, caught.value)


@pytest.mark.parametrize(
    "score", [float("nan"), (float("nan"), 1), (1, float("nan")), ((0, float("nan")), 1)]
)
def test_a_score_with_nan_is_refused(score):
    """A `score` that is NaN, or a tuple with NaN in it, raises PolicyError that shows it."""

    class Unordered(ScoreEviction):
        name = "unordered"

        def score(self, span, now):
            return score

    cache = make(8, Unordered())
    with pytest.raises(PolicyError, match=re.escape(f"is {score}, which has no place")):
        serve(cache, "ab")


def pinned(cache):
    """Return a span that is pinned by an open sequence."""
    cache.open(ask("xyz"))
    return spans(cache)["|xyz"]


def inner(cache):
    """Return a span with children."""
    return spans(cache)["|ab"]


def foreign(_cache):
    """Return a span of another cache."""
    return spans(full())["ab|cd"]


def removed(cache):
    """Return a span that has been evicted."""
    span = spans(cache)["ab|cd"]
    cache.open(ask("!!"))
    assert span.parent is None
    return span


def root(cache):
    """Return the empty span above all others."""
    return cache.tree.root


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (pinned, "which is pinned"),
        (inner, "which has children: only leaves can go"),
        (foreign, "of another cache"),
        (removed, "which has left the cache"),
        (root, "which has left the cache"),
        (lambda _: "abcd", "'abcd', which is no span"),
        (lambda _: None, "None, which is no span"),
    ],
)
@pytest.mark.parametrize("call", ["open", "extend"])
def test_a_wrong_victim_is_refused_with_the_reason(answer, fault, call):
    """The error for a span that cannot be evicted gives the reason."""
    cache = full()
    if call == "extend":
        seq = cache.open(ask(""))
    wrong = answer(cache)
    cache.eviction.answer = lambda: wrong
    with pytest.raises(
        PolicyError, match=rf"{NAME} answered victim\(\) with .*{fault}"
    ) as caught:
        cache.open(ask("!!!")) if call == "open" else cache.extend(seq, 3 * BLOCK)
    assert_poisoned(cache, caught.value)


def test_a_copy_of_a_span_is_no_victim():
    """A policy that copies a span raises PolicyError, since a copy could pass as a leaf."""
    cache = full()
    cache.eviction.answer = lambda: copy(spans(cache)["ab|cd"])
    with pytest.raises(
        PolicyError, match=r"in victim\(\): <Span .* cannot be copied"
    ) as caught:
        cache.open(ask("!!!"))
    assert_poisoned(cache, caught.value)


def test_an_error_in_a_retention_policy_makes_the_cache_unusable():
    """An error in a retention policy makes the cache unusable as well."""

    class Lost(RetentionPolicy):
        name = "lost"

        def droppable(self, seq):
            raise KeyError(seq.id)

    cache = make(retention=Lost())
    seq = cache.open(ask("ab"))
    with pytest.raises(
        PolicyError, match=r"retention plugin 'lost' .* raised KeyError in droppable"
    ) as caught:
        cache.commit(seq, 1)
    assert_poisoned(cache, caught.value, seq)


def look_up_and_compute(cache):
    """Call every method of the prefix index: look up, then store blocks behind a split."""
    cache.probe(ask("ab"))
    compute(cache, cache.open(ask("abxy")))


@pytest.mark.parametrize("method", ["match", "insert", "split", "remove"])
def test_an_error_in_the_prefix_index_makes_the_cache_unusable(method):
    """An error in any method of the prefix index makes the cache unusable."""

    def fail(self, *args):
        if self.fails:
            msg = f"no luck with {len(args)}"
            raise RuntimeError(msg)
        return getattr(Radix, method)(self, *args)

    index = type("Lost", (Radix,), {"name": "lost", "fails": False, method: fail})()
    cache = make(4, prefix=index)
    serve(cache, "abc")
    index.fails = True
    with pytest.raises(
        PolicyError, match=rf"prefix plugin 'lost' .* raised RuntimeError in {method}\(\): no"
    ) as caught:
        look_up_and_compute(cache)
    assert_poisoned(cache, caught.value)


def test_an_index_that_misses_a_cached_span_is_refused():
    """A commit raises if the index misses a cached span, as two spans would share a key."""

    class Blind(PrefixIndex):
        name = "blind"

        def match(self, keys, limit, after):
            del keys, limit
            return after, after.end

    cache = make(8, prefix=Blind())
    first, second = cache.open(ask("ab")), cache.open(ask("ab"))
    cache.commit(first, BLOCK)
    with pytest.raises(AssertionError, match="prefix plugin 'blind' finds"):
        cache.check_integrity()
    with pytest.raises(
        PolicyError, match=r"prefix plugin 'blind' .* answered match\(\) with no more than"
    ) as caught:
        cache.commit(second, BLOCK)
    assert_poisoned(cache, caught.value, first, second)


@pytest.mark.parametrize("accounting", ["keys", "tokens"])
@pytest.mark.parametrize("mix", [EVEN, FORKS])
@pytest.mark.parametrize("seed", range(5))
def test_the_cache_is_consistent_until_a_policy_fails(seed, mix, accounting):
    """The cache is consistent until a policy fails, at any call, and unusable afterwards."""
    policy = Failing()
    cache = KVCache(
        45, BLOCK, eviction=policy, accounting=accounting, key_tokens=3 * BLOCK, ids=True
    )
    calls = iter(range(10**6))

    def fails(_method):
        if next(calls) == 20 * (seed + 1):
            msg = "enough"
            raise RuntimeError(msg)

    policy.fails = fails
    driver = Driver(cache)
    steps = random_steps(seed, 400, Traffic(key_tokens=3 * BLOCK, hints=True, mix=mix))
    with pytest.raises(PolicyError, match="enough") as caught:
        driver.run(steps)
    assert_poisoned(cache, caught.value, *cache.sequences.values())
