"""Tests that pages of the reference name every field of the JSON documents of verbs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.commands import OPEN, fields_of, json_of

DOCS = Path(__file__).parents[2] / "docs"
ZIPF = "zipf:requests=60,prefixes=6,prefix_tokens=64,suffix_tokens=32,output_tokens=8"


@pytest.mark.parametrize(
    ("pages", "command"),
    [
        ("compare", f"compare {ZIPF} --eviction lru,optimum --blocks 20"),
        ("curve", f"curve {ZIPF} --jobs 1 --sizes 3 --model llama-3.1-8b"),
        ("quality", "quality --prompt-tokens 64 --tokens 4 --texts 1 --needles 2 --codec fp32"),
        ("simulate-result metrics cli", f"simulate {ZIPF}"),
        ("bench", "bench cpu --quick --dtype fp32 --only copy"),
        ("size", "size mixtral-8x7b --window 512 --device h100"),
        ("size", "size gemma-3-12b --device h100"),
        ("cli", "calibrate steps.csv"),
    ],
    ids=lambda text: text.partition(" ")[0],
)
def test_every_field_is_in_the_reference(pages, command, tmp_path, monkeypatch):
    """The reference names every field of the document of a verb, in code or in an example."""
    monkeypatch.chdir(tmp_path)
    steps = (DOCS / "how-to" / "calibrate.md").read_text("utf-8")
    Path("steps.csv").write_text(re.search(r"```csv\n(.*?)```", steps, re.DOTALL)[1])
    files = (DOCS / "reference" / f"{page}.md" for page in pages.split())
    text = "".join(file.read_text("utf-8") for file in files)
    code = re.findall(r'`[^`\n]+`|^ *[{"].*": .*$', text, re.MULTILINE)
    fields = set(filter(str.isidentifier, fields_of(json_of(*command.split()))))
    assert sorted(fields - set(re.findall(r"\w+", " ".join(code)))) == []


def shape(document):
    """Return the fields of a document in their order, without those in `OPEN`."""
    if isinstance(document, dict):
        return [(name, name not in OPEN and shape(each)) for name, each in document.items()]
    return [shape(each) for each in document[:1]] if isinstance(document, list) else None


@pytest.mark.parametrize(
    ("page", "command", "parts"),
    [
        ("compare", f"compare {ZIPF} --eviction lru --blocks 20", None),
        ("curve", f"curve {ZIPF} --jobs 1 --sizes 3 --eviction lru", None),
        ("cli", f"simulate {ZIPF}", {"config"}),
    ],
    ids=["compare", "curve", "simulate"],
)
def test_an_example_has_the_fields_of_the_document(page, command, parts):
    """The example of a document has its fields in their order, all or those of some parts."""
    text = (DOCS / "reference" / f"{page}.md").read_text("utf-8")
    example = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[-1])
    for document in (example, found := json_of(*command.split())):
        for name in document.keys() - (parts or document):
            del document[name]
    assert shape(example) == shape(found)
