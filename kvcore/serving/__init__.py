"""The serving loop: continuous batching under a clock, simulated or on tensors."""

from kvcore.serving.batching import Batching
from kvcore.serving.latency import Batch, LatencyModel, Line, Windows
from kvcore.serving.loop import ServingLoop
from kvcore.serving.result import Result
from kvcore.serving.scheduler import DecodeSteps, Job, LoopState, Scheduler, Server, StepPlan
from kvcore.serving.simulate import simulate

__all__ = [
    "Batch",
    "Batching",
    "DecodeSteps",
    "Job",
    "LatencyModel",
    "Line",
    "LoopState",
    "Result",
    "Scheduler",
    "Server",
    "ServingLoop",
    "StepPlan",
    "Windows",
    "simulate",
]
