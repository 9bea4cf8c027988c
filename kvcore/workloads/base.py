"""The workload contract: a source of requests that can be read again and again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import lru_cache, wraps
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

from kvcore.blake2 import blake2b
from kvcore.errors import InputError, KvcoreError, shorten
from kvcore.plugins.base import FAILURES, Plugin, policy_error, wrong_answer
from kvcore.progress import Ticked
from kvcore.request import Key, KeyPrefix, Request
from kvcore.units import NS_PER_S
from kvcore.untrusted import parse_json
from kvcore.workloads.files import file_digest

CHECKED_REQUESTS = 4_000
"""Number of requests, the first of each run, whose keys are checked: some 50 ns a key."""


class Workload(Plugin):
    """A named, repeatable stream of requests.

    Iterating starts from the beginning each time and *streams*: memory must not grow
    with the number of requests. Arrivals never decrease, ids are unique, a key never
    occurs under two parents, and equal options give equal requests.

    A workload that reads files also recognises its own format: by `line_fields`, or by a
    `recognises` of its own.

    Attributes:
        line_fields: for each kind of first line that its files may have, the field names of
            the JSON object, or the columns of a CSV header, that identify it.
    """

    kind: ClassVar[str] = "workload"
    line_fields: ClassVar[Sequence[Sequence[str]]] = ()

    _has_yielded = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap what `cls` defines so that its errors name the plugin, file and line."""
        super().__init_subclass__(**options)
        for name, defined in list(vars(cls).items()):
            if name == "__iter__":
                cls.__iter__ = _guarded(defined)  # type: ignore[method-assign]
            elif isinstance(defined, property) and hasattr(Workload, name):
                made = _GuardedProperty(defined.fget, defined.fset, defined.fdel)
                setattr(cls, name, made)

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Yield requests in order of arrival.

        Raises:
            InputError: a row cannot be used; the message names file, line and field.
        """

    @property
    @abstractmethod
    def key_tokens(self) -> int:
        """Number of tokens of a block key of this workload.

        A class attribute will do. An option of this name needs a class in slots, as
        `@attrs.define(eq=False)` makes it: an instance attribute cannot override a property.
        """

    @property
    def digest(self) -> str:
        """A hex digest of all that determines the requests.

        Here: of the name and the options, with the bytes of a file in place of its path.
        Override it where the requests depend on more, or on less.
        """
        options: dict[str, Any] = {
            name: file_digest(value) if isinstance(value, Path) else value
            for name, value in self.options().items()
        }
        try:
            import orjson  # noqa: PLC0415 - for traces alone

            text = orjson.dumps(
                {"workload": self.name, **options}, default=str, option=orjson.OPT_SORT_KEYS
            )
        except TypeError as error:
            msg = f"workload {self.name}: its options have no digest: {error}"
            raise InputError(msg) from error
        return blake2b(text, digest_size=16).hexdigest()

    @property
    def size(self) -> int | None:
        """The number of requests; None if it is not known without reading them."""
        return None

    @property
    def notes(self) -> Sequence[str]:
        """Remarks about the requests read last, such as rows left out.

        Each note is part of a sentence, without a full stop. Here: no notes.
        """
        return ()

    @property
    def served_model(self) -> str | None:
        """The model that the file says has served its requests; None: it does not say."""
        return None

    @property
    def reported_hit_ratio(self) -> float | None:
        """The share of the prompt tokens read last that a log reports as cached, if it does."""
        return None

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if a file that starts with `first_line` is of this format.

        The line is a whole, decompressed line that is not blank; of a JSON array, an element.
        It is asked of the first hundred lines, and the format of most of them is that of the
        file. Here: True if it is a JSON object with all names of one `line_fields`.
        """
        names = json_fields(first_line)
        return any(names >= set(wanted) for wanted in cls.line_fields)

    @classmethod
    def suggestion(cls, head: Sequence[bytes]) -> str:
        """Return options that name the fields of a file which no format recognises.

        Called with its first lines for the error; such as `messages=payload.messages`. Here:
        empty, there are none.
        """
        del head
        return ""

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Build the workload that reads `path`. Called if `recognises` returned True."""
        return cls(path=path)  # type: ignore[call-arg]


def notes_of(requests: object) -> list[str]:
    """Return the notes on requests that were read, each after the name of their workload."""
    source = requests.items if isinstance(requests, Ticked) else requests
    if not isinstance(source, Workload):
        return []
    return [f"{source.name}: {note}" for note in source.notes]


def _guarded(
    method: Callable[[Workload], Iterator[Request]],
) -> Callable[[Workload], Iterator[Request]]:
    """Wrap an `__iter__` so that its failures and wrong items raise PolicyError."""

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
            why = "nothing, the second time: each call must begin with the first request"
            raise wrong_answer(workload, "__iter__()", why)
        # Works for frozen classes too.
        object.__setattr__(workload, "_has_yielded", request is not None)

    return requests


class _GuardedProperty(property):
    """A property of a workload whose failures are PolicyErrors.

    `fget` stays the plugin's own function: attrs looks there for what `super()` needs.
    """

    def __get__(self, workload: Any, owner: type | None = None) -> Any:
        """Return the value."""
        try:
            return super().__get__(workload, owner)
        except FAILURES as error:
            if isinstance(error, (KvcoreError, OSError)):
                raise
            name = self.fget.__name__ if self.fget else ""
            raise policy_error(workload, name, error) from error


def _is_of_request(error: Exception) -> bool:
    """Return True if `Request` raised the error, for a row that the workload should refuse."""
    from traceback import walk_tb  # noqa: PLC0415 - for errors alone

    *_, (frame, _) = walk_tb(error.__traceback__)
    module: str = frame.f_globals["__name__"]
    return module == Request.__module__


def _what_it_is(item: object, method: Callable[..., object]) -> str:
    code = method.__code__
    where = f"{Path(code.co_filename).name}:{code.co_firstlineno}, {method.__name__}"
    return f"{shorten(repr(item))}: yield instances of kvcore.Request ({where})"


@lru_cache(maxsize=128)
def json_fields(line: bytes) -> frozenset[str]:
    """Return the field names of a line that is a JSON object; no names if it is not.

    Cached, since each format asks for those of the same first lines.
    """
    import orjson  # noqa: PLC0415 - for files alone

    try:
        fields = parse_json(line)
    except orjson.JSONDecodeError:
        return frozenset()
    return frozenset(fields) if isinstance(fields, dict) else frozenset()


def checked(workload: Workload) -> Iterator[Request]:
    """Yield the requests of `workload`, and check them against the contract.

    Memory grows with the distinct keys and ids. Costs one dict look-up for each key.

    Raises:
        InputError: an arrival is earlier than the one before it, an id occurs twice, or a
            prompt key follows another parent than before.
    """
    ids: set[int | str] = set()
    now = 0
    for request in check_keys(workload, every=True):
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
        yield request


def check_keys(workload: Iterable[Request], *, every: bool = False) -> Iterator[Request]:
    """Yield the requests, checking that each key has one parent, and tokens of its own.

    Checks the first `CHECKED_REQUESTS`, or `every` one. Memory grows with the distinct keys
    of those.

    Raises:
        InputError: a key has two parents, so that it does not identify a prefix; or a prompt
            has more keys than its tokens fill.
    """
    requests = iter(workload)
    if isinstance(workload, Ticked):
        workload = workload.items
    root: Hashable = object()
    checked_requests = None if every else CHECKED_REQUESTS
    parents: dict[Key, Hashable] = {}
    # For paths that several requests share, by identity, the number of checked keys.
    checked_paths: dict[int, tuple[object, int]] = {}
    earlier: Request | None = None
    for serial, request in enumerate(islice(requests, checked_requests), 1):
        if not isinstance(request, Request):
            msg = f"number {serial} of the workload is {request!r:.60}, which is no Request"
            raise InputError(msg)
        _check_count(workload, request, serial)
        # Again: a generator may have lengthened its list since.
        _check_count(workload, earlier or request, serial - 1)
        earlier = request
        keys, done, last = request.keys, 0, root
        if type(keys) is KeyPrefix and keys:
            count = len(keys)
            done = min(checked_paths.get(id(keys.path), (None, 0))[1], count - 1)
            if count > done + 1:
                checked_paths[id(keys.path)] = keys.path, count
            if done:
                keys, last = keys.view[done:].tolist(), keys[done - 1]
        before = [last, *keys[:-1]]
        # In C, since every run does it: a key keeps its first parent.
        try:
            known = list(map(parents.setdefault, keys, before))
        except TypeError as error:
            msg = f"{_place(workload, request, serial)}: a key cannot be looked up: {error}"
            raise InputError(msg) from error
        if known != before[: len(known)]:
            first = next(n for n, parent in enumerate(known) if parent != before[n])
            here, there = (
                "at the start" if parent is root else f"after key {_key_text(parent)}"
                for parent in (before[first], known[first])
            )
            other = "and also" if keys[first] in keys[:first] else "in an earlier request"
            msg = (
                f"{_place(workload, request, serial)}: key {_key_text(keys[first])} "
                f"stands {here}, {other} {there}: {_UNCHAINED}"
            )
            if isinstance(workload, Workload) and "chain" in workload.options():
                msg += ", or give the workload the option chain=true"
            raise InputError(msg)
        yield request
    parents.clear()
    checked_paths.clear()
    yield from requests


def _check_count(workload: Iterable[Request], request: Request, serial: int) -> None:
    count, prompt, key_tokens = len(request.keys), request.prompt_tokens, request.key_tokens
    if count > -(-prompt // key_tokens):
        msg = (
            f"{_place(workload, request, serial)}: {count} keys of {key_tokens} tokens for a "
            f"prompt of {prompt}: give it no more than its tokens fill, of a list that grows a "
            "copy: keys=[*keys]"
        )
        raise InputError(msg)


_UNCHAINED = (
    "equal keys must mean equal prefixes. If each key is the hash of its own block alone, "
    "chain them by `kvcore.request.chain_keys`"
)


def _place(workload: Iterable[Request], request: Request, serial: int) -> str:
    """Return the place of a request for a message: its workload, file, id and number."""
    where = "requests"
    if isinstance(workload, Workload):
        paths = (path for path in workload.options().values() if isinstance(path, Path))
        where = f"workload {workload.name}" + "".join(f" ({path})" for path in paths)
    return f"{where}: request {request.id!r}, number {serial}"


def _key_text(key: Hashable) -> str:
    return key.hex() if isinstance(key, bytes) else repr(key)


def poisson_arrivals(draw: Callable[[], float], rate: float, burst: int = 1) -> Iterator[int]:
    """Yield times in ns, from 0, of Poisson arrivals at `rate` a second, `burst` at once.

    `draw` returns uniform variates in [0, 1). An infinite rate gives zeros.
    """
    now = 0
    while True:
        for _ in range(burst):
            yield now
        now += round(exponential(draw) * burst / rate * NS_PER_S)


def exponential(draw: Callable[[], float]) -> float:
    """Return an exponential variate of mean 1, made from uniform ones in [0, 1).

    Takes no logarithm, whose last bit differs between machines: draws are compared, and
    nothing else. Costs 4.3 draws on average.

    Source: von Neumann, "Various techniques used in connection with random digits", 1951.
    """
    integer_part = 0
    while True:
        first = last = draw()
        descent = 1
        while (value := draw()) < last:
            last = value
            descent += 1
        # For a given first draw, the descent has odd length with probability exp(-first).
        if descent % 2:
            return integer_part + first
        integer_part += 1
