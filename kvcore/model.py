"""Memory and roofline arithmetic: what K/V costs, how much of it fits, how fast it can go.

Bytes, tokens and FLOP are exact integers. Seconds are floats made by `+`, `*` and `/`
alone, hence the same on every machine. They are bounds set by the hardware, not
predictions: a real system is slower.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

from kvcore.errors import InputError

# Bytes of 32 numbers: a block of MXFP4 has 32, and one byte of scale.
_BYTES_OF_32 = {
    "fp32": 128,
    "fp16": 64,
    "bf16": 64,
    "fp8": 32,
    "int8": 32,
    "int4": 16,
    "mxfp4": 17,
}
WEIGHT_DTYPES = tuple(_BYTES_OF_32)
KV_DTYPES = WEIGHT_DTYPES[:-1]

# Far above any model there is, and low enough that no product of them takes long.
MOST_LAYERS = 100_000
MOST_EXPERTS = 10_000
MOST_WIDTH = 2**31 - 1
MOST_PARAMETERS = 2**60
MOST = 2**63 - 1


def bytes_of(numbers: int, dtype: str) -> int:
    """Return the bytes that `numbers` numbers of `dtype` take, rounded up.

    Raises:
        InputError: an unknown dtype.
    """
    if dtype not in _BYTES_OF_32:
        msg = f"unknown dtype {dtype!r}; known: {', '.join(_BYTES_OF_32)}"
        raise InputError(msg)
    return -(-numbers * _BYTES_OF_32[dtype] // 32)


def attended_pairs(context: int, tokens: int, window: int | None = None) -> int:
    """Count the (query, key) pairs of `tokens` new tokens after `context` earlier ones.

    A token attends to itself and to those before it; with a `window`, to no more than the
    last `window` tokens, itself included.
    """
    return _pairs(context + tokens, window) - _pairs(context, window)


def _pairs(tokens: int, window: int | None) -> int:
    growing = tokens if window is None else min(tokens, window)
    return growing * (growing + 1) // 2 + (tokens - growing) * growing


def _in_range(instance: Any, attribute: attrs.Attribute[int], value: int) -> None:
    most = attribute.metadata["most"]
    if not 1 <= value <= most:
        bound = f"at most {most:,}" if value > most else "at least 1"
        msg = f"{type(instance).__name__}: {attribute.name} must be {bound}, not {value}"
        raise InputError(msg)


def _count(most: int = MOST, **default: Any) -> Any:
    """Make a field of a number from 1 to `most`."""
    return attrs.field(validator=_in_range, metadata={"most": most}, **default)


def _same_as(name: str) -> Any:
    return attrs.Factory(lambda self: getattr(self, name), takes_self=True)


@attrs.frozen(kw_only=True)
class ModelSpec:
    """A decoder-only transformer, as far as memory and arithmetic go.

    Attributes:
        name: what it is called.
        layers: transformer layers, each with K/V of its own.
        query_heads, kv_heads: attention heads, and the K/V heads they share.
        head_dim, value_dim: width of a query or key head, and of a value head.
        hidden_size: width of the residual stream.
        parameters: all parameters, embeddings included.
        active_parameters: those a token uses: all but the experts it is not routed to.
        dtype: of the weights, as released.
        experts, experts_per_token: routed experts of a layer, and how many a token takes.
        expert_dtype: of the routed experts' weights, where it differs from `dtype`.
        windows: how many tokens each layer attends to at most; None: all.
        latent: under multi-head latent attention (MLA), the numbers a layer stores per token
            in place of the K/V heads: compressed K/V and rotary key. Otherwise 0.

    Raises:
        InputError: a count that is not positive or beyond any model, or counts that
            contradict one another.
    """

    name: str
    layers: int = _count(MOST_LAYERS)
    query_heads: int = _count(MOST_WIDTH)
    kv_heads: int = _count(MOST_WIDTH)
    head_dim: int = _count(MOST_WIDTH)
    value_dim: int = _count(MOST_WIDTH, default=_same_as("head_dim"))
    hidden_size: int = _count(MOST_WIDTH)
    parameters: int = _count(MOST_PARAMETERS)
    active_parameters: int = _count(MOST_PARAMETERS, default=_same_as("parameters"))
    dtype: str = "bf16"
    experts: int = 0
    experts_per_token: int = 0
    expert_dtype: str = attrs.field(default=_same_as("dtype"))
    windows: tuple[int | None, ...] = attrs.field(
        # Fields are checked after they are all made: bounded here as well.
        default=attrs.Factory(
            lambda self: (None,) * min(self.layers, MOST_LAYERS), takes_self=True
        ),
        repr=lambda windows: repr(dict(Counter(windows))),
    )
    latent: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse a model that contradicts itself."""
        problem = None
        if self.query_heads % self.kv_heads:
            problem = f"{self.query_heads} query heads cannot share {self.kv_heads} K/V heads"
        elif len(self.windows) != self.layers:
            problem = f"{len(self.windows)} attention windows for {self.layers} layers"
        elif any(window is not None and window < 1 for window in self.windows):
            problem = "an attention window must be at least 1 token"
        elif not 0 <= self.latent <= MOST_WIDTH:
            problem = f"latent must be 0 to {MOST_WIDTH:,}, not {self.latent}"
        elif self.experts > MOST_EXPERTS:
            problem = f"experts must be at most {MOST_EXPERTS:,}, not {self.experts}"
        elif not 0 <= self.experts_per_token <= self.experts:
            problem = f"a token cannot take {self.experts_per_token} of {self.experts} experts"
        elif self.active_parameters > self.parameters:
            problem = f"{self.active_parameters} of {self.parameters} parameters are active"
        elif self.active_parameters < self.parameters and not self.experts_per_token:
            problem = "only a model with experts has parameters that are not active"
        if problem:
            msg = f"model {self.name!r}: {problem}"
            raise InputError(msg)
        bytes_of(0, self.dtype)
        bytes_of(0, self.expert_dtype)

    @property
    def attention(self) -> str:
        """Name the way K/V is shared: `MHA`, `GQA`, `MQA` or `MLA`."""
        if self.latent:
            return "MLA"
        if self.kv_heads == self.query_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def kv_width(self) -> int:
        """Numbers a layer stores per token: K and V of every K/V head, or the latent."""
        return self.latent or self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts together; 0 for a dense model."""
        idle = self.experts - self.experts_per_token
        return (self.parameters - self.active_parameters) * self.experts // idle if idle else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all the weights."""
        return self._shared_bytes + bytes_of(self.expert_parameters, self.expert_dtype)

    @property
    def _shared_bytes(self) -> int:
        return bytes_of(self.parameters - self.expert_parameters, self.dtype)

    def weight_bytes_read(self, sequences: int) -> int:
        """Return the bytes of weights a decode step of `sequences` sequences reads.

        Experts are read once however many sequences take them; which ones, is taken to be
        uniform and independent, so a share of `1 - (1 - k/E) ** sequences` of them is read.
        """
        experts = bytes_of(self.expert_parameters, self.expert_dtype)
        if not experts:
            return self._shared_bytes
        # Past so many sequences less than a byte is left out: (1 - k/E)^n < exp(-nk/E).
        enough = experts.bit_length() * self.experts // self.experts_per_token
        if sequences > enough:
            return self._shared_bytes + experts
        idle: int = (self.experts - self.experts_per_token) ** sequences
        total: int = self.experts**sequences
        return self._shared_bytes + experts - experts * idle // total

    def with_weights(self, dtype: str) -> ModelSpec:
        """Return the model with all its weights in `dtype`."""
        return attrs.evolve(self, dtype=dtype, expert_dtype=dtype)

    def with_window(self, window: int) -> ModelSpec:
        """Return the model with no layer attending to more than `window` tokens."""
        windows = tuple(window if w is None else min(w, window) for w in self.windows)
        return attrs.evolve(self, windows=windows)


@attrs.frozen(kw_only=True)
class DeviceSpec:
    """A GPU, by its data sheet.

    Attributes:
        name: what it is called.
        hbm_bytes: memory.
        bandwidth: bytes/s between memory and the processors.
        flops: dense FLOP/s in fp16 or bf16 on the matrix units.
        host_link: bytes/s between host and device, one way.

    Raises:
        InputError: a figure that is not positive.
    """

    name: str
    hbm_bytes: int = _count()
    bandwidth: int = _count()
    flops: int = _count()
    host_link: int = _count()


@attrs.frozen
class KVLayout:
    """How a model's K/V is laid out in blocks, and what that takes.

    Scales of quantised K/V are not counted.

    Attributes:
        model: whose K/V.
        dtype: of a stored number, one of `KV_DTYPES`.
        block_size: tokens a block holds, in all layers.

    Raises:
        InputError: a dtype K/V is not kept in, or a block of no tokens.
    """

    model: ModelSpec
    dtype: str = attrs.field(default="fp16")
    block_size: int = _count(default=16)

    @dtype.validator
    def _known(self, _: object, value: str) -> None:
        if value not in KV_DTYPES:
            msg = f"K/V cannot be kept in {value!r}; known dtypes: {', '.join(KV_DTYPES)}"
            raise InputError(msg)

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one token in one layer."""
        return bytes_of(self.model.kv_width, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.bytes_per_layer * self.model.layers

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block: `block_size` tokens in all layers."""
        return self.bytes_per_token * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that `tokens` tokens occupy, the last perhaps in part."""
        return -(-tokens // self.block_size)

    def request_bytes(self, tokens: int) -> int:
        """Return the bytes a request of `tokens` tokens occupies, in whole blocks.

        A layer with a window keeps no more than the window, rounded up to blocks (a ring of
        blocks written round and round).
        """
        return sum(
            layers * self.bytes_per_layer * self.block_size * self.blocks_for(kept)
            for kept, layers in self._kept(tokens)
        )

    def read_bytes(self, tokens: int) -> int:
        """Return the bytes of K/V read to decode one token with `tokens` tokens of context."""
        return sum(layers * self.bytes_per_layer * kept for kept, layers in self._kept(tokens))

    def window_bytes(self, sequences: int, window: int) -> int:
        """Return the bytes of `sequences` sequences that each keep `window` tokens."""
        return sequences * window * self.bytes_per_token

    def blocks_in(self, budget: int) -> int:
        """Return how many blocks fit into `budget` bytes."""
        return max(0, budget) // self.bytes_per_block

    def requests_in(self, budget: int, tokens: int) -> int:
        """Return how many requests of `tokens` tokens (1 or more) fit into `budget` bytes."""
        return max(0, budget) // self.request_bytes(tokens)

    def _kept(self, tokens: int) -> list[tuple[int, int]]:
        """Return (tokens kept, number of layers that keep so many)."""
        kept = Counter(tokens if w is None else min(tokens, w) for w in self.model.windows)
        return list(kept.items())


def kv_budget(model: ModelSpec, device: DeviceSpec, reserve: int = 0) -> int:
    """Return the bytes left for K/V after the weights and `reserve` bytes.

    Negative when the weights do not fit: that much is missing.
    """
    return device.hbm_bytes - model.weight_bytes - reserve


def decode_step_bytes(layout: KVLayout, tokens: int, sequences: int = 1) -> int:
    """Return the bytes a decode step reads: weights once, and each sequence's own K/V.

    `tokens` is the context of each of the `sequences` sequences.
    """
    weights = layout.model.weight_bytes_read(sequences)
    return weights + sequences * layout.read_bytes(tokens)


def prefill_flop(model: ModelSpec, tokens: int, context: int = 0) -> int:
    """Return the FLOP to prefill `tokens` tokens after `context` cached ones.

    Two for each active parameter and token; and for each attended pair, layer and query
    head, two for each number of the key (scores) and of the value (weighted sum), which is
    `4 * layers * query_heads * head_dim` a pair. Source: the forward third of the count in
    appendix B of the PaLM report (Chowdhery et al. 2022), with causal pairs only.
    """
    attention = sum(
        flop * attended_pairs(context, tokens, window) for window, flop in pair_flop(model)
    )
    return 2 * model.active_parameters * tokens + attention


def pair_flop(model: ModelSpec) -> list[tuple[int | None, int]]:
    """Return (window, FLOP an attended pair costs in all layers of that window)."""
    flop = 2 * model.query_heads * (model.head_dim + model.value_dim)
    return [(window, flop * layers) for window, layers in Counter(model.windows).items()]


def token_projections(prompt: int, output: int, *, cached: bool) -> int:
    """Count how often a token is projected to keys and values to generate `output` tokens.

    Each step computes one token. Without a cache it projects the whole sequence so far;
    with one (`cached`) the first step projects the prompt, and every later one the token
    that the step before it computed. The last token is projected in neither case.

    Raises:
        InputError: no prompt token, or none to generate.
    """
    if prompt < 1 or output < 1:
        msg = f"{output} new tokens after a prompt of {prompt}: give at least 1 of each"
        raise InputError(msg)
    if cached:
        return prompt + output - 1
    return output * prompt + output * (output - 1) // 2


@attrs.frozen
class PrefillCost:
    """The least seconds it takes to prefill tokens: a floor set by the device's FLOP/s.

    Attributes:
        token_seconds: seconds a token costs by the model's parameters.
        pair_seconds: (window, seconds an attended pair costs in the layers with it).
        model, device: names, for the record.
    """

    token_seconds: float
    pair_seconds: tuple[tuple[int | None, float], ...] = ()
    model: str = ""
    device: str = ""

    @classmethod
    def of(cls, model: ModelSpec, device: DeviceSpec) -> PrefillCost:
        """Build the cost of prefilling `model` on `device`."""
        return cls(
            2 * model.active_parameters / device.flops,
            tuple((window, flop / device.flops) for window, flop in pair_flop(model)),
            model.name,
            device.name,
        )

    def __call__(self, context: int, tokens: int) -> float:
        """Return the seconds to prefill `tokens` tokens after `context` cached ones."""
        seconds = tokens * self.token_seconds
        for window, pair_seconds in self.pair_seconds:
            seconds += attended_pairs(context, tokens, window) * pair_seconds
        return seconds
