"""The serving loop; contracts of schedulers, rules, latency models, drafters and routers.

To read, in this order:

    job.py            a request between arrival and finish
    scheduler.py      the contract of schedulers; the limits of a step
    rules.py          the contract of the rules by which engines differ
    arrivals.py       the requests by time of arrival
    loop.py           one turn: arrivals, a plan, a step or a jump, the clock
    batcher.py        the plan: who is admitted, paused, preempted
    waiting.py        the queue, and the calls of the scheduler
    decode_batch.py   the blocks of jobs; those that decode, many steps at once
    latency.py        the contract of latency models; the times of one step and of many
    simulate.py       the parts checked, the loop made and run
    stats.py          a row a request, percentiles, the pool over time
    load.py           the load that requests offered, and whether the queue grew
    result.py         the result, and its files
    speculation.py    drafts in the loop; `drafter.py` has the contract
    router.py         the contract of routers, which a cluster calls
"""

from kvcore.serving.job import DecodeSteps, Job
from kvcore.serving.latency import LatencyModel, LinearPiece, StepResult, StepWork, Windows
from kvcore.serving.load import Saturation
from kvcore.serving.loop import ServingLoop
from kvcore.serving.result import HitRatio, Result
from kvcore.serving.rules import Rules, StepState
from kvcore.serving.scheduler import Batching, LoopState, Scheduler, ServiceTimes, StepPlan
from kvcore.serving.simulate import simulate
from kvcore.serving.stats import Fragmentation, Percentiles

__all__ = [
    "Batching",
    "DecodeSteps",
    "Fragmentation",
    "HitRatio",
    "Job",
    "LatencyModel",
    "LinearPiece",
    "LoopState",
    "Percentiles",
    "Result",
    "Rules",
    "Saturation",
    "Scheduler",
    "ServiceTimes",
    "ServingLoop",
    "StepPlan",
    "StepResult",
    "StepState",
    "StepWork",
    "Windows",
    "simulate",
]
