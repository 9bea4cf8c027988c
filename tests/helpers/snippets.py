"""Code on pages of the docs."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def class_on_page(page, name):
    """Return the class `name` of the one snippet of a page in `docs` that defines it."""
    fences = re.findall(
        r"^```python\n([^`]*?)^```$", (DOCS / page).read_text("utf-8"), re.MULTILINE
    )
    (source,) = [fence for fence in fences if f"\nclass {name}" in fence]
    names = {"__name__": "page"}
    exec(source, names)  # noqa: S102
    return names[name]
