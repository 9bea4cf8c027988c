"""Traces read back: `kvcore/trace` writes them, and says which fields a line has.

To read, in this order::

    sealed.py      files with a digest at their end: damage and cuts are found
    reader.py      lines as events, checked; requests as they were
    served.py      what HEADER says of models, devices, steps and routers, by type
    expansion.py   one line for the blocks of a jump, as the lines that it stands for
    keyed.py       names of people and prompts as keyed hashes, also where a trace is written
    live.py        the trace of a run that cannot be repeated, which an error leaves readable
    digest.py      the evicted blocks of a run as one number
"""
