"""Runs on tensors: the computed tokens, ends of texts, shared blocks, and refusals."""

import os
import subprocess
import sys
from pathlib import Path

import attrs
import orjson
import pytest
from helpers.drafters import NoisyOracle
from helpers.engine import ENDS, VOCABULARY, Exact, Slots, compute, decided, digest
from helpers.policies import build
from helpers.schedulers import scheduler_of
from helpers.serving import Bent, ask, serve

from kvcore import InputError, KVCache, LatencyModel, PolicyError, run
from kvcore.models.layers import LayerCache
from kvcore.request import block_keys, text_request
from kvcore_engine import tokens as streams
from kvcore_plugins.latency.measured_steps import read_steps, write_steps
from kvcore_plugins.workload import Jsonl
from kvcore_replay.check.trace import check_trace

WORDS = list(range(100, 140))


def text(name, tokens=10, output=6, **more):
    """Return a request with token ids, for blocks of 4."""
    return text_request(name, WORDS[:tokens], output=output, block_size=4, **more)


def dense(tokens, output):
    """Return the tokens that follow `tokens` without a cache."""
    tokens, start = list(tokens), len(tokens)
    for _ in range(output):
        tokens.append(digest(tokens))
    return tokens[start:]


def finishes(run):
    """Return the FINISH lines of a run."""
    return [line for line in run.lines if line["event"] == "FINISH"]


def test_outputs_are_those_without_a_cache():
    """The output of each text is what follows its own tokens without a cache."""
    run = compute([text("a"), text("b", 3, 9)])
    assert run.result.outputs == {"a": dense(WORDS[:10], 6), "b": dense(WORDS[:3], 9)}


def test_output_keys_of_another_request_are_hit():
    """A prompt that contains the output keys of another request hits its generated blocks.

    Its output is the same as if it had computed these blocks itself.
    """
    first = ask("a", 0, 6, 7, keys=[1], output_keys=[2, 3])
    later = ask("b", 10_000, 13, 2, keys=[1, 2, 3])
    alone = compute([later]).result
    after = compute([first, later]).result
    assert after.cache.stats.hit_blocks == 3
    assert after.outputs["b"] == alone.outputs["b"]


def test_samples_do_not_depend_on_the_batch():
    """The seed of a sample depends on the run and the request, not on the batch."""

    class Watching(Exact):
        def forward(self, step, attend):
            seen.add(tuple(step.seeds))
            return super().forward(step, attend)

    found = []
    for names, options in (("ab", {}), ("ab", {"max_seqs": 1}), ("b", {"seed": 1})):
        seen = set()
        compute([text(name) for name in names], generator=Watching(), **options)
        found.append(seen)
    ((a, b),), alone, ((other,),) = found
    assert alone == {(a,), (b,)}
    assert len({a, b, other}) == 3


def shared(**options):
    """Run two texts that publish; the second begins with the first and its answer."""
    answer = dense(WORDS[:10], 12)
    requests = [
        text("a", 10, 12, publish=True),
        text_request(
            "b", WORDS[:10] + answer + [1], output=3, block_size=4, arrival=10**6, publish=True
        ),
    ]
    return compute(requests, **options)


def test_generated_blocks_are_shared():
    """The blocks that a publishing text generates are hit by a text that quotes its answer."""
    run = shared()
    assert run.result.cache.stats.hit_blocks == 5
    assert run.result.outputs["b"] == dense(WORDS[:10] + dense(WORDS[:10], 12) + [1], 3)
    finished, _ = finishes(run)
    keys = block_keys(WORDS[:10] + dense(WORDS[:10], 12), 4)
    assert finished["output_keys"] == [key.hex() for key in keys[2:]]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_generated_blocks_are_shared_by_keys_of_any_size(size, tmp_path):
    """Generated blocks are hit where a block has several keys, or a key several blocks.

    The check of the trace counts as many.
    """
    answer = dense(WORDS[:11], 14)
    requests = [
        text_request(
            name, WORDS[:11] + more, output=14, block_size=size, publish=True, arrival=at
        )
        for name, more, at in (("a", [], 0), ("b", answer, 10**6))
    ]
    run = compute(requests, key_tokens=size)
    assert run.result.cache.stats.hit_blocks == 6
    path = tmp_path / "trace.jsonl"
    path.write_bytes(run.trace)
    assert check_trace(path).hit["hit_blocks"] == 6


@pytest.mark.parametrize("prompt", [3, 4, 10])
def test_each_token_of_an_answer_is_hashed_once(monkeypatch, prompt):
    """The keys of an answer are those of the whole text, and each token is hashed once.

    The tokens of the last block, which is not full, are not hashed.
    """
    hashed = []

    def counted(ids, *arguments, **options):
        hashed.append(len(ids))
        return block_keys(ids, *arguments, **options)

    monkeypatch.setattr(streams, "block_keys", counted)
    request = text("a", prompt, 100, publish=True)
    stream = streams.TokenStream(request, VOCABULARY, 0)
    keys = []
    for token in range(100):
        stream.append(token)
        keys += stream.new_keys(100)
    whole = [*request.tokens, *range(99)]
    assert [*request.keys, *keys] == block_keys(whole, 4)
    assert sum(hashed) == 4 * len([*request.keys, *keys])


def test_a_run_without_tensors_needs_no_torch():
    """A generator and a backend without tensors run where torch is not installed."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from helpers.engine import compute\n"
        "from helpers.serving import ask\n"
        "run = compute([ask(0, 0, 8, 4, keys=[1, 2])], retention='window:tokens=4')\n"
        "assert len(run.result.outputs[0]) == 4\n"
    )
    folder = str(Path(__file__).parent.parent)
    paths = os.pathsep.join([folder, *sys.path])
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": paths}
    )


@pytest.mark.parametrize("blocks", [1000, 9])
@pytest.mark.parametrize("scheduler", ["fcfs", "latest"])
def test_a_run_on_texts_can_be_simulated(tmp_path, blocks, scheduler):
    """The simulator repeats the decisions of a recorded run.

    It knows the keys of the outputs beforehand.

    With nine blocks jobs are preempted and computed again, generated blocks included.
    """
    requests = [
        text(index, 4 + index % 9, 5 + 3 * index % 17, publish=True, arrival=index * 9)
        for index in range(12)
    ]
    ran = compute(requests, blocks=blocks, scheduler=scheduler)
    path = tmp_path / "run.jsonl"
    path.write_bytes(ran.trace)
    simulated = serve(
        Jsonl(path), blocks=blocks, scheduler=scheduler_of(scheduler), latency=Bent()
    )

    def decisions(run):
        lines = [line | {"n": 0, "output_keys": 0} for line in run.lines]
        return [line for line in lines if line["event"] != "KEYS"]

    assert decisions(simulated) == decisions(ran)
    assert check_trace(path).finished == 12
    assert bool(ran.of("PREEMPT")) == (blocks == 9)


def test_stop_at_eos_ends_a_text_early():
    """With `stop_at_eos` a text ends at the first end token, and FINISH has its length."""
    requests = [text(index, 3 + index, 40) for index in range(12)]
    run = compute(
        requests, generator=Exact(ending=4), clock="wall", stop_at_eos=True, chunked=False
    )
    outputs = run.result.outputs.values()
    assert min(map(len, outputs)) < max(map(len, outputs)) == 40
    assert {output[-1] for output in outputs} >= set(ENDS)
    assert all(
        not set(ENDS) & set(output[:-1]) and (len(output) == 40 or output[-1] in ENDS)
        for output in outputs
    )
    finished = {line["request"]: line["output"] for line in finishes(run)}
    assert finished == {name: len(output) for name, output in run.result.outputs.items()}
    assert list(run.result.log.output) == [
        len(run.result.outputs[i]) for i in run.result.log.ids
    ]


@pytest.mark.parametrize(("output", "shared"), [(3, 0), (6, 1), (7, 1)])
def test_a_block_without_its_last_token_is_not_shared(output, shared):
    """A block that the last token fills is not shared: the K/V of that token is missing."""

    class Ends(Exact):
        def next(self, tokens):
            return ENDS[0] if len(tokens) == 5 + output - 1 else digest(tokens)

    run = compute(
        [text("a", 5, 40, publish=True)], generator=Ends(), clock="wall", stop_at_eos=True
    )
    (finished,) = finishes(run)
    assert finished["output"] == output
    assert len(finished.get("output_keys", ())) == shared
    assert run.result.cache.tree.cached_blocks == 1 + shared


def test_a_request_is_not_changed_by_a_run():
    """A run does not change its requests, so another model answers them like new ones."""

    class Other(Exact):
        def next(self, tokens):
            return digest([0, *tokens])

    request = text("a", 5, 12, publish=True)
    first = compute([request])
    again = compute([request], generator=Other())
    fresh = compute([text("a", 5, 12, publish=True)], generator=Other())
    assert request == text("a", 5, 12, publish=True)
    assert decided(again.trace) == decided(fresh.trace) != decided(first.trace)


def test_a_token_outside_the_vocabulary_is_refused():
    """A token that the vocabulary of the generator does not have is refused."""
    for token in (10_007, -5):
        request = text_request("a", [1, 2], output=1, block_size=4)
        request = attrs.evolve(request, tokens=[1, token])
        with pytest.raises(
            InputError, match=f"'a' has token {token}; the generator's are 0 to"
        ):
            compute([request])


def test_a_text_with_fewer_tokens_than_its_prompt_is_refused():
    """A text that ends before its prompt is refused, with both lengths."""
    request = attrs.evolve(text_request("a", [1, 2], output=1, block_size=4), prompt_tokens=3)
    with pytest.raises(InputError, match="'a' has 2 tokens, and a prompt of 3"):
        compute([request])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ("none", r".* raised ValueError in pieces\(\)"),
        (((1.5, 0),), ": .* takes 1.5 ps; give whole picoseconds"),
    ],
)
def test_invalid_times_of_a_latency_model_are_refused(pieces, message):
    """A latency model with invalid times raises PolicyError with its name."""

    class Wrong(LatencyModel):
        name = "wrong"

        def pieces(self, work):
            return pieces

    with pytest.raises(PolicyError, match=f"latency plugin 'wrong'{message}"):
        compute([text("a")], latency=Wrong())


@pytest.mark.parametrize("frontend", [None, "0.1", -1.0])
def test_an_invalid_time_of_a_front_end_is_refused(frontend):
    """A latency model whose front end takes no time that is one raises, with its name."""
    model = type("Wrong", (LatencyModel,), {"name": "wrong", "frontend": frontend})()
    with pytest.raises(InputError, match=r"latency plugin 'wrong': frontend=.* must be a num"):
        compute([text("a")], latency=model)


def test_without_stop_at_eos_end_tokens_end_nothing():
    """Without `stop_at_eos` the output has the requested length, end tokens included."""
    run = compute([text("a")], generator=Exact(ending=100))
    assert run.result.outputs == {"a": [*ENDS] * 3}


def test_the_wall_clock_measures_every_step(tmp_path):
    """With the wall clock every step is measured and written as `calibrate` reads it.

    The trace has the mode `wall`.
    """
    ran = compute([text("a", 10, 4), text("b", 7, 2)], clock="wall", max_tokens=8, max_seqs=8)
    path = tmp_path / "steps.csv"
    with path.open("w") as file:
        write_steps(file, ran.result.steps)
    steps = read_steps(path)
    assert [step.counts for step in steps] == [step.counts for step in ran.result.steps]
    assert sum(step.prefill for step in steps) == 10 + 7 - 4
    assert sum(step.decode for step in steps) == 4
    assert sum(step.context for step in steps) == 11 + 12 + 13 + 8
    assert [step.pairs for step in steps] == [step.pairs for step in ran.result.steps]
    assert sum(step.pairs for step in steps) == sum(range(1, 11)) + 5 + 6 + 7
    assert [step.time // 1000 for step in steps] == [s.time // 1000 for s in ran.result.steps]
    assert ran.result.log.busy_ps == sum(step.time for step in ran.result.steps)
    assert orjson.loads(ran.trace.splitlines()[0])["mode"] == "wall"


def test_the_model_clock_measures_no_step():
    """With the model clock no step is measured."""
    assert compute([text("a")]).result.steps == []


def test_the_header_has_executor_generator_and_backend():
    """The header has the executor, and generator and backend with their options."""
    header = orjson.loads(compute([text("a")]).trace.splitlines()[0])
    assert header["executor"] == "run"
    assert header["plugins"]["generator"] == {"name": "exact", "options": {"ending": 0}}
    assert header["plugins"]["backend"] == {"name": "slots", "options": {}}


def test_equal_runs_write_equal_traces():
    """Two equal runs write the same trace."""
    requests = [text(index, 3 + index) for index in range(6)]
    assert compute(requests).trace == compute(requests).trace


def test_the_fake_backend_refuses_slots_that_were_not_stored():
    """The fake backend `Slots` raises when a slot is read that was not stored."""

    class Forgetful(Slots):
        def store(self, layer, plan, keys, values):
            super().store(layer, plan, keys, values)
            self.fill(0, [plan.block_tables[0][0]])

    with pytest.raises(PolicyError, match=r"backend plugin .* raised TypeError in attend"):
        compute([text("a")], backend=Forgetful())


class Broken(Slots):
    """A backend whose attention raises."""

    name = "broken"

    def attend(self, layer, plan, queries, **options):
        """Raise an exception."""
        return queries / 0


def test_an_exception_of_the_backend_is_reported_with_its_name():
    """An exception of the backend names the backend, though the generator has called it."""
    with pytest.raises(PolicyError, match=r"backend plugin 'broken' .* in attend\(\)"):
        compute([text("a")], backend=Broken())


class Endless(Exact):
    """A generator without a token that ends a text."""

    eos_token_ids = frozenset()


def parts(**given):
    """Return valid arguments of a run, some of them replaced by those given."""
    cache = KVCache(100, 4, eviction=build("lru"), ids=True)
    return {"cache": cache, "generator": Exact(), "backend": Slots(), "latency": Bent()} | given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache": KVCache(9, 4)}, "only counts blocks: make it with ids=True"),
        ({"cache": KVCache(9, 4, accounting="keys", ids=True)}, "accounting='tokens'"),
        ({"clock": "sun"}, "clock='sun' is not known; there are: model, wall"),
        ({"stop_at_eos": True}, "take clock='wall'"),
        (
            {"stop_at_eos": True, "clock": "wall", "generator": Endless()},
            "has no token that ends a text",
        ),
        ({"dtype": "bf16"}, "no bf16; take fp32"),
        ({"dtype": "int4"}, "'int4' is not known; there are: fp64, fp32, fp16, bf16"),
    ],
)
def test_invalid_arguments_are_refused(given, message):
    """An invalid argument of `run` is refused with the valid ones."""
    with pytest.raises(InputError, match=message):
        run([text("a")], **parts(**given))


def test_a_block_size_of_no_token_is_refused():
    """A run whose blocks would be empty is refused before its keys are divided by them."""
    with pytest.raises(InputError, match="block_size: 0 is not a whole number above 0"):
        run("zipf:requests=2", block_size=0)


def test_a_latent_is_refused():
    """A model that stores a latent is refused, since its K/V has no heads."""

    class Latent(Exact):
        @property
        def spec(self):
            return attrs.evolve(super().spec, name="folded", latent=4)

    with pytest.raises(InputError, match=r"'folded' stores a latent \(MLA\)"):
        run([text("a")], **parts(generator=Latent()))


def test_a_model_whose_layers_keep_different_things_is_refused():
    """A model with caches of its own is refused, since one layout is not all layers'."""

    class Mixed(Exact):
        @property
        def spec(self):
            state = LayerCache(kind="state", layers=1, state_bytes=8)
            caches = (*super().spec.layer_caches, state)
            return attrs.evolve(super().spec, name="mixed", caches=caches)

    with pytest.raises(InputError, match="layers of model 'mixed' keep different things"):
        run([text("a")], **parts(generator=Mixed()))


@pytest.mark.parametrize("kind", ["generator", "backend"])
def test_a_used_generator_or_backend_is_refused(kind):
    """A generator or a backend that has served a run is refused in a second one."""
    used = parts()
    run([text("a")], **used)
    with pytest.raises(InputError, match=f"this {kind} plugin .* is in use already"):
        run([text("a")], **parts(**{kind: used[kind]}))


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ({"dtype": "fp9"}, "dtype 'fp9' is not known"),
        ({"drafter": NoisyOracle(tokens=0)}, "knowing: tokens=0"),
    ],
)
def test_a_refused_run_leaves_generator_and_backend_unused(option, wrong):
    """The call that mends a refused one takes the same generator and backend."""
    given = parts()
    with pytest.raises(InputError, match=wrong):
        run([text("a")], **given, **option)
    assert run([text("a")], **parts(**{k: given[k] for k in ("generator", "backend")})).outputs


@pytest.mark.parametrize("wrong", [[], [None], [1, 2], None, 7, [-1], [10**9], [1.5], ["a"]])
def test_invalid_tokens_of_a_generator_are_refused(wrong):
    """A generator that returns too few or many tokens, or what is none, raises PolicyError."""

    class Wrong(Exact):
        def forward(self, step, attend):
            return wrong

    with pytest.raises(PolicyError, match=r"generator plugin 'exact'.* for 1 sequences"):
        compute([text("a")], generator=Wrong())


def test_decided_omits_the_first_and_last_line():
    """`decided` leaves out the first and the last line of a trace, and no other."""
    run = compute([text("a")])
    assert len(decided(run.trace)) == len(run.lines)
