"""Draw the figures of the how-to pages by the commands that stand above them.

    python docs/render_figures.py

draws them into docs/images, as PNGs of few colours.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent

FIGURE = re.compile(
    r"^    kvcore ((?:.*\\\n)*.* )([\w-]+)\.svg\n\n"  # a command that writes NAME.svg
    r"!\[[^]]*\]\(\.\./images/\2\.png\)",  # and below it the picture
    re.MULTILINE,
)


def main() -> None:
    """Draw all figures."""
    for page in sorted((DOCS / "how-to").glob("*.md")):
        for words, name in FIGURE.findall(page.read_text("utf-8")):
            file = DOCS / "images" / f"{name}.png"
            arguments = shlex.split(words.replace("\\\n", ""))
            subprocess.run(  # noqa: S603 - commands of our pages
                [sys.executable, "-m", "kvcore", *arguments, str(file)], check=True
            )
            picture = Image.open(file).convert("RGB")
            picture.reduce(2).quantize(64).save(file, optimize=True)


if __name__ == "__main__":
    main()
