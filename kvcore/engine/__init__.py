"""Contracts of runs on tensors: backends, generators, and the batches they compute."""

from kvcore.engine.backend import AttendOptions, Backend, DeviceMemory, TensorLayout
from kvcore.engine.batch import RaggedBatch, Sampling, Tensor, row_positions
from kvcore.engine.generator import Attend, Generator, attend_through
from kvcore.engine.rotary import Rotary, Rotation
from kvcore.lazy import former
from kvcore.models.codec import Codec, Plane

__all__ = [
    "Attend",
    "AttendOptions",
    "Backend",
    "Codec",
    "DeviceMemory",
    "Generator",
    "Plane",
    "RaggedBatch",
    "Rotary",
    "Rotation",
    "Sampling",
    "Tensor",
    "TensorLayout",
    "attend_through",
    "row_positions",
]

__getattr__ = former(__name__)
