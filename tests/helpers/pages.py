"""The data of a page, read or put there, and the classes on the pages of the documentation."""

import gzip
import json
import re
from base64 import b64decode, b64encode
from pathlib import Path

import orjson

from kvcore import read_events

DOCS = Path(__file__).parents[2] / "docs"

PUT = """
({ name, parts }) => {
  for (const [part, text] of Object.entries(parts)) {
    const holder = document.createElement("script");
    holder.type = "application/gzip";
    holder.id = `data-${name}-${part}`;
    holder.textContent = text;
    document.body.append(holder);
  }
}
"""


def data_of(page, name):
    """Return the value of a JSON data block of a page's bytes."""
    (packed,) = re.findall(rf'id="data-{name}">([^<]*)<'.encode(), page)
    return json.loads(gzip.decompress(b64decode(packed)))


def put_playback(page, name, playback):
    """Put the data of a playback where an open page has its own, under a name."""
    parts = {"about": orjson.dumps(playback.document()), **playback.columns()}
    packed = {part: b64encode(gzip.compress(raw, 1)).decode() for part, raw in parts.items()}
    page.evaluate(PUT, {"name": name, "parts": packed})


def replayed(path, kind):
    """Yield each event of a trace and the replay's state, of a kind, after it."""
    events = iter(read_events(path))
    header = next(events)
    state = kind(header)
    yield header, state
    for event in events:
        state.apply(event)
        yield event, state


def class_on_page(page, name):
    """Return the class whose source, with its imports, is on a page of the documentation."""
    source = re.search(
        rf"^```python\n([^`]*?\nclass {name}.*?)^```$",
        (DOCS / page).read_text("utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    names = {"__name__": "page"}
    exec(source[1], names)  # noqa: S102
    return names[name]
