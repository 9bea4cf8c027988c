"""Build the parts of a run on tensors: generator, backend, prompts, and the pool in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from kvcore.cache import Recorder
from kvcore.config.parts import BLOCK_SIZE, RunParts
from kvcore.config.run_config import RunConfig
from kvcore.engine import Backend, Generator
from kvcore.errors import InputError
from kvcore.models.catalogue import load_model
from kvcore.models.codec import Codec
from kvcore.models.spec import ModelSpec
from kvcore.plugins import Plugin, Plugins
from kvcore.plugins.options import Spec, takes_path
from kvcore.request import TextRequest, text_request
from kvcore.workloads import PromptWorkload, Workload, WorkloadSample
from kvcore_engine.engine import run as run_engine
from kvcore_engine.engine import within_model
from kvcore_engine.executor import tensor_layout

if TYPE_CHECKING:
    from kvcore_plugins.cache_groups import GroupPlan

LIMIT, MAX_OUTPUT = 20, 16
"""Number of requests of a workload, and of tokens for a text, by default."""

OF_WORKLOADS = ("limit", "window", "shrink")
"""Options of workloads alone."""

MEMORY = 256 << 20
"""Bytes of the pool by default."""


class EngineParts(RunParts):
    """The parts of a run on tensors.

    Args:
        config: the configuration, in mode `run`.
        plugins, naming: as for `RunParts`.
        prompts: texts to continue, in place of a workload.
        max_output: tokens to generate for each text; None: 16.

    Attributes:
        generator, backend: the model and the memory of one run.
        texts: the requests of the prompts; empty without prompts.
    """

    ids = True
    simulate: Any = staticmethod(run_engine)

    def __init__(
        self,
        config: RunConfig,
        plugins: Plugins | None = None,
        *,
        prompts: Sequence[str] = (),
        max_output: int | None = None,
        naming: Callable[[str], str] | None = None,
    ) -> None:
        self._prompts = prompts
        self._max_output = MAX_OUTPUT if max_output is None else max_output
        super().__init__(config, plugins, naming=naming)
        self.batching = within_model(self.batching, self.generator)

    def arguments(self, trace: Recorder | None = None) -> dict[str, Any]:
        """Build the keyword arguments of one run on tensors, all but its requests."""
        config = self.config
        return super().arguments(trace) | {
            "generator": self.generator,
            "backend": self.backend,
            "dtype": config.dtype,
            "codec": self._kept_in,
            "clock": config.clock,
            "stop_at_eos": config.stop_at_eos,
            "seed": config.seed or 0,
            "threads": config.threads,
        }

    def describe(self, *plugins: Plugin | None) -> dict[str, Any]:
        """Return the configuration as of a simulation, with generator and backend."""
        config = self.config
        timed = {"device": self.backend.name, "tensor_parallel": 1}
        return (
            super().describe(*plugins, self.generator, self.backend)
            | {"clock": config.clock, "stop_at_eos": config.stop_at_eos}
            | (timed if config.clock == "wall" else {})
        )

    @cached_property
    def layers(self) -> GroupPlan | None:
        """The cache groups of the model; None: one, as where each kind of layer has a pool."""
        plan = super().layers
        if plan is None:
            return None
        from kvcore_plugins.cache_groups import GroupPlan  # noqa: PLC0415 - most have none

        return plan if isinstance(plan, GroupPlan) else None

    @cached_property
    def codec(self) -> Codec:
        """The codec that a latency model times: fp32 for K/V in fp64, which has none."""
        if self.config.codec is not None:
            return super().codec
        dtype = "fp32" if self.config.dtype == "fp64" else self.config.dtype
        codec: Codec = self.plugins.build("codec", dtype)
        return codec

    @property
    def _kept_in(self) -> Codec | None:
        """The codec of the tensors; None: they are kept as they are computed."""
        return None if self.config.codec is None else self.codec

    def _codec_text(self) -> str:
        return self.config.dtype if self._kept_in is None else str(self.codec)

    def _served(self) -> ModelSpec:
        """Build the generator and the backend; return the spec of the generator."""
        with self._about("weights_dtype"):
            if self.config.weights_dtype is not None:
                msg = "a run on tensors has the weights of its generator: leave it out"
                raise InputError(msg)
        named: dict[str, Any] = {}
        model, choice = self.config.model, self.config.generator
        if model is not None and isinstance(choice, Spec) and "model" not in choice.options:
            cls = self.plugins.get("generator", choice.name)
            as_given = isinstance(model, ModelSpec) or takes_path(cls, "model")
            with self._about("model"):
                named["model"] = model if as_given else load_model(cast("str", model))
        self.generator: Generator = self.built("generator", **named)
        with self._about("model"):
            takes = "model" in self.generator.options()
            if model is not None and not (takes and named):
                why = "has its own" if takes else "takes none"
                msg = f"generator plugin {self.generator.name!r} {why}; leave it out"
                raise InputError(msg)
        self.backend: Backend = self.built("backend")
        with self._about("generator" if model is None else "model"):
            spec: ModelSpec = self.generator.spec
        return spec

    def _source(self) -> Workload:
        """Return the prompts, or the first requests of the workload, with lengths divided."""
        size = BLOCK_SIZE if self.config.block_size is None else self.config.block_size
        if type(size) is not int or size < 1:
            msg = f"block_size: {size!r} is not a whole number above 0"
            raise InputError(msg)
        self.texts: list[TextRequest] = [
            self._text(index, text, size) for index, text in enumerate(self._prompts)
        ]
        if self.texts:
            return PromptWorkload(self.texts, size)
        source = self._whole_source()
        limit, shrink = self.config.limit, self.config.shrink
        if shrink is None:
            ratio, rest = divmod(source.key_tokens, size)
            shrink = 1 if rest else ratio
        window = self.config.window
        return WorkloadSample(source, LIMIT if limit is None else limit or None, shrink, window)

    def _text(self, index: int, text: str, block_size: int) -> TextRequest:
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError) as error:
            why = "not UTF-8" if isinstance(text, str) else "no text"
            msg = f"prompt {text!r} is {why}: give a text"
            raise InputError(msg) from error
        tokens = self.generator.encode(text)
        if not tokens:
            msg = f"prompt {text!r} has no tokens: give a text"
            raise InputError(msg)
        return text_request(
            index, tokens, output=self._max_output, block_size=block_size, publish=True
        )

    def _blocks(self) -> int:
        """Return the number of blocks of the pool: the given one, or all that fit."""
        return super()._blocks() if self.sized else self.blocks_in(MEMORY)

    def _block_bytes(self) -> int:
        """Return the bytes of a block of tensors."""
        dtype, kept_in = self.config.dtype, self._kept_in
        if self.layers is not None:
            from kvcore_engine.groups import group_layout  # noqa: PLC0415 - as above

            return group_layout(self.model, self.layers.groups, 1, dtype, kept_in).bytes
        return tensor_layout(self.model, 1, self.geometry.block_size, dtype, kept_in).bytes

    def _staged_bytes(self) -> int:
        """Return the bytes of unfinished blocks, which are kept in the dtype of the run."""
        return self._sequences * self.deployment.layout.staged_bytes(self.config.dtype)
