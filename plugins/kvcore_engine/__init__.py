"""The engine: runs that compute K/V as tensors, and benchmarks of this machine.

It adds the verbs `run` and `bench`, the call `kvcore.run`, backends and generators (contracts:
`kvcore/engine`), and the drafters and retention policies that see tokens. The serving loop is
that of the core, with an executor that computes steps. To read, in this order::

    options.py      the options of a run on tensors
    config.py       its parts from these: generator, backend, prompts, pool
    engine.py       serves a workload: the loop, its executor, the result
    executor.py     a step of the loop as a batch for generator and backend
    graphs.py       decode steps that are captured once, and replayed
    groups.py       the executor of windows and states: a block table a group
    tokens.py       the token ids of a request: of its text, or from its block keys
    generator/      models: K/V and next tokens; sincos.py is the simplest
    backend/        K/V in blocks, and attention over them; Triton in backend/kernels/
    mover.py        the bytes of blocks, between the pool and tiers
    retention/      policies that score tokens or pages, and their contracts
    compaction.py   applies them: which tokens stay, and where their K/V goes
    merging.py      tokens that stay as means of those that go
    page_reader.py  which blocks a token reads, if a policy selects pages
    reads.py        how much attention reads
    drafter/        drafters of tokens, and their contract
    speculation.py  the executor that verifies drafts
    bench/          suites of benchmarks, beside the limits of memory and links
    cli/, api.py    the verbs, and the call
"""
