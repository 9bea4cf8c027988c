"""The deployments that can carry the bundled trace, as `kvcore simulate` reports first."""

from __future__ import annotations

import pytest
from helpers.commands import run_here


def simulated(*options):
    """Return the output of `kvcore simulate` for the bundled trace."""
    done = run_here("simulate", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.slow
def test_the_default_deployment_carries_the_bundled_trace():
    """The default deployment serves all 12,031 requests, and its report fits 80 columns."""
    lines = simulated().splitlines()
    assert lines[0].startswith("mooncake: 12,031 requests to llama-3-8b on 4 x h100")
    assert "12,031 completed, none rejected." in lines
    assert max(map(len, lines)) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deployment", "saturated"),
    [
        (["--rate-scale", 1.5], False),
        (["--rate-scale", 1.6], True),
        (["--device", "h200", "--tensor-parallel", 2, "--scheduler", "slo"], True),
        (["--tensor-parallel", 1], True),
        (["--memory", "10GiB"], True),
    ],
)
def test_a_report_begins_with_saturated_if_the_load_is_too_high(deployment, saturated):
    """The report begins with SATURATED if and only if the load cannot be carried.

    This includes a run whose load is below 1, but whose queue keeps growing.
    """
    out = simulated(*deployment, "--slo", "ttft=5,tpot=0.05", "--no-search")
    assert out.startswith("SATURATED: mooncake asks for ") is saturated
    assert "is below" not in out
