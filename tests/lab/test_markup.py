"""Reports as Markdown and LaTeX."""

import json

import pytest
from helpers.commands import run_here

from kvcore.sections import Chart, Table
from kvcore_lab.report.markup import latex, markdown

SECTIONS = [
    "Two policies.\nOne pool: 50 %, in _a_b_/*.csv.\n+ tiers: with --tier.",
    Table(["policy", "hits"], [["a_b|c", "1.5% ± 0.1%"], ["lru", "–"]]),
    Chart("", "", "", []),
    Table(["none"], []),
    "",
]


def test_markdown_has_tables_with_pipes():
    """Numbers are flush right, signs of Markdown escaped, charts and empty tables left out."""
    assert markdown(SECTIONS).splitlines() == [
        "Two policies.",
        "",
        r"One pool: 50 %, in \_a_b\_/\*.csv.",
        "",
        r"\+ tiers: with --tier.",
        "",
        "| policy | hits |",
        "| --- | ---: |",
        r"| a_b\|c | 1.5% ± 0.1% |",
        "| lru | – |",
    ]


def test_latex_has_tables_of_booktabs():
    """Signs that LaTeX reads otherwise are escaped, in sentences too."""
    assert latex(SECTIONS).splitlines() == [
        "Two policies.",
        "",
        r"One pool: 50 \%, in \_a\_b\_/*.csv.",
        "",
        "+ tiers: with -{}-tier.",
        "",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"policy & hits \\",
        r"\midrule",
        r"a\_b|c & 1.5\% $\pm$ 0.1\% \\",
        r"lru & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_headers_differ():
    """A header that there was before has the one before it."""
    table = Table(["hits", "95 %", "to the first", "95 % "], [["1", "2", "3", "4"]])
    assert (
        markdown([table]).splitlines()[0]
        == "| hits | 95 % | to the first | to the first, 95 % |"
    )
    assert r"hits & 95 \% & to the first & to the first, 95 \% \\" in latex([table])


def test_a_comparison_has_one_figure_a_column():
    """In LaTeX the share of the optimum is a column beside the hits; all are flush right."""
    words = "zipf:requests=60", "--eviction", "lru,optimum", "--blocks", "50,200"
    document = json.loads(run_here("compare", *words, "--json").stdout)
    text = run_here("compare", *words, "--latex").stdout
    assert r"\begin{tabular}{lrrrr}" in text
    assert "eviction & 50 & 50, of optimum & 200 & 200, of optimum" in text
    figures = [
        rf"{100 * part:.{digits}f}\%"
        for row in document["rows"]
        if row["eviction"] == "lru"
        for part, digits in ((row["hit_ratio"]["block"], 1), (row["share_of_optimum"], 0))
    ]
    assert rf"lru & {' & '.join(figures)} \\" in text
    assert "beside it, the share of the optimum's hits" in text


@pytest.mark.parametrize(("flag", "begin"), [("--markdown", "| "), ("--latex", r"\begin{tab")])
@pytest.mark.parametrize(
    "command",
    [
        ("compare", "zipf:requests=40", "--eviction", "lru", "--blocks", 50),
        ("curve", "zipf:requests=40", "--eviction", "lru"),
        (
            *("routers", "zipf:requests=40", "--routers", "round-robin"),
            *("--replicas", 2, "--jobs", 1),
        ),
    ],
    ids=lambda command: command[0],
)
def test_verbs_print_their_report_so(command, flag, begin):
    """Verbs that compare print their report as Markdown or LaTeX."""
    done = run_here(*command, flag)
    assert done.returncode == 0
    assert any(line.startswith(begin) for line in done.stdout.splitlines())


def test_a_file_may_ask_for_a_markup(tmp_path):
    """In a file of `--config` the flag of a markup is true or false, as other flags are."""
    (tmp_path / "c.toml").write_text("latex = true\n")
    words = "routers", "zipf:requests=9", "--replicas", "2", "--jobs", "1"
    done = run_here(*words, "--config", tmp_path / "c.toml")
    assert done.returncode == 0
    assert r"\begin{tabular}" in done.stdout


@pytest.mark.parametrize("flag", ["--markdown", "--latex"])
def test_paths_of_a_sweep_are_escaped(flag, tmp_path):
    """The line with the files of all rows is a part of the report, and is escaped with it."""
    (tmp_path / "s.toml").write_text(
        'mode = "compare"\nworkload = "zipf:requests=9"\nblocks = 9'
    )
    done = run_here(
        "sweep", "s.toml", "--out", "_all_rows_.csv", "--jobs", 1, flag, cwd=tmp_path
    )
    assert done.returncode == 0
    rows = r"\_all_rows\_" if flag == "--markdown" else r"\_all\_rows\_"
    assert done.stdout.splitlines()[-2:] == ["", f"All rows: {rows}.csv."]
