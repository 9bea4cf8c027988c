"""A run of the command line: its files, what packages do beside it, and its report.

The way of `kvcore simulate WORKLOAD --out DIR` (`cli/simulate.py`) from hooks to report:

    main.loaded_verb   kvcore_commands, _options, _modes   the verb, with options of packages
    options.config_of                                   values of options, which choose a mode
    RunConfig.build                                     parts of the mode: misfits are refused
    opened             kvcore_running                   files are open; packages set up theirs
    ServedRun.run                                       `RunParts.run` serves the requests
    ServedRun.end      Running.ran, kvcore_ran          fields of packages
    end of `opened`                                     the trace, and then the rest of DIR
    ServedRun.report   Ran.later                        JSON; or report, sections of packages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvcore.cache import Recorder
from kvcore.config import RunParts
from kvcore.files import make_directory, refuse_overwrite
from kvcore.hookspecs import Ran, Running
from kvcore.progress import silent, ticked, unseen
from kvcore.sections import Section
from kvcore.serving.result import REQUESTS, SUMMARY, TRACE, Reported
from kvcore.workloads import notes_of
from kvcore_cli.output import command_field, emit_json, print_notes, print_sections, progress
from kvcore_cli.verb import echo


def trace_path(parts: RunParts, given: Mapping[str, Any]) -> Path | None:
    """Return the path of the trace that `--trace` or `--out` asks for; None: there is none."""
    if given["out"] is None:
        path: Path | None = given["trace"]
        return path
    return given["out"] / TRACE if parts.traced else None


class ServedRun(NamedTuple):
    """A run whose files are open.

    Attributes:
        parts: its parts.
        given: the options of the verb.
        recorder: what records it, if anything does.
        beside: what packages do beside it.
        added: what packages have to say of it, once it has ended.
        last: what writes its results to `--out`, once its trace is whole.
    """

    parts: RunParts
    given: Mapping[str, Any]
    recorder: Recorder | None
    beside: Sequence[Running]
    added: list[Ran]
    last: list[Callable[[], None]]

    def run(self, doing: str) -> Any:
        """Serve the workload, and show the progress of `doing` it; return the result."""
        source = self.parts.workload
        shown = silent if any(side.shows for side in self.beside) else progress
        with shown(f"{doing} {source.name}", source.size) as tick:
            requests = source if tick is unseen else ticked(source, tick)
            residency = self.given["residency"]
            return self.parts.run(self.recorder, requests, residency=residency)

    def end(self, result: Reported, document: dict[str, Any], *fields: str) -> None:
        """Call packages with the result, and add their fields to its document and to `--out`.

        `fields` are names of fields of the document that are written, besides theirs. Notes
        on stderr tell of prompts for which the model has no positions, and the like.
        """
        from kvcore_cli.report.tables import told_of_run  # noqa: PLC0415 - as for reports

        of_workload = notes_of(self.parts.workload)  # which are the last lines: `report`
        notes = [note for note in result.notes if note not in of_workload]
        for note in (*told_of_run(self.parts, result.log), *notes):
            echo(f"kvcore: {note}", err=True)
        if (reported := self.parts.workload.reported_hit_ratio) is not None:
            document["reported_hit_ratio"] = reported
        for side in self.beside:
            if side.ran is not None:
                side.ran(result, document)
        known = {"parts": self.parts, "result": result, "given": self.given}
        self.added.extend(self.parts.plugins.results("kvcore_ran", **known))
        for ran in self.added:
            _merge(document, ran.fields)
        if self.given["out"] is not None:
            added = (name for ran in self.added for name in ran.fields)
            names = ("config", "reported_hit_ratio", *fields, *added)
            parted = command_field() | {
                name: document[name] for name in names if name in document
            }
            self.last.append(partial(result.write, self.given["out"], **parted))

    def report(
        self, document: dict[str, Any], sections: Callable[[bool], Sequence[Section]]
    ) -> None:
        """Print the document, or sections; these are made knowing if something comes later."""
        later = [ran.later for ran in self.added if ran.later is not None]
        if not any(side.silences for side in self.beside):
            if self.given["as_json"]:
                for more in later:
                    _merge(document, more().fields)
                emit_json(document)
            else:
                print_sections(*sections(bool(later)))
                for ran in self.added:
                    _print_below(ran.sections)
                for more in later:
                    _print_below(more().sections)
        print_notes(self.parts.workload)


@contextmanager
def opened(parts: RunParts, given: Mapping[str, Any]) -> Iterator[ServedRun]:
    """Open the files of a run, and start what packages do beside it.

    If the body raises, no file is left, and no directory that was made for the files. The
    results of an earlier run stay until the trace of this one is whole.
    """
    path, out = trace_path(parts, given), given["out"]
    others = [] if out is None else [out / SUMMARY, out / REQUESTS]
    for file in filter(None, (path, *others)):
        refuse_overwrite(file, parts.workload.options().values())
    last: list[Callable[[], None]] = []
    with _files(out) as written:
        with ExitStack() as stack:
            started = parts.plugins.results("kvcore_running", parts=parts, given=given)
            beside = [stack.enter_context(context) or Running() for context in started]
            recorder = next((s.recorder for s in beside if s.recorder is not None), None)
            if recorder is None and path is not None:
                from kvcore.trace import Trace  # noqa: PLC0415 - most runs are not traced

                stack.enter_context(_listed(path, written))
                recorder = stack.enter_context(Trace(path, **parts.header()))
            yield ServedRun(parts, given, recorder, beside, [], last)
        written.extend(filter(None, [path]))  # by a package too
        written.extend(file for file in others if not file.exists())
        for write in last:
            write()


@contextmanager
def _files(folder: Path | None) -> Iterator[list[Path]]:
    """Make a directory, if one is given, and yield a list for files of this run.

    If the body raises, these are removed, and the directories that were not there before.
    """
    made: list[Path] = []
    if folder is not None:
        made += [path for path in (folder, *folder.parents) if not path.exists()]
        make_directory(folder)
    written: list[Path] = []
    try:
        yield written
    except BaseException:
        with suppress(OSError):
            for file in filter(Path.is_file, written):  # a trace may go to a device
                file.unlink()
            for path in made:
                path.rmdir()
        raise


@contextmanager
def _listed(path: Path, written: list[Path]) -> Iterator[None]:
    """Add a file to those that are written, once the body has written it."""
    yield
    written.append(path)


def _merge(document: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Add fields to a document; a table is added to the table of its name."""
    for name, value in fields.items():
        known = document.get(name)
        if isinstance(known, dict) and isinstance(value, Mapping):
            document[name] = {**known, **value}
        else:
            document[name] = value


def _print_below(sections: Sequence[Section]) -> None:
    if sections:
        echo()
        print_sections(*sections)
