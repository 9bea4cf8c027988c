"""kvcore under DynoSim's step times against DynoSim itself, run on the same trace.

The figures that `tests/core/golden/test_dynosim.py` uses as DynoSim's are checked here too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import orjson
import pytest
from bench.harness import dynamo_version, measured, peer_rows
from peers.dynosim import FIGURES, KEY_TOKENS, RECORDED, REUSE, serve

from kvcore_plugins.workload import Mooncake

SYNTHETIC = "KVCORE_MOONCAKE_SYNTHETIC"
"""The variable with the path of Mooncake's synthetic_trace.jsonl, which is not shipped."""

WITHIN, EQUAL = 1e-3, 1e-9


def _workload(trace: str) -> Mooncake:
    """Return a trace of Mooncake by name."""
    if trace == "conversation":
        return Mooncake()
    path = os.environ.get(SYNTHETIC)
    if path is None:
        pytest.skip(f"set {SYNTHETIC} to the path of Mooncake's synthetic_trace.jsonl")
    return Mooncake(path=Path(path))


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_figures_equal_those_of_dynosim(recorded, tmp_path):
    """Reuse, TTFT, TPOT and latency equal DynoSim's, or are within 0.1 % if it preempts.

    The recorded figures equal those that DynoSim reports now.
    """
    version = dynamo_version()
    workload = _workload(recorded.trace)
    trace, saved = tmp_path / "trace.jsonl", tmp_path / "report.json"
    trace.write_bytes(b"".join(peer_rows(workload)))
    engine = {"num_gpu_blocks": recorded.blocks, "block_size": recorded.block_size}
    measured(
        *(sys.executable, "-m", "dynamo.replay", str(trace), "--replay-mode", "offline"),
        *("--num-workers", "1", "--router-mode", "round_robin"),
        *("--trace-block-size", str(KEY_TOKENS), "--report-json", str(saved)),
        *("--extra-engine-args", orjson.dumps(engine).decode()),
    )
    theirs = orjson.loads(saved.read_bytes())
    pool = recorded.blocks, recorded.block_size
    ours, preemptions = serve(workload, *pool, preempts=recorded.preempts)
    print(f"\n{recorded}, {preemptions} preemptions\n  {'':34}{version:>14}{'kvcore':>14}")
    for name in (REUSE, *FIGURES):
        apart = ours[name] / theirs[name] - 1
        print(f"  {name:34}{theirs[name]:14.6f}{ours[name]:14.6f}{apart:+11.5%}")
    if recorded.preempts:
        # Print the figures without DynoSim's preemption.
        alone, preemptions = serve(workload, *pool, preempts=False)
        apart = ", ".join(
            f"{name} {alone[name] / theirs[name] - 1:+.2%}"
            for name in (REUSE, "mean_ttft_ms", "mean_tpot_ms")
        )
        print(f"  by options alone, {preemptions} preemptions: {apart}")
    assert {name: theirs[name] for name in recorded.report} == pytest.approx(recorded.report)
    assert ours == pytest.approx(
        {name: theirs[name] for name in ours}, rel=WITHIN if recorded.preempts else EQUAL
    )
