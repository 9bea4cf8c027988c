"""Split phases: times by hand, what is moved, back-pressure and failures."""

from tempfile import NamedTemporaryFile

import pytest
from helpers.clusters import Longest, serve_cluster
from helpers.serving import SLOT, ask

from kvcore import InputError
from kvcore.cluster.phases import Split
from kvcore.trace.check import check_trace

ONE = "prefill=1,decode=1,latency=0s"
SLOW = f"{ONE},bandwidth=1GB"
"""A block takes 64 ns, and each step 10 ns."""


def serve(requests, split=SLOW, *, trace=False, **options):
    """Serve `requests` with split phases; return the result."""
    return serve_cluster(requests, split=split, trace=trace, **options).result


def times(result, name):
    """Return the first token and the end of a request, ns."""
    log = result.log
    row = log.ids.index(name)
    return log.first_token[row], log.finish[row]


def test_whole_prompts_move_after_the_prefill():
    """Two blocks take 128 ns from 10 on; two more tokens come 10 ns after one another."""
    result = serve([ask("a", prompt=8, output=3)], f"{SLOW},overlap=whole")
    assert times(result, "a") == (10, 10 + 128 + 20)
    assert list(result.replica) == [1]


def test_layers_move_while_others_are_computed():
    """The first of 5 layers is done at 2: 64 ns from then on."""
    result = serve([ask("a", prompt=4, output=2)], layers=5)
    assert times(result, "a") == (10, 2 + 64 + 10)


def test_the_last_layer_follows_the_prefill():
    """A block that takes 5 ns on the link is there 1 ns after the step: its last layer."""
    result = serve([ask("a", prompt=4, output=2)], f"{ONE},bandwidth=12.8GB", layers=5)
    assert times(result, "a") == (10, 10 + 1 + 10)


def test_chunks_move_while_the_next_is_computed():
    """Of 3 blocks, computed one a step, all but the last are sent before the end."""
    requests = [ask("a", prompt=12, output=2)]
    limits = {"max_tokens": 4, "max_seqs": 1, "layers": 1}
    fast = serve(requests, f"{ONE},bandwidth=8GB", **limits)
    whole = serve(requests, f"{ONE},bandwidth=8GB,overlap=whole", **limits)
    assert times(fast, "a") == (30, 30 + 8 + 10)
    assert times(whole, "a") == (30, 30 + 24 + 10)


def test_latency_comes_after_the_transfer():
    """One block, 64 ns on the link and 100 ns of latency."""
    split = "prefill=1,decode=1,latency=100ns,bandwidth=1GB,overlap=whole"
    assert times(serve([ask("a", prompt=4, output=2)], split), "a") == (10, 10 + 164 + 10)


def test_transfers_take_their_turn_on_a_link():
    """Two prompts of one step, one block each: the second waits for the first."""
    requests = [ask(name, prompt=4, output=2) for name in "ab"]
    result = serve(requests, f"{SLOW},overlap=whole")
    assert sorted(times(result, name)[1] for name in "ab") == [84, 148]
    assert result.phases.links == {"out 0": 128, "into 1": 128}


def test_links_of_two_replicas_do_not_wait_for_each_other():
    """Two of each: with links of their own both requests end at once."""
    requests = [ask(name, prompt=4, output=2) for name in "ab"]
    result = serve(requests, "prefill=2,decode=2,latency=0s,bandwidth=1GB,overlap=whole")
    assert [times(result, name)[1] for name in "ab"] == [84, 84]


def test_blocks_that_are_there_are_not_moved_again():
    """The second request shares two blocks: only its last one moves, and it hits 8 tokens."""
    shared = {"prompt": 12, "output": 2}
    requests = [ask("a", 0, **shared, keys="abc"), ask("b", 1000, **shared, keys="abd")]
    result = serve(requests)
    rows = result.phases.transfers
    assert list(rows.blocks) == [3, 1]
    assert list(rows.reused) == [0, 2]
    assert list(rows.size) == [3 * SLOT, SLOT]
    assert result.phases.moved_bytes == 4 * SLOT
    assert list(result.log.hit) == [0, 8]


def test_hits_count_once_where_a_prompt_is_prefilled():
    """The decode replica's lookups are no hits and no misses."""
    requests = [
        ask(name, at, prompt=8, output=2, keys="ab") for name, at in (("a", 0), ("b", 500))
    ]
    result = serve(requests)
    assert (result.stats.lookup_tokens, result.stats.hit_tokens) == (16, 4)


def test_one_token_needs_no_decode_replica():
    """It ends where it is prefilled."""
    result = serve([ask("a", prompt=4, output=1)])
    assert list(result.replica) == [0]
    assert not result.phases.transfers.ids


def test_the_gap_is_between_the_first_two_tokens():
    """ITL has the transfer: 64 ns and a step, then a step."""
    result = serve([ask("a", prompt=4, output=3)], f"{SLOW},overlap=whole")
    assert list(result.log.tpot()) == [(74 + 10) * 1000 // 2]
    assert result.summary()["phases"]["gap_s"] == pytest.approx(64e-9)


def test_a_full_decode_replica_holds_the_prefill_back():
    """With 4 blocks each, a second prompt of 3 waits on both sides until the first ends."""
    requests = [ask(name, prompt=12, output=4) for name in "abc"]
    result = serve(requests, f"{SLOW},overlap=whole", blocks=4)
    opened, done = result.phases.transfers.opened, result.phases.transfers.done
    ends = [times(result, name)[1] for name in "abc"]
    assert list(opened)[1:] == ends[:2]
    firsts = [times(result, name)[0] for name in "abc"]
    assert firsts[1] == done[0] + 10
    assert firsts[2] == done[1] + 10


def test_preempted_decodes_compute_their_text_there():
    """Two sequences that outgrow the pool: one is computed again, and moves once."""
    requests = [ask(name, prompt=8, output=10) for name in "ab"]
    result = serve(requests, SLOW, blocks=6)
    assert sum(result.log.recomputes) > 0
    assert sorted(result.phases.transfers.ids) == ["a", "b"]


def test_a_prompt_too_long_for_the_decode_pool_is_rejected():
    """Its prefill fits, its output does not: one row, rejected, and nothing is left."""
    result = serve([ask("a", prompt=8, output=20), ask("b", prompt=8, output=4)], blocks=4)
    log = result.log
    assert sorted(log.ids) == ["a", "b"]
    assert set(log.reasons) == {log.ids.index("a")}


class Refuses(Longest):
    """A router that turns all away."""

    def route(self, request, replicas, now):
        """Return nothing."""


def test_the_router_of_the_decode_pool_may_refuse():
    """The prefill replica lets go of its blocks."""
    result = serve([ask("a", prompt=8, output=4)], decode_router=Refuses())
    assert set(result.log.reasons.values()) == {"the router refused it"}


@pytest.mark.parametrize("overlap", ["layers", "whole"])
@pytest.mark.parametrize("replica", [0, 2])
@pytest.mark.parametrize("at", ["5ns", "40ns", "150ns"])
def test_requests_of_a_replica_that_fails_are_served_again(overlap, replica, at):
    """While it prefills, moves or decodes: each ends once, elsewhere."""
    requests = [ask(name, prompt=8, output=9) for name in "abcd"]
    split = f"prefill=2,decode=2,latency=0s,bandwidth=1GB,overlap={overlap}"
    result = serve(requests, split, failures=[f"replica={replica},at={at}"])
    assert sorted(result.log.ids) == [*"abcd"]
    assert not result.log.reasons


def test_what_was_rejected_is_not_served_again():
    """Its prefill fails after the decode replica has rejected it: one row, no retry."""
    requests = [ask("a", prompt=12, output=20)]
    failures = ["replica=0,at=15ns,for=1ns"]
    limits = {"max_tokens": 4, "max_seqs": 1}
    result = serve(requests, blocks=5, failures=failures, **limits)
    assert list(result.log.ids) == ["a"]
    assert list(result.log.reasons.values()) == ["it needs 8 blocks; the pool has 5"]
    assert result.retried == 0


def test_a_request_begins_again_where_it_was_prefilled():
    """Its decode replica fails after the transfer: it hits where it was prefilled before."""
    run = serve_cluster(
        [ask("a", prompt=8, output=20, keys=(1, 2))],
        split=f"{SLOW},overlap=whole",
        failures=["replica=1,at=200ns,for=1ns"],
    )
    routes = [(line["t"], line["replica"], line["leg"]) for line in run.of("ROUTE")]
    assert routes[2:3] == [(200, 0, "prefill")]
    assert run.result.retried == 1
    assert not run.result.log.reasons
    with NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(run.trace)
        file.flush()
        assert check_trace(file.name).complete


def test_a_scheduler_with_a_queue_of_its_own_hears_of_what_is_given_up():
    """A request that waits to decode where its prefill is lost is no longer planned there."""
    requests = [ask(name, prompt=12, output=9, tenant=name) for name in "abcd"]
    split = "prefill=2,decode=1,latency=0s,bandwidth=1GB"
    limits = {"max_tokens": 4, "max_seqs": 1}
    failures = ["replica=1,at=15ns,for=1ns"]
    result = serve(requests, split, scheduler="fair", failures=failures, **limits)
    assert sorted(result.log.ids) == [*"abcd"]


def test_usage_is_that_of_the_moment_a_request_is_routed():
    """A decode replica that is jumping is seen with the blocks that it has taken by then."""
    seen = Longest()
    requests = [ask("a", prompt=4, output=30), ask("b", 200, prompt=4, output=2)]
    serve(requests, f"{ONE},bandwidth=1GB", decode_router=seen, blocks=20)
    # It decodes from 66 on: at 200 the 14th slot beside those of the prompt is taken.
    assert seen.saw["b"] == [(200, [(1, 0, 5 / 20)])]


def test_a_pool_that_is_down_is_waited_for():
    """The decode replica returns at 500: its requests go on then."""
    split = f"{SLOW},overlap=whole"
    result = serve(
        [ask("a", prompt=4, output=2)], split, failures=["replica=1,at=0s,for=500ns"]
    )
    assert times(result, "a") == (10, 500 + 64 + 10)


def test_without_a_decode_replica_requests_are_refused():
    """It does not return: each is refused after its prefill."""
    result = serve([ask("a", prompt=4, output=2)], failures=["replica=1,at=0s"])
    assert list(result.log.reasons.values()) == ["all replicas that decode have failed"]


def test_what_waits_for_blocks_of_the_refused_runs():
    """The decode replica fails for good while K/V moves: the next prefill has room then."""
    requests = [ask(name, prompt=12, output=2) for name in "ab"]
    result = serve(requests, f"{SLOW},overlap=whole", blocks=4, failures=["replica=1,at=20ns"])
    assert sorted(result.log.ids) == ["a", "b"]
    assert set(result.log.reasons.values()) == {"all replicas that decode have failed"}


def test_a_mixed_replica_is_borrowed_for_a_long_queue():
    """Two prompts wait at the prefill replica: a third runs whole at the mixed one."""
    requests = [ask(name, prompt=8, output=3) for name in "abc"]
    split = "prefill=1,decode=1,mixed=1,queue=16,latency=0s"
    result = serve(requests, split)
    assert dict(zip(result.log.ids, result.replica, strict=True)) == {"a": 1, "b": 1, "c": 2}


def test_a_mixed_replica_is_borrowed_for_a_full_memory():
    """The decode replica has 9 of 10 blocks in use: the next request goes to the mixed one."""
    requests = [ask("a", prompt=36, output=4), ask("b", 100, prompt=4, output=4)]
    result = serve(
        requests, "prefill=1,decode=1,mixed=1,latency=0s,overlap=whole", blocks=10, max_seqs=2
    )
    assert dict(zip(result.log.ids, result.replica, strict=True))["b"] in (1, 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prefill=1", "such as prefill=4,decode=2"),
        ("prefill=0,decode=1", "1 or more"),
        ("prefill=1,decode=1,speed=3", "speed"),
        ("prefill=1,decode=1,overlap=half", "layers or whole"),
        ("prefill=1,prefill=2,decode=1", "write one of"),
        ("prefill=1,decode=1,bandwidth=0", "bandwidth"),
        ("prefill=x,decode=1", "prefill=x"),
    ],
)
def test_refuses(text, reason):
    """What cannot be is named."""
    with pytest.raises(InputError, match=reason):
        Split.parse(text)


def test_text_and_back():
    """The text of a split reads as the same."""
    split = Split.parse("prefill=4,decode=2,bandwidth=25GB/s,latency=5us,overlap=whole,mixed=1")
    assert split.bandwidth == 25_000_000_000
    assert Split.parse(str(split)) == split
