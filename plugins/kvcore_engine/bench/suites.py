"""The suites of benchmarks, by name, and a run of some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic

import attrs

from kvcore.errors import InputError, PluginError
from kvcore.lazy import import_extra
from kvcore.models.codec import TENSOR_DTYPES
from kvcore.plugins import Plugins
from kvcore_engine.bench.machine import describe_machine
from kvcore_engine.bench.result import BenchResult, Settings, Tell

CPU, CUDA = "torch-cpu", "torch-cuda"


@attrs.frozen
class Suite:
    """A part of the benchmark.

    Attributes:
        about: description in a line.
        operations: names that `Settings.only` may have.
        backend: default backend; None: the suite has no tensors.
    """

    about: str
    operations: Sequence[str]
    backend: str | None = None


TENSOR_OPERATIONS = ("decode", "chunk", "store", "store+rope", "copy", "move", "swap")

SUITES: Mapping[str, Suite] = {
    "cpu": Suite("paged K/V in the memory of the host", TENSOR_OPERATIONS, CPU),
    "gpu": Suite("paged K/V in the memory of a GPU", TENSOR_OPERATIONS, CUDA),
    "cache": Suite("the cache's decisions, against a plain loop", ("lru",)),
    "sim": Suite("the simulator, against Dynamo's where it is installed", ("simulate",)),
}
"""The suites by name, in the order in which they run."""


def available_suites(plugins: Plugins | None = None) -> list[str]:
    """Return the suites that can run here: without torch, or without a GPU, fewer."""
    known_plugins = plugins or Plugins()
    return [
        name
        for name, suite in SUITES.items()
        if suite.backend is None or not _unavailable(suite.backend, known_plugins)
    ]


def run_suites(
    names: Sequence[str],
    settings: Settings,
    *,
    plugins: Plugins | None = None,
    tell: Tell | None = None,
) -> BenchResult:
    """Run suites, one after the other; call `tell` with each row when it is measured.

    Suites that have none of the operations that are wanted are left out.

    A case that cannot be measured here is a row with the reason. Shares of ceilings are known
    at the end, after the ceilings have been measured again.

    Raises:
        InputError: no such suite, operation or dtype, or a backend that cannot be built.
        PluginError: a suite cannot run here at all: there is no torch, or no GPU.
    """
    plugins, tell = plugins or Plugins(), tell or (lambda _row: None)
    _check(names, settings)
    names = [name for name in names if any(map(settings.wants, SUITES[name].operations))]
    begun, rows, all_ceilings = monotonic(), [], []
    specs = {
        name: settings.backend or SUITES[name].backend
        for name in names
        if SUITES[name].backend is not None
    }
    for name, spec in specs.items():
        _require(name, str(spec), plugins)
    machine = describe_machine(gpu=False)
    for name in names:
        spec = specs.get(name)
        if spec is not None:
            from kvcore_engine.bench.tensors import run_tensor_suite  # noqa: PLC0415 - torch

            measured, ceilings, machine_facts = run_tensor_suite(
                name, spec, settings, plugins, tell
            )
            rows += measured
            all_ceilings += ceilings
            machine |= machine_facts
            continue
        from kvcore_engine.bench.caches import of_cache, of_sim  # noqa: PLC0415 - reads a trace

        for row in {"cache": of_cache, "sim": of_sim}[name](settings):
            rows.append(row)
            tell(row)
    return BenchResult(
        machine=machine,
        settings=settings,
        ceilings=all_ceilings,
        rows=rows,
        seconds=monotonic() - begun,
    )


def _check(names: Sequence[str], settings: Settings) -> None:
    """Raise InputError for an unknown suite, operation or dtype."""
    for name in names:
        if name not in SUITES:
            msg = f"bench: no suite {name!r}; there are: {', '.join(SUITES)}"
            raise InputError(msg)
    known = [operation for name in names for operation in SUITES[name].operations]
    for what, asked, there in (
        ("operation", settings.only, known),
        ("dtype", settings.dtypes, TENSOR_DTYPES),
    ):
        for wanted in asked:
            if wanted not in there:
                listed = ", ".join(dict.fromkeys(there))
                msg = f"bench {' '.join(names)}: no {what} {wanted!r}; there are: {listed}"
                raise InputError(msg)


def _unavailable(spec: str, plugins: Plugins) -> str | None:
    """Return why a backend cannot be built here; None if it can."""
    reason: str | None = plugins.get("backend", spec.partition(":")[0]).unavailable()
    return reason


def _require(name: str, spec: str, plugins: Plugins) -> None:
    """Raise PluginError, with the way out, unless a suite can run here."""
    import_extra("torch", f"bench {name} needs torch", "torch")
    if spec.partition(":")[0] == CUDA and (why := _unavailable(CUDA, plugins)):
        msg = (
            f"bench {name} needs a GPU: {why}. On a machine with one, run `kvcore bench gpu` "
            "or `python -m kvcore.testing.gpu`; here, `kvcore bench cpu`"
        )
        raise PluginError(msg)
