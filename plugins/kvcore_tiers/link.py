"""The link of a tier, on which transfers take turns."""

from __future__ import annotations

from kvcore.units import NS_PER_S


class Link:
    """The link of a tier: it serves transfers one after another, in the order of the calls.

    A transfer holds the link for its bytes over the bandwidth of its direction, in whole
    nanoseconds, rounded up; its data can be used `latency` later.

    Attributes:
        free_at: the time (ns) at which all queued transfers have left the link.
        read_bytes, written_bytes: bytes of all transfers so far.
        busy_ns: time that these transfers hold the link.
    """

    __slots__ = (
        "_latency", "_read", "_write", "busy_ns", "free_at", "read_bytes", "written_bytes",
    )  # fmt: skip

    def __init__(self, read_bandwidth: int, write_bandwidth: int, latency: float) -> None:
        """Store the bandwidths in bytes a second, and the latency in seconds."""
        self._read, self._write = read_bandwidth, write_bandwidth
        self._latency = round(latency * NS_PER_S)
        self.free_at = self.read_bytes = self.written_bytes = self.busy_ns = 0

    def wait(self, now: int) -> int:
        """Return the ns that a transfer queued at `now` waits for its turn."""
        return max(0, self.free_at - now)

    def load_ns(self, size: int, now: int) -> int:
        """Return the ns that a load of `size` bytes takes from `now` on. Changes nothing."""
        return self.wait(now) - (-size * NS_PER_S // self._read) + self._latency

    def store_ns(self, size: int, now: int) -> int:
        """Return the ns that a write of `size` bytes takes from `now` on. Changes nothing."""
        return self.wait(now) - (-size * NS_PER_S // self._write) + self._latency

    def load(self, size: int, now: int) -> int:
        """Queue a load of `size` bytes; return the time (ns) from which its data is usable."""
        self.read_bytes += size
        return self._queue(-(-size * NS_PER_S // self._read), now)

    def store(self, size: int, now: int) -> int:
        """Queue a write of `size` bytes; return the time (ns) from which its data is usable."""
        self.written_bytes += size
        return self._queue(-(-size * NS_PER_S // self._write), now)

    def _queue(self, duration: int, now: int) -> int:
        self.busy_ns += duration
        self.free_at = max(self.free_at, now) + duration
        return self.free_at + self._latency


class InstantLink(Link):
    """A link whose transfers take no time, for replays without a clock. It counts bytes."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(1, 1, 0)

    def load_ns(self, size: int, now: int) -> int:
        """Return 0."""
        return 0

    def _queue(self, duration: int, now: int) -> int:
        return now
