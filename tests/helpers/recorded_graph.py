"""A stand-in for graphs of a GPU: the operations of a step, recorded and replayed on a CPU.

It refuses what a GPU refuses: to read a number on the host, or to bring one from there.
Launches of Triton's interpreter are recorded as kernels are.
"""

from collections import Counter
from contextlib import contextmanager
from typing import ClassVar

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kvcore_engine.backend import TorchCPU
from kvcore_engine.backend.kernels import attention, plan

KERNELS = [
    (attention, "attend_chunks"), (attention, "combine_chunks"), (plan, "divide_contexts"),
    (plan, "order_chunks"),
]  # fmt: skip

READS = {
    "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "item", "masked_select",
    "nonzero",
}  # fmt: skip
"""Operations whose result, or its shape, the host waits for."""

SENDS = {"lift_fresh"}
"""Operations by which numbers come from the host."""


class Launches(TorchDispatchMode):
    """Calls `launched` with each operation that does work, and the function that does it again.

    Views and new memory do none. `launched` is called before the operation.
    """

    def __init__(self, launched):
        """Store the function."""
        super().__init__()
        self.launched = launched

    @classmethod
    def _should_skip_dynamo(cls):
        """Return False: nothing is compiled here, and to import torch's compiler takes long."""
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run an operation."""
        kwargs = kwargs or {}
        schema = function._schema
        name = schema.name.partition("::")[2]
        self.launched(name, None)
        done = function(*args, **kwargs)
        writes = any(x.alias_info and x.alias_info.is_write for x in schema.arguments)
        views = any(x.alias_info and not x.alias_info.is_write for x in schema.returns)
        tensors = [done] if isinstance(done, torch.Tensor) else done
        if views or "empty" in name or not isinstance(tensors, (list, tuple)):
            return done

        def again():
            results = function(*args, **kwargs)
            if not writes:
                fresh = [results] if isinstance(results, torch.Tensor) else results
                for kept, new in zip(tensors, fresh, strict=True):
                    kept.copy_(new)

        self.launched(name, again)
        return done

    def __enter__(self):
        """Record launches of Triton's kernels, too."""
        self._kernels = [(module, name, getattr(module, name)) for module, name in KERNELS]
        for module, name, kernel in self._kernels:
            setattr(module, name, Kernel(name, kernel, self.launched))
        return super().__enter__()

    def __exit__(self, *error):
        """Put the kernels back."""
        for module, name, kernel in self._kernels:
            setattr(module, name, kernel)
        return super().__exit__(*error)


class Kernel:
    """A kernel whose launches are recorded."""

    def __init__(self, name, kernel, launched):
        """Store the kernel, and the function that is called with its launches."""
        self.name, self.kernel, self.launched = name, kernel, launched

    def __getitem__(self, grid):
        """Return the function that launches the kernel."""

        def launch(*args, **kwargs):
            def again():
                with _disable_current_modes():
                    self.kernel[grid](*args, **kwargs)

            again()
            self.launched(self.name, again)

        return launch


class RecordedGraph:
    """A `DeviceGraph` of the operations of torch and Triton on a CPU."""

    def __init__(self):
        """Record nothing yet."""
        self.again = []

    def capture(self, run):
        """Record the operations of `run`; refuse those that a GPU cannot record."""

        def launched(name, again):
            if name in READS:
                msg = f"the host reads a number: {name}"
                raise RuntimeError(msg)
            if name in SENDS:
                msg = f"a number comes from the host: {name}"
                raise RuntimeError(msg)
            if again is not None:
                self.again.append(again)

        with Launches(launched):
            return run()

    def replay(self):
        """Do the operations again."""
        for again in self.again:
            again()

    def reset(self):
        """Forget the operations."""
        self.again = []


@attrs.define(slots=False, eq=False)
class GraphedCPU(TorchCPU):
    """A CPU whose decode steps are recorded and replayed; Triton's interpreter attends.

    It runs few programs at once: lists of chunks of a graph are as long as those of a step of
    so many, and an empty entry takes an interpreter as long as a full one.
    """

    name: ClassVar[str] = "graphed-cpu"

    graphs: bool = attrs.field(default=True, kw_only=True)

    def allocate(self, layout):
        """Allocate a pool, and let few programs attend to it."""
        super().allocate(layout)
        if self._kernel._divider.kernel is not None:
            self._kernel._divider.kernel.programs = 1

    def new_graph(self):
        """Return an empty graph; None unless `graphs` is on."""
        return RecordedGraph() if self.graphs else None


@contextmanager
def counted():
    """Count the launches of the body by name."""
    counts = Counter()

    def launched(name, again):
        if again is not None:
            counts[name] += 1

    with Launches(launched):
        yield counts
