"""The serving loop: continuous batching under a clock, simulated or on tensors."""

from kvcore.serving.batching import Batching
from kvcore.serving.engine import RunResult, run
from kvcore.serving.loop import ServingLoop
from kvcore.serving.result import Result
from kvcore.serving.simulate import simulate
from kvcore.serving.tokens import TextRequest, Texts, text_request

__all__ = [
    "Batching",
    "Result",
    "RunResult",
    "ServingLoop",
    "TextRequest",
    "Texts",
    "run",
    "simulate",
    "text_request",
]
