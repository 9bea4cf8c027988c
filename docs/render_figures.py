"""Draw the figures of the how-to pages by the commands that stand above them.

    python docs/render_figures.py docs/images

draws PNGs of few colours, which are committed. Into another folder it draws SVGs, as
`tox -e docs` does for the built pages.
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


def main(folder: Path) -> None:
    """Draw all figures into a folder, which is made."""
    form = "png" if folder.resolve() == DOCS / "images" else "svg"
    folder.mkdir(parents=True, exist_ok=True)
    for page in sorted((DOCS / "how-to").glob("*.md")):
        for words, name in FIGURE.findall(page.read_text("utf-8")):
            file = folder / f"{name}.{form}"
            arguments = shlex.split(words.replace("\\\n", ""))
            subprocess.run(  # noqa: S603 - commands of our pages
                [sys.executable, "-m", "kvcore", *arguments, str(file)], check=True
            )
            if form == "png":
                picture = Image.open(file).convert("RGB")
                picture.reduce(2).quantize(64).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
