"""One file that holds a page, its data and its scripts: it opens offline, without a server.

The contents of a trace reach the page as compressed data alone, never as markup or code. A
content security policy lets only the scripts in the file run, and nothing be fetched.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import attrs
import orjson

from kvcore.lazy import import_extra

__all__ = ["Page"]

LEVEL = 6
"""Level of compression: 9 takes four times as long for 2 % less."""

GZIP_SYSTEM = 9
"""Place of the operating system in a gzip header (RFC 1952), 3 for Unix."""

TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<noscript>This page draws its data with JavaScript, which is switched off here.</noscript>
{body}
{data}
<script type="module">{script}</script>
</body>
</html>
"""


@attrs.frozen
class Page:
    """A page, before it is one file.

    Attributes:
        title: title of the window; any text.
        body: markup of the page, without any contents of a trace.
        scripts, styles: files of `plugins/kvcore_pages/static`, after those of all pages. The
            scripts make one module, in this order.
        data: data that scripts read by name: JSON values with `readJson`, bytes with
            `readBytes`.
        charts: whether the page has charts, and therefore the charting library.
    """

    title: str
    body: str
    scripts: Sequence[str]
    styles: Sequence[str] = ()
    data: Mapping[str, Any] = attrs.field(factory=dict)
    charts: bool = True

    def render(self) -> bytes:
        """Return the file. Equal pages give equal bytes.

        Raises:
            PluginError: the charting library is not installed.
        """
        script = "\n" + "".join(map(_static, ("shell.js", *self.scripts)))
        style = "".join(map(_static, ("shell.css", *self.styles)))
        blocks = [_block(name, value) for name, value in self.data.items()]
        allowed = [script]
        if self.charts:
            blocks.append(_charts())
            allowed.append(charting_library().decode())
        return TEMPLATE.format(
            policy=_policy(allowed),
            title=escape(self.title),
            style=style,
            body=self.body,
            data="\n".join(blocks),
            script=script,
        ).encode(errors="replace")


def charting_library() -> bytes:
    """Return the source of plotly.js, as the package `plotly` carries it.

    Raises:
        PluginError: it is not installed.
    """
    import_extra("plotly", "a page with curves needs plotly", "view")
    return (files("plotly") / "package_data" / "plotly.min.js").read_bytes()


@cache
def _charts() -> str:
    """Return the element with plotly.js; cached, as it takes longest to compress."""
    return _block("charts", charting_library())


def _static(name: str) -> str:
    """Return a file of `plugins/kvcore_pages/static`."""
    text = (files("kvcore_pages") / "static" / name).read_text("utf-8")
    # Such a tag would end the element with the text.
    assert "</script" not in text, name
    assert "</style" not in text, name
    return text


def _block(name: str, value: Any) -> str:
    """Return an element with compressed data, which cannot be read as markup."""
    try:
        raw = value if isinstance(value, (bytes, bytearray)) else orjson.dumps(value)
    except TypeError:  # a file name that is no Unicode, which only `json` writes
        raw = json.dumps(value).encode()
    packed = bytearray(gzip.compress(raw, LEVEL, mtime=0))
    packed[GZIP_SYSTEM] = 3  # Python 3.13 writes another number here
    text = b64encode(packed).decode()
    return f'<script type="application/gzip" id="data-{name}">{text}</script>'


def _policy(scripts: Sequence[str]) -> str:
    """Return the policy that lets these scripts run, and nothing be fetched."""
    digests = (b64encode(sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
