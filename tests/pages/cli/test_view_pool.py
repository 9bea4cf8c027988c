"""Tests of the page of a trace: the map of the pool, lives of blocks, and tiers."""

import json

import pytest
from helpers import traces
from helpers.browser import NARROW, WIDE, drawn, tab
from helpers.commands import run_here

from kvcore import read_events
from kvcore_pages.playback import Window
from kvcore_pages.view import view_page

SERVER = (
    *(
        "simulate",
        "zipf:requests=120,rate=20,output_tokens=300,prefix_tokens=512,suffix_tokens=512",
    ),
    *("--block-size", "16", "--blocks", "1024", "--tensor-parallel", "1"),
    *("--tier", "host:memory=2GiB", "--tier", "disk:memory=8GiB"),
)

LEGEND = """() => Object.fromEntries(
  [...document.querySelectorAll(".pool .legend li")].map((item) =>
  [item.dataset.class, Number(item.querySelector("b").textContent.replaceAll(",", ""))]))"""

SEEK = """async (seconds) => {
  kvcore.seek(seconds * 1e9);
  for (const panel of kvcore.panels) panel.draw();
}"""

TIERS = """() => [...document.querySelectorAll("[data-tier]")].map((text) =>
  Number(text.textContent.split(" ")[0].replaceAll(",", "")))"""

LIVES = """(count) => {
  const panel = kvcore.panels.find((each) => each.life);
  const { cache } = kvcore.sides[0];
  return [...cache.spans.values()].filter(({ pins }) => !pins)
    .slice(0, count).map(({ ids }) => [ids.at(-1), panel.life(ids.at(-1)).sentences()]);
}"""

LIT = """(request) => {
  kvcore.choose({ side: kvcore.sides[0], request });
  const flags = kvcore.colouring.lit(kvcore.sides[0]);
  return [...flags.keys()].filter((id) => flags[id]);
}"""

HELD = """(request) => {
  const found = new Set();
  for (const seq of kvcore.sides[0].cache.sequences.values()) {
    if (seq.request !== request) continue;
    for (const id of seq.ids) found.add(id);
    for (let span = seq.span; span; span = span.parent) span.ids.forEach((id) => found.add(id));
  }
  return [...found].sort((one, two) => one - two);
}"""

OUTLINES = """(times) => {
  const panel = kvcore.panels.find((each) => each.tree);
  const { prototype } = CanvasRenderingContext2D;
  const stroke = prototype.strokeRect;
  let drawn = null;
  prototype.strokeRect = function (...box) {
    if (this.lineWidth === 2.5) drawn = box;
    return stroke.apply(this, box);
  };
  const outlines = [];
  for (const time of times) {
    kvcore.seek(time * 1e9);
    panel.draw();
    if (panel.pointer) {
      const { bar } = panel.pointer;
      const [left, right] = [bar.holder.start, bar.end].map((position) => panel._x(position));
      const top = bar.row * panel.high - panel.box.scrollTop + 18;
      outlines.push([drawn.slice(0, 3), [left, top, right - left]]);
    } else panel._enter({ bar: panel.tree.shown.at(-1), at: 0 }, 0, 0);
  }
  prototype.strokeRect = stroke;
  panel._leave();
  return outlines;
}"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return the trace of a small server with two tiers."""
    path = tmp_path_factory.mktemp("pool") / "run.jsonl.gz"
    done = run_here(*SERVER, "--trace", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def html(traced):
    """Return the path of the page of the trace."""
    path = traced.with_suffix(".html")
    path.write_bytes(view_page([traced]))
    return path


@pytest.fixture(scope="module")
def page(browser, html):
    """Yield the page, open in a wide window; it must log no error."""
    with tab(browser, WIDE) as shown:
        yield shown.open(html)
        assert not shown.complaints


def lines(path):
    """Return the events of a trace as objects."""
    return [event.as_dict() for event in read_events(path)]


def names(runs, block):
    """Return True if one of the runs contains the block."""
    return any(
        block in (range(first, first + count) if count > 0 else range(first, first + count, -1))
        for first, count in runs
    )


@pytest.mark.parametrize("part", [0.2, 0.6, 1.0])
def test_legend_and_tiers_are_those_of_replay(page, traced, part):
    """The counts of the legend and the used blocks of tiers are those of `kvcore replay`."""
    time = lines(traced)[-1]["t"] / 1e9 * part
    page.evaluate(SEEK, time)
    replayed = json.loads(run_here("replay", traced, "--at", f"{time:.9f}", "--json").stdout)
    legend = page.evaluate(LEGEND)
    free, private = legend.pop("free"), legend.pop("private", 0)
    pool = replayed["pool"]
    assert (free, private, sum(legend.values())) == (
        pool["free"],
        pool["private"],
        pool["cached"],
    )
    assert page.evaluate(TIERS) == [tier["used_blocks"] for tier in replayed["tiers"]]


def test_every_colouring_counts_all_blocks(page, traced):
    """In each colouring the counts of the legend add up to all blocks of the pool."""
    page.evaluate(SEEK, lines(traced)[-1]["t"] / 2e9)
    for mode in page.evaluate("() => kvcore.colouring.modes()"):
        page.evaluate(
            "(mode) => { kvcore.colouring.mode = mode; kvcore.panels.map((p) => p.draw()); }",
            mode,
        )
        assert sum(page.evaluate(LEGEND).values()) == 1024, mode
    page.evaluate("() => { kvcore.colouring.mode = 'state'; }")


def test_a_part_counts_blocks_that_the_next_line_frees(browser, tmp_path):
    """In a window too, the map has as many free blocks as the pool after every line."""
    traces.record(tmp_path / "t.jsonl")
    file = tmp_path / "part.html"
    file.write_bytes(view_page([tmp_path / "t.jsonl"], window=Window(start=7)))
    with tab(browser) as found:
        counts = found.open(file).evaluate("""() => {
          const [side] = kvcore.sides;
          return Array.from({ length: side.playback.length }, (_, row) => {
            kvcore.seekRow(side, row);
            const { of } = kvcore.colouring.holdings(side);
            return [of.filter((holder) => holder < 0).length, side.cache.free];
          });
        }""")
        assert found.complaints == []
    assert [shown for shown, _ in counts] == [free for _, free in counts]


def test_the_card_of_a_block_has_its_life_in_the_trace(page, traced):
    """The card of a block names the requests of its allocation and of its next eviction."""
    events = lines(traced)
    at = events[len(events) // 2]["t"]
    page.evaluate(SEEK, at / 1e9)
    sequences = {e["seq"]: e["request"] for e in events if "seq" in e and "request" in e}
    found = page.evaluate(LIVES, 5)
    assert found
    for block, sentences in found:
        text = " ".join(sentences)
        taken = [
            e
            for e in events
            if e["event"] == "ALLOC" and e["t"] <= at and names(e["runs"], block)
        ]
        assert f"Allocated for request {sequences[taken[-1]['seq']]} at" in text
        gone = [
            e
            for e in events
            if e["event"] == "EVICT" and e["t"] > at and names(e["runs"], block)
        ]
        if gone:
            assert (
                f"at {gone[0]['t'] / 1e9:,.3f} s, by lru for request {gone[0]['for']}" in text
            )
        else:
            assert "stays to the end" in text


def test_the_card_of_a_block_tells_that_it_will_expire(browser, tmp_path):
    """Of a block that expires next the card does not say that it is evicted for a request."""
    trace, path = tmp_path / "run.jsonl.gz", tmp_path / "page.html"
    workload = "zipf:requests=100,rate=5,prefixes=10,prefix_tokens=128"
    run_here("simulate", workload, "--eviction", "ttl:ttl=2", "--trace", trace)
    line = next(each for each in lines(trace) if each.get("reason") == "expired")
    path.write_bytes(view_page([trace]))
    with tab(browser) as shown:
        page = shown.open(path)
        page.evaluate("row => kvcore.seekRow(kvcore.sides[0], row)", line["n"] - 1)
        life = "id => kvcore.panels.find((panel) => panel.life).life(id).sentences().at(-1)"
        assert page.evaluate(life, line["runs"][0][0]).startswith("Expired in ")


def test_blocks_of_a_running_request_are_highlighted(page, traced):
    """The highlighted blocks of a running request are those of its spans and private ones."""
    page.evaluate(SEEK, lines(traced)[-1]["t"] / 2e9)
    request = page.evaluate(
        "() => kvcore.sides[0].cache.sequences.values().next().value.request"
    )
    held = page.evaluate(HELD, request)
    assert held
    assert page.evaluate(LIT, request) == held
    page.evaluate("() => kvcore.choose(null)")


def test_arrow_keys_move_the_cursor_of_the_map(page):
    """Arrow keys move the cursor of the map and describe its block; the clock stays."""
    before = page.evaluate("() => kvcore.time")
    page.locator("canvas.blocks").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator("#card-text").text_content().startswith("Block 1:")
    page.keyboard.press("Escape")
    assert page.evaluate("() => kvcore.time") == before


def test_the_outline_in_the_tree_is_that_of_the_bar_as_it_is_now(page, traced):
    """While the tree changes, the bar under the pointer is outlined where it is drawn."""
    last = lines(traced)[-1]["t"] / 1e9
    outlines = page.evaluate(OUTLINES, [last * part / 200 for part in range(1, 200)])
    assert len({tuple(drawn) for drawn, _ in outlines}) > 5
    assert [drawn for drawn, _ in outlines] == [wanted for _, wanted in outlines]


def test_the_card_of_the_tree_stays_while_its_bar_is_there(browser, html):
    """A bar that was pointed at keeps its card: on lines not played yet, one on, one back."""
    with tab(browser, WIDE) as shown:
        page = shown.open(html)
        page.evaluate("kvcore.visitPart(0.3)")
        drawn(page)
        page.locator("canvas.tree").hover(position={"x": 20, "y": 40})
        for step in ("changed", "stepForward", "stepBack"):
            page.evaluate(f"kvcore.{step}()")
            drawn(page)
            assert page.locator("#card").is_visible(), step
        page.keyboard.press("Escape")


@pytest.mark.slow
def test_a_large_pool_states_the_blocks_of_a_cell(browser, tmp_path):
    """In a large pool a cell of the map is several blocks, and the panel states how many."""
    trace, path = tmp_path / "run.jsonl.gz", tmp_path / "page.html"
    run_here("simulate", "zipf:requests=20", "--blocks", "60000", "--trace", trace)
    path.write_bytes(view_page([trace]))
    with tab(browser, NARROW, scheme="dark") as shown:
        page = shown.open(path)
        grid = page.evaluate("() => kvcore.panels.find((panel) => panel.life).grid")
        assert grid["each"] > 1
        assert grid["cells"] == -(-60_000 // grid["each"])
        note = page.locator(".pool .note").text_content()
        assert f"A cell is {grid['each']} blocks" in note
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW[0]
        # A cursor behind the last cell of the smaller map is gone.
        for size, keys in ((WIDE, ("End",)), (NARROW, ())):
            page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
            page.evaluate("kvcore.changed()")
            drawn(page)
            for key in keys:
                page.locator("canvas.blocks").press(key)
        assert not page.locator("#card").is_visible()
        assert not shown.complaints
