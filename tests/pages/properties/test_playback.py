"""Playback of traces in a browser's page, against replays of their lines.

All traces run in one page: their data is put where a page has it, and read as a page reads it.
"""

from random import Random

import pytest
from helpers.browser import browsing, tab
from helpers.pages import put_playback, replayed
from helpers.policies import build
from helpers.pooled_traces import pooled_run
from helpers.serving import ask, random_server, random_talks, random_tiered_server
from helpers.serving import serve as serve_requests
from helpers.toy_engine import ToyEngine, drive
from helpers.traces import compact, drop_blocks, record, serve, serve_tiers

from kvcore import KVCache, Trace, read_events
from kvcore.errors import InputError
from kvcore.request import Hints
from kvcore.testing import COMPACTIONS, EVEN, FORKS, Driver, Traffic, random_steps
from kvcore_engine.retention.window import Window as Recent
from kvcore_pages.playback import Playback, Window, share_phrases
from kvcore_pages.view import view_page
from kvcore_replay.state.cache import CacheState
from kvcore_replay.timeline import Timeline

RUN = """
async ({ name, rows, stride }) => {
  const [side] = kvcore.sides;
  const playback = await side.playback.constructor.read(name);
  playback.stride = stride;
  const states = rows.map((row) => {
    const cache = playback.seek(row);
    return {
      counts: [cache.free, cache.cached, cache.private, cache.lookups, cache.hits],
      tiers: cache.tiers.map(({ used, parked }) =>
        [used, [...parked.values()].reduce((sum, each) => sum + each, 0)]),
      spans: [...cache.spans.values()].map((span) => [
        span.id, span.parent ? span.parent.id : -1, span.start, [...span.ids],
        span.pins, span.hits, span.last, span.children.size,
      ]).sort((a, b) => a[0] - b[0]),
      sequences: [...cache.sequences.values()].map((seq) =>
        [seq.id, seq.span ? seq.span.id : -1, [...seq.ids]]).sort((a, b) => a[0] - b[0]),
    };
  });
  const contents = new side.contents.constructor(playback);
  const { blocks: lengths } = playback.requests;
  const uses = [];
  for (const row of rows.slice(0, 3)) {
    for (let request = 0; request < lengths.length; request++) {
      for (let at = 0; at < lengths[request]; at++) {
        const owner = contents.owner(request, at);
        const next = contents.nextUser(owner, at, row);
        const held = contents.heldByOptimum(owner, at, row);
        uses.push([request, at, row, owner, next, held]);
      }
    }
  }
  return { states, uses };
}
"""


PHASES = """
async () => {
  const [side] = kvcore.sides;
  const playback = await side.playback.constructor.read("test");
  const lives = new side.lives.constructor(playback);
  const { times, requests: { id } } = playback;
  const rows = [...times.keys()].filter((row) => times[row + 1] !== times[row]);
  const at = (row) => id.map((name, request) => [name, lives.phaseAt(request, row)]);
  const phases = (row) => Object.fromEntries(at(row).filter(([, phase]) => phase >= 0));
  return rows.map((row) => [times[row], phases(row)]);
}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Yield a page of a small trace, in which the tests play others."""
    folder = tmp_path_factory.mktemp("page")
    file = folder / "page.html"
    file.write_bytes(view_page([record(folder / "trace.jsonl")]))
    with browsing() as browser, tab(browser) as opened:
        yield opened.open(file)


def driven(path, seed, **options):
    """Record random calls to a cache, with forks, rollbacks, compactions or a window."""
    draw = Random(seed)
    mix = (EVEN, FORKS, COMPACTIONS)[seed % 3]
    if seed % 4 == 0:
        options["retention"] = Recent(tokens=9)
    policy = draw.choice(["lru", "lfu", "ttl:ttl=2e-8"])
    with Trace(path) as trace:
        cache = KVCache(
            draw.choice([14, 30, 45]),
            draw.choice([2, 6]),
            eviction=build(policy),
            key_tokens=6,
            accounting=draw.choice(["keys", "tokens"]) if mix is EVEN else "tokens",
            trace=trace,
            **options,
        )
        driver = Driver(cache)
        driver.run(random_steps(seed, 120, Traffic(mix=mix, pins=True, hints=True)))
        for seq in driver.sequences:
            cache.close(seq, driver.now)
    return path


def served(path, seed):
    """Record a random server, with tiers or without."""
    make = (random_server, random_tiered_server, random_talks)[seed % 3]
    server = make(Random(seed).randint)
    path.write_bytes(server.run(("fcfs", "urgent", "planning")[seed // 3 % 3]).trace)
    return path


def hosted(path, seed):
    """Record an engine that evicts early, keeps duplicates and loses blocks."""
    draw = Random(seed)
    engine = ToyEngine(path, draw.choice(["lru", "arc"]), 20, 4, early=seed % 3)
    drive(engine, draw, 25, loses=True)
    return path


def pooled(path, seed):
    """Record a random server with a pool for each kind of layer."""
    pooled_run(seed, path, count=20)
    return path


def prefetched(path):
    """Record a prefetch of a part of a prompt, of which another brings more meanwhile."""
    shared, turn = [*range(4)], [*range(50, 54)]
    hints = Hints(prefetch=50_000)
    requests = [
        ask("first", 0, 17, keys=shared),
        ask("other", 1000, 34, keys=[*range(100, 108)]),
        ask("between", 160_000, 33, keys=[*shared, *turn]),
        ask("again", 200_000, 37, keys=[*shared, *turn[:2], *range(60, 63)], hints=hints),
        ask("last", 210_000, 34, keys=[*range(200, 208)]),
        ask("third", 220_000, 37, keys=[*shared, *turn[:2], *range(60, 63)]),
    ]
    path.write_bytes(serve_requests(requests, blocks=11, tiers=("host:memory=1MB",)).trace)
    return path


def state_of(state):
    """Return a state of a replay in the form of the script."""
    root = lambda span: -1 if span is None else span.id  # noqa: E731
    tiers = () if state.tiers is None else state.tiers.levels.values()
    hits = state.hits
    return {
        "counts": [
            *(state.free, state.cached, state.private),
            *(hits.lookup_blocks, hits.hit_blocks),
        ],
        "tiers": [[tier.used, tier.parked_blocks] for tier in tiers],
        "spans": sorted(
            [
                *(span.id, root(span.parent), span.start, span.ids.tolist()),
                *(span.pins, span.hits, span.last_access, span.children),
            ]
            for span in state.spans.values()
        ),
        "sequences": sorted(
            [seq.id, root(seq.span), seq.private.tolist()] for seq in state.sequences.values()
        ),
    }


def check(page, path, seed, window=None):
    """Compare random rows with a replay, forwards first and then back and forth."""
    draw = Random(seed)
    playback = Playback(path) if window is None else Playback(path, window=window)
    length = len(playback.rows["kind"])
    forth = sorted(draw.choices(range(length), k=12))
    rows = [*forth, length - 1, *draw.choices(range(length), k=12)]
    put_playback(page, "test", playback)
    stride = draw.choice([3, 17, 90])
    run = page.evaluate(RUN, {"name": "test", "rows": rows, "stride": stride})
    wanted = {
        event.n - playback.first_line: state_of(state)
        for event, state in replayed(path, CacheState)
        if event.n - playback.first_line in rows
    }
    for row, state in zip(rows, run["states"], strict=True):
        assert state == wanted[row], (path.name, row)
    return playback, run["uses"]


def check_uses(playback, path, uses):
    """Compare owners and next users of blocks on the page with the keys of the trace."""
    admitted, keyed = {}, {}
    for event, state in replayed(path, CacheState):
        if event.event in ("REQUEST", "PREFETCH", "RECOVER"):
            name = event.id if event.event == "REQUEST" else event.request
            keyed[name] = list(state.requests[name].keys)  # of a prefetch only the first
        if event.event == "KEYS":
            keyed[event.request] = list(state.requests[event.request].keys)
        if event.event in ("HIT", "MISS") and not event.again:
            admitted.setdefault(event.request, event.n)
    ratio = playback.ratio
    ids = playback.prompts.ids
    keys = [keyed[name] for name in ids]
    lookup, hits = playback.prompts.lookup, playback.explanation.requests
    order = sorted((admitted[name], n) for n, name in enumerate(ids) if name in admitted)
    size = playback.header["block_size"]
    for request, at, row, owner, user, held in uses:
        key = keys[request][at // ratio]
        has = [n for n, each in enumerate(keys) if each[at // ratio :][:1] == [key]]
        assert owner in has
        line = row + playback.first_line
        asks = (n for when, n in order if when > line and n in has and at < lookup[n])
        wanted = next(asks, -1)
        assert user == wanted, (path.name, request, at, row)
        best = wanted >= 0 and at < hits[ids[wanted]].optimum // size
        assert held == best, (path.name, request, at, row)


WRITTEN = {
    "record": record,
    "drop_blocks": drop_blocks,
    "serve": serve,
    "compact": compact,
    "serve_tiers": serve_tiers,
    "prefetched": prefetched,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_plays_every_kind_of_line(page, tmp_path, name):
    """A page plays traces with every kind of event like a replay."""
    path = WRITTEN[name](tmp_path / f"{name}.jsonl")
    playback, uses = check(page, path, 1)
    check_uses(playback, path, uses)


RUNS = [(driven, 12), (served, 9), (hosted, 6), (pooled, 6)]
"""Random runs, and how many of each: all mixes, servers, engines and kinds of pools."""

each_kind = pytest.mark.parametrize(
    ("make", "count"), RUNS, ids=[make.__name__ for make, _ in RUNS]
)


@each_kind
def test_a_page_plays_random_runs(page, tmp_path, make, count):
    """Spans, pins, tables, counts and next uses on a page equal a replay of random runs."""
    for seed in range(count):
        path = make(tmp_path / f"{make.__name__}{seed}.jsonl", seed)
        playback, uses = check(page, path, seed)
        check_uses(playback, path, uses)


@each_kind
def test_a_window_has_the_states_of_the_whole_trace(page, tmp_path, make, count):
    """A page of a window has the states of a replay of the whole trace.

    No window ends between two lines of the same time.
    """
    for seed in range(count):
        path = make(tmp_path / f"{make.__name__}{seed}.jsonl", seed)
        times = [event.t for event in read_events(path)]
        draw = Random(seed)
        start, end = sorted(draw.choices(times, k=2))
        window = Window(start, draw.choice([None, end + 1]), draw.choice([5, 10**6]))
        playback, uses = check(page, path, seed, window)
        check_uses(playback, path, uses)
        within = [t for t in times if start <= t <= (window.end or times[-1] + 1) - 1]
        kept = within[: len(playback.rows["kind"])]
        assert playback.first_line == times.index(within[0])
        assert len(kept) == len(within) or len(kept) <= window.max_rows or len({*kept}) == 1
        # The window has all lines of its last time.
        assert within[len(kept) :][:1] != kept[-1:]


def test_a_window_has_the_phases_of_the_whole_trace(page, tmp_path):
    """At each time of a window requests are in the phases that `Timeline` finds.

    Some were preempted before it, or wait until after it.
    """
    for seed in range(12):
        path, draw = served(tmp_path / f"{seed}.jsonl", seed), Random(seed)
        timeline = Timeline.read(path)
        start, end = sorted(draw.choices(timeline.series.time, k=2))
        put_playback(page, "test", Playback(path, window=Window(start, end + 1)))
        *moments, _ = page.evaluate(PHASES)  # what goes on ends with the last row
        for time, phases in moments:
            assert phases == {
                str(timeline.requests.ids[request]): kind
                for request, kind, since, upto, _ in timeline.phases
                if since <= time < upto
            }, (seed, time)


def test_a_window_without_a_line_is_refused(tmp_path):
    """A window without a line raises InputError with the end of the trace."""
    path = record(tmp_path / "trace.jsonl")
    with pytest.raises(InputError, match="no line is in the window; the trace ends at"):
        Playback(path, window=Window(10**9))


def test_packed_phrases_are_restored_on_the_page(page):
    """Texts packed by `share_phrases` are restored on the page, numbers and blank ones too."""
    texts = ["", "Of 1,204 tokens, 3 hit.\n- from 0 to 17 (1.35 s): 2", "none", "7"]
    shared = share_phrases(texts)
    read = page.evaluate(
        """(why) => {
          const { constructor } = kvcore.sides[0].playback;
          const holder = Object.create(constructor.prototype);
          holder.requests = { why };
          return why.uses.split("\\n").map((_, request) => holder.why(request));
        }""",
        shared,
    )
    assert read == texts
    assert len(shared["lines"]) == 4
