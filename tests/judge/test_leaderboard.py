"""The leaderboard: its numbers, resuming, checking, and the verbs."""

import hashlib
import os
import sys
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from time import time_ns

import attrs
import orjson
import pytest
from click.testing import CliRunner
from helpers.kv_events import batch, stored
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InputError, KVCache
from kvcore_events.recording import RecordingWriter
from kvcore_judge.cells import Cell, EvictionDigest, run_cell
from kvcore_judge.cli.judge import judge
from kvcore_judge.cli.leaderboard import leaderboard
from kvcore_judge.entries import Entry, source_files
from kvcore_judge.leaderboard import (
    check_leaderboard,
    check_scores,
    make_leaderboard,
    panel_of,
)
from kvcore_judge.protocol import Panel, Stream, find_panel, read_stream
from kvcore_judge.report import leaderboard_page
from kvcore_judge.scores import Ratio, interval, ratio_of, score_of
from kvcore_lab.sweep import Journal
from kvcore_replay.untimed import replay

PAGES = Path(__file__).parents[2] / "docs" / "reference"
TOOLS = Stream("tools", "agents:sessions=12", timed=True)
RECENT = Stream("recency", "recency:requests=400")
PANEL = Panel("test", (TOOLS, RECENT), (50, 200))
ENTRIES = [Entry("lfu"), Entry("slru")]

TOML = '[[stream]]\nname = "own"\nworkload = "recency:requests=300"\n'


@pytest.fixture(scope="module")
def board():
    """Return a small leaderboard."""
    return make_leaderboard(PANEL, ENTRIES)


@pytest.fixture
def document(board):
    """Return its document, for a test to change."""
    return orjson.loads(orjson.dumps(board.document()))


def test_hits_are_those_of_a_replay(board):
    """A cell has the hits and the evictions of a plain replay."""
    read = read_stream(RECENT)
    cache = KVCache(read.pool(200), 64, eviction="lfu", accounting="keys")
    cache.tree.watcher = digest = EvictionDigest()
    stats = replay(read.requests, cache)
    result = board.results["lfu", "recency 20%"]
    assert (result.total, result.lookups) == (stats.hit_blocks, stats.lookup_blocks)
    assert result.evictions == digest.hexdigest()


def test_lru_scores_one(board):
    """LRU has a score of 1, and no policy has more hits than the optimum."""
    assert board.scores["lru"].headline == "1.0000"
    for ratio in board.ratios(Entry("slru")):
        assert ratio.of_optimum <= 1


def test_document_does_not_depend_on_jobs_or_order(board):
    """Several processes, and other policies beside them, give the same cells."""
    again = make_leaderboard(PANEL, ENTRIES[::-1], jobs=2)
    assert again.document() == board.document()


def test_every_python_writes_the_same_document(document):
    """Without its versions, a leaderboard is the same bytes on each Python that runs this."""
    del document["version"]
    for policy in document["policies"]:
        del policy["source"]
    digest = hashlib.blake2b(orjson.dumps(document), digest_size=8).hexdigest()
    assert digest == "8e04618e35c02c2e"


def test_finished_cells_are_not_run_again(board, tmp_path, monkeypatch):
    """A journal has the finished cells; a torn last line costs its cell alone."""
    journal = tmp_path / "cells.jsonl"
    make_leaderboard(PANEL, ENTRIES[:1], journal=Journal(journal))
    journal.write_bytes(journal.read_bytes()[:-20])
    cells = []

    def counted(cell, **options):
        cells.append(cell)
        return run_cell(cell, **options)

    monkeypatch.setattr("kvcore_judge.leaderboard.run_cell", counted)
    again = make_leaderboard(PANEL, ENTRIES, journal=Journal(journal))
    assert again.document() == board.document()
    assert len(cells) == 1 + len(PANEL.streams) * len(PANEL.shares)


HELPED = """\
from kvcore import ScoreEviction
import worth


class Helped(ScoreEviction):
    name = "helped"

    def score(self, span, now):
        return worth.of(span)
"""


ALONE = HELPED.replace("import worth", "").replace("worth.of(span)", "0")

SIGNED = """\
from pathlib import Path
from kvcore import ScoreEviction


class Signed(ScoreEviction):
    name = "signed"

    def __init__(self, sign: Path):
        self.sign = sign
        self.factor = int(sign.read_text())

    def score(self, span, now):
        return self.factor * span.depth
"""


@pytest.fixture
def helped(tmp_path, monkeypatch):
    """Return a function that writes a policy in two files, and returns it as a new process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "helped.py"
    path.write_text(HELPED)

    def write(worth):
        (tmp_path / "worth.py").write_text(f"def of(span):\n    return {worth}\n")
        for name in (str(path), "worth"):
            sys.modules.pop(name, None)
        return Entry(str(path))

    yield write
    sys.modules.pop("worth", None)


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """Return a function that makes a leaderboard of a policy by a journal.

    It returns the policy's part of the document, and the number of cells that were run.
    """
    cells = []

    def counted(cell, **options):
        cells.append(cell)
        return run_cell(cell, **options)

    monkeypatch.setattr("kvcore_judge.leaderboard.run_cell", counted)
    panel = Panel("small", (RECENT,), (200,))

    def make(entry):
        cells.clear()
        board = make_leaderboard(panel, [entry], journal=Journal(tmp_path / "j.jsonl"))
        [policy] = [each for each in board.document()["policies"] if each["name"] != "lru"]
        return policy, len(cells)

    return make


def test_a_policy_is_run_again_after_a_file_that_it_imports_was_edited(helped, resumed):
    """A helper of a policy counts in the journal, and in the digest of its source."""
    first, _ = resumed(helped("span.depth"))
    again, count = resumed(helped("span.depth"))
    assert (again, count) == (first, 0)
    other, count = resumed(helped("-span.depth"))
    assert count == 1
    assert other["source"] != first["source"]
    assert other["cells"] != first["cells"]


def test_a_policy_is_run_again_after_a_file_of_its_options_was_edited(tmp_path, resumed):
    """A file that an option names counts by what is in it."""
    policy, sign = tmp_path / "signed.py", tmp_path / "sign"
    policy.write_text(SIGNED)
    sources, counts = [], []
    for text in ("1", "1", "-1"):
        sign.write_text(text)
        about, count = resumed(Entry(f"{policy}:Signed:sign={sign}"))
        sources.append(about["source"])
        counts.append(count)
    assert counts == [2, 0, 1]
    assert sources[0] == sources[1] != sources[2]


def test_all_cells_are_run_again_after_an_edit_of_kvcore(resumed, monkeypatch):
    """A version stands for many commits: the code of kvcore counts in the journal."""
    first, _ = resumed(Entry("lfu"))
    monkeypatch.setattr("kvcore_judge.entries.kvcore_digest", lambda: "edited")
    assert resumed(Entry("lfu")) == (first, 2)


def test_a_policy_that_was_edited_after_it_was_loaded_is_refused(helped, resumed):
    """A process runs the code that it has loaded: the digest of the file is that of another."""
    entry = helped("span.depth")
    entry.build()
    late = time_ns() + 10**9
    os.utime(entry.path, ns=(late, late))
    with pytest.raises(InputError, match=r"helped.py was edited after this process had loaded"):
        resumed(entry)


def test_a_journal_of_something_else_is_refused(tmp_path):
    """A file that is no journal is an error with its name and option, and stays as it is."""
    path = tmp_path / "notes.txt"
    path.write_text('{"a": 1}\n')
    panel = tmp_path / "panel.toml"
    panel.write_text(TOML)
    refused = CliRunner().invoke(leaderboard, ["--panel", str(panel), "--resume", str(path)])
    assert "notes.txt:1: no line has its digest" in str(refused.exception)
    assert "give another --resume" in str(refused.exception)
    assert path.read_text() == '{"a": 1}\n'


def test_check_finds_a_cell_that_was_changed(document):
    """Cells run again are the same; one whose hits were changed is not."""
    everything = 12
    assert all(each.same for each in check_leaderboard(document, PANEL, everything))
    document["policies"][0]["cells"][0]["hits"] += 1
    found = [each.same for each in check_leaderboard(document, PANEL, everything)]
    assert found.count(False) == 1


GIVEN_BY_A_RUN = {
    "policies": ["lookups", "evicted", "saved_s", "evictions", "interval", "tuned", "timed"],
    "cells": ["optimum", "blocks"],
    "streams": ["requests", "key_tokens", "footprint_blocks"],
}


def test_check_compares_all_that_a_run_gives(document):
    """Values that the scores do not have are compared, also those beside all policies."""
    del document["policies"][1:]
    for where, names in GIVEN_BY_A_RUN.items():
        first = document[where][0]
        row = first["cells"][0] if where == "policies" else first
        row |= dict.fromkeys(names, 7)
    found = {each.cell: set(each.differing) for each in check_leaderboard(document, PANEL, 4)}
    assert found["tools 5%"] == {name for names in GIVEN_BY_A_RUN.values() for name in names}
    assert found["tools 20%"] == {*GIVEN_BY_A_RUN["streams"]}
    assert not found["recency 20%"]


@pytest.mark.parametrize("schema", [2, 0, None, True, "1"])
def test_a_leaderboard_of_another_schema_is_refused(document, schema):
    """Values of a schema that is not known here may mean anything."""
    document |= {"panel": "quick", "schema": schema}
    with pytest.raises(InputError, match=f"has schema {schema!r}, and here is schema 1"):
        panel_of(document, None)


@pytest.mark.parametrize("name", ["headline", "all_cells", "worst", "of_optimum"])
def test_check_computes_each_score_again(document, name):
    """A score that the cells do not give is an error that says what they give."""
    check_scores(document, PANEL)
    document["policies"][1]["score"][name] = "9.0000"
    with pytest.raises(InputError, match=f"says {name}='9.0000', and its cells give"):
        check_scores(document, PANEL)


def test_check_computes_ranks_again(document):
    """A policy that is ranked above one of a higher score is an error."""
    document["policies"].reverse()
    with pytest.raises(InputError, match="ranks below one of a lower score"):
        check_scores(document, PANEL)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda each: each["cells"].pop(), "other cells"),
        (lambda each: [policy["cells"].pop() for policy in each["policies"]], "other cells"),
        (lambda each: each["policies"][0]["cells"][0].update(hits=-1), "no whole numbers"),
        (lambda each: each["policies"][0]["cells"][0].update(hits=1.5), "no whole numbers"),
        (lambda each: each["policies"].extend(each["policies"]), "2 policies 'lru'"),
        (lambda each: each["policies"].clear(), "0 policies 'lru'"),
        (lambda each: each["policies"][0].update(name=[]), "no leaderboard"),
        (lambda each: each["policies"][0].update(score=5), "no leaderboard"),
        (lambda each: each.update(cells=5), "no leaderboard"),
    ],
)
def test_scores_of_what_is_no_leaderboard(document, change, match):
    """Cells that are left out, or that are no numbers, are an error: they make no score."""
    change(document)
    with pytest.raises(InputError, match=match):
        check_scores(document, PANEL)


@pytest.mark.parametrize("options", ["", ":Policy", ":load=here"])
def test_check_runs_no_file_that_a_leaderboard_names(document, tmp_path, options):
    """A policy of a file is not run because a document names it, nor is a file opened."""
    path = tmp_path / "policy.py"
    path.write_text("raise SystemExit('the file has run')\n")
    for policy in document["policies"]:
        policy["entry"] = "hazard:load=here" if "load" in options else f"{path}{options}"
    with pytest.raises(InputError, match="Name it yourself: --policy FILE"):
        list(check_leaderboard(document, PANEL, 1))


def test_check_runs_the_files_that_the_caller_names(tmp_path):
    """Policies in files are checked if the caller names these, also two classes of one."""
    path = tmp_path / "own.py"
    path.write_text(
        "from kvcore_plugins.eviction import LFU, LRU\n\n\nclass Own(LRU):\n    pass\n\n\n"
        "class Other(LFU):\n    name = 'other'\n"
    )
    own = [Entry(f"{path}:Own"), Entry(f"{path}:Other")]
    document = orjson.loads(orjson.dumps(make_leaderboard(PANEL, own).document()))
    document["policies"] = [each for each in document["policies"] if each["entry"] == "own.py"]
    checked = list(check_leaderboard(document, PANEL, 8, entries=own))
    assert [each.same for each in checked] == [True] * 8


def test_a_file_was_tuned_on_no_stream(tmp_path):
    """A policy in a file that has the name of a tuned one keeps all of its cells."""
    path = tmp_path / "own.py"
    path.write_text(
        "from kvcore_plugins.eviction import LRU\n\n\nclass Own(LRU):\n    name = 'hazard'\n"
    )
    panel = Panel("test", (Stream("tuned", "mooncake", limit=300),), (100,))
    board = make_leaderboard(panel, [Entry(str(path)), Entry("hazard")])
    tuned = {
        policy["entry"]: policy["cells"][0]["tuned"] for policy in board.document()["policies"]
    }
    assert tuned == {"lru": False, "own.py": False, "hazard": True}


@pytest.mark.parametrize("option", ["--json", "--out=b.json", "--resume=j", "--cells=3"])
def test_options_that_would_do_nothing_are_refused(quick, option):
    """Options that a check does not heed, or that only a check heeds, are refused."""
    check = [] if "cells" in option else ["--check", str(quick)]
    done = CliRunner().invoke(leaderboard, [*check, option])
    assert f"{option.partition('=')[0]} is " in str(done.exception)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("policies", [], "no cells"),
        ("entry", 5, "not installed"),
        ("share", 0, "no leaderboard"),
        ("share", "x", "no leaderboard"),
        ("cells", "x", "no leaderboard"),
    ],
)
def test_check_refuses_what_is_no_leaderboard(document, field, value, match):
    """A document without cells, or with values that no leaderboard has, is an error."""
    if field == "policies":
        document[field] = value
    for policy in document["policies"]:
        for row in [policy] if field in policy else policy["cells"]:
            row[field] = value
    with pytest.raises(InputError, match=match):
        list(check_leaderboard(document, PANEL, 1))


def test_check_refuses_another_version_of_a_policy(document):
    """A leaderboard of another source of a policy cannot be checked here."""
    for policy in document["policies"]:
        policy["source"] = hashlib.blake2b(b"", digest_size=16).hexdigest()
    with pytest.raises(InputError, match="another version"):
        list(check_leaderboard(document, PANEL, 1))


def test_tuned_cells_are_left_out_of_the_headline():
    """The headline is the mean of the other cells; the worst cell may be any."""
    ratios = [Ratio("a", Decimal(4), Decimal(1), tuned=True), Ratio("b", Decimal(1), None)]
    score = score_of(ratios)
    assert (score.headline, score.all_cells) == ("1.0000", "2.0000")
    assert score.worst == ("1.0000", "b")


def test_cell_without_hits_of_lru_counts_by_the_optimum():
    """Where LRU hits nothing, the ratio is that to the optimum; where nothing hits, none."""
    assert ratio_of("a", 5, 0, 10).ratio == Decimal("0.5")
    assert ratio_of("a", 0, 0, 0).ratio is None


@given(st.lists(st.integers(1, 1000), min_size=20, max_size=20), st.integers(1, 9))
def test_interval_holds_a_constant_ratio(lru, factor):
    """A policy with the same multiple of LRU's hits in each stretch has an exact interval."""
    ratio = f"{factor}.0000"
    assert interval([factor * each for each in lru], lru) == (ratio, ratio)


def test_page_has_a_picture_for_each_stream(board):
    """The page fetches nothing, draws each stream, and names the sizes of its panel."""
    page = leaderboard_page(board)
    assert page.count("<svg") == len(PANEL.streams)
    assert "http" not in page
    assert "slru" in page
    assert "a pool of 5 to 20 % of its footprint" in page


def test_a_page_draws_the_optimum_in_its_own_style(board):
    """The optimum has the dashed line, however few policies are drawn beside it."""
    page = leaderboard_page(board)
    assert '<span class="optimum">optimum</span>' in page
    assert '<polyline class="optimum"' in page
    assert "polyline.optimum { stroke-dasharray" in page


def test_tuned_streams_are_known_by_their_workloads():
    """A policy was tuned on workloads, whatever a panel calls its streams."""
    assert find_panel("public").tuned("hazard") == {"conversation", "agentic"}
    streams = Stream("conversation", "zipf:requests=20"), Stream("own", "mooncake")
    assert Panel("own", streams).tuned("hazard") == {"own"}
    assert Panel("own", streams).tuned("lru") == frozenset()


def test_a_timed_stream_needs_a_share_under_a_clock(tmp_path):
    """A panel with a timed stream, of whose sizes none is served under a clock, is refused."""
    path = tmp_path / "panel.toml"
    timed = '[[stream]]\nname = "a"\nworkload = "zipf:requests=20"\ntimed = true\n'
    path.write_text(f"shares = [20, 100]\n{timed}")
    with pytest.raises(InputError, match="none is served under a clock: add one of 10, 50"):
        find_panel(str(path))
    path.write_text(f"shares = [20, 50]\n{timed}")
    assert find_panel(str(path)).streams[0].timed


def test_panel_of_a_file(tmp_path):
    """A file names streams; a digest that is another one is refused."""
    path = tmp_path / "panel.toml"
    path.write_text(TOML)
    panel = find_panel(str(path))
    assert read_stream(panel.streams[0]).requests
    path.write_text(TOML + 'digest = "00"\n')
    with pytest.raises(InputError, match="another file"):
        read_stream(find_panel(str(path)).streams[0])


NO_PANEL = r"panel.toml: give \[\[stream\]\] tables .*, none twice"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[", "at end of document"),
        ("", NO_PANEL),
        ("stream = 3", NO_PANEL),
        ("[[stream]]\nname = 'a'\n", NO_PANEL),
        (TOML.replace('"own"', "[1]"), NO_PANEL),
        (TOML.replace('"recency', '5 # "'), NO_PANEL),
        (TOML + "limit = 'all'\n", NO_PANEL),
        (TOML + "limit = 0\n", NO_PANEL),
        (TOML + "limit = true\n", NO_PANEL),
        (TOML + "timed = 'no'\n", NO_PANEL),
        (TOML + "digest = 5\n", NO_PANEL),
        (TOML + TOML, NO_PANEL),
        ("shares = [5, 5]\n" + TOML, NO_PANEL),
    ],
)
def test_panel_of_a_wrong_file(text, problem, tmp_path):
    """A file that is no panel is an error that says what one has."""
    path = tmp_path / "panel.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        find_panel(str(path))


def test_verb_writes_and_checks(tmp_path):
    """`kvcore leaderboard` writes the document, and checks it afterwards."""
    (tmp_path / "panel.toml").write_text(TOML)
    out = tmp_path / "board.json"
    options = ["--panel", str(tmp_path / "panel.toml"), "--jobs", "1"]
    made = CliRunner().invoke(leaderboard, [*options, "--policy", "lfu", "--out", str(out)])
    assert made.exit_code == 0, made.output
    assert {policy["name"] for policy in orjson.loads(out.read_bytes())["policies"]} == {
        "lru",
        "lfu",
    }
    checked = CliRunner().invoke(leaderboard, [*options, "--check", str(out), "--cells", "2"])
    assert checked.exit_code == 0, checked.output
    assert checked.output.count("the same") == 2


@pytest.mark.parametrize("command", ["leaderboard", "judge"])
def test_verbs_say_what_the_requests_of_a_panel_lack(command, tmp_path):
    """A recording of a panel that lost batches is noted on stderr, and on the page."""
    with RecordingWriter(tmp_path / "events.jsonl") as recording:
        for number in (0, 1, 9):
            recording.batch(batch(stored(1, 2)), number, 0)
    panel, page = tmp_path / "panel.toml", tmp_path / "board.html"
    workload = f"kv-events:path={tmp_path}/events.jsonl,lookups=full"
    panel.write_text(f"[[stream]]\nname = 'own'\nworkload = '{workload}'\n")
    (tmp_path / "own.py").write_text(ALONE)
    given = {
        "leaderboard": ["--policy", "lfu", "--jobs", "1", "-o", str(page)],
        "judge": [str(tmp_path / "own.py"), "--no-kit", "--unsafe"],
    }[command]
    verbs = {"leaderboard": leaderboard, "judge": judge}
    done = CliRunner().invoke(verbs[command], [*given, "--panel", str(panel)])
    assert done.exit_code == 0, done.output
    assert "kvcore: own: lost batches: 7 (gaps: 1)" in done.stderr
    assert command == "judge" or "own: lost batches: 7 (gaps: 1)" in page.read_text()


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Return the file of a leaderboard of a panel `quick` that is a small one."""
    small = attrs.evolve(PANEL, name="quick")
    monkeypatch.setattr("kvcore_judge.leaderboard.find_panel", {"quick": small}.__getitem__)
    path = tmp_path / "quick.json"
    path.write_bytes(orjson.dumps(make_leaderboard(small, ENTRIES[:1]).document()))
    return path


def test_check_takes_the_panel_of_the_leaderboard(quick):
    """Without `--panel`, cells are run on the panel that the leaderboard names."""
    checked = CliRunner().invoke(leaderboard, ["--check", str(quick), "--cells", "8"])
    assert checked.exit_code == 0, checked.output
    assert checked.output.count("the same") == 8


def test_check_draws_cells_by_a_seed_that_it_prints(quick, monkeypatch):
    """Each check has a seed of its own; `--seed` draws the same cells again."""
    seeds = iter((7, 8))
    monkeypatch.setattr("kvcore_judge.cli.leaderboard.randbelow", lambda _: next(seeds))

    def cells(*options):
        options = ["--check", str(quick), "--cells", "2", *options]
        return CliRunner().invoke(leaderboard, options).output

    first, second = cells(), cells()
    assert "run again, by --seed 7:" in first
    assert first.splitlines()[1:] != second.splitlines()[1:]
    assert cells("--seed", "7") == first


def test_check_refuses_forged_scores(quick):
    """A headline that its cells do not give is an error, whichever cells are drawn."""
    quick.write_bytes(
        quick.read_bytes().replace(b'"headline":"1.0000"', b'"headline":"2.0000"')
    )
    checked = CliRunner().invoke(leaderboard, ["--check", str(quick), "--cells", "1"])
    assert isinstance(checked.exception, InputError)
    assert "says headline='2.0000', and its cells give '1.0000'" in str(checked.exception)


def test_check_refuses_another_panel(quick):
    """A panel that is not that of the leaderboard is an error that names both."""
    checked = CliRunner().invoke(leaderboard, ["--check", str(quick), "--panel", "public"])
    assert isinstance(checked.exception, InputError)
    assert "--panel public: this leaderboard is of panel 'quick'" in str(checked.exception)


def test_check_opens_no_panel_that_a_leaderboard_names(tmp_path):
    """The file of a panel is to be given: the error says so, and the file is not opened."""
    path = tmp_path / "board.json"
    path.write_text('{"panel": "/dev/stdin"}')
    checked = CliRunner().invoke(leaderboard, ["--check", str(path)])
    assert isinstance(checked.exception, InputError)
    assert "a file, '/dev/stdin': give it by --panel FILE" in str(checked.exception)


def test_a_leaderboard_nested_deeper_than_can_be_shown_is_one_line_of_error(tmp_path):
    """`--check` refuses nested values as all readers of JSON do, before one is in a message."""
    document = (PAGES / "leaderboard.json").read_bytes()
    source = orjson.loads(document)["policies"][0]["source"]
    file = tmp_path / "board.json"
    file.write_bytes(document.replace(b'"%s"' % source.encode(), b"[" * 990 + b"]" * 990))
    checked = CliRunner().invoke(leaderboard, ["--check", str(file)])
    assert isinstance(checked.exception, InputError)
    assert "nested more than 254 levels deep" in str(checked.exception)


def test_the_committed_leaderboard_is_of_these_policies():
    """The leaderboard of the pages has the sources of the policies, and the page its scores."""
    document = orjson.loads((PAGES / "leaderboard.json").read_bytes())
    page = (PAGES / "protocol.md").read_text("utf-8")
    for policy in document["policies"]:
        name, score = policy["name"], policy["score"]
        assert policy["source"] == Entry(name).describe()["source"], name
        row = f"| `{name}` | {score['headline']} | {score['all_cells']} |"
        assert row in page


def test_the_source_of_a_policy_has_what_it_imports():
    """The digest of a policy covers the modules of its package that it is made of."""
    names = [path.name for path in source_files(type(Entry("hazard").build()))]
    assert names[0] == "hazard.py"
    assert {"hazard_guard.py", "survival.py", "queues.py"} < {*names}
    assert [path.name for path in source_files(type(Entry("lru").build()))] == ["lru.py"]


def test_the_source_of_a_policy_alone_in_its_file_is_the_file(tmp_path):
    """The digest of a policy in one file is what `b2sum -l 128` prints of the file."""
    path = tmp_path / "own.py"
    path.write_text(ALONE)
    source = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    assert Entry(str(path)).describe()["source"] == source


def test_the_source_has_the_modules_that_are_imported_whole(tmp_path, monkeypatch):
    """A module of its package whose functions a policy calls by its name is in the source."""
    package = tmp_path / "package_of_worth"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "worth.py").write_text("def of(span):\n    return 0\n")
    (package / "policy.py").write_text(HELPED.replace("import worth", "from . import worth"))
    monkeypatch.syspath_prepend(tmp_path)
    policy = import_module("package_of_worth.policy").Helped
    assert [path.name for path in source_files(policy)] == ["policy.py", "worth.py"]


def test_generated_streams_are_equal_everywhere():
    """The digest of the requests of both generated workloads is fixed."""
    found = {}
    for stream in (TOOLS, RECENT):
        requests = read_stream(stream).requests
        rows = [
            (request.arrival, list(request.keys), request.output_tokens, request.tool)
            for request in requests
        ]
        found[stream.name] = hashlib.blake2b(repr(rows).encode(), digest_size=8).hexdigest()
    assert found == {"tools": "80c5132c2b0f4f00", "recency": "18e0b86df9577dc2"}


def test_cells_under_a_clock_have_times(board):
    """A timed stream has times in its timed sizes that hold its longest request, alone."""
    timed = {name for (_, name), result in board.results.items() if result.timed is not None}
    assert timed == {"tools 20%"}
    assert run_cell(Cell(Entry("lru"), RECENT, 200)).timed is None
