"""Time from a model's and a device's data sheets: the slower of computing and reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil
from operator import mul
from typing import Any, ClassVar

import attrs

from kvcore import InputError, LatencyModel
from kvcore.models.catalogue import find_device, find_model
from kvcore.models.codec import Codec
from kvcore.models.cost import pair_flop
from kvcore.models.memory import KVLayout, kv_copies
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.serving import LinearPiece, StepWork, Windows
from kvcore.units import DECIMAL, PS_PER_S, format_bytes, picoseconds

SHIFT = 32
"""A pair may take less than a picosecond: work is summed in 2^-32 ps and shifted once."""


@attrs.define(slots=False, eq=False)
class Roofline(LatencyModel):
    """Compute or read, whichever takes longer, after a fixed overhead.

    Of `tensor_parallel` devices, each reaching a share of its data sheet, a step takes
    `overhead + max(compute, memory)`:

    - compute: 2 FLOP for each active parameter and token, and those of attention for each
      pair of tokens, over all FLOP/s;
    - memory: the weights once (of experts, those that so many tokens are expected to take),
      the K/V that decoding sequences attend to, and the K/V written, over all bandwidth.

    Layers with a sliding window count with what is in their window. Weights are divided by
    the devices; so are K/V heads, but there may be fewer of these than devices, and a
    latent (MLA) is not divided at all. Left out: the K/V that a prefill chunk reads of the
    context before it (its pairs take longer to compute), and the time that communication
    takes by volume (it is in the shares). Coefficients in the context are rounded to whole
    picoseconds, all others up to 2^-32 ps, and each line down to a picosecond.

    Options:
        model: a name of the catalogue; in code also a `ModelSpec`.
        device: likewise; in code also a `DeviceSpec`.
        tensor_parallel: devices that share the model.
        codec: of the K/V; in code also a `Codec`.
        block_size: tokens of a block, among which a codec may divide scales.
        compute: share of the FLOP/s that is reached. Training reached 0.38 to 0.43 on H100
            (Dubey et al., "The Llama 3 herd of models", 2024); a forward pass over large
            prefill chunks does somewhat better.
        bandwidth: share of the bandwidth that is reached.
        overhead: seconds a step takes besides: scheduling, launches, and the latency of two
            all-reduces a layer. From below 1 ms, where an engine prepares a step while the
            one before runs, to several: in 2024, vLLM v0.5.3 spent 29 % of its time on
            scheduling and 38 % on the GPU, with Llama 3 8B on an H100 (vLLM blog,
            2024-09-05).

    Source: Williams et al., "Roofline", CACM 2009; Pope et al., "Efficiently scaling
    transformer inference", MLSys 2023.
    """

    name: ClassVar[str] = "roofline"
    renamed_options: ClassVar[dict[str, str]] = {"kv_dtype": "codec"}
    fitted_times: ClassVar[tuple[str, ...]] = ("overhead",)
    fitted_shares: ClassVar[tuple[str, ...]] = ("compute", "bandwidth")

    model: str | ModelSpec = attrs.field(default="llama-3-8b")
    device: str | DeviceSpec = attrs.field(default="h100")
    tensor_parallel: int = attrs.field(default=4)
    codec: str | Codec = attrs.field(default="fp16")
    block_size: int = attrs.field(default=16)
    compute: float = attrs.field(default=0.5)
    bandwidth: float = attrs.field(default=0.8)
    overhead: float = attrs.field(default=0.002)

    def __attrs_post_init__(self) -> None:
        """Turn data sheets into coefficients."""
        model = find_model(self.model) if isinstance(self.model, str) else self.model
        device = find_device(self.device) if isinstance(self.device, str) else self.device
        self._names = model.name, device.name
        self._check(model, device)
        layout = KVLayout(model, self.codec, self.block_size)
        if isinstance(self.codec, str):
            self.codec = str(layout.codec)
        self._overhead = picoseconds(self.overhead, "roofline: overhead")

        flops = device.flops * self.tensor_parallel * Fraction(self.compute)
        flop_of = dict(pair_flop(model))
        self._windows = tuple(sorted(flop_of, key=lambda w: (w is not None, w or 0)))
        self._token = _fine(2 * model.active_parameters / flops)
        self._pairs = [_fine(flop_of[window] / flops) for window in self._windows]
        self._computed = tuple(_whole(flop_of[window] / flops) for window in self._windows)

        bandwidth = device.bandwidth * Fraction(self.bandwidth)
        kv_bandwidth = bandwidth * self.tensor_parallel / kv_copies(model, self.tensor_parallel)
        layers = Counter(model.windows)
        self._written = _fine(layout.bytes_per_layer * model.layers / kv_bandwidth)
        self._read = tuple(
            _whole(layout.bytes_per_layer * layers[window] / kv_bandwidth)
            for window in self._windows
        )
        byte = (PS_PER_S << SHIFT) / (bandwidth * self.tensor_parallel)
        over, under = byte.as_integer_ratio()
        # Raising integers to the power of the tokens, as experts ask for, takes its time.
        read = model.weight_bytes_read
        self._weights = lru_cache(4096)(lambda n: -(-read(n) * over // under))

    @property
    def windows(self) -> Windows:
        """The windows of the model's layers: none first, then the narrowest."""
        return self._windows

    def pieces(self, work: StepWork) -> Sequence[LinearPiece]:
        """Return the line of computing and the line of reading. Costs O(windows)."""
        tokens = work.prefill + work.decode
        if len(self._pairs) == 1:
            computing = self._token * tokens + self._pairs[0] * work.attended_pairs[0]
        else:
            computing = self._token * tokens + sum(map(mul, self._pairs, work.attended_pairs))
        traffic = self._weights(tokens) + self._written * tokens
        return (
            (self._overhead + (computing >> SHIFT), *self._computed),
            (self._overhead + (traffic >> SHIFT), *self._read),
        )

    def terms(self, works: Sequence[StepWork]) -> list[list[list[float]]]:
        """Return the seconds of computing and of reading at full rates, for a fit."""
        ideal = attrs.evolve(self, compute=1.0, bandwidth=1.0, overhead=0.0)
        found = []
        for work in works:
            computing, reading = (
                (a + sum(map(mul, slopes, work.context))) / PS_PER_S
                for a, *slopes in ideal.pieces(work)
            )
            found.append([[1.0, computing, 0.0], [1.0, 0.0, reading]])
        return found

    def coefficients(self) -> dict[str, Any]:
        """Return what a token, a pair and a step take on either line, in picoseconds."""
        model, device = self._names
        return {
            "model": model,
            "device": device,
            "windows": list(self._windows),
            "overhead_ps": self._overhead,
            "compute": {
                "token_ps": self._token / 2**SHIFT,
                "pair_ps": [pair / 2**SHIFT for pair in self._pairs],
                "context_ps": list(self._computed),
            },
            "memory": {
                "weights_ps": self._weights(1) / 2**SHIFT,
                "token_ps": self._written / 2**SHIFT,
                "context_ps": list(self._read),
            },
        }

    def for_model(self, model: ModelSpec | None, parameters: int = 0) -> Roofline:
        """Return the same server with another model, whose K/V is kept alike."""
        served = self.model if model is None else model
        spec = find_model(served) if isinstance(served, str) else served
        if parameters:
            more, active = spec.parameters + parameters, spec.active_parameters + parameters
            spec = attrs.evolve(spec, parameters=more, active_parameters=active)
        return attrs.evolve(self, model=spec)

    def _check(self, model: ModelSpec, device: DeviceSpec) -> None:
        """Refuse what no deployment can be like."""
        devices, problem = self.tensor_parallel, None
        if type(devices) is not int or devices < 1:
            problem = f"tensor_parallel={devices!r} must be a number of devices, 1 or more"
        elif not 0 < self.compute <= 1:
            problem = f"compute={self.compute} must be a share, above 0 and at most 1"
        elif not 0 < self.bandwidth <= 1:
            problem = f"bandwidth={self.bandwidth} must be a share, above 0 and at most 1"
        elif model.weight_bytes > devices * device.hbm_bytes:
            need = format_bytes(model.weight_bytes, DECIMAL)
            have = format_bytes(devices * device.hbm_bytes, DECIMAL)
            enough = -(-model.weight_bytes // device.hbm_bytes)
            problem = (
                f"the weights of {model.name} take {need}, more than the {have} of {devices} x "
                f"{device.name}; give tensor_parallel={enough} or more, a device with more "
                "memory, or a smaller model"
            )
        if problem:
            msg = f"roofline: {problem}"
            raise InputError(msg)


def _fine(seconds: Fraction) -> int:
    return ceil(seconds * (PS_PER_S << SHIFT))


def _whole(seconds: Fraction) -> int:
    return round(seconds * PS_PER_S)
