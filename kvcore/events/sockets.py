"""ZMQ addresses and sockets, and what there is to say where they cannot be had."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from kvcore.errors import InputError, PluginError

SEQUENCE_BYTES = 8
END = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""The number that says that a replay is over."""

_ADDRESS = re.compile(
    r"(tcp)://(?:[^\s:]+|\[[^\s\]]+\]):(\d+|\*)|(?:ipc|inproc)://\S+", re.ASCII
)
_HIGHEST_PORT = 65_535


def load_zmq() -> Any:
    """Import pyzmq. Raises PluginError if it is not installed."""
    try:
        return import_module("zmq")
    except ImportError as error:
        msg = f"KV events over a network need pyzmq ({error}): pip install 'kvcore[events]'"
        raise PluginError(msg) from error


def rank_address(address: str, rank: int) -> str:
    """Return the address of a data-parallel rank, as the engines derive it from rank 0's.

    The port of `tcp://host:port` grows by the rank; other addresses get `_dp` and the rank.

    Raises:
        InputError: not an address of ZMQ, or a port beyond 65535.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        msg = (
            f"address {address!r}: expected one such as tcp://127.0.0.1:5557 "
            "(or ipc://PATH, inproc://NAME)"
        )
        raise InputError(msg)
    if match[1] is None:
        return f"{address}_dp{rank}" if rank else address
    if match[2] == "*":
        if not rank:
            return address
        msg = f"address {address!r}: rank {rank} needs a port to count from"
        raise InputError(msg)
    port = int(match[2]) + rank
    if port > _HIGHEST_PORT:
        which = f"rank {rank} would have port {port}" if rank else f"there is no port {port}"
        msg = f"address {address!r}: {which}; the highest is {_HIGHEST_PORT}"
        raise InputError(msg)
    return f"{address[: match.start(2)]}{port}"


def host_address(address: str, rank: int) -> str:
    """Return the address of a rank to connect to: likewise, but it must name a host.

    Raises:
        InputError: as `rank_address`, or `*`, which only a server can listen at.
    """
    if address.startswith("tcp://*:"):
        port = address.removeprefix("tcp://*:")
        msg = f"address {address!r}: '*' is no host; name the server's: tcp://127.0.0.1:{port}"
        raise InputError(msg)
    return rank_address(address, rank)


@contextmanager
def using(address: str, what: str) -> Iterator[None]:
    """Turn a ZMQ error of the body, which would `what` the address, into an InputError."""
    try:
        yield
    except load_zmq().ZMQError as error:
        msg = f"cannot {what} {address}: {error.strerror or error}"
        raise InputError(msg) from error


def number(frame: bytes) -> int | None:
    """Read the frame that has a batch's number; None if it is no number of a batch."""
    if len(frame) != SEQUENCE_BYTES or frame[0] >= 0x80:  # noqa: PLR2004 - negative: END
        return None
    return int.from_bytes(frame, "big")
