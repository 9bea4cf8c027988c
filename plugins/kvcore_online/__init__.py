"""Real traffic: a server with an OpenAI-style API that computes, and a proxy that routes.

It adds the verbs `serve` and `route`. To read, in this order::

    listener.py      HTTP of both: limits, errors, the end
    supervision.py   the life of both: background work, messages, open files, signals
    clients.py       serve: the workload of a server, none of which is known in advance
    calls.py         calls of the API, checked, become requests
    server.py        requests become answers, whole or streamed
    engine.py        the serving loop on a thread, fed while it runs
    simulated.py     a model without tensors: a latency model's times, tokens from hashes
    stored.py        KV events of what the cache of a server stores
    tally.py         what a server counts, and histograms of its times
    metrics.py       its metrics, under vLLM's names
    route_config.py  route: the options of the proxy
    proxy.py         a call on its way to a server, and the answer on its way back
    prompts.py       calls as the requests that a router sees
    fleet.py         the servers: health, load, cached blocks, and the router's choice
    traffic.py       what the proxy has routed, as a trace and as metrics
    cli/             the verbs
"""
