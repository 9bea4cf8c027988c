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
@pytest.mark.parametrize(
    ("deployment", "saturated"),
    [
        (["--rate-scale", 1.5], False),
        (["--rate-scale", 1.6], True),
        (
            ["--limit", 3000, "--device", "h200", "--tensor-parallel", 2, "--scheduler", "slo"],
            True,
        ),
        (["--limit", 3000, "--tensor-parallel", 1], True),
        (["--limit", 3000, "--memory", "10GiB"], True),
    ],
)
def test_a_report_begins_with_saturated_if_the_load_is_too_high(deployment, saturated):
    """The report begins with SATURATED if and only if the load cannot be carried.

    This includes a run whose load is below 1, but whose queue keeps growing. A line has at most
    80 characters.
    """
    out = simulated(*deployment, "--slo", "ttft=5,tpot=0.05", "--no-search")
    assert out.startswith("SATURATED: mooncake asks for ") is saturated
    assert "is below" not in out
    assert max(map(len, out.splitlines())) <= 80
