"""The fields of HEADER that may hold any JSON: the types of what is read of them.

`kvcore.trace.events` keeps such a field as it is, since a what-if writes it again, and other
programs may have written more into it. What kvcore itself reads of it has these types in each
trace that it has written, so that verbs need not look.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, ValidationError
from msgspec.json import Decoder

from kvcore.trace.events import Count, PluginRecord, PoolSize

Scalar: TypeAlias = str | int | float | bool | None


class Part(Struct):
    """A model, or a device of `count` GPUs, of the catalogue or of a file."""

    name: str = ""
    codec: str | None = None
    kv_dtype: str | None = None
    weights_dtype: str | None = None
    count: PoolSize = 1


class Routing(Struct):
    """The view of the router of a cluster, and the replicas that fail, start and stop."""

    view: str = ""
    fail: list[str] = []
    autoscale: PluginRecord | None = None
    up: list[Count] = []
    disaggregate: str | None = None


class Served(Struct):
    """Model, device and limits that serve the requests of a run, or of a replica.

    A model or a device may be any other JSON.
    """

    model: Part | list[Any] | Scalar = None
    device: Part | list[Any] | Scalar = None
    batching: dict[str, Scalar] = {}
    routing: Routing | None = None
    replicas: Annotated[list[Served], Meta(min_length=1)] = []


_decode = Decoder(Served).decode


def served_fault(header: bytes) -> str | None:
    """Return which field of HEADER has a value of another type; None if none has."""
    try:
        _decode(header)
    except ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        return f"field {path[:-1]!r}: {reason[:1].lower()}{reason[1:]}"
    return None
