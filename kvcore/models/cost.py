"""Roofline arithmetic: the FLOP of a prefill, and its seconds at least.

Bytes, tokens and FLOP are exact integers. Seconds are floats made by `+`, `*` and `/`
alone, hence the same on every machine. They are bounds set by the hardware, not
predictions: a real system is slower.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

import attrs

from kvcore.errors import InputError
from kvcore.models.spec import DeviceSpec, ModelSpec
from kvcore.record import Record


def default_prefill_cost() -> PrefillCost:
    """Return the cost of Llama 3.1 8B on one H100: the default where no model is given."""
    from kvcore.models.catalogue import find_device, find_model  # noqa: PLC0415 - a long table

    return PrefillCost.for_model(find_model("llama-3.1-8b"), find_device("h100"))


def attended_pairs(context: int, tokens: int, window: int | None = None) -> int:
    """Count the (query, key) pairs of `tokens` new tokens after `context` earlier ones.

    A token attends to itself and to those before it; with a `window`, to no more than the
    last `window` tokens, itself included.
    """
    return _pairs(context + tokens, window) - _pairs(context, window)


def _pairs(tokens: int, window: int | None) -> int:
    growing = tokens if window is None else min(tokens, window)
    return growing * (growing + 1) // 2 + (tokens - growing) * growing


def prefill_flop(model: ModelSpec, tokens: int, context: int = 0) -> int:
    """Return the FLOP to prefill `tokens` tokens after `context` cached ones.

    Two for each active parameter and token; and for each attended pair, layer and query
    head, two for each number of the key (scores) and of the value (weighted sum), which is
    `4 * layers * query_heads * head_dim` a pair where all layers attend to all tokens. Source:
    the forward third of the count in appendix B of the PaLM report (Chowdhery et al. 2022),
    with causal pairs only.
    """
    attention = sum(
        flop * attended_pairs(context, tokens, window) for window, flop in pair_flop(model)
    )
    return 2 * model.active_parameters * tokens + attention


def pair_flop(model: ModelSpec) -> list[tuple[int | None, int]]:
    """Return (window, FLOP an attended pair costs in all layers of that window).

    A state has a window of one token: each token updates it, whatever came before.
    """
    flop: dict[int | None, Fraction] = {}
    for cache in model.layer_caches:
        pairs = Fraction(cache.layers * cache.pair_flop * cache.each, cache.ratio)
        flop[cache.reach] = flop.get(cache.reach, Fraction(0)) + pairs
    return [(window, ceil(pairs)) for window, pairs in flop.items() if pairs]


@attrs.frozen(repr=False)
class PrefillCost(Record):
    """The least seconds it takes to prefill tokens: a floor set by the device's FLOP/s.

    Attributes:
        token_seconds: seconds a token costs by the model's parameters.
        pair_seconds: (window, seconds an attended pair costs in the layers with it).
        model, device: names of both, which traces record.
    """

    token_seconds: float
    pair_seconds: tuple[tuple[int | None, float], ...] = ()
    model: str = ""
    device: str = ""

    @classmethod
    def for_model(cls, model: ModelSpec, device: DeviceSpec) -> PrefillCost:
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


_NAMES = ("model", "device")


def cost_fields(cost: PrefillCost) -> dict[str, Any]:
    """Return a cost as JSON: the names of model and device, and the seconds if need be.

    Of a model and a device of the catalogue the seconds follow, and are left out.
    """
    from kvcore.models.catalogue import DEVICES, MODELS  # noqa: PLC0415 - a long table

    fields: dict[str, Any] = {name: getattr(cost, name) for name in _NAMES}
    if cost.model in MODELS and cost.device in DEVICES and cost == read_cost(fields):
        return fields
    pairs = [list(pair) for pair in cost.pair_seconds]
    return fields | {"token_seconds": cost.token_seconds, "pair_seconds": pairs}


def read_cost(fields: Any) -> PrefillCost:
    """Return the cost that `cost_fields` has written.

    Raises:
        InputError: the fields are something else, or names that the catalogue lacks.
    """
    from kvcore.models.catalogue import find_device, find_model  # noqa: PLC0415 - a long table

    reason = None
    try:
        model, device = (fields[name] for name in _NAMES)
        if "token_seconds" not in fields:
            return PrefillCost.for_model(find_model(model), find_device(device))
        from msgspec import convert  # noqa: PLC0415 - it takes a while to import

        cost = convert(fields, PrefillCost)
        numbers = [number or 0 for pair in fields["pair_seconds"] for number in pair]
        if min(numbers, default=0) >= 0 <= cost.token_seconds:
            return cost
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        reason = error
    msg = f"what it costs to compute a block again cannot be read from {fields!r:.80}"
    raise InputError(msg) from reason
