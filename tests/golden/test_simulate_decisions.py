"""The first 300 requests of the bundled trace, served: a change of decisions shows here."""

from __future__ import annotations

from itertools import islice

import pytest
from serving import serve

from kvcore import SLO
from kvcore_plugins.latency import Linear
from kvcore_plugins.scheduling import FCFS, SRPT, LeastSlack
from kvcore_plugins.workloads import Mooncake

SECOND = 10**9

GOLDEN = {
}
"""Steps, pauses, recomputations, hit and self-hit blocks, evicted blocks; means of TTFT and E2E
in ms, and the digest of the trace's lines."""
