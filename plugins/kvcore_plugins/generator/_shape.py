"""The shape of a generator's model, with the sizes that options replace."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import cycle, islice

import attrs

from kvcore import Generator, InputError
from kvcore.engine.backend import TENSOR_DTYPES
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
        InputError: the model is unknown or stores a latent in place of K/V heads, or the
            sizes contradict one another.
    """
    spec = find_model(model) if isinstance(model, str) else model
    if spec.latent:
        msg = (
            f"model {spec.name!r} stores a latent (MLA), no K/V heads: take one with "
            "attention MHA, GQA or MQA, such as 'llama-3-8b'"
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


def without_torch() -> str | None:
    """Return that torch is needed, where there is none."""
    return None if find_spec("torch") else "needs torch: pip install 'kvcore[torch]'"


def checked_dtype(generator: Generator, dtype: str) -> str:
    """Return `dtype`.

    Raises:
        InputError: no tensor has this dtype.
    """
    if dtype not in TENSOR_DTYPES:
        known = ", ".join(TENSOR_DTYPES)
        msg = f"generator {generator.name!r} cannot compute in {dtype!r}; it can in: {known}"
        raise InputError(msg)
    return dtype
