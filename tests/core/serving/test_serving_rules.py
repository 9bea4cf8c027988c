"""The rules by which engines differ, each alone: steps of 10 ns, blocks of 4 tokens."""

from typing import ClassVar

import attrs
import pytest
from helpers.jobs import job
from helpers.schedulers import scheduler_of
from helpers.serving import Even, ask, serve, servers
from hypothesis import given

import kvcore
from kvcore import InputError
from kvcore.config import RunConfig
from kvcore.config.like import LIKENESSES
from kvcore.serving import Batching, StepPlan
from kvcore.serving.scheduler import TokenRatio
from kvcore_events.model import BlockStored
from kvcore_plugins.scheduler import FCFS
from kvcore_replay.export import event_batches

TWINS = [ask("a", 0, 9, 1, keys=[1, 2]), ask("b", 0, 9, 1, keys=[1, 2])]


@pytest.mark.parametrize(("commit", "hit"), [("computed", 0), ("scheduled", 8)])
def test_blocks_can_be_hit_once_they_are_scheduled(commit, hit):
    """With `commit=scheduled`, a request hits blocks that its own step will compute."""
    assert serve(TWINS, commit=commit).rows["b"]["hit"] == hit


def test_only_scheduled_blocks_of_the_current_chunk_can_be_hit():
    """With `commit=scheduled`, only blocks of the chunk in the current step can be hit."""
    rows = serve(TWINS, commit="scheduled", max_tokens=300, max_chunk=4).rows
    assert rows["b"]["hit"] == 4


@pytest.mark.parametrize(("reserve", "blocks"), [("prompt", 5), ("chunk", 2)])
def test_blocks_of_a_prompt_may_be_allocated_chunk_by_chunk(reserve, blocks):
    """An admission allocates blocks for the whole prompt, or for its first chunk."""
    run = serve([ask("a", 0, 20, 1)], reserve=reserve, max_tokens=8, max_seqs=2)
    first = next(line for line in run.lines if line["event"] == "ALLOC")
    assert sum(abs(count) for _, count in first["runs"]) == blocks


@pytest.mark.parametrize(
    ("reserve", "admitted"), [("prompt", 40), ("chunk", 40), ("first-chunk", 10)]
)
def test_a_prompt_waits_until_all_of_it_fits(reserve, admitted):
    """A prompt waits until all of it fits, unless `reserve=first-chunk`."""
    requests = [ask("a", 0, 8, 4), ask("b", 1, 20, 1)]
    run = serve(requests, blocks=6, reserve=reserve, max_tokens=9, max_seqs=2)
    assert run.rows["b"]["admitted"] == admitted


def test_a_prompt_without_blocks_for_a_chunk_preempts_the_last_job():
    """A prompt without blocks for its next chunk preempts the last job in order."""
    requests = [ask("a", 0, 16, 1), ask("b", 0, 16, 1)]
    rows = serve(requests, blocks=6, reserve="first-chunk", max_chunk=4).rows
    assert (rows["a"]["recomputes"], rows["b"]["recomputes"]) == (0, 1)


@pytest.mark.parametrize(("null_block", "kept"), [(False, 5), (True, 4)])
def test_the_watermark_of_all_blocks_is_rounded_down(null_block, kept):
    """With a null block, the watermark counts it and is rounded down.

    5 % of 95 blocks are 5, and of 96 with the null block 4.
    """
    assert Batching(watermark=0.05, null_block=null_block).reserved_blocks(95) == kept


def test_the_null_block_reduces_the_pool():
    """The null block reduces the pool by one block."""
    result = kvcore.simulate("zipf:requests=5", blocks=900, null_block=True)
    assert result.cache.pool.blocks == 899


def test_a_pool_of_the_null_block_alone_is_refused():
    """A pool of the null block alone raises InputError."""
    with pytest.raises(InputError, match="never used: give 2 or more"):
        kvcore.simulate("zipf:requests=5", blocks=1, null_block=True)


@pytest.mark.parametrize(("unchunked", "first"), [("alone", 20), ("wait", 50)])
def test_an_unchunked_prompt_waits_for_room(unchunked, first):
    """A prompt too large for the rest of a step gets a step alone, or waits.

    The prompt has 8 tokens, and two sequences decode in a step of 9.
    """
    requests = [ask("a", 0, 2, 4), ask("b", 0, 2, 4), ask("c", 1, 8, 1)]
    run = serve(requests, unchunked=unchunked, chunked=False, max_tokens=9, max_seqs=4)
    assert run.rows["c"]["first_token"] == first


def test_a_prompt_that_no_step_can_hold_is_rejected():
    """With `unchunked=wait`, a request that no step can hold is rejected at once."""
    run = serve([ask("a", 0, 8, 3)], unchunked="wait", chunked=False, max_tokens=9, max_seqs=2)
    assert run.rejected == {
        "a": "its 10 tokens may have to be computed in one step, which has 9 at most"
    }


def test_max_chunk_limits_a_prompt_beside_others_only():
    """`max_chunk` limits the chunk of a prompt, but not if it is alone."""
    both = serve([ask("a", 0, 12, 1), ask("b", 0, 12, 1)], max_chunk=4).rows
    assert (both["a"]["first_token"], both["b"]["first_token"]) == (30, 30)
    assert serve([ask("a", 0, 12, 1)], max_chunk=4).rows["a"]["first_token"] == 10


@pytest.mark.parametrize(("generated", "again"), [("keyed", 0), ("cached", 8)])
def test_generated_blocks_stay_cached(generated, again):
    """With `generated=cached`, a preempted request hits the blocks that it has generated."""
    requests = [ask("a", 0, 4, 13, keys=[1]), ask("b", 0, 4, 13, keys=[2])]
    run = serve(requests, blocks=7, generated=generated)
    back = [line for line in run.lines if line["event"] == "HIT" and line.get("again")]
    assert [line["blocks"] * 4 - 4 for line in back] == [again]


def test_other_requests_do_not_hit_generated_blocks():
    """Generated blocks without keys are not hit by other requests."""
    requests = [ask("a", 0, 6, 9, keys=[1]), ask("b", 500, 12, 1, keys=[1, 2, 3])]
    assert serve(requests, generated="cached").rows["b"]["hit"] == 4


def test_generated_blocks_begin_inside_a_key():
    """Requests hit a common prompt that ends within a key, and generate blocks after it."""
    requests = [ask(n, n * 500, 20, 9, keys=[1, 2], key_tokens=16) for n in range(3)]
    run = serve(requests, generated="cached", key_tokens=16)
    assert [row["hit"] for row in run.rows.values()] == [0, 16, 16]


@pytest.mark.parametrize("key_tokens", [4, 16])
def test_generated_blocks_are_exported_as_events(key_tokens, tmp_path):
    """Generated blocks are exported under hashes of their own, and removed when evicted."""
    keys = [1] if key_tokens == 16 else [1, 2, 3]
    requests = [
        ask(n, 400 * n, 18, 30, keys=[*keys, 10 + n], key_tokens=key_tokens) for n in range(4)
    ]
    run = serve(requests, blocks=20, generated="cached", key_tokens=key_tokens)
    (tmp_path / "run.jsonl").write_bytes(run.trace)
    stored, generated = [], sum(line.get("generated", False) for line in run.lines)
    for batch in event_batches(tmp_path / "run.jsonl"):
        for event in batch.events:
            if isinstance(event, BlockStored):
                stored += event.hashes
            else:
                assert set(event.hashes) <= set(stored)
                stored = [each for each in stored if each not in event.hashes]
    assert generated == 4
    assert len(set(stored)) == len(stored) == run.result.cache.tree.cached_blocks


@pytest.mark.parametrize(("allowed", "admitted"), [(True, 10), (False, 20)])
def test_a_step_that_preempts_admits_no_job(allowed, admitted):
    """With `admit_after_preemption=False`, a step that preempts a job admits none."""
    requests = [
        ask("a", 0, 4, 9, priority=2),
        ask("b", 0, 8, 9, priority=0),
        ask("c", 5, 4, 1, priority=1),
    ]
    run = serve(
        requests,
        blocks=4,
        scheduler=scheduler_of("priority"),
        admit_after_preemption=allowed,
    )
    assert run.rows["b"]["recomputes"]
    assert run.rows["c"]["admitted"] == admitted


@pytest.mark.parametrize(("ties", "victim"), [("last", "b"), ("first", "a")])
def test_ties_selects_which_of_two_equal_jobs_is_preempted(ties, victim):
    """`ties` selects which of two equal jobs is preempted: the last or the first admitted."""
    requests = [ask("a", 0, 4, 9), ask("b", 0, 4, 9)]
    run = serve(requests, blocks=4, scheduler=scheduler_of("priority"), ties=ties)
    assert {name for name, row in run.rows.items() if row["recomputes"]} == {victim}


@pytest.mark.parametrize(("lag", "admitted"), [(0, 10), (1, 20)])
def test_an_arrival_during_a_step_is_admitted_a_step_later(lag, admitted):
    """With `lag=1`, a request that arrives during a step is admitted one step later."""
    run = serve([ask("a", 0, 4, 9), ask("b", 5, 4, 1)], lag=lag)
    assert run.rows["b"]["admitted"] == admitted


@pytest.mark.parametrize(("lag", "admitted"), [(0, 20), (1, 30)])
def test_the_slot_of_a_finished_request_is_free_a_step_later(lag, admitted):
    """With `lag=1`, the slot of a finished request is free one step later."""
    requests = [ask("a", 0, 4, 2), ask("c", 0, 4, 9), ask("b", 1, 4, 2)]
    run = serve(requests, lag=lag, max_seqs=2)
    assert run.rows["a"]["finish"] == 20
    assert run.rows["b"]["admitted"] == admitted


def test_a_plan_may_pause_a_request_that_has_just_finished():
    """With `lag=1`, a plan may pause a finished request, which still runs, and admit it."""

    class Swap(FCFS):
        """A scheduler that pauses all running jobs, and offers them first."""

        name: ClassVar[str] = "swap"

        def plan(self, state):
            """Return a plan for all jobs, the running ones first."""
            return StepPlan([*state.running, *state.waiting], state.running)

    run = serve([ask("a"), ask("b")], scheduler=Swap(), max_seqs=1, lag=1)
    assert [row["finish"] for row in run.rows.values()] == [10, 20]


def test_a_request_to_an_idle_server_is_admitted_at_once():
    """With `lag=1`, a request to an idle server is admitted at once."""
    run = serve([ask("a", 0, 4, 3), ask("b", 500, 4, 1)], lag=1)
    assert run.rows["b"]["admitted"] == 500


@attrs.define(slots=False, eq=False)
class FrontEnd(Even):
    """A latency model with steps of 10 ns and a front end of 25 ns."""

    name: ClassVar[str] = "front-end"
    frontend = 25e-9


def test_a_front_end_comes_before_the_queue():
    """With a front end of 25 ns, requests are planned 25 ns after their arrival."""
    requests = [ask("a", 100, 4, 9), ask("b", 131, 4, 1)]
    run = serve(requests, latency=FrontEnd())
    assert [run.rows[name]["admitted"] for name in "ab"] == [125, 165]
    assert [run.rows[name]["arrival"] for name in "ab"] == [100, 131]
    assert run.timeline("REQUEST") == ["100 REQUEST a", "131 REQUEST b"]


@pytest.mark.parametrize("lag", [0, 1])
@given(server=servers())
def test_jumps_behind_a_front_end(lag, server):
    """With a front end, jumps over decode steps give the same trace as single steps."""
    jumps = server.run("fcfs", latency=FrontEnd(), lag=lag)
    steps = server.run("fcfs", latency=FrontEnd(), lag=lag, jumps=False)
    assert jumps.trace == steps.trace


def test_max_model_len_cuts_outputs_and_rejects_prompts():
    """`max_model_len` cuts outputs, and rejects prompts that leave no room for one."""
    run = serve([ask("a", 0, 8, 9), ask("b", 0, 12, 1)], max_model_len=12)
    assert run.rows["a"]["output"] == 4
    assert run.rejected == {"b": "its prompt has 12 tokens, and max_model_len is 12"}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"lag": 2}, "lag=2: a plan knows of the step before it"),
        (
            {"reserve": "all"},
            "reserve='all' is not known; there are: prompt, chunk, first-chunk",
        ),
        ({"max_chunk": 0}, "max_chunk=0: give whole tokens, at least 1, or None"),
        ({"max_chunk": 8, "chunked": False}, "max_chunk=8: prompts are not chunked"),
        ({"null_block": 1}, "null_block=1 must be True or False"),
        ({"max_model_len": 1.5}, "max_model_len=1.5: give whole tokens"),
    ],
)
def test_wrong_rules_are_refused(rule, message):
    """The error for a wrong rule names the option and the accepted values."""
    with pytest.raises(InputError, match=message):
        Batching(**rule)


def test_a_lag_with_a_retention_policy_is_refused():
    """`lag=1` with a retention policy raises InputError."""
    with pytest.raises(InputError, match="lag=1 with a retention policy"):
        serve([ask("a")], lag=1, retention="window:tokens=4")


def test_defaults_are_left_out_of_headers():
    """A header has the limits, and only the rules that are not the default."""
    limits = {"max_tokens", "max_seqs", "chunked", "steps", "watermark"}
    assert set(Batching().as_dict()) == limits
    assert Batching(lag=1).as_dict().keys() - limits == {"lag"}


class TestLike:
    """The option `like`: the rules of an engine become the defaults."""

    @pytest.mark.parametrize("engine", LIKENESSES)
    def test_options_of_an_engine_are_options_of_a_run(self, engine):
        """Each option of an engine is valid, and its value is kept."""
        config = RunConfig.of(like=engine)
        for name, value in LIKENESSES[engine].options.items():
            got = getattr(config, name)
            assert (got if type(got) is type(value) else str(got)) == value

    def test_given_options_win(self):
        """Options that are given override those of the engine."""
        config = RunConfig.of(like="vllm", lag=0, watermark=0.05)
        assert (config.lag, config.watermark, config.commit) == (0, 0.05, "scheduled")

    def test_an_unknown_engine_is_refused(self):
        """The error for an unknown engine lists the known ones."""
        with pytest.raises(InputError, match=r"like: 'vlm' is no engine; there are: .*vllm"):
            RunConfig.of(like="vlm")

    def test_a_run_with_like_equals_one_with_the_options_of_the_engine(self):
        """A run with `like` equals a run with the options that it stands for."""
        given = {"limit": 40, "blocks": 3000, "block_size": 16}
        like = kvcore.simulate("mooncake", like="vllm", **given)
        options = kvcore.simulate("mooncake", **given, **LIKENESSES["vllm"].options)
        assert like.summary() | {"wall_s": 0} == options.summary() | {"wall_s": 0}


@pytest.mark.parametrize(
    ("blocks", "ratio", "admitted"),
    [(7, None, 10), (9, 0.01, 120), (10, 0.3, 10), (10, 0.4, 120)],
)
def test_an_admission_leaves_blocks_for_tokens_to_be_generated(blocks, ratio, admitted):
    """An admission leaves blocks for its output and a share of that of running requests.

    When b arrives, a holds 3 blocks and has 11 tokens to generate. The prompt of b needs 2
    blocks; its output, a block and 0.3 or 0.4 of the 11 tokens need 5 or 6 blocks more.
    """
    requests = [ask("a", 0, 8, 12), ask("b", 5, 8, 12)]
    rows = serve(requests, blocks=blocks, watermark=0, new_token_ratio=ratio).rows
    assert rows["b"]["admitted"] == admitted


def test_the_ratio_falls_and_is_set_by_a_preemption():
    """The ratio falls over 600 steps to 0.14 of its start; a preemption sets it again.

    It is then the share that remaining jobs have generated, with 20 tokens more each.
    """
    ratio = TokenRatio(0.7)
    assert ratio.at(0) == 0.7
    assert ratio.at(300) == pytest.approx(0.7 * 0.57)
    assert ratio.at(6000) == pytest.approx(0.098)
    left = job(ask("a", 0, 1, 99))
    ratio.preempted([left], 6000)
    assert ratio.at(6001) == 20 / 100
    ratio.restart(7000)
    assert ratio.at(7000) == 0.7


@pytest.mark.parametrize("rule", [{"new_token_ratio": 0}, {"new_token_ratio": 1.5}])
def test_a_ratio_is_a_share(rule):
    """A `new_token_ratio` that is not above 0 and at most 1 raises InputError."""
    with pytest.raises(InputError, match="give a share above 0, at most 1"):
        Batching(**rule)


@pytest.mark.parametrize(("preempts", "loser"), [("last", "b"), ("shortest", "a")])
def test_preempts_shortest_preempts_the_job_with_the_longer_prompt(preempts, loser):
    """With `preempts=shortest`, the job with the longer prompt of two is preempted.

    Both have generated equally many tokens; `preempts=last` takes the later one.
    """
    requests = [ask("a", 0, 12, 12), ask("b", 0, 4, 12)]
    lines = serve(requests, blocks=7, watermark=0, preempts=preempts).lines
    assert next(each["request"] for each in lines if each["event"] == "PREEMPT") == loser
