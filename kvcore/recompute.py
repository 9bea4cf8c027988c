"""What it costs to compute a block again, as the header of a trace has it."""

from __future__ import annotations

from typing import Any

from kvcore.catalogue import DEVICES, MODELS, find_device, find_model
from kvcore.errors import InputError
from kvcore.model import PrefillCost

NAMES = ("model", "device")


def cost_fields(cost: PrefillCost) -> dict[str, Any]:
    """Return the names of model and device; with them the seconds, where these do not follow.

    They follow of a model and a device of the catalogue.
    """
    fields: dict[str, Any] = {name: getattr(cost, name) for name in NAMES}
    if cost.model in MODELS and cost.device in DEVICES and cost == read_cost(fields):
        return fields
    pairs = [list(pair) for pair in cost.pair_seconds]
    return fields | {"token_seconds": cost.token_seconds, "pair_seconds": pairs}


def read_cost(fields: Any) -> PrefillCost:
    """Return the cost that `cost_fields` wrote down.

    Raises:
        InputError: something else, or only names, of which the catalogue does not know one.
    """
    try:
        model, device = (fields[name] for name in NAMES)
        if "token_seconds" not in fields:
            return PrefillCost.of(find_model(model), find_device(device))
        pairs = tuple((window, float(seconds)) for window, seconds in fields["pair_seconds"])
        return PrefillCost(float(fields["token_seconds"]), pairs, model, device)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        msg = f"what it costs to compute a block again cannot be read from {fields!r:.80}"
        raise InputError(msg) from error
