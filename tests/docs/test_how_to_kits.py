"""Tests that the conformance kits pass on the plugins of the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.seeds import FirstSeeds

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


PAGES = {
    "write_a_policy": "how-to/write-a-policy.md",
    "write_engine_rules": "how-to/write-engine-rules.md",
    "write_a_prefix_index": "how-to/write-a-prefix-index.md",
    "write_a_scheduler": "how-to/write-a-scheduler.md",
    "write_a_workload": "how-to/write-a-workload.md",
    "write_a_router": "how-to/write-a-router.md",
    "write_a_checkpoint_policy": "how-to/write-a-checkpoint-policy.md",
}


def test_the_conformance_kits_pass_on_the_how_tos(tmp_path, monkeypatch, capsys):
    """The snippets of each page make a file of tests in which the conformance kit passes.

    They run in this process, since most of a short run is the start of another one.
    """
    for name, page in PAGES.items():
        text = "\n".join(FENCE.findall((DOCS / page).read_text("utf-8")))
        (tmp_path / f"test_{name}.py").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "96")
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-rA", "."], plugins=[FirstSeeds()])
    printed = capsys.readouterr().out
    assert code == 0, printed
    for name in PAGES:
        assert f"PASSED test_{name}.py::Test" in printed, name
