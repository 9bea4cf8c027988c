"""The core in C: it serves plain runs many times as fast, and decides the same.

`_core` is built from the C files of this folder where a compiler is found (`build.py`). It is a
twin of the serving loop and of the tree of spans: it works on the same spans, policies and
records, and calls plugins for what they override. `kvcore.serving.native` gives it a loop that
has not begun, if nothing in it is of `LACKS`; who replays without a clock gives it requests:

    the loop is plain                      the core runs it
    a request needs what the core lacks    the loop in Python goes on, with the same jobs
    the loop is not plain                  the loop in Python runs it from the start

Of a cache of groups it has the names of blocks alone, under a loop in Python
(`named_blocks.c`).

`KVCORE_PURE=1` in the environment switches the core off.
"""

from kvcore.native.build import LACKS, PURE, library, state

__all__ = ["LACKS", "PURE", "library", "state"]
