"""Cache groups on tensors against the simulator: equal decisions, and nothing read wrong."""

import pytest

pytest.importorskip("torch", reason="K/V and states lie in tensors")
pytest.importorskip("transformers", reason="its helpers make models")

from helpers.engine import decided
from helpers.grouped_tensors import expected, grouped_servers
from hypothesis import settings

SEEDS = max(10, settings.default.max_examples // 50)
"""How many seeds are served: a run on tensors takes seconds."""


# At seed 29 a request that is preempted fits again at the next step.
@pytest.mark.parametrize("seed", sorted({*range(SEEDS), 29}))
def test_a_run_in_groups_has_the_trace_of_the_simulator(seed):
    """Windows and states on tensors: the simulator's trace, and outputs as without a cache.

    With chunks, shared prefixes, evictions, preemptions, and the rules of vLLM and SGLang. A
    slot that is read must have been stored since its block was allocated.
    """
    (_, result), (simulated, computed), served, groups = grouped_servers(seed)
    assert decided(computed) == decided(simulated)
    rejected = {result.log.ids[row] for row in result.log.reasons}
    wanted = {each.id: expected(each, groups) for each in served if each.id not in rejected}
    assert result.outputs == wanted
    assert result.cache.evicted_blocks
