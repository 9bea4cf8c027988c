"""Decode steps that are captured once and replayed: the host launches a graph, not each kernel.

The host sends what a step has that the last one had not, into memory that stays where it is.
All that follows from it is captured once for each number of sequences, and of blocks of a row:

    token ids, contexts,   ->   tables, plan, embedding, layers, logits   ->   next tokens
    changed block ids           one graph                                      by the host
    one copy

So that shapes recur, rows of block tables are rounded up to powers of two; lists of chunks and
partial outputs are as long as any contexts need.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
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

    from kvcore_engine.backend._step_plan import StepPlan
else:
    torch = LazyModule("torch", globals())

MAX_GRAPHS = 64
"""Graphs that are kept: the one that was not replayed for the longest time makes room."""

PROMPTS, OBSERVED, LOST, BY_TORCH, BY_BLOCK = (
    "the step has chunks of prompts or drafts",
    "a retention policy or a reader of pages observes attention",
    "sequences have lost tokens, whose positions are looked up",
    "attention has launches that depend on the contexts: take attention=triton",
    "the codec codes whole blocks",
)
"""Why a step is launched kernel by kernel."""


@attrs.frozen(eq=False)
class CapturedStep:
    """A graph, the logits that it computes, and the hidden states that they are from."""

    graph: DeviceGraph
    logits: Tensor
    states: Any


@attrs.define(eq=False)
class StepInputs:
    """Inputs of decode steps of a shape, in memory of the device that stays where it is.

    Attributes:
        sent: numbers of each step, `[5, sequences]` of int64: token ids, positions, contexts,
            and changes of the tables, an index and a block id each.
        tables: block ids, a row for each sequence and one for changes that are none, int32.
        known: the ids of `tables` on the host.
        stage: memory of the host that `sent` is copied from.
        step: what is computed from them; None before it is captured.
    """

    sent: Tensor
    tables: Tensor
    known: Tensor
    stage: Tensor
    step: CapturedStep | None = None

    @classmethod
    def make(cls, backend: TorchBackend, sequences: int, width: int) -> StepInputs:
        """Return inputs of zeros, for tables of up to `width` blocks."""
        zeros = torch.zeros(sequences * width, dtype=torch.int32)
        stage = backend.host_rows(5, 8 * sequences).view(torch.int64).zero_()
        tables = backend.upload(torch.zeros(sequences + 1, width, dtype=torch.int32)).clone()
        return cls(backend.upload(stage).clone(), tables, zeros, stage)

    def send(self, batch: RaggedBatch, ids: Tensor, upload: Callable[[Tensor], Tensor]) -> None:
        """Send a step; `ids` are its tables, of which only what has changed is sent."""
        sequences = len(batch.contexts)
        changed = (ids != self.known).nonzero()[:, 0]
        if len(changed) > sequences:
            self.tables[:-1].copy_(upload(ids).view(sequences, -1))
            changed = changed[:0]
        # Unused changes write zeros behind the last table.
        unused = torch.full((sequences - len(changed),), len(ids))
        places = torch.cat((changed, unused))
        blocks = torch.cat((ids[changed], torch.zeros_like(unused)))
        self.known = ids
        numbers = [batch.token_ids, batch.positions, batch.contexts]
        self.stage[:3] = torch.tensor(numbers)
        self.stage[3], self.stage[4] = places, blocks
        # The step before has ended, since its tokens are known: nothing reads the stage.
        self.sent.copy_(self.stage, non_blocking=True)


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
        self._recordable: bool | None = None
        self._shapes: OrderedDict[tuple[int, int], StepInputs] = OrderedDict()
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
        generator, backend = self._generator, self._backend
        reason = self._failure or self._refusal(batch, attend)
        if reason is None and self._recordable:
            inputs, captured = self._inputs(batch)

            def run() -> Tensor:
                logits: Tensor = generator.logits(*self._planned(batch, inputs, through))
                return logits

            logits = self._replayed(inputs, run) if captured else run()
            return generator.sampled(logits, batch)
        plan = backend.plan(batch)
        tokens = generator.forward(batch, through(plan))
        if reason is None:
            self._recordable = plan.recordable and plan.writes is None
            reason = None if self._recordable else BY_BLOCK if plan.writes else BY_TORCH
        if reason is not None:
            self._refuse(reason)
        return tokens

    def _inputs(self, batch: RaggedBatch) -> tuple[StepInputs, bool]:
        """Send a step; return the inputs of its shape, and whether they were there before."""
        backend, count = self._backend, len(batch.contexts)
        blocks = max(batch.contexts) // backend.layout.block_size + 1
        shape = count, 1 << (blocks - 1).bit_length()
        ids = backend.joined_tables(batch, shape[1])
        known = shape in self._shapes
        if not known:
            self._shapes[shape] = StepInputs.make(backend, *shape)
            if len(self._shapes) > MAX_GRAPHS:
                _, oldest = self._shapes.popitem(last=False)
                if oldest.step is not None:
                    oldest.step.graph.reset()
        self._shapes.move_to_end(shape)
        inputs = self._shapes[shape]
        inputs.send(batch, ids, backend.upload)
        return inputs, known

    def _planned(
        self, batch: RaggedBatch, inputs: StepInputs, through: Callable[[StepPlan], Attend]
    ) -> tuple[RaggedBatch, Attend]:
        """Return a batch and its attention, made of the inputs by work of the device alone."""
        ids: Any
        positions: Any
        ids, positions, contexts, places, blocks = inputs.sent.unbind()
        inputs.tables.view(-1).index_copy_(0, places, blocks.int())
        plan = self._backend.plan_on_device(batch, inputs.tables[:-1], contexts)
        return attrs.evolve(batch, token_ids=ids, positions=positions), through(plan)

    def _replayed(self, inputs: StepInputs, run: Callable[[], Tensor]) -> Tensor:
        """Return the logits of a step by its graph, which is captured if there is none yet."""
        generator = self._generator
        if inputs.step is None:
            graph = self._backend.new_graph()
            assert graph is not None
            try:
                inputs.step = CapturedStep(graph, graph.capture(run), generator.states)
            except RuntimeError as error:
                reason = str(error).split("\n", 1)[0]
                self._failure = f"a step could not be captured: {reason}"
                self._refuse(self._failure)
                return run()
        inputs.step.graph.replay()
        generator.states = inputs.step.states
        self.replays += 1
        return inputs.step.logits

    def _refusal(self, batch: RaggedBatch, attend: Callable[..., Tensor]) -> str | None:
        """Return why a step is launched kernel by kernel; None if it need not be."""
        if batch.total_tokens > len(batch.lengths) or None in batch.output_indices:
            return PROMPTS
        if attend != self._backend.attend:
            return OBSERVED
        if batch.held_positions:
            return LOST
        return None

    def _refuse(self, reason: str) -> None:
        """Count a step that is launched kernel by kernel, and log its reason once."""
        if not self.launched[reason] and reason != PROMPTS:
            getLogger("kvcore").warning("graphs: decode steps are not replayed: %s", reason)
        self.launched[reason] += 1
