"""Models and GPUs by their numbers: layers, heads and parameters; memory, bandwidth, FLOP/s."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, TypeAlias, get_args

import attrs

from kvcore.errors import InputError
from kvcore.models.layers import MAX_WIDTH, LayerCache, merged
from kvcore.record import Record
from kvcore.units import INT64_LIMIT

# Bytes of 32 numbers: MXFP4 has a byte of scale for 32 of them, NVFP4 for 16.
_BYTES_OF_32 = {
    "fp32": 128,
    "fp16": 64,
    "bf16": 64,
    "fp8": 32,
    "int8": 32,
    "int4": 16,
    "mxfp4": 17,
    "nvfp4": 18,
}

WeightDtype: TypeAlias = Literal[
    "fp32", "fp16", "bf16", "fp8", "int8", "int4", "mxfp4", "nvfp4"
]
"""A number format that weights may have."""

WEIGHT_DTYPES: tuple[str, ...] = get_args(WeightDtype)

# Far above any model there is, and low enough that no product of them takes long.
MAX_LAYERS = 100_000
MAX_EXPERTS = 10_000
MAX_PARAMETERS = 2**60
MAX_COUNT = INT64_LIMIT - 1


def bytes_of(numbers: int, dtype: str) -> int:
    """Return the bytes that `numbers` numbers of `dtype` take, rounded up.

    Raises:
        InputError: an unknown dtype.
    """
    if dtype not in _BYTES_OF_32:
        msg = f"unknown dtype {dtype!r}; known: {', '.join(_BYTES_OF_32)}"
        raise InputError(msg)
    return -(-numbers * _BYTES_OF_32[dtype] // 32)


def _in_range(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    largest = attribute.metadata["largest"]
    if not 1 <= value <= largest:
        bound = f"at most {largest:,}" if value > largest else "at least 1"
        msg = f"{attribute.name} must be {bound}, not {value}"
        raise InputError(msg)


def _not_negative(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not 0 <= value <= MAX_COUNT:
        msg = f"{attribute.name} must be 0 to {MAX_COUNT:,}, not {value}"
        raise InputError(msg)


def count_field(largest: int = MAX_COUNT, **default: Any) -> Any:
    """Return an attrs field for a number from 1 to `largest`."""
    return attrs.field(validator=_in_range, metadata={"largest": largest}, **default)


def _same_as(name: str) -> Any:
    return attrs.Factory(lambda self: getattr(self, name), takes_self=True)


@attrs.frozen(kw_only=True, repr=False)
class ModelSpec(Record):
    """The shape of a decoder-only transformer, which determines its memory and FLOP.

    Attributes:
        name: name of the model.
        layers: layers; each keeps K/V of its own unless `caches` says what is kept.
        query_heads, kv_heads: attention heads, and the K/V heads they share.
        head_dim, value_dim: width of a query or key head, and of a value head.
        hidden_size: width of the residual stream.
        parameters: number of all parameters, embeddings included.
        active_parameters: number of those that a token uses: all but the experts it is not
            routed to.
        dtype: type of the weights, as released.
        experts, experts_per_token: routed experts of a layer, and those that a token takes.
        expert_dtype: type of the routed experts' weights, where it differs from `dtype`.
        extra_bytes, extra_expert_bytes: bytes beyond those of numbers in `dtype`, and of routed
            experts beyond those in `expert_dtype`: scales, and what is kept wider.
        positions: tokens up to which the model has positions; 0: unknown.
        windows: attention window of each layer in tokens; None: all tokens.
        latent: under multi-head latent attention (MLA), the numbers a layer stores per token
            in place of the K/V heads: compressed K/V and rotary key. Otherwise 0.
        caches: what the layers keep, where heads, latent and windows alone do not say it;
            see `layer_caches`. Heads and widths are then those of the full attention.

    Raises:
        InputError: a count that is not positive or beyond any model, or counts that
            contradict one another.
    """

    name: str
    layers: int = count_field(MAX_LAYERS)
    query_heads: int = count_field(MAX_WIDTH)
    kv_heads: int = count_field(MAX_WIDTH)
    head_dim: int = count_field(MAX_WIDTH)
    value_dim: int = count_field(MAX_WIDTH, default=_same_as("head_dim"))
    hidden_size: int = count_field(MAX_WIDTH)
    parameters: int = count_field(MAX_PARAMETERS)
    active_parameters: int = count_field(MAX_PARAMETERS, default=_same_as("parameters"))
    dtype: str = "bf16"
    experts: int = 0
    experts_per_token: int = 0
    expert_dtype: str = attrs.field(default=_same_as("dtype"))
    extra_bytes: int = 0
    extra_expert_bytes: int = 0
    positions: int = attrs.field(default=0, validator=_not_negative)
    windows: tuple[int | None, ...] = attrs.field(
        # Fields are checked after they are all made: bounded here as well.
        default=attrs.Factory(
            lambda self: (None,) * min(self.layers, MAX_LAYERS), takes_self=True
        ),
        repr=lambda windows: repr(dict(Counter(windows))),
    )
    latent: int = 0
    caches: tuple[LayerCache, ...] = ()

    def __attrs_post_init__(self) -> None:
        """Refuse counts that contradict one another."""
        problem = None
        if self.query_heads % self.kv_heads:
            problem = f"{self.query_heads} query heads cannot share {self.kv_heads} K/V heads"
        elif len(self.windows) != self.layers:
            problem = f"{len(self.windows)} attention windows for {self.layers} layers"
        elif any(window is not None and window < 1 for window in self.windows):
            problem = "an attention window must be at least 1 token"
        elif not 0 <= self.latent <= MAX_WIDTH:
            problem = f"latent must be 0 to {MAX_WIDTH:,}, not {self.latent}"
        elif self.experts > MAX_EXPERTS:
            problem = f"experts must be at most {MAX_EXPERTS:,}, not {self.experts}"
        elif not 0 <= self.experts_per_token <= self.experts:
            problem = f"a token cannot take {self.experts_per_token} of {self.experts} experts"
        elif self.active_parameters > self.parameters:
            problem = f"{self.active_parameters} of {self.parameters} parameters are active"
        elif self.active_parameters < self.parameters and not self.experts_per_token:
            problem = "only a model with experts has parameters that are not active"
        if problem := problem or self._problem_in_memory():
            msg = f"model {self.name!r}: {problem}"
            raise InputError(msg)

    def _problem_in_memory(self) -> str | None:
        """Return what is wrong with the bytes of weights or with `caches`; None: nothing."""
        if not 0 <= self.expert_bytes <= self.weight_bytes <= MAX_COUNT:
            return f"weights of less than 0 bytes, or of more than {MAX_COUNT:,}"
        if not self.caches:
            return None
        if any(cache.layers > self.layers for cache in self.caches):
            return f"a cache of more than its {self.layers} layers"
        if not any(cache.grows for cache in self.caches):
            return "none of its caches grows with a token"
        if set(self.windows) != {None}:
            return "windows of layers beside caches, which have their own"
        return None

    @property
    def attention(self) -> str:
        """The way query heads share K/V: `MHA`, `GQA`, `MQA` or `MLA`."""
        if self.latent:
            return "MLA"
        if self.kv_heads == self.query_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def layer_caches(self) -> tuple[LayerCache, ...]:
        """The caches that the layers keep of a sequence, one for each group of equal layers."""
        if self.caches:
            return self.caches
        heads, key, value = self.kv_heads, self.head_dim, self.value_dim
        if self.latent:
            heads, key, value = 1, self.latent, 0
        return tuple(
            LayerCache(
                kind="window" if window else "mla" if self.latent else "full",
                layers=layers,
                kv_heads=heads,
                key_dim=key,
                value_dim=value,
                window=window,
                pair_flop=2 * self.query_heads * (self.head_dim + self.value_dim),
            )
            for window, layers in Counter(self.windows).items()
        )

    @property
    def uniform(self) -> bool:
        """Whether all layers keep K/V, or a latent, of all tokens."""
        return not self.caches and set(self.windows) == {None}

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts together; 0 for a dense model."""
        # A token leaves out those of the experts that it is not routed to: equal parts.
        idle = self.experts - self.experts_per_token
        return (self.parameters - self.active_parameters) * self.experts // idle if idle else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all the weights."""
        return self.shared_bytes + self.expert_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the weights outside the routed experts."""
        numbers = self.parameters - self.expert_parameters
        return bytes_of(numbers, self.dtype) + self.extra_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of the weights of all routed experts."""
        return bytes_of(self.expert_parameters, self.expert_dtype) + self.extra_expert_bytes

    def weight_bytes_read(self, sequences: int) -> int:
        """Return the bytes of weights a decode step of `sequences` sequences reads.

        An expert is read once, for all sequences that take it. Sequences are assumed to take
        experts uniformly and independently, so `1 - (1 - k/E) ** sequences` of them are read.
        """
        experts = self.expert_bytes
        if not (experts and self.experts_per_token):
            return self.shared_bytes
        # Beyond this many sequences less than a byte is left out: (1 - k/E)^n < exp(-nk/E).
        enough = experts.bit_length() * self.experts // self.experts_per_token
        if sequences > enough:
            return self.shared_bytes + experts
        idle: int = (self.experts - self.experts_per_token) ** sequences
        total: int = self.experts**sequences
        return self.shared_bytes + experts - experts * idle // total

    def with_weights(self, dtype: str) -> ModelSpec:
        """Return the model with all its weights in `dtype`.

        Of a mixture in nvfp4 those of experts alone, the others in bf16: as in checkpoints.
        """
        shared = "bf16" if dtype == "nvfp4" and self.experts else dtype
        return attrs.evolve(
            self, dtype=shared, expert_dtype=dtype, extra_bytes=0, extra_expert_bytes=0
        )

    def with_window(self, window: int) -> ModelSpec:
        """Return the model with the attention of every layer limited to `window` tokens."""
        if self.caches:
            caches = [cache.with_window(window) for cache in self.caches]
            return attrs.evolve(self, caches=merged(caches))
        windows = tuple(window if w is None else min(w, window) for w in self.windows)
        return attrs.evolve(self, windows=windows)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON; without `caches` if heads and windows tell all.

        So the header of a trace is what it was before models had `caches`.
        """
        fields = attrs.asdict(self)
        if not self.caches:
            del fields["caches"]
        return fields


@attrs.frozen(kw_only=True, repr=False)
class DeviceSpec(Record):
    """A GPU, by its data sheet.

    Attributes:
        name: name of the GPU.
        hbm_bytes: bytes of memory.
        bandwidth: bytes/s between memory and the processors.
        flops: dense FLOP/s in fp16 or bf16 on the matrix units.
        host_link: bytes/s between host and device, one way.
        link: bytes/s between the GPUs of a server, one way, over links of their own (NVLink,
            Infinity Fabric); 0: they have none, and talk through the host.
        fp8_flops: dense FLOP/s in fp8; 0: none, weights in fp8 are computed with in fp16.
        fp4_flops: dense FLOP/s in fp4; 0: none, weights in nvfp4 are read as such, and computed
            with in fp16.
        server_size: GPUs of a server, or of a rack whose `link` joins all of them.

    Raises:
        InputError: a figure that is not positive; of link and narrow formats, one below 0.
    """

    name: str
    hbm_bytes: int = count_field()
    bandwidth: int = count_field()
    flops: int = count_field()
    host_link: int = count_field()
    link: int = attrs.field(default=0, validator=_not_negative)
    fp8_flops: int = attrs.field(default=0, validator=_not_negative)
    fp4_flops: int = attrs.field(default=0, validator=_not_negative)
    server_size: int = count_field(default=8)
