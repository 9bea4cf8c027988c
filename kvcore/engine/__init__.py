"""The engine on tensors: backends, generators, and the executor of the serving loop."""

from kvcore.engine.backend import Backend, DeviceMemory, Rows, Tensor, TensorLayout
from kvcore.engine.generator import Attend, AttendOptions, Generator, TokenStep
from kvcore.engine.run import RunResult, run

__all__ = [
    "Attend",
    "AttendOptions",
    "Backend",
    "DeviceMemory",
    "Generator",
    "Rows",
    "RunResult",
    "Tensor",
    "TensorLayout",
    "TokenStep",
    "run",
]
