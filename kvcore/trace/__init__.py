"""The trace: every decision as a line of JSON. Packages read it back.

To read, in this order (`kvcore/cache/recorder.py` has the calls that make lines):

    events.py      the fields of each line
    writer.py      HEADER, REQUEST and END; the file
    _logger.py     all other lines, from dicts
    fields.py      values as JSON: block ids, keys, requests
    jsonl_file.py  files with a digest
"""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore.trace.fields import SCHEMA, decode_runs, encode_runs
    from kvcore.trace.writer import Trace
else:
    __getattr__, __dir__ = deferred(
        __name__, {"fields": "SCHEMA decode_runs encode_runs", "writer": "Trace"}
    )

__all__ = ["SCHEMA", "Trace", "decode_runs", "encode_runs"]
