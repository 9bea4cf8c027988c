"""The example of the README: vLLM's scheduler evicts the same blocks as a replay."""

import runpy
from pathlib import Path
from warnings import catch_warnings

import pytest
from helpers.engines import required

required("vllm")

with catch_warnings(action="ignore"):  # warnings of vLLM's imports
    import helpers.vllm_engine  # noqa: F401 - it lets vLLM be imported without a GPU

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("policy", ["arc", "s3fifo", "cost", "hazard:guard=false"])
def test_vllm_evicts_as_a_replay(policy, capsys):
    """The digests of evictions in vLLM and in a replay are equal; the README shows `arc`'s."""
    example = runpy.run_path(str(ROOT / "examples" / "same_decisions.py"))
    example["main"](policy, ["replay", "vLLM"])
    replay, vllm = capsys.readouterr().out.splitlines()
    assert replay.split()[1:] == vllm.split()[1:]
    if policy == "arc":
        assert f"\n{vllm}\n```" in (ROOT / "README.md").read_text("utf-8")
