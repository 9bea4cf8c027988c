"""The workload contract: a source of requests that can be read again and again."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import closing
from functools import wraps
from pathlib import Path
from traceback import walk_tb
from typing import Any, ClassVar, Self

import orjson

from kvcore.errors import InputError, KvcoreError, shorten
from kvcore.plugins.base import FAILURES, Plugin, policy_error, wrong_answer
from kvcore.request import Key, Request
from kvcore.workloads.files import file_digest, lines


class Workload(Plugin):
    """A named, repeatable stream of requests.

    Iterating starts from the beginning each time and *streams*: memory must not grow
    with the number of requests. Arrivals never decrease, ids are unique, a key never
    occurs under two parents, and equal options give equal requests.

    A workload that reads files also recognises its own format: `recognises`.
    """

    kind: ClassVar[str] = "workload"

    _has_yielded = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Let errors of an `__iter__` that `cls` defines name the plugin, the file and line."""
        super().__init_subclass__(**options)
        if "__iter__" in vars(cls):
            cls.__iter__ = _guarded(vars(cls)["__iter__"])  # type: ignore[method-assign]

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Yield requests in order of arrival.

        Raises:
            InputError: a row cannot be used; the message names file, line and field.
        """

    @property
    @abstractmethod
    def key_tokens(self) -> int:
        """Tokens a block key of this workload stands for.

        A class attribute will do. An option of this name needs a class in slots, as
        `@attrs.define(eq=False)` makes it: an instance attribute cannot override a property.
        """

    @property
    def digest(self) -> str:
        """A hex digest of all that determines the requests.

        Here: of the name and the options, where the path of a file stands for its bytes.
        Override it if something else matters, or not all of that does.
        """
        options: dict[str, Any] = {
            name: file_digest(value) if isinstance(value, Path) else value
            for name, value in self.options().items()
        }
        text = orjson.dumps(
            {"workload": self.name, **options}, default=str, option=orjson.OPT_SORT_KEYS
        )
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    @property
    def size(self) -> int | None:
        """The number of requests; None if it is not known without reading them."""
        return None

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if a file that starts with `first_line` is of this format.

        The line is whole, decompressed, and the first that is not blank.
        """
        del first_line
        return False

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Build the workload that reads `path`. Called if `recognises` returned True."""
        return cls(path=path)  # type: ignore[call-arg]


def _guarded(
    method: Callable[[Workload], Iterator[Request]],
) -> Callable[[Workload], Iterator[Request]]:
    """Return `method`, an `__iter__`, whose failures and wrong items are PolicyErrors."""

    @wraps(method)
    def requests(workload: Workload) -> Iterator[Request]:
        request = None
        try:
            for request in method(workload):
                if not isinstance(request, Request):
                    raise wrong_answer(workload, "__iter__()", _what_it_is(request, method))
                yield request
        except FAILURES as error:
            if isinstance(error, (KvcoreError, OSError)) and not _is_of_request(error):
                raise
            raise policy_error(workload, "__iter__", error) from error
        if request is None and workload._has_yielded:  # noqa: SLF001 - a method in the end
            why = "nothing, the second time: it must begin anew whenever it is called"
            raise wrong_answer(workload, "__iter__()", why)
        # Also where the class is frozen.
        object.__setattr__(workload, "_has_yielded", request is not None)

    return requests


def _is_of_request(error: Exception) -> bool:
    """Return True if a Request could not be made: a row that the workload should refuse."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals["__name__"] == Request.__module__


def _what_it_is(item: object, method: Callable[..., object]) -> str:
    code = method.__code__
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}, {method.__name__}"
    return f"{shorten(repr(item))}: yield instances of kvcore.Request ({place})"


def recognise(path: Path, candidates: Iterable[type[Workload]]) -> Workload:
    """Return the workload that reads `path`: of the one class that recognises its first line.

    Raises:
        InputError: the file cannot be read, or no class or several recognise it.
    """
    with closing(lines(path)) as source:
        first_line = next(source)[1]
    readers = [cls for cls in candidates if _reads_files(cls)]
    found, faults = [], ""
    for cls in sorted(readers, key=_name):
        try:
            if cls.recognises(first_line):
                found.append(cls)
        except FAILURES as error:
            faults += f"; recognises() of {cls.name} raised {error!r}"
    if len(found) == 1:
        return found[0].from_file(path)
    if found:
        names = " and ".join(map(_name, found))
        msg = (
            f"{path}: {names} all recognise it; say which, as in '{found[0].name}:path={path}'"
        )
        raise InputError(msg)
    names = ", ".join(sorted(map(_name, readers))) or "none"
    msg = (
        f"{path}: no known workload format: {_beginning(first_line)}; formats: {names}{faults}"
    )
    raise InputError(msg)


def checked(workload: Workload) -> Iterator[Request]:
    """Yield the requests of `workload`, checking what the contract promises of them.

    Memory grows with the distinct keys and ids; cost is one dict look-up a key.

    Raises:
        InputError: an arrival is earlier than the one before it, an id occurs twice, or a
            prompt key follows another parent than before.
    """
    root = object()
    parents: dict[Key, Hashable] = {}
    ids: set[int | str] = set()
    now = 0
    for request in workload:
        where = f"workload {workload.name}: request {request.id!r}"
        if request.arrival < now:
            msg = (
                f"{where}: arrives at {request.arrival} ns, after one that arrives at {now} ns"
            )
            raise InputError(msg)
        if request.id in ids:
            msg = f"{where}: an earlier request has the same id"
            raise InputError(msg)
        now = request.arrival
        ids.add(request.id)
        parent: Hashable = root
        for key in request.keys:
            known = parents.setdefault(key, parent)
            if known != parent:
                here, there = (
                    "at the start" if place is root else f"after key {_key_text(place)}"
                    for place in (parent, known)
                )
                msg = (
                    f"{where}: key {_key_text(key)} stands {here}, in an earlier request "
                    f"{there}: equal keys must mean equal prefixes"
                )
                raise InputError(msg)
            parent = key
        yield request


def _beginning(first_line: bytes) -> str:
    """Describe the beginning of a line that no format recognises, and why it is not JSON."""
    text = first_line[:60].decode(errors="replace").rstrip()
    begins = f"its first line begins {text!r}"
    if not text.startswith("{"):
        return begins
    try:
        orjson.loads(first_line)
    except orjson.JSONDecodeError as error:
        return f"{begins} and is not JSON: {error.msg} (column {error.colno})"
    return begins


def _key_text(key: Hashable) -> str:
    return key.hex() if isinstance(key, bytes) else repr(key)


def _reads_files(cls: type[Workload]) -> bool:
    """Return True if `cls` has a format of its own to recognise."""
    return any("recognises" in vars(base) for base in cls.__mro__ if base is not Workload)


def _name(cls: type[Workload]) -> str:
    return cls.name
