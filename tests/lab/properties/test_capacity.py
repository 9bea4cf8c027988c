"""The capacity search judges a run that it ends early as it would judge the whole run."""

from __future__ import annotations

import pytest

from kvcore.config import RunConfig
from kvcore.progress import unseen
from kvcore_lab.plans.capacity import _Search

CROWD = "zipf:requests=150,prefix_tokens=256,suffix_tokens=256,output_tokens=200,rate=10"
TIGHT = {"blocks": 300, "max_seqs": 16}


@pytest.mark.parametrize(
    ("workload", "options", "rates", "held"),
    [
        (CROWD, TIGHT, [0.1, 1, 3, 4, 6, 30], 2),
        (CROWD, {"tensor_parallel": 1, "scheduler": "srpt"}, [1, 10, 20, 30, 100], 2),
        (CROWD, {"blocks": 300, "allocation": "contiguous"}, [0.1, 0.5, 1, 2, 5, 20], 3),
        (CROWD, {**TIGHT, "blocks": 20}, [1, 5], 2),
        ("chat:path=examples/chats.jsonl,rate=2,think=1", {"blocks": 200}, [1, 100], 2),
        ("mooncake", {"limit": 300, "tensor_parallel": 1}, [0.2, 0.4, 1, 3], 2),
    ],
    ids=["tight", "srpt", "contiguous", "rejecting", "sessions", "mooncake"],
)
def test_a_run_that_ends_early_is_judged_as_the_whole_one(
    workload, options, rates, held, request
):
    """A run that ends early gets the verdict of the whole run, saturated or not.

    Rates are below, near and above the one at which the queue grows: the server can carry the
    first `held` of them. It carries any rate if it rejects requests or sessions wait.
    """
    workload = workload.replace("examples", str(request.config.rootpath / "examples"))
    parts = RunConfig("simulate", workload=workload, **options).build()
    whole = parts.run()
    search = _Search(parts, whole, unseen, list(parts.workload))
    verdicts = []
    for rate in rates:
        made = parts.arguments() | {"rate_scale": rate}
        saturation = parts.simulate(parts.workload, **made).saturation
        verdicts.append(saturation is None or not saturation.saturated)
        assert search._holds(rate_scale=rate) == verdicts[-1], rate
    assert verdicts == [index < held for index in range(len(rates))]
