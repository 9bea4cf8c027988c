"""The conformance kits pass on the plugins of the how-tos."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


PAGES = ["write-a-policy", "write-a-prefix-index", "write-a-scheduler", "write-a-workload"]


def test_the_kits_pass_on_the_how_tos(tmp_path):
    """A page's snippets make one file; pytest collects the kit at its end, which passes.

    All in one process, since half the time of a short one is to start it.
    """
    for page in PAGES:
        text = "\n".join(FENCE.findall((HOW_TO / f"{page}.md").read_text("utf-8")))
        (tmp_path / f"test_{page.replace('-', '_')}.py").write_text(text, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "."],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "96"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        assert f"PASSED test_{page.replace('-', '_')}.py::Test" in done.stdout, page
