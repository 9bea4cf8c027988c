"""`PolicyHost`, which runs a policy on an engine's blocks: calls, pins, fallbacks."""

import logging
import tracemalloc
from random import Random
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import EvictionPolicy, InputError, PolicyError, Request
from kvcore.cache import BlockLayout, hints
from kvcore.request import Retention
from kvcore.testing.harness import lists
from kvcore_hosting import HostSettings, PolicyHost
from kvcore_plugins.eviction import LRU

CALLBACKS = ("on_insert", "on_access", "on_pin", "on_release", "on_leaf", "on_remove")


class Witness(LRU):
    """LRU that records its calls, each with the key of its span."""

    name = "witness"

    def __init__(self):
        self.received = []

    def victim(self, now):
        """Record the request that needs room, and return the least recently used span."""
        self.received.append(("victim", self.requester))
        return super().victim(now)


def _witnessed(method):
    def called(self, span, *rest):
        getattr(super(Witness, self), method)(span, *rest)
        self.received.append((method, span.path_keys[span.start]))

    return called


for _method in CALLBACKS:
    setattr(Witness, _method, _witnessed(_method))


def make(policy=None, *, blocks=8, **options):
    """Return the host of a policy."""
    return PolicyHost(policy or Witness(), blocks, 16, **options)


def store(host, path, *, now=0, request=None, below=None):
    """Store the blocks of a path, each pinned once; return them."""
    parent = below
    for block in path:
        host.stored(block, parent, now, request=request)
        parent = block
    return list(path)


def release(host, path, now=0):
    """Unpin the blocks of a path, deepest first."""
    for block in reversed(path):
        host.unpin(block, now)


def received(host):
    """Return the calls of the policy since the last `received`."""
    calls = list(host.eviction.received)
    host.eviction.received.clear()
    return calls


def test_an_admission_calls_the_policy_as_a_cache_does():
    """An admission calls the policy in a cache's order: pins, victims, accesses, insertions.

    Pins and accesses begin with the deepest block.
    """
    host = make()
    release(host, store(host, "abc"))
    release(host, store(host, "xy"))
    received(host)
    for block in "ba":
        host.pin(block)
    assert host.victims(2, now=5, requester=7) == ["c", "y"]
    host.hit("ab", 5, 7)
    host.stored("d", "b", 5, request=7)
    assert received(host) == [
        *[("on_pin", "b"), ("on_pin", "a")],
        *[("victim", 7), ("on_remove", "c"), ("victim", 7), ("on_remove", "y")],
        *[("on_leaf", "x"), ("on_access", "b"), ("on_access", "a"), ("on_insert", "d")],
    ]


def test_time_never_decreases_for_the_policy():
    """A call with a time before that of an earlier one counts as made at the earlier time."""

    class Clocked(LRU):
        name = "clocked"
        times = ()

        def on_release(self, span, now):
            super().on_release(span, now)
            self.times += (now,)

        def victim(self, now):
            self.times += (now,)
            return super().victim(now)

    host = make(Clocked())
    store(host, "ab", now=3)
    release(host, "ab", now=1)
    assert host.victims(1, now=2) == ["b"]
    assert host.victims(1, now=5) == ["a"]
    assert host.eviction.times == (3, 3, 3, 5)


def test_an_engine_that_stores_more_blocks_than_it_has_is_found():
    """`check_integrity` raises AssertionError with both numbers; a full host passes it."""
    host = make(blocks=8)
    store(host, range(8))
    host.check_integrity()
    store(host, "a")
    with pytest.raises(AssertionError, match=r"^9 blocks are stored, of 8$"):
        host.check_integrity()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda spans: setattr(spans["a"], "ref_count", 0), "1 blocks below 'a' are pinned"),
        (lambda spans: setattr(spans["y"], "released_order", 9), "'x' was released before"),
        (lambda spans: setattr(spans["b"], "ref_count", 0), "3, not 2 are evictable"),
    ],
)
def test_spoiled_pins_are_found(spoil, says):
    """`check_integrity` finds pins and releases that are out of order."""
    host = make()
    store(host, "ab")
    release(host, store(host, "xy"))
    host.check_integrity()
    spoil({block: host.span(block) for block in "abxy"})
    with pytest.raises(AssertionError, match=says):
        host.check_integrity()


def test_a_path_is_released_from_its_deepest_block():
    """A block whose children are in use is released after them."""
    host = make()
    path = store(host, "abc")
    host.unpin("a", 0)
    assert host.evictable == 0
    received(host)
    host.unpin("c", 0)
    host.unpin("b", 0)
    assert received(host) == [("on_release", "c"), ("on_release", "b"), ("on_release", "a")]
    assert [host.span(block).released_order for block in path] == [3, 2, 1]


def test_the_latest_path_is_the_one_that_was_released_last():
    """A path is the latest until others are released, or a block of it is lost or in use."""
    host = make()
    release(host, store(host, "ab"))
    release(host, store(host, "xyz"))
    assert [host.are_latest(path) for path in ("xyz", "xy", "yx", "ab")] == [1, 1, 0, 0]
    host.pin("x")
    assert not host.are_latest("xyz")
    host.unpin("x", 0)
    assert host.are_latest("xyz") is False
    assert host.are_latest("x")
    host.dropped("x", 0)
    assert not host.are_latest("yz")


def test_in_on_remove_the_parent_has_lost_its_child():
    """In `on_remove` a span has its parent, whose children no longer include it.

    Afterwards the span has no parent.
    """
    seen = []

    class Looking(LRU):
        name = "looking"

        def on_remove(self, span, reason):
            super().on_remove(span, reason)
            seen.append((span.parent.path_keys[0], dict(span.parent.children), span.keys()))

    host = make(Looking())
    release(host, store(host, "ab"))
    span = host.span("b")
    assert host.victims(1, now=0) == ["b"]
    assert seen == [("a", {}, ["b"])]
    assert span.parent is None


def test_victims_returns_all_blocks_or_none():
    """`victims` returns None for too many blocks, and does not call the policy."""
    host = make()
    release(host, store(host, "abc"))
    received(host)
    assert host.victims(3, "a", now=0) is None
    assert host.victims(4, now=0) is None
    assert (received(host), len(host), host.evictable) == ([], 3, 3)


def test_protected_blocks_are_no_victims():
    """`victims` keeps protected blocks and all blocks before them, until it returns."""
    host = make()
    for path in ("ab", "xy"):
        release(host, store(host, path))
    assert host.victims(2, {"b", "unknown"}, now=0) == ["y", "x"]
    assert host.victims(2, now=0) == ["b", "a"]


def test_victim_evicts_the_first_usable_choice():
    """`victim` evicts the first choice of the policy that is usable; others stay.

    It returns None if no block is usable. All stay, unpinned, if `usable` raises.
    """
    host = make("lru")
    for block in "abc":
        release(host, store(host, block))
    assert host.victim(lambda block: block != "a", now=0) == "b"
    assert ("b" in host, len(host), host.evictable) == (False, 2, 2)
    assert host.victim(lambda _block: False, now=0) is None
    with pytest.raises(KeyError):
        host.victim({"c": False}.__getitem__, now=0)
    assert (len(host), host.evictable) == (2, 2)
    assert host.victims(2, now=0) == ["a", "c"]


def test_an_error_of_the_policy_is_told_after_a_block_was_passed_over(monkeypatch):
    """If `victim` of the policy raises, no other call of it hides the error."""
    host = make("lru")
    for block in "ab":
        release(host, store(host, block))
    victims = iter([host.eviction.victim(0)])
    monkeypatch.setattr(host.eviction, "victim", lambda _now: next(victims))
    monkeypatch.setattr(host.eviction, "on_release", dict.__getitem__)
    with pytest.raises(PolicyError, match=r"in victim\(\)"):
        host.victim(lambda _block: False, now=0)


def test_victim_first_evicts_below_a_dropped_block():
    """`victim` first evicts a usable block below a dropped one."""
    host = make("lru")
    release(host, store(host, "xy"))
    release(host, store(host, "a"))
    host.dropped("x", 0)
    assert host.victim(lambda block: block != "y", now=0) == "a"
    assert host.victim(lambda _block: True, now=0) == "y"
    assert len(host) == 0


def test_the_statistics_of_a_hit():
    """A hit updates count, time and request of its spans.

    A hit of a resumed request updates only the time.
    """
    host = make()
    store(host, "ab", now=1, request="one")
    host.hit("ab", 4, "two")
    host.hit("a", 6, "two", again=True)
    spans = [host.span(block) for block in "ab"]
    assert [(s.hit_count, s.created, s.last_access, s.last_request) for s in spans] == [
        (1, 1, 6, "two"),
        (1, 1, 4, "two"),
    ]
    assert spans[0].last_hit_order == spans[1].last_hit_order == spans[0].created_order + 1


def test_the_hints_of_a_long_hit_are_applied_in_one_pass(monkeypatch):
    """A hit raises the priority of each block a few times, however many are above it."""
    host = PolicyHost(LRU(), 600, 4)
    host.stored_run(range(500), None, 0)
    raised = []
    plain = hints.raise_priority
    monkeypatch.setattr(hints, "raise_priority", lambda *a: (raised.append(a), plain(*a)))
    retention = [Retention(0, 2000 - 20 * n, 1 + n, 10) for n in range(60)]
    request = Request(
        id="a", prompt_tokens=2000, key_tokens=4, keys=range(500), retention=retention
    )
    host.hinted(499, request, 1)
    assert len(raised) <= 2 * 500
    assert [host.span(block).priority for block in (0, 204, 205, 499)] == [60, 60, 59, 35]


def test_blocks_of_one_admission_have_one_serial_number():
    """Blocks of one admission have one serial number; after `ended` it has a new one."""
    host = make()
    store(host, "ab", request=1)
    host.admitted(2)
    store(host, "c", request=1)
    store(host, "d", request=2)
    host.ended(Request(id=2, prompt_tokens=1, key_tokens=16), 0)
    store(host, "e", request=2)
    assert [host.span(block).last_hit_order for block in "abcde"] == [1, 1, 1, 2, 3]


def test_spans_have_the_keys_of_their_path():
    """Spans have the keys of their path, also after branches and after eviction."""
    host = make()
    store(host, "abc")
    store(host, "xy", below="a")
    release(host, "c")
    host.victims(1, now=0)
    store(host, "c", below="b")
    assert ["".join(host.span(block).keys()) for block in "abcxy"] == list("abcxy")
    paths = [host.span(block).path_keys[: host.span(block).end] for block in "cy"]
    assert paths == [["a", "b", "c"], ["a", "x", "y"]]
    assert [host.span(block).start for block in "abcxy"] == [0, 1, 2, 1, 2]


@given(lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 4)), 30))
def test_paths_that_share_their_beginnings_have_all_keys(runs):
    """However paths leave one another, a span has the keys of its whole path."""
    host, expected = make(blocks=200), [()]
    with patch("kvcore_hosting.host.COPIED", 2):
        for back, name, blocks in runs:
            parent = len(expected) - 1 - back % len(expected)
            keys = [(parent, name, index) for index in range(blocks)]
            first = len(expected)
            host.stored_run(range(first, first + blocks), parent or None, 0, keys=keys)
            expected += [(*expected[parent], *keys[: end + 1]) for end in range(blocks)]
        for block, keys in enumerate(expected[1:], 1):
            span = host.span(block)
            assert tuple(span.path_keys[: span.end]) == keys
            assert tuple(span.path_keys[index] for index in range(span.end)) == keys
            assert span.path_keys[-1] == list(span.path_keys)[-1]
            for outside in (len(span.path_keys), -len(span.path_keys) - 1):
                with pytest.raises(IndexError):
                    span.path_keys[outside]


def test_ends_of_one_long_prompt_take_little_memory():
    """An end of a prompt of 4,000 blocks takes less than 4 kB; its whole path is 32 kB."""
    host, ends = make(blocks=5_000), 20
    host.stored_run(range(4_000), None, 0)
    tracemalloc.start()
    try:
        for end in range(4_000, 4_000 + ends):
            host.stored_run([end], 3_998, 0)
        assert tracemalloc.get_traced_memory()[0] < 4_000 * ends
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("order", [(4, 3, 2, 1), (2, 4, 3, 1)])
def test_two_blocks_of_one_key_are_two_spans(order):
    """Two blocks with one key are two spans; the first one released is evicted first."""
    host = make()
    host.stored(1, None, 0, key="a")
    host.stored(2, 1, 0, key="b")
    host.stored(3, 1, 0, key="b")
    host.stored(4, 3, 0, key="c")
    for block in order:
        host.unpin(block, 0)
    assert host.span(4).path_keys == ["a", "b", "c"]
    assert host.victims(4, now=0) == list(order)


def test_blocks_below_a_dropped_block_are_evicted_first():
    """Blocks below a dropped block are removed from the policy.

    They are the first victims once they are not in use.
    """
    host = make()
    release(host, store(host, "abcd"))
    release(host, store(host, "x"))
    host.pin("d")
    received(host)
    host.dropped("b", 1)
    assert received(host)[0] == ("on_release", "d")
    assert "b" not in host
    assert (len(host), host.evictable, host.victims(4, now=1)) == (4, 3, None)
    assert host.victims(1, now=1) == ["c"]
    assert host.evictable == 2
    host.unpin("d", 1)
    assert host.evictable == 3
    assert host.victims(2, "d", now=1) == ["x", "a"]
    assert host.victims(1, now=1) == ["d"]


def test_blocks_below_a_dropped_block_may_be_hit():
    """A hit below a dropped block that is stored again returns it to the policy."""
    host = make()
    path = store(host, "abc")
    release(host, path)
    host.dropped("a", 0)
    host.pin("c")
    store(host, "a")
    host.pin("b")
    host.hit("abc", 2, "later")
    assert host.span("c").path_keys == ["a", "b", "c"]
    release(host, "abc")
    assert host.victims(3, now=3) == ["c", "b", "a"]


def test_a_block_that_is_hit_below_a_dropped_one_keeps_its_keys_tenant_and_priority():
    """A block that returns to the policy has its place in its text, also within a key.

    Its priority goes on until it ends.
    """
    host = make("lru", layout=BlockLayout("tokens", 16, 32))
    path = ["k0", "k1"]
    host.stored_run("abc", None, 0, path=path, tenant="one", priority=80)
    host.stored_run(
        "d", "c", 0, path=path, start=3, tenant="one", priority=70, priority_until=1
    )
    release(host, "abcd")
    host.dropped("a", 0)
    host.stored_run("a", None, 0, path=path)
    for block in "dcb":
        host.pin(block)
    host.hit("abcd", 1)
    assert [host.span(block).keys() for block in "abcd"] == [["k0"], ["k0"], ["k1"], ["k1"]]
    assert [host.span(block).tenant for block in "abcd"] == [None, "one", "one", "one"]
    assert [host.span(block).priority for block in "abcd"] == [80, 80, 80, 35]
    release(host, "abcd")
    assert host.victims(4, now=2) == ["d", "c", "b", "a"]
    with pytest.raises(InputError, match="a key has 2 blocks: give the keys of the text"):
        host.stored("a", None, 3)


def test_unpinned_blocks_expire_after_their_lifetime():
    """`expired` returns True for an unpinned block whose lifetime in the policy is over."""
    host = make("ttl:ttl=1")
    release(host, store(host, "ab"))
    assert [host.expired(block, 10**9 - 1) for block in "ab"] == [False, False]
    assert [host.expired(block, 10**9) for block in "ab"] == [True, True]
    host.pin("a")
    assert not host.expired("a", 10**9)


def test_clear_drops_all_blocks_and_starts_a_new_policy():
    """`clear` drops all blocks, even pinned ones, and starts a new policy."""
    host = make("arc")
    store(host, "abc")
    policy = host.eviction
    host.clear()
    assert (len(host), host.evictable) == (0, 0)
    assert (host.eviction is policy, host.eviction.name) == (False, "arc")
    release(host, store(host, "a"))
    assert host.victims(1, now=0) == ["a"]


def hinted():
    """Return a request with a hint."""
    return Request(id="a", prompt_tokens=4, key_tokens=4, retention=[Retention(0, None, 9)])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda host: host.stored("a", None, 0), "block 'a' is stored already"),
        (lambda host: [host.unpin("a", 0) for _ in "12"], "block 'a' is not pinned"),
        (
            lambda host: (
                [store(host, "b", below="a"), host.dropped("a", 0)]
                and [host.unpin("b", 0) for _ in "12"]
            ),
            "block 'b' is not pinned",
        ),
        (lambda host: host.hit(["a", "b"], 0), "block 'b' is not cached"),
        (
            lambda host: [release(host, "a"), host.hit("a", 0)],
            "block 'a' is not pinned: `pin` what a request hits before `hit`",
        ),
        (lambda host: host.hinted("b", hinted(), 0), "block 'b' is not cached"),
        (lambda _host: make(blocks=0), "a host of 0 blocks: give a whole number above 0"),
        (lambda host: PolicyHost(host.eviction, 8, 16), "is in use already"),
    ],
)
def test_wrong_calls_are_refused(call, text):
    """A wrong call raises InputError with the reason."""
    host = make()
    store(host, "a")
    with pytest.raises(InputError, match=text):
        call(host)


class Failing(LRU):
    """LRU that fails in one method from call number `after` on.

    It raises, or returns `answer` from `victim`.
    """

    name = "failing"

    def __init__(self, method="victim", after=0, answer=None):
        self.method, self.after, self.answer = method, after, answer

    def fails(self, method):
        """Return True if this call of `method` is to fail."""
        self.after -= method == self.method
        return method == self.method and self.after < 0

    def victim(self, now):
        """Fail, or return the least recently used span."""
        if not self.fails("victim"):
            return super().victim(now)
        if self.answer is not None:
            return self.answer
        msg = "no idea"
        raise RuntimeError(msg)


def _failing(method):
    def called(self, span, *rest):
        if self.fails(method):
            msg = "no idea"
            raise RuntimeError(msg)
        getattr(super(Failing, self), method)(span, *rest)

    return called


for _method in CALLBACKS:
    setattr(Failing, _method, _failing(_method))


def test_without_a_fallback_every_later_call_fails():
    """Without a fallback the call, and each until `clear`, raises the same PolicyError."""
    host = make(Failing())
    release(host, store(host, "ab"))
    with pytest.raises(
        PolicyError, match=r"'failing'.* raised RuntimeError in victim\(\)"
    ) as first:
        host.victims(1, now=0)
    assert host.failure is first.value
    for call in (
        lambda: host.pin("a"),
        lambda: host.victims(1, now=0),
        lambda: host.victim(bool, now=0),
        lambda: store(host, "c"),
    ):
        with pytest.raises(PolicyError) as later:
            call()
        assert later.value is first.value
    host.clear()
    assert store(host, "a")[0] in host


@pytest.mark.parametrize("answer", ["text", EvictionPolicy, "pinned", "inner", "foreign"])
def test_an_impossible_victim_is_a_failure(answer):
    """A victim that is no unpinned leaf of the host raises PolicyError."""
    host, other = make(Failing()), make()
    store(other, "f")
    store(host, "ab")
    store(host, "p")
    release(host, "ab")
    release(other, "f")
    spans = {"pinned": host.span("p"), "inner": host.span("a"), "foreign": other.span("f")}
    host.eviction.answer = spans.get(answer, answer)
    with pytest.raises(PolicyError, match=r"answered victim\(\) with .*2 blocks are evictable"):
        host.victims(1, now=0)


def _random_run(host, seed):
    """Drive a host at random, as an engine would; return the evicted blocks."""
    random, stored, pinned, evicted = Random(seed), [], [], []
    for now in range(300):
        if random.random() < 0.4 and len(stored) < 8:
            parent = random.choice([None, *stored])
            host.stored(now, parent, now)
            stored.append(now)
            pinned.append(now)
        elif pinned and random.random() < 0.6:
            host.unpin(pinned.pop(random.randrange(len(pinned))), now)
        elif stored and random.random() < 0.5:
            block = random.choice(stored)
            host.pin(block)
            host.hit([block], now, now)
            pinned.append(block)
        else:
            for block in host.victims(2, now=now) or ():
                stored.remove(block)
                evicted.append(block)
    return evicted


@pytest.mark.parametrize("method", ["attach", *CALLBACKS, "victim"])
@pytest.mark.parametrize("seed", range(5))
def test_the_fallback_evicts_as_lru(method, seed, caplog):
    """After a policy has failed, `lru` continues with the order of releases so far.

    The policy that fails is an LRU itself, so the victims are those of `lru` alone.
    """
    expected = _random_run(make("lru"), seed)
    policy = Failing(method, after=0 if method == "attach" else 5)
    if method == "attach":
        policy.attach = lambda *_sizes: 1 / 0
    host = make(policy, fallback=True)
    with caplog.at_level(logging.WARNING, "kvcore"):
        assert _random_run(host, seed) == expected
    assert (host.failures, host.eviction.name) == (1, "lru")
    assert [record.name for record in caplog.records] == ["kvcore"]
    assert "failing" in str(host.failure)


@pytest.mark.parametrize("time", [float("nan"), -5, "soon"])
@pytest.mark.parametrize("method", ["on_insert", "on_access", "on_release"])
def test_a_time_of_expiry_that_is_none_is_a_failure(method, time):
    """A policy that stores in `expires` what is no time is replaced by `lru`."""

    def sets(policy, span, now):
        getattr(LRU, method)(policy, span, now)
        span.expires = time

    policy = type("Wrong", (LRU,), {"name": "wrong", "expires_spans": True, method: sets})()
    host = make(policy, fallback=True)
    release(host, store(host, "ab"))
    store(host, "c", below="b")
    for block in "abc":
        host.pin(block)
    host.hit("abc", 1, 1)
    release(host, "abc")
    release(host, "c")
    assert (host.failures, host.eviction.name) == (1, "lru")
    assert "(): expires of" in str(host.failure)
    assert not any(host.expired(block, 2) for block in "abc")
    assert host.victims(3, now=2) == ["c", "b", "a"]


def test_environment_variables_set_the_policy_and_the_trace(tmp_path):
    """KVCORE_EVICTION is a policy with options or a TOML file; KVCORE_TRACE a trace file."""
    plain = HostSettings.from_environment({"KVCORE_EVICTION": "slru:protected=0.5"})
    assert (plain.build().name, plain.build().protected, plain.trace) == ("slru", 0.5, None)
    path = tmp_path / "kvcore.toml"
    path.write_text('eviction = "arc"\ntrace = "day.jsonl.zst"\n')
    settings = HostSettings.from_environment({"KVCORE_EVICTION": str(path)})
    assert (settings.build().name, str(settings.trace)) == ("arc", "day.jsonl.zst")
    other = {"KVCORE_EVICTION": str(path), "KVCORE_TRACE": "other.jsonl"}
    assert str(HostSettings.from_environment(other).trace) == "other.jsonl"
    assert HostSettings.from_environment({}) == HostSettings("lru", None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("lur", "KVCORE_EVICTION='lur': .*'lru'"),
        ("lru:size=3", "KVCORE_EVICTION='lru:size=3': .*size"),
        ("nowhere.toml", "KVCORE_EVICTION='nowhere.toml' cannot be read"),
        ('policy = "lru"', "policy = 'lru' is no setting; there are, as text: eviction, trace"),
        ("eviction = 3", "eviction = 3 is no setting"),
        ("eviction =", "cannot be read"),
    ],
)
def test_wrong_settings_are_refused(text, error, tmp_path):
    """Wrong settings raise InputError that names the variable or the known settings."""
    if "=" in text and not text.startswith("lru"):
        path = tmp_path / "kvcore.toml"
        path.write_text(text)
        text = str(path)
    with pytest.raises(InputError, match=error):
        HostSettings.from_environment({"KVCORE_EVICTION": text})


@pytest.mark.parametrize(
    "call",
    [
        lambda host: host.pin("x"),
        lambda host: host.unpin("x", 0),
        lambda host: host.dropped("x", 0),
        lambda host: host.branch("x"),
    ],
    ids=["pin", "unpin", "dropped", "branch"],
)
def test_an_uncached_block_is_refused_by_name(call):
    """A call with an uncached block raises InputError with its name and changes nothing."""
    host = PolicyHost("lru", 4, 16)
    host.stored("a", None, 0)
    with pytest.raises(InputError, match="block 'x' is not cached"):
        call(host)
    assert (len(host), host.evictable) == (1, 0)


def test_a_run_with_too_few_keys_is_refused():
    """A run with fewer keys than blocks raises InputError, and none of it is stored."""
    host = PolicyHost("lru", 4, 16)
    with pytest.raises(InputError, match="2 blocks with 1 keys: give a key for each block"):
        host.stored_run(["a", "b"], None, 0, keys=["k"])
    assert len(host) == 0
