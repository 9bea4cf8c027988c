"""Split phases: times computed by hand, transfers, back-pressure and failures."""

from tempfile import NamedTemporaryFile

import attrs
import pytest
from helpers.clusters import Longest, serve_cluster
from helpers.serving import SLOT, ask
from helpers.traces import lines, seal

import kvcore
from kvcore import InputError
from kvcore.config import RunConfig
from kvcore_cluster.phases import Split
from kvcore_plugins.scheduler import Fair
from kvcore_replay.check.trace import check_trace
from kvcore_replay.recorded_run import recorded_run

ONE = "prefill=1,decode=1,latency=0s"
SLOW = f"{ONE},bandwidth=1GB"
"""A block takes 64 ns, and each step 10 ns."""


def serve(requests, split=SLOW, *, trace=False, **options):
    """Serve `requests` with split phases; return the result."""
    return serve_cluster(requests, split=split, trace=trace, **options).result


def times(result, name):
    """Return the times of the first token and of the end of a request in ns."""
    log = result.log
    row = log.ids.index(name)
    return log.first_token[row], log.finish[row]


def test_whole_prompts_move_after_the_prefill():
    """With `overlap=whole` blocks move after the prefill: 2 blocks take 128 ns from 10 on."""
    result = serve([ask("a", prompt=8, output=3)], f"{SLOW},overlap=whole")
    assert times(result, "a") == (10, 10 + 128 + 20)
    assert list(result.replica) == [1]


@pytest.mark.parametrize(
    ("output", "first_output", "expected"),
    [
        (3, "prefill", (10, 10 + 128 + 20)),
        (3, "transfer", (10 + 128, 10 + 128 + 20)),
        (3, "decode", (10 + 128 + 10, 10 + 128 + 30)),
        (1, "prefill", (10, 10)),
        (1, "transfer", (10 + 128, 10 + 128)),
        (1, "decode", (10 + 128 + 10, 10 + 128 + 10)),
    ],
)
def test_the_first_token_comes_from_where_it_is_said_to(output, first_output, expected):
    """TTFT has the transfer if K/V brings the first token, and a step more if decode does."""
    split = f"{SLOW},overlap=whole,first_output={first_output}"
    result = serve([ask("a", prompt=8, output=output)], split)
    assert times(result, "a") == expected


@pytest.mark.parametrize(
    ("like", "first_output", "expected"),
    [
        ("kvcore", None, "prefill"),
        ("sglang", None, "transfer"),
        ("vllm:lag=0", None, "decode"),
        ("vllm:lag=0", "prefill", "prefill"),
    ],
)
def test_rules_of_an_engine_say_where_the_first_token_comes_from(like, first_output, expected):
    """`like` sets it as the engine has it, where the run does not say it."""
    config = RunConfig(
        "cluster", like=like, first_output=first_output, replicas=2, disaggregate=ONE
    )
    assert config.build().split.first_output == expected


@pytest.mark.parametrize(
    ("first_output", "itl"), [("transfer", 2), ("decode", 2), ("prefill", 2)]
)
def test_gaps_between_tokens_are_those_that_a_client_sees(first_output, itl):
    """The transfer is in TTFT or in the first gap, not in both."""
    split = f"{SLOW},overlap=whole,first_output={first_output}"
    result = serve([ask("a", prompt=8, output=1 + itl)], split)
    first, finish = times(result, "a")
    gaps = 20 if first_output != "prefill" else 128 + 20
    assert finish - first == gaps
    assert list(result.log.tpot()) == [gaps * 1000 // itl]


@pytest.mark.parametrize("first_output", ["transfer", "decode"])
def test_a_trace_has_the_first_token_that_a_client_gets(tmp_path, first_output):
    """A trace gives the times of its run, wherever the first token comes from."""
    path = tmp_path / "trace.jsonl"
    options = {"disaggregate": "prefill=1,decode=1,bandwidth=1GB", "blocks": 300}
    result = kvcore.simulate_cluster(
        "zipf:requests=20,rate=5", first_output=first_output, trace=path, **options
    )
    assert check_trace(path).complete
    run = recorded_run(path)
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert getattr(run, name) == result.summary()[name]


def test_a_trace_may_say_that_the_prefill_answers(tmp_path):
    """A trace whose HEADER names the default `first_output` reads as one that leaves it out."""
    path = tmp_path / "trace.jsonl"
    kvcore.simulate_cluster(
        "zipf:requests=5", disaggregate="prefill=1,decode=1", blocks=300, trace=path
    )
    events = lines(path)
    events[0]["routing"]["disaggregate"] += ",first_output=prefill"
    assert check_trace(seal(tmp_path / "named.jsonl", events)).complete


def test_a_first_token_without_split_phases_is_refused():
    """Where the first token comes from has no effect if one replica does both phases."""
    with pytest.raises(InputError, match="give disaggregate too"):
        kvcore.simulate_cluster("zipf:requests=5", replicas=2, first_output="decode")


def test_layers_move_while_others_are_computed():
    """By default a layer moves while later ones are computed.

    The first of 5 layers is computed at 2 ns, and the link takes 64 ns from then on.
    """
    result = serve([ask("a", prompt=4, output=2)], layers=5)
    assert times(result, "a") == (10, 2 + 64 + 10)


def test_the_last_layer_follows_the_prefill():
    """On a fast link only the last layer moves after the prefill, here for 1 ns."""
    result = serve([ask("a", prompt=4, output=2)], f"{ONE},bandwidth=12.8GB", layers=5)
    assert times(result, "a") == (10, 10 + 1 + 10)


def test_chunks_move_while_the_next_is_computed():
    """The blocks of a chunk move while the next chunk is computed, unless `overlap=whole`."""
    requests = [ask("a", prompt=12, output=2)]
    limits = {"max_tokens": 4, "max_seqs": 1, "layers": 1}
    fast = serve(requests, f"{ONE},bandwidth=8GB", **limits)
    whole = serve(requests, f"{ONE},bandwidth=8GB,overlap=whole", **limits)
    assert times(fast, "a") == (30, 30 + 8 + 10)
    assert times(whole, "a") == (30, 30 + 24 + 10)


def test_latency_comes_after_the_transfer():
    """The link's latency is added to the time of the transfer."""
    split = "prefill=1,decode=1,latency=100ns,bandwidth=1GB,overlap=whole"
    assert times(serve([ask("a", prompt=4, output=2)], split), "a") == (10, 10 + 164 + 10)


def test_transfers_on_one_link_wait_for_each_other():
    """A second transfer on a link waits for the first."""
    requests = [ask(name, prompt=4, output=2) for name in "ab"]
    result = serve(requests, f"{SLOW},overlap=whole")
    assert sorted(times(result, name)[1] for name in "ab") == [84, 148]
    assert result.phases.links == {"out 0": 128, "into 1": 128}


def test_links_of_two_replicas_do_not_wait_for_each_other():
    """Transfers on links of different replicas run at the same time."""
    requests = [ask(name, prompt=4, output=2) for name in "ab"]
    result = serve(requests, "prefill=2,decode=2,latency=0s,bandwidth=1GB,overlap=whole")
    assert [times(result, name)[1] for name in "ab"] == [84, 84]


def test_blocks_cached_at_the_decode_replica_are_not_moved():
    """Blocks that the decode replica already caches are reused, not moved."""
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
    """Hits count only where a prompt is prefilled, not at the decode replica."""
    requests = [
        ask(name, at, prompt=8, output=2, keys="ab") for name, at in (("a", 0), ("b", 500))
    ]
    result = serve(requests)
    assert (result.stats.lookup_tokens, result.stats.hit_tokens) == (16, 4)


def test_one_token_needs_no_decode_replica():
    """A request of one output token ends at its prefill replica."""
    result = serve([ask("a", prompt=4, output=1)])
    assert list(result.replica) == [0]
    assert not result.phases.transfers.ids


def test_the_gap_is_between_the_first_two_tokens():
    """The time between the first two tokens includes the transfer."""
    result = serve([ask("a", prompt=4, output=3)], f"{SLOW},overlap=whole")
    assert list(result.log.tpot()) == [(74 + 10) * 1000 // 2]
    assert result.summary()["phases"]["gap_s"] == pytest.approx(64e-9)


def test_a_full_decode_replica_holds_the_prefill_back():
    """A prefill waits until the decode replica has blocks for its prompt."""
    requests = [ask(name, prompt=12, output=4) for name in "abc"]
    result = serve(requests, f"{SLOW},overlap=whole", blocks=4)
    opened, done = result.phases.transfers.opened, result.phases.transfers.done
    ends = [times(result, name)[1] for name in "abc"]
    assert list(opened)[1:] == ends[:2]
    firsts = [times(result, name)[0] for name in "abc"]
    assert firsts[1] == done[0] + 10
    assert firsts[2] == done[1] + 10


def test_preempted_decodes_are_recomputed_at_their_replica():
    """A preempted decode is recomputed at its replica, and its K/V is not moved again."""
    requests = [ask(name, prompt=8, output=10) for name in "ab"]
    result = serve(requests, SLOW, blocks=6)
    assert sum(result.log.recomputes) > 0
    assert sorted(result.phases.transfers.ids) == ["a", "b"]


def test_a_prompt_too_long_for_the_decode_pool_is_rejected():
    """A request whose output does not fit the decode pool is rejected once."""
    result = serve([ask("a", prompt=8, output=20), ask("b", prompt=8, output=4)], blocks=4)
    log = result.log
    assert sorted(log.ids) == ["a", "b"]
    assert set(log.reasons) == {log.ids.index("a")}


class Refuses(Longest):
    """A router that refuses every request."""

    def route(self, request, replicas, now):
        """Return no replica."""


def test_the_router_of_the_decode_pool_may_refuse():
    """A request that the decode router refuses is rejected with that reason."""
    result = serve([ask("a", prompt=8, output=4)], decode_router=Refuses())
    assert set(result.log.reasons.values()) == {"the router refused it"}


@pytest.mark.parametrize("overlap", ["layers", "whole"])
@pytest.mark.parametrize("replica", [0, 2])
@pytest.mark.parametrize("at", [5, 40, 150])
def test_requests_of_a_replica_that_fails_are_served_again(overlap, replica, at):
    """Requests of a failed replica are served again, whichever phase they are in.

    With `overlap=whole` no request has been sent to a decode replica after 5 ns.
    """
    requests = [ask(name, prompt=8, output=9) for name in "abcd"]
    split = f"prefill=2,decode=2,latency=0s,bandwidth=1GB,overlap={overlap}"
    result = serve(requests, split, failures=[f"replica={replica},at={at}ns"])
    assert sorted(result.log.ids) == [*"abcd"]
    assert not result.log.reasons
    assert (result.retried > 0) == ((overlap, replica, at) != ("whole", 2, 5))


def test_a_rejected_request_is_not_retried():
    """A request that the decode pool has rejected is not retried when its prefill fails."""
    requests = [ask("a", prompt=12, output=20)]
    failures = ["replica=0,at=15ns,for=1ns"]
    limits = {"max_tokens": 4, "max_seqs": 1}
    result = serve(requests, blocks=5, failures=failures, **limits)
    assert list(result.log.ids) == ["a"]
    assert list(result.log.reasons.values()) == ["it needs 8 blocks; the pool has 5"]
    assert result.retried == 0


def test_after_a_decode_failure_a_request_returns_to_its_prefill_replica():
    """After its decode replica has failed, a request returns to its prefill replica."""
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


def test_the_decode_scheduler_drops_a_lost_request():
    """After a failed prefill the decode scheduler drops the request, which is served again."""
    withdrawn = []

    class Recording(Fair):
        """The scheduler `fair`, whose queues are its own; it records withdrawn requests."""

        def withdrawn(self, job, now):
            """Record the request, and remove it from the queue."""
            withdrawn.append((job.request.id, now))
            super().withdrawn(job, now)

    requests = [ask(name, prompt=12, output=9, tenant=name) for name in "abcd"]
    split = "prefill=2,decode=1,latency=0s,bandwidth=1GB"
    limits = {"max_tokens": 4, "max_seqs": 1}
    failures = ["replica=1,at=15ns,for=1ns"]
    result = serve(requests, split, scheduler=Recording, failures=failures, **limits)
    assert withdrawn == [("b", 15)]
    assert sorted(result.log.ids) == [*"abcd"]
    assert not result.log.reasons


def test_the_router_is_given_the_usage_at_the_time_of_routing():
    """The router is given a decode replica's usage at the time of routing, even in a jump."""
    seen = Longest()
    requests = [ask("a", prompt=4, output=30), ask("b", 200, prompt=4, output=2)]
    serve(requests, f"{ONE},bandwidth=1GB", decode_router=seen, blocks=20)
    # It decodes from 66 ns on: at 200 ns the 14th token slot after the prompt is in use.
    assert seen.saw["b"] == [(200, [(1, 0, 5 / 20)])]


def test_requests_wait_for_a_pool_that_is_down():
    """Requests wait for a decode replica that is down and returns."""
    split = f"{SLOW},overlap=whole"
    result = serve(
        [ask("a", prompt=4, output=2)], split, failures=["replica=1,at=0s,for=500ns"]
    )
    assert times(result, "a") == (10, 500 + 64 + 10)


def test_without_a_decode_replica_requests_are_refused():
    """If all decode replicas have failed for good, requests are rejected after prefill."""
    result = serve([ask("a", prompt=4, output=2)], failures=["replica=1,at=0s"])
    assert list(result.log.reasons.values()) == ["all replicas that decode have failed"]


def test_a_prefill_gets_the_blocks_of_rejected_requests():
    """A prefill that waits for blocks runs after the requests that hold them are rejected."""
    requests = [ask(name, prompt=12, output=2) for name in "ab"]
    result = serve(requests, f"{SLOW},overlap=whole", blocks=4, failures=["replica=1,at=20ns"])
    assert sorted(result.log.ids) == ["a", "b"]
    assert set(result.log.reasons.values()) == {"all replicas that decode have failed"}


def test_a_mixed_replica_is_borrowed_for_a_long_queue():
    """Behind a long prefill queue a request runs entirely at a mixed replica."""
    requests = [ask(name, prompt=8, output=3) for name in "abc"]
    split = "prefill=1,decode=1,mixed=1,queue=16,latency=0s"
    result = serve(requests, split)
    assert dict(zip(result.log.ids, result.replica, strict=True)) == {"a": 1, "b": 1, "c": 2}


def test_a_mixed_replica_is_borrowed_for_a_full_memory():
    """A request decodes at the mixed replica while the decode replica is almost full.

    Request `a` uses 9 of its 10 blocks from 10 ns on, and has ended at 60 ns.
    """
    for at, replica in ((20, 2), (60, 1)):
        requests = [ask("a", prompt=36, output=4), ask("b", at, prompt=4, output=4)]
        result = serve(
            requests, "prefill=1,decode=1,mixed=1,latency=0s,overlap=whole", blocks=10
        )
        assert dict(zip(result.log.ids, result.replica, strict=True)) == {"a": 1, "b": replica}


def test_the_text_of_a_split_parses_to_an_equal_split():
    """The text of a split is parsed as an equal split."""
    split = Split.parse("prefill=4,decode=2,bandwidth=25GB/s,latency=5us,overlap=whole,mixed=1")
    assert "first_output" not in str(split)
    for first_output in "transfer", "decode":
        other = attrs.evolve(split, first_output=first_output)
        assert Split.parse(str(other)) == other
    assert split.bandwidth == 25_000_000_000
    assert Split.parse(str(split)) == split


@pytest.mark.parametrize(
    ("router", "queue"),
    [
        ("session:seed=2", 8192),
        ("llm-d:queue=1,kv=2", 8192),
        ("llm-d:kv=2,queue=1", 7),
        ("dynamo:delta=0.5,seed=3", 1),
    ],
)
def test_the_router_of_a_split_keeps_its_options(router, queue):
    """A router of any options is read back, also if an option is named as a field is."""
    split = Split(1, 2, router=router, queue=queue, latency=5, first_output="decode")
    assert Split.parse(str(split)) == split


def test_options_of_a_router_go_before_the_next_field():
    """A name that no field has is an option of the router before it; else it is an error."""
    split = Split.parse("prefill=1,decode=1,router=llm-d:queue=1,kv=2,latency=0s")
    assert (split.router, split.queue, split.latency) == ("llm-d:queue=1,kv=2", 8192, 0)
    with pytest.raises(InputError, match=r"'overlp=whole' .*overlap"):
        Split.parse("prefill=1,decode=1,router=session,overlp=whole")
    with pytest.raises(InputError, match="'decode=2' is there twice: write"):
        Split.parse("prefill=1,decode=1,decode=2")


@pytest.mark.parametrize(
    "wrong",
    [
        {"mixed": -5},
        {"mixed": 0.5},
        {"queue": 0},
        {"latency": -1},
        {"latency": 1.5},
        {"bandwidth": "50GB"},
        {"overlap": "x"},
        {"first_output": "x"},
    ],
)
def test_a_split_that_cannot_be_is_refused(wrong):
    """Fields that are given in Python are checked as those in a text."""
    with pytest.raises(InputError, match="give "):
        Split(1, 1, **wrong)


def test_a_trace_whose_decode_router_has_options_is_checked(tmp_path):
    """The check reads the pools of a split whose router has options."""
    trace = tmp_path / "split.jsonl"
    split = "prefill=1,decode=1,router=llm-d:queue=1,kv=2"
    kvcore.simulate_cluster(
        "zipf:requests=5", model="llama-3.1-8b", disaggregate=split, trace=trace
    )
    assert check_trace(trace).complete
