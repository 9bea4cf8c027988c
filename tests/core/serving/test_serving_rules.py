"""The rules by which engines differ, each alone: steps of 10 ns, blocks of 4 tokens."""

from types import SimpleNamespace
from typing import ClassVar

import attrs
import pytest
from helpers.jobs import job
from helpers.schedulers import Urgent, scheduler_of
from helpers.serving import Even, ask, serve, servers
from hypothesis import given

import kvcore
from kvcore import InputError, PluginError, PolicyError
from kvcore.config import RunConfig
from kvcore.plugins.options import Spec
from kvcore.serving import Batching, Rules, StepPlan, StepState
from kvcore.serving.job import DECODE, DONE, PREFILL, WAITING
from kvcore.serving.rules import DECISIONS, TokenRatio, with_choices
from kvcore_events.model import BlockStored
from kvcore_lab.sweep.grid import Grid
from kvcore_plugins.eviction import LRU
from kvcore_plugins.rules import VLLM
from kvcore_plugins.scheduler import FCFS
from kvcore_replay.check.trace import check_trace
from kvcore_replay.export import event_batches

TWINS = [ask("a", 0, 9, 1, keys=[1, 2]), ask("b", 0, 9, 1, keys=[1, 2])]


@pytest.mark.parametrize(("commit", "hit"), [("computed", 0), ("scheduled", 8)])
def test_blocks_can_be_hit_once_they_are_scheduled(commit, hit):
    """With `commit=scheduled`, a request hits blocks that its own step will compute."""
    assert serve(TWINS, commit=commit).rows["b"]["hit"] == hit


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize(
    ("commit", "lag", "at", "hit"),
    [
        ("computed", 0, 40, 4),
        ("scheduled", 0, 40, 8),
        ("scheduled", 1, 30, 4),
        ("scheduled", 1, 40, 8),
    ],
)
def test_generated_blocks_can_be_hit_once_they_are_scheduled(commit, lag, at, hit, jumps):
    """With `commit=scheduled`, a request hits the answer that its own step completes.

    Under a lag the last token of that block is not known yet when the step is planned.
    """
    requests = [
        ask("a", 0, 4, 9, keys=[1], output_keys=[2, 3]),
        ask("b", at, 9, 1, keys=[1, 2]),
    ]
    assert serve(requests, commit=commit, lag=lag, jumps=jumps).rows["b"]["hit"] == hit


@pytest.mark.parametrize("scheduler", ["priority:preemptive=true", "planning"])
def test_generated_blocks_are_not_shared_by_plans_that_may_pause(scheduler):
    """Where a plan may pause the job that fills a block, others hit it once it is computed."""
    requests = [
        ask("a", 0, 4, 9, keys=[1], output_keys=[2, 3]),
        ask("b", 40, 9, 1, keys=[1, 2]),
    ]
    run = serve(requests, commit="scheduled", scheduler=scheduler_of(scheduler))
    assert run.rows["b"]["hit"] == 4


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize(("eviction", "inserted"), [("arc", [1, 1]), ("lru", [2])])
def test_generated_blocks_are_inserted_as_they_are_scheduled(eviction, inserted, jumps):
    """With `commit=scheduled`, a policy that has `on_insert` gets each block when it fills."""
    run = serve(
        [ask("a", 0, 4, 9, keys=[1])], commit="scheduled", generated="cached",
        eviction=eviction, jumps=jumps,
    )  # fmt: skip
    commits = [line for line in run.lines if line["event"] == "COMMIT"]
    assert [line["blocks"] for line in commits] == [1, *inserted]


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
    batching = Batching(watermark=0.05, rules=Rules(null_block=null_block))
    assert batching.reserved_blocks(95) == kept


def test_a_pool_of_the_null_block_alone_is_refused():
    """A pool of the null block alone raises InputError."""
    with pytest.raises(InputError, match="never used: give 2 or more"):
        kvcore.simulate("zipf:requests=5", blocks=1, like="kvcore:null_block=true")


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


def test_the_pool_over_time_has_the_blocks_of_a_finished_request_free():
    """With `lag=1`, 2 blocks are active for 10 ns, 4 for the next 10, and 2 for the last 40."""
    run = serve([ask("a", output=2), ask("b", output=6)], lag=1)
    assert run.result.summary()["pool"]["active"] == {"mean": 140 / 60, "peak": 4}


@attrs.define(slots=False, eq=False)
class Turns(FCFS):
    """A scheduler that pauses all running jobs, and offers them last."""

    name: ClassVar[str] = "turns"

    def plan(self, state):
        """Return a plan for all jobs, the waiting ones first."""
        return StepPlan([*state.waiting, *state.running], state.running)


def test_a_plan_may_pause_a_request_that_has_just_finished():
    """With `lag=1`, a plan may pause a finished request, which still runs, and admit it."""
    requests = [ask("a"), ask("b", output=2), ask("c")]
    run = serve(requests, scheduler=Turns(), max_seqs=2, lag=1)
    assert run.of("FINISH") == [(10, "a"), (20, "c"), (30, "b")]


def test_a_paused_request_commits_the_block_that_it_has_just_filled(tmp_path):
    """With `lag=1`, a block filled before a pause is committed after it."""
    requests = [ask("a", output=6, keys=[1], output_keys=[2]), ask("b", 35)]
    run = serve(requests, scheduler=Turns(), max_seqs=1, lag=1)
    (tmp_path / "trace").write_bytes(run.trace)
    assert check_trace(tmp_path / "trace").finished == 2


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


def test_max_model_len_bounds_prompts_without_output():
    """A prompt longer than `max_model_len` is rejected, even if nothing is generated."""
    run = serve([ask("a", 0, 12, 0), ask("b", 0, 13, 0)], max_model_len=12)
    assert run.rows["a"]["output"] == 0
    assert run.rejected == {"b": "its prompt has 13 tokens, and max_model_len is 12"}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"lag": 2}, "lag=2: a plan knows of the step before it"),
        (
            {"reserve": "all"},
            "reserve='all' is not known; there are: prompt, chunk, first-chunk",
        ),
        ({"max_chunk": 0}, "max_chunk=0: give whole tokens, at least 1, or None"),
        ({"null_block": 1}, "null_block=1 must be True or False"),
        ({"new_token_ratio": 0}, "give a share above 0, at most 1"),
        ({"new_token_ratio": 1.5}, "give a share above 0, at most 1"),
    ],
)
def test_wrong_rules_are_refused(rule, message):
    """The error for a wrong rule names the option and the accepted values."""
    with pytest.raises(InputError, match=message):
        Rules(**rule)


class Fixed(Rules):
    """Rules whose constructor has an option of its own, and chooses another itself."""

    name = "fixed"

    def __init__(self, number):
        super().__init__(max_chunk=8)
        self.number = number


class TestOtherChoices:
    """The same rules with other values of some options."""

    def test_a_constructor_of_their_own_is_not_called_again(self):
        """Attributes that the constructor has set stay, and the given rules do not change."""
        given = Fixed(3)
        changed = with_choices(given, {"reserve": "chunk"})
        assert (changed.number, changed.max_chunk, changed.reserve) == (3, 8, "chunk")
        assert given.reserve == "prompt"

    def test_fields_in_slots_stay(self):
        """Options that a class keeps in slots have their values in the copy too."""
        slotted = attrs.define(kw_only=True, eq=False)(
            type("Slotted", (Rules,), {"name": "slotted", "__annotations__": {"number": int}})
        )
        changed = with_choices(slotted(number=3, lag=1), {"reserve": "chunk"})
        assert changed.options() == {**Rules(lag=1, reserve="chunk").options(), "number": 3}

    def test_a_wrong_value_is_refused(self):
        """A value that the option cannot have raises InputError."""
        with pytest.raises(InputError, match="reserve='all' is not known"):
            with_choices(Rules(), {"reserve": "all"})

    def test_rules_with_a_constructor_serve_a_model_with_windows(self):
        """Cache groups take blocks chunk by chunk under any rules."""
        run = kvcore.simulate("zipf:requests=5", model="gemma-3-12b", like=Fixed(3))
        assert run.summary()["completed"] == 5


def test_a_lag_with_a_retention_policy_is_refused():
    """`lag=1` with a retention policy raises InputError."""
    with pytest.raises(InputError, match="lag=1 with a retention policy"):
        serve([ask("a")], lag=1, retention="window:tokens=4")


def test_defaults_are_left_out_of_headers():
    """A header has the limits, and only the rules that are not the default."""
    limits = {"max_tokens", "max_seqs", "chunked", "steps", "watermark"}
    assert set(Batching().as_dict()) == limits
    assert Batching(rules=Rules(lag=1)).as_dict().keys() - limits == {"lag"}


class TestLike:
    """The option `like`: the rules of an engine, whose defaults become those of the run."""

    @pytest.mark.parametrize("engine", ["kvcore", "sglang", "vllm"])
    def test_the_defaults_of_an_engine_are_options_of_a_run(self, engine):
        """Each default of an engine is valid, and its value is kept."""
        config = RunConfig(like=engine)
        for name, value in type(config.build().batching.rules).defaults.items():
            got = getattr(config, name)
            assert (got if type(got) is type(value) else str(got)) == value

    @pytest.mark.parametrize(
        "like", [VLLM, VLLM(), lambda: VLLM(lag=0), "vllm", {"name": "vllm"}]
    )
    def test_rules_are_given_as_other_plugins_are(self, like):
        """Rules are a name, a table, a class, an instance, or a function that makes one."""
        config = RunConfig(like=like)
        assert type(config.build().batching.rules) is VLLM
        assert config.max_seqs == 1024

    @pytest.mark.parametrize(
        ("like", "message"),
        [
            ("vlm", "like: no rules plugin is named 'vlm' .did you mean 'vllm'"),
            ("vllm:lags=0", "like: rules plugin 'vllm' has no option 'lags'"),
            ("vllm:lag=2", "like: lag=2: a plan knows of the step before it"),
            (LRU, "is no rules plugin: give a name, or a class derived from Rules"),
            (lambda: None, "like: rules=None is no rules plugin"),
        ],
    )
    def test_an_unknown_engine_is_refused(self, like, message):
        """The error for rules that cannot be says why."""
        with pytest.raises(InputError, match=message):
            RunConfig(like=like)

    def test_a_run_with_like_equals_one_with_the_options_of_the_engine(self):
        """A run with `like` equals a run with the options that it stands for."""
        given = {"limit": 40, "blocks": 3000, "block_size": 16}
        like = kvcore.simulate("mooncake", like="vllm", **given)
        choices = Rules(**VLLM().choices())
        options = kvcore.simulate("mooncake", like=choices, **given, **VLLM.defaults)
        assert like.summary() | {"wall_s": 0} == options.summary() | {"wall_s": 0}


class TestFormerOptions:
    """Choices of rules that are given as options of their own, as in the release before."""

    def test_an_option_becomes_one_of_like(self):
        """A choice of rules is an option of `like`; the warning says what to write."""
        with pytest.warns(FutureWarning, match="write like='vllm:lag=0', or --like vllm:lag=0"):
            config = RunConfig(like="vllm", lag=0)
        assert str(config.like) == "vllm:lag=0"
        with pytest.warns(FutureWarning, match="write like='kvcore:null_block=true'"):
            assert RunConfig(null_block=True).build().batching.rules.null_block
        with pytest.warns(FutureWarning, match=r"write like=VLLM\("):
            assert RunConfig(like=VLLM(), lag=0).like.lag == 0

    def test_a_field_of_batching_becomes_one_of_its_rules(self):
        """A choice of rules given to `Batching` is one of its rules; its user is warned."""
        with pytest.warns(FutureWarning, match="write rules='kvcore:lag=1'") as notices:
            assert Batching(lag=1) == Batching(rules=Rules(lag=1))
        assert notices[0].filename == __file__

    def test_keys_of_a_file(self, tmp_path):
        """Keys of a TOML file, in the table `batching` too, are options of `like`."""
        (tmp_path / "run.toml").write_text("lag = 1\n[batching]\nties = 'first'\n")
        with pytest.warns(FutureWarning, match="ties, lag: options of the rules"):
            config = RunConfig.from_toml(tmp_path / "run.toml")
        assert config.like == Spec("kvcore", {"lag": "1", "ties": "first"})

    def test_axes_of_a_sweep(self):
        """Axes of a sweep become values of the axis `like`."""
        with pytest.warns(FutureWarning, match="lag: options of the rules"):
            grid = Grid(like=["vllm", "sglang"], lag=[0, 1])
        cells = [str(cell.like) for cell in grid]
        assert cells == ["vllm:lag=0", "vllm:lag=1", "sglang:lag=0", "sglang:lag=1"]


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


@pytest.mark.parametrize(("blocks", "preempted"), [(32, []), (33, ["50 PREEMPT b"])])
def test_no_job_is_paused_for_one_that_the_rules_do_not_admit(blocks, preempted):
    """A job takes the slot of another one if it also finds the room that the ratio asks for.

    When x arrives, a and b hold 4 blocks each. Its prompt needs 2; its output, a block and the
    25 tokens that a, which goes on, has to generate need 23 more.
    """
    requests = [ask(name, 0, 8, 30, priority=1) for name in "ab"] + [ask("x", 50, 8, 60)]
    options = {"blocks": blocks, "max_seqs": 2, "new_token_ratio": 1.0}
    assert serve(requests, scheduler=Urgent(), **options).timeline("PREEMPT") == preempted


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
    # The share of that step holds though it is below the 0.14, to which the next one returns.
    ratio.preempted([job(ask("a", 0, 1, 999))], 6001)
    assert (ratio.at(6002), ratio.at(6003)) == (20 / 1000, pytest.approx(0.098))
    ratio.restart(7000)
    assert ratio.at(7000) == 0.7
    assert ratio.at(7300) == pytest.approx(0.7 - 0.7 * 0.86 / 2)


def running(output, generated=0, **fields):
    """Return a job that decodes, or in another stage, with output left to generate."""
    made = job(ask("r", 0, 8, output))
    made.stage, made.generated_before = DECODE, generated
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("output", "fields", "blocks"),
    [
        # Its own tokens and a block, and half of the 7 + 9 that others generate; one more.
        (10, {"running": [running(7), running(12, 3)]}, -(-(10 + 4 + 8 + 1) // 4)),
        (11, {"running": [running(7), running(12, 3)]}, 6),
        (12, {"running": [running(7), running(12, 3)]}, 7),
        (10, {"running": [running(16, stage=PREFILL)]}, -(-(10 + 4 + 1) // 4)),
        # A chunk counts a block, and one that ends its prompt all its output.
        (10, {"running": [running(0)], "chunks": [(running(6, computed=3), 4)]}, 5),
        (10, {"running": [running(0)], "chunks": [(running(6, computed=4), 4)]}, 7),
        (10**6, {"running": [running(10**6)]}, -(-(4096 + 4 + 2048 + 1) // 4)),
        (10, {"running": [running(0)], "watermark_blocks": 50}, 50),
        (10, {"running": [running(0)], "token_ratio": None, "watermark_blocks": 2}, 2),
        (10, {"paused": [running(0)]}, 4),
        (10, {"preempted": [running(9)], "watermark_blocks": 5}, 0),
    ],
)
def test_the_headroom_has_the_tokens_that_jobs_will_generate(output, fields, blocks):
    """An admission leaves blocks for the future tokens of all jobs, at most 4,096 each."""
    state = StepState(**dict.fromkeys(StepState._fields, 0) | {
        "block_size": 4, "running": (), "paused": (), "chunks": (), "preempted": (),
        "token_ratio": 0.5, **fields,
    })  # fmt: skip
    assert Rules().headroom(running(output, stage=WAITING), state) == blocks
    refusing = Rules(admit_after_preemption=False)
    expected = None if state.preempted else blocks
    assert refusing.headroom(running(output, stage=WAITING), state) == expected


def test_a_job_without_blocks_has_no_length():
    """A job that was preempted has the K/V that it has computed again, and none before."""
    made = job(ask("a", 0, 4, 9))
    made.generated_before, made.target = 3, 7
    lengths = []
    for made.computed in (0, 5, 7):
        lengths.append(made.length)
    assert lengths == [0, 5, 7]


@pytest.mark.parametrize(
    ("predicted", "output", "generated", "left"),
    [(None, 9, 4, 5), (7, 9, 4, 3), (9, 7, 4, 5), (3, 9, 4, 1), (4, 5, 4, 1), (3, 4, 4, 0)],
)
def test_a_job_is_expected_to_have_as_many_tokens_left_as_predicted(
    predicted, output, generated, left
):
    """A prediction that was too low leaves a token for as long as there are some to come."""
    made = job(ask("a", 0, 4, output, predicted_output_tokens=predicted))
    made.generated_before = generated
    assert made.predicted_left == left


@pytest.mark.parametrize(
    ("rules", "fields", "chunk"),
    [
        ({}, {"budget": 5}, 5),
        ({}, {"budget": 4, "chunked": True}, 4),
        ({}, {"budget": 4}, 5),
        ({}, {"budget": 4, "chunks": [1]}, 0),
        ({}, {"budget": 5, "chunks": [1]}, 5),
        ({"unchunked": "wait"}, {"budget": 4}, 0),
        ({"unchunked": "wait"}, {"budget": 5}, 5),
        ({"max_chunk": 3}, {"budget": 5, "chunked": True, "waiting": 2}, 3),
        ({"max_chunk": 3}, {"budget": 5, "chunked": True, "running": [1], "waiting": 1}, 3),
        ({"max_chunk": 3}, {"budget": 4, "chunked": True, "waiting": 1}, 4),
        ({"max_chunk": 3}, {"budget": 2, "chunked": True, "waiting": 2}, 2),
    ],
)
def test_a_chunk_is_what_rules_and_budget_leave_of_a_prompt(rules, fields, chunk):
    """Of 5 tokens a step computes all, some or none, by its budget and what else there is."""
    empty = dict.fromkeys(StepState._fields, 0) | {"running": (), "chunks": ()}
    state = StepState(**empty | fields)
    assert Rules(**rules).chunk_tokens(running(1, stage=WAITING), 5, state) == chunk
    if rules.get("unchunked") == "wait":
        assert Rules(**rules).chunk_tokens(running(1, stage=PREFILL), 5, state) == 5


@pytest.mark.parametrize(
    ("answer", "chunks", "decoding", "budget", "fits"),
    [
        *((answer, [], 0, 3, answer in (1, 3, 5)) for answer in (-1, 0, 1, 3, 4, 5, 6)),
        *((answer, [1], 0, 3, 0 <= answer <= 3) for answer in (-1, 0, 1, 3, 4, 5, 6)),
        (0, [], 1, 3, True),
        (4, [], 1, 3, False),
        (True, [], 1, 3, False),
        (1.0, [], 1, 3, False),
        (None, [], 1, 3, False),
    ],
)
def test_a_chunk_that_rules_may_answer_has_work_and_fits(
    answer, chunks, decoding, budget, fits
):
    """Of 5 tokens the first prompt of a step may have all; 0 is an answer beside other work."""
    state = SimpleNamespace(chunks=chunks, decoding=decoding, budget=budget)
    is_chunk, _ = DECISIONS["chunk_tokens"]
    assert is_chunk(answer, None, 5, state) is fits


@pytest.mark.parametrize("output", [4, 5])
def test_tokens_that_must_fit_in_one_step_are_at_most_its_tokens(output):
    """Where a prompt is not chunked, one that a preemption made too long could never run."""
    run = serve(
        [ask("a", 0, 5, output)], max_tokens=8, max_seqs=1, chunked=False, unchunked="wait"
    )
    why = "its 9 tokens may have to be computed in one step, which has 8 at most"
    assert run.rejected == ({"a": why} if output == 5 else {})


@pytest.mark.parametrize(("preempts", "loser"), [("last", "b"), ("shortest", "a")])
def test_preempts_shortest_preempts_the_job_with_the_longer_prompt(preempts, loser):
    """With `preempts=shortest`, the job with the longer prompt of two is preempted.

    Both have generated equally many tokens; `preempts=last` takes the later one.
    """
    requests = [ask("a", 0, 12, 12), ask("b", 0, 4, 12)]
    lines = serve(requests, blocks=7, watermark=0, preempts=preempts).lines
    assert next(line["request"] for line in lines if line["event"] == "PREEMPT") == loser


def rules_with(**methods):
    """Return a class of rules that overrides these methods by functions."""
    return type("Mine", (Rules,), {"name": "mine", "__doc__": "Rules of a test.", **methods})


class TestOverrides:
    """Rules that override a decision: it is obeyed, and the answer is checked."""

    def test_the_victim_is_the_chosen_one(self):
        """The job that `victim` returns is preempted."""
        first = rules_with(victim=lambda _, jobs, *__: jobs[0])
        run = serve([ask("a", 0, 4, 9), ask("b", 0, 4, 9)], blocks=4, rules=first)
        assert {name for name, row in run.rows.items() if row["recomputes"]} == {"a"}

    @pytest.mark.parametrize("answer", [10**6, None])
    def test_an_admission_leaves_the_headroom(self, answer):
        """A job waits while there are fewer blocks than `headroom` leaves; None: it waits."""
        alone = rules_with(headroom=lambda *_: answer)
        run = serve([ask("a", 0, 4, 4), ask("b", 0, 4, 4)], rules=alone)
        assert [row["admitted"] for row in run.rows.values()] == [0, 40]

    def test_each_job_reserves_its_own_blocks(self):
        """An admission takes the blocks that `reserved` names, for one job another than all."""
        mine = rules_with(
            reserved=lambda _, job, __: "first-chunk" if job.serial == 2 else "prompt"
        )
        requests = [ask("a", 0, 8, 4), ask("b", 1, 20, 1)]
        run = serve(requests, blocks=6, rules=mine, max_tokens=9, max_seqs=2)
        assert run.rows["b"]["admitted"] == 10

    def test_a_step_computes_the_chosen_chunk(self):
        """A step computes as many prompt tokens as `chunk_tokens` returns."""
        mine = rules_with(chunk_tokens=lambda _, __, tokens, ___: min(tokens, 5))
        rows = serve([ask("a", 0, 12, 1), ask("b", 0, 12, 1)], rules=mine).rows
        assert (rows["a"]["first_token"], rows["b"]["first_token"]) == (30, 30)

    def test_blocks_are_shared_before_they_are_computed(self):
        """Blocks of jobs for which `shares_scheduled` is true can be hit at once."""
        mine = rules_with(shares_scheduled=lambda *_: True)
        assert serve(TWINS, rules=mine).rows["b"]["hit"] == 8

    def test_generated_blocks_stay_for_the_chosen_jobs(self):
        """Generated blocks of jobs for which `keeps_generated` is true stay cached."""
        mine = rules_with(keeps_generated=lambda *_, preempted: preempted)
        requests = [ask("a", 0, 4, 13, keys=[1]), ask("b", 0, 4, 13, keys=[2])]
        run = serve(requests, blocks=7, rules=mine)
        back = [line for line in run.lines if line["event"] == "HIT" and line.get("again")]
        assert [line["blocks"] for line in back] == [3]

    def test_a_job_that_has_ended_is_done_when_its_blocks_are_kept(self):
        """`keeps_generated` is asked of a job that has ended as one that is done."""
        stages = []
        mine = rules_with(
            keeps_generated=lambda _, job, *__, **___: not stages.append(job.stage)
        )
        serve([ask("a", 0, 4, 9)], rules=mine)
        assert stages == [DONE]

    @pytest.mark.parametrize(
        ("method", "answer", "expected"),
        [
            ("victim", None, "None: give one of the jobs with blocks"),
            ("headroom", -1, "-1: give a number of blocks, 0 or more, or None"),
            ("reserved", "all", "'all': give prompt, chunk, first-chunk"),
            ("chunk_tokens", 0, "0: give whole tokens that the prompt and the step have left"),
            ("chunk_tokens", 99, "99: give whole tokens"),
            ("shares_scheduled", 1, "1: give True or False"),
            ("keeps_generated", "yes", "'yes': give True or False"),
        ],
    )
    def test_a_wrong_answer_names_the_rules(self, method, answer, expected):
        """An answer that cannot be is a PolicyError with the plugin and the method."""
        mine = rules_with(**{method: lambda *_, **__: answer})
        where = rf"rules plugin 'mine' \(.*Mine\) answered {method}\(\).* with {expected}"
        with pytest.raises(PolicyError, match=where):
            serve([ask("a", 0, 4, 9), ask("b", 0, 4, 9)], blocks=4, rules=mine)

    def test_a_failure_names_the_rules(self):
        """An exception of a method is a PolicyError with the plugin and the method."""
        mine = rules_with(headroom=lambda *_: 1 // 0)
        with pytest.raises(PolicyError, match=r"rules plugin 'mine' .* in headroom"):
            serve([ask("a", 0, 4, 9), ask("b", 0, 4, 9)], rules=mine)

    @pytest.mark.parametrize("base", [Rules, VLLM])
    def test_rules_without_a_name_are_refused(self, base):
        """A class of rules has no name but its own: not that of the class it derives from."""
        with pytest.raises(PluginError, match="has no name"):
            Batching(rules=type("Nameless", (base,), {}))

    def test_a_misspelled_method_is_a_warning(self):
        """A method that is almost named as a decision is a warning."""
        mine = rules_with(victims=lambda *_: None)
        with pytest.warns(UserWarning, match="nothing calls: victim"):
            serve([ask("a")], rules=mine)
