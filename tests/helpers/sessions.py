"""Synthetic sessions of coding agents in the format of WEKA, for benchmarks.

Their shape is that of 40 recorded ones: a session has 75 turns, each of which sends the 1,900
keys of 64 tokens that it has by then again, with some sixty new ones; at times an agent drops
most of its context.
"""

import gzip
from random import Random

TURNS = 75


def write_sessions(path, sessions, seed=0):
    """Write `sessions` sessions to a gzip file; return the number of references to keys.

    A session is 135,000 references to some 5,000 keys, and its line 700 kB.
    """
    random, references = Random(seed), 0
    with gzip.open(path, "wb", compresslevel=1) as file:
        for name in range(sessions):
            turns, keys, last = [], [], 0
            for index in range(TURNS):
                if random.random() < 0.03:
                    keys = keys[: random.randint(0, len(keys) // 2)]
                new = random.randint(15, 115) if index else random.randint(200, 900)
                keys = [*keys, *map(str, range(last + 1, last + new + 1))]
                last += new
                references += len(keys)
                turns.append(
                    f'{{"t":{index * 30.5},"type":"n","model":"m","in":{64 * len(keys) + 9},'
                    f'"out":200,"hash_ids":[{",".join(keys)}],"api_time":6.25,"stop":"tool_use"}}'
                )
            head = f'{{"id":"s{name}","block_size":64,"hash_id_scope":"local","requests":['
            file.write(f"{head}{','.join(turns)}]}}\n".encode())
    return references
