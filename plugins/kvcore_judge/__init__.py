"""The judge: one protocol by which eviction policies are compared, and a leaderboard.

It adds the verbs `leaderboard`, `judge` and `workbench`. docs/reference/protocol.md says what
is measured, and why. To read, in this order::

    protocol.py     panels of streams, pool sizes, marks of cells that a policy was tuned on
    streams.py      two generated workloads of the public panel
    entries.py      a policy to judge: a name with options, or a file
    cells.py        one policy on one stream in one pool: hits, digest of its evictions, times
    scores.py       means over cells, the worst cell, intervals
    leaderboard.py  all cells of all policies; resumed, written, checked
    rules.py        what a policy must not do, and how that is found
    sandbox.py      a process without network, with limits and a read-only file system
    elsewhere.py    a cell in an interpreter in which text has other hashes
    verdict.py      judge: the kit, the rules, the panel
    report.py       tables, and the page
    gate.py         a plugin of pytest: hits of an application must not fall
    misses.py       why the tokens of a replay missed
    workbench.py    a policy beside LRU, ARC and the optimum, for a page
    site.py         the workbench as a site: the page, Python for browsers, kvcore
    browser/        markup and scripts of the page, and `orjson` for its Python
    cli/            the verbs
"""
