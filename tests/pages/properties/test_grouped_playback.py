"""Playback of traces with cache groups in a browser's page, against replays of their lines."""

import re
from random import Random

import pytest
from helpers.browser import drawn, tab
from helpers.grouped_traces import TIERS, grouped_run
from helpers.pages import put_playback, replayed

from kvcore import read_events
from kvcore.errors import TraceError
from kvcore_pages.grouped_playback import GroupedPlayback
from kvcore_pages.playback import WHOLE, Window
from kvcore_pages.view import view_page
from kvcore_replay.state.groups import GroupState, name_of

RUN = """
async ({ name, rows, stride }) => {
  const [side] = kvcore.sides;
  const playback = await Object.getPrototypeOf(side.playback.constructor).read(name);
  playback.stride = stride;
  const tokens = (position) => Math.round(position * playback.header.block_size);
  return rows.map((row) => {
    const cache = playback.seek(row);
    const named = [...cache.spans.values()].flatMap((span) =>
      span.ids.map((id, at) =>
        [id, span.group, tokens(span.start + at * span.step),
          span.pins, span.hits, span.last]));
    return {
      counts: [cache.free, cache.cached, cache.private, cache.lookups, cache.hits],
      tiers: cache.tiers.map(({ used }) => used),
      named: named.sort((a, b) => a[0] - b[0]),
      sequences: [...cache.sequences.values()].map((seq) =>
        [seq.id, seq.ids.map((id) => [id, cache.groupOf[id]]).sort((a, b) => a[0] - b[0])]),
    };
  });
}
"""

SEEDS = [*range(8), 19, 27]
"""Seeds of runs, for each of `TIERS`: of the last two the groups have blocks of two sizes."""


@pytest.fixture(scope="module")
def page(tmp_path_factory, browser):
    """Yield a page of a trace with cache groups, in which the tests play others."""
    folder = tmp_path_factory.mktemp("page")
    grouped_run(SEEDS[0], folder / "trace.jsonl", count=8)
    file = folder / "page.html"
    file.write_bytes(view_page([folder / "trace.jsonl"]))
    with tab(browser) as opened:
        yield opened.open(file)


def state_of(state, begins):
    """Return a state of a replay in the form of the script.

    `begins` has the token at which the text of each block with a name begins.
    """
    hits = state.hits
    named = (block for block in state.blocks.values() if block.name is not None)
    return {
        "counts": [
            *(state.free, state.cached, state.private),
            *(hits.lookup_blocks, hits.hit_blocks),
        ],
        "tiers": [tier.used for tier in state.tiers.levels.values()] if state.tiers else [],
        "named": sorted(
            [
                *(block.id, block.group, begins[block.id]),
                *(block.holders, block.hits, block.last_access),
            ]
            for block in named
        ),
        "sequences": [
            [
                seq.id,
                sorted(
                    [block.id, block.group]
                    for table in seq.tables
                    for block in table.blocks.values()
                    if block.name is None
                ),
            ]
            for seq in state.sequences.values()
        ],
    }


def check(page, path, seed, window=WHOLE):
    """Compare random rows with a replay, forwards first and then back and forth."""
    draw = Random(seed)
    playback = GroupedPlayback(path, window=window)
    length = len(playback.rows["kind"])
    rows = [*sorted(draw.choices(range(length), k=10)), length - 1]
    rows += draw.choices(range(length), k=8)
    put_playback(page, "test", playback)
    stride = draw.choice([3, 90])
    played = page.evaluate(RUN, {"name": "test", "rows": rows, "stride": stride})
    wanted, begins = {}, {}
    for event, state in replayed(path, GroupState):
        if event.event == "COMMIT":
            blocks = state.sequences[event.seq].tables[event.group].blocks
            for position in range(event.first, event.first + event.blocks):
                begins[blocks[position].id] = position * state.groups[event.group].size
        if event.n - playback.first_line in rows:
            wanted[event.n - playback.first_line] = state_of(state, begins)
    for row, found in zip(rows, played, strict=True):
        assert found == wanted[row], (seed, row)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_page_plays_the_run(page, tmp_path, seed):
    """Blocks, their groups, holders and hits on a page equal a replay."""
    path = tmp_path / "trace.jsonl"
    grouped_run(seed, path)
    check(page, path, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_page_plays_tiers(page, tmp_path, seed):
    """With tiers, the blocks that a load holds, and those in each tier, equal a replay."""
    path = tmp_path / "trace.jsonl"
    grouped_run(seed, path, tiers=TIERS[seed % len(TIERS)])
    check(page, path, seed)
    times = [event.t for event in read_events(path)]
    check(page, path, seed, Window(Random(seed).choice(times)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_window_has_the_states_of_the_whole_trace(page, tmp_path, seed):
    """A page of a window has the states of a replay of the whole trace."""
    path = tmp_path / "trace.jsonl"
    grouped_run(seed, path)
    times = [event.t for event in read_events(path)]
    draw = Random(seed)
    start, end = sorted(draw.choices(times, k=2))
    check(
        page, path, seed, Window(start, draw.choice([None, end + 1]), draw.choice([5, 10**6]))
    )


CHOOSE = """
({ row, request }) => {
  const [side] = kvcore.sides;
  kvcore.seekRow(side, row);
  kvcore.choose({ side, request });
}
"""

CHOOSE_EVICTOR = """
() => {
  const [side] = kvcore.sides;
  kvcore.choose({ side, request: side.playback.columns.request[side.evictions[0]] });
}
"""

LIT = """
() => {
  const { flags } = kvcore.sides[0].litBlocks;
  return [...flags.keys()].filter((id) => flags[id]);
}
"""


@pytest.mark.parametrize("seed", [SEEDS[1], SEEDS[2], SEEDS[-1]])
def test_the_blocks_of_a_request_are_lit(tmp_path, browser, seed):
    """Of a chosen request its own blocks are lit, and in each group those with its names."""
    path, file = tmp_path / "trace.jsonl", tmp_path / "page.html"
    grouped_run(seed, path)
    file.write_bytes(view_page([path]))
    draw, wanted, order = Random(seed), {}, []
    for event, state in replayed(path, GroupState):
        if event.event == "REQUEST":
            order.append(event.id)
        if order and draw.random() < 0.02:
            request = draw.choice(order)
            own = {
                block.id
                for seq in state.sequences.values()
                if seq.prompt.id == request
                for table in seq.tables
                for block in table.blocks.values()
                if block.name is None
            }
            named = {
                block.id
                for group in state.groups
                for position in range(state.prompt_in(group, request).cacheable)
                for block in state.names[group.index].get(
                    name_of(state.prompt_in(group, request), group, position), ()
                )
            }
            wanted[event.n] = order.index(request), sorted(own | named)
    with tab(browser) as opened:
        page = opened.open(file)
        for row, (request, blocks) in wanted.items():
            page.evaluate(CHOOSE, {"row": row, "request": request})
            drawn(page)
            assert page.evaluate(LIT) == blocks, (row, request)
    assert any(blocks for _, blocks in wanted.values())


@pytest.mark.parametrize("seed", [SEEDS[0], SEEDS[-1]])
def test_the_page_shows_blocks_by_group(tmp_path, browser, seed):
    """The pool can be coloured by group, the log names groups, and tiers are drawn."""
    grouped_run(seed, tmp_path / "trace.jsonl", count=30, tiers=TIERS[1])
    file = tmp_path / "page.html"
    file.write_bytes(view_page([tmp_path / "trace.jsonl"]))
    with tab(browser) as opened:
        page, errors = opened.page, []
        page.on("pageerror", lambda error: errors.append(str(error)))
        opened.open(file)
        page.select_option("select[aria-label='Colour of blocks']", "group")
        page.evaluate("() => kvcore.seek((kvcore.begin + kvcore.end) / 2)")
        drawn(page)
        for mode in ("state", "request", "prefix", "age", "group"):
            page.select_option("select[aria-label='Colour of blocks']", mode)
            drawn(page)
        text = page.inner_text("main")
        groups = page.evaluate("() => kvcore.sides[0].playback.header.cache_groups.groups")
        assert all(f"group {index}, " in text for index in range(len(groups)))
        used = page.evaluate("() => kvcore.sides[0].cache.tiers[0].used")
        assert used
        assert f"{used} of 500" in page.inner_text("[data-tier=host]")
        page.select_option("select[aria-label='Which events']", "tiers")
        drawn(page)
        assert re.search(r"block.* in group \d, .* go(es)? to host", page.inner_text("main"))
        # A row does not tell which requests lost blocks.
        page.evaluate(CHOOSE_EVICTOR)
        drawn(page)
        assert re.search(r"\. Evicted for it: [\d,]+ blocks?\.", page.inner_text("main"))
        assert not errors


def test_a_victim_without_blocks_is_told_with_its_line(tmp_path):
    """An EVICT line with an empty run is refused as a damaged line, with its number."""
    path = tmp_path / "trace.jsonl"
    grouped_run(8, path, count=20)
    lines = path.read_text().splitlines(keepends=True)
    number, line = next(each for each in enumerate(lines, 1) if '"EVICT"' in each[1])
    lines[number - 1] = re.sub(r'"runs":\[\[(\d+),[^]]*\]', r'"runs":[[\1,0]', line)
    path.write_text("".join(lines))
    with pytest.raises(TraceError, match=rf":{number}: EVICT: run \[\d+, 0\]"):
        view_page([path])
