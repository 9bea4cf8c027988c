"""Rules of an engine in a file: the capacity policies of TensorRT-LLM.

GUARANTEED_NO_EVICT never pauses a request that has started; MAX_UTILIZATION packs as many as
possible into each step, and pauses some when K/V runs out. Written from the documentation of
TensorRT-LLM ("Capacity Scheduler Policy", its runtime options); nothing else of it is here.

Run it with `python examples/tensorrt_llm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

import kvcore
from kvcore import Job
from kvcore.serving import StepState

WORKLOAD = "zipf:requests=400,rate=60,prefix_tokens=64,suffix_tokens=64,output_tokens=400"


class GuaranteedNoEvict(kvcore.Rules):
    """Admit a request if all that run, and it, can end without another block."""

    name: ClassVar[str] = "no-evict"
    defaults: ClassVar[Mapping[str, Any]] = {"watermark": 0.0}

    def headroom(self, job: Job, state: StepState) -> int | None:
        """Return the blocks that running jobs and `job` still fill until they end."""
        size = state.block_size
        growth = 0
        for other in (*state.running, *state.paused, job):
            held = other.target if other.prefill_left or other is job else other.length
            end = other.request.prompt_tokens + other.output_tokens
            growth += max(-(-end // size) - -(-held // size), 0)
        return growth


@attrs.define(slots=False, kw_only=True, eq=False)
class MaxUtilization(kvcore.Rules):
    """Admit a request if its first chunk fits; those admitted last lose their blocks."""

    name: ClassVar[str] = "max-utilization"
    defaults: ClassVar[Mapping[str, Any]] = {"watermark": 0.0}

    reserve: str = "first-chunk"


def main() -> None:
    """Print the preemptions and the mean time to the first token under each policy."""
    for rules in (GuaranteedNoEvict, MaxUtilization):
        run = kvcore.simulate(WORKLOAD, like=rules, blocks=2_000).summary()
        lost, ttft = run["preemptions"]["recompute"], run["ttft_s"]["mean"]
        print(f"{rules.name:15} {lost:3} preemptions, {ttft:.2f} s to the first token")


if __name__ == "__main__":
    main()
