"""Decode steps that are captured once and replayed: the host launches a graph, not each kernel.

A step is planned on the host, but what it uploads goes into buffers that stay where they are.
All that is computed from them is captured once for each shape of the buffers:

    plan, token ids   ->   kept buffers   ->   embedding, layers, logits   ->   next tokens
    by the host            changed ids         one graph                        by the host

So that shapes recur, rows of block tables, work lists and partial outputs are rounded up to
powers of two.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from logging import getLogger
from typing import TYPE_CHECKING, Any

import attrs

from kvcore import Backend, Generator
from kvcore.engine import Attend, RaggedBatch
from kvcore.lazy import LazyModule
from kvcore_engine.backend.torch_backend import DeviceGraph, TorchBackend
from kvcore_engine.generator.sampling import SamplingGenerator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvcore_engine.backend._step_plan import LayerKind, StepPlan
else:
    torch = LazyModule("torch", globals())

MAX_GRAPHS = 64
"""Graphs that are kept: the one that was not replayed for the longest time makes room."""

FEW = 8
"""A buffer is written as a whole if more than one of so many of its numbers have changed."""

PROMPTS, OBSERVED, LOST, BY_TORCH, BY_BLOCK = (
    "the step has chunks of prompts or drafts",
    "a retention policy or a reader of pages observes attention",
    "sequences have lost tokens, whose positions are looked up",
    "attention has launches that depend on the contexts: take attention=triton",
    "the codec codes whole blocks",
)
"""Why a step is launched kernel by kernel."""


class KeptBuffers:
    """Buffers on a device for what each step uploads, in the order of its uploads.

    Attributes:
        shapes: index, shape and dtype of each upload of the step so far.
    """

    def __init__(self, upload: Callable[[Tensor], Tensor]) -> None:
        """Store the function that returns a tensor of the host on the device."""
        self._upload = upload
        self._buffers: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self.shapes: list[Hashable] = []

    def upload(self, tensor: Tensor) -> Tensor:
        """Return the buffer with the numbers of a tensor; only changed ones are sent."""
        shape = len(self.shapes), tuple(tensor.shape), tensor.dtype
        self.shapes.append(shape)
        if shape not in self._buffers:
            self._buffers[shape] = self._upload(tensor).clone(), tensor.clone()
        buffer, host = self._buffers[shape]
        changed = (host != tensor).nonzero()[:, 0]
        if len(changed) * FEW > len(host):
            buffer.copy_(self._upload(tensor))
        elif len(changed):
            buffer.index_copy_(0, self._upload(changed), self._upload(tensor[changed]))
        host.copy_(tensor)
        return buffer


@attrs.frozen(eq=False)
class CapturedStep:
    """A graph, the logits that it computes, and the hidden states that they are from."""

    graph: DeviceGraph
    logits: Tensor
    states: Any


class StepGraphs:
    """Captures decode steps of a generator on a backend, and replays them.

    The first step of a shape is launched kernel by kernel, which compiles the kernels; the next
    one is captured.

    Attributes:
        replays: steps that were replayed.
        launched: steps that were not, by the reason; a shape's first step has none.
    """

    def __init__(self, generator: SamplingGenerator, backend: TorchBackend) -> None:
        """Store the generator and the backend, which has its pool."""
        self._generator, self._backend = generator, backend
        self._kept = KeptBuffers(backend.upload)
        self._kinds: list[LayerKind] = []
        self._graphs: OrderedDict[Hashable, CapturedStep] = OrderedDict()
        self._shapes: set[Hashable] = set()
        self._failure: str | None = None
        self.replays = 0
        self.launched: Counter[str] = Counter()

    @classmethod
    def of(cls, generator: Generator, backend: Backend) -> StepGraphs | None:
        """Return the graphs of a generator on a backend; None if one is not made for them."""
        if not isinstance(backend, TorchBackend) or backend.new_graph() is None:
            return None
        if not isinstance(generator, SamplingGenerator) or not generator.capturable:
            text = "graphs: generator %s is launched kernel by kernel: it is not made for them"
            getLogger("kvcore").warning(text, generator.name)
            return None
        return cls(generator, backend)

    def forward(
        self,
        batch: RaggedBatch,
        attend: Callable[..., Tensor],
        through: Callable[[StepPlan], Attend],
    ) -> list[int | None]:
        """Run a step, as `Generator.forward` does.

        Args:
            batch: the step.
            attend: the function that attends: the backend's, or one in its place.
            through: returns the `Attend` of a plan of the backend.
        """
        generator = self._generator
        reason = self._failure or self._refusal(batch, attend)
        if reason is None and self._kinds:
            plan, inputs = self._inputs(batch)
            constants = plan.constants
            if plan.writes is None and constants is not None:
                shape = tuple(self._kept.shapes), constants

                def run() -> Tensor:
                    logits: Tensor = generator.logits(inputs, through(plan))
                    return logits

                logits = self._replayed(shape, run) if shape in self._shapes else run()
                self._shapes.add(shape)
                return generator.sampled(logits, batch)
            reason = BY_TORCH if plan.writes is None else BY_BLOCK
        plan = self._backend.plan(batch)
        tokens = generator.forward(batch, through(plan))
        if reason is None:
            self._kinds = plan.kinds
        else:
            self._refuse(reason)
        return tokens

    def _replayed(self, shape: Hashable, run: Callable[[], Tensor]) -> Tensor:
        """Return the logits of a step by its graph, which is captured if there is none yet."""
        generator = self._generator
        step = self._graphs.get(shape)
        if step is None:
            graph = self._backend.new_graph()
            assert graph is not None
            try:
                step = CapturedStep(graph, graph.capture(run), generator.states)
            except RuntimeError as error:
                reason = str(error).split("\n", 1)[0]
                self._failure = f"a step could not be captured: {reason}"
                self._refuse(self._failure)
                return run()
            self._graphs[shape] = step
            if len(self._graphs) > MAX_GRAPHS:
                _, oldest = self._graphs.popitem(last=False)
                oldest.graph.reset()
        self._graphs.move_to_end(shape)
        step.graph.replay()
        generator.states = step.states
        self.replays += 1
        return step.logits

    def _refusal(self, batch: RaggedBatch, attend: Callable[..., Tensor]) -> str | None:
        """Return why a step is launched kernel by kernel; None if it need not be."""
        if batch.total_tokens > len(batch.lengths) or None in batch.output_indices:
            return PROMPTS
        if attend != self._backend.attend:
            return OBSERVED
        if any(positions is not None for positions in batch.held_positions):
            return LOST
        return None

    def _refuse(self, reason: str) -> None:
        """Count a step that is launched kernel by kernel, and log its reason once."""
        if not self.launched[reason] and reason != PROMPTS:
            getLogger("kvcore").warning("graphs: decode steps are not replayed: %s", reason)
        self.launched[reason] += 1

    def _inputs(self, batch: RaggedBatch) -> tuple[StepPlan, RaggedBatch]:
        """Upload a step into kept buffers; return its plan, and the batch with its tensors."""
        kept, backend = self._kept, self._backend
        kept.shapes.clear()
        with backend.uploads_into(kept.upload):
            plan = backend.plan(batch)
            for kind in self._kinds:
                plan.parts(kind)
        ids: Any = kept.upload(torch.tensor(batch.token_ids))
        positions: Any = kept.upload(torch.tensor(batch.positions))
        return plan, attrs.evolve(batch, token_ids=ids, positions=positions)
