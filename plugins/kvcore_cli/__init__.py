"""The command line: `main`, the parts that verbs share, and the verbs `simulate` and `plugins`.

Packages add the other verbs, by the hook `kvcore_commands`. To read, in this order::

    main.py       finds the verb, and turns errors into exit codes
    verb.py       what a verb is made of: help pages, types of values
    options.py    the options that verbs share, and the `RunConfig` that their values make
    simulate.py   the verb
    plugins.py    the other one: what is installed, and whether it works
    served.py     a run: its files, packages beside it, its report
    output.py     tables, JSON and progress
    report/       the report of a run on one server, and what reports share
"""
