"""A paged cache that Hugging Face models generate through: `with paged.attached(model):`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs

from kvcore import Backend, InputError, KVCache
from kvcore.cache import BlockPool
from kvcore.engine import TensorLayout
from kvcore_plugins.generator.hf_batch import PagedBatch
from kvcore_plugins.generator.hf_model import dtype_of, spec_of, switch_over

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@attrs.define(eq=False)
class PagedCache:
    """The K/V of one Hugging Face model in the blocks of a `KVCache`, on a backend.

    Inside `with paged.attached(model):` the model generates through these blocks, as it
    would with its own cache: `model.generate`, beams, assisted generation, calls of the
    model. What a prompt has in common with an earlier one is not computed again, as long
    as the eviction policy keeps it.

    Attributes:
        cache: made with `ids=True`, and counting tokens.
        backend: keeps the K/V; allocated at the first `attached`.

    Raises:
        InputError: a cache without block ids, or a backend that is in use.
    """

    cache: KVCache
    backend: Backend
    _model: PreTrainedModel | None = attrs.field(init=False, default=None, repr=False)
    _batches: list[PagedBatch] = attrs.field(init=False, factory=list, repr=False)
    _own: PagedBatch | None = attrs.field(init=False, default=None, repr=False)
    _serials: Iterator[int] = attrs.field(init=False, factory=count, repr=False)
    _is_attached: bool = attrs.field(init=False, default=False, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check that the cache can be read, and take the backend."""
        geometry = self.cache.geometry
        if (
            not isinstance(self.cache.pool, BlockPool)
            or geometry.accounting != "tokens"
            or geometry.key_tokens != geometry.block_size
        ):
            msg = (
                "a paged cache reads the block tables of prompts in tokens: make its cache as "
                "KVCache(blocks, block_size, ids=True)"
            )
            raise InputError(msg)
        self.backend.bind()

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[PagedCache]:
        """Let `model` attend through this cache; afterwards it is as it was.

        The first call allocates the pool. All batches are closed at the end; what is cached
        stays for the next time.

        Raises:
            InputError: it is attached already, was to another model, or the model cannot go
                through a paged cache: says why.
            StorageError: the pool does not fit.
        """
        self._bind(model)
        before = switch_over(model)
        hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(_after, with_kwargs=True),
        ]
        self._is_attached = True
        try:
            yield self
        finally:
            self._is_attached = False
            for hook in hooks:
                hook.remove()
            while self._batches:
                self._batches.pop().reset()
            model.set_attn_implementation(before)

    def batch(self) -> PagedBatch:
        """Return a new batch, to be given to the attached model as `past_key_values`.

        `model.generate` without one makes one, which the next generation closes.

        Raises:
            InputError: no model is attached.
        """
        if self._model is None or not self._is_attached:
            msg = "no model is attached: make batches inside `with paged.attached(model):`"
            raise InputError(msg)
        batch = PagedBatch(self.cache, self.backend, self._model.base_model, self._serials)
        self._batches.append(batch)
        return batch

    def _bind(self, model: PreTrainedModel) -> None:
        """Make room for the K/V of `model`, and of no other."""
        if self._is_attached or self._model not in {None, model}:
            why = "is attached" if self._is_attached else "holds the K/V of another model"
            msg = f"this paged cache {why}: make another one for {type(model).__name__}"
            raise InputError(msg)
        if self._model is model:
            return
        place = self.backend.tensor([0]).device
        if place.type != model.device.type:
            msg = (
                f"{type(model).__name__} is on {model.device}, the blocks of backend "
                f"{self.backend.name!r} on {place}: move one to the other"
            )
            raise InputError(msg)
        spec = spec_of(model)
        layout = TensorLayout(
            blocks=self.cache.pool.blocks,
            block_size=self.cache.geometry.block_size,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            dtype=dtype_of(model),
        )
        self.backend.allocate(layout)
        self.cache.on_copy = lambda source, target: self.backend.copy_blocks([(source, target)])
        self._model = model

    def _before(
        self, model: PreTrainedModel, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Give every call of the model a batch, and room for its step."""
        names = inspect.signature(model.forward).parameters
        inputs = dict(zip(names, given, strict=False)) | named
        batch = inputs.get("past_key_values")
        if not isinstance(batch, PagedBatch):
            if batch is not None and batch.get_seq_length():
                msg = (
                    f"past_key_values is a {type(batch).__name__} that holds K/V already, and "
                    "not in blocks: start without one, or with paged.batch()"
                )
                raise InputError(msg)
            batch = self._fresh()
        inputs = batch.begin(inputs)
        return (), inputs | {"past_key_values": batch, "use_cache": True, "paged": batch}

    def _fresh(self) -> PagedBatch:
        """Close the batch made here for the generation before, and make the next."""
        if self._own is not None:
            self._own.reset()
            self._batches = [batch for batch in self._batches if batch is not self._own]
        self._own = self.batch()
        return self._own


def _after(_: Any, __: tuple[Any, ...], named: dict[str, Any], ___: Any) -> None:
    """Commit what a step has computed."""
    named["paged"].end()
