"""Tests that the conformance kits pass on the plugins of the docs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


PAGES = {
    "write_a_policy": "how-to/write-a-policy.md",
    "write_a_prefix_index": "how-to/write-a-prefix-index.md",
    "write_a_scheduler": "how-to/write-a-scheduler.md",
    "write_a_workload": "how-to/write-a-workload.md",
    "write_a_router": "reference/routers.md",
}


def test_the_conformance_kits_pass_on_the_how_tos(tmp_path):
    """The snippets of each page make a file of tests in which the conformance kit passes.

    All pages run in one process of pytest, since its start takes half of a short run.
    """
    for name, page in PAGES.items():
        text = "\n".join(FENCE.findall((DOCS / page).read_text("utf-8")))
        (tmp_path / f"test_{name}.py").write_text(text, "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "."],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "96"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in PAGES:
        assert f"PASSED test_{name}.py::Test" in done.stdout, name
