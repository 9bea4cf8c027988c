"""A program that is killed while it writes into a disk tier: `tier_kills.py all|on DIRECTORY`.

`all` kills a process at each call that writes, before, amid and after it, and prints what the
next process finds; `on` writes until it is killed, and prints a line a round.
"""

import json
import os
import signal
import sys
from contextlib import closing
from pathlib import Path

from helpers.tiers import SIZE, blocks, read, write

from kvcore_plugins.tier import Disk, disk

SLOTS = 8


def store(folder):
    """Open the tier of a directory."""
    return closing(Disk(path=folder, memory=SLOTS * SIZE).open(SLOTS, SIZE, b"model"))


def write_until_killed(folder, call, part):
    """Write over half of the slots; die at a call that writes, after `part` halves of it."""
    whole, calls = disk._write, 0

    def dying(file, data, at):
        nonlocal calls
        calls += 1
        if calls == call:
            whole(file, data[: len(data) * part // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
        whole(file, data, at)

    with store(folder) as tier:
        disk._write = dying
        write(tier, blocks([2, 3, 6, 7], text=1))
        tier.drop([0])


def killed_at(folder, call, part):
    """Return what is found after a kill there; None if there is no such call."""
    with store(folder) as tier:
        write(tier, blocks(range(SLOTS)))
    child = os.fork()
    if not child:
        write_until_killed(folder, call, part)
        os._exit(0)
    if os.waitpid(child, 0)[1] != signal.SIGKILL:
        return None
    with store(folder) as tier:
        found = list(tier.recover())
        right = sum(read(tier, [block]) for block in found)
        return {"found": sorted(block.key for block in found), "right": right}


if __name__ == "__main__":
    how, root = sys.argv[1], Path(sys.argv[2])
    if how == "on":
        with store(root) as endless:
            for number in range(10**9):
                write(endless, blocks([number % 3, 4, 5], text=number))
                print(number, flush=True)  # noqa: T201
    results = []
    for number in range(1, 100):
        ends = [killed_at(root / f"{number}-{part}", number, part) for part in (0, 1, 2)]
        if None in ends:
            break
        results += ends
    print(json.dumps(results))  # noqa: T201
