"""Grids of step times that are lines in contexts and pairs, and those in the package."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import attrs

from kvcore.errors import InputError
from kvcore.files import DATA
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.units import PS_PER_S
from kvcore_plugins.latency.measured_steps import MeasuredStep

TableDtype: TypeAlias = Literal["bf16", "fp8"]
"""Number formats with step times in the package."""

PREFILL = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
DECODE = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Prompt tokens and sequences of the points of a grid."""

CONTEXT, PAIRS = 10**8, 10**10
"""More context tokens and pairs than a step has: between 0 and these, time is a line."""

PS_PER_UNIT = 10**6
"""Times in a grid are whole microseconds."""


class Deployment(NamedTuple):
    """The deployment of step times: names of the catalogue, an engine and a number format."""

    model: str
    device: str
    tensor_parallel: int
    engine: str
    dtype: str

    def __str__(self) -> str:
        """Return it as options of the latency model `table`."""
        return (
            f"engine={self.engine},model={self.model},device={self.device},"
            f"tensor_parallel={self.tensor_parallel},weights_dtype={self.dtype}"
        )


@attrs.frozen
class StepGrid:
    """Step times of a deployment, in microseconds; none falls with more work.

    Attributes:
        base: times without attention, by `PREFILL` and then by `DECODE`.
        pairs: additional times of `PAIRS` pairs of prompt tokens, by `PREFILL`.
        context: additional times of `CONTEXT` context tokens, by `DECODE`.
    """

    base: Sequence[Sequence[int]]
    pairs: Sequence[int]
    context: Sequence[int]

    def steps(self) -> Iterator[MeasuredStep]:
        """Yield the points as the latency model `table` reads them."""
        for row, prefill in enumerate(PREFILL):
            for column, decode in enumerate(DECODE):
                for context in (0, CONTEXT):
                    for pairs in (0, PAIRS):
                        time = self.base[row][column]
                        time += self.context[column] if context else 0
                        time += self.pairs[row] if pairs else 0
                        yield MeasuredStep(
                            0, prefill, decode, context, time * PS_PER_UNIT, pairs
                        )


@cache
def shipped_grids() -> dict[Deployment, StepGrid]:
    """Return the grids in the package: composed by NVIDIA's AIConfigurator (Apache-2.0)."""
    packed = (DATA / "step_times.json.gz").read_bytes()
    return {
        Deployment(*name): StepGrid(*grid) for name, grid in json.loads(gzip.decompress(packed))
    }


def shipped_grid(
    model: str | ModelSpec,
    device: str | DeviceSpec,
    tensor_parallel: int,
    engine: str,
    dtype: str | None = None,
) -> StepGrid:
    """Return the grid in the package of a deployment.

    Models of the same shape, such as Llama 3 and 3.1, take the same times.

    Args:
        model: a name of the catalogue, or a specification.
        device: a name of the catalogue, or a specification.
        tensor_parallel: number of devices that share the model.
        engine: one of `EngineName`.
        dtype: one of `TableDtype`; None: that of the model's weights.

    Raises:
        InputError: there is none; the error names the nearest ones.
    """
    spec = find_model(model) if isinstance(model, str) else model
    gpu = find_device(device) if isinstance(device, str) else device
    # Of two formats that of the experts: most weights are theirs.
    dtype = dtype or {"fp16": "bf16"}.get(spec.expert_dtype, spec.expert_dtype)
    wanted = Deployment(spec.name, gpu.name, tensor_parallel, engine, dtype)
    grids = shipped_grids()
    for name, grid in grids.items():
        if name[1:] == wanted[1:] and _shape(find_model(name.model)) == _shape(spec):
            return grid

    def apart(name: Deployment) -> tuple[bool, int]:
        same_model = _shape(find_model(name.model)) == _shape(spec)
        others = (a == b for a, b in zip(name[1:], wanted[1:], strict=True))
        return not same_model, -sum(others)

    near = "; ".join(map(str, sorted(grids, key=apart)[:3]))
    msg = (
        f"no step times of {wanted}; the nearest are {near}. "
        f"`kvcore calibrate --from aic` makes others, a file for table:path=FILE"
    )
    raise InputError(msg)


def _shape(spec: ModelSpec) -> dict[str, Any]:
    return attrs.asdict(attrs.evolve(spec.with_weights("bf16"), name="", positions=0))


def microseconds(seconds: float) -> int:
    """Return whole microseconds, at least 1."""
    return max(1, round(seconds * PS_PER_S / PS_PER_UNIT))
