"""The options of `kvcore serve`."""

import pytest

from kvcore.config import RunConfig
from kvcore.config.run_config import built_rules
from kvcore_online.cli.serve import _planned_late


@pytest.mark.parametrize(
    ("like", "lag"),
    [
        (None, 0),
        ("kvcore", 0),
        ("vllm", 0),
        ("vllm:lag=1", 1),
        ("vllm:lag=0", 0),
        ("sglang", 0),
    ],
)
def test_rules_of_an_engine_need_no_lag_to_be_left_out(like, lag):
    """Rules whose default is a lag are taken without it; one that was given is refused."""
    config = _planned_late(RunConfig.for_mode("run", workload="zipf", like=like))
    assert built_rules(config.like).lag == lag
