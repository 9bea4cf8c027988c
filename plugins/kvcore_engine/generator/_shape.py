"""The shape of a generator's model, with the sizes that options replace."""

from __future__ import annotations

from itertools import cycle, islice

import attrs

from kvcore import InputError
from kvcore.models.catalogue import find_model
from kvcore.models.spec import MAX_LAYERS, ModelSpec


def resized(
    model: str | ModelSpec,
    *,
    layers: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    hidden: int | None = None,
) -> ModelSpec:
    """Return `model`, or the catalogue's model of that name, with other sizes.

    With `kv_heads` alone, as many query heads share one as before. More layers than the
    model has repeat its windows.

    Raises:
        InputError: the model is unknown, stores a latent in place of K/V heads, or has layers
            that keep different things; or the sizes contradict one another.
    """
    spec = find_model(model) if isinstance(model, str) else model
    if spec.caches:
        msg = (
            f"layers of model {spec.name!r} keep different things "
            f"({'; '.join(map(str, spec.caches))}): take one whose layers all keep K/V heads, "
            "such as 'llama-3.1-8b'"
        )
        raise InputError(msg)
    if spec.latent:
        msg = (
            f"model {spec.name!r} stores a latent (MLA), no K/V heads: take one with "
            "attention MHA, GQA or MQA, such as 'llama-3.1-8b'"
        )
        raise InputError(msg)
    if kv_heads is not None and heads is None:
        heads = kv_heads * (spec.query_heads // spec.kv_heads)
    layers = spec.layers if layers is None else layers
    return attrs.evolve(
        spec,
        layers=layers,
        query_heads=spec.query_heads if heads is None else heads,
        kv_heads=spec.kv_heads if kv_heads is None else kv_heads,
        head_dim=spec.head_dim if head_dim is None else head_dim,
        value_dim=spec.value_dim if head_dim is None else head_dim,
        hidden_size=spec.hidden_size if hidden is None else hidden,
        windows=tuple(islice(cycle(spec.windows), max(0, min(layers, MAX_LAYERS)))),
    )
