"""The serving loop: continuous batching under a clock, simulated or on tensors."""

from kvcore.serving.job import DecodeSteps, Job
from kvcore.serving.latency import LatencyModel, LinearPiece, StepResult, StepWork, Windows
from kvcore.serving.loop import ServingLoop
from kvcore.serving.result import HitRatio, Result, Saturation
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
