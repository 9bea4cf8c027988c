"""Tests of `kvcore report`: it makes one page of results, and refuses other files."""

import csv
import gzip
import json
import shlex

import pytest
from helpers.commands import run_here
from helpers.pages import data_of
from helpers.traces import record

import kvcore
from kvcore_pages.report import report_page

MARKUP = "</script><script>alert('x')</script><b>\"&amp;"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return a folder with a result of each kind, of small workloads."""
    folder = tmp_path_factory.mktemp("results")
    work = ("zipf:requests=120,rate=40", "--block-size", 16)

    def kept(name, *arguments):
        run = run_here(*arguments, cwd=folder)
        assert run.returncode in (0, 1), run.stderr
        (folder / name).write_text(run.stdout)

    pool = ("--blocks", 400)
    run_here("simulate", *work, *pool, "--out", "lru", cwd=folder)
    run_here("simulate", *work, *pool, "--eviction", "lfu", "--out", "lfu", cwd=folder)
    kept("simulate.json", "simulate", *work, *pool, "--json", "--no-search")
    policies = ("--eviction", "lru,lfu,optimum")
    kept("compare.json", "compare", *work, *policies, "--blocks", "100,400", "--json")
    memory = ("--memory", "40MiB,1GiB", "--model", "llama-3.1-8b")
    kept("memory.json", "compare", *work, *policies, *memory, "--json")
    kept("curve.json", "curve", *work, "--eviction", "lru", "--sizes", "100,400", "--json")
    tier = ("--tier", "host:memory=1GiB", "--sizes", "100,400")
    kept("plane.json", "curve", *work, *tier, "--json")
    kept("size.json", "size", "llama-3.1-8b", "--device", "h100", "--json")
    kept("whatif.json", "whatif", "lru/trace.jsonl.gz", "--eviction", "lfu", "--json")
    kept("explain.json", "explain", "lru/trace.jsonl.gz", "--summary", "--json")
    kept("one.json", "explain", "lru/trace.jsonl.gz", 50, "--json")
    kept("replay.json", "replay", "lru/trace.jsonl.gz", "--json")
    run_here(
        "compare", *work, "--eviction", "lru", *pool, "--trace", "serial.jsonl", cwd=folder
    )
    (folder / "cluster.json").write_text('{"schema": 1, "ttft_s": 1, "hit": 1, "replicas": 2}')
    (folder / "later").mkdir()
    summary = json.loads((folder / "lru/summary.json").read_bytes())
    (folder / "later/summary.json").write_text(json.dumps(summary | {"schema": 9}))
    (folder / "grid.toml").write_text(
        'mode = "compare"\nworkload = "zipf:requests=50"\nblocks = [50, 200]\n'
        'eviction = ["lru", "lfu", "optimum"]\n'
    )
    for table in ("sweep.csv", "sweep.json", "sweep.parquet"):
        run_here("sweep", "grid.toml", "--jobs", 1, "--out", table, cwd=folder)
        journal = (folder / "sweep.csv.journal").read_bytes()
        (folder / "sweep.json.journal").write_bytes(journal)  # so that no cell is run again
        (folder / "sweep.parquet.journal").write_bytes(journal)
    fleet = ("--device", "h100", "--slo", "ttft=2", "--max-gpus", 2, "--jobs", 1)
    run_here("plan", "zipf:requests=20", *fleet, "--out", "plan", cwd=folder)
    return folder


def read_page(page):
    """Return the report that a page holds, and all its texts as one string."""
    found = data_of(page, "report")
    return found, json.dumps(found, ensure_ascii=False)


def tables(found):
    """Return the rows of each table of a report, by caption."""
    parts = (part for section in found["sections"] for part in section["parts"])
    return {part["caption"]: part["rows"] for part in parts if part["kind"] == "table"}


def charts(found):
    """Return the charts of a report, by title."""
    parts = (part for section in found["sections"] for part in section["parts"])
    return {part["title"]: part for part in parts if part["kind"] in ("chart", "bars")}


def reported(results, *names):
    """Return the report on the page of some results."""
    return read_page(report_page([results / name for name in names]))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lru", "Run: lru"),
        ("lru/trace.jsonl.gz", "Run: trace.jsonl.gz"),
        ("serial.jsonl", "Run: serial.jsonl"),
        ("simulate.json", "Run: simulate.json"),
        ("compare.json", "Comparison of eviction policies: compare.json"),
        ("curve.json", "Hit curves: curve.json"),
        ("plane.json", "Hits by the sizes of pool and tier: plane.json"),
        ("sweep.csv", "Sweep: sweep.csv"),
        ("sweep.json", "Sweep: sweep.json"),
        ("sweep.parquet", "Sweep: sweep.parquet"),
        ("plan", "Plan of a fleet: plan"),
        ("plan/plan.json", "Plan of a fleet: plan.json"),
        ("whatif.json", "What if: whatif.json"),
        ("explain.json", "Miss reasons: explain.json"),
        ("one.json", "Miss reasons: one.json"),
        ("size.json", "Size of K/V: size.json"),
    ],
)
def test_results_are_recognised_by_their_content(results, name, kind):
    """Each kind of result is a section with the title of its kind."""
    assert [section["title"] for section in reported(results, name)["sections"]] == [kind]


def test_a_document_is_recognised_under_any_name(results, tmp_path):
    """A document is recognised by its content, under any name and compressed or not."""
    for name, data in {
        "plan.csv": (results / "compare.json").read_bytes(),
        "sweep.json": gzip.compress((results / "compare.json").read_bytes()),
    }.items():
        (tmp_path / name).write_bytes(data)
        (section,) = reported(tmp_path, name)["sections"]
        assert section["title"] == f"Comparison of eviction policies: {name}"


@pytest.mark.parametrize(
    ("name", "seems"),
    [
        ("replay.json", "give the trace itself"),
        ("lru/requests.jsonl", "give the folder that `--out` wrote"),
        ("cluster.json", "it seems to be the summary of a cluster: give its trace"),
        ("later", "summary.json: schema 9, and 1 is read here"),
        ("sweep.csv.journal", "the journal of a sweep"),
        ("grid.toml", "it is no result"),
        (".", "a folder without any of summary.json"),
        ("absent", "cannot be read: No such file"),
    ],
)
def test_the_error_for_another_file_names_its_apparent_kind(results, name, seems):
    """The error for a file that is no result names what it seems to be; no page is written."""
    run = run_here("report", name, "-o", "page.html", cwd=results)
    assert (run.returncode, run.stdout) == (2, "")
    assert seems in run.stderr
    assert not [*results.glob("page.html*")]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"<!doctype html><html></html>",
        b"[1, 2]",
        b'{"schema": 1}',
        b'{"schema": 1, "rows": [{}], "infinite": {}, "workload": {}, "count": "keys"}',
        b'{"schema": 1, "kv": 1, "tokens": 2, "batch": 3, "model": null}',
        b'{"schema": 9, "kv": 1, "tokens": 2, "batch": 3, "model": null}',
        b'{"schema": 1, "mode": "compare", "cells": 0, "rows": []}',
        b"\x1f\x8b\x08\x00",
    ],
)
def test_damaged_files_are_named(tmp_path, text):
    """The error for a damaged or foreign file names the file, and no page is written."""
    (tmp_path / "it").write_bytes(text)
    run = run_here("report", "it", "-o", "page.html", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("kvcore: error: it: ")
    assert [each.name for each in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("cells", [24, 26])
def test_a_row_of_a_sweep_with_another_number_of_cells_is_named(results, tmp_path, cells):
    """A row of a CSV with more cells than the header, or fewer, is an error with its line."""
    header, first, *rows = (results / "sweep.csv").read_text().splitlines()
    assert header.count(",") == 24
    odd = ",".join([*first.split(","), "1"][:cells])
    (tmp_path / "s.csv").write_text("\n".join([header, odd, *rows]))
    run = run_here("report", "s.csv", "-o", "page.html", cwd=tmp_path)
    assert (run.returncode, [*tmp_path.glob("page*")]) == (2, [])
    assert "s.csv: a damaged result" in run.stderr
    assert f"line 2 has {cells} cells, and the header 25" in run.stderr


def test_a_csv_with_a_cell_beyond_all_bounds_is_named(results, tmp_path):
    """A CSV with a cell of more text than can be read is a damaged result, and named."""
    text = (results / "sweep.csv").read_text()
    (tmp_path / "s.csv").write_text(text + "a" * 200_000)
    run = run_here("report", "s.csv", "-o", "page.html", cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("kvcore: error: s.csv: a damaged result")


def test_a_sweep_that_a_spreadsheet_saved_is_reported(results, tmp_path):
    """A byte order mark, quoted cells and other ends of lines change nothing in a report."""
    with (results / "sweep.csv").open(newline="") as file:
        rows = [*csv.reader(file)]
    with (tmp_path / "sweep.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\r\n").writerows(rows)
    assert tables(reported(tmp_path, "sweep.csv")) == tables(reported(results, "sweep.csv"))


def test_the_error_for_a_cut_file_says_that_it_is_cut(results, tmp_path):
    """A compressed file that is cut before its first byte is told from an empty one."""
    whole = gzip.compress((results / "sweep.csv").read_bytes())
    for size, wanted in ((12, "the gzip stream stops early"), (0, "it is empty")):
        (tmp_path / "s.csv.gz").write_bytes(whole[:size])
        run = run_here("report", "s.csv.gz", "-o", "page.html", cwd=tmp_path)
        assert run.stderr.startswith(f"kvcore: error: s.csv.gz: {wanted}")


@pytest.mark.parametrize("name", ["compare.json", "whatif.json", "plan/plan.json", "one.json"])
def test_a_document_that_is_cut_is_refused(results, tmp_path, name):
    """A JSON document that is cut is an error, and no page is written."""
    whole = (results / name).read_bytes()
    (tmp_path / "half.json").write_bytes(whole[: len(whole) // 2])
    run = run_here("report", "half.json", "-o", "page.html", cwd=tmp_path)
    assert (run.returncode, [*tmp_path.glob("page*")]) == (2, [])
    assert "half.json: no whole JSON document" in run.stderr


def test_a_missing_field_is_named(results, tmp_path):
    """A document without a field that the report needs is an error that names the field."""
    document = json.loads((results / "compare.json").read_bytes())
    for row in ("hit_blocks", "hit_ratio", "block_size"):
        lacking = json.loads(json.dumps(document))
        del lacking["rows"][1][row]
        (tmp_path / "c.json").write_text(json.dumps(lacking))
        run = run_here("report", "c.json", "-o", "page.html", cwd=tmp_path)
        assert (run.returncode, [*tmp_path.glob("page*")]) == (2, [])
        assert "c.json: a damaged result" in run.stderr
        assert row in run.stderr


@pytest.mark.parametrize("time", [[0] * 8, "1", {}])
def test_a_time_that_is_no_number_is_a_damaged_result(results, tmp_path, time):
    """A list in place of a time is refused at once: times an integer it is a list of 8 GB."""
    document = json.loads((results / "lru/summary.json").read_bytes())
    document["slo"]["ttft_s"] = time
    (tmp_path / "c.json").write_text(json.dumps(document))
    run = run_here("report", "c.json", "-o", "page.html", cwd=tmp_path)
    assert (run.returncode, [*tmp_path.glob("page*")]) == (2, [])
    assert "c.json: a damaged result" in run.stderr


@pytest.mark.parametrize("name", ["trace.jsonl", "made by hand.jsonl"])
def test_a_cut_trace_has_the_error_of_replay(results, tmp_path, name):
    """A cut trace has the exit code and the error of `replay`, and no page is written."""
    path = tmp_path / name
    if name == "trace.jsonl":
        path.write_bytes(gzip.decompress((results / "lru/trace.jsonl.gz").read_bytes()))
    else:
        record(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-3]))
    replay = run_here("replay", path)
    run = run_here("report", path, "-o", tmp_path / "page.html")
    assert run.returncode == replay.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(replay.stderr.splitlines()[-1])
    assert not [*tmp_path.glob("page*")]


def test_a_damaged_trace_has_the_error_of_replay(results, tmp_path):
    """A damaged trace has the exit code and the error of `replay`, and no page is written."""
    text = gzip.decompress((results / "lru/trace.jsonl.gz").read_bytes())
    (tmp_path / "bad.jsonl").write_bytes(text.replace(b'"event":"EVICT"', b'"event":"X"', 1))
    replay, run = (
        run_here(*words, cwd=tmp_path)
        for words in (("replay", "bad.jsonl"), ("report", "bad.jsonl", "-o", "page.html"))
    )
    assert (run.returncode, run.stderr) == (1, replay.stderr)
    assert replay.returncode == 1
    assert "unknown event 'X'" in run.stderr
    assert not [*tmp_path.glob("page*")]


def test_a_trace_of_single_calls_is_reported(tmp_path):
    """A trace of single cache calls has its missed tokens, and no figures of a run."""
    found = reported(tmp_path, record(tmp_path / "hand.jsonl").name)
    captions = tables(found)
    assert "Figures of the run" not in captions
    assert "Missed tokens by reason" in captions


@pytest.mark.parametrize("name", ["lru/summary.json", "lru/trace.jsonl.gz", "compare.json"])
def test_results_are_not_overwritten(results, name):
    """`report` refuses to overwrite a result on the page, also inside a folder."""
    before = (results / name).read_bytes()
    run = run_here("report", "lru", "compare.json", "-o", name, cwd=results)
    assert run.returncode == 2
    assert f"cannot write {name}" in run.stderr
    assert (results / name).read_bytes() == before


def test_the_size_is_printed_and_equal_results_make_equal_pages(results):
    """Equal results make equal pages, and the size of a page is printed."""
    runs = [run_here("report", "lru", "-o", name, cwd=results) for name in ("a.html", "b.html")]
    pages = [(results / name).read_bytes() for name in ("a.html", "b.html")]
    size = f"{len(pages[0]) / 1e6:.3g} MB"
    assert [run.stdout for run in runs] == [f"a.html: {size}\n", f"b.html: {size}\n"]
    assert pages[0] == pages[1]


def test_a_run_has_the_numbers_of_its_summary(results):
    """The section of a run has the numbers of its summary and of its requests."""
    summary = json.loads((results / "lru/summary.json").read_bytes())
    rows = map(json.loads, (results / "lru/requests.jsonl").read_text().splitlines())
    found = reported(results, "lru")
    times = tables(found)["Times by mean and percentile"]
    assert [row[0] for row in times] == ["TTFT", "TPOT", "ITL", "E2E", "queueing"]
    ratio = summary["hit"]["ratio"]["block"]
    assert ["prefix hits", f"{ratio:.1%} of {summary['hit']['lookup_blocks']:,} blocks"] in (
        tables(found)["Figures of the run"]
    )
    drawn = charts(found)
    ttft = next(
        line for line in drawn["Latency of requests"]["lines"] if line["name"] == "TTFT"
    )
    assert sorted(row["ttft_s"] for row in rows) == ttft["x"]
    assert drawn["The pool"]["top"] == summary["pool"]["blocks"]
    so_far = drawn["Hits"]["lines"][1]["y"]
    assert so_far[-1] == pytest.approx(100 * ratio)


def test_the_regret_of_a_trace_is_that_of_explain(results):
    """The section of a trace has the hits and losses that `explain --summary` has.

    All parts of the chart add up to the prompt tokens.
    """
    explained = json.loads((results / "explain.json").read_bytes())
    found = reported(results, "lru/trace.jsonl.gz")
    (series,) = charts(found)["Where the prompt tokens went"]["series"]
    assert sum(series["values"]) == explained["prompt_tokens"]
    assert series["values"][0] == explained["hit_tokens"]
    _, text = read_page(report_page([results / "lru"]))
    assert f"{explained['lost']['policy']['tokens']:,} tokens, at least" in text
    assert (
        tables(found)["Missed tokens by reason"]
        == (tables(reported(results, "explain.json"))["Missed tokens by reason"])
    )


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--tier", "host:memory=4GiB"), "tokens came from lower tiers."),
        (("--prefix", "none"), "Nothing that missed had been evicted."),
    ],
)
def test_tokens_of_lower_tiers_are_noted_beside_the_regret(tmp_path, options, wanted):
    """Beside the regret are tokens of lower tiers, or a note that no miss was evicted."""
    work = ("zipf:requests=60,rate=40", "--blocks", 300, "--no-search")
    run_here("simulate", *work, *options, "--out", "run", cwd=tmp_path)
    _, text = read_page(report_page([tmp_path / "run"]))
    assert wanted in text


def test_the_regret_of_a_comparison_is_the_distance_from_the_optimum(results):
    """The regret of each row is its distance from the optimum, in blocks and in tokens.

    Rows of the optimum are left out.
    """
    document = json.loads((results / "compare.json").read_bytes())
    hits = {(row["eviction"], row["blocks"]): row["hit_blocks"] for row in document["rows"]}
    rows = tables(reported(results, "compare.json"))
    less = rows["Blocks that hit, against the optimum in the same pool"]
    assert [row[:6] for row in less] == [
        [
            policy,
            f"{size}",
            f"{hits[policy, size]:,}",
            f"{hits['optimum', size]:,}",
            f"{hits['optimum', size] - hits[policy, size]:,}",
            f"{16 * (hits['optimum', size] - hits[policy, size]):,}",
        ]
        for policy in ("lru", "lfu")
        for size in (100, 400)
    ]


def test_two_runs_are_compared_and_share_charts(results):
    """Two runs are compared by differing settings and by figures, and share charts."""
    found = reported(results, "lru", "lfu")
    assert [section["title"] for section in found["sections"]] == [
        "Runs side by side",
        "Run: lru",
        "Run: lfu",
    ]
    side = {"sections": found["sections"][:1]}
    assert [row[0] for row in tables(side)["Settings that differ"]] == ["eviction"]
    figures = {row[0]: row[1:] for row in tables(side)["Figures"]}
    hits = [
        json.loads((results / name / "summary.json").read_bytes())["hit"]["hit_blocks"]
        for name in ("lru", "lfu")
    ]
    change = f"{hits[1] - hits[0]:+,}" if hits[0] != hits[1] else "="
    assert figures["blocks hit"] == [f"{hits[0]:,}", f"{hits[1]:,}", change]
    drawn = charts(side)
    for title in ("TTFT of requests", "TPOT of requests", "The pool", "Hits"):
        assert [line["name"] for line in drawn[title]["lines"]] == ["lru", "lfu"]
    reasons = drawn["Where the prompt tokens went"]["series"]
    assert [sum(reason["values"]) for reason in reasons] == [pytest.approx(100)] * 2


def test_a_run_and_a_trace_differ_in_settings_and_not_in_their_names(results):
    """Beside a trace alone, the settings of a run with a trace are those of its header."""
    found = reported(results, "lru", "lfu/trace.jsonl.gz")
    assert [row[0] for row in tables(found)["Settings that differ"]] == ["eviction"]


def test_comparisons_and_curves_share_a_chart_with_their_kind(results, tmp_path):
    """Two comparisons share a chart and a table.

    Lines are named after policy and result, and a size of only one result has dashes for the
    other.
    """
    other = run_here("compare", "zipf:requests=80", "--blocks", "400", "--json", cwd=results)
    (tmp_path / "other.json").write_text(other.stdout)
    found = read_page(report_page([results / "compare.json", tmp_path / "other.json"]))[0]
    side = {"sections": found["sections"][:1]}
    names = [line["name"] for line in charts(side)["Hits by pool size"]["lines"]]
    assert "lru, compare.json" in names
    assert "lru, other.json" in names
    rows = {tuple(row[:2]): row[2:] for row in tables(side)["Hits by policy and pool size"]}
    assert rows["lru", "100"][1:] == ["–", "–"]
    assert rows["lru", "400"][2].endswith(" points")


def commands(found):
    """Return the command lines of a report as words."""
    parts = (part for section in found["sections"] for part in section["parts"])
    return [shlex.split(part["text"]) for part in parts if part["kind"] == "command"]


def test_a_report_without_a_trace_has_no_regret_of_the_run(results):
    """A document without a trace has no regret."""
    for name in ("simulate.json", "whatif.json", "size.json"):
        titles = [
            part["text"]
            for part in reported(results, name)["sections"][0]["parts"]
            if part["kind"] == "heading"
        ]
        assert "Regret" not in titles


def test_a_comparison_of_one_policy_and_size_has_commands_that_make_a_trace(tmp_path):
    """They record the run with the options of the comparison, and report its trace."""
    words = ("compare", "zipf:requests=60", "--blocks", 90, "--eviction", "lfu", "--json")
    run = run_here(*words, "--prefix", "hashed", cwd=tmp_path)
    (tmp_path / "one.json").write_text(run.stdout)
    lines = commands(reported(tmp_path, "one.json"))
    for line in lines:
        run = run_here(*line[1:], cwd=tmp_path)
        assert run.returncode == 0, run.stderr
    assert [line[1] for line in lines] == ["compare", "compare", "report"]
    assert (tmp_path / "run.html").exists()
    trace = gzip.decompress((tmp_path / "run.jsonl.gz").read_bytes())
    header = json.loads(trace.splitlines()[0])
    assert header["plugins"]["prefix"]["name"] == "hashed"


def timeless(document):
    """Return a document without what differs from run to run."""
    if isinstance(document, list):
        return [*map(timeless, document)]
    if not isinstance(document, dict):
        return document
    return {
        name: timeless(value)
        for name, value in document.items()
        if name not in ("wall_s", "us_per_request")
    }


ZIPF = "zipf:requests=60,rate=5"
FLEET = ("--slo", "ttft=2,tpot=0.1", "--max-gpus", 2, "--jobs", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("simulate", ZIPF, "--no-search", "--like", "vllm"),
        ("compare", ZIPF, "--blocks", "50,90", "--prefix", "hashed", "--seed", 3),
        ("compare", ZIPF, "--memory", "1GiB", "--accounting", "tokens", "--limit", 20),
        ("compare", ZIPF, "--blocks", 50, "--tier", "host:memory=1GiB", "--residency"),
        ("compare", ZIPF, "--blocks", 50, "--csv", "rows.csv", "--"),
        ("curve", ZIPF, "--sizes", "50,90", "--accounting", "tokens", "--jobs", 1),
        ("curve", ZIPF, "--sizes", "50,90", "--tier", "host:memory=1GiB", "--jobs", 1),
        ("sweep", "more.toml", "--out", "cells.json", "--jobs", 1),
        ("plan", ZIPF, "--device", "h100", "--like", "vllm", *FLEET),
        ("plan", ZIPF, "--device", "h100,h200", "--gpu-price", "h100=2.5", *FLEET),
        ("size", "llama-3.1-8b", "--device", "h100", "--weights-dtype", "fp8"),
        (
            *("size", "deepseek-v3", "--device", "h200", "--tensor-parallel", 8),
            "--data-parallel-attention",
        ),
        ("whatif", "lru/trace.jsonl.gz", "--like", "vllm", "--gpu-price", "h100=2.5"),
        ("whatif", "lru/trace.jsonl.gz", "--retention", "none", "--slo", "none"),
        ("explain", "lru/trace.jsonl.gz", "--summary", "--top", 2),
        ("explain", "lru/trace.jsonl.gz", 50),
        ("explain", ZIPF, 50, "--blocks", 90),
        (
            *("quality", "--prompt-tokens", 64, "--tokens", 4, "--texts", 1, "--needles", 1),
            *("--codec", "fp32"),
        ),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_the_command_of_a_report_makes_the_document_again(results, tmp_path, words):
    """The first command in the report of a document prints the document again."""
    (results / "more.toml").write_text(
        'mode = "simulate"\nworkload = "zipf:requests=50"\nblocks = [500, 900]\nlike = "vllm"\n'
    )
    made = run_here(words[0], "--json", *words[1:], cwd=results)
    assert made.returncode == 0, made.stderr
    (tmp_path / "it.json").write_text(made.stdout)
    program, *line = commands(reported(tmp_path, "it.json"))[0]
    again = run_here(*line, cwd=results)
    assert (program, again.returncode) == ("kvcore", 0), again.stderr
    assert timeless(json.loads(again.stdout)) == timeless(json.loads(made.stdout))


@pytest.mark.parametrize("name", ["sweep.json", "plan"])
def test_a_document_in_a_file_has_the_command_that_made_it(results, name):
    """Documents that a command writes have its words, without those of how it is made."""
    (line,) = commands(reported(results, name))
    assert (
        line
        == {
            "sweep.json": ["kvcore", "sweep", "grid.toml", "--json"],
            "plan": [
                *("kvcore", "plan", "zipf:requests=20", "--device", "h100", "--slo", "ttft=2"),
                *("--max-gpus", "2", "--json"),
            ],
        }[name]
    )


@pytest.mark.parametrize("name", ["sweep.csv", "python.json"])
def test_a_result_without_a_command_says_so(results, name):
    """A table, and a document that Python made, have a sentence in place of a command."""
    document = json.loads((results / "compare.json").read_bytes())
    del document["command"]
    (results / "python.json").write_text(json.dumps(document))
    found = reported(results, name)
    assert commands(found) == []
    assert "The result does not say: it was written from Python" in json.dumps(found)


@pytest.mark.parametrize("command", [["rm", "-rf", "."], ["kvcore", 1], "kvcore", 3])
def test_a_command_that_is_none_of_kvcore_is_refused(results, tmp_path, command):
    """A document cannot have a page show the command of another program."""
    document = json.loads((results / "compare.json").read_bytes()) | {"command": command}
    (tmp_path / "bad.json").write_text(json.dumps(document))
    run = run_here("report", "bad.json", "-o", "page.html", cwd=tmp_path)
    assert (run.returncode, [*tmp_path.glob("page*")]) == (2, [])
    assert "bad.json: a damaged result" in run.stderr


def test_a_word_of_a_command_cannot_begin_another(results, tmp_path):
    """The words of a command are quoted, on one line of the page."""
    words = ["kvcore", "compare", "a b; rm -rf .\nrm -rf .", "$(rm -rf .)"]
    document = json.loads((results / "compare.json").read_bytes()) | {"command": words}
    (tmp_path / "odd.json").write_text(json.dumps(document))
    assert commands(reported(tmp_path, "odd.json"))[0] == [*words, "--json"]


@pytest.mark.parametrize(
    ("router", "whose"),
    [((), "no request admitted"), (("--replicas", 2), "no request that its")],
)
def test_the_reasons_of_a_request_are_those_of_its_servers(tmp_path, router, whose):
    """A block is new to one server, and on a cluster to the replica."""
    words = ("simulate", ZIPF, *router, "--blocks", 400, "--no-search", "--trace", "t.jsonl")
    assert run_here(*words, cwd=tmp_path).returncode == 0
    request = next(iter(kvcore.explain(tmp_path / "t.jsonl").requests))
    run = run_here("explain", "t.jsonl", request, "--json", cwd=tmp_path)
    (tmp_path / "one.json").write_text(run.stdout)
    rows = tables(reported(tmp_path, "one.json"))["Missed tokens, in the order of the prompt"]
    reasons = {row[3]: row[4] for row in rows}
    assert reasons["compulsory"].startswith(whose)


def test_the_command_of_a_run_repeats_the_simulation(results, tmp_path):
    """The command in the report of a run simulates the same requests with the same times."""
    line = commands(reported(results, "lfu"))[0]
    run = run_here(*line[1:], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    rows = [
        (folder / "requests.jsonl").read_bytes()
        for folder in (results / "lfu", tmp_path / "results")
    ]
    assert rows[0] == rows[1]


def test_the_commands_of_a_replica_are_of_that_replica(tmp_path):
    """The commands of a report on a replica make that report, its reasons and its page."""
    words = ("simulate", ZIPF, "--replicas", 2, "--blocks", 400, "--no-search")
    run_here(*words, "--trace", "t.jsonl", cwd=tmp_path)
    run_here("report", "t.jsonl", "--replica", 1, "--title", "One", "-o", "a", cwd=tmp_path)
    found = read_page((tmp_path / "a").read_bytes())[0]
    whatif, *others = commands(found)
    assert whatif[1] == "whatif"  # which repeats the cluster
    assert [line[1] for line in others] == ["explain", "view"]
    for line in (*others, [*shlex.split(found["command"]), "-o", "b"]):
        run = run_here(*line[1:], cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert "60 requests" not in run.stdout
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_result_that_python_wrote_is_reported(tmp_path):
    """A result that Python wrote is reported, with a note that its configuration is unknown."""
    kvcore.simulate("zipf:requests=30").write(tmp_path / "mine")
    found = reported(tmp_path, "mine")
    assert "TTFT, mean" in [row[0] for row in tables(found)["Figures of the run"]]
    assert "Latency of requests" in charts(found)
    _, text = read_page(report_page([tmp_path / "mine"]))
    assert "The summary does not say" in text


def test_the_section_of_a_saturated_run_begins_with_a_warning(tmp_path):
    """The section of a saturated run begins with the warning that `simulate` prints."""
    run = run_here(
        *("simulate", "--limit", 2000, "--rate-scale", 20, "--no-search", "--block-size", 512),
        *("--out", "much"),
        cwd=tmp_path,
    )
    assert run.stdout.startswith("SATURATED: ")
    first = reported(tmp_path, "much")["sections"][0]["parts"][0]
    assert first["kind"] == "warning"
    assert first["text"].startswith("SATURATED: mooncake asks for")


@pytest.mark.parametrize("verb", [("simulate",), ("compare", "--blocks", 9), ("curve",)])
def test_notes_of_a_workload_are_shown(tmp_path, verb):
    """The notes of a workload on its rows stand in the section of each result of it."""
    rows = ["time,prompt,output", "1,40,4", "5,40,4"]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    verb, *options = verb
    run = run_here(verb, "rows.csv", *options, "--json", cwd=tmp_path)
    document = json.loads(run.stdout)
    (tmp_path / "run.json").write_text(run.stdout)
    (section,) = reported(tmp_path, "run.json")["sections"]
    told = [part["text"] for part in section["parts"] if part["kind"] == "notice"]
    assert document["notes"]
    assert told == document["notes"]


def test_strings_of_results_are_no_markup(results, tmp_path):
    """Strings of results and the title are data on the page, never HTML."""
    document = json.loads((results / "compare.json").read_bytes())
    document["workload"]["name"] = document["rows"][0]["eviction"] = MARKUP
    (tmp_path / "c.json").write_text(json.dumps(document))
    page = report_page([tmp_path / "c.json"], title=MARKUP)
    assert b"alert(" not in page.replace(b"alert(&#x27;x&#x27;)", b"")
    found, text = read_page(page)
    assert found["title"] == MARKUP
    assert json.dumps(MARKUP)[1:-1] in text


def test_runs_side_by_side_begin_with_a_sentence_on_each(tmp_path):
    """The first lines say of each run what hits, when it answers, and its overload."""
    load = ("zipf:requests=300,rate=200,output_tokens=200", "--blocks", 400)
    slow = "--rate-scale", 0.02
    for name, *more in (("calm", *slow), ("full",), ("again", *slow)):
        run_here("simulate", *load, "--out", name, *more, cwd=tmp_path)
    page = report_page([tmp_path / name for name in ("calm", "full", "again")])
    first = data_of(page, "report")["sections"][0]["parts"]
    calm, full, again = (part["text"] for part in first[:3])
    assert calm.startswith("calm: ")
    assert calm.endswith("on average.")
    assert " of the prompt tokens hit, and the first token comes after " in full
    assert " times the " in full
    assert again.endswith(" on average, as in calm.")
    assert full.endswith(" of calm. SATURATED: its times tell how long the workload is.")
