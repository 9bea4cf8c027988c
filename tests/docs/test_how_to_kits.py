"""The conformance kits pass on the plugins of the how-tos."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "page", ["write-a-policy", "write-a-prefix-index", "write-a-scheduler", "write-a-workload"]
)
def test_the_kit_passes_on_the_how_to(page, tmp_path):
    """A how-to's snippets make one file; pytest collects the kit at its end, which passes."""
    text = (HOW_TO / f"{page}.md").read_text("utf-8")
    (tmp_path / "test_page.py").write_text("\n".join(FENCE.findall(text)), "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "96"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
