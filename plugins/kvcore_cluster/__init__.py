"""Clusters: several servers under one clock, and the routers that divide requests among them.

It adds routers, the mode `cluster` of a simulation, which options such as `--replicas` choose,
and the call `kvcore.simulate_cluster`. The contract of routers is in the core
(`kvcore/serving/router.py`). To read, in this order::

    options.py      the options of the mode
    config.py       the parts of a run from these: replicas, router, planner, failures
    simulate.py     checks the parts against one another, and runs them
    cluster.py      the events of all replicas in one order: arrivals, steps, failures
    replica.py      the serving loop of the core, in turns that the cluster begins and ends
    dispatcher.py   calls the router, and keeps the counts that it reads
    views.py        a router's view of the caches: its own index, their events, or all
    router/         the plugins
    phases.py       prefill and decode on replicas of their own
    planner.py      autoscaling: how many replicas there should be
    trace.py, result.py, report.py   the output of a run: one trace, a result, and its tables
    api.py          the call
"""
