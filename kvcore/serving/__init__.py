"""The serving loop; contracts of schedulers, rules, latency models, drafters and routers.

To read, in this order:

    job.py            a request between arrival and finish
    scheduler.py      the contract of schedulers; the limits of a step
    rules.py          the contract of the rules by which engines differ
    loop.py           one turn: arrivals, a plan, a step or a jump, the clock
    batcher.py        the plan: who is admitted, paused, preempted
    waiting.py        the queue, and the calls of the scheduler
    decode_batch.py   the blocks of jobs; those that decode, many steps at once
    latency.py        the contract of latency models; the times of one step and of many
    simulate.py       the parts checked, the loop made and run
    stats.py          a row a request, percentiles, the pool over time
    result.py         the result, and its files
    drafter.py        the contract of drafters, whose drafts steps verify
    router.py         the contract of routers, which a cluster calls
"""

from kvcore.lazy import former
from kvcore.serving.job import DecodeSteps, Job
from kvcore.serving.latency import LatencyModel, LinearPiece, StepResult, StepWork, Windows
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

__getattr__ = former(__name__)
