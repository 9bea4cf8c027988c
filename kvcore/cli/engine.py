"""What `run` runs: the options and parts of `simulate`, and what computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import attrs

from kvcore.cli.model import find_or_read
from kvcore.cli.setup import Options, Setup
from kvcore.engine import Backend, Generator
from kvcore.engine.executor import Clock, tensor_layout
from kvcore.errors import InputError
from kvcore.models.spec import KV_DTYPES, ModelSpec
from kvcore.plugins import Plugin
from kvcore.plugins.options import Spec, takes_path
from kvcore.request import TextRequest, text_request
from kvcore.units import format_bytes
from kvcore.workloads import PromptWorkload, Workload, WorkloadSample

LIMIT, MAX_OUTPUT, MEMORY = 20, 16, 256 << 20
"""Requests of a workload, tokens for a text, and bytes of a pool, where nobody says more."""


@attrs.frozen(kw_only=True)
class RunOptions(Options):
    """The options of `kvcore run`, by the names of the command line."""

    model: str | None  # type: ignore[assignment]
    prompts: tuple[str, ...]
    generator: Spec
    backend: Spec
    dtype: str
    limit: int | None
    shrink: int | None
    max_output: int | None
    clock: Clock
    stop_at_eos: bool
    step_times: Path | None

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Return the options that a command line gives."""
        if given["blocks"] is None and given["memory"] is None:
            given = given | {"memory": MEMORY}
        # What roofline can time: fp64 is for references, and taken to be read as fp32.
        kv_dtype = given["dtype"] if given["dtype"] in KV_DTYPES else "fp32"
        return cls(**given, kv_dtype=kv_dtype, allocation="paged")


class Engine(Setup):
    """The parts of a run on tensors.

    Attributes:
        generator, backend: what computes, for one run.
        texts: the requests, where they are made from texts; else none.
    """

    options: RunOptions
    ids = True

    def cache_layout(self) -> dict[str, Any]:
        """Return what a block of the pool takes, in bytes, and in which numbers."""
        size = tensor_layout(self._model, 1, self.options.block_size, self.options.dtype).bytes
        return {"kv_dtype": self.options.dtype, "bytes_per_block": size}

    def config(self, *plugins: Plugin | None) -> dict[str, Any]:
        """Return what was run, as that of a simulation and more."""
        options = self.options
        timed = {"device": options.backend.name, "tensor_parallel": 1}
        return (
            super().config(*plugins, self.generator, self.backend)
            | self.cache_layout()
            | {"clock": options.clock, "stop_at_eos": options.stop_at_eos}
            | (timed if options.clock == "wall" else {})
        )

    def header(self) -> dict[str, Any]:
        """Return what a trace should know besides what the run tells it."""
        header = super().header()
        return header | {"model": header["model"] | {"kv_dtype": self.options.dtype}}

    def _served(self) -> ModelSpec:
        """Build what computes, and return the model that it is."""
        options = self.options
        named: dict[str, Any] = {}
        if options.model is not None:
            cls = self._plugins.get("generator", options.generator.name)
            is_path = takes_path(cls, "model")
            named["model"] = options.model if is_path else find_or_read(options.model)
        self.generator: Generator = self._built("generator", options.generator, **named)
        if options.model is not None and "model" not in self.generator.options():
            msg = f"--model: generator plugin {self.generator.name!r} takes none; leave it out"
            raise InputError(msg)
        self.backend: Backend = self._built("backend", options.backend)
        spec: ModelSpec = self.generator.spec
        return spec

    def _source(self) -> Workload:
        """Return the workload: requests from texts, or the first of those that were named."""
        self.texts: list[TextRequest] = [
            self._text(number, text) for number, text in enumerate(self.options.prompts)
        ]
        if self.texts:
            return PromptWorkload(self.texts, self.options.block_size)
        source = super()._source()
        limit, shrink = self.options.limit, self.options.shrink
        if shrink is None:
            ratio, rest = divmod(source.key_tokens, self.options.block_size)
            shrink = 1 if rest else ratio
        return WorkloadSample(source, LIMIT if limit is None else limit or None, shrink)

    def _text(self, number: int, text: str) -> TextRequest:
        tokens = self.generator.encode(text)
        if not tokens:
            msg = f"--prompt {text!r} has no tokens: give a text"
            raise InputError(msg)
        output = self.options.max_output
        return text_request(
            number,
            tokens,
            output=MAX_OUTPUT if output is None else output,
            block_size=self.options.block_size,
            publish=True,
        )

    def _blocks(self) -> int:
        """Return the blocks of the pool: as given, or what fits into memory."""
        blocks, memory = self.options.blocks, self.options.memory
        if blocks is not None:
            return blocks
        assert memory is not None
        size = self.cache_layout()["bytes_per_block"]
        if memory < size:
            msg = (
                f"--memory: {format_bytes(memory)} is less than a block of "
                f"{self.options.dtype}, which takes {format_bytes(size)}"
            )
            raise InputError(msg)
        fitting: int = memory // size
        return fitting
