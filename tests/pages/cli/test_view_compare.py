"""Tests of the page of two traces: differing evictions, their costs, its first view."""

from itertools import islice

import pytest
from helpers.browser import tab, until
from helpers.commands import run_here
from helpers.evictions import TraceBlocks, differing

from kvcore.units import NS_PER_S
from kvcore_cli import main as frame
from kvcore_pages.playback import Playback, Window
from kvcore_pages.view import find_differences, view_page
from kvcore_replay.misses.explain import explain

SERVED = (
    "compare",
    "zipf:requests=200,rate=3,prefixes=25,prefix_tokens=128,suffix_tokens=32,output_tokens=24",
    *("--block-size", "16", "--blocks", "60", "--accounting", "tokens"),
)
POLICIES = ("lru", "lookahead:requests=all")

MARKED = """() => kvcore.sides.map((side) =>
  Object.fromEntries(side.evictions.map((row) => [row, side.differs(row)])
    .filter(([, blocks]) => blocks)))"""

BAND = """() => {
  const { marks, columns } = kvcore.panels.find((panel) => panel.marks);
  const sum = (column) => column.reduce((all, each) => all + each, 0);
  return [marks.map(({ rows }) => rows), columns.map(sum)];
}"""

ONLY_HERE = """() => kvcore.sides.map((side) => {
  const { teller } = kvcore.panels.find((panel) => panel.teller && panel.side === side);
  return side.evictions.filter((row) => /only here$/.test(teller.says(row).at(-1)));
})"""

WALK = """(key) => {
  const found = [];
  for (let before = null; ; ) {
    document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    const [differing] = [kvcore.panels.find((panel) => panel.marks).at];
    const now = differing && `${differing.side.number} ${differing.row}`;
    if (!now || now === before) return found;
    if (differing.side.row !== differing.row) return "not there";
    found.push([differing.side.number, differing.row]);
    before = now;
  }
}"""

STEPS = """(steps) => {
  const found = [];
  kvcore.seek(-1);
  for (const { playback } of kvcore.sides) playback.seek(-1);
  for (let step = 0; step < steps; step++) {
    kvcore.stepForward();
    found.push([...kvcore.sides.map((side) => side.row), kvcore.time]);
  }
  return found;
}"""

FIGURES = """(time) => {
  kvcore.seek(time);
  for (const panel of kvcore.panels) panel.draw();
  return [...document.querySelectorAll("#figures tbody tr")].map((line) =>
    [...line.querySelectorAll("td")].map((cell) => cell.textContent));
}"""

STORY = """([side, row]) => {
  kvcore.seekRow(kvcore.sides[side], row);
  for (const panel of kvcore.panels) panel.draw();
  const [story] = [document.querySelectorAll(".story")[side]];
  const part = (item) => {
    const number = item.querySelector("b").textContent;
    return [item.textContent.slice(number.length + 1), Number(number.replaceAll(",", ""))];
  };
  return { now: story.querySelector(".now").textContent, whole: story.textContent,
    pool: Object.fromEntries([...story.querySelectorAll(".outlook-parts li")].map(part)) };
}"""

DEAD = "cached, and nobody asks for it again"
LATE = "asked for again, a miss of the optimum too"
HELD = "asked for again, and the optimum has it too"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder for traces and pages."""
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def files(folder):
    """Return the traces of two policies that served the same requests."""
    found = []
    for policy in POLICIES:
        found.append(folder / f"{policy.partition(':')[0]}.jsonl")
        assert frame.run([*SERVED, "--eviction", policy, "--trace", str(found[-1])]) == 0
    return found


@pytest.fixture(scope="module")
def sides(files):
    """Return both traces, read by the tests' own reader of evictions."""
    return [TraceBlocks(file) for file in files]


@pytest.fixture(scope="module")
def explanations(files):
    """Return what `kvcore explain` computes of each trace."""
    return [explain(file) for file in files]


@pytest.fixture(scope="module")
def page(browser, folder, files):
    """Yield the page of both traces, opened once; it must log no error and fetch nothing."""
    file = folder / "page.html"
    file.write_bytes(view_page(files))
    with tab(browser) as found:
        yield found.open(file)
        assert (found.complaints, found.requests) == ([], [])


@pytest.fixture(scope="module")
def marks(sides):
    """Return the rows of each side that differ, with how many of their blocks differ."""
    left, right = sides
    return [differing(left, right), differing(right, left)]


def test_exactly_the_differing_evictions_are_marked(page, files, sides, marks):
    """Page, band, log and `find_differences` mark the evictions that differ by block ids."""
    assert all(
        0 < len(mark) < len(side.evictions) for mark, side in zip(marks, sides, strict=True)
    )
    columns = find_differences(*map(Playback, files)).blocks
    assert [{index: n for index, n in enumerate(column) if n} for column in columns] == marks
    assert page.evaluate(MARKED) == [
        {str(row): blocks for row, blocks in mark.items()} for mark in marks
    ]
    page.evaluate("() => { kvcore.seek(0); for (const panel of kvcore.panels) panel.draw(); }")
    rows, drawn = page.evaluate(BAND)
    assert rows == [sorted(mark) for mark in marks]
    assert drawn == [sum(mark.values()) for mark in marks]
    assert page.evaluate(ONLY_HERE) == rows


def test_keys_visit_each_difference_in_order(page, sides, marks):
    """`d` visits the differences of both sides by time, then by arrived requests.

    `D` goes back.
    """

    def place(each):
        lines = sides[each[0]].lines[: each[1] + 1]
        return lines[-1]["t"], sum(line["event"] == "REQUEST" for line in lines), *each

    expected = sorted(((at, row) for at in (0, 1) for row in marks[at]), key=place)
    page.evaluate("() => kvcore.seek(kvcore.begin)")
    assert [tuple(each) for each in page.evaluate(WALK, "d")] == expected
    assert [tuple(each) for each in page.evaluate(WALK, "D")] == expected[-2::-1]
    page.locator("#difference-next").click()
    until(page, f"() => kvcore.sides[{expected[1][0]}].row === {expected[1][1]}")


def test_both_sides_step_locked_in_time(page, sides):
    """Each step moves one side to the earliest line that is left, until no line is left."""
    lines = [side.lines for side in sides]
    rows, times = [-1, -1], []
    for *now, time in page.evaluate(STEPS, sum(map(len, lines))):
        (moved,) = [at for at in (0, 1) if now[at] != rows[at]]
        rows[moved] += 1
        assert now == rows
        assert time == lines[moved][rows[moved]]["t"]
        times.append(time)
    assert times == sorted(times)
    assert rows == [len(line) - 1 for line in lines]


def test_figures_are_those_of_the_lines(page, sides, marks):
    """Evicted, differing and exclusive blocks are those of the lines, at three times."""
    last = sides[0].lines[-1]["t"]
    for part in (5, 2, 4):
        time = last * part // 5
        cached, expected = [], []
        for side in sides:
            row = max(n for n, line in enumerate(side.lines) if line["t"] <= time)
            cached.append(set(next(islice(side.cached(), row, None))))
        for index, side in enumerate(sides):
            past = [eviction for eviction in side.evictions if eviction.line["t"] <= time]
            evicted = sum(len(each.contents) for each in past)
            differ = sum(marks[index][each.row] for each in past)
            only = len(cached[index] - cached[1 - index])
            expected.append([f"{evicted:,}", f"{differ:,}", f"{only:,}"])
        assert [figures[1:] for figures in page.evaluate(FIGURES, time)] == expected


def losses(side, explanation, eviction):
    """Return counts of an eviction's blocks: dead, missed by request, and policy losses.

    Policy losses are misses of blocks that the optimum would have had.
    """
    users = side.users(eviction.row)
    dead, missed, policy = 0, {}, 0
    for content in eviction.contents:
        if content not in users:
            dead += 1
            continue
        request, place = users[content]
        if place >= side.hit[request]:
            missed[request] = missed.get(request, 0) + 1
            policy += place < explanation.requests[request].optimum // side.size
    return dead, missed, policy


def test_the_story_of_an_eviction_has_the_numbers_of_the_lines(page, explanations, sides):
    """The story of an eviction has its blocks, the misses that follow, and the optimum."""
    side, explanation = sides[0], explanations[0]
    order, kinds = list(side.admissions), set()
    for eviction in side.evictions[::20]:
        line, count = eviction.line, len(eviction.contents)
        dead, missed, policy = losses(side, explanation, eviction)
        kinds |= {(dead == count, policy > 0, len(missed) == 1)}
        shown_story = page.evaluate(STORY, [0, eviction.row])
        now = shown_story["now"]
        assert f"lru evicted {counted(count, 'block')} of request " in now
        assert f"to make room for request {line['for']}." in now
        if dead == count:
            assert "No later request asked for them: this eviction cost nothing." in now
        if policy:
            kept = "them" if policy == count else f"{policy:,} of them"
            assert f"and kept {kept}." in now
        if len(missed) == 1:
            ((request, blocks),) = missed.items()
            wanted = "them" if blocks == count else f"{blocks:,} of them"
            assert f"Request {request} wanted {wanted} " in now
            assert f": {counted(blocks * side.size, 'token')}, at least " in now
            later = [each for each in order if side.admissions[each] > eviction.row]
            between = later.index(request)
            assert (f"after {counted(between - 1, 'other request')}, and had" in now) == (
                between > 1
            )
        check_pool(shown_story["pool"], side, explanation, eviction.row)
    assert all(any(column) for column in zip(*kinds, strict=True)), "each sentence was checked"


def counted(number, what):
    """Return a number with its noun, which is plural unless the number is 1."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def check_pool(shown, side, explanation, row):
    """Compare the outlook of the cached blocks on the page with that of the lines."""
    users, pool = side.users(row), {DEAD: 0, LATE: 0, HELD: 0}
    for content in next(islice(side.cached(), row, None)):
        request, place = users.get(content, (None, None))
        if request is None:
            pool[DEAD] += 1
        else:
            held = place < explanation.requests[request].optimum // side.size
            pool[HELD if held else LATE] += 1
    assert {name: shown.get(name, 0) for name in pool} == pool


def test_the_summary_adds_up_all_evictions(page, explanations, sides):
    """Evicted blocks and misses in the summary are sums over all evictions."""
    side, explanation = sides[0], explanations[0]
    shown_story = page.evaluate(STORY, [0, side.evictions[0].row])["whole"]
    all_of = [losses(side, explanation, eviction) for eviction in side.evictions]
    evicted = sum(len(eviction.contents) for eviction in side.evictions)
    policy = sum(each[2] for each in all_of)
    missed = sum(sum(each[1].values()) for each in all_of)
    again = evicted - sum(each[0] for each in all_of)
    assert f"lru evicted {evicted:,} blocks." in shown_story
    assert f"asked again for {100 * again / evicted:.1f}% of them: " in shown_story
    assert f" {policy:,} missed although the optimum would have had them" in shown_story
    assert f" {missed - policy:,} that the optimum would not have had either" in shown_story
    *_, cached = side.cached()
    assert f"That leaves out the {len(cached):,} blocks that stayed to the end." in shown_story


def test_the_summary_of_a_part_begins_with_what_is_cached_there(
    browser, files, explanations, sides, tmp_path
):
    """In a window the shares of idle and of remaining blocks are those of its lines."""
    side, times = sides[0], [line["t"] for line in sides[0].lines]
    begin, end = times[-1] // 3, 2 * times[-1] // 3
    rows = [row for row, time in enumerate(times) if begin <= time < end]
    cached = [len(found) for found in side.cached()]
    held = sum(cached[row] * (times[row + 1] - times[row]) for row in rows[:-1])
    idle = sum(
        losses(side, explanations[0], each)[0]
        * min(each.line["age"], times[each.row] - times[rows[0]])
        for each in side.evictions
        if each.row in rows
    )
    file = tmp_path / "part.html"
    file.write_bytes(view_page(files[:1], window=Window(begin, end)))
    with tab(browser) as found:
        told = found.open(file).text_content(".story")
    assert f" at least {100 * idle / held:.1f}% of what was cached waited for nobody" in told
    assert f"That leaves out the {cached[rows[-1]]:,} blocks that stayed to the end." in told


def test_the_page_opens_at_the_costliest_eviction_of_the_worse_policy(
    browser, folder, files, explanations, sides, page
):
    """The page opens at the first eviction with the largest loss of the trace with fewer hits.

    `--at` opens it at another time.
    """
    del page  # the fixture has written the file
    hits = [sum(request.hit for request in e.requests.values()) for e in explanations]
    worse = hits.index(min(hits))
    side, explanation = sides[worse], explanations[worse]
    row = -max((losses(side, explanation, each)[2], -each.row) for each in side.evictions)[1]
    with tab(browser) as found:
        opened = found.open(folder / "page.html")
        assert opened.evaluate("(at) => kvcore.sides[at].row", worse) == row
        for seconds, time in (("12.5", 12.5 * NS_PER_S), ("1e6", sides[0].lines[-1]["t"])):
            file = folder / f"{seconds}.html"
            assert run_here("view", files[0], "--at", seconds, "-o", file).returncode == 0
            assert found.open(file).evaluate("() => kvcore.time") == time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "why"),
    [
        ("soon", "expected a number of seconds"),
        ("-3", "time '-3': expected a number"),
        ("1e99", "too large"),
    ],
)
def test_an_invalid_time_is_refused(files, tmp_path, at, why):
    """An invalid `--at` is an error with the reason, and leaves no page."""
    done = run_here("view", files[0], "--at", at, "-o", tmp_path / "page.html")
    assert done.returncode == 2
    assert why in done.stderr
    assert list(tmp_path.iterdir()) == []
