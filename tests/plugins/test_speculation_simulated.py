"""Speculative decoding in simulations: accepted drafts, and the times of steps."""

import attrs
import orjson
import pytest
from helpers.serving import STEP, Even, ask, serve, servers, tiered_servers
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InputError, Plugins, PolicyError, simulate
from kvcore.config import RunConfig
from kvcore.models.catalogue import find_model
from kvcore.models.memory import KVLayout
from kvcore.serving import StepWork
from kvcore.serving.drafter import Drafter
from kvcore.units import PS_PER_NS
from kvcore_cluster.config import ClusterParts
from kvcore_cluster.simulate import simulate_cluster
from kvcore_plugins.drafter import Acceptance
from kvcore_plugins.drafter.speculation import with_drafts
from kvcore_replay.check.trace import check_trace

PLUGINS = Plugins()


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("share", [0, 0.3, 0.8, 1])
def test_tokens_per_step_equal_the_formula_of_the_paper(tokens, share):
    """Tokens per step are (1 - a^(k+1)) / (1 - a) (Leviathan et al., 2023, equation 1)."""
    asked = [ask(index, 0, 3, 4000) for index in range(4)]
    result = serve(
        asked, blocks=10**5, trace=False, drafter=Acceptance(tokens=tokens, probability=share)
    ).result
    expected = tokens + 1 if share == 1 else (1 - share ** (tokens + 1)) / (1 - share)
    found = result.summary()["drafts"]["tokens_per_step"]
    assert found == pytest.approx(expected, rel=0.03)


def test_the_last_probability_holds_for_all_later_positions():
    """Acceptance has a probability by position, of which the last holds for all later ones."""
    asked = [ask(index, 0, 3, 3000) for index in range(4)]
    drafter = Acceptance(tokens=4, probability="0.9/0.5/0.2")
    drafts = serve(asked, blocks=10**5, trace=False, drafter=drafter).result.summary()["drafts"]
    assert drafts["acceptance_by_position"] == pytest.approx([0.9, 0.5, 0.2, 0.2], abs=0.05)


def test_draws_do_not_depend_on_other_requests():
    """The accepted drafts of a request are the same with and without other requests."""

    @attrs.define(slots=False, eq=False)
    class Watched(Acceptance):
        """An acceptance that records its answers."""

        def accepted(self, request, index, most):
            answer = super().accepted(request, index, most)
            if most == 2 and request.id == "a":
                seen[index] = answer
            return answer

    seen = {}
    serve([ask("a", 0, 8, 60)], drafter=Watched(tokens=2, probability=0.5))
    alone, seen = seen, {}
    others = [ask("a", 0, 8, 60), *(ask(n, 0, 8, 60) for n in range(3))]
    run = serve(others, blocks=36, drafter=Watched(tokens=2, probability=0.5))
    assert sum(run.result.log.recomputes) > 0
    assert {index: seen[index] for index in alone if index in seen} == {
        index: alone[index] for index in alone if index in seen
    }
    assert len(alone.keys() & seen) > 10


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize(("at", "hit"), [(15, 8), (25, 12), (55, 24)])
def test_blocks_of_accepted_drafts_can_be_hit_while_their_request_decodes(at, hit, jumps):
    """Each block that verified tokens fill can be hit from the end of their step on.

    A step of 10 ns adds a block: three drafts, and the token after them.
    """
    keys = range(1, 12)
    requests = [
        ask("a", 0, 4, 41, keys=[1], output_keys=keys[1:]),
        ask("b", at, 45, 1, keys=keys),
    ]
    run = serve(requests, drafter=Acceptance(tokens=3, probability=1), jumps=jumps)
    assert run.rows["b"]["hit"] == hit


@given(
    servers() | tiered_servers(),
    st.sampled_from(["fcfs", "srpt", "slo"]),
    st.sampled_from([0, 0.4, 0.9, 1]),
    st.integers(1, 5),
)
def test_requests_with_drafts_are_served_in_full(
    tmp_path_factory, server, scheduler, share, tokens
):
    """With drafts all requests are served in full, and again without a trace, which is valid.

    Each token after the first has a time since the one before it, accepted drafts too.
    """
    run, again = (
        server.run(scheduler, drafter=Acceptance(tokens=tokens, probability=share), trace=trace)
        for trace in (True, False)
    )
    assert run.decisions == again.decisions
    log = run.result.log
    wanted = {request.id: request.output_tokens for request in server.requests}
    assert sorted(log.ids) == sorted(wanted)
    for row, name in enumerate(log.ids):
        assert row in log.reasons or log.output[row] == wanted[name]
    served = [tokens for row, tokens in enumerate(log.output) if row not in log.reasons]
    assert log.itl.count == sum(max(tokens - 1, 0) for tokens in served)
    path = tmp_path_factory.getbasetemp() / "drafted.jsonl"
    path.write_bytes(run.trace)
    assert check_trace(path).complete


def drafted(requests, share=1, **options):
    """Return the statistics of up to 3 drafts a step, and the times at which requests end."""
    run = serve(requests, drafter=Acceptance(tokens=3, probability=share), **options)
    return run.result.log.drafts, {name: row["finish"] for name, row in run.rows.items()}


def test_drafts_leave_the_last_token_to_the_model():
    """A sequence drafts no more than it needs beside the model's token; at its last, nothing.

    The same tokens would have taken a step each.
    """
    stats, ends = drafted([ask("a", 0, 4, 6)])
    assert stats.outcomes == {(3, 3): 1, (0, 0): 1}
    assert (stats.plain_ps, stats.took_ps) == (50_000, 20_000)
    assert ends == {"a": 30}
    stats, _ = drafted([ask("a", 0, 4, 4)], share=0)
    assert stats.outcomes == {(2, 0): 1, (1, 0): 1, (0, 0): 1}


def test_a_drafter_takes_no_time_unless_it_says_how_much():
    """A drafter that says no more than what is accepted adds nothing to the time of a step."""

    class Sure(Drafter):
        """A drafter all of whose drafts are accepted."""

        name = "sure"

        def accepted(self, request, index, most):
            return most, most

    run = serve([ask("a", 0, 4, 6)], drafter=Sure())
    assert run.result.log.busy_ps == 2 * STEP * PS_PER_NS


def test_drafts_fit_into_a_step_and_into_the_pool():
    """The drafts of all sequences are at most the rest of a step, and preempt no sequence."""
    pair = [ask("a", 0, 2, 9), ask("b", 0, 2, 9)]
    stats, _ = drafted(pair, max_tokens=4, max_seqs=2, share=0)
    assert stats.outcomes == {(2, 0): 6, (1, 0): 2, (0, 0): 8}
    run = serve(pair, blocks=6, drafter=Acceptance(tokens=9, probability=0))
    assert run.sum("recomputes") == 0
    assert run.result.log.drafts.drafted > 0


def test_drafts_count_as_prompt_tokens_of_a_step():
    """Drafts count as prompt tokens after their sequence, whose K/V is read once."""

    class Short:
        length = 9

    work = StepWork(5, (15, 14), 2, (20, 8))
    assert with_drafts(work, [Short, Short], [0, 0], (None, 4)) is work
    whole = with_drafts(work, [Short, Short], [2, 0], (None, 4))
    assert whole == StepWork(7, (15 + 11 + 12, 14 + 4 + 4), 2, (20, 8))


def test_drafters_cost_their_passes_or_weights():
    """A draft model costs its passes and its prefill, and heads cost their weights.

    Steps without drafts cost nothing; a run that was refused before costs nothing either.
    """
    latency = PLUGINS.build("latency", "roofline:model=gemma-3-27b,tensor_parallel=4")
    small = PLUGINS.build("latency", "roofline:model=gemma-3-12b,tensor_parallel=4")
    work = StepWork(0, (0, 0), 8, (16_000, 8 * 1024))  # its window is full
    drafter = Acceptance(tokens=3, draft="gemma-3-12b")
    for _ in range(2):
        drafter.attach(latency)
    passes = [StepWork(0, (0, 0), 8, (16_000 + 8 * ahead, 8 * 1024)) for ahead in range(3)]
    assert drafter.duration(work, [3] * 8) == sum(map(small.duration, passes))
    assert drafter.duration(work, [0] * 8) == 0
    prompt = StepWork(100, (5050, 5050), 0, (0, 0))
    assert drafter.duration(prompt, []) == small.duration(prompt)

    heads = Acceptance(parameters=10**9)
    heads.attach(latency)
    byte = 2 * 10**9 / (4 * 3.35e12 * 0.85)
    assert heads.duration(work, [4] * 8) == pytest.approx(byte * 1e12, rel=0.01)
    assert heads.duration(prompt, []) == 0


@pytest.mark.parametrize(
    ("drafter", "weights", "block"),
    [
        ("", 0, 0),
        (",draft=llama-3.1-8b", 2 * 8_030_261_248, 2 * 2**20),
        (",parameters=2e10", 4 * 10**10, 0),
        (",draft=llama-3.2-1b,parameters=10", 2 * 1_235_814_400 + 20, 2**19),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_pool_is_what_weights_and_kv_of_drafts_leave(devices, drafter, weights, block):
    """A draft model takes its weights, and K/V in each block; heads take their weights."""
    parts = RunConfig(
        "simulate",
        PLUGINS,
        workload="zipf:requests=1",
        tensor_parallel=devices,
        drafter=f"acceptance:probability=0.7{drafter}",
    ).build(PLUGINS)
    left = 72 * 10**9 * devices - 2 * 8_030_261_248 - weights
    assert parts.deployment.bytes_per_block == 2 * 2**20 + block
    assert parts.blocks + parts.null_blocks == left // (2 * 2**20 + block)


def test_a_draft_model_that_devices_cannot_share_takes_as_much_of_each():
    """The device that holds a draft model with other heads bounds the blocks of all."""
    layout, odd = KVLayout(find_model("llama-3-70b")), find_model("qwen2.5-7b")
    alone, all_of = (Acceptance(draft=odd).memory(layout, devices) for devices in (1, 8))
    assert alone == (odd.weight_bytes, KVLayout(odd).token_bytes())
    assert all_of == (8 * alone[0], 8 * alone[1])


def test_heads_take_the_format_of_the_weights_that_are_served():
    """Extra heads are kept in the number format in which their cost reads them: here fp8."""
    layout = KVLayout(find_model("llama-3-70b").with_weights("fp8"))
    assert Acceptance(parameters=10**9).memory(layout, 4) == (10**9, 0)


def test_drafts_that_leave_no_room_are_named():
    """The error about weights that do not fit names those of drafts, and servers for both."""
    drafter = "acceptance:draft=llama-3-70b"
    with pytest.raises(InputError, match=r"16\.1 GB and 141 GB for drafts and .* 4 x h100"):
        simulate("zipf:requests=1", tensor_parallel=1, drafter=drafter)


def test_blocks_that_are_given_stay_beside_drafts():
    """The size of the pool that was given stays, whatever drafting takes."""
    drafter = "acceptance:draft=llama-3.1-8b"
    result = simulate("zipf:requests=1", tensor_parallel=1, blocks=500, drafter=drafter)
    assert result.cache.pool.blocks == 500


@pytest.mark.parametrize("answer", [(-1, 0), (0, -1), None, (1, 2, 3)])
def test_a_wrong_answer_about_memory_names_the_drafter(answer):
    """A drafter that says less than 0 bytes, or no bytes, is named in the error."""

    class Odd(Acceptance):
        """A drafter that says nonsense of its memory."""

        def memory(self, layout, devices):
            return answer

    with pytest.raises(PolicyError, match=r"drafter.*acceptance.*memory"):
        simulate("zipf:requests=1", drafter=Odd())


def test_a_tier_holds_blocks_with_the_kv_of_drafts():
    """A tier of some bytes holds half as many blocks where a draft model doubles their K/V."""
    options = {"workload": "zipf:requests=1", "tier": "host:memory=1GiB", "tensor_parallel": 1}
    drafters = None, "acceptance:draft=llama-3.1-8b"
    configs = [
        RunConfig("simulate", PLUGINS, **options, drafter=drafter) for drafter in drafters
    ]
    assert [config.build(PLUGINS).tier_blocks for config in configs] == [512, 256]


def test_a_draft_model_of_unknown_cost_is_refused():
    """A draft model without a known model, or with unknown attention windows, is refused."""
    with pytest.raises(InputError, match="take `roofline`"):
        Acceptance(draft="llama-3.1-8b").attach(PLUGINS.build("latency", "token-rate"))
    windowed = find_model("llama-3.1-8b").with_window(1000)
    with pytest.raises(InputError, match="attention windows"):
        Acceptance(draft=windowed).attach(PLUGINS.build("latency", "roofline"))


def test_speedup_is_that_of_two_runs():
    """The speedup is the decode time without drafts over that with them."""
    options = {"model": "llama-3.1-8b", "blocks": 10**4, "slo": None}
    asked = "zipf:requests=40,rate=0.5,output_tokens=400"
    plain = simulate(asked, **options)
    fast = simulate(asked, **options, drafter="acceptance:tokens=4,probability=0.8")
    speedup = fast.summary()["drafts"]["speedup"]
    assert speedup == pytest.approx(plain.tpot.mean / fast.tpot.mean, rel=0.03)


def test_replicas_sum_up_their_drafts():
    """A cluster of one replica equals a single run, and several sum up their drafts."""
    options = {"blocks": 4000, "max_seqs": 16, "drafter": "acceptance:probability=0.8"}
    asked = "zipf:requests=60"
    alone = simulate(asked, **options)
    one = RunConfig("simulate", workload=asked, **options)
    parts = ClusterParts(one)
    same = simulate_cluster(parts.workload, **parts.cluster())
    assert same.log.drafts == alone.log.drafts
    assert same.log.finish == alone.log.finish
    parts = ClusterParts(attrs.evolve(one, replicas=2, fail=("replica=1,at=2,for=1",)))
    several = simulate_cluster(parts.workload, **parts.cluster())
    logs = [life.log.drafts for lives in several.lives for life in lives]
    for count in ("steps", "plain_ps", "took_ps"):
        assert getattr(several.log.drafts, count) == sum(getattr(log, count) for log in logs)
    summary = several.summary()
    assert summary["drafts"]["acceptance_by_position"] == pytest.approx([0.8] * 4, abs=0.05)
    assert summary["offered_load"] is None


def test_a_file_that_fits_no_request_gives_probabilities(tmp_path):
    """Drafts of a request that is not in the file are drawn from the file's probabilities."""
    path = tmp_path / "acceptance.jsonl"
    path.write_text(
        '{"acceptance": [1.0, 0.0]}\n{"request":"x","output":1,"drafts":1,"accepted":1}\n'
    )
    drafter = Acceptance(file=path)
    assert drafter.accepted(ask("x"), 1, 4) == (1, 1)
    drafter.attach(Even())
    assert drafter.accepted(ask("y"), 1, 4) == (4, 1)
    assert orjson.loads(path.read_bytes().splitlines()[0])["acceptance"] == [1, 0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("[]", 1),
        ('{"acceptance": [2]}\n{"request": 1, "output": 1, "drafts": 1, "accepted": 1}', 1),
        ('{"acceptance": []}\n{"request": 1}', 2),
        ('{"acceptance": []}\n{"request": 1, "output": 1, "drafts": 1, "accepted": 2}', 2),
        ('{"acceptance": []}\n{"request": 1, "output": 1, "drafts": 2, "accepted": 1.5}', 2),
    ],
)
def test_malformed_acceptance_files_are_refused(tmp_path, text, line):
    """The error for a malformed file names the file, the line and the option `--acceptance`."""
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"other\.jsonl, line {line}, .*--acceptance FILE"):
        Acceptance(file=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 2}, "acceptance: probability=2: give numbers from 0 to 1"),
        ({"probability": "a"}, "acceptance: probability='a': give numbers from 0 to 1"),
        ({"parameters": -5}, "acceptance: parameters=-5: give whole weights"),
        ({"tokens": 0}, "acceptance: tokens=0: give 1 draft a step or more"),
    ],
)
def test_impossible_options_are_refused(options, message):
    """A wrong probability, fewer than 0 weights or a number of 0 drafts raises InputError."""
    with pytest.raises(InputError, match=message):
        serve([ask(0, 0, 5, 5)], drafter=Acceptance(**options))


def test_a_missing_file_or_two_sources_are_refused(tmp_path):
    """A missing file, or a file together with probabilities, raises InputError."""
    with pytest.raises(InputError, match="none cannot be read: No such file"):
        Acceptance(file=f"{tmp_path}/none")
    with pytest.raises(InputError, match=r"probability and file both say .*: give one"):
        Acceptance(file=tmp_path / "none", probability=0.5)
