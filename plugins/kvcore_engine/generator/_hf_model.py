"""Hugging Face models whose attention goes through a paged cache.

transformers calls attention by name (`AttentionInterface`), makes a mask by the same name
(`AttentionMaskInterface`), and passes keyword arguments of a model's `forward` on to every
attention layer: see its documentation of the attention interface. So a model is switched
over by a name, and the cache of the step is passed as the argument `paged`.
"""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from kvcore import InputError
from kvcore.engine import Rotary
from kvcore.models.layers import LayerCache
from kvcore.models.spec import ModelSpec
from kvcore_engine.generator._hf_states import state_layers
from kvcore_engine.groups import STATE_NUMBER_BYTES
from kvcore_plugins.codec.dtypes import TORCH_DTYPES

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedConfig, PreTrainedModel

    from kvcore.engine import Attend
    from kvcore_engine.groups import StepStates


MATRIX = 2
PADDING_ROWS = 2
"""Rows of a table of positions that some models leave to padding."""

_LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""The kinds of rotary embeddings whose frequencies change with the length of a batch."""

_ONE_FOR_ALL = frozenset(
    {"head_dim", "hidden_size", "num_attention_heads", "num_key_value_heads", "sliding_window"}
)
"""What of a config is one number for all layers of a `ModelSpec`."""

IMPLEMENTATION = "kvcore"
"""The name under which transformers finds attention through a paged cache."""


class AttentionCache(Cache):  # type: ignore[misc]
    """The cache argument of a model whose attention is computed by this cache.

    Attributes:
        states: the states of the step; None without a layer that keeps one.
        spec: the shape of the model, which its layers are held to; None: any will do.
    """

    states: StepStates | None = None
    spec: ModelSpec | None = None
    _rows: Tensor | None = None  # of a batch with padding, the tokens that are none
    _new: tuple[int, Tensor, Tensor] | None = None  # layer, K and V, until attention

    def __init__(self) -> None:
        super().__init__(layers=[])

    def pack(self, columns: Tensor) -> Tensor:
        """Return the rows of `[batch, columns, ...]` that are no padding."""
        rows = columns.flatten(0, 1)
        return rows if self._rows is None else rows[self._rows]

    def spread(self, rows: Tensor, batch: int, columns: int) -> Tensor:
        """Return what `pack` has packed, `[batch, columns, ...]`; a hidden token gets zeros."""
        if self._rows is not None:
            spread = rows.new_zeros((batch * columns, *rows.shape[1:]))
            rows = spread.index_copy_(0, self._rows, rows)
        return rows.view(batch, columns, *rows.shape[1:])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new K/V of a layer, `[batch, kv_heads, tokens, width]`; return it.

        Raises:
            InputError: it is not of the shape that the spec has.
        """
        self._check(layer_idx, key_states, value_states)
        self.store(layer_idx, key_states, value_states)
        self._new = layer_idx, key_states, value_states
        return key_states, value_states

    def _check(self, layer: int, *kv: Tensor) -> None:
        """Refuse keys and values of a layer in other heads than those of the spec."""
        heads = [(part.shape[1], part.shape[3]) for part in kv]
        if self.spec is None or {*heads} == {(self.spec.kv_heads, self.spec.head_dim)}:
            return
        (keys, key_width), (values, value_width) = heads
        msg = (
            f"{self.spec.name} cannot go through a paged cache: its layer {layer} has {keys} "
            f"keys of {key_width} numbers and {values} values of {value_width} a token, its "
            f"config {self.spec.kv_heads} of {self.spec.head_dim} in every layer; if layers do "
            "not differ, correct `num_key_value_heads` and `head_dim`"
        )
        raise InputError(msg)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store what `update` takes; a cache whose `attention` stores does nothing."""

    def is_new(self, layer: int, keys: Tensor, values: Tensor) -> bool:
        """Return whether these very tensors are what `update` took last; then forget them."""
        new, self._new = self._new, None
        return new is not None and new[0] == layer and new[1] is keys and new[2] is values

    @abstractmethod
    def attention(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Return attention's output for the new tokens, `[batch, tokens, heads, width]`.

        Queries are `[batch, query_heads, tokens, width]`, keys and values as `update` has
        returned them. Options are those of `Backend.attend`.
        """

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the length and the offset of a mask, of which `_mask` makes no use."""
        return self.get_seq_length(layer_idx) + query_length, 0

    @property
    def is_linear(self) -> list[bool]:
        """Return that K/V is stored: `generate` then passes only tokens that have none yet.

        Without layers of its own this cache would count as one of linear attention.
        """
        return [False]


class PackedCache(AttentionCache):
    """The cache of a ragged batch that runs as one row of tokens, through `attend`."""

    def __init__(self, attend: Attend, numbers: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self._attend = attend
        self._numbers = numbers or {}
        self.states = getattr(attend, "states", None)

    def attention(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, **options: Any
    ) -> Tensor:
        """Store the step's K/V and attend, in one call."""
        rows = as_rows(queries), as_rows(keys), as_rows(values)
        # Where only some layers have K/V, these have numbers of their own.
        out: Tensor = self._attend(self._numbers.get(layer, layer), *rows, **options)
        return out.unsqueeze(0)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: every token comes with its position."""
        return 0


def as_rows(states: Tensor) -> Tensor:
    """Return `[batch, heads, tokens, width]` as `[batch × tokens, heads, width]`."""
    return states.transpose(1, 2).flatten(0, 1)


def _paged_attention(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: AttentionCache | None = None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend through the cache of the step. Called by transformers in every layer.

    Raises:
        InputError: the layer gets no paged cache, attends to other K/V than it has just stored,
            needs a kind of attention that no backend computes, or is no layer of its spec.
    """
    if paged is None:
        msg = (
            f"{type(module).__name__} attends through kvcore, and got no paged cache: call the "
            "whole model, inside `with paged.attached(model):`. If you do, the model does not "
            "pass the cache on to its layers, and cannot go through one"
        )
        raise InputError(msg)
    wanted = [name for name in ("softcap", "position_bias") if _given(options, name)]
    wanted += ["dropout"] if dropout else []
    wanted += ["is_causal=False"] if options.get("is_causal") is False else []
    if attention_mask is not None and not hasattr(attention_mask, "window"):
        wanted.append("a mask of its own")
    if wanted:
        msg = (
            f"{type(module).__name__} asks attention for {', '.join(wanted)}, which no "
            "kvcore backend computes"
        )
        raise InputError(msg + ("; call model.eval() first" if dropout else ""))
    layer: int = module.layer_idx  # type: ignore[assignment]
    # Several attentions in a layer, or K/V under another number, would mix in the blocks.
    if not paged.is_new(layer, key, value):
        msg = (
            f"{type(module).__name__} cannot go through a paged cache: a layer must attend "
            "once, to the K/V that it has just stored under its own number"
        )
        raise InputError(msg)
    # Some models give a layer its window in the mask alone.
    window: int | None = getattr(attention_mask, "window", None)
    window = window if sliding_window is None else sliding_window
    expected = window if paged.spec is None else paged.spec.windows[layer]
    if window != expected:
        msg = (
            f"{type(module).__name__} cannot go through a paged cache: layer {layer} attends "
            f"to {_tokens(window)}, where the model's config gives it {_tokens(expected)}, by "
            "which blocks are freed; correct its `sliding_window` or `layer_types`"
        )
        raise InputError(msg)
    sinks = {} if s_aux is None else {"sink_logits": s_aux}
    out = paged.attention(layer, query, key, value, scale=scaling, window=window, **sinks)
    return out, None


def _tokens(window: int | None) -> str:
    return "all tokens" if window is None else f"a window of {window:,}"


def _given(options: dict[str, Any], name: str) -> bool:
    return options.get(name) is not None


def _mask(
    *_: Any, local_size: int | None = None, device: Any = None, **__: Any
) -> Tensor | None:
    """Return no mask, or one that only says its window: see `_paged_attention`.

    Padding is not stored, and backends attend causally.
    """
    if local_size is None:
        return None
    # A tensor, since some models compute with their masks; what they make has no window.
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    mask.window = local_size  # type: ignore[attr-defined]
    return mask


def switch_over(model: PreTrainedModel) -> str:
    """Make `model` attend through paged caches; return the name of its attention before.

    Raises:
        InputError: the model does not call attention by name.
    """
    AttentionInterface.register(IMPLEMENTATION, _paged_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)
    before: str = model.config._attn_implementation  # noqa: SLF001 - it has no other name
    # transformers 5.24 does not set this for its hybrid models.
    by_name = getattr(model, "_supports_attention_backend", False)
    if not by_name and "linear_attention" in layer_types(model):
        by_name = model._can_set_attn_implementation()  # noqa: SLF001 - it has no other name
    if not by_name:
        msg = (
            f"{type(model).__name__} cannot go through a paged cache: it does not call "
            "attention through transformers' AttentionInterface"
        )
        raise InputError(msg)
    model.set_attn_implementation(IMPLEMENTATION)
    return before


def convert(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
    """Move `model` to `device`, and convert its weights as transformers does to load them so.

    That leaves some tensors wider than `dtype`: the frequencies of rotary embeddings, which
    rounded would turn far positions by wrong angles, and what a class keeps in fp32, such as
    the routers of experts. A model of the same class without memory tells which they are.
    Quantized weights are left to transformers, which refuses some.
    """
    if getattr(model, "quantization_method", None) is not None:
        model.to(device=device, dtype=dtype)
        return
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            twin = type(model)(deepcopy(model.config))
    finally:
        torch.set_default_dtype(default)
    kinds = {name: tensor.dtype for name, tensor in _tensors(twin)}
    for pattern, kept in model._get_dtype_plan(dtype).items():  # noqa: SLF001 - no other name
        stored = re.compile(pattern.replace("*", ".*"))
        kinds |= {name: kept for name in model.state_dict() if stored.search(name)}
    for name, tensor in _tensors(model):
        kind = kinds.get(name, dtype) if tensor.is_floating_point() else tensor.dtype
        tensor.data = tensor.data.to(device, kind)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a model by their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def spec_of(model: PreTrainedModel) -> ModelSpec:
    """Return the shape of a decoder-only `model`, its parameters counted. O(tensors).

    Raises:
        InputError: K/V is not one K and one V of one width for each head in every layer.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = layer_types(model)
    dtype = dtype_of(model)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    total, experts = 0, 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        experts += parameter.numel() if ".experts." in name else 0
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    taken = getattr(config, "num_experts_per_tok", None) or 0
    if not (experts and count and taken):
        count, taken, experts = 0, 0, 0
    idle = experts // count * (count - taken) if count else 0
    return ModelSpec(
        name=str(getattr(config, "name_or_path", "") or config.model_type),
        layers=len(kinds),
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        parameters=total,
        active_parameters=total - idle,
        dtype=dtype.replace("fp64", "fp32"),  # no weights are released in fp64
        experts=count,
        experts_per_token=taken,
        windows=tuple(
            config.sliding_window if kind == "sliding_attention" else None for kind in kinds
        ),
        caches=_caches(model, kinds, heads, kv_heads, head_dim),
    )


def _caches(
    model: PreTrainedModel, kinds: list[str], heads: int, kv_heads: int, head_dim: int
) -> tuple[LayerCache, ...]:
    """Return what the layers of a model keep if some keep a state; else nothing."""
    if "linear_attention" not in kinds:
        return ()
    states = state_layers(model, kinds)
    state = max(states, key=lambda layer: layer.numbers)
    return (
        LayerCache(
            kind="full",
            layers=kinds.count("full_attention"),
            kv_heads=kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            pair_flop=4 * heads * head_dim,
        ),
        LayerCache(
            kind="state",
            layers=len(states),
            state_bytes=state.numbers * STATE_NUMBER_BYTES,
            # A token scales the state, adds to it, and is multiplied with it.
            pair_flop=4 * prod(state.recurrent.shape),
        ),
    )


def dtype_of(model: PreTrainedModel) -> str:
    """Return the dtype of the weights, one of `TENSOR_DTYPES`.

    Raises:
        InputError: K/V is not computed in this dtype.
    """
    for name, dtype in TORCH_DTYPES.items():
        if model.dtype == dtype:
            return name
    return _refuse(model, f"computes in {model.dtype}; one of {', '.join(TORCH_DTYPES)} can")


def positions_of(model: PreTrainedModel) -> int | None:
    """Return the number of positions in the model's table, learned or not; None without one.

    A rotary embedding is computed for any position, and is no table.
    """
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    for name, table in chain(model.named_parameters(), model.named_buffers()):
        named = "wpe" in name or "position" in name
        if named and table.dim() == MATRIX and limit <= len(table) <= limit + PADDING_ROWS:
            return limit
    return None


@attrs.frozen(eq=False)
class TextLength:
    """The most tokens of a text of a model through a paged cache, and the factors up to there.

    transformers rotates all keys of a batch in another way once a position of it is beyond the
    length that the model was first trained for. Cached keys would then be those of one batch,
    and wrong in another. Of `longrope` one of the two sets of factors therefore holds for
    all texts, as in vLLM: the long ones if texts may be longer than that length, else the short
    ones. Of `dynamic` there is a set for each length, so that no text may be longer.

    Attributes:
        model: the name of the model's class.
        tokens: the most tokens of a text.
        kind: the kind of rotary embedding that bounds them; None: `max_model_len` alone does.
        extended: the rotary modules whose long factors hold for all texts, each with a position
            at which transformers takes them.
    """

    model: str
    tokens: int
    kind: str | None
    extended: tuple[tuple[Module, int], ...] = ()

    @classmethod
    def of(cls, model: Module, max_model_len: int | None) -> TextLength | None:
        """Return the length of texts of `model`, of `max_model_len` if that is given.

        None: they may be of any. O(modules).
        """
        found = [
            (_original_length(module, layers, kind), kind, module)
            for module in model.modules()
            for layers, kind in _rope_kinds(module).items()
            if kind in _LENGTH_DEPENDENT
        ]
        lengths: list[tuple[int, str | None]] = []
        extended: dict[Module, int] = {}
        for tokens, kind, module in found:
            if kind == "longrope" and max_model_len is not None and max_model_len > tokens:
                extended[module] = max(tokens, extended.get(module, 0))
            else:
                lengths.append((tokens, kind))
        if max_model_len is not None:
            lengths.append((max_model_len, None))
        if not lengths:
            return None
        tokens, reason = min(lengths, key=lambda length: length[0])
        return cls(type(model).__name__, tokens, reason, tuple(extended.items()))

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """Let the long factors hold inside the `with` block, at whatever positions.

        transformers takes them for a batch that has a position beyond the original length:
        so it gets one more, whose angles are dropped.
        """
        with ExitStack() as undo:
            for module, position in self.extended:
                more = partial(_with_position, position)
                before = module.register_forward_pre_hook(more, with_kwargs=True)
                undo.callback(before.remove)
                undo.callback(module.register_forward_hook(_without_last).remove)
            yield

    def check(self, last: int) -> None:
        """Refuse a text whose largest position is `last` if it is too long.

        Raises:
            InputError: it has more tokens than a text may have.
        """
        if last < self.tokens:
            return
        text = f"{last + 1:,} tokens of {self.model} in a paged cache"
        if self.kind == "dynamic":
            msg = (
                f"{text}: its rotary embedding {self.kind!r} takes other frequencies beyond "
                f"{self.tokens:,} tokens, for all keys of a batch, so that cached K/V would be "
                f"wrong; give shorter texts (max_model_len={self.tokens} in a run or a "
                "server), or generate without a paged cache"
            )
        elif self.kind is not None:
            msg = (
                f"{text}: its rotary embedding {self.kind!r} takes its long factors beyond "
                f"{self.tokens:,} tokens, for all keys of a batch; give shorter texts, or the "
                "length of the longest as max_model_len, with which they hold for all texts"
            )
        else:
            msg = f"{text} of max_model_len={self.tokens}: give shorter texts, or a larger one"
        raise InputError(msg)


def _original_length(module: Module, layers: str | None, kind: str) -> int:
    """Return the number of positions before a rotary `module` changes its frequencies."""
    if kind == "dynamic":
        return int(module.original_max_seq_len)  # type: ignore[arg-type]
    parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
    own = parameters if layers is None else parameters[layers]
    return int(own["original_max_position_embeddings"])


def _with_position(
    position: int, module: Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add a position to those for which a rotary module is to return angles."""
    call = inspect.signature(module.forward).bind(*given, **named)
    positions: Tensor = call.arguments["position_ids"]
    more = positions.new_full((*positions.shape[:-1], 1), position)
    call.arguments["position_ids"] = torch.cat([positions, more], dim=-1)
    return call.args, call.kwargs


def _without_last(_: Module, __: Any, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Drop the last position of the cosines and sines that a rotary module returns."""
    return tuple(table[..., :-1, :] for table in tables)


@torch.no_grad()
def rotary_of(model: PreTrainedModel) -> tuple[Rotary | None, ...]:
    """Return the rotary embedding of each layer of a `model` that is switched over.

    Frequencies are read from the model's rotary modules, and checked with keys that the model
    computes: those of a token that attends to itself alone differ between positions by the
    rotation. A layer has None if no frequencies explain them, and no speeds if its keys are
    not rotated. One pass over four tokens.
    """
    frequencies = [
        buffer
        for module in model.modules()
        if not _LENGTH_DEPENDENT & {*_rope_kinds(module).values()}
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]
    candidates = [
        Rotary(tuple(frequency.tolist()), adjacent)
        for frequency in (torch.empty(0), *frequencies)
        for adjacent in (False, True)
    ]
    config = model.config.get_text_config(decoder=True)
    far = min(1000, getattr(config, "max_position_embeddings", None) or 1000) - 1
    positions = torch.tensor([0, 1, min(11, far), far], device=model.device)
    rotaries: list[Rotary | None] = []

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, **_: Any) -> Tensor:
        """Record the rotation of the layer's keys; each token attends to itself alone."""
        del layer
        tolerance = max(1e-4, 4 * torch.finfo(keys.dtype).eps) * keys.abs().max()
        rotaries.append(
            next(
                (
                    rotary
                    for rotary in candidates
                    if (_at(rotary, keys[:1], positions) - keys).abs().max() <= tolerance
                ),
                None,
            )
        )
        return values.repeat_interleave(queries.shape[1] // keys.shape[1], 1)

    packed = PackedCache(attend)
    model(
        input_ids=torch.full_like(positions, config.vocab_size // 2)[None],
        position_ids=positions[None],
        use_cache=True,
        logits_to_keep=1,
        paged=packed,
        **{cache_argument(model): packed},
    )
    return tuple(rotaries)


def cache_argument(model: Module | type[Module]) -> str:
    """Return the name of the argument of `model` that takes a cache.

    It is `cache` from transformers 5.24 on, where a model has been changed to it, and
    `past_key_values` before.
    """
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _at(rotary: Rotary, key: Tensor, positions: Tensor) -> Tensor:
    """Return the key at position 0, `[1, heads, width]`, at each of `positions`."""
    cos, sin = rotary.angles(positions[:, None])
    keys: Tensor = rotary.rotate(key.expand(len(positions), -1, -1), cos, sin)
    return keys


def _rope_kinds(module: Module) -> dict[str | None, str]:
    """Return the kinds of rotary embeddings that a module computes, by the type of layers.

    One for all layers has None in place of a type.
    """
    kinds = getattr(module, "rope_type", ())
    return {None: kinds} if isinstance(kinds, str) else dict(kinds)


def layer_types(model: PreTrainedModel) -> list[str]:
    """Return the kind of each layer: `full_attention`, `sliding_attention`, `linear_attention`.

    The last one keeps a state. Layers without attention (`mlp`, `moe`) may be beside it.

    Raises:
        InputError: a layer of another kind, or kinds that do not go together.
    """
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        _refuse(model, "is an encoder with a decoder; a decoder-only model can")
    by_layer = getattr(getattr(config, "_heterogeneity_spec", None), "per_layer_attributes", ())
    if several := sorted(_ONE_FOR_ALL.intersection(by_layer)):
        _refuse(model, f"has layers of several sizes ({', '.join(several)}), blocks have one")
    if getattr(config, "kv_lora_rank", None):
        _refuse(model, "stores a latent (MLA) in place of K/V heads")
    if getattr(config, "num_kv_shared_layers", None):
        _refuse(model, "has layers that use the K/V of other layers")
    if not _is_causal(model, config):
        _refuse(
            model,
            "lets tokens attend to later ones, as encoders do; with is_decoder=True, or "
            "without use_bidirectional_attention, its config describes a decoder",
        )
    windowed = getattr(config, "sliding_window", None) is not None
    every = "sliding_attention" if windowed else "full_attention"
    kinds = getattr(config, "layer_types", None) or [every] * config.num_hidden_layers
    known = {"full_attention", "sliding_attention"}
    if {"full_attention", "linear_attention"} <= {*kinds} and "sliding_attention" not in kinds:
        known |= {"linear_attention", "mlp", "moe"}
    for kind in kinds:
        if kind not in known:
            _refuse(model, f"has layers of {kind!r}, which have no K/V of full or sliding kind")
    return list(kinds)


def _is_causal(model: PreTrainedModel, config: PreTrainedConfig) -> bool:
    """Return whether each layer of the text model, which has `config`, attends causally.

    It may attend to the tokens of an encoder too, which is not causal.
    """
    layers: dict[int, bool] = {}
    for module in model.modules():
        causal, layer = getattr(module, "is_causal", None), getattr(module, "layer_idx", None)
        own = type(getattr(module, "config", None)) is type(config)
        if own and causal is not None and layer is not None:
            layers[layer] = layers.get(layer, False) or causal
    return getattr(config, "is_causal", True) is not False and all(layers.values())


def body_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the `model` without its head.

    Raises:
        InputError: transformers does not tell it apart.
    """
    body = model.base_model
    if body is model:  # It has no head, or a wrong name for its body, as Llama 4 has.
        body = getattr(model, "model", model)
    if body is model and model.can_generate():
        _refuse(model, "has no `base_model`; generate in the serving loop, `kvcore.run`")
    return body


def attention_numbers(kinds: list[str]) -> dict[int, int]:
    """Return the number of each layer with attention among these, if others keep a state."""
    attention = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if "linear_attention" not in kinds:
        return {}
    return {layer: index for index, layer in enumerate(attention)}


def _refuse(model: PreTrainedModel, why: str) -> NoReturn:
    msg = f"{type(model).__name__} cannot go through a paged cache: it {why}"
    raise InputError(msg)
