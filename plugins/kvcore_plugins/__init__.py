"""The built-in plugins that need no package but the core: a folder for each kind.

They come in by the hooks that any distribution uses. A plugin is a file, and a line in
`hooks.py` of this package. To read: the contract of a kind, in the core, then a simple plugin::

    eviction/    cached blocks that leave the pool   kvcore/cache/eviction.py     lru.py
    prefix/      where cached blocks are looked up   kvcore/cache/prefix.py       radix.py
    retention/   tokens of a sequence that stay      kvcore/cache/retention.py    full.py
    scheduler/   jobs that run next                  kvcore/serving/scheduler.py  fcfs.py
    latency/     how long a step takes               kvcore/serving/latency.py    linear.py
    checkpoint/  where states of a text are kept     kvcore/cache/checkpoint.py   intervals.py
    drafter/     drafts, and how many are accepted   kvcore/serving/drafter.py    acceptance.py
    codec/       numbers of K/V as bytes of a block  kvcore/models/codec.py       plain.py
    workload/    requests: log formats, generators   kvcore/workloads/base.py     jsonl.py
    rules/       decisions by which engines differ   kvcore/serving/rules.py      vllm.py
    cache_groups/  no kind: one pool of hybrid models   kvcore/cache/served.py   plan.py
    layer_pools/   no kind: several pools of these      kvcore/cache/served.py   sizes.py
    models/      no kind: models of a config.json    kvcore/models/spec.py        huggingface.py
    traces/      no kind: traces read back           kvcore/trace/events.py       reader.py
    load.py      no kind: was a server too slow?     kvcore/serving/result.py
    bounds.py    no kind: options that have bounds
    csv_rows.py  no kind: rows of CSV, each a line
    host.py      no kind: CPUs and memory that this process may use
"""

import kvcore  # noqa: F401 - it finds modules by their former names
