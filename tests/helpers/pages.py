"""The data in the bytes of a page, and the classes on the pages of the documentation."""

import gzip
import json
import re
from base64 import b64decode
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def data_of(page, name):
    """Return the value of a JSON data block of a page's bytes."""
    (packed,) = re.findall(rf'id="data-{name}">([^<]*)<'.encode(), page)
    return json.loads(gzip.decompress(b64decode(packed)))


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
