"""The engine on tensors: backends, generators, and the executor of the serving loop."""

from kvcore.engine.backend import Backend, DeviceMemory, Tensor, TensorLayout
from kvcore.engine.batch import RaggedBatch
from kvcore.engine.generator import Attend, AttendOptions, Generator

__all__ = [
    "Attend",
    "AttendOptions",
    "Backend",
    "DeviceMemory",
    "Generator",
    "RaggedBatch",
    "Tensor",
    "TensorLayout",
]
