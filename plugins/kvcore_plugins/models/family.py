"""The words in which families of models are described: parts, layers, and what a family has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import attrs

from kvcore.models.layers import LayerCache
from kvcore_plugins.models.config import Config

Matrices: TypeAlias = dict[str, tuple[int, int]]
"""Inputs and outputs of the matrices of a module, by name."""


@attrs.frozen
class Part:
    """A module of a layer, or one expert of a layer.

    Attributes:
        name: path of the module within the layer.
        matrices: its matrices, which may be quantised.
        vectors: number of its other parameters: biases, norms, routers.
        caches: what it keeps of a sequence.
        expert: whether it is one of the routed experts, all of which have its size.
    """

    name: str = ""
    matrices: Matrices = attrs.field(factory=dict)
    vectors: int = 0
    caches: tuple[LayerCache, ...] = ()
    expert: bool = False

    @property
    def parameters(self) -> int:
        """Number of all its parameters."""
        return self.vectors + sum(
            inputs * outputs for inputs, outputs in self.matrices.values()
        )


@attrs.frozen
class Layer:
    """One layer of a model.

    Attributes:
        index: its position, from 0.
        kind: its type, such as `full_attention`.
        sparse: whether it has experts.
        shares: whether it reads the K/V of an earlier layer, and has none of its own.
        window: tokens of its window or chunk; None: it attends to all.
    """

    index: int
    kind: str
    sparse: bool = False
    shares: bool = False
    window: int | None = None


@attrs.frozen
class Experts:
    """The routed experts of a family, and those that every token takes.

    Attributes:
        count: the field with their number.
        width: the field with the width of one.
        optional: whether a model without the field `count`, or with one expert, is dense.
        shared: the field with the number of experts that each token takes.
        shared_count: that number, if no field gives it.
        router_bias: whether the router has a bias for each expert.
    """

    count: str
    width: str = "moe_intermediate_size"
    optional: bool = False
    shared: str = "n_shared_experts"
    shared_count: int = 0
    router_bias: bool = False


@attrs.frozen
class Window:
    """The window of the layers of a family that do not attend to all tokens.

    Attributes:
        field: the field with its tokens.
        by_default: whether it applies where `use_sliding_window` is left out.
        full_every: every `full_every`-th layer has no window; 0: every layer has one.
        full_last: whether the last layer has none, whatever its type is said to be.
    """

    field: str = "sliding_window"
    by_default: bool = True
    full_every: int = 0
    full_last: bool = False


Build: TypeAlias = Callable[[Config, "Family", Layer], Iterable[Part]]
"""A function that builds the parts of a layer."""


@attrs.frozen(kw_only=True)
class Family:
    """The properties that all models of one `model_type` share.

    Attributes:
        mixers: the function that builds what mixes tokens in a layer, by type of the layer;
            none: attention with K/V heads in each.
        kinds: the function that returns the types of the layers, if the config does not.
        network: the function that builds the feed-forward network of a layer; None: a dense
            one, or experts with a router.
        outside: the function that returns further parameters outside the layers.
        norms, final_norms: norm vectors of `hidden_size` in each layer, and after the last.
            A norm with a bias counts as two.
        qkv_bias, output_bias, mlp_bias: whether these have biases; None: a field of the config
            decides.
        qk_norm: whether queries and keys are normalised, by a vector of `head_dim` each, or by
            one for `all` heads; None: a field of the config decides.
        sinks: whether each query head has a learned sink, or the types of layers where it has.
        gate: whether the output is gated, by a number for each `head` or for `each` number.
        value_width: whether `v_head_dim` is the width of a value.
        one_projection: the type of layers whose keys and values may be one projection.
        mamba_norm: whether a Mamba 2 layer has a norm; None: a field of the config decides.
        gated: whether the MLP has a gate, hence three matrices rather than two.
        mlp: name of the feed-forward module of a layer.
        width: the field with its width, where it has no experts.
        mlp_ratio: MLP width in hidden sizes, where the config leaves it out.
        positions, head_bias: whether there are learned positions, and an output bias.
        mla: whether attention is multi-head latent attention; `indexed`: it has an indexer.
        experts: the routed experts; None: a dense model.
        by_index: whether layers of one type may differ.
        shares: whether the last `num_kv_shared_layers` layers read K/V of earlier ones.
        window: the window of layers; None: none has one.
        names: names that fields have in this family, by the usual names.
        defaults: values of fields that the makers' own configs leave out.
        only: fields that are known with these values alone.
        known: fields whose values change nothing here.
    """

    mixers: Mapping[str, Build] = attrs.field(factory=dict)
    kinds: Callable[[Config], list[str]] | None = None
    network: Build | None = None
    outside: Callable[[Config], int] | None = None
    norms: int = 2
    final_norms: int = 1
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool | Literal["all"] | None = False
    sinks: bool | tuple[str, ...] = False
    gate: Literal["head", "each"] | None = None
    value_width: bool = False
    one_projection: str = ""
    mamba_norm: bool | None = True
    gated: bool = True
    mlp: str = "mlp"
    width: str = "intermediate_size"
    mlp_ratio: int | None = None
    positions: bool = False
    head_bias: bool = False
    mla: bool | Literal["indexed"] = False
    experts: Experts | None = None
    by_index: bool = False
    shares: bool = False
    window: Window | None = None
    names: Mapping[str, str] = attrs.field(factory=dict)
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    only: Mapping[str, Any] = attrs.field(factory=dict)
    known: frozenset[str] = frozenset()
