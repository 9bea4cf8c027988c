"""Tests that the examples run and print the documented results."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import kvcore

EXAMPLES = Path(__file__).parents[2] / "examples"
README = EXAMPLES.parent / "README.md"


def lines_of(example, capsys):
    """Run an example in this process; return the lines that it prints."""
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    printed = capsys.readouterr()
    assert not printed.err
    return printed.out.splitlines()


def test_compose_prints_a_line_for_each_policy(capsys):
    """`examples/compose.py` compares three policies on the bundled trace, one per line."""
    lru, lfu, cost = lines_of("compose.py", capsys)
    assert lru == "lru    39,258 blocks hit, 13.6%"
    assert lfu.startswith("lfu ")
    assert cost.startswith("cost ")
    assert lfu.endswith("%")
    assert cost.endswith("%")


def test_a_policy_of_states_is_compared_with_two_others(capsys):
    """`examples/keep_states.py` lets states inside a text leave first, which hits most."""
    lines = [line.split() for line in lines_of("keep_states.py", capsys)]
    assert [name for name, _ in lines] == ["default", "chunk", "inner"]
    assert max(lines, key=lambda line: line[1])[0] == "inner"


def test_one_of_two_engines_preempts(capsys):
    """`examples/tensorrt_llm.py` has an engine that never preempts, and one that does."""
    never, does = lines_of("tensorrt_llm.py", capsys)
    assert never.startswith("no-evict          0 preemptions")
    assert int(does.split()[1]) > 100


def test_samples_and_beams_share_blocks(capsys):
    """`examples/parallel_sampling.py` prints distinct samples and beams that share blocks."""
    pytest.importorskip("torch", reason="the example computes on torch")
    lines = lines_of("parallel_sampling.py", capsys)
    assert [line.split()[0] for line in lines] == ["sample"] * 4 + ["blocks"] + ["beam"] * 3
    assert lines[4] == "blocks 10 instead of 16, 4 copied on write"
    assert len(set(lines)) == 8


def test_same_decisions_prints_the_lines_of_the_readme(capsys):
    """`examples/same_decisions.py` prints the first lines that README shows.

    Another policy has another digest. The line of vLLM itself is tested by `tox -e vllm`.
    """
    pytest.importorskip("torch", reason="the example computes on torch")
    example = runpy.run_path(str(EXAMPLES / "same_decisions.py"))
    example["main"]("arc", ["replay", "simulate", "tensors"])
    lines = capsys.readouterr().out
    assert f"$ python examples/same_decisions.py arc\n{lines}" in README.read_text("utf-8")
    example["main"]("lru", ["replay"])
    assert capsys.readouterr().out.split()[-1] not in lines


def test_simulate_prints_a_line_for_each_scheduler(capsys):
    """`examples/simulate.py` serves requests under three schedulers, one per line."""
    lines = lines_of("simulate.py", capsys)
    assert [line.split()[0] for line in lines] == ["fcfs", "sjf", "slo"]
    assert all(line.endswith("% in time") for line in lines)


def test_turns_of_an_engine_hit_the_answers_before_them(capsys):
    """`examples/engine.py` prints what its page shows: a turn hits the answer before it."""
    pytest.importorskip("torch", reason="the example computes on torch")
    lines = lines_of("engine.py", capsys)
    assert lines[2] == "ann: 5 of 5 blocks hit, 0 evicted"
    page = EXAMPLES.parent / "docs/how-to/engine-on-kvcache.md"
    assert "\n".join(lines) in page.read_text("utf-8")


def test_hits_forks_and_evictions_of_an_engine_change_no_answer():
    """`examples/engine.py` answers as attention over plain tensors does, without a cache."""
    pytest.importorskip("torch", reason="the example computes on torch")
    from kvcore.testing.dense import Text, generate, loaded  # noqa: PLC0415 - needs torch

    example = runpy.run_path(str(EXAMPLES / "engine.py"))
    model = example["Transformer"](seed=1)
    cache = kvcore.KVCache(10, example["BLOCK"], ids=True)
    engine, text, found = example["Engine"](model, cache), model.encode("a b c d e f"), []
    for _ in range(3):
        hit, (best, _) = engine.answer(text, length=9, samples=2)
        dense = loaded(example["Transformer"](seed=1))
        assert generate(dense, [Text(text)], output=9) == [best]
        found.append(hit)
        text = model.encode("other text") if hit else text + best
    assert found == [0, 3, 0]
    assert cache.evicted_blocks
    cache.check_integrity()
