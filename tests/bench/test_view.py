"""The cost of a page of a large trace: to build, to open, to move through, to play."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
from bench.harness import measured
from helpers.browser import browsing, tab

PARTS = (8, 4, 2, 1)
"""Divisors of the number of requests: the first trace has an eighth of them."""

PROMISED_MB = 15
SEEKS = 50
READY_S = 120

# A script of the page that notes the time at which the page can be used.
WATCH = """
new MutationObserver(() => { window.readyAt ??= performance.now(); })
  .observe(document, { attributes: true, subtree: true, attributeFilter: ["data-ready"] });
"""

PAINTED = """() => {
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  return [paint?.startTime ?? NaN, readyAt];
}"""

SEEK = """(parts) => parts.map((part) => {
  const start = performance.now();
  kvcore.seek(kvcore.begin + part * (kvcore.end - kvcore.begin));
  for (const panel of kvcore.panels) panel.draw();
  return performance.now() - start;
})"""

PLAY = """() => new Promise((resolve) => {
  kvcore.seek(kvcore.begin + (kvcore.end - kvcore.begin) / 2);
  kvcore.play(true);
  const start = performance.now();
  let frames = 0;
  const frame = (now) => {
    frames += 1;
    if (now - start < 3000) return requestAnimationFrame(frame);
    kvcore.play(false);
    resolve((frames * 1000) / (now - start));
  };
  requestAnimationFrame(frame);
})"""


@attrs.frozen
class Kind:
    """A kind of trace: the requests that make a million lines, and a command to record it."""

    requests: int
    command: str

    def record(self, requests: int, file: Path) -> None:
        """Record a trace of that many requests."""
        words = self.command.format(requests=requests).split()
        measured(sys.executable, "-m", "kvcore", *words, "--trace", str(file))


SERVED = Kind(
    47_000,
    "simulate zipf:requests={requests},rate=25 --tensor-parallel 1 --blocks 20000"
    " --no-residency",
)
UNTIMED = Kind(125_000, "compare zipf:requests={requests} --eviction lru --blocks 20000")
"""Requests that are only looked up: the most requests that a million lines can have."""


@pytest.mark.parametrize("kind", [SERVED, UNTIMED], ids=["served", "untimed"])
def test_a_page_of_a_million_lines_is_below_15_mb(kind: Kind, tmp_path: Path) -> None:
    """A page of a million lines is smaller than 15 MB; times and memory are printed."""
    trace, page = tmp_path / "trace.jsonl.gz", tmp_path / "page.html"
    costs = []
    print()
    for part in PARTS:
        kind.record(kind.requests // part, trace)
        command = ("view", str(trace), "-o", str(page), "--events", "2000000")
        built = measured(sys.executable, "-m", "kvcore", *command)
        lines, seen = _look(page)
        costs.append(built.cpu / lines)
        size = page.stat().st_size / 1e6
        print(
            f"{lines:,} lines, {kind.requests // part:,} requests: {size:.1f} MB, built in "
            f"{built.seconds:.1f} s (of CPUs {costs[-1] * 1e6:.1f} µs a line, "
            f"{costs[-1] / costs[0]:.2f} x), {built.peak_mb:,.0f} MB of memory\n  {seen}"
        )
        assert size < PROMISED_MB
    assert lines > 990_000


def _look(file: Path) -> tuple[int, str]:
    """Open a page; return the number of lines that it plays, and a text of measurements."""
    with browsing() as browser, tab(browser) as opened:
        page: Any = opened.page
        page.add_init_script(WATCH)
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready]", timeout=READY_S * 1000)
        page.wait_for_selector("#curves[data-drawn]", timeout=READY_S * 1000)
        painted, ready = page.evaluate(PAINTED)
        draw = Random(0)
        seeks = sorted(page.evaluate(SEEK, [draw.random() for _ in range(SEEKS)]))
        rate = page.evaluate(PLAY)
        lines = page.evaluate("() => kvcore.sides[0].playback.length")
    return lines, (
        f"first paint {painted / 1e3:.2f} s, usable after {ready / 1e3:.2f} s; seek and draw "
        f"p50 {seeks[SEEKS // 2]:.0f} ms, p95 {seeks[SEEKS * 95 // 100]:.0f} ms; "
        f"{rate:.0f} frames a second"
    )
