"""Workloads found by name or file, recognised by format, taken in part, and made of texts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any, cast

import attrs

from kvcore.blake2 import blake2b
from kvcore.errors import InputError
from kvcore.files import input_path, unreadable_reason
from kvcore.plugins.base import FAILURES, Plugin, options_of
from kvcore.plugins.manager import Plugins, installed
from kvcore.plugins.options import nearest, takes_path
from kvcore.request import Request, Retention, TextRequest
from kvcore.units import window_text
from kvcore.untrusted import parse_json
from kvcore.workloads.base import Workload, json_fields
from kvcore.workloads.files import lines

BUNDLED = "mooncake"
"""The workload that comes with kvcore."""

HEAD_LINES = 100
HEAD_BYTES = 1 << 20
"""The first lines by which a format is recognised, and about the most bytes of them."""


def find_workload(text: str | None, plugins: Plugins, seed: int | None = None) -> Workload:
    """Return the workload that `text` names: a plugin with options, or the path of a file.

    None is the trace that comes with kvcore. A plugin's name comes first: `./zipf` is a
    file, and `-` is standard input; `my.py:Class` is a class in a file. `trace:FILE` is short
    for `trace:path=FILE`, of any plugin whose first option is a path. `seed` is that of a
    plugin with an option `seed` that does not set it.

    Raises:
        InputError: no such plugin or file, or one that cannot be used.
    """
    text = BUNDLED if text is None else text
    if not text:
        msg = "workload '': empty path; name a file or a workload plugin"
        raise InputError(msg)
    name = text.partition(":")[0].strip()
    names = plugins.names("workload")
    if name in names or name.endswith(".py"):
        if name in names:
            text = with_path(text, plugins.get("workload", name))
        defaults = {} if seed is None else {"seed": seed}
        return cast("Workload", plugins.build("workload", text, defaults))
    path = input_path(text)
    try:
        path.lstat()
    except PermissionError as error:
        msg = f"{path}: cannot be read: {unreadable_reason(path, error)}"
        raise InputError(msg) from error
    except (OSError, ValueError):  # no path may have such a name
        msg = (
            f"workload {text!r}: there is no such file, and no workload plugin is named "
            f"{name!r}{nearest(name, names)}. There are: {', '.join(names)}"
        )
        raise plugins.not_found("workload", msg) from None  # noqa: EM101 - the kind
    head = list(_first_lines(path))
    candidates = plugins.classes("workload", _possible(head, plugins))
    return _recognised(path, head, candidates.values())


def open_workload(workload: Any, plugins: Plugins) -> Any:
    """Return the workload that a text or path names, or that requests are; others as they are.

    Raises:
        InputError: as `find_workload`, or as `RequestList`.
    """
    if isinstance(workload, PathLike):
        return find_workload(str(Path(workload).absolute()), plugins)
    if isinstance(workload, str):
        return find_workload(workload, plugins)
    instance = given_workload(workload)
    return workload if instance is None else instance


def with_path(text: str, cls: type[Plugin]) -> str:
    """Return the text of a plugin with the name of its option before a leading path."""
    name, _, rest = text.partition(":")
    first = rest.partition(",")[0]
    option = next((option.name for option in options_of(cls)), "")
    if first.strip() and "=" not in first and takes_path(cls, option):
        return f"{name}:{option}={rest.strip()}"
    return text


def recognise(path: Path, candidates: Iterable[type[Workload]]) -> Workload:
    """Return the workload that reads `path`: of the class that recognises most of its lines.

    Of the first ones, that is: some rows of a log may be of another kind than most.

    Raises:
        InputError: the file cannot be read, or no class recognises any of its first lines, or
            several recognise as many.
    """
    return _recognised(path, list(_first_lines(path)), candidates)


def _possible(head: list[bytes], plugins: Plugins) -> list[str]:
    """Return the names of the workloads that may recognise the first lines of a file.

    That is one if `Plugins.formats` has their fields, and those that it does not know.
    """
    names, formats = plugins.names("workload"), plugins.formats()
    kinds = {*map(json_fields, head)}
    if kinds == {frozenset()}:
        kinds = {frozenset(_columns(head[0]))}
    sure = {name for name in formats if all(fields in formats[name] for fields in kinds)}
    if len(sure) != 1 or not sure <= {*names}:
        return names
    return [name for name in names if name in sure or name not in formats]


def _columns(line: bytes) -> list[str]:
    """Return the names in a line that is the header of a CSV file."""
    return [name.strip() for name in line.decode(errors="replace").split(",")]


def _recognised(path: Path, head: list[bytes], classes: Iterable[type[Workload]]) -> Workload:
    first_line = head[0]
    readers = sorted((cls for cls in classes if _reads_files(cls)), key=_name)
    votes, errors = Counter[type[Workload]](), {}
    for cls in readers:
        try:
            votes[cls] = sum(map(cls.recognises, head))
        except FAILURES as error:
            errors[cls.name] = error
    most_votes = max(votes.values(), default=0)
    winners = [cls for cls in readers if most_votes and votes[cls] == most_votes]
    faults = "".join(f"; recognises() of {name} raised {e!r}" for name, e in errors.items())
    if len(winners) == 1:
        return winners[0].from_file(path)
    if winners:
        first, names = winners[0].name, " and ".join(map(_name, winners))
        msg = f"{path}: {names} all recognise it; say which, as in '{first}:path={path}'"
        raise InputError(msg)
    known = "\n".join(f"  {_name(cls):<10} {_described(cls)}" for cls in readers) or "  none"
    msg = (
        f"{path}: no known workload format: {_beginning(first_line)}"
        f"{_near_misses(first_line, readers)}{faults}{_suggestions(path, head, readers)}"
    )
    refusal = installed().not_found("workload", msg)  # of a package that is skipped, perhaps
    msg = f"{refusal}; formats:\n{known}"
    raise type(refusal)(msg)


def _first_lines(path: Path) -> Iterator[bytes]:
    """Yield the first lines of a file: `HEAD_LINES`, or as many as have `HEAD_BYTES`."""
    size = 0
    with closing(lines(path)) as source:
        yield next(source)[1]
        # What is damaged later on is for the reader to say.
        with suppress(InputError):
            for _, line in islice(source, HEAD_LINES - 1):
                yield line
                size += len(line)
                if size > HEAD_BYTES:
                    break


def _suggestions(path: Path, head: list[bytes], readers: list[type[Workload]]) -> str:
    """Return the commands that read a file which no format has, or make a table of it."""
    options = {cls.name: text for cls in readers if (text := cls.suggestion(head))}
    texts = [f"'kvcore simulate {name}:path={path},{text}'" for name, text in options.items()]
    if texts:
        return f"; if it has requests, name their fields, as in {' or '.join(texts)}"
    if head[0][:1] in b"{[" or len(head[0].split()) <= 2 * len(_columns(head[0])):
        return ""  # no line of words
    cut = "(echo time,input,output; awk -v OFS=, '{print $1, $2, $3}' LOG) > requests.csv"
    return f"; of another log cut times and tokens of input and output to a table: {cut}"


def _near_misses(first_line: bytes, readers: list[type[Workload]]) -> str:
    """Return the formats with most of whose fields the line has, and the missing ones."""
    names, complete = json_fields(first_line), "a field is of another type"
    if not names:
        complete, names = "its lines are JSON objects", frozenset(_columns(first_line))
    near = []
    for cls in readers:
        for wanted in cls.line_fields:
            lacking = [name for name in wanted if name not in names]
            if len(lacking) < len(wanted) / 2:
                near.append((len(lacking) / len(wanted), cls.name, ", ".join(lacking)))
    best = min((rank for rank, _, _ in near if rank), default=0)
    hints = [
        f"nearly {name}: {f'it lacks {lacking}' if rank else complete}"
        for rank, name, lacking in near
        if rank in (0, best)
    ]
    return f"; {', or '.join(hints)}" if hints else ""


def _described(cls: type[Workload]) -> str:
    """Return the fields that identify a format, for the list of formats."""
    kinds = map(", ".join, cls.line_fields)
    return "; or ".join(kinds) or (cls.__doc__ or "").partition("\n")[0]


def _beginning(first_line: bytes) -> str:
    """Describe the beginning of a line that no format recognises, and why it is not JSON."""
    text = first_line[:60].decode(errors="replace").rstrip()
    begins = f"its first line begins {text!r}"
    if not text.startswith("{"):
        return begins
    import orjson  # noqa: PLC0415 - for errors alone

    try:
        parse_json(first_line)
    except orjson.JSONDecodeError as error:
        return f"{begins} and is not JSON: {error.msg} (column {error.colno})"
    return begins


def _reads_files(cls: type[Workload]) -> bool:
    """Return True if `cls` has a format of its own to recognise."""
    own = (base for base in cls.__mro__ if base is not Workload)
    return bool(cls.line_fields) or any("recognises" in vars(base) for base in own)


_name = attrgetter("name")


class WorkloadSample(Workload):
    """A part of a workload: requests that arrive in a window, the first of them, scaled.

    A key has `key_tokens / scale` tokens, so requests share the same keys as before, and hits,
    in blocks divided by the same number, stay the same. Prompts are rounded down and outputs
    up, and none becomes empty. Times stay the same. A request that comes after one before the
    window begins its session, at its recorded time.

    Attributes:
        source: the workload.
        limit: number of requests to keep; None: all.
        scale: number of tokens of the source that become one.
        window: times in ns: requests are kept that arrive at the first or later, and before
            the second (None: without end); None: all.

    Raises:
        InputError: `limit` is below 1, or `scale` does not divide the tokens of a key. While
            iterating: no request arrives in the window.
    """

    def __init__(
        self,
        source: Workload,
        limit: int | None = None,
        scale: int = 1,
        window: tuple[int, int | None] | None = None,
    ) -> None:
        """Check `limit` and `scale`."""
        self.source = source
        self.limit = limit
        self.scale = scale
        self.window = window
        msg, tokens = "", source.key_tokens
        if self.limit is not None and self.limit < 1:
            msg = f"the first {self.limit} requests of {self.source.name}: give 1 or more"
        elif self.scale < 1 or tokens % self.scale:
            msg = (
                f"{self.source.name} shrunk {self.scale} times: its keys of {tokens} tokens "
                f"can only be divided by {', '.join(map(str, _divisors(tokens)))}"
            )
        if msg:
            raise InputError(msg)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of the source."""
        requests = islice(self.source if self.window is None else self._timely(), self.limit)
        return requests if self.scale == 1 else map(self._scaled, requests)

    def _timely(self) -> Iterator[Request]:
        """Yield the requests that arrive in the window."""
        start, end = self.window or (0, None)
        left_out: set[int | str] = set()
        kept = 0
        for request in self.source:
            if end is not None and request.arrival >= end:
                break
            if request.arrival < start:
                if request.session is not None:
                    left_out.add(request.id)
                continue
            kept += 1
            if request.after in left_out:
                yield attrs.evolve(request, after=None, think_time=0)
            else:
                yield request
        if not kept:
            shown = window_text((start, end))
            msg = f"window {shown}: no request of {self.source.name} arrives in it"
            raise InputError(msg)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the source."""
        return self.source.name

    @property
    def key_tokens(self) -> int:
        """Number of tokens of a key after the division."""
        return self.source.key_tokens // self.scale

    @property
    def digest(self) -> str:
        """The digest of the source's digest, `limit`, `scale` and the window."""
        text = f"{self.source.digest} {self.limit} {self.scale}"
        if self.window is not None:
            text += f" {self.window}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def size(self) -> int | None:
        """The number of requests, if the source knows its own."""
        known = self.source.size if self.window is None else None
        return known if self.limit is None or known is None else min(known, self.limit)

    @property
    def notes(self) -> Sequence[str]:
        """The notes of the source."""
        return self.source.notes

    @property
    def served_model(self) -> str | None:
        """The model that the source names."""
        return self.source.served_model

    @property
    def reported_hit_ratio(self) -> float | None:
        """That of the source."""
        return self.source.reported_hit_ratio

    def options(self) -> dict[str, Any]:
        """Return the options of the source, `limit`, `scale` as `shrink`, and the window."""
        own: dict[str, Any] = {"limit": self.limit, "shrink": self.scale}
        if self.window is not None:
            own["window"] = window_text(self.window)
        return {**self.source.options(), **own}

    def _scaled(self, request: Request) -> Request:
        factor, size = self.scale, self.key_tokens
        prompt = max(request.prompt_tokens // factor, min(request.prompt_tokens, 1))
        predicted, hints = request.predicted_output_tokens, request.hints
        return attrs.evolve(
            request,
            prompt_tokens=prompt,
            output_tokens=-(-request.output_tokens // factor),
            keys=request.keys[: -(-prompt // size)],
            key_tokens=size,
            predicted_output_tokens=None if predicted is None else -(-predicted // factor),
            retention=tuple(self._scaled_hint(hint) for hint in request.retention),
            hints=attrs.evolve(hints, share=hints.share // factor) if hints.share else hints,
        )

    def _scaled_hint(self, hint: Retention) -> Retention:
        end = None if hint.end is None else -(-hint.end // self.scale)
        return attrs.evolve(hint, start=hint.start // self.scale, end=end)


def part_of(
    source: Workload, limit: int | None, window: tuple[int, int | None] | None
) -> Workload:
    """Return the first `limit` requests (0 or None: all) in a window (None: any time)."""
    if not limit and window is None:
        return source
    return WorkloadSample(source, limit or None, window=window)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


class RequestList(Workload):
    """Requests that are in memory already, such as those that a program makes itself.

    Attributes:
        requests: the requests in order of arrival, of any iterable, which is read once.
        key_tokens: number of tokens of a key; by default that of the first request.

    Raises:
        InputError: no requests where `key_tokens` is not given, an object that is no request,
            or a request whose keys stand for another number of tokens.
    """

    name = "requests"
    key_tokens = 0  # of the class, in place of the abstract property

    def __init__(self, requests: Iterable[Request], key_tokens: int | None = None) -> None:
        """Check that all are requests, with keys of one length."""
        self.requests = tuple(requests)
        if key_tokens is None:
            if not self.requests:
                msg = "an empty list of requests is no workload: give at least one Request"
                raise InputError(msg)
            key_tokens = getattr(self.requests[0], "key_tokens", 0)
        self.key_tokens = key_tokens
        for serial, request in enumerate(self.requests, 1):
            if not isinstance(request, Request):
                msg = f"number {serial} of the requests is {request!r:.60}, which is no Request"
                raise InputError(msg)
            if request.key_tokens != self.key_tokens:
                msg = (
                    f"request {request.id!r}, number {serial}: a key of it stands for "
                    f"{request.key_tokens} tokens, in this workload for {self.key_tokens}: "
                    "give all requests of a workload the same key_tokens"
                )
                raise InputError(msg)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests."""
        return iter(self.requests)

    @property
    def digest(self) -> str:
        """The digest of all fields of all requests."""
        state = blake2b(digest_size=16)
        for request in self.requests:
            # Of equal keys, whatever sequence holds them.
            state.update(repr(attrs.evolve(request, keys=list(request.keys))).encode())
        return state.hexdigest()

    @property
    def size(self) -> int:
        """The number of requests."""
        return len(self.requests)

    def options(self) -> dict[str, int]:
        """Return the number of requests, without their fields."""
        return {"requests": len(self.requests)}


class PromptWorkload(RequestList):
    """Requests made from texts by `text_request`, which all arrive at once."""

    name = "prompts"

    @property
    def digest(self) -> str:
        """The digest of all ids, output lengths and tokens."""
        state = blake2b(digest_size=16)
        for request in cast("Sequence[TextRequest]", self.requests):
            state.update(f"{request.id} {request.output_tokens}:".encode())
            state.update(array("Q", request.tokens).tobytes())
        return state.hexdigest()


def given_workload(value: object) -> Workload | None:
    """Return a workload as it is, and an iterable of requests as one; None for other objects.

    Raises:
        InputError: as `RequestList`.
    """
    if isinstance(value, Workload):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | PathLike):
        return RequestList(value)
    return None
