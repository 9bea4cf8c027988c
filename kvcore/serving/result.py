"""The result of a run."""

from __future__ import annotations

import attrs

from kvcore.cache import KVCache
from kvcore.policy import LatencyModel
from kvcore.serving.batching import Batching
from kvcore.serving.log import RunLog


@attrs.frozen
class Result:
    """What a run came to."""

    log: RunLog
    cache: KVCache
    batching: Batching
    latency: LatencyModel
