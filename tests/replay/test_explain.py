"""Each reason for a miss, on the smallest trace that has it."""

from __future__ import annotations

import pytest
from helpers.caches import Mortal
from helpers.traces import BLOCK, ask, lines, record, serve

from kvcore import InputError, KVCache, Request, Trace
from kvcore.models.cost import default_prefill_cost
from kvcore.request import Retention
from kvcore_plugins.eviction import LRU
from kvcore_plugins.prefix import Radix
from kvcore_replay.misses.explain import explain
from kvcore_replay.untimed import replay


@pytest.fixture
def file(tmp_path):
    """Return the path of the trace."""
    return tmp_path / "trace.jsonl"


def losses_of(reasons):
    """Return (category, first block, blocks) of each loss; blocks may be fractions."""
    return [(loss.category, loss.first / BLOCK, loss.tokens / BLOCK) for loss in reasons.losses]


def served(
    file, *requests, blocks=8, eviction=None, prefix=None, accounting="tokens", **options
):
    """Explain a replay of `requests`, which arrive 1 ns apart by default."""
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


def loss_of(way, explanation, name):
    """Return the loss of request `name` whose category, or way to be new, is `way`."""
    losses = explanation.of(name).losses
    return next(loss for loss in losses if way in (loss.category, loss.way))


def test_an_eviction_has_time_policy_and_request(file):
    """A loss by eviction has the EVICT line, policy, time, beneficiary and last user."""
    explanation = served(
        file,
        ask("old", "abc"),
        ask("user", "abc"),
        ask("thief", "pqrstuv"),
        ask("late", "abcx", arrival=9),
    )
    late = explanation.of("late")
    loss = loss_of("capacity", explanation, "late")
    eviction = loss.eviction
    line = lines(file)[eviction.line - 1]
    assert (line["event"], line["t"], line["for"]) == ("EVICT", 2, "thief")
    assert (eviction.by, eviction.beneficiary, eviction.user) == ("lru", "thief", "user")
    assert (eviction.time, eviction.age, eviction.blocks) == (2, 1, 1)
    assert (late.hit, late.admitted - eviction.time) == (BLOCK, 7)
    assert losses_of(late)[-1] == ("compulsory", 3, 1)
    assert sum(loss.tokens for loss in late.losses) == 3 * BLOCK


def test_expired_blocks_count_as_expired(file):
    """Blocks that have expired count as `expired`, not as evicted for room."""
    loss = loss_of(
        "expired",
        served(file, ask("a", "ab"), ask("b", "ab", 9, arrival=50), eviction=Mortal()),
        "b",
    )
    assert (loss.first, loss.tokens) == (0, 8)
    assert (loss.eviction.expired, loss.eviction.time, loss.other) == (True, 50, "a")


def test_blocks_of_an_open_sequence_are_in_flight(file):
    """Blocks that an open sequence has yet to commit are `in_flight`.

    Behind the point where the two prompts diverge, blocks are `compulsory`.
    """
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        first = cache.open(ask("first", "abcd"), None, 0)
        cache.commit(first, BLOCK, 1)
        cache.open(ask("second", "abcx"), None, 2)
    second = explain(file).of("second")
    assert second.hit == BLOCK
    assert losses_of(second) == [("in_flight", 1, 2), ("compulsory", 3, 1)]
    assert second.losses[0].other == "first"


def test_a_loss_names_the_last_request_with_all_its_blocks(file):
    """A loss of a key with two blocks names the last request that had both blocks."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, prefix=Radix(), key_tokens=2 * BLOCK, trace=trace)
        for name, tokens in (("both", 8), ("one", 4), ("next", 9)):
            cache.close(cache.open(coarse(name, tokens), None, 0), 0)
    loss = loss_of("unstored", explain(file), "next")
    assert (loss.first, loss.tokens, loss.other) == (0, 8, "both")


def test_the_optimum_keeps_only_full_blocks_of_a_prompt(file):
    """The optimum keeps only the full blocks of a prompt, not all blocks of its last key."""
    with Trace(file) as trace:
        cache = KVCache(2, BLOCK, prefix=Radix(), key_tokens=2 * BLOCK, trace=trace)
        replay([coarse("a", 8), coarse("b", 5), coarse("c", 9)], cache)
    loss = loss_of("capacity", explain(file), "c")
    assert (loss.first, loss.tokens, loss.eviction.beneficiary) == (4, 4, "b")


def test_both_halves_of_a_split_span_keep_their_user(file):
    """Both halves of a span that a hint splits have the request that stored it as user."""
    hinted = ask("a", "abcd", retention=(Retention(0, 8, 90),))
    explanation = served(file, hinted, ask("thief", "pqrstuvw"), ask("b", "abcd", 17))
    users = [loss.eviction.user for loss in explanation.of("b").losses if loss.eviction]
    assert len(users) > 1
    assert set(users) == {"a"}


def coarse(name, tokens):
    """Return a request of one text of `tokens` tokens, whose keys stand for two blocks."""
    keys = [11, 12][: -(-tokens // (2 * BLOCK))]
    return Request(id=name, prompt_tokens=tokens, keys=keys, key_tokens=2 * BLOCK)


def test_equal_divergences_are_one_place(file):
    """Prompts that diverge after the same blocks have one place of divergence."""
    prompts = [ask(name, f"ab{name}rest") for name in "123456"]
    explanation = served(file, *prompts, blocks=99)
    place = loss_of("diverges", explanation, "6").place
    assert (place.first, place.width, place.requests) == (8, 4, 5)
    assert (place.example, place.other) == ("2", "1")
    assert place.shares / place.requests == pytest.approx(2 / 7)
    assert place.tokens == 5 * 5 * BLOCK
    assert explanation.summary().places[0] is place


def test_the_next_turn_of_a_conversation_extends_the_one_before(file):
    """A prompt that continues another one `extends` it and does not diverge."""
    explanation = served(file, ask("one", "ab"), ask("two", "abcd"), blocks=99)
    loss = loss_of("extends", explanation, "two")
    assert (loss.first, loss.other, loss.place) == (8, "one", None)


def test_a_new_key_of_a_partial_block_ends(file):
    """In `keys` accounting a new key of a partial block `ends`: it may begin a longer one."""
    explanation = served(file, ask("one", "abc"), ask("two", "abx", 10), accounting="keys")
    loss = loss_of("ends", explanation, "two")
    assert (loss.first, loss.tokens, loss.other) == (8, 4, "one")


def test_a_prompt_with_no_common_prefix_counts_other_salts(file):
    """A prompt without a common prefix counts the earlier requests of other salts."""
    explanation = served(
        file,
        ask("one", "ab", salt="red"),
        ask("two", "xy", salt="red"),
        ask("three", "pq", salt="blue"),
        blocks=99,
    )
    assert [loss_of("starts", explanation, id_).other_salts for id_ in ("one", "two")] == [0, 0]
    assert loss_of("starts", explanation, "three").other_salts == 2
    assert explanation.summary().salted.tokens == 8


def test_the_last_token_and_a_partial_block_are_granularity(file):
    """A partial block, and the block of the last token, are `granularity`."""
    explanation = served(file, ask("a", "abc"), ask("b", "abc"), ask("c", "abc", 15))
    assert losses_of(explanation.of("b")) == [("granularity", 2, 1)]
    assert losses_of(explanation.of("c")) == [("granularity", 3, 0.75)]


def test_blocks_beyond_the_pool_size_are_truncated(file):
    """Blocks beyond the size of the pool are `truncated`, if an earlier request had them."""
    explanation = served(
        file, ask("a", "abcdef"), ask("b", "abcdef"), blocks=4, accounting="keys"
    )
    assert explanation.of("b").hit == 16
    assert losses_of(explanation.of("b")) == [("truncated", 4, 2)]


def test_only_the_first_admission_is_explained(file):
    """Only the first admission of a request is explained; later ones are counted."""
    explanation = explain(serve(file))
    summary = explanation.summary()
    counts = summary.admitted, summary.rejected, summary.waiting, summary.readmitted
    assert counts == (3, 1, 0, 1)
    assert explanation.of("long").again == 1
    assert explanation.of("huge").state == "rejected"
    assert explanation.of("huge").losses == []


def test_generated_blocks_count_as_a_prompt(file):
    """Keys of a KEYS line belong to the request that has generated them.

    A prompt that contains them extends that request.
    """
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        first = cache.open(ask("first", "ab", output_tokens=9), None, 0)
        cache.commit(first, 8, 1)
        trace.keys(1, request="first", keys=ask("", "abcd").keys[2:])
        cache.open(ask("next", "abcdef"), None, 2)
    follow = explain(file).of("next")
    assert losses_of(follow) == [("in_flight", 2, 2), ("compulsory", 4, 2)]
    assert follow.losses[1].other == "first"


def test_earlier_generated_blocks_leave_a_later_user(file):
    """KEYS of an earlier request leave a later one as the last that had these blocks."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        first = cache.open(ask("first", "ab", output_tokens=9), None, 0)
        cache.close(cache.open(ask("second", "abcd"), None, 1), 1)
        trace.keys(2, request="first", keys=ask("", "abcd").keys[2:])
        cache.close(first, 2)
        cache.open(ask("next", "abcd", 17), None, 3)
    assert loss_of("unstored", explain(file), "next").other == "second"


def test_keys_before_the_admission_count_from_the_admission(file):
    """KEYS before the admission of their request count from the admission on."""
    with Trace(file) as trace:
        cache = KVCache(16, BLOCK, eviction=LRU(), prefix=Radix(), trace=trace)
        first = ask("first", "ab", output_tokens=9)
        trace.request(first, 0)
        trace.keys(0, request="first", keys=ask("", "abc").keys[2:])
        cache.open(first, None, 1)
        cache.open(ask("next", "abcd"), None, 2)
    assert losses_of(explain(file).of("next"))[0] == ("in_flight", 0, 3)


def test_a_cut_trace_is_explained_up_to_the_cut(file):
    """A cut trace is explained up to the cut, and the result has the place of the cut."""
    record(file)
    whole = explain(file)
    file.write_bytes(file.read_bytes()[:-100])
    cut = explain(file)
    assert (whole.complete, cut.complete) == (True, False)
    assert "ends inside line" in cut.cut_reason
    assert cut.summary().as_dict() == whole.summary().as_dict()


def test_a_request_that_was_never_admitted_counts_as_waiting(file):
    """A request that was never admitted counts as waiting."""
    with Trace(file) as trace:
        cache = KVCache(4, BLOCK, trace=trace)
        cache.open(ask("a", "a"), None, 0)
        trace.request(ask("b", "b"), 0)
    assert explain(file).of("b").state == "waiting"
    assert explain(file).summary().waiting == 1


def test_unknown_ids_are_refused_with_the_known_ones(file):
    """An id of digits is found by its text; an unknown id is refused with the known ones."""
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


def test_prefill_is_weighed_by_the_header_or_the_default(file):
    """Prefill is weighed by the model and device of the header, or by the default."""
    requests = [ask("a", "ab")]
    small = served(file, *requests, recompute={"model": "gpt2", "device": "l4"})
    assert (small.cost.model, small.cost.device) == ("gpt2", "l4")
    for unknown in ({"model": "mine", "device": "l4"}, "much", {"token_seconds": 1}):
        assert served(file, *requests, recompute=unknown).cost == default_prefill_cost()
    loss = small.of("a").losses[0]
    assert small.prefill_seconds(loss) == small.cost(0, 8)
    assert small.summary().categories["compulsory"].seconds == small.cost(0, 8)


def test_victims_and_beneficiaries_are_ranked_by_lost_tokens(file):
    """Victims and beneficiaries of evictions are ranked by the tokens that were lost.

    Each loss counts once on both sides.
    """
    explanation = served(
        file, ask("a", "ab"), ask("thief", "pqrstu"), ask("b", "ab", 9), blocks=6
    )
    summary = explanation.summary()
    assert summary.victims == [("b", 8)]
    assert summary.beneficiaries == [("thief", 8)]


def test_times_in_the_json_are_in_seconds(file):
    """The JSON of a loss has the eviction, and the seconds between that and the use."""
    explanation = served(
        file, ask("a", "ab"), ask("thief", "pqrstu"), ask("b", "ab", 9, arrival=10**9), blocks=6
    )
    document = explanation.request_dict(explanation.of("b"))
    (loss, tail) = document["losses"]
    assert loss["eviction"]["before_s"] == pytest.approx(1 - 1e-9)
    assert (loss["eviction"]["for"], loss["other"]) == ("thief", "a")
    assert (tail["category"], tail["eviction"]) == ("granularity", None)
    assert document["missed_tokens"] == 9


def test_tick_adds_up_to_the_size_of_the_file(file):
    """`tick` is called with numbers of bytes that add up to the size of the file."""
    requests = [ask(str(n), "a") for n in range(300)]
    seen = []
    served(file, *requests)
    explain(file, tick=seen.append)
    assert len(seen) > 3
    assert sum(seen) == file.stat().st_size
