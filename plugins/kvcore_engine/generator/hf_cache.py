"""A paged cache that Hugging Face models generate through: `with paged.attached(model):`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import attrs
from transformers import PreTrainedModel

from kvcore import Backend, InputError, KVCache
from kvcore.cache import BlockPool
from kvcore.plugins import resolve
from kvcore_engine.compaction import Compactor
from kvcore_engine.executor import tensor_layout
from kvcore_engine.generator._hf_model import (
    TextLength,
    body_of,
    cache_argument,
    dtype_of,
    layer_types,
    rotary_of,
    spec_of,
    switch_over,
)
from kvcore_engine.generator._hf_states import pass_through_blocks, state_layers
from kvcore_engine.generator.hf_batch import PagedBatch
from kvcore_engine.retention.token_retention import token_retention

if TYPE_CHECKING:
    from kvcore.models.spec import ModelSpec
    from kvcore_plugins.cache_groups import GroupedCache

_ATTACHED: WeakSet[PreTrainedModel] = WeakSet()
"""The models that attend through a paged cache now."""


def _backend(backend_or_name: Backend | type[Backend] | str) -> Backend:
    """Return the backend that is given, or that a class or a text stands for."""
    backend: Backend = resolve("backend", backend_or_name)
    return backend


@attrs.define(eq=False)
class PagedCache:
    """The K/V of one Hugging Face model in the blocks of a `KVCache`, on a backend.

    Inside `with paged.attached(model):` the model generates through these blocks, as it
    would with its own cache: `model.generate`, beams, assisted generation, calls of the
    model. The prefix that a prompt shares with an earlier one is not computed again, as
    long as the eviction policy keeps it.

    Attributes:
        cache: the cache, made with `ids=True`, and counting tokens; or a `GroupedCache` with
            the groups of the model, for greedy or sampled texts.
        backend: stores the K/V; allocated at the first `attached`. Given as an instance, a
            class or a text.
        max_model_len: the most tokens of a text. With more than the original length of a model
            with `longrope` embeddings its long factors hold for all texts, as in vLLM; None:
            that length where there is one, else any.

    Raises:
        InputError: the cache has no block ids, the backend is in use, the retention policy
            selects no single tokens, or `max_model_len` is no number of tokens.
    """

    cache: KVCache | GroupedCache
    backend: Backend = attrs.field(converter=_backend)
    max_model_len: int | None = None
    _model: PreTrainedModel | None = attrs.field(init=False, default=None, repr=False)
    _batches: list[PagedBatch] = attrs.field(init=False, factory=list, repr=False)
    _own: PagedBatch | None = attrs.field(init=False, default=None, repr=False)
    _serials: Iterator[int] = attrs.field(init=False, factory=count, repr=False)
    _is_attached: bool = attrs.field(init=False, default=False, repr=False)
    _keeps_batch: bool = attrs.field(init=False, default=False, repr=False)
    _compactor: Compactor | None = attrs.field(init=False, default=None, repr=False)
    _text_length: TextLength | None = attrs.field(init=False, default=None, repr=False)
    _spec: ModelSpec | None = attrs.field(init=False, default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check that the cache has block tables of tokens, and bind the backend."""
        geometry, longest = self.cache.geometry, self.max_model_len
        if longest is not None and (type(longest) is not int or longest < 1):
            msg = f"max_model_len={longest!r}: give whole tokens, at least 1, or None"
            raise InputError(msg)
        if (
            not isinstance(self.cache.pool, BlockPool)
            or geometry.accounting != "tokens"
            or geometry.key_tokens != geometry.block_size
        ):
            msg = (
                "a paged cache reads the block tables of prompts in tokens: make its cache as "
                "KVCache(blocks, block_size, ids=True), or as GroupedCache(groups, blocks)"
            )
            raise InputError(msg)
        if self.cache.tiers is not None:
            msg = "a paged cache moves no blocks to tiers: make its cache without them"
            raise InputError(msg)
        token_retention(cast("KVCache", self.cache))
        self.backend.bind()

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[PagedCache]:
        """Make `model` attend through this cache inside the `with` block.

        The first call allocates the pool. All batches are closed at the end, and the model
        is as it was; the shared blocks stay cached for the next time.

        Raises:
            InputError: a model is attached already, another model was attached before, the
                model is attached to another cache, or it cannot attend through a paged cache,
                or not with the retention policy.
            StorageError: the pool does not fit.
        """
        self._check(model)
        with ExitStack() as undo:
            undo.callback(model.set_attn_implementation, switch_over(model))
            self._bind(model)
            if self._text_length is not None:
                undo.enter_context(self._text_length.fixed())
            if self.cache.grouped:
                from kvcore_engine.generator.hf_grouped import generate_through_groups  # noqa: PLC0415 - few models need it

                layers = state_layers(model, layer_types(model))
                for layer in layers:
                    _give_back(undo, layer.module, "forward")
                pass_through_blocks(layers)
                if model.can_generate():
                    _give_back(undo, model, "generate")
                    model.generate = generate_through_groups(model)
            if self._compactor is None:
                rotary = rotary_of(model) if self.cache.retention is not None else ()
                windows = cast("ModelSpec", self._spec).windows
                self._compactor = Compactor(
                    cast("KVCache", self.cache), self.backend, windows, rotary
                )
            before = model.register_forward_pre_hook(self._before, with_kwargs=True)
            undo.callback(before.remove)
            undo.callback(model.register_forward_hook(self._after, with_kwargs=True).remove)
            undo.callback(self._close)
            self._is_attached = True
            _ATTACHED.add(model)
            yield self

    def batch(self) -> PagedBatch:
        """Return a new batch, to be given to the attached model as `cache`.

        Before transformers 5.24 that argument is called `past_key_values`.

        `model.generate` without a batch creates one, which the next generation closes.

        Raises:
            InputError: no model is attached.
        """
        if self._model is None or self._compactor is None or not self._is_attached:
            msg = "no model is attached: make batches inside `with paged.attached(model):`"
            raise InputError(msg)
        backend, serials, compactor = self.backend, self._serials, self._compactor
        length = self._text_length
        if isinstance(self.cache, KVCache):
            body = body_of(self._model)
            batch = PagedBatch(self.cache, backend, body, serials, compactor, length)
        else:
            from kvcore_engine.generator.hf_grouped import GroupedBatch  # noqa: PLC0415 - few models need it

            batch = GroupedBatch(self.cache, backend, serials, compactor, self._model, length)
        batch.spec = self._spec
        self._batches.append(batch)
        return batch

    def _close(self) -> None:
        """Close all batches, at the end of an attachment."""
        self._is_attached = False
        _ATTACHED.discard(self._model)
        while self._batches:
            self._batches.pop().reset()

    def _check(self, model: PreTrainedModel) -> None:
        """Refuse what is no model, and a model or a cache that is taken."""
        name, msg = type(model).__name__, ""
        if not isinstance(model, PreTrainedModel):
            msg = f"{name} is no transformers model: give one to attach"
        elif self._is_attached or self._model not in {None, model}:
            why = "is attached" if self._is_attached else "holds the K/V of another model"
            msg = f"this paged cache {why}: make another one for {name}"
        elif model in _ATTACHED:
            msg = f"this {name} is attached to another paged cache: end that attachment first"
        if msg:
            raise InputError(msg)

    def _bind(self, model: PreTrainedModel) -> None:
        """Allocate the pool for `model`, and refuse any other model from then on."""
        if self._model is model:
            return
        device = self.backend.tensor([0]).device
        if device.type != model.device.type:
            msg = (
                f"{type(model).__name__} is on {model.device}, the blocks of backend "
                f"{self.backend.name!r} on {device}: move one to the other"
            )
            raise InputError(msg)
        body_of(model)  # refuses a model without one, before anything is allocated
        blocks, block_size = self.cache.pool.blocks, self.cache.geometry.block_size
        spec, dtype = spec_of(model), dtype_of(model)
        if isinstance(self.cache, KVCache):
            self.backend.allocate(tensor_layout(spec, blocks, block_size, dtype))
            self.cache.on_copy = lambda source, into: self.backend.copy_blocks([(source, into)])
        else:
            from kvcore_engine.groups import group_layout  # noqa: PLC0415 - most have none

            self.backend.allocate(group_layout(spec, self.cache.groups, blocks, dtype))
        self._model, self._spec = model, spec
        self._text_length = TextLength.of(body_of(model), self.max_model_len)

    def _before(
        self, model: PreTrainedModel, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepare a call of the model: its batch, with slots for its step.

        Called by torch before every forward of the model.
        """
        names = inspect.signature(model.forward).parameters
        inputs = dict(zip(names, given, strict=False)) | named
        older = inputs.pop("past_key_values", None)
        batch = inputs.pop("cache", older)
        self._keeps_batch = False
        if not isinstance(batch, PagedBatch):
            if batch is not None and batch.get_seq_length():
                msg = (
                    f"the given cache is a {type(batch).__name__} that holds K/V already, and "
                    "not in blocks: start without one, or with paged.batch()"
                )
                raise InputError(msg)
            batch = self._fresh()
            cached = inputs.get("use_cache")
            if cached is None:
                cached = getattr(model.config.get_text_config(), "use_cache", True)
            self._keeps_batch = cached is False
        elif batch not in self._batches:
            msg = "the given batch is of another attachment: make one with paged.batch()"
            raise InputError(msg)
        inputs = batch.begin(inputs)
        return (), inputs | {
            cache_argument(model): batch,
            "use_cache": True,
            "paged": batch,
        }

    def _after(self, _: Any, __: Any, named: dict[str, Any], output: Any) -> Any:
        """Commit the computed step; return the output as the caller is to have it.

        Called by torch after every forward of the model. Without `use_cache` a caller gets no
        cache to go on with, and gives the whole text again.
        """
        batch = named["paged"]
        batch.end()
        if not self._keeps_batch:
            return output
        if isinstance(output, tuple):
            return tuple(part for part in output if part is not batch)
        parts = {name: part for name, part in output.items() if part is not batch}
        return type(output)(**parts)

    def _fresh(self) -> PagedBatch:
        """Close the batch created for the last generation, and create the next."""
        if self._own is not None:
            self._own.reset()
            self._batches = [batch for batch in self._batches if batch is not self._own]
        self._own = self.batch()
        return self._own


def _give_back(undo: ExitStack, module: Any, name: str) -> None:
    """Let `undo` give a module the method that it has of its own now, or its class's."""
    own = {name: vars(module)[name]} if name in vars(module) else {}
    undo.callback(vars(module).update, own)
    undo.callback(vars(module).pop, name, None)
