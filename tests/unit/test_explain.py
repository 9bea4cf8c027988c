"""Each reason for a miss, on the smallest trace that has it."""

from __future__ import annotations

import pytest
from helpers.caches import Mortal
from helpers.traces import BLOCK, ask, lines, record, seal, serve

from kvcore import InputError, KVCache, Request, Trace, TraceError
from kvcore.analysis import explain, replay
from kvcore.models.cost import default_prefill_cost
from kvcore.request import Retention
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import NoPrefix, Radix
from kvcore_plugins.retention import Window


@pytest.fixture
def file(tmp_path):
    """Return where traces are written."""
    return tmp_path / "trace.jsonl"


def told(reasons):
    """Return (category, first block, blocks) of each loss; None where blocks are not whole."""
    return [(loss.category, loss.first / BLOCK, loss.tokens / BLOCK) for loss in reasons.losses]


def served(
    file, *requests, blocks=8, eviction=None, prefix=None, accounting="tokens", **options
):
    """Explain a replay of `requests`, a nanosecond apart unless they say when they arrive."""
    for now, request in enumerate(requests):
        request.arrival = request.arrival or now
    with Trace(file, **options) as trace:
        cache = KVCache(
            blocks,
            BLOCK,
            eviction=LRU() if eviction is None else eviction,
            prefix=Radix() if prefix is None else prefix,
            accounting=accounting,
            trace=trace,
        )
        replay(requests, cache)
    return explain(file)


def of(way, explanation, name):
    """Return the one loss of request `name` that is `way`: a category, or a way to be new."""
    losses = explanation.of(name).losses
    return next(loss for loss in losses if way in (loss.category, loss.way))


def test_an_eviction_is_named_with_time_policy_and_request(file):
    """Evicted blocks have the EVICT line that took them, and the request that had them last."""
    explanation = served(
        file,
        ask("old", "abc"),
        ask("user", "abc"),
        ask("thief", "pqrstuv"),
        ask("late", "abcx", arrival=9),
    )
    late = explanation.of("late")
    loss = of("capacity", explanation, "late")
    eviction = loss.eviction
    line = lines(file)[eviction.line - 1]
    assert (line["event"], line["t"], line["for"]) == ("EVICT", 2, "thief")
    assert (eviction.by, eviction.beneficiary, eviction.user) == ("lru", "thief", "user")
    assert (eviction.time, eviction.age, eviction.blocks) == (2, 1, 1)
    assert (late.hit, late.admitted - eviction.time) == (BLOCK, 7)
    assert told(late)[-1] == ("compulsory", 3, 1)
    assert sum(each.tokens for each in late.losses) == 3 * BLOCK


def test_the_optimum_tells_policy_from_capacity(file):
    """What no eviction could have kept is capacity; what a better one keeps is policy."""
    scan = [ask("a", "ab"), ask("b", "x"), ask("c", "y"), ask("d", "ab", 9)]
    tight = served(file, *scan, blocks=2)
    assert told(tight.of("d"))[0] == ("policy", 0, 1)
    assert ("capacity", 1, 1) in told(tight.of("d"))


def test_what_expired_says_so(file):
    """Blocks whose time was over are not evicted for room."""
    loss = of(
        "expired",
        served(file, ask("a", "ab"), ask("b", "ab", 9, arrival=50), eviction=Mortal()),
        "b",
    )
    assert (loss.first, loss.tokens) == (0, 8)
    assert (loss.eviction.expired, loss.eviction.time, loss.other) == (True, 50, "a")


def test_what_is_being_computed_is_in_flight(file):
    """Blocks that an open sequence has yet to commit are in flight, up to where two part."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        first = cache.open(ask("first", "abcd"), None, 0)
        cache.commit(first, BLOCK, 1)
        cache.open(ask("second", "abcx"), None, 2)
    second = explain(file).of("second")
    assert second.hit == BLOCK
    assert told(second) == [("in_flight", 1, 2), ("compulsory", 3, 1)]
    assert second.losses[0].other == "first"


def test_what_was_never_stored_is_unstored(file):
    """A request that gave up before computing leaves nothing, and is named."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        cache.close(cache.open(ask("quitter", "ab"), None, 0), 1)
        cache.open(ask("next", "ab", 9), None, 2)
    loss = of("unstored", explain(file), "next")
    assert (loss.first, loss.tokens, loss.other) == (0, 8, "quitter")


def test_who_sent_a_part_of_a_key_is_not_named_for_the_rest(file):
    """Of a key that stands for two blocks, the second was sent by who had both."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, prefix=Radix(), key_tokens=2 * BLOCK, trace=trace)
        for name, tokens in (("both", 8), ("one", 4), ("next", 9)):
            cache.close(cache.open(coarse(name, tokens), None, 0), 0)
    loss = of("unstored", explain(file), "next")
    assert (loss.first, loss.tokens, loss.other) == (0, 8, "both")


def test_a_prompt_wants_no_more_of_its_last_key_than_it_covers(file):
    """What the optimum keeps for a prompt are its own full blocks, not all of their keys'."""
    with Trace(file) as trace:
        cache = KVCache(2, BLOCK, prefix=Radix(), key_tokens=2 * BLOCK, trace=trace)
        replay([coarse("a", 8), coarse("b", 5), coarse("c", 9)], cache)
    loss = of("capacity", explain(file), "c")
    assert (loss.first, loss.tokens, loss.eviction.beneficiary) == (4, 4, "b")


def test_what_a_sequence_that_has_forgotten_computes_is_unstored(file):
    """Such a sequence stores nothing any more: what it is still computing is not in flight."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, prefix=Radix(), retention=Window(tokens=4), trace=trace)
        first = cache.open(ask("first", "abcd"), None, 0)
        cache.commit(first, 8, 1)
        cache.open(ask("next", "abcd", 17), None, 2)
    assert told(explain(file).of("next")) == [("unstored", 2, 2), ("granularity", 4, 0.25)]
    assert explain(file).of("next").losses[0].other == "first"


def test_of_a_span_that_was_split_both_halves_are_whose_it_was(file):
    """A retention hint splits the span of who stored it; its upper half is no one else's."""
    hinted = ask("a", "abcd", retention=(Retention(0, 8, 90),))
    explanation = served(file, hinted, ask("thief", "pqrstuvw"), ask("b", "abcd", 17))
    users = [loss.eviction.user for loss in explanation.of("b").losses if loss.eviction]
    assert len(users) > 1
    assert set(users) == {"a"}


def coarse(name, tokens):
    """Return a request of so many tokens of one text, whose keys stand for two blocks."""
    keys = [11, 12][: -(-tokens // (2 * BLOCK))]
    return Request(id=name, prompt_tokens=tokens, keys=keys, key_tokens=2 * BLOCK)


def test_a_cache_without_sharing_stores_nothing_even_in_flight(file):
    """With prefix cache `none`, what is being computed would not be found afterwards either."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=NoPrefix(), trace=trace)
        cache.open(ask("first", "ab"), None, 0)
        cache.open(ask("second", "ab", 9), None, 1)
    assert of("unstored", explain(file), "second").tokens == 8


def test_a_clock_in_the_prompt_is_one_place(file):
    """Prompts that all part from one another after the same blocks part at one place."""
    prompts = [ask(name, f"ab{name}rest") for name in "123456"]
    explanation = served(file, *prompts, blocks=99)
    place = of("diverges", explanation, "6").place
    assert (place.first, place.width, place.requests) == (8, 4, 5)
    assert (place.example, place.other) == ("2", "1")
    assert place.shares / place.requests == pytest.approx(2 / 7)
    assert place.tokens == 5 * 5 * BLOCK
    assert explanation.summary().places[0] is place


def test_the_next_turn_of_a_conversation_extends_the_last(file):
    """A prompt that goes on where another ended does not part from it."""
    explanation = served(file, ask("one", "ab"), ask("two", "abcd"), blocks=99)
    loss = of("extends", explanation, "two")
    assert (loss.first, loss.other, loss.place) == (8, "one", None)


def test_a_last_key_of_a_part_of_a_block_ends(file):
    """In `keys` counting a new last key may be the beginning of a longer one: none can tell."""
    explanation = served(file, ask("one", "abc"), ask("two", "abx", 10), accounting="keys")
    loss = of("ends", explanation, "two")
    assert (loss.first, loss.tokens, loss.other) == (8, 4, "one")


def test_nothing_in_common_starts_anew_and_other_salts_are_counted(file):
    """What starts anew says how many requests of other salts it could not have matched."""
    explanation = served(
        file,
        ask("one", "ab", salt="red"),
        ask("two", "xy", salt="red"),
        ask("three", "pq", salt="blue"),
        blocks=99,
    )
    assert [of("starts", explanation, name).other_salts for name in ("one", "two")] == [0, 0]
    assert of("starts", explanation, "three").other_salts == 2
    assert explanation.summary().salted.tokens == 8


def test_the_last_token_and_a_partial_block_are_granularity(file):
    """Of a prompt sent before, what is left is the partial block, or that of the last token."""
    explanation = served(file, ask("a", "abc"), ask("b", "abc"), ask("c", "abc", 15))
    assert told(explanation.of("b")) == [("granularity", 2, 1)]
    assert told(explanation.of("c")) == [("granularity", 3, 0.75)]


def test_tokens_without_keys_have_no_keys(file):
    """What no key stands for cannot be found."""
    explanation = served(file, ask("a", "ab", 30))
    assert told(explanation.of("a")) == [("compulsory", 0, 7.5)]
    explanation = served(file, ask("a", "ab", 30), ask("b", "ab", 30))
    assert told(explanation.of("b")) == [("no_keys", 2, 5.5)]


def test_what_a_pool_cannot_keep_of_one_request_is_truncated(file):
    """Blocks beyond the pool's size were dropped by the first request as well."""
    explanation = served(
        file, ask("a", "abcdef"), ask("b", "abcdef"), blocks=4, accounting="keys"
    )
    assert explanation.of("b").hit == 16
    assert told(explanation.of("b")) == [("truncated", 4, 2)]


def test_only_the_first_admission_counts(file):
    """A preempted request that returns is counted apart; `serve` has one."""
    explanation = explain(serve(file))
    summary = explanation.summary()
    counts = summary.admitted, summary.rejected, summary.waiting, summary.readmitted
    assert counts == (3, 1, 0, 1)
    assert explanation.of("long").again == 1
    assert explanation.of("huge").state == "rejected"
    assert explanation.of("huge").losses == []


def test_generated_blocks_count_as_sent(file):
    """Keys told by KEYS belong to whoever generated them: a prompt with them goes on there."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        first = cache.open(ask("first", "ab", output_tokens=9), None, 0)
        cache.commit(first, 8, 1)
        trace.keys(1, request="first", keys=ask("", "abcd").keys[2:])
        cache.open(ask("next", "abcdef"), None, 2)
    follow = explain(file).of("next")
    assert told(follow) == [("in_flight", 2, 2), ("compulsory", 4, 2)]
    assert follow.losses[1].other == "first"


def test_generated_blocks_that_a_later_request_sent_are_the_later_ones(file):
    """KEYS of a request admitted earlier do not make it the last to have had these blocks."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        first = cache.open(ask("first", "ab", output_tokens=9), None, 0)
        cache.close(cache.open(ask("second", "abcd"), None, 1), 1)
        trace.keys(2, request="first", keys=ask("", "abcd").keys[2:])
        cache.close(first, 2)
        cache.open(ask("next", "abcd", 17), None, 3)
    assert of("unstored", explain(file), "next").other == "second"


def test_keys_told_before_the_admission_come_with_it(file):
    """A trace made by hand may tell keys early: they count from the admission on."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        first = ask("first", "ab", output_tokens=9)
        trace.request(first, 0)
        trace.keys(0, request="first", keys=ask("", "abc").keys[2:])
        cache.open(first, None, 1)
        cache.open(ask("next", "abcd"), None, 2)
    assert told(explain(file).of("next"))[0] == ("in_flight", 0, 3)


def test_a_cut_trace_is_explained_up_to_the_cut(file):
    """What stands before the cut is told, and where the file stops."""
    record(file)
    whole = explain(file)
    file.write_bytes(file.read_bytes()[:-100])
    cut = explain(file)
    assert (whole.complete, cut.complete) == (True, False)
    assert "ends inside line" in cut.cut_reason
    assert cut.summary().as_dict() == whole.summary().as_dict()


def test_a_request_that_waits_at_the_end_is_no_miss(file):
    """A request that was never admitted has no losses."""
    with Trace(file) as trace:
        cache = KVCache(4, BLOCK, trace=trace)
        cache.open(ask("a", "a"), None, 0)
        trace.request(ask("b", "b"), 0)
    assert explain(file).of("b").state == "waiting"
    assert explain(file).summary().waiting == 1


def test_a_line_that_cannot_be_is_refused_with_its_place(file):
    """A line that names what is not there is an error, whatever the digest says."""
    events = lines(record(file))
    events[35]["span"] = 44
    with pytest.raises(TraceError, match=r"trace.jsonl:36: EVICT: no span 44 is cached"):
        explain(seal(file, events))


def test_an_empty_file_is_no_trace(file):
    """Without a HEADER there is nothing to explain."""
    file.write_bytes(b"")
    with pytest.raises(TraceError, match="is empty, without END"):
        explain(file)


def test_ids_are_found_as_text_and_others_refused_with_what_there_is(file):
    """An id of digits is found as text; an unknown one is near to none."""
    requests = [
        Request(id=n, prompt_tokens=4, keys=[n], key_tokens=BLOCK, arrival=n)
        for n in range(4000, 4009)
    ]
    explanation = served(file, *requests)
    assert explanation.of("4007").request == 4007
    with pytest.raises(InputError, match=r"'407' is not in .*\w\. Its 9 ids"):
        explanation.of("407")
    with pytest.raises(InputError, match=r"Its 9 ids: 4000, 4001, 4002, \.\.\., 4008"):
        explanation.of("x")


def test_prefill_is_weighed_as_the_trace_says(file):
    """The header names model and device; without a name that is known it is the default."""
    requests = [ask("a", "ab")]
    small = served(file, *requests, recompute={"model": "gpt2", "device": "l4"})
    assert (small.cost.model, small.cost.device) == ("gpt2", "l4")
    for unknown in ({"model": "mine", "device": "l4"}, "much", {"token_seconds": 1}):
        assert served(file, *requests, recompute=unknown).cost == default_prefill_cost()
    loss = small.of("a").losses[0]
    assert small.prefill_seconds(loss) == small.cost(0, 8)
    assert small.summary().categories["compulsory"].seconds == small.cost(0, 8)


def test_all_sums_of_a_recorded_run_agree(file):
    """A run with forks, copies and rollbacks is told like any other."""
    summary = explain(record(file)).summary()
    tokens = sum(lost.tokens for lost in summary.categories.values())
    assert tokens == summary.missed_tokens == summary.prompt_tokens - summary.hit_tokens


def test_victims_and_beneficiaries_are_ranked_by_what_was_lost(file):
    """Who lost most to evictions, and for whose sake; each loss counts once on both sides."""
    explanation = served(
        file, ask("a", "ab"), ask("thief", "pqrstu"), ask("b", "ab", 9), blocks=6
    )
    summary = explanation.summary()
    assert summary.victims == [("b", 8)]
    assert summary.beneficiaries == [("thief", 8)]


def test_told_as_json_every_time_is_in_seconds(file):
    """The JSON of a loss has the eviction in seconds, and how long before the use."""
    explanation = served(
        file, ask("a", "ab"), ask("thief", "pqrstu"), ask("b", "ab", 9, arrival=10**9), blocks=6
    )
    told_ = explanation.request_dict(explanation.of("b"))
    (loss, tail) = told_["losses"]
    assert loss["eviction"]["before_s"] == pytest.approx(1 - 1e-9)
    assert (loss["eviction"]["for"], loss["other"]) == ("thief", "a")
    assert (tail["category"], tail["eviction"]) == ("granularity", None)
    assert told_["missed_tokens"] == 9


def test_the_reader_is_told_how_far_it_is(file):
    """`tick` is called with the bytes of the file, all of them in the end."""
    requests = [ask(str(n), "a") for n in range(300)]
    seen = []
    served(file, *requests)
    explain(file, tick=seen.append)
    assert len(seen) > 3
    assert sum(seen) == file.stat().st_size
