"""kvcore under DynoSim's step times against DynoSim itself, run on the same requests.

The figures that `tests/core/golden/test_dynosim.py` uses as DynoSim's are checked here too.
"""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest
from bench.harness import dynamo_version, measured, peer_command, peer_rows
from peers.dynosim import FIGURES, RECORDED, REUSE, WORKLOADS, serve

from kvcore import Workload
from kvcore_plugins.workload import Mooncake

SYNTHETIC = "KVCORE_MOONCAKE_SYNTHETIC"
"""The variable with the path of Mooncake's synthetic_trace.jsonl, which is not shipped."""

WITHIN = 5e-4


def _workload(trace: str) -> Workload:
    """Return a workload by name."""
    if trace in WORKLOADS:
        return WORKLOADS[trace]
    path = os.environ.get(SYNTHETIC)
    if path is None:
        pytest.skip(f"set {SYNTHETIC} to the path of Mooncake's synthetic_trace.jsonl")
    return Mooncake(path=Path(path))


@pytest.mark.parametrize("recorded", RECORDED, ids=str)
def test_figures_are_those_of_dynosim(recorded, tmp_path):
    """Reuse, TTFT, TPOT and latency are within 0.05 % of DynoSim's.

    The recorded figures equal those that DynoSim reports now.
    """
    version = dynamo_version()
    workload = _workload(recorded.trace)
    trace, saved = tmp_path / "trace.jsonl", tmp_path / "report.json"
    trace.write_bytes(b"".join(peer_rows(workload)))
    pool = recorded.blocks, recorded.block_size
    measured(*peer_command(trace, saved, recorded.block_size, blocks=recorded.blocks))
    theirs = orjson.loads(saved.read_bytes())
    ours, preemptions = serve(workload, *pool)
    print(f"\n{recorded}, {preemptions} preemptions\n  {'':34}{version:>14}{'kvcore':>14}")
    for name in (REUSE, *FIGURES):
        apart = ours[name] / theirs[name] - 1
        print(f"  {name:34}{theirs[name]:14.6f}{ours[name]:14.6f}{apart:+11.5%}")
    assert {name: theirs[name] for name in recorded.report} == pytest.approx(recorded.report)
    assert ours == pytest.approx({name: theirs[name] for name in ours}, rel=WITHIN)
