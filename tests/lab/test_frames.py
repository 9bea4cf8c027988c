"""Frames of results have the columns and the types that their page says."""

import re
from itertools import chain
from pathlib import Path

import pytest

import kvcore
from kvcore_lab.quality import measure

PAGE = Path(__file__).parents[2] / "docs/reference/frames.md"

ZIPF = "zipf:requests=40,prefixes=6"

AXES = {"workload": [ZIPF], "eviction": ["lru", "lfu"], "blocks": [100]}

FLEETS = {"tensor_parallel": [1], "max_gpus": 2}

RESULTS = {
    "simulate, run": lambda _: kvcore.simulate(ZIPF),
    "compare": lambda _: kvcore.compare(ZIPF, "lru,lfu", [100]),
    "curve": lambda _: kvcore.curve(kvcore.Plugins().build("workload", ZIPF), "lru"),
    "explain": kvcore.explain,
    "whatif": lambda trace: kvcore.whatif(trace, eviction="fifo"),
    "sweep": lambda _: kvcore.sweep(**AXES),
    "sweep without a clock": lambda _: kvcore.sweep(mode="compare", **AXES),
    "compare_routers": lambda _: kvcore.compare_routers(ZIPF, "round-robin", 2, blocks=100),
    "plan": lambda _: kvcore.plan(ZIPF, **FLEETS),
    "plan_devices": lambda _: kvcore.plan_devices(["h100", "h200"], ZIPF, **FLEETS),
    "measure": lambda _: measure(
        "transformer", retention="window", codec="fp32", budgets=(0.5,),
        prompt_tokens=60, tokens=10, texts=2, needles=0,
    ),
}  # fmt: skip

TYPES = {"text": "String", "integer": "Int64", "float": "Float64", "truth value": "Boolean"}


def schemas():
    """Return the columns of each section of the page, with the types of polars."""
    sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    written = {}
    for section in sections:
        title, _, text = section.partition("\n")
        rows = re.findall(r"^\| (`.*`) \| ([a-z ]+) \|$", text, flags=re.MULTILINE)
        written[title.replace("`", "")] = dict(
            chain.from_iterable(
                [(name, TYPES[kind]) for name in re.findall("`(.*?)`", names)]
                for names, kind in rows
            )
        )
    return written


def test_every_frame_is_on_the_page():
    """The page has a section for each result that has a frame, and no other."""
    assert list(schemas()) == list(RESULTS)


@pytest.mark.parametrize("name", RESULTS)
def test_a_frame_has_the_columns_and_types_of_its_page(tmp_path, name):
    """A frame has the columns that are written down, in that order, of these types."""
    pytest.importorskip("polars")
    trace = tmp_path / "run.jsonl"
    if name in ("explain", "whatif"):
        kvcore.simulate(ZIPF, blocks=400, trace=trace)
    frame = RESULTS[name](trace).to_frame()
    assert {column: str(kind) for column, kind in frame.schema.items()} == schemas()[name]
    assert list(frame.columns) == list(schemas()[name])
