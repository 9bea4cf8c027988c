"""The rules of the judge, and how a policy that breaks one is found.

contract        the kit of eviction policies fails, or a decision is none: a victim that is
pinned, has children, or is of another cache; an exception
deterministic   two runs decide differently, or one in which text has other hashes
future          its decisions depend on requests that have not come: it is queued requests
ahead, or decides otherwise if the stream goes on in another way
time, memory    it takes more than the limits
files, network, processes
it opens a file that is no module, a socket, or a process
"""

from __future__ import annotations

import inspect
import re
from itertools import islice

from kvcore import KVCache
from kvcore_judge.cells import Cell, EvictionDigest, run_cell
from kvcore_judge.entries import Entry
from kvcore_judge.protocol import Stream, read_stream
from kvcore_judge.sandbox import BrokenRuleError
from kvcore_replay.untimed import served

KIT_SEEDS = range(2)
"""Seeds of the kit's tests."""


def check_kit(entry: Entry) -> int:
    """Run the kit of eviction policies; return the number of its tests that passed.

    Raises:
        BrokenRuleError: a test failed.
    """
    import pytest  # noqa: PLC0415 - for the kit alone

    from kvcore_testing import EvictionPolicyTests  # noqa: PLC0415 - imports pytest

    class Kit(EvictionPolicyTests):
        machine_examples = 1
        eviction = entry.build

    passed = 0
    for name in filter(re.compile("test_").match, dir(Kit)):
        test = getattr(Kit, name)
        seeds = KIT_SEEDS if "seed" in inspect.signature(test).parameters else [None]
        for seed in seeds:
            try:
                test(Kit()) if seed is None else test(Kit(), seed)
            except pytest.skip.Exception:
                continue
            except Exception as error:
                where = "" if seed is None else f" with seed {seed}"
                what = f"{name}{where}: {inspect.getdoc(test)} {type(error).__name__}: {error}"
                raise BrokenRuleError(what, rule="contract") from error
            passed += 1
    return passed


def check_is_deterministic(cell: Cell) -> None:
    """Replay a cell twice.

    Raises:
        BrokenRuleError: the evictions differ.
    """
    once, again = run_cell(cell), run_cell(cell)
    if once.evictions != again.evictions:
        what = (
            f"on {cell.stream.name} in {once.blocks:,} blocks it evicted {once.evicted:,} "
            f"blocks, and run again {again.evicted:,}, in another order: nothing may depend on "
            "chance, addresses or the clock"
        )
        raise BrokenRuleError(what, rule="deterministic")


def check_hears_no_future(entry: Entry) -> None:
    """Check that it has no method that is called before a request is served.

    Raises:
        BrokenRuleError: it has one.
    """
    if entry.looks_ahead:
        what = "it defines on_queued(), by which it hears of requests before they are served"
        raise BrokenRuleError(what, rule="future")


def check_reads_no_future(entry: Entry, stream: Stream, share: int) -> None:
    """Replay the first half of a stream twice: with the second half to come, and without.

    Raises:
        BrokenRuleError: the evictions in that half differ.
    """
    read = read_stream(stream)
    half = len(read.requests) // 2
    digests = []
    for requests in (read.requests[:half], read.requests):
        policy = entry.build()
        cache = KVCache(read.pool(share), read.key_tokens, eviction=policy, accounting="keys")
        cache.tree.watcher = digest = EvictionDigest()
        for _ in islice(served(requests, cache), half):
            pass
        digests.append(digest.hexdigest())
    if digests[0] != digests[1]:
        what = f"its evictions on the first {half:,} of {stream.name} depend on later requests"
        raise BrokenRuleError(what, rule="future")
