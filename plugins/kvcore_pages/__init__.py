"""Pages: HTML that plays a run, reports results, or explains the cache.

It adds the verbs `view`, `report` and `tour`. A page is one file with its data and its scripts,
which opens offline. To read, in this order::

    shell.py         the file: data, styles and scripts in one
    playback.py      view: a trace in columns that a browser plays
    grouped_playback.py   the same of a trace of cache groups, whose blocks have no spans
    view.py          the page of one trace, or of two
    report.py        report: a page of results, those of one kind side by side
    report_runs.py, report_documents.py   runs and traces; JSON documents of verbs
    report_parts.py  headings, tables and charts, as the script draws them
    tour.py          tour: questions on the cache, answered by runs
    static/          scripts and styles, named after pages and their panels
    server.py        serves a page to browsers of this machine
    cli/             the verbs
"""
