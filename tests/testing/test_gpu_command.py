"""`python -m kvcore.testing.gpu`: its parts, its output and its exit codes."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")

from kvcore_testing.gpu import __main__ as gpu
from kvcore_testing.gpu import steps

JUNIT = """<testsuites><testsuite tests="3" failures="{0}" errors="0" skipped="1">
<testcase classname="K" name="one">{1}</testcase><testcase classname="K" name="two"/>
<testcase classname="K" name="three"><skipped/></testcase></testsuite></testsuites>"""


ROWS = [{"reached": True, "note": ""}, {"reached": None, "note": ""}]


def faked(monkeypatch, *, failing=(), wrong=0, rows=ROWS):
    """Replace the processes of the parts by their results.

    Parts in `failing` fail, and a benchmark has `wrong` wrong rows.
    """

    def run(command, limit, *_):
        part = "check" if "--check" in command else "steps"
        if "--only" in command:
            part = command[command.index("--only") + 1].partition(",")[0]
        for name in ("TestConformance", "test_twin"):
            if name in command:
                part = name
        if part in failing:
            if failing[part] == "late":
                raise subprocess.TimeoutExpired(command, limit, output=b"so far")
            if failing[part] == "dead":
                return subprocess.CompletedProcess(command, -11, "a fault", "")
        if part.startswith(("Test", "test")):
            body = ("1", "<failure/>") if part in failing else ("0", "")
            target = next(word for word in command if word.startswith("--junitxml="))
            Path(target.partition("=")[2]).write_text(JUNIT.format(*body))
        elif part == "steps":
            row = {"ok": True, "sequences": 1, "replayed_us": 20.0, "launched_us": 300.0}
            Path(command[4]).write_text(json.dumps({"rows": [row]}))
        else:
            document = {"rows": rows, "wrong": wrong}
            Path(command[command.index("--out") + 1]).write_text(json.dumps(document))
        return subprocess.CompletedProcess(command, int(part in failing or wrong > 0), "t", "")

    monkeypatch.setattr(gpu, "_run", run)


def outcome(tmp_path, *arguments):
    """Run the command; return its exit code and the document that it writes."""
    out = tmp_path / "gpu.json"
    code = gpu.main(["--backend", "torch-cpu", "--json", str(out), *arguments])
    return code, json.loads(out.read_bytes())


def test_each_part_is_printed_and_documented(monkeypatch, tmp_path, capsys):
    """The command prints a line for each part, and its document has the result of each."""
    faked(monkeypatch)
    code, document = outcome(tmp_path)
    assert code == 0
    assert list(document["parts"]) == [
        *("conformance", "twin", "check", "decode", "chunk", "store", "copy", "swap", "steps")
    ]
    assert document["parts"]["twin"]["summary"] == ("2 passed, 0 failed, 1 skipped")
    assert document["parts"]["decode"]["summary"] == ("2 rows, 0 wrong, 1 of 1 targets reached")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if " ok " in line] == list(document["parts"])


def test_parts_run_after_a_failed_part(monkeypatch, tmp_path):
    """If parts crash, time out or fail a test, the next ones run, and the exit code is 1."""
    failing = {"TestConformance": "dead", "test_twin": "failed", "check": "late"}
    faked(monkeypatch, failing=failing)
    code, document = outcome(tmp_path)
    parts = document["parts"]
    assert code == 1
    assert [name for name, part in parts.items() if not part["ok"]] == [*parts][:3]
    assert parts["steps"]["summary"].startswith("1 of 1 batch sizes")
    assert parts["conformance"]["summary"] == "pytest exited with -11"
    assert parts["conformance"]["details"]["output"] == "a fault"
    assert parts["twin"]["details"]["failed"] == ["K.one"]
    assert parts["check"]["summary"].startswith("stopped after ")
    assert parts["check"]["details"]["output"] == "so far"


def test_a_wrong_benchmark_row_fails_the_command(monkeypatch, tmp_path):
    """A benchmark with a wrong row fails the command with exit code 1."""
    faked(monkeypatch, wrong=1)
    code, document = outcome(tmp_path)
    assert code == 1
    assert document["parts"]["check"]["summary"].startswith("2 rows, 1 wrong")


def test_a_check_that_is_cut_has_not_passed(monkeypatch, tmp_path):
    """Rows that were not measured in time fail a check; a measurement has the others."""
    late = {"reached": None, "note": "not measured: the deadline of 9 s has passed"}
    faked(monkeypatch, rows=[*ROWS, late])
    _, document = outcome(tmp_path)
    parts = document["parts"]
    assert not parts["check"]["ok"]
    assert parts["decode"]["ok"]
    assert parts["check"]["summary"].startswith("3 rows, 0 wrong, 1 not measured in time")


def test_a_run_that_is_cut_leaves_the_parts_before(monkeypatch, tmp_path):
    """If the command is told to end in a part, its file has the outcomes of those before."""
    faked(monkeypatch)
    run = gpu._run

    def cut(command, *arguments):
        if "chunk" in command:
            signal.raise_signal(signal.SIGTERM)
        return run(command, *arguments)

    monkeypatch.setattr(gpu, "_run", cut)
    with pytest.raises(SystemExit, match="143"):
        outcome(tmp_path)
    document = json.loads((tmp_path / "gpu.json").read_bytes())
    assert list(document["parts"]) == ["conformance", "twin", "check", "decode"]
    assert not document["ok"]


def test_a_part_that_cannot_be_read_does_not_end_the_others(monkeypatch, tmp_path):
    """A part whose result has another form than expected has failed, with the error."""
    faked(monkeypatch, rows=None)
    code, document = outcome(tmp_path)
    assert code == 1
    assert document["parts"]["check"]["summary"].startswith("TypeError: ")
    assert document["parts"]["steps"]["ok"]


def test_processes_that_a_part_leaves_are_ended(tmp_path):
    """A process that a process of a part has started ends with it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    script = f"exec 3> {pipe}; sleep 1000 > /dev/null 2>&1 & echo started"
    done = gpu._run(["sh", "-c", script], 60.0, {}, tmp_path)
    assert (done.returncode, done.stdout) == (0, "started\n")
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # nobody has the pipe open any more
    os.close(reader)


def test_no_part_runs_after_the_deadline(monkeypatch, tmp_path):
    """With no time left no part is run, and the document says so for each."""
    faked(monkeypatch)
    code, document = outcome(tmp_path, "--deadline", "0.5")
    assert code == 1
    summaries = {part["summary"] for part in document["parts"].values()}
    assert summaries == {"not run: no time was left"}


@pytest.mark.parametrize("deadline", ["nan", "inf", "-5", "1e9", "soon"])
def test_a_wrong_deadline_ends_with_code_2(deadline, capsys):
    """A deadline that is no number of seconds of a day is refused before any part."""
    with pytest.raises(SystemExit, match="2"):
        gpu.main([f"--deadline={deadline}"])
    assert f"{deadline!r} is no time limit: give seconds" in capsys.readouterr().err


def test_an_unavailable_backend_ends_with_code_3(monkeypatch, capsys):
    """An unavailable backend ends the command with code 3 and the reason."""
    from kvcore_engine.backend import TorchCPU  # noqa: PLC0415 - needs torch

    monkeypatch.setattr(TorchCPU, "unavailable", classmethod(lambda _: "it is Sunday"))
    assert gpu.main(["--backend", "torch-cpu"]) == 3
    assert "torch-cpu cannot work here: it is Sunday" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["no-such", "torch-cpu:attention=q"])
def test_an_unknown_backend_or_option_ends_with_code_3(backend, capsys):
    """A backend with an unknown name or option ends the command with code 3."""
    assert gpu.main(["--backend", backend]) == 3
    assert "cannot work here" in capsys.readouterr().err


def test_an_unwritable_document_is_refused_before_any_part(monkeypatch, tmp_path, capsys):
    """An unwritable document is an error before any part is run."""
    faked(monkeypatch)
    out = tmp_path / "none" / "gpu.json"
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--backend", "torch-cpu", "--json", str(out)])
    shown = capsys.readouterr()
    assert str(out) in shown.err
    assert not shown.out


@pytest.mark.slow
def test_decode_steps_are_measured_after_their_tokens_are_compared(tmp_path):
    """Steps of two batch sizes are measured; a backend without graphs says so."""
    ok, summary, details = gpu._steps(["--quick"], "torch-cpu", tmp_path, 60.0)
    assert (ok, summary) == (True, "2 of 2 batch sizes have equal tokens")
    assert all("has no option 'graphs'" in row["note"] for row in details["rows"])


@pytest.mark.slow
def test_steps_with_graphs_have_the_tokens_of_those_without():
    """Where a backend has graphs, steps are replayed, and counted beside the launched ones."""
    pytest.importorskip("triton", reason="needs Triton: pip install 'kvcore[triton]'")
    helper = Path(__file__).parents[1] / "helpers" / "recorded_graph.py"
    row = steps.row(f"{helper}:GraphedCPU:attention=triton", steps.SMALL, 2, 20, 4)
    assert row["ok"]
    assert row["equal_tokens"]
    assert row["replays"] == 2
    assert json.dumps(row)


@pytest.mark.slow
def test_tests_that_would_begin_too_late_are_told(monkeypatch, tmp_path):
    """Where the time of a part is up, its tests are skipped, and it has not passed."""
    monkeypatch.setattr(gpu, "time", lambda: 0.0)
    ok, summary, details = gpu._tests("room", "torch-cpu", tmp_path, 60.0)
    assert not ok
    assert summary == "0 passed, 0 failed, 1 skipped, 1 of them since no time was left"
    assert details["late"] == 1


@pytest.mark.slow
def test_the_tests_of_the_device_run_in_a_process_of_their_own(tmp_path):
    """The device's tests run in a process of their own, without the checkout's settings."""
    ok, summary, _ = gpu._tests("room", "torch-cpu", tmp_path, 60.0)
    assert (ok, summary) == (True, "1 passed, 0 failed, 0 skipped")
