"""Step time from the data sheets of a model and a device, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from math import ceil
from operator import mul
from typing import Any, ClassVar, NamedTuple, TypeAlias, get_args

import attrs

from kvcore import InputError, LatencyModel
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.codec import Codec
from kvcore.models.cost import PrefillCost, pair_flop
from kvcore.models.memory import KVLayout, can_share, degree_problem, tensor_degrees
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.serving import LinearPiece, StepWork, Windows
from kvcore.serving.latency import StepTerms
from kvcore.units import DECIMAL, PS_PER_S, format_bytes, picoseconds
from kvcore_plugins.latency.engine_times import (
    EngineName,
    ExpertTimes,
    engine_times,
    known_name,
)

Rates: TypeAlias = Mapping[str, tuple[str, ...]]

SHIFT = 32
"""A pair may take less than a picosecond: work is summed in 2^-32 ps and shifted once."""

ACTIVATIONS = 6, 20
"""Numbers of activations that a layer writes and reads for each token, by hidden size: those
that every device keeps whole (norms, residuals), and those that devices share (the inner ones
of attention and of the feed-forward network)."""

ATTENTION = Fraction(4, 5)
"""The FLOP/s that attention reaches, as a share of those that products with weights reach."""

NARROW_PRODUCTS = Fraction(9, 10)
"""The share of its FLOP/s that a product in fp8 or fp4 reaches, over that of one in 16 bits."""

NARROW_ACTIVATIONS = 4
"""Additional `ACTIVATIONS` of the first kind for products in fp8 or fp4: they are quantised."""

NARROW_LAYER = Fraction(14, 10**6)
"""Additional seconds of a layer with products in fp8 or fp4: kernels that quantise."""

NARROW_KV = Fraction(17, 20)
"""The bandwidth that reading K/V of less than 16 bits reaches, as a share of that of reading
K/V of 16 bits."""

LINK = Fraction(3, 5)
"""Share of the links' bytes/s that an all-reduce reaches."""

HOP = Fraction(3, 10**6)
"""Seconds that an all-reduce takes at least, by links of the devices' own or by one hop through
the host."""

REDUCTIONS = 2
"""All-reduces a layer: after attention, and after the feed-forward network."""

RATES: Rates = {"fp8": ("fp8_flops",), "nvfp4": ("fp4_flops",)}
"""FLOP/s of a device with which products are computed, by the format of weights: the first that
it has. Else, and with any other format, weights are widened, and computed with in 16 bits."""

EXPERT_RATES: Rates = {
    **dict.fromkeys(("fp8", "int4"), ("fp8_flops",)),
    **dict.fromkeys(("mxfp4", "nvfp4"), ("fp4_flops", "fp8_flops")),
}
"""The same for products of routed experts."""


class _Experts(NamedTuple):
    """The work of routed experts, in 2^-32 ps.

    Attributes:
        product: a token in their products.
        weights: returns what reading those takes that a number of tokens selects.
        routed: routing a token.
        layers: seconds of their layers in each step, whatever its tokens.
    """

    product: int
    weights: Callable[[int], int]
    routed: int
    layers: Fraction

    def of_tokens(self, tokens: int) -> int:
        """Return the work of products of so many tokens."""
        return max(self.product * tokens, self.weights(tokens))

    def convex(self, prefill: int, decode: int, tokens: int, sequences: int) -> int:
        """Return a convex bound below `of_tokens`, at `prefill` + `decode` tokens.

        No step holds more than `tokens`, of them `sequences` that decode. The weights read are
        concave in the tokens, so above both planes through their values at no tokens, at
        `tokens`, and at `sequences` that decode alone, or beside as many as fit.
        """
        full, several = self.weights(tokens), self.weights(sequences)
        planes = [(prefill + decode) * full // tokens]
        if sequences < tokens:
            more = prefill * (full - several) // (tokens - sequences)
            planes.append(decode * several // sequences + more)
        return max(self.product * (prefill + decode), *planes)


class _Kernels(NamedTuple):
    """The work of all kernels but attention, in 2^-32 ps.

    Attributes:
        product: a token in products with weights.
        weights: reading the weights once.
        experts: the routed experts.
        moved: a token in activations.
        reduced: a token in all-reduces.
        floor: what a step takes whatever its tokens, beside the host and launches.
    """

    product: int
    weights: int
    experts: _Experts
    moved: int
    reduced: int
    floor: int

    def of_tokens(self, tokens: int) -> int:
        """Return the work of a step with so many tokens."""
        experts = self.experts
        return (
            max(self.product * tokens, self.weights)
            + experts.of_tokens(tokens)
            + (self.moved + self.reduced + experts.routed) * tokens
            + self.floor
        )


@attrs.define(slots=False, eq=False)
class Roofline(LatencyModel):
    """Kernels one after the other, each as long as computing or as reading takes.

    Of `tensor_parallel` devices, each reaching a share of its data sheet, a step takes
    `host + layers x layer_overhead + products + attention + activations + all-reduces`:

    - host: `overhead`; of an `engine`, its constant a step, and a term for each sequence;
    - products with weights: 2 FLOP for each active parameter and token over all FLOP/s, or
      reading the weights once, whichever takes longer;
    - products of routed experts: the same by themselves, with those experts read that the
      tokens are expected to select, and at the rates that small products reach; and for each
      layer the time to route tokens, by their number and by that of devices;
    - attention: the FLOP of the pairs that prompt tokens attend to; the K/V that decoding
      sequences attend to, and the K/V written, over all bandwidth;
    - activations: the bytes that norms and element-wise kernels write and read for each token;
    - all-reduces: two a layer over the links of the devices, as a ring.

    Layers with a sliding window count the tokens in their window, layers with a recurrent state
    read and write it for each sequence (a window of one token). Weights are divided among
    the devices; so are K/V heads, but there may be fewer of these than devices, and a
    latent (MLA) is not divided at all. Left out: the K/V that a prefill chunk reads of the
    context before it (its pairs take longer to compute). Coefficients in the context are
    rounded to whole picoseconds, all others up to 2^-32 ps, and each sum down to a
    picosecond.

    Shares, the overhead of a layer and the constants of this module are fitted, once for all
    systems, to the step times of AIConfigurator 0.12 and to measured servers; see
    `docs/explanation/fidelity.md`.

    Options:
        model: a name of the catalogue; in code also a `ModelSpec`.
        device: a name of the catalogue; in code also a `DeviceSpec`.
        tensor_parallel: devices that share the model, all in one server.
        codec: the codec of the K/V; in code also a `Codec`.
        block_size: tokens of a block, for which a codec may store common scales.
        compute: share of the FLOP/s that products of large matrices reach.
        bandwidth: share of the bandwidth that is reached.
        overhead: additional seconds of a step, whatever the model: several milliseconds if an
            engine does not prepare a step while the one before runs.
        layer_overhead: additional seconds of a layer: launches, and kernels too small to be
            bound by compute or bandwidth.
        frontend: seconds between the arrival of a request and when it can be planned.
        engine: `vllm`, `trtllm` or `sglang`: adds what measured servers of the engine take
            beside these kernels. None: nothing for the host, and medians for experts.
        attended: tokens that a decoding token attends to in layers without a window, chosen by
            their relevance (sparse attention); 0: all of them.
        selection: bytes read of each token of the context to choose them, as a share of its
            K/V: 1/16 for the bounds of keys in pages of 16 tokens, as in Quest; 132 bytes of
            those of a latent for the indexer of DeepSeek V3.2.
        dense_layers: number of first layers in which a decoding token attends to all tokens.
        missed: share of the attended tokens whose K/V are in the memory of the host, and are
            moved in each step, as by the hierarchical sparse attention of SGLang.

    Devices are those of one server: nothing slower than `link` between them is in the model, so
    more than `DeviceSpec.server_size` of them are refused.

    Source: Williams et al., "Roofline", CACM 2009; Pope et al., "Efficiently scaling
    transformer inference", MLSys 2023; Tang et al., "Quest", ICML 2024.
    """

    name: ClassVar[str] = "roofline"
    renamed_options: ClassVar[dict[str, str]] = {"kv_dtype": "codec"}
    later_options: ClassVar[tuple[str, ...]] = (
        *("engine", "attended", "selection", "missed", "dense_layers"),
    )
    fitted_times: ClassVar[tuple[str, ...]] = ("layer_overhead",)
    fitted_shares: ClassVar[tuple[str, ...]] = ("compute", "bandwidth")

    model: str | ModelSpec = attrs.field(default="llama-3.1-8b")
    device: str | DeviceSpec = attrs.field(default="h100")
    tensor_parallel: int = attrs.field(default=4)
    codec: str | Codec = attrs.field(default="fp16")
    block_size: int = attrs.field(default=16)
    compute: float = attrs.field(default=0.8)
    bandwidth: float = attrs.field(default=0.85)
    overhead: float = attrs.field(default=0.0)
    layer_overhead: float = attrs.field(default=4.5e-5)
    frontend: float = attrs.field(default=0.0)
    engine: EngineName | None = attrs.field(default=None)
    attended: int = attrs.field(default=0)
    selection: float = attrs.field(default=0.0)
    missed: float = attrs.field(default=0.0)
    dense_layers: int = attrs.field(default=0)

    def __attrs_post_init__(self) -> None:
        """Convert data sheets to coefficients."""
        model = find_model(self.model) if isinstance(self.model, str) else self.model
        device = find_device(self.device) if isinstance(self.device, str) else self.device
        self._check(model, device)
        layout = KVLayout(model, self.codec, self.block_size)
        if isinstance(self.codec, str):
            self.codec = str(layout.codec)
        self._names, self._layers = (model.name, device.name), model.layers
        devices = self.tensor_parallel
        fp4 = device.fp4_flops > 0
        # Without units for a format weights alone are in it, and with MXFP4 those of experts.
        narrow = _narrow(device, RATES.get(model.dtype, ()))
        quantised = bool(narrow) or (fp4 and model.expert_dtype == "nvfp4")
        times = engine_times(
            self.engine, known_name(device.name), model.expert_dtype if fp4 else ""
        )
        overhead = picoseconds(self.overhead, "roofline: overhead")
        launches = picoseconds(self.layer_overhead, "roofline: layer_overhead")
        picoseconds(self.frontend, "roofline: frontend")
        self._host = overhead + picoseconds(times.step, "step")
        self._overhead = self._host + launches * model.layers
        self._sequence = _fine(Fraction(times.sequence))

        flops = device.flops * devices * Fraction(self.compute)
        peak = _peak(device, RATES.get(model.dtype, ())) * devices
        products = peak * Fraction(self.compute) * Fraction(times.compute)
        bandwidth = device.bandwidth * Fraction(self.bandwidth)
        routed = _routed(model)
        memory = (PS_PER_S << SHIFT) / (bandwidth * devices)
        experts = self._experts(model, device, times.experts, routed, memory)

        flop_of, reads = dict(pair_flop(model)), layout.reads(devices)
        self._windows = tuple(sorted(reads, key=lambda w: (w is not None, w or 0)))
        flop = [flop_of.get(window, 0) / (flops * ATTENTION) for window in self._windows]
        self._pairs = [_fine(seconds) for seconds in flop]
        wide = KVLayout(model, "fp16", self.block_size)
        slower = NARROW_KV if layout.token_bytes() < wide.token_bytes() else 1
        kv_bandwidth = bandwidth * slower * devices
        self._read = tuple(
            max(_whole(reads[window] / kv_bandwidth), _whole(seconds))
            for window, seconds in zip(self._windows, flop, strict=True)
        )
        if self.attended:
            reading = reads[None] / kv_bandwidth
            moving = reading * bandwidth * slower / device.host_link
            dense = Fraction(
                model.windows[: self.dense_layers].count(None), model.windows.count(None)
            )
            self._attend_sparsely(reading, moving, dense)
        whole = ACTIVATIONS[0] + NARROW_ACTIVATIONS * quantised
        numbers = whole + Fraction(ACTIVATIONS[1], devices)
        hidden = 2 * model.hidden_size * model.layers
        written = layout.token_bytes(devices) / kv_bandwidth

        reductions = REDUCTIONS * (devices > 1)
        link, hops = (device.link, 1) if device.link else (device.host_link, devices - 1)
        # Through the host, all but two devices share one path.
        shared = devices if hops > 1 else 1
        sent = Fraction(2 * (devices - 1), devices) * hidden * shared
        kernels = model.layers * (reductions * hops * HOP + quantised * NARROW_LAYER)
        self._kernels = _Kernels(
            product=_fine(2 * (model.active_parameters - routed) / products),
            weights=ceil(model.shared_bytes * memory),
            experts=experts,
            moved=_fine(written + numbers * hidden / bandwidth),
            reduced=_fine(reductions * sent / (link * LINK)),
            floor=_fine(kernels + experts.layers),
        )
        # All but overhead and attention follows from the tokens, and full steps have as many.
        self._by_tokens = lru_cache(4096)(self._kernels.of_tokens)

    def _attend_sparsely(self, reading: Fraction, moving: Fraction, dense: Fraction) -> None:
        """Let decoding tokens attend to `attended` tokens, where they attended to all.

        To them counts what a window of as many tokens counts. Prompt tokens attend to all, and
        so do all tokens in a share `dense` of the layers. Reading the K/V of a token takes
        `reading` seconds, moving them from the host `moving`.
        """
        pairs = dict(zip(self._windows, self._pairs, strict=True))
        reads = dict(zip(self._windows, self._read, strict=True))
        sparse = 1 - dense
        whole = reads[None] + _whole(moving * Fraction(self.missed))
        reads[self.attended] = reads.get(self.attended, 0) + round(whole * sparse)
        reads[None] = round(reads[None] * dense) + _whole(
            reading * sparse * Fraction(self.selection)
        )
        self._windows = tuple(sorted(reads, key=lambda w: (w is not None, w or 0)))
        self._pairs = [pairs.get(window, 0) for window in self._windows]
        self._read = tuple(reads[window] for window in self._windows)

    def _experts(
        self,
        model: ModelSpec,
        device: DeviceSpec,
        times: ExpertTimes,
        parameters: Fraction,
        memory: Fraction,
    ) -> _Experts:
        """Return the work of routed experts.

        A token takes `parameters` of them; a byte of other weights is read in `memory`.
        """
        peak = _peak(device, EXPERT_RATES.get(model.expert_dtype, ()))
        flops = peak * Fraction(self.compute) * Fraction(times.compute)
        over, under = (memory / Fraction(times.bandwidth)).as_integer_ratio()
        # Raising integers to the power of the tokens, as experts ask for, takes its time.
        read, others = model.weight_bytes_read, model.shared_bytes
        layers = model.layers * (model.experts > 0)
        return _Experts(
            product=_fine(2 * parameters / (flops * self.tensor_parallel)),
            weights=lru_cache(64)(lambda n: -(-(read(n) - others) * over // under)),
            routed=_fine(layers * Fraction(times.token)),
            layers=layers * Fraction(times.layer + times.device * (self.tensor_parallel - 1)),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it by its options, from which the coefficients follow."""
        return partial(type(self), **attrs.asdict(self, recurse=False)), ()

    @property
    def windows(self) -> Windows:
        """The windows of the model's layers: none first, then the narrowest."""
        return self._windows

    def pieces(self, work: StepWork) -> Sequence[LinearPiece]:
        """Return the only line of the step. Costs O(windows)."""
        fine = self._by_tokens(work.prefill + work.decode) + self._sequence * work.decode
        if len(self._read) == 1:
            fine += self._pairs[0] * work.attended_pairs[0]
            return ((self._overhead + (fine >> SHIFT), self._read[0]),)
        fine += sum(map(mul, self._pairs, work.attended_pairs))
        return ((self._overhead + (fine >> SHIFT), *self._read),)

    def convex_duration(self, work: StepWork, tokens: int, sequences: int) -> int:
        """Return the picoseconds that `work` takes at least, convex in what it holds.

        Only the weights of experts that a step reads are not: in steps of at most `tokens`
        tokens, of them `sequences` of decoding sequences, they are at least those counted here.
        """
        experts, prefill, decode = self._kernels.experts, work.prefill, work.decode
        bound = experts.convex(prefill, decode, tokens, sequences)
        above = experts.of_tokens(prefill + decode) - bound
        return self.duration(work) - -(-above >> SHIFT)

    def terms_of_step(self) -> StepTerms | None:
        """Return the terms of `pieces`, where there is one attention window."""
        if len(self._read) > 1:
            return None
        return StepTerms(
            self._overhead, self._by_tokens, self._sequence, self._pairs[0], self._read[0]
        )

    def terms(self, works: Sequence[StepWork]) -> list[list[list[float]]]:
        """Return the seconds of overhead, computing and reading at full rates, for a fit."""
        kernels, experts = self._kernels, self._kernels.experts
        terms = []
        for work in works:
            tokens = work.prefill + work.decode
            pairs = sum(map(mul, self._pairs, work.attended_pairs))
            read = sum(map(mul, self._read, work.context)) << SHIFT
            attention = _seconds(pairs) * self.compute
            moved = _seconds(kernels.moved * tokens + read) * self.bandwidth
            shared = (0.0, _seconds(kernels.product * tokens)), (_seconds(kernels.weights), 0.0)
            routed = (
                (0.0, _seconds(experts.product * tokens)),
                (_seconds(experts.weights(tokens)), 0.0),
            )
            terms.append(
                [
                    [
                        self._layers,
                        attention + (read_bytes + other) * self.compute,
                        moved + (read + more) * self.bandwidth,
                    ]
                    for read, read_bytes in shared
                    for more, other in (routed if experts.product else routed[:1])
                ]
            )
        return terms

    def fixed(self, works: Sequence[StepWork]) -> list[float]:
        """Return the seconds that no fitted option changes: host, routing, all-reduces."""
        kernels = self._kernels
        token = kernels.reduced + kernels.experts.routed
        constant = (self._host << SHIFT) + kernels.floor
        return [
            _seconds(
                constant + token * (work.prefill + work.decode) + self._sequence * work.decode
            )
            for work in works
        ]

    def coefficients(self) -> dict[str, Any]:
        """Return the picoseconds of a token, a pair and a step in each kernel."""
        (model, device), kernels, experts = self._names, self._kernels, self._kernels.experts
        of_some: dict[str, Any] = {}
        if experts.product:
            of_some["experts"] = {
                "token_ps": experts.product / 2**SHIFT,
                "weights_ps": experts.weights(1) / 2**SHIFT,
                "routed_ps": experts.routed / 2**SHIFT,
            }
        if self._sequence:
            of_some["sequence_ps"] = self._sequence / 2**SHIFT
        return {
            "model": model,
            "device": device,
            "windows": list(self._windows),
            "overhead_ps": self._overhead,
            "products": {
                "token_ps": kernels.product / 2**SHIFT,
                "weights_ps": kernels.weights / 2**SHIFT,
            },
            **of_some,
            "attention": {
                "pair_ps": [pair / 2**SHIFT for pair in self._pairs],
                "context_ps": list(self._read),
            },
            "activations": {"token_ps": kernels.moved / 2**SHIFT},
            "all_reduces": {"token_ps": kernels.reduced / 2**SHIFT},
            "fixed_ps": kernels.floor / 2**SHIFT,
        }

    def for_model(self, model: ModelSpec | None, parameters: int = 0) -> Roofline:
        """Return the same server with another model that has the same K/V layout.

        A model that the devices cannot share lies on one of them, as draft models of vLLM may.
        """
        served = self.model if model is None else model
        spec = find_model(served) if isinstance(served, str) else served
        devices = self.tensor_parallel if can_share(spec, self.tensor_parallel) else 1
        if parameters:
            more, active = spec.parameters + parameters, spec.active_parameters + parameters
            spec = attrs.evolve(spec, parameters=more, active_parameters=active)
        dense = min(self.dense_layers, spec.layers)
        return attrs.evolve(self, model=spec, tensor_parallel=devices, dense_layers=dense)

    def _check(self, model: ModelSpec, device: DeviceSpec) -> None:
        """Raise InputError if no deployment can have these options."""
        devices = self.tensor_parallel
        if type(devices) is not int or devices < 1:
            problem = f"tensor_parallel={devices!r} must be a number of devices, 1 or more"
        elif not 0 < self.compute <= 1:
            problem = f"compute={self.compute} must be a share, above 0 and at most 1"
        elif not 0 < self.bandwidth <= 1:
            problem = f"bandwidth={self.bandwidth} must be a share, above 0 and at most 1"
        elif model.weight_bytes > devices * device.hbm_bytes:
            need = format_bytes(model.weight_bytes, DECIMAL)
            have = format_bytes(devices * device.hbm_bytes, DECIMAL)
            enough = tensor_degrees(model, -(-model.weight_bytes // device.hbm_bytes))
            fits = enough and enough[0] <= device.server_size
            more = f"tensor_parallel={enough[0]} or more, " if fits else ""
            problem = (
                f"the weights of {model.name} take {need}, more than the {have} of {devices} x "
                f"{device.name}; give {more}a device with more memory, or a smaller model"
            )
        elif devices > device.server_size:
            problem = (
                f"tensor_parallel={devices}: a server has {device.server_size} x {device.name}"
                ", and links between servers are not in the model; give fewer devices, or "
                "other step times, such as --latency linear"
            )
        else:
            problem = degree_problem(model, devices)
        if problem := problem or self._option_problem(model):
            msg = f"roofline: {problem}"
            raise InputError(msg)

    def _option_problem(self, model: ModelSpec) -> str:
        """Return what is wrong with the engine or the sparse attention; "" if nothing is."""
        if self.engine not in (None, *get_args(EngineName)):
            return f"engine={self.engine!r} must be one of {', '.join(get_args(EngineName))}"
        if type(self.attended) is not int or self.attended < 0:
            return f"attended={self.attended!r} must be a number of tokens; 0 stands for all"
        for name in ("selection", "missed", "dense_layers"):
            value = getattr(self, name)
            greatest = model.layers if name == "dense_layers" else 1
            if not 0 <= value <= greatest:
                return f"{name}={value} must be from 0 to {greatest}"
            if value and not self.attended:
                return f"{name}={value} needs attended=TOKENS, of sparse attention"
        if self.attended and not attends_to_all(model):
            return f"attended={self.attended}: each layer of {model.name} attends to a part"
        return ""


def attends_to_all(model: ModelSpec) -> bool:
    """Return whether attention reads K/V of all tokens in some layers; keys to choose aside."""
    return any(cache.reach is None and cache.kind != "index" for cache in model.layer_caches)


def least_prefill(model: ModelSpec, device: DeviceSpec) -> PrefillCost:
    """Return what a prefill takes at least, with products in the formats of the weights.

    All FLOP/s of the data sheet are reached, and nothing but FLOP takes time.
    """
    routed = _routed(model)
    rates = RATES.get(model.dtype, ()), EXPERT_RATES.get(model.expert_dtype, ())
    work = 2 * (model.active_parameters - routed), 2 * routed
    seconds = sum(
        flop / (_narrow(device, names) or device.flops)
        for flop, names in zip(work, rates, strict=True)
    )
    return attrs.evolve(PrefillCost.for_model(model, device), token_seconds=float(seconds))


def _routed(model: ModelSpec) -> Fraction:
    """Return the parameters of routed experts that a token takes."""
    return Fraction(model.expert_parameters * model.experts_per_token, model.experts or 1)


def _narrow(device: DeviceSpec, rates: Iterable[str]) -> int:
    """Return the first of these FLOP/s that a device has; 0: it has none of them."""
    return next((flops for name in rates if (flops := getattr(device, name))), 0)


def _peak(device: DeviceSpec, rates: Iterable[str]) -> Fraction | int:
    """Return the FLOP/s of products at the first of these rates that a device has, if any."""
    return _narrow(device, rates) * NARROW_PRODUCTS or device.flops


def _fine(seconds: Fraction) -> int:
    return ceil(seconds * (PS_PER_S << SHIFT))


def _seconds(fine: int) -> float:
    return fine / (PS_PER_S << SHIFT)


def _whole(seconds: Fraction) -> int:
    return round(seconds * PS_PER_S)
