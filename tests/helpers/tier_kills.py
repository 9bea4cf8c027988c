"""A program that is killed while it writes into a disk tier.

Run it by `tier_kills.py HOW DIRECTORY`. HOW `all` kills a process before, amid and after each
call that writes, and prints the blocks that the next process recovers; `on` writes until it is
killed, and prints a line a round; `runs` kills a run on tensors at every second call, and
prints the outcome of the next run.
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

from kvcore_tiers.tier import Disk, disk

SLOTS = 8
SLOT = slot_bytes_of(SPEC, 4)
OPTIONS = {"blocks": 40, "max_seqs": 2}


def sessions():
    """Return requests of three users with three turns each, every turn longer than the last."""
    found = []
    for turn in range(3):
        for user in range(3):
            keys = [user * 1000 + index for index in range(10 * (turn + 1))]
            found.append(ask(len(found), 400 * len(found), 4 * len(keys), 9, keys=keys))
    return found


def tier(name, **options):
    """Return the text of a tier that is always used for loads."""
    options = {"memory": 400 * SLOT, "latency": 0, "load": "always"} | options
    return f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())


def disk_tier(path, **options):
    """Return the text of a disk tier in the directory `path`."""
    return tier("disk", path=path, **options)


def store(folder):
    """Return a context manager that opens the disk tier of a directory."""
    return closing(Disk(path=folder, memory=SLOTS * SIZE).open(SLOTS, SIZE, b"model"))


def die_at(call, part=0):
    """Kill this process at write call number `call`, after `part` halves of the data."""
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
    """Return True if a forked process that runs `work` is killed."""
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def write_over(folder, call, part):
    """Overwrite half of the slots, and die at a call."""
    with store(folder) as opened:
        die_at(call, part)
        write(opened, blocks([2, 3, 6, 7], text=1))
        opened.drop([0])


def killed_at(folder, call, part):
    """Return the blocks recovered after a kill at `call`; None if there is no such call."""
    with store(folder) as tier:
        write(tier, blocks(range(SLOTS)))
    if not is_killed(lambda: write_over(folder, call, part)):
        return None
    with store(folder) as tier:
        found = list(tier.recover())
        right = sum(read(tier, [block]) for block in found)
        return {"found": sorted(block.key for block in found), "right": right}


def run_killed_at(folder, call):
    """Return the outcome of the run after a kill; None if there is no such call."""

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
