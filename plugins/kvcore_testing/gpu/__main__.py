"""Run all tests and benchmarks that need a GPU, in parts, and print a table and a document.

python -m kvcore.testing.gpu [--backend NAME] [--quick] [--deadline SECONDS] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, time
from typing import Any, NoReturn
from xml.etree import ElementTree as ET

import attrs

from kvcore.errors import InputError, KvcoreError, StorageError
from kvcore.files import atomic_file
from kvcore.plugins import Plugins
from kvcore_engine.bench.result import LATE as UNMEASURED
from kvcore_plugins.host import cpus
from kvcore_testing.gpu.device_tests import BACKEND, LATE, OTHER, UNTIL

DEADLINE = 480.0
"""Time limit of the whole run, in seconds."""

DAY = 86_400
"""The longest time limit, in seconds: no wait for a process may last much longer."""

SHARES = {
    "conformance": 0.25, "twin": 0.12, "check": 0.13, "decode": 0.2, "chunk": 0.08,
    "store": 0.05, "copy": 0.04, "swap": 0.05,
}  # fmt: skip
"""Shares of the time limit at most, by part; the last one has the rest."""

OPERATIONS = {
    "decode": "decode", "chunk": "chunk", "store": "store,store+rope", "copy": "copy,move",
    "swap": "swap",
}  # fmt: skip
"""Operations of `kvcore bench gpu` by part: one that is cut loses no other's rows."""

WORKERS = 8
"""Most processes that run tests side by side: kernels are compiled for many shapes."""

WIND_UP = 20.0
"""Seconds of a part that are left for what has begun, after which no test or case begins."""

OUTPUT = 4000
"""Characters of the end of a failed part's output that are kept."""


@attrs.frozen
class Part:
    """Outcome of one part of the run.

    Attributes:
        name: name of the part.
        ok: whether it has passed.
        summary: the result, in a line.
        seconds: time that it took.
        details: further results, as JSON.
    """

    name: str
    ok: bool
    summary: str
    seconds: float
    details: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 if a part failed, or 3 if the backend cannot work here.

    Exits with 2 for wrong arguments, and if the document cannot be written.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    reason = _unavailable(options.backend)
    if reason:
        sys.stderr.write(f"kvcore_testing.gpu: {options.backend} cannot work here: {reason}\n")
        return 3
    usual = signal.signal(signal.SIGTERM, _stop)
    try:
        document = _run_parts(
            options.backend, options.deadline, options.json, quick=options.quick
        )
        if options.json is None:
            print(json.dumps(document, indent=2))  # noqa: T201
    except (InputError, StorageError) as error:
        parser.error(str(error))
    finally:
        signal.signal(signal.SIGTERM, usual)
    return 0 if document["ok"] else 1


def _stop(number: int, _frame: object) -> NoReturn:
    """End the run, and with it the processes of its part, as a shell reports a signal."""
    raise SystemExit(128 + number)


def _unavailable(backend: str) -> str | None:
    """Return why a backend cannot be built here; None if it can."""
    plugins = Plugins()
    try:
        reason: str | None = plugins.get("backend", backend.partition(":")[0]).unavailable()
        if reason is None:
            plugins.build("backend", backend)
    except KvcoreError as error:
        reason = str(error)
    return reason


def _run_parts(
    backend: str, deadline: float, out: Path | None, *, quick: bool
) -> dict[str, Any]:
    """Run all parts, print a line for each, and return the document with their outcomes.

    The file `out` has the outcomes so far after each part, so that a run may be cut.
    """
    end = monotonic() + deadline
    parts: list[Part] = []
    document = _document(backend, parts, out)
    brief = ["--quick"] if quick else []
    runs = {
        "conformance": partial(_tests, "TestConformance"),
        "twin": partial(_tests, "test_twin"),
        "check": partial(_bench, ["--check", "--quick"]),
        **{part: partial(_bench, ["--only", of, *brief]) for part, of in OPERATIONS.items()},
        "steps": partial(_steps, brief),
    }
    with TemporaryDirectory() as folder:
        for name, run in runs.items():
            limit = min(end - monotonic(), SHARES.get(name, 1.0) * deadline)
            part = _part(name, run, backend, Path(folder), limit)
            parts.append(part)
            outcome = "ok" if part.ok else "FAILED"
            print(f"{name:12} {outcome:7} {part.seconds:5.0f} s  {part.summary}", flush=True)  # noqa: T201
            document = _document(backend, parts, out, ended=len(parts) == len(runs))
    return document


def _document(
    backend: str, parts: Sequence[Part], out: Path | None, *, ended: bool = False
) -> dict[str, Any]:
    """Return the document of the parts that have run, and write it to the file `out`.

    `ok` is whether all parts have run and passed.
    """
    document = {
        "schema": 1,
        "backend": backend,
        "ok": ended and all(part.ok for part in parts),
        "parts": {part.name: attrs.asdict(part) for part in parts},
    }
    if out is not None:
        with atomic_file(out) as file:
            print(json.dumps(document, indent=2), file=file)
    return document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcore.testing.gpu",
        description="Run the conformance tests, the engine, checks and benchmarks on a GPU.",
    )
    parser.add_argument("--backend", default="torch-cuda", help="another backend to test")
    parser.add_argument("--quick", action="store_true", help="small cases, briefly")
    parser.add_argument("--deadline", type=_seconds, default=DEADLINE, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the document")
    return parser


def _seconds(text: str) -> float:
    """Return the time limit that `text` gives, a day at most."""
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) <= DAY:
            return seconds
    msg = f"{text!r} is no time limit: give seconds from 0 to {DAY:,}"
    raise argparse.ArgumentTypeError(msg)


Outcome = tuple[bool, str, dict[str, Any]]
"""Whether a part has passed, its result in a line, and further ones."""

Run = Callable[[str, Path, float], Outcome]
"""Runs a part in processes of its own: a fault of a GPU ends them, and nothing else."""


def _part(name: str, run: Run, backend: str, folder: Path, limit: float) -> Part:
    """Run a part, and return its outcome."""
    begun = monotonic()
    if limit <= 1:
        return Part(name, False, "not run: no time was left", 0.0, {})  # noqa: FBT003
    try:
        ok, summary, details = run(backend, folder, limit)
    except subprocess.TimeoutExpired as error:
        ok, summary = False, f"stopped after {limit:.0f} s"
        details = {"output": _end(error.stdout)}
    except Exception as error:  # noqa: BLE001 - of one part, which must not end the others
        ok, summary, details = False, f"{type(error).__name__}: {error}", {}
    return Part(name, ok, summary, round(monotonic() - begun, 1), details)


def _tests(chosen: str, backend: str, folder: Path, limit: float) -> Outcome:
    """Run the tests of `device_tests` with `chosen` in their names."""
    report = folder / f"{chosen}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--tb=short", "--noconftest"),
        *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)),
        *("--pyargs", "kvcore_testing.gpu.device_tests", "-k", chosen),
        f"--junitxml={report}",
    ]
    workers = min(WORKERS, cpus() // 2)
    if workers > 1 and find_spec("xdist"):
        command += ["-n", str(workers)]
    until = str(time() + limit - min(WIND_UP, limit / 4))
    variables = {BACKEND: backend, OTHER: "torch-cpu", UNTIL: until}
    done = _run(command, limit, variables, folder)
    if not report.exists():
        return False, f"pytest exited with {done.returncode}", {"output": _end(done.stdout)}
    suite = next(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314 - our own file
    counts = {
        name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
    }
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = counts["tests"] - len(failed) - counts["skipped"]
    summary = f"{passed} passed, {len(failed)} failed, {counts['skipped']} skipped"
    late = sum(LATE in case.get("message", "") for case in suite.iter("skipped"))
    if late:
        summary += f", {late} of them since no time was left"
    details = {**counts, "failed": failed, "late": late}
    if failed:
        details["output"] = _end(done.stdout)
    return not failed and not late and passed > 0, summary, details


def _bench(options: Sequence[str], backend: str, folder: Path, limit: float) -> Outcome:
    """Run `kvcore bench gpu` with options."""
    out = folder / "bench.json"
    out.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "kvcore", "bench", "gpu", "--backend", backend),
        *("--deadline", str(limit - min(WIND_UP, limit / 2)), "--out", str(out), *options),
    ]
    done = _run(command, limit, {}, folder)
    if not out.exists():
        summary = f"kvcore bench exited with {done.returncode}"
        return False, summary, {"output": _end(done.stdout)}
    document = json.loads(out.read_bytes())
    rows = document["rows"]
    wrong = document["wrong"]
    aimed = [row for row in rows if row["reached"] is not None]
    reached = sum(1 for row in aimed if row["reached"])
    late = sum(row["note"].startswith(UNMEASURED) for row in rows)
    summary = f"{len(rows)} rows, {wrong} wrong"
    if late:
        summary += f", {late} not measured in time"
    if aimed:
        summary += f", {reached} of {len(aimed)} targets reached"
    checks = "--check" in options
    if not checks:
        print(done.stdout, flush=True)  # noqa: T201
    # What is not measured is no fault; what is not checked may be one.
    ok = done.returncode == 0 and not wrong and late < (1 if checks else len(rows))
    return ok, summary, {"document": document}


def _steps(options: Sequence[str], backend: str, folder: Path, limit: float) -> Outcome:
    """Measure decode steps with graphs and without."""
    out = folder / "steps.json"
    command = [sys.executable, "-m", "kvcore_testing.gpu.steps", backend, str(out)]
    try:
        done = _run([*command, *options], limit, {}, folder)
    except subprocess.TimeoutExpired:
        if not out.exists():
            raise
        done = None
    if not out.exists():
        assert done is not None
        return False, f"exited with {done.returncode}", {"output": _end(done.stdout)}
    rows = json.loads(out.read_bytes())["rows"]
    summary = f"{sum(row['ok'] for row in rows)} of {len(rows)} batch sizes have equal tokens"
    if any("replayed_us" in row for row in rows):
        first = rows[0]
        summary += (
            f"; at {first['sequences']} a step takes {first['replayed_us']:.0f} us with "
            f"graphs, {first['launched_us']:.0f} without"
        )
    return done is not None and not done.returncode, summary, {"rows": rows}


def _run(
    command: Sequence[str], limit: float, variables: dict[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a process in `folder`, and merge its stderr into its stdout.

    When it has ended, or too late, or this process is to end, so have the processes that it
    has started.
    """
    with subprocess.Popen(  # noqa: S603
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, **variables},
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        finally:
            process.kill()
            if sys.platform != "win32":
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output)


def _end(output: str | bytes | None) -> str:
    text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return text[-OUTPUT:]


if __name__ == "__main__":
    sys.exit(main())
