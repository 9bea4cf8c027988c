"""The contracts a plugin fulfils: one base class a kind, and the span they speak of."""

from kvcore.policy.backend import Backend, DeviceMemory, Rows, Tensor, TensorLayout
from kvcore.policy.eviction import EvictionPolicy
from kvcore.policy.generator import Attend, AttendOptions, Generator, TokenStep
from kvcore.policy.ghost import GhostTree
from kvcore.policy.job import DecodeSteps, Job
from kvcore.policy.latency import Batch, LatencyModel, Line, Windows
from kvcore.policy.plugin import Plugin, broken, option_fields, overridden
from kvcore.policy.prefix import Match, PrefixCache
from kvcore.policy.recorder import Recorder
from kvcore.policy.retention import RetentionPolicy
from kvcore.policy.scheduler import LoopState, Scheduler, Server, StepPlan
from kvcore.policy.score import ScoreEviction
from kvcore.policy.span import Shape, Span, root_span
from kvcore.policy.workload import Workload

__all__ = [
    "Attend",
    "AttendOptions",
    "Backend",
    "Batch",
    "DecodeSteps",
    "DeviceMemory",
    "EvictionPolicy",
    "Generator",
    "GhostTree",
    "Job",
    "LatencyModel",
    "Line",
    "LoopState",
    "Match",
    "Plugin",
    "PrefixCache",
    "Recorder",
    "RetentionPolicy",
    "Rows",
    "Scheduler",
    "ScoreEviction",
    "Server",
    "Shape",
    "Span",
    "StepPlan",
    "Tensor",
    "TensorLayout",
    "TokenStep",
    "Windows",
    "Workload",
    "broken",
    "option_fields",
    "overridden",
    "root_span",
]
