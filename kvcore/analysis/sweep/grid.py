"""What a sweep runs: cells, and the grid of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, TypeAlias

import attrs

from kvcore.errors import InputError
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.spec import ModelSpec
from kvcore.plugins.options import Spec, nearest, parse
from kvcore.request import SLO
from kvcore.serving import Batching
from kvcore.units import NS_PER_S, parse_bytes

Mode: TypeAlias = Literal["simulate", "compare"]


MODES: tuple[Mode, ...] = ("simulate", "compare")


EXPECTED = SLO(ttft=30 * NS_PER_S, tpot=NS_PER_S // 10)
"""What the authors of the bundled trace ask of their own system: Qin et al., "Mooncake: a
KVCache-centric disaggregated architecture for LLM serving", 2024."""


CAPS = Batching()


NOT_IN = {
    "simulate": {"count"},
    "compare": {
        *("tensor_parallel", "retention", "latency", "scheduler", "rate_scale", "slo"),
        *("max_tokens", "max_seqs", "steps", "chunked", "watermark"),
    },
}
"""What a cell of a mode has no use for: a run under a clock counts tokens, one without has
nothing that takes time."""


def _plugin(value: object) -> Spec:
    if isinstance(value, Spec):
        return value
    specs = parse(value) if isinstance(value, str) else []
    if len(specs) != 1:
        msg = f"{value!r} is not one plugin: give its name, with options as in 'lfu:unit=s'"
        raise InputError(msg)
    return specs[0]


def _some_plugin(value: object) -> Spec | None:
    return None if value is None else _plugin(value)


def _model(value: object) -> ModelSpec:
    return value if isinstance(value, ModelSpec) else find_model(_text(value))


def _device(value: object) -> str:
    return find_device(_text(value)).name


def _text(value: object) -> str:
    return str(_of(str, value, "text"))


def _whole(value: object) -> int:
    return int(_of(int, value, "a whole number"))


def _some(value: object) -> int | None:
    return None if value is None else _whole(value)


def _number(value: object) -> float:
    return float(_of((int, float), value, "a number"))


def _flag(value: object) -> bool:
    return bool(_of(bool, value, "True or False"))


def _bytes(value: object) -> int | None:
    return parse_bytes(value) if isinstance(value, str) else _some(value)


def _slo(value: object) -> SLO:
    slo: SLO = SLO() if value is None else _of(SLO, value, "an SLO, or None")
    return slo


def _of(kind: Any, value: object, expected: str) -> Any:
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    msg = f"expected {expected}, not {value!r}"
    raise InputError(msg)


@attrs.frozen(kw_only=True)
class Cell:
    """One run: all that was asked for, nothing of it built yet.

    What is left out is as in `kvcore simulate` or `kvcore compare`, whichever is the mode.
    The order of the fields is that of the rows and the columns of a sweep.

    Attributes:
        mode: `simulate`, under a clock, or `compare`, serial and untimed.
        workload: a workload plugin with its options.
        model, device, tensor_parallel, kv_dtype: what is served on what; they size a pool,
            price a block, and time steps.
        count: the counting; `simulate` knows `tokens` alone.
        block_size: tokens; None: 16, or untimed as many as in a key.
        blocks, memory: the pool, in blocks, or in bytes of K/V; None: as much as fits.
        prefix, retention, latency, scheduler, eviction: plugins with their options;
            `retention` None: running sequences forget nothing.
        max_tokens, max_seqs, steps, chunked, watermark: as in `Batching`.
        rate_scale: how many times as fast open-loop requests arrive.
        slo: what is expected for requests that bring no SLO of their own.
        seed: of the plugins that have an option `seed` and do not set it.
    """

    mode: Mode = "simulate"
    workload: Spec = attrs.field(default=Spec("mooncake"), converter=_plugin)
    model: ModelSpec = attrs.field(default=find_model("llama-3-8b"), converter=_model)
    device: str = attrs.field(default="h100", converter=_device)
    tensor_parallel: int = attrs.field(default=4, converter=_whole)
    kv_dtype: str = attrs.field(default="fp16", converter=_text)
    count: str = attrs.field(default="keys", converter=_text)
    block_size: int | None = attrs.field(default=None, converter=_some)
    blocks: int | None = attrs.field(default=None, converter=_some)
    memory: int | None = attrs.field(default=None, converter=_bytes)
    prefix: Spec = attrs.field(default=Spec("radix"), converter=_plugin)
    retention: Spec | None = attrs.field(default=None, converter=_some_plugin)
    latency: Spec = attrs.field(default=Spec("roofline"), converter=_plugin)
    max_tokens: int = attrs.field(default=CAPS.max_tokens, converter=_whole)
    max_seqs: int = attrs.field(default=CAPS.max_seqs, converter=_whole)
    steps: str = attrs.field(default=CAPS.steps, converter=_text)
    chunked: bool = attrs.field(default=CAPS.chunked, converter=_flag)
    watermark: float = attrs.field(default=CAPS.watermark, converter=_number)
    rate_scale: float = attrs.field(default=1.0, converter=_number)
    slo: SLO = attrs.field(default=EXPECTED, converter=_slo)
    seed: int = attrs.field(default=0, converter=_whole)
    scheduler: Spec = attrs.field(default=Spec("fcfs"), converter=_plugin)
    eviction: Spec = attrs.field(default=Spec("lru"), converter=_plugin)


AXES = tuple(field.name for field in attrs.fields(Cell) if field.name != "mode")
"""The fields of a cell that may have several values in a sweep, in their order."""


class Grid:
    """Every combination of the values of a sweep's axes.

    Args:
        mode: of all cells.
        axes: fields of `Cell`, each with a value or a list of values. What comes twice in
            a list counts once.

    Attributes:
        mode: as given.
        axes: the values of each axis that was given, in the order of the fields.

    Raises:
        InputError: an unknown mode, an axis that there is not, or not in this mode, one
            without a value, or a value that cannot be; names the axis.
    """

    def __init__(self, mode: Mode = "simulate", **axes: Any) -> None:
        if mode not in MODES:
            msg = f"mode: {mode!r} is not known; there are: {', '.join(MODES)}"
            raise InputError(msg)
        known = axes_of(mode)
        for name in axes:
            if name not in known:
                raise InputError(_unknown(name, mode, known))
        self.mode = mode
        self.axes = {name: _values(name, axes[name]) for name in known if name in axes}
        if axes.keys() >= {"blocks", "memory"}:
            msg = "blocks and memory both say how large the pool is: give one of them"
            raise InputError(msg)
        if mode == "compare" and not axes.keys() & {"blocks", "memory"}:
            msg = "blocks: a sweep in mode 'compare' needs pools: give blocks, or memory"
            raise InputError(msg)

    def __iter__(self) -> Iterator[Cell]:
        """Yield the cells, the last axis changing fastest."""
        for values in product(*self.axes.values()):
            yield Cell(mode=self.mode, **dict(zip(self.axes, values, strict=True)))

    @property
    def varied(self) -> list[str]:
        """The axes with more than one value, in the order of the fields."""
        return [name for name, values in self.axes.items() if len(values) > 1]


def axes_of(mode: Mode) -> list[str]:
    """Return the names of the axes that there are in `mode`, in order."""
    return [name for name in AXES if name not in NOT_IN[mode]]


def _values(name: str, given: Any) -> tuple[Any, ...]:
    """Return the values of an axis as a cell has them, each once."""
    values: list[Any] = []
    for value in given if isinstance(given, (list, tuple, range)) else [given]:
        try:
            read = getattr(Cell(**{name: value}), name)  # type: ignore[arg-type]
        except InputError as error:
            msg = f"{name}: {error}"
            raise InputError(msg) from error
        if read not in values:
            values.append(read)
    if not values:
        msg = f"{name}: the list is empty; give a value, or leave it out"
        raise InputError(msg)
    return tuple(values)


def _unknown(name: str, mode: Mode, known: list[str]) -> str:
    if name in AXES:
        return f"{name}: there is no such thing in mode {mode!r}. There are: {', '.join(known)}"
    return f"there is no axis {name!r}{nearest(name, known)}. There are: {', '.join(known)}"
