"""The command line: `main`, the parts that verbs share, and the verbs of the core.

To read, in this order:

    main.py      finds the verb, and turns errors into exit codes
    verb.py      what a verb is made of: help pages, types of values
    options.py   the options that verbs share, and the `RunConfig` that their values make
    simulate.py  the verb; `plugins.py` is the other one of the core
    served.py    a run: its files, packages beside it, its report
    output.py    tables, JSON and progress
"""
