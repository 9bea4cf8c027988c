"""The workbench: what it answers, the files of its site, and the page in a browser."""

import json
import sys
import zipfile
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import run
from threading import Thread

import orjson
import pytest
import zstandard
from click.testing import CliRunner
from helpers.browser import NARROW
from helpers.kv_events import batch, record, stored
from helpers.programs import PYODIDE

from kvcore import simulate
from kvcore_cli.output import json_bytes
from kvcore_judge import site as sites
from kvcore_judge import workbench
from kvcore_judge.cells import Cell, run_cell
from kvcore_judge.cli.workbench import workbench as verb
from kvcore_judge.entries import Entry
from kvcore_judge.leaderboard import make_leaderboard
from kvcore_judge.protocol import find_panel
from kvcore_plugins.workload import Mooncake, Zipf

POLICY = """\
from kvcore import ScoreEviction


class Used(ScoreEviction):
    name = "used"

    def score(self, span, now):
        return span.hit_count
"""

WRONG = {
    "retur": ("SyntaxError", "line 8: retur span.hit_count"),
    "return span.hits +": ("AttributeError", "line 8: return span.hits +"),
    "return [] +": ("TypeError", "line 8: return [] + span.hit_count"),
    "1 / 0; return": ("ZeroDivisionError", "line 8: 1 / 0; return"),
}

LOOP = POLICY.replace("return", "\n        while True: pass\n        return")


def rows_of(count):
    """Return the first rows of the bundled trace."""
    rows = [
        {
            "timestamp": request.arrival // 1_000_000,
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.keys),
        }
        for request, _ in zip(Mooncake(), range(count), strict=False)
    ]
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Return the function of the page, which works in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return partial(workbench.answer, report=lambda *_: None)


def test_answer_has_the_document_of_a_leaderboard(answer, tmp_path):
    """A panel gives the document that `kvcore leaderboard` writes, byte by byte."""
    found = answer(POLICY, "quick", None)
    board = make_leaderboard(
        find_panel("quick"), [Entry("arc"), Entry(str(tmp_path / "policy.py"))]
    )
    assert found["document"].encode() == json_bytes(board.document())
    assert found["digest"] == board.about[str(tmp_path / "policy.py")]["source"]


def test_answer_shows_hits_times_and_misses(answer):
    """One stream has the optimum beside the hits, times under the clock, and all tokens."""
    found = answer(POLICY, "conversation", 300)
    tables = {table["title"].partition(":")[0]: table for table in found["tables"]}
    hits = tables["Hits, in blocks"]
    assert hits["headers"] == ["cell", "blocks", "lru", "arc", "policy.py", "optimum"]
    for row in hits["rows"]:
        numbers = [int(cell.replace(",", "")) for cell in row[2:]]
        assert max(numbers) == numbers[-1]
    assert {row[0] for row in tables["Time to the first token"]["rows"]} == {
        "arc",
        "lru",
        "policy.py",
    }
    for column in (1, 2):
        shares = [row[column] for row in tables["Where prompt tokens went"]["rows"]]
        total = sum(float(share.rstrip("%")) for share in shares if "%" in share)
        assert total == pytest.approx(100, abs=0.5)
    assert found["curves"][0]["sizes"] == ["0.5%", "1%", "2%", "5%", "10%", "20%", "50%"]


def test_cells_are_kept_but_those_of_a_new_policy(answer, monkeypatch):
    """A second run replays the changed policy alone, by its new source."""
    first = answer(POLICY, "agentic", 60)
    ran = []
    whole = workbench.make_leaderboard

    def recorded(*given, **more):
        def progress(description, total):
            ran.append(total)
            return workbench.silent(description, total)

        return whole(*given, **{**more, "progress": progress})

    monkeypatch.setattr(workbench, "make_leaderboard", recorded)
    again = answer(POLICY, "agentic", 60)
    other = answer(POLICY.replace("span.hit_count", "-span.hit_count"), "agentic", 60)
    assert ran == [0, 7]
    assert again["document"] == first["document"]
    assert other["digest"] != first["digest"]


@pytest.mark.parametrize("wrong", WRONG)
def test_error_names_the_line(answer, wrong):
    """A policy that fails gives its error and its line, and nothing else."""
    found = answer(POLICY.replace("return", wrong), "quick", None)
    assert [*found] == ["error"]
    for part in WRONG[wrong]:
        assert part in found["error"]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("x = 1\n", "no classes to choose from"),
        (POLICY.replace('name = "used"', ""), "needs an attribute `name`"),
        (POLICY + "\n    def on_queued(self, request, now): pass\n", "do not look ahead"),
    ],
)
def test_what_is_no_policy_is_refused(answer, source, what):
    """A file without a policy, or with one that looks ahead, has no score."""
    assert what in answer(source, "quick", None)["error"]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (
            POLICY + "\n    def __init__(self): open('nowhere')\n",
            "'nowhere'\nline 10: def __init__",
        ),
        (POLICY.replace("used", "\udc00"), "surrogates not allowed"),
        (POLICY + "\0", "null bytes"),
    ],
)
def test_every_failure_is_an_answer(answer, source, what):
    """A constructor without its file, and a text that is no source, give an error."""
    found = answer(source, "quick", None)
    assert [*found] == ["error"]
    assert what in found["error"]
    assert "line None" not in found["error"]


@pytest.mark.parametrize("limit", [0, -5, 0.5, 1e30, True])
def test_a_number_of_requests_that_is_none_is_refused(answer, limit):
    """Of one stream, requests are a whole number from 1 on: any other is named."""
    found = answer(POLICY, "conversation", limit)
    assert found == {
        "error": f"requests must be a whole number from 1 on, or none for all, not {limit}"
    }


def test_a_recording_of_events_is_refused_with_the_way_to_its_requests(answer, tmp_path):
    """No field of the page says that every use was reported: the error has a command."""
    path = record(tmp_path / "events.jsonl", batch(stored(1)))
    error = answer(POLICY, str(path), None)["error"]
    assert "`kvcore simulate kv-events:path=events.jsonl,lookups=full --trace" in error


def test_answer_says_what_the_requests_of_a_file_lack(answer, tmp_path):
    """A trace that is cut is told of below the result."""
    path = tmp_path / "cut.jsonl"
    simulate(Zipf(requests=50), blocks=400, trace=path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    last = answer(POLICY, str(path), None)["reading"].splitlines()[-1]
    assert last.startswith("cut.jsonl: the trace is cut")


def test_another_file_at_a_path_is_read_after_the_first_is_forgotten(answer, tmp_path):
    """The requests of a file are kept by its path, until they are forgotten."""
    path = tmp_path / "own.jsonl"
    path.write_bytes(rows_of(60))
    requests = []
    for count, forgotten in ((60, False), (80, False), (80, True)):
        path.write_bytes(rows_of(count))
        if forgotten:
            workbench.forget()
        [stream] = orjson.loads(answer(POLICY, str(path), None)["document"])["streams"]
        requests.append(stream["requests"])
    assert requests == [60, 60, 80]


# The site.


@pytest.fixture
def runtime(tmp_path):
    """Return a folder that looks like the runtime, with a wheel."""
    folder = tmp_path / "pyodide"
    folder.mkdir()
    for name in sites.RUNTIME:
        (folder / name).write_text(name)
    info = {"python": "3.14.2", "abi_version": "2026_0", "arch": "wasm32"}
    (folder / sites.LOCK).write_text(json.dumps({"info": info, "packages": {"numpy": {}}}))
    (folder / f"msgspec-0.22.0-{sites.TAG}.whl").write_text("wheel")
    return folder


def test_offline_files_are_those_of_the_site(runtime, tmp_path):
    """The verb writes every file that the page keeps for later, and says where it is."""
    out = tmp_path / "site"
    done = CliRunner().invoke(verb, ["--pyodide", str(runtime), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert str(out) in done.output
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    line = (out / "offline.js").read_text().splitlines()[1]
    kept = orjson.loads(line.removeprefix("const FILES = ").removesuffix(";"))
    assert {*kept} == written - {"offline.js"} | {"./"}
    assert orjson.loads((out / "pyodide" / sites.LOCK).read_bytes())["packages"] == {}


def test_equal_installations_give_equal_bytes(runtime):
    """The site does not depend on when it is made."""
    assert sites.site_files(runtime) == sites.site_files(runtime)


@pytest.mark.parametrize(
    "name", [*sites.RUNTIME, sites.LOCK, f"msgspec-0.22.0-{sites.TAG}.whl"]
)
def test_a_file_that_is_missing_is_named_with_its_source(runtime, tmp_path, name):
    """Without a file of the runtime nothing is written, and the error says how to get it."""
    (runtime / name).unlink()
    out = tmp_path / "site"
    with pytest.raises(sites.InputError, match=r"npm install|pip download") as error:
        sites.write_site(out, runtime)
    assert name.partition("-0")[0] in str(error.value)
    assert not out.exists()


@pytest.mark.parametrize(
    "text", ["{}", "no JSON", '{"info": {"python": "3.13.1", "abi_version": "2025_0"}}']
)
def test_another_release_of_the_runtime_is_refused(runtime, text):
    """A lock of another release, or none, is refused before anything is written."""
    (runtime / sites.LOCK).write_text(text)
    with pytest.raises(sites.InputError, match=sites.PYODIDE):
        sites.site_files(runtime)


def test_the_archive_runs_alone(runtime, tmp_path):
    """The packed files need nothing else of this machine, and give the same evictions."""
    packed = tmp_path / "kvcore.zip"
    packed.write_bytes(sites.site_files(runtime)["packages/kvcore.zip"])
    with zipfile.ZipFile(packed) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "packages")
    assert not [name for name in names if "__pycache__" in name or name.endswith(".so")]
    assert [name for name in names if "attrs-" in name and "LICENSE" in name]
    program = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from kvcore_judge.cells import Cell, run_cell\n"
        "from kvcore_judge.entries import Entry\n"
        "from kvcore_judge.protocol import find_panel\n"
        "print(run_cell(Cell(Entry('arc'), find_panel('quick').streams[0], 20)).evictions)\n"
        "print(sys.modules['orjson'].__file__)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "packages")]
    done = run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    evictions, module = done.stdout.split()
    here = run_cell(Cell(Entry("arc"), find_panel("quick").streams[0], 20))
    assert (evictions, Path(module).parent) == (here.evictions, tmp_path / "packages")


# The page.


@contextmanager
def serving(folder):
    """Yield the address of a server of a folder on this machine, and the server."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of a site with the real runtime."""
    if not any(PYODIDE.glob("msgspec-*.whl")):
        pytest.skip(f"{PYODIDE} has no Python for browsers: python tests/helpers/programs.py")
    out = tmp_path_factory.mktemp("site")
    sites.write_site(out, PYODIDE)
    return out


class Workbench:
    """The page in a browser, at the width of a phone.

    Attributes:
        page: playwright's page.
        complaints: errors of the console and of scripts.
    """

    def __init__(self, page):
        self.page = page
        self.complaints = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text))

    def wait(self, state):
        """Wait until the page is `ready` or `running`."""
        self.page.wait_for_selector(f"body[data-state={state}]", timeout=300_000)

    def start(self, source, choice=None, limit=None):
        """Type a policy, choose what it is run on, and press Run."""
        self.page.fill("#policy", source)
        if choice is not None:
            self.page.select_option("#choice", choice)
        if limit is not None:
            self.page.fill("#limit", limit)
        self.page.click("#run")

    def run(self, *given):
        """Run a policy; return the error, and the document of the result, if any."""
        self.start(*given)
        self.page.wait_for_selector("#error:not([hidden]), #result button", timeout=300_000)
        self.wait("ready")
        error = self.page.inner_text("#error") if self.page.is_visible("#error") else ""
        if error:
            return error, None
        with self.page.expect_download() as download:
            self.page.click("#result button")
        return "", Path(download.value.path()).read_bytes()


@pytest.fixture(scope="module")
def served(site):
    """Yield the address of the site, and its server."""
    with serving(site) as started:
        yield started


@pytest.fixture(scope="module")
def visit(browser, served):
    """Yield the page, once Python is ready in it, and the URLs that were loaded for it."""
    with browser.visit() as (page, loaded):
        shown = Workbench(page)
        page.goto(served[0])
        shown.wait("ready")
        yield shown, loaded
        assert shown.complaints == []


@pytest.fixture
def shown(visit):
    """Return the page."""
    return visit[0]


def test_page_scores_as_the_leaderboard_does(shown, tmp_path):
    """The browser's document of a panel is the native one, byte by byte."""
    _, document = shown.run(POLICY, "quick")
    (tmp_path / "policy.py").write_text(POLICY)
    board = make_leaderboard(
        find_panel("quick"), [Entry("arc"), Entry(str(tmp_path / "policy.py"))]
    )
    assert document == json_bytes(board.document())


def test_page_serves_under_the_clock_as_here(shown, answer):
    """Hits, times and evictions on a part of the bundled trace are the native ones."""
    _, document = shown.run(POLICY, "conversation", "300")
    assert document.decode() == answer(POLICY, "conversation", 300)["document"]
    assert "TTFT" in shown.page.inner_text("#result")


@pytest.mark.parametrize("wrong", WRONG)
def test_page_shows_an_error_and_goes_on(shown, wrong):
    """The error of a policy is shown with its line, and the next policy has a result."""
    error, document = shown.run(POLICY.replace("return", wrong), "quick")
    assert document is None
    for part in WRONG[wrong]:
        assert part in error


def test_a_dropped_file_stays_here(shown, answer, tmp_path):
    """Requests of a compressed file give the native document, and are sent nowhere."""
    file = tmp_path / "own.jsonl.zst"
    file.write_bytes(zstandard.compress(rows_of(200)))
    shown.page.set_input_files("#file", file)
    _, document = shown.run(POLICY, None, "")
    native = orjson.loads(answer(POLICY, str(file), None)["document"])
    assert orjson.loads(document)["policies"] == native["policies"]


def test_a_dropped_file_is_kept_once(shown, tmp_path):
    """A second run on a file replays the policy alone; the next file takes its place."""
    shown.page.evaluate(
        "told = []; new MutationObserver(() => told.push(state.textContent))"
        ".observe(state, {childList: true})"
    )
    documents = []
    for name, count, hits in (("a", 150, ""), ("a", 150, "-"), ("b", 90, "")):
        file = tmp_path / f"{name}.jsonl"
        if not file.exists():
            file.write_bytes(rows_of(count))
        shown.page.set_input_files("#file", file)
        source = POLICY.replace("span.hit", f"{hits}span.hit")
        documents.append(orjson.loads(shown.run(source, None, "")[1]))
    totals = [
        text[-2:] for text in shown.page.evaluate("told") if text.startswith("judging: 0")
    ]
    assert totals == ["21", " 7", "21"]
    assert [each["streams"][0]["requests"] for each in documents] == [150, 150, 90]
    listing = "import os\nraise ValueError(os.listdir('dropped'))\n"
    assert "['b.jsonl']" in shown.run(listing)[0]


@pytest.mark.parametrize("limit", ["1e30", "-5", "0.5", "0"])
def test_page_refuses_a_number_of_requests_that_is_none(shown, limit):
    """The page says what to give, and Python goes on."""
    error, document = shown.run(POLICY, "agentic", limit)
    assert document is None
    assert "Requests: give a whole number from 1 on" in error
    assert shown.page.inner_text("#state") != "Running."
    assert shown.run(POLICY, "quick")[0] == ""


@pytest.mark.parametrize("link", ["#e30", "#bnVsbA", "#W10"])
def test_a_link_without_a_policy_is_refused(browser, served, link):
    """`{}`, `null` and `[]` are no links: the policy stays the page's own."""
    with browser.visit() as (page, _):
        page.goto(served[0] + link)
        page.wait_for_selector("#error:not([hidden])")
        assert "no link that this page has made" in page.inner_text("#error")
        assert "class Shallow" in page.input_value("#policy")
        assert page.is_hidden("#linked")


def test_a_policy_reaches_no_network_and_nothing_that_is_kept(shown):
    """A linked policy finds neither the network nor the files of the site."""
    names = ("fetch", "XMLHttpRequest", "WebSocket", "Worker", "caches", "indexedDB")
    names += ("webkitRequestFileSystem", "webkitRequestFileSystemSync")
    source = f"import js\nraise ValueError([n for n in {names} if hasattr(js, n)])\n"
    error, _ = shown.run(source, "quick")
    assert "ValueError([])" in error


def test_a_policy_that_never_returns_can_be_stopped(shown):
    """After Stop the page is ready for another policy."""
    shown.start(LOOP, "quick")
    shown.wait("running")
    shown.page.click("#stop")
    shown.wait("ready")
    error, document = shown.run(POLICY, "agentic", "40")
    assert error == ""
    assert document


def test_after_a_crash_the_next_run_has_a_result(shown):
    """Python is started again, and its loading is no end of the run that waits for it."""
    assert shown.run("import os\nos._exit(1)\n", "quick")[0]
    shown.page.evaluate(
        "told = []; new MutationObserver(() => told.push(state.textContent))"
        ".observe(state, {childList: true})"
    )
    error, document = shown.run(POLICY, "agentic", "40")
    assert error == ""
    assert document
    told = shown.page.evaluate("told")
    assert "Running." in told
    assert "Ready." not in told


def test_a_missing_file_of_the_page_is_told_and_asked_for_again(browser, served):
    """An error page in place of a file is not run: the next run asks for the file again."""
    with browser.visit() as (page, _):
        page.route("**/worker.js", lambda route: route.fulfill(status=404, body="not here"))
        page.goto(served[0])
        page.wait_for_selector("#error:not([hidden])")
        assert "worker.js cannot be loaded: 404" in page.inner_text("#error")
        page.unroute("**/worker.js")
        assert Workbench(page).run(POLICY, "agentic", "40")[1]


def test_page_fits_a_phone(shown):
    """Nothing is wider than the screen but tables, which scroll by themselves."""
    shown.run(POLICY, "agentic", "40")
    assert shown.page.evaluate("document.documentElement.scrollWidth") == NARROW[0]


def test_a_link_carries_policy_and_options(browser, shown):
    """Another visitor sees what was shared, a warning, and no result before he runs it."""
    shown.page.fill("#policy", POLICY + "# é\n")
    shown.page.select_option("#choice", "tools")
    shown.page.fill("#limit", "77")
    shown.page.click("#share")
    with browser.visit() as (page, _):
        page.goto(shown.page.url)
        page.wait_for_selector("#linked:not([hidden])")
        assert page.input_value("#policy") == POLICY + "# é\n"
        assert page.input_value("#choice") == "tools"
        assert page.input_value("#limit") == "77"
        assert page.inner_text("#result") == ""


def test_nothing_is_fetched_but_files_of_the_site(visit, served, site):
    """Every address that was loaded is of a file that the verb has written."""
    base = served[0]
    addresses = [url for url in visit[1] if not url.startswith("blob:" + base)]
    assert len(addresses) > len(sites.RUNTIME)
    for url in addresses:
        assert url.startswith(base), url
        assert (site / url.removeprefix(base).partition("#")[0]).exists(), url


def test_page_works_offline_after_the_first_visit(browser, site):
    """With the server gone the page opens again, and scores a policy."""
    with browser.visit() as (page, _):
        shown = Workbench(page)
        with serving(site) as (address, _):
            page.goto(address)
            shown.wait("ready")
        page.reload()
        shown.wait("ready")
        assert shown.run(POLICY, "agentic", "40")[1]
