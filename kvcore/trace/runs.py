"""Blocks as runs: `(first, count)`, a negative count descending, in the one maximal form."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

Ids: TypeAlias = "array[int]"
Runs: TypeAlias = list[tuple[int, int]]

MOST_IDS = 2**31


_ascending: Ids = array("i")


def encode_runs(ids: Ids) -> Runs:
    """Return distinct `ids` as runs: 9, 8, 7, 3 is `[(9, -3), (3, 1)]`.

    From left to right every run is as long as it can be, so equal ids have equal runs.
    Costs O(ids), in C where they form a single run.
    """
    count = len(ids)
    if count < 2:  # noqa: PLR2004  (a run of one is the most frequent by far)
        return [(ids[0], 1)] if count else []
    first = last = ids[0]
    end = ids[-1]
    if end - first == count - 1 and ids == _from_to(first, end):
        return [(first, count)]
    if first - end == count - 1 and ids == _from_to(end, first)[::-1]:
        return [(first, -count)]
    runs: Runs = []
    add = runs.append
    step = 0
    for block in ids[1:]:
        delta = block - last
        if delta != step:
            if step:
                add((first, last - first + step))
                first = block
                step = 0
            elif delta == 1 or delta == -1:  # noqa: PLR1714  (hot)
                step = delta
            else:
                add((first, 1))
                first = block
        last = block
    add((first, last - first + step or 1))
    return runs


def decode_runs(runs: Sequence[Sequence[int]], limit: int = MOST_IDS) -> Ids:
    """Return the ids that `runs` stand for, each at least 0 and below `limit`.

    Raises:
        ValueError: a run is empty or leaves the range, or could have been longer.
    """
    ids: Ids = array("i")
    end = step = -1
    for first, count in runs:
        if not count or count == -1:
            msg = f"run [{first}, {count}]: a single block is [{first}, 1], and none is no run"
            raise ValueError(msg)
        gap = first - end
        if ids and (gap == step if step else abs(gap) == 1):
            msg = f"the run before [{first}, {count}] could be longer: runs are maximal"
            raise ValueError(msg)
        way = 1 if count > 0 else -1
        end = first + count - way
        if not (0 <= first < limit and 0 <= end < limit):
            msg = f"run [{first}, {count}] leaves the block ids, which are 0 to {limit - 1}"
            raise ValueError(msg)
        step = way if count != 1 else 0
        ids.extend(range(first, first + count, way))
    return ids


def _from_to(first: int, last: int) -> Ids:
    """Return the ids `first` to `last`: a slice of all ids, ten times faster than a range."""
    if last >= len(_ascending):
        _ascending.extend(range(len(_ascending), 2 * last + 1))
    return _ascending[first : last + 1]
