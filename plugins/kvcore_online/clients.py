"""The workload of a server: what its clients will send."""

from __future__ import annotations

from kvcore.workloads import RequestList


class ClientWorkload(RequestList):
    """The requests that clients will send to a server, none of which is known in advance.

    Args:
        key_tokens: number of tokens of a key.
    """

    name = "clients"

    def __init__(self, key_tokens: int) -> None:
        super().__init__((), key_tokens)

    def options(self) -> dict[str, int]:
        """Return no options."""
        return {}
