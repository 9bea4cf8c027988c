"""Readers of traces: checks, state, what-if, reasons of misses, bills, exports and plots.

It adds the verbs `replay`, `whatif`, `watch`, `plot` and `export`, the options `--live` and
`--price` of runs, and the call `kvcore.recorded_config`. To read, in this order::

    state/            the state of a run at any line, rebuilt from the lines before
    check/            every line against that state
    recorded_run.py   the log of a run's requests, and its summary
    timeline.py       requests, their phases, and the pool over time, in columns
    recorded/         the options and parts of a run, from the header of its trace
    what_if.py        the requests again with other options, beside the recorded run
    untimed.py        requests through a cache, one after the other, without a clock
    belady.py         the optimum of eviction: the most hits that there can be
    misses/           why tokens of prompts missed
    savings.py        the prefill that hits save, in tokens and seconds
    pricing.py, billing.py   prices of APIs that cache prompts, and bills by them
    gpu_cost.py       prices of GPU hours, and what a deployment costs by them
    export.py         the events and requests of a trace in formats of other tools
    anonymise.py      a trace without names, which are keyed hashes there
    report/           reports, plots, the live view, tracks for Perfetto
    cli/              the verbs, and the options
"""
