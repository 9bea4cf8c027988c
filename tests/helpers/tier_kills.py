"""A program that is killed while it writes into a disk tier: `tier_kills.py HOW DIRECTORY`.

`all` kills a process at each call that writes, before, amid and after it, and prints what the
next process finds; `on` writes until it is killed, and prints a line a round; `runs` kills a
run on tensors at every few calls, and prints what the next run does.
"""

import json
import os
import signal
import sys
from contextlib import closing
from itertools import takewhile
from pathlib import Path

from helpers.engine import SPEC, compute, slot_bytes_of
from helpers.serving import ask
from helpers.tiers import SIZE, blocks, read, write

from kvcore_plugins.tier import Disk, disk

SLOTS = 8
SLOT = slot_bytes_of(SPEC, 4)
OPTIONS = {"blocks": 40, "max_seqs": 2}


def sessions():
    """Return requests of three users who come back twice with what they had said, and more."""
    found = []
    for turn in range(3):
        for user in range(3):
            keys = [user * 1000 + at for at in range(10 * (turn + 1))]
            found.append(ask(len(found), 400 * len(found), 4 * len(keys), 9, keys=keys))
    return found


def tier(name, **options):
    """Return a tier that is used whenever it can be."""
    options = {"memory": 400 * SLOT, "latency": 0, "load": "always"} | options
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())


def disk_tier(path, **options):
    """Return a disk tier in a directory."""
    return tier("disk", path=path, **options)


def store(folder):
    """Open the tier of a directory."""
    return closing(Disk(path=folder, memory=SLOTS * SIZE).open(SLOTS, SIZE, b"model"))


def die_at(call, part=0):
    """Let this process die at a call that writes, after `part` halves of it."""
    whole, calls = disk._write, 0

    def dying(file, data, at):
        nonlocal calls
        calls += 1
        if calls == call:
            whole(file, data[: len(data) * part // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
        whole(file, data, at)

    disk._write = dying


def is_killed(work):
    """Return whether a process of its own that does this work was killed."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def write_over(folder, call, part):
    """Write over half of the slots, and die amid."""
    with store(folder) as opened:
        die_at(call, part)
        write(opened, blocks([2, 3, 6, 7], text=1))
        opened.drop([0])


def killed_at(folder, call, part):
    """Return what is found after a kill there; None if there is no such call."""
    with store(folder) as tier:
        write(tier, blocks(range(SLOTS)))
    if not is_killed(lambda: write_over(folder, call, part)):
        return None
    with store(folder) as tier:
        found = list(tier.recover())
        right = sum(read(tier, [block]) for block in found)
        return {"found": sorted(block.key for block in found), "right": right}


def run_killed_at(folder, call):
    """Return what the next run does; None if there is no such call."""

    def work():
        die_at(call, call % 3)
        compute(sessions(), tiers=[disk_tier(folder, write="through")], **OPTIONS)

    if not is_killed(work):
        return None
    run = compute(sessions(), tiers=[disk_tier(folder)], **OPTIONS)
    (level,) = run.result.cache.tiers.levels
    stats = level.stats
    texts = [*map(list, run.result.outputs.values())]
    return {"texts": texts, "recovered": stats.recovered, "dropped": stats.dropped}


if __name__ == "__main__":
    how, root = sys.argv[1], Path(sys.argv[2])
    if how == "on":
        with store(root) as endless:
            for number in range(10**9):
                write(endless, blocks([number % 3, 4, 5], text=number))
                print(number, flush=True)  # noqa: T201
    results = []
    if how == "runs":
        numbers = range(1, 1000, 2)
        runs = (run_killed_at(root / str(number), number) for number in numbers)
        results = [*takewhile(bool, runs)]
    for number in range(1, 100 if how == "all" else 0):
        ends = [killed_at(root / f"{number}-{part}", number, part) for part in (0, 1, 2)]
        if None in ends:
            break
        results += ends
    print(json.dumps(results))  # noqa: T201
