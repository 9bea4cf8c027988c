"""The option `weights_dtype`: its effects on pool and times, and where it is shown."""

import pytest
from helpers.commands import run_here

import kvcore
from kvcore.config import RunConfig, RunParts
from kvcore.errors import InputError
from kvcore.models.catalogue import find_model

BENCH = "bench:requests=4,concurrency=2,input_tokens=64,output_tokens=8"
SERVED = {"model": "llama-3-70b", "device": "h100", "tensor_parallel": 4}


def test_smaller_weights_leave_more_blocks():
    """The pool grows by the memory that weights in fp8 save, 70 billion bytes here."""
    pools = [
        RunParts(RunConfig(workload=BENCH, weights_dtype=dtype, **SERVED))
        for dtype in (None, "fp8")
    ]
    block = pools[0].deployment.bytes_per_block
    freed = (pools[1].blocks - pools[0].blocks) * block
    assert freed == pytest.approx(70_553_706_496, abs=2 * block)


def test_a_model_spec_gets_the_format_of_weights():
    """The option gives a ModelSpec the same weights as the model of that name."""
    by_name, by_numbers = (
        RunParts(RunConfig(workload=BENCH, weights_dtype="int4", **SERVED | {"model": model}))
        for model in ("llama-3-70b", find_model("llama-3-70b"))
    )
    assert by_name.model == by_numbers.model
    assert by_name.model.dtype == "int4"


def test_reports_name_the_given_format(tmp_path):
    """Reports of a run and of its trace name the given format, and none without the option."""
    pytest.importorskip("kvcore_replay")
    options = ["--model", "llama-3-70b", "--trace", tmp_path / "run.jsonl"]
    printed = run_here("simulate", BENCH, *options, "--weights-dtype", "fp8").stdout
    assert "weights in fp8" in " ".join(printed.split())
    printed = run_here("whatif", tmp_path / "run.jsonl", "--eviction", "fifo").stdout
    assert "weights in fp8" in " ".join(printed.split())
    assert "weights" not in run_here("simulate", BENCH).stdout


def test_a_run_on_tensors_refuses_a_format_of_weights():
    """A run on tensors refuses the option, since its weights are the generator's."""
    pytest.importorskip("kvcore_engine")
    with pytest.raises(InputError, match="weights_dtype: a run on tensors"):
        kvcore.run(prompts=["a b c"], weights_dtype="fp8")


def test_an_unknown_format_is_refused():
    """An unknown format raises InputError that lists the known ones."""
    with pytest.raises(InputError, match="weights_dtype: 'fp3' is not one of 'fp32'"):
        RunConfig(weights_dtype="fp3")
