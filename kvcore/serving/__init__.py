"""The serving loop: continuous batching under a clock, simulated or on tensors."""

from kvcore.serving.batching import Batching
from kvcore.serving.loop import ServingLoop
from kvcore.serving.result import Result
from kvcore.serving.simulate import simulate

__all__ = ["Batching", "Result", "ServingLoop", "simulate"]
