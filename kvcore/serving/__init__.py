"""The serving loop; contracts of schedulers, latency models, drafters and routers."""

from kvcore.serving.job import DecodeSteps, Job
from kvcore.serving.latency import LatencyModel, LinearPiece, StepResult, StepWork, Windows
from kvcore.serving.loop import ServingLoop
from kvcore.serving.result import HitRatio, Result, Saturation
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
    "Saturation",
    "Scheduler",
    "ServiceTimes",
    "ServingLoop",
    "StepPlan",
    "StepResult",
    "StepWork",
    "Windows",
    "simulate",
]
