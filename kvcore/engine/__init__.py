"""The engine on tensors: backends, generators, and the executor of the serving loop."""

from kvcore.engine.backend import AttendOptions, Backend, DeviceMemory, TensorLayout
from kvcore.engine.batch import RaggedBatch, Tensor
from kvcore.engine.compaction import Compactor
from kvcore.engine.drafter import Draft, DraftSequence, TokenDrafter
from kvcore.engine.generator import Attend, Generator, attend_through
from kvcore.engine.retention import HeldTokens, Reads, ScoreRetention, TokenRetention
from kvcore.engine.rotary import Rotary, Rotation
from kvcore.models.codec import Codec, Plane

__all__ = [
    "Attend",
    "AttendOptions",
    "Backend",
    "Codec",
    "Compactor",
    "DeviceMemory",
    "Draft",
    "DraftSequence",
    "Generator",
    "HeldTokens",
    "Plane",
    "RaggedBatch",
    "Reads",
    "Rotary",
    "Rotation",
    "ScoreRetention",
    "Tensor",
    "TensorLayout",
    "TokenDrafter",
    "TokenRetention",
    "attend_through",
]
