"""`kvcore judge`: what it says before and beside a verdict."""

import subprocess
import sys

import pytest
from helpers.commands import error_of, stdout_of

from kvcore_judge.entries import Entry
from kvcore_judge.leaderboard import make_leaderboard
from kvcore_judge.protocol import Panel, Stream, find_panel
from kvcore_judge.sandbox import landlock_version
from kvcore_judge.verdict import Judge

POLICY = """\
from kvcore import ScoreEviction


class Used(ScoreEviction):
    name = "used"

    def score(self, span, now):
        return span.hit_count
"""

in_a_sandbox = pytest.mark.skipif(
    not landlock_version(), reason="this kernel has no Landlock to run the policies in"
)


@pytest.fixture
def policy(tmp_path):
    """Return the path of a policy."""
    path = tmp_path / "used.py"
    path.write_text(POLICY)
    return path


@pytest.fixture
def panel(tmp_path):
    """Return the path of a panel of one short stream."""
    path = tmp_path / "panel.toml"
    path.write_text(
        'shares = [100]\n[[stream]]\nname = "tools"\nworkload = "agents:sessions=20"\n'
    )
    return path


@in_a_sandbox
def test_a_name_of_the_release_before_breaks_no_rule(policy, panel):
    """The table of such names, which kvcore reads, is no file that the policy opened."""
    policy.write_text(f"from kvcore.cache.ghost import GhostTree\n{POLICY}")
    words = [sys.executable, "-m", "kvcore", "judge", policy, "--panel", panel, "--no-kit"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:6]) == (0, "used: ")


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_the_packages_of_the_kit_are_named_in_one_line(missing, policy, panel, monkeypatch):
    """Without a package of the kit nothing runs, and the line has the extra and the way out."""
    monkeypatch.setitem(sys.modules, missing, None)
    message = error_of("judge", policy, "--panel", panel, code=3)
    assert "pip install 'kvcore[testing]', or leave it out by --no-kit" in message
    assert message.count("\n") == 1


@in_a_sandbox
def test_a_mistyped_class_breaks_no_rule(policy, panel):
    """A class that the file does not have is wrong input, and the classes are named."""
    message = error_of("judge", f"{policy}:Usde", "--panel", panel, "--no-kit")
    assert "has no class 'Usde'" in message
    assert "Its eviction plugins: Used" in message


@in_a_sandbox
@pytest.mark.parametrize(
    "written", ["apps.pyenv/used.py", " apps.pyenv/used.py", "my.python.py"]
)
def test_a_file_is_run_in_the_sandbox_wherever_it_is(written, policy, panel, monkeypatch):
    """A path with `.py` or a space before its end is that of the file, which may not write."""
    monkeypatch.chdir(policy.parent)
    path = policy.parent / written.strip()
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"open('left', 'w')\n{POLICY}")
    assert Judge(find_panel(str(panel)), kit=False).judge(Entry(written)).rule == "files"
    assert not (policy.parent / "left").exists()


@in_a_sandbox
def test_a_judge_scores_a_built_in_policy_as_a_leaderboard_does():
    """Cells on which it was tuned are left out of its headline; a file cannot claim that."""
    streams = Stream("tuned", "mooncake", limit=1000), Stream("own", "recency:requests=400")
    panel, entry = Panel("test", streams, (100,)), Entry("hazard")
    score = Judge(panel, kit=False).judge(entry).score
    assert score == make_leaderboard(panel, [entry]).scores["hazard"]
    assert score.headline != score.all_cells


@in_a_sandbox
def test_a_kit_that_was_not_run_passed_no_tests(policy, panel):
    """With --no-kit the report says so, in place of a number of tests; no panel is quick."""
    report = stdout_of("judge", policy, "--panel", panel, "--no-kit")
    assert "The kit was not run." in report
    assert "tests of the kit" not in report
    assert "Quick panel" not in report


@in_a_sandbox
def test_the_quick_panel_says_that_it_is_a_first_look(policy):
    """Its report begins with its number of cells and of those of the panel that counts."""
    first = stdout_of("judge", policy, "--no-kit").replace("\n", " ")
    assert first.startswith("Quick panel: 6 cells, of short streams, where the public panel ")
    assert "has 35." in first
    assert "--panel public" in first.partition("used:")[0]


@in_a_sandbox
def test_an_interpreter_that_prints_and_imports_from_its_folder_judges(
    tmp_path, panel, monkeypatch
):
    """The second interpreter finds what the first one finds; what packages print is dropped."""
    (tmp_path / "own_helper.py").write_text("SCORE = 0")
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    (tmp_path / "judged.py").write_text(
        "from own_helper import SCORE\n"
        "from kvcore import ScoreEviction\n\n"
        "class Mine(ScoreEviction):\n"
        "    name = 'mine'\n\n"
        "    def score(self, span, now):\n"
        "        return SCORE\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    verdict = Judge(find_panel(str(panel)), kit=False).judge(Entry(str(tmp_path / "judged.py")))
    assert verdict.passed, verdict.what
