"""Experiments: runs compared, searched, planned and fitted, and demonstrations.

It adds verbs (those that begin lines below, and `explain`), the options `--search`,
`--gpu-price` and `--prometheus` of runs, the mode `contiguous`, and the calls
`kvcore.compare`, `plan`, `validate`, `find_capacity`, `report_on` and `report_html`. To read,
in this order::

    comparison.py   compare: policies, Belady's bound and an unbounded cache, by pool size
    candidates.py   those policies, from names, classes and functions
    curves/         curve: hits at every size of the pool, and of a tier below it
    statistics.py   means of repeated runs with their intervals
    sweep/          sweep: the runs of a grid, where they run, and their journal
    workers.py      processes that share the work; a task whose process dies runs again
    plans/          plan, --search: the load that a server takes, the servers for a load
    router_comparison.py   routers: hits and latency under each, beside one cache of all memory
    quality.py      quality: what bounded or quantised K/V costs
    measured/       calibrate, validate: latency models and simulations beside real servers
    demo/           demo: a cache on a model small enough to follow
    contiguous/     demo paging: memory as it was allocated before there were blocks
    templates/      new: packages of plugins to begin with, a working one of each kind
    report/         results as sections, plots, metrics, and in notebooks
    cli/, api.py    the verbs and options, and the calls; `size` is one file there
"""
