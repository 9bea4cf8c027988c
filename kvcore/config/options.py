"""`RunOptions`: every option of a run, declared once for Python, commands, TOML and sweeps.

And the functions that read the values of options, from text, tables or objects.
"""

# ruff: noqa: RUF009 - `_option` makes fields

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, Union, get_args, get_origin

import attrs

from kvcore.config.like import LIKENESSES
from kvcore.errors import InputError
from kvcore.models.codec import BYTES_PER_NUMBER
from kvcore.models.spec import DeviceSpec, ModelSpec, WeightDtype
from kvcore.plugins import Plugin
from kvcore.plugins.manager import check_name
from kvcore.plugins.options import Spec, as_text, nearest, parse
from kvcore.request import SLO
from kvcore.serving import Batching
from kvcore.trace.fields import EXPECTATIONS
from kvcore.units import (
    NS_PER_S,
    check_whole,
    parse_bytes,
    parse_seconds,
    parse_whole,
    parse_window,
)
from kvcore.workloads import Workload, given_workload
from kvcore.workloads.selection import BUNDLED

EMPTY_PATH = "empty path; name a file"


def convert(value: object, kind: Any) -> Any:
    """Return `value` as a value of the type `kind`.

    Types are those of `READERS`, `Literal`, lists of one of these, one of these or None, and
    `Annotated` with the function that reads a value.

    Raises:
        InputError: `value` cannot be read as that type; says what was expected.
    """
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        kind, _ = get_args(kind)
        return None if value is None else convert(value, kind)
    if origin is Literal:
        return _choice(value, get_args(kind))
    if origin is list:
        (each,) = get_args(kind)
        if not isinstance(value, (list, tuple)):
            return refuse("a list", value)
        return [convert(entry, each) for entry in value]
    if origin is Annotated:
        _, read = get_args(kind)
        return read(value)
    return READERS[kind](value)


def read_plugin(text: str) -> Spec:
    """Read one plugin with its options, such as `lfu:half_life=300`.

    Raises:
        InputError: `text` names no plugin, or several.
    """
    specs = parse(text)
    if len(specs) != 1:
        msg = f"{text!r} names {len(specs)} plugins where one is needed"
        raise InputError(msg)
    return specs[0]


def read_slo(text: str) -> SLO:
    """Read an SLO such as `ttft=30,tpot=0.1`, in seconds; `none` expects nothing.

    Raises:
        InputError: an unknown name, or a time that is not above 0.
    """
    if text == "none":
        return SLO()
    if "=" not in text.partition(",")[0]:
        msg = f"{text!r} is no SLO; write one such as ttft=30,tpot=0.1, or none"
        raise InputError(msg)
    return _slo_of(read_plugin(f"slo:{text}").options)


def slo_text(slo: SLO) -> str:
    """Return an SLO as `read_slo` reads it, such as `ttft=30,tpot=0.1`."""
    times = ((name, getattr(slo, f"{name}_ns")) for name in EXPECTATIONS)
    return ",".join(f"{name}={ns / NS_PER_S:g}" for name, ns in times if ns) or "none"


def tiers_text(tiers: Iterable[object]) -> str:
    """Return tiers as an option reads them, or `none`."""
    return ",".join(map(str, tiers)) or "none"


def shown(value: object) -> str:
    """Return a value for an error message: text in quotes, true and false as TOML has them."""
    return repr(value) if isinstance(value, str) else f"{as_text(value):.60}"


def refuse(expected: str, value: object) -> NoReturn:
    """Raise InputError for a value of another type than the `expected` one."""
    kinds: dict[type, str] = {dict: "a table", list: "a list", tuple: "a list"}
    msg = f"expected {expected}, not {kinds.get(type(value)) or shown(value)}"
    raise InputError(msg)


def as_whole(value: object) -> int:
    """Return a whole number, which text may have with a unit."""
    if isinstance(value, str):
        return parse_whole(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return check_whole(int(value))  # NumPy's too
    return refuse("a whole number", value)


def as_natural(value: object) -> int:
    """Return a whole number of 0 or more."""
    return check_whole(as_whole(value), 0)


def as_bytes(value: object) -> int:
    """Return a number of bytes; text has a unit, such as `40GiB`."""
    if isinstance(value, str):
        return parse_bytes(value)
    if isinstance(value, Integral):
        return as_whole(value)
    return refuse("a number of bytes, such as '40GiB'", value)


LEAST_WINDOW = 1_000_000
"""Nanoseconds below which the times of a window are taken for seconds, by mistake."""


def as_window(value: object) -> Any:
    """Return a window of time in ns; text has seconds, such as `60:120`."""
    if isinstance(value, str):
        return parse_window(value)
    if not isinstance(value, tuple):
        return refuse("a window of time in seconds, such as '60:120'", value)
    match value:
        case (int(start), None) if start >= 0:
            limit = start or None
        case (int(start), int(end)) if 0 <= start < end:
            limit = end
        case _:
            msg = (
                "expected a window of time in ns, such as (0, 10**9) or (10**9, None), "
                f"not {value!r:.60}"
            )
            raise InputError(msg)
    if limit is not None and limit < LEAST_WINDOW:
        seconds = ":".join("" if time is None else str(time) for time in value)
        msg = f"{value!r} has nanoseconds; for seconds give the text {seconds!r}"
        raise InputError(msg)
    return value


def as_slo(value: object) -> SLO:
    """Return an SLO; text and tables have seconds, and None expects nothing."""
    if value is None:
        return SLO()
    if isinstance(value, SLO):
        return value
    if isinstance(value, str):
        return read_slo(value)
    if isinstance(value, Mapping):
        return _slo_of({str(name): as_text(time) for name, time in value.items()})
    return refuse("an SLO such as ttft=30,tpot=0.1, or none", value)


def as_plugin(value: object) -> Any:
    """Return a plugin: what text or a table names, an instance, or what builds one."""
    if isinstance(value, str):
        return read_plugin(value)
    if isinstance(value, Mapping):
        return _table(value)
    if isinstance(value, Spec | Plugin) or callable(value):
        return value
    msg = f"{shown(value)} is no plugin: give its name, with options as in 'lfu:unit=s'"
    raise InputError(msg)


def as_tiers(value: object) -> tuple[Any, ...]:
    """Return tiers, nearest first; None and the text `none` are no tier."""
    if value is None or value == "none":
        return ()
    if isinstance(value, str):
        return tuple(parse(value))
    if isinstance(value, tuple | list):
        return tuple(tier for each in value for tier in as_tiers(each))
    return (as_plugin(value),)


def as_failures(value: object) -> tuple[str, ...]:
    """Return the texts of failures, or of the only one; None is no failure."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(map(_text, value))
    return refuse("failures such as 'replica=3,at=600,for=120'", value)


def as_workload(value: object) -> Any:
    """Return a workload: an instance or requests, text, a path, or the plugin of a table."""
    if isinstance(value, Mapping):
        return _table(value)
    if isinstance(value, str | Path | Spec):
        return value
    if isinstance(value, PathLike):
        return Path(fspath(value))
    if (workload := given_workload(value)) is not None:
        check_name(workload)
        return workload
    return refuse("a workload: a plugin's name with options, a file, or requests", value)


def as_model(value: object) -> ModelSpec | str:
    """Return a model, or the text that names it."""
    return value if isinstance(value, ModelSpec) else _text(value)


def as_device(value: object) -> DeviceSpec | str:
    """Return a GPU, or the text that names it."""
    return value if isinstance(value, DeviceSpec) else _text(value)


def _choice(value: object, choices: tuple[object, ...]) -> Any:
    if value in choices:
        return value
    msg = f"{shown(value)} is not one of {', '.join(map(shown, choices))}"
    raise InputError(msg)


def _number(value: object) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        # An integer stays one: it is written to traces as it was given. NumPy's cannot be.
        return value if isinstance(value, int | float) else float(value)
    return refuse("a number", value)


def _flag(value: object) -> bool:
    return value if isinstance(value, bool) else refuse("true or false", value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else refuse("text", value)


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not _text(value):
        raise InputError(EMPTY_PATH)
    return Path(_text(value))


READERS: Mapping[Any, Callable[[object], Any]] = {
    Any: lambda value: value,
    int: as_whole,
    float: _number,
    bool: _flag,
    str: _text,
    Path: _path,
}
"""The function that reads a value of each plain type."""


def _slo_of(seconds: Mapping[str, str]) -> SLO:
    expected = {}
    for name, text in seconds.items():
        if name not in EXPECTATIONS:
            known = ", ".join(EXPECTATIONS)
            msg = f"an SLO has no {name!r}{nearest(name, EXPECTATIONS)}; it may have {known}"
            raise InputError(msg)
        expected[f"{name}_ns"] = parse_seconds(text)
        if not expected[f"{name}_ns"]:
            msg = f"{name}={text}: expected a time above 0 seconds"
            raise InputError(msg)
    return SLO(**expected)


def _table(table: Mapping[str, Any]) -> Spec:
    """Read a plugin from a table of its name and its options."""
    options = {str(name): _text_of(value) for name, value in table.items()}
    if "name" not in options:
        msg = "the table needs a name, such as name = 'lru'"
        raise InputError(msg)
    return Spec(options.pop("name"), options)


def _text_of(value: object) -> str:
    """Return the value of an option of a plugin as text, which the plugin's type reads."""
    if isinstance(value, str | bool | int | float):
        return as_text(value)
    return refuse("text, a number, true or false", value)


PluginChoice: TypeAlias = Annotated[str | Spec | Plugin | Callable[[], Any], as_plugin]
"""A plugin: its name with options, an instance, or a class or function that builds one."""

WorkloadChoice: TypeAlias = Annotated[str | Path | Spec | Workload, as_workload]
"""A workload: a plugin's name with options, the path of a file, an instance, or requests."""

ModelChoice: TypeAlias = Annotated[str | ModelSpec, as_model]
"""A model: a name of the catalogue, the path of a config.json, or its numbers."""

DeviceChoice: TypeAlias = Annotated[str | DeviceSpec, as_device]
"""A GPU: a name of the catalogue, or its numbers."""

ByteSize: TypeAlias = Annotated[int | str, as_bytes]
"""A number of bytes; as text with a unit, such as `40GiB`."""

SLOChoice: TypeAlias = Annotated[SLO | str | Mapping[str, float], as_slo]
"""What clients expect: an SLO in ns, a text such as `ttft=30,tpot=0.1`, a table of seconds."""

Natural: TypeAlias = Annotated[int, as_natural]
"""A whole number of 0 or more."""

FailureChoices: TypeAlias = Annotated[Sequence[str] | str, as_failures]
"""Failures of replicas: texts such as `replica=3,at=600,for=120`, in seconds."""

TierChoices: TypeAlias = Annotated[PluginChoice | Sequence[PluginChoice] | None, as_tiers]
"""Tiers, nearest first: a text may name several, as `host:memory=64GiB,disk:memory=1TiB`;
`none` or None: none."""

WindowChoice: TypeAlias = Annotated[tuple[int, int | None] | str, as_window]
"""A window of time in ns, the end left out (None: open); as text in seconds, `60:120`."""


Mode: TypeAlias = Literal["simulate", "compare", "run"]
"""The mode of a configuration, which has its own options and defaults."""

MODES: tuple[Mode, ...] = ("simulate", "compare", "run")
"""The modes of a configuration."""

EXPECTED = SLO(ttft_ns=30 * NS_PER_S, tpot_ns=NS_PER_S // 10)
"""The SLO of the authors of the bundled trace for their system: Qin et al., "Mooncake: a
KVCache-centric disaggregated architecture for LLM serving", 2024, on real workloads."""

CAPS = Batching()

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "simulate": {},
    "compare": {"tensor_parallel": 1},
    "run": {"model": None, "tensor_parallel": 1, "codec": None},
}
"""Defaults by mode, where they differ from those of the fields."""

RULES = (
    *("unchunked", "max_chunk", "reserve", "commit", "generated", "admit_after_preemption"),
    *("ties", "lag", "null_block", "max_model_len", "new_token_ratio", "preempts"),
)
"""Options by which engines differ: the fields of `Batching` that do not limit a step."""

OF_REPLICAS = (
    *("model", "device", "tensor_parallel", "codec", "weights_dtype", "blocks", "memory"),
    *("eviction", "prefix", "retention", "tier", "latency", "scheduler", "drafter"),
    *("max_tokens", "max_seqs", "steps", "chunked", "watermark", *RULES),
)
"""Options that servers of a cluster may have of their own."""

NONE_IS_TEXT = ("retention", "drafter", "autoscale", "disaggregate", "like")
"""Options that the text `none` leaves out, as None does."""

RENAMED: Mapping[str, str] = {"count": "accounting", "kv_dtype": "codec"}
"""Options of earlier releases, and their present names."""


def as_replicas(value: object) -> Any:
    """Return the number of servers, or the options of each group of identical ones."""
    if isinstance(value, Integral | str):
        return check_whole(as_whole(value), 1)
    if isinstance(value, Mapping):
        value = (value,)
    if not isinstance(value, list | tuple) or not value:
        return refuse("a number of servers, or a list of tables of their options", value)
    return tuple(_replica(table) for table in value)


def _replica(table: object) -> Mapping[str, Any]:
    """Parse the options of a group of identical replicas."""
    if not isinstance(table, Mapping):
        return refuse("a table of options", table)
    given = {str(name).replace("-", "_"): value for name, value in table.items()}
    check_names(given, ["count", *OF_REPLICAS])
    own = {name: read_option(name, value) for name, value in given.items() if name != "count"}
    count = check_whole(as_whole(given.get("count", 1)), 1)
    return {"count": count, **own}


ReplicaChoices: TypeAlias = Annotated[int | Sequence[Mapping[str, Any]], as_replicas]
"""Servers of a cluster: how many, or tables of their options, with a `count` each."""


def _option(default: Any, text: str, *choices: str) -> Any:
    """Return a field with its default, its help text and the values it may have."""
    return attrs.field(default=default, metadata={"help": text, "choices": choices})


def _reading(_: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Return the fields with converters, so that every value that is stored is checked."""
    return [field.evolve(converter=_reader(field.name)) for field in fields]


def _reader(name: str) -> Callable[[Any], Any]:
    return lambda value: read_option(name, value)


@attrs.frozen(kw_only=True, field_transformer=_reading)
class RunOptions:
    """The options of a run. Nothing is opened or built from them yet.

    The fields are the options of `kvcore simulate`, `compare` and `run`, the keys of
    configuration files and the axes of sweeps. Values are converted when they are stored:
    text such as `40GiB`, `ttft=30,tpot=0.1` or `lfu:half_life=300` is read. Plugins are
    names with options, instances, classes, or functions that build one.

    Attributes:
        mode: `simulate`: served in the time of a latency model; `compare`: replayed serially
            and untimed; `run`: computed on tensors.
        workload: where the requests come from; a plugin or the path of a file.
        model, device, tensor_parallel, codec: the model that is served, the GPUs and their
            number, and the codec of K/V. They size the pool, price a block, and time steps. In
            mode `run` a `model` of None is the generator's own, and a `codec` of None keeps
            numbers as they are computed.
        weights_dtype: the number format of the weights, which take memory beside the pool and
            are read in each step; None: as released. Not in mode `run`.
        accounting: how blocks are counted, `keys` or `tokens`; None: `tokens` under a clock,
            `keys` without one. A run under a clock knows `tokens` alone.
        block_size: tokens in a block; None: 16 under a clock, else as many as in a key.
        blocks, memory: size of the pool, in blocks, or in bytes of K/V; None: all that fits
            beside the weights, and in mode `run` 256 MiB.
        eviction, prefix, retention, scheduler, latency, generator, backend: plugins.
            `retention` None: running sequences keep all their blocks.
        drafter: the plugin that drafts tokens, which a step verifies; None: a step gives one
            token a sequence.
        tier: plugins of the tiers below the pool, nearest first, in a tuple; empty: no tier.
            As text with a comma between two: `host:memory=64GiB,disk:memory=1TiB`.
        like: the engine whose rules are the defaults, `vllm` or `sglang`; None: kvcore's. It
            has an effect where a configuration is made by `RunConfig.of`.
        max_tokens, max_seqs, steps, chunked, watermark, unchunked, max_chunk, reserve,
            commit, generated, admit_after_preemption, ties, lag, max_model_len,
            new_token_ratio, preempts: as in `Batching`.
        null_block: whether a block of the pool is never used; `blocks` and `memory` include
            it.
        allocation: `paged`, or `contiguous` as before paging.
        rate_scale: factor on the rate at which open-loop requests arrive.
        slo: SLO of requests that have none of their own; `SLO()`: no expectation.
        replicas: number of servers that share the requests; or tables, each with the options
            of some servers and their `count`.
        router, view: the plugin that picks the server of a request, and its view of their
            caches: `index`, `events` or `exact`, with options.
        autoscale: a planner that starts and stops servers, `throughput` or `load`, with
            options; None: all are up.
        disaggregate: numbers of servers that prefill and that decode, as text such as
            `prefill=4,decode=2,bandwidth=50GB/s`; None: each server does both.
        fail: servers that fail, as texts such as `replica=3,at=600,for=120`.
        seed: of plugins with an option `seed` that is not set; None: their own default.
        dtype: in which a run on tensors computes K/V, and keeps it without a codec.
        clock: by which a run on tensors is timed: `model` or `wall`.
        limit, window: the part of the workload that is taken: the number of first requests
            (0: all; None: all, in mode `run` 20) of those that arrive from the start of the
            window on and before its end.
        shrink: divisor of all lengths in mode `run`; None: the one that makes a key a block.
        stop_at_eos: whether a text may end before its output is complete.
        threads: number of threads of the host in a run on tensors; None: 1 for a tiny model,
            otherwise one for each CPU.

    Raises:
        InputError: a value that an option cannot have; begins with the option's name.
    """

    mode: Mode = _option("simulate", "How requests are served.")
    workload: WorkloadChoice = _option(
        BUNDLED, "Workload: a plugin with its options, or the path of a file."
    )
    model: ModelChoice | None = _option(
        "llama-3-8b",
        "Model that is served: a name that `kvcore size --help` lists, or a config.json.",
    )
    device: DeviceChoice = _option(
        "h100", "GPU that the model is served on; `kvcore size --help` lists all."
    )
    tensor_parallel: int = _option(4, "Number of GPUs that share the model.")
    codec: PluginChoice | None = _option(
        Spec("fp16"), "Codec: how K/V is kept, such as fp16, int8 or kivi:bits=2."
    )
    weights_dtype: WeightDtype | None = _option(
        None, "Number format of the weights, if not as released."
    )
    accounting: Literal["keys", "tokens"] | None = _option(
        None, "Count blocks by whole keys of the workload, or by tokens."
    )
    block_size: int | None = _option(None, "Number of tokens in a KV block.")
    blocks: int | None = _option(None, "Number of KV blocks in the pool.")
    memory: ByteSize | None = _option(
        None, "Bytes of K/V in the pool, such as 40GiB, in place of a number of blocks."
    )
    prefix: PluginChoice = _option(
        Spec("radix"), "Prefix cache: which cached blocks a prompt can reuse."
    )
    retention: PluginChoice | None = _option(
        None, "Retention policy: which tokens a running sequence keeps."
    )
    tier: TierChoices = _option(
        (),
        "Tier below the pool, such as host:memory=64GiB; several are given nearest first.",
    )
    latency: PluginChoice = _option(
        Spec("roofline"), "Latency model: how many seconds a step takes."
    )
    drafter: PluginChoice | None = _option(
        None,
        "Drafter: which tokens the model verifies in one step of speculative decoding.",
    )
    max_tokens: int = _option(CAPS.max_tokens, "Largest number of tokens in a step.")
    max_seqs: int = _option(CAPS.max_seqs, "Largest number of sequences in a step.")
    steps: Literal["mixed", "prefill-first"] = _option(
        CAPS.steps,
        "Steps that prefill and decode together (mixed), or steps that decode only when no "
        "prompt is left to prefill (prefill-first).",
    )
    chunked: bool = _option(CAPS.chunked, "Prefill a long prompt over several steps.")
    watermark: float = _option(
        CAPS.watermark, "Share of the blocks that an admission leaves for running sequences."
    )
    like: str | None = _option(
        None,
        f"Engine whose rules are the defaults of all other options: {', '.join(LIKENESSES)}; "
        "`kvcore simulate --like ENGINE --show` prints them.",
    )
    unchunked: Literal["alone", "wait"] = _option(
        CAPS.unchunked,
        "Treatment of a prompt that is not chunked and too long for the rest of a step: it is "
        "the only prefill of a step, or waits for a step with room for it.",
    )
    max_chunk: int | None = _option(
        None,
        "Largest number of prompt tokens of one sequence in a step that others share.",
    )
    reserve: Literal["prompt", "chunk", "first-chunk"] = _option(
        CAPS.reserve,
        "Blocks that an admission takes: of the whole prompt; of its first chunk, while the "
        "whole has to be free; or of its first chunk alone.",
    )
    commit: Literal["computed", "scheduled"] = _option(
        CAPS.commit,
        "Moment from which a block can be hit: when it is computed, or when it is scheduled.",
    )
    generated: Literal["keyed", "cached"] = _option(
        CAPS.generated,
        "Generated blocks that stay cached: those with a key in the workload, or all.",
    )
    admit_after_preemption: bool = _option(
        CAPS.admit_after_preemption, "Admit requests in a step that has preempted others."
    )
    ties: Literal["last", "first"] = _option(
        CAPS.ties,
        "Sequence to preempt where several are last in the scheduler's order: of those with "
        "equal priority the one admitted last, or of those with equal priority and arrival the "
        "one admitted first.",
    )
    lag: int = _option(
        CAPS.lag,
        "Number of steps by which the results that a plan knows are late: 1 under asynchronous "
        "scheduling, where a step is planned while the one before it runs.",
    )
    null_block: bool = _option(
        CAPS.null_block,
        "Leave one block of the pool unused, as vLLM does, and round the watermark down.",
    )
    max_model_len: int | None = _option(
        None,
        "Largest number of tokens of a sequence: a longer prompt is rejected, and the output "
        "ends there.",
    )
    new_token_ratio: float | None = _option(
        None,
        "Share of the tokens that running sequences have still to generate for which an "
        "admission leaves room, at first; it falls as they decode.",
    )
    preempts: Literal["last", "shortest"] = _option(
        CAPS.preempts,
        "Sequence to preempt when decoding finds no block: the last in the scheduler's order, "
        "or of those that decode the one with the fewest generated tokens.",
    )
    rate_scale: float = _option(1.0, "Factor on the rate at which recorded requests arrive.")
    slo: SLOChoice = _option(
        EXPECTED,
        "Expected latency in seconds, by ttft, tpot and deadline; `none` expects nothing.",
    )
    replicas: ReplicaChoices = _option(1, "Number of servers that share the requests.")
    router: PluginChoice = _option(
        Spec("round-robin"), "Router: which of several servers gets a request."
    )
    view: str = _option(
        "index",
        "Source of the router's knowledge of caches: its own index of the prompts that it sent "
        "to each server (index), the KV events of the servers (events:delay=50ms), or their "
        "exact contents (exact).",
    )
    fail: FailureChoices = _option(
        (), "Server that fails, such as replica=3,at=600,for=120, in seconds."
    )
    autoscale: str | None = _option(
        None,
        "Planner that starts and stops servers, such as throughput:interval=60,least=2, or "
        "load; --replicas is the largest number of servers.",
    )
    disaggregate: str | None = _option(
        None,
        "Servers that prefill, and others that decode, such as prefill=4,decode=2; "
        "bandwidth=50GB/s, latency=10us and overlap=layers may follow, after commas.",
    )
    seed: int | None = _option(0, "Seed of plugins that draw random numbers.")
    scheduler: PluginChoice = _option(
        Spec("fcfs"), "Scheduler: which requests run in the next step."
    )
    eviction: PluginChoice = _option(
        Spec("lru"), "Eviction policy: which cached blocks leave a full pool."
    )
    allocation: Literal["paged", "contiguous"] = _option(
        "paged",
        "Memory of a request's K/V: blocks as they are needed (paged), or one piece for the "
        "longest output, reported beside a paged run (contiguous).",
    )
    generator: PluginChoice = _option(
        Spec("transformer"), "Generator: the model that computes K/V and next tokens."
    )
    backend: PluginChoice = _option(
        Spec("torch-cpu"), "Backend: the device memory that holds K/V as tensors."
    )
    dtype: str = _option(
        "fp32", "Number format in which the model computes.", *BYTES_PER_NUMBER
    )
    clock: Literal["model", "wall"] = _option(
        "model", "Time a step by the latency model, or by the wall clock."
    )
    limit: Natural | None = _option(
        None, "Largest number of requests to take, the first ones; 0 takes all."
    )
    window: WindowChoice | None = _option(
        None,
        "Seconds of the workload to take, START:END: from START on and before END; either "
        "may be left out.",
    )
    shrink: int | None = _option(None, "Divisor of all lengths of the workload.")
    stop_at_eos: bool = _option(
        default=False, text="End a text at its end-of-sequence token; wall clock only."
    )
    threads: int | None = _option(
        None,
        "Number of threads that compute.  [default: 1 for a tiny model, else one a CPU]",
    )


def option_names() -> list[str]:
    """Return the names of all options, in the order of the fields."""
    return list(_fields())


def option_type(name: str) -> Any:
    """Return the type of an option."""
    return _fields()[name].type


def option_help(name: str) -> str:
    """Return the help text of an option."""
    return str(_fields()[name].metadata["help"])


def option_choices(name: str) -> tuple[str, ...]:
    """Return the values that an option may have if they are few; otherwise nothing."""
    choices: tuple[str, ...] = _fields()[name].metadata["choices"]
    return choices


def option_default(name: str, mode: Mode = "simulate") -> Any:
    """Return the default of an option in a mode."""
    return DEFAULTS[mode].get(name, _fields()[name].default)


def is_plain(name: str, value: Any) -> bool:
    """Return True if a rule of engines is as in kvcore, so that no report need name it."""
    return name in RULES and value == option_default(name)


def read_option(name: str, value: Any) -> Any:
    """Return a value as the option `name` has it.

    Raises:
        InputError: a value that the option cannot have; begins with the option's name.
    """
    if name in NONE_IS_TEXT and value in ("none", Spec("none")):
        return None
    if name == "like" and value is not None and value not in tuple(LIKENESSES):
        msg = f"like: {shown(value)} is no engine; there are: {', '.join(LIKENESSES)}"
        raise InputError(msg)
    choices = option_choices(name)
    try:
        return convert(value, Literal[choices] if choices else option_type(name))
    except InputError as error:
        msg = f"{name}: {error}"
        raise InputError(msg) from error


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their present names, with a FutureWarning for each earlier one.

    Raises:
        InputError: an option is given under both names.
    """
    for old in options.keys() & RENAMED.keys():
        new = RENAMED[old]
        if new in options:
            msg = f"{old!r} is the earlier name of {new!r}: give one of them"
            raise InputError(msg)
        warnings.warn(
            f"option {old!r} is called {new!r} now; use that", FutureWarning, stacklevel=4
        )
    return {RENAMED.get(name, name): value for name, value in options.items()}


def check_names(given: Mapping[str, Any], known: list[str]) -> None:
    """Refuse a name that is not one of `known`.

    Raises:
        InputError: names the nearest one, and all that there are.
    """
    for name in given:
        if name not in known:
            names = ", ".join(sorted(known))
            msg = f"there is no option {name!r}{nearest(name, known)}. There are: {names}"
            raise InputError(msg)


def replicas_text(replicas: int | Sequence[Mapping[str, Any]]) -> int | str:
    """Return replicas as a table has them: `8`, or `2 x device=h200 + 6 x max_seqs=64`."""
    if isinstance(replicas, int):
        return replicas
    groups = (
        (table["count"], ",".join(f"{k}={_shown(v)}" for k, v in table.items() if k != "count"))
        for table in replicas
    )
    return " + ".join(f"{count} x {own}" if own else str(count) for count, own in groups)


def _shown(value: object) -> str:
    return tiers_text(value) if isinstance(value, tuple) else as_text(value)


@cache
def _fields() -> Mapping[str, attrs.Attribute[Any]]:
    return attrs.fields_dict(attrs.resolve_types(RunOptions, globals()))
