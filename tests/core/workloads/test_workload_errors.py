"""Workload plugins that fail: the error names plugin, method, file and line."""

import sys

import attrs
import pytest
from helpers.requests import keyed

from kvcore import KVCache, PolicyError, Workload, compare
from kvcore.errors import InputError
from kvcore.serving import simulate
from kvcore.workloads import recognise
from kvcore_plugins.workload import Jsonl, Zipf


def request(number=1, keys=(1,)):
    """Return a request of one block or more."""
    return keyed(number, list(keys), 16)


@attrs.frozen
class Failing(Workload):
    """A workload of a request and the result of its option."""

    name = "failing"
    key_tokens = 16

    second: object

    def __iter__(self):
        """Yield a request and the result of `second`."""
        yield request()
        yield self.second()


def fail():
    """Raise KeyError."""
    return {}["x"]


def read(workload):
    """Read a workload in a comparison."""
    compare(workload, "lru", 10)


def serve(workload):
    """Serve a workload under a clock."""
    simulate(workload, cache=KVCache(10))


@pytest.mark.parametrize("use", [read, serve])
@pytest.mark.parametrize(
    ("second", "error"),
    [
        (fail, r"raised KeyError in __iter__\(\): 'x' \(test_workload_errors.py:\d+, fail\)"),
        (
            sys.exit,
            r"raised SystemExit in __iter__\(\).*\(test_workload_errors.py:\d+, __iter__",
        ),
        (
            lambda: request(2, [[1], [2]]),
            r"raised InputError .*: unhashable.*\(test_workload_errors.py:\d+, request\)",
        ),
        (
            lambda: {"id": 2},
            r"answered __iter__\(\) with {'id': 2}: yield .*\(test_workload_errors.py:\d+",
        ),
    ],
)
def test_an_exception_of_a_workload_is_reported_with_its_place(second, error, use):
    """An exception or a wrong item of a workload raises PolicyError with its place.

    The exit code is that of a broken plugin.
    """
    with pytest.raises(
        PolicyError, match=rf"^workload plugin 'failing' \(.*\) {error}"
    ) as caught:
        use(Failing(second))
    assert caught.value.exit_code == 3


def test_an_input_error_of_a_workload_is_raised_unchanged():
    """An InputError of a workload is raised unchanged."""

    def missing():
        msg = "some.file:3: no number"
        raise InputError(msg)

    with pytest.raises(InputError, match=r"^some.file:3: no number$"):
        read(Failing(missing))


@attrs.define(slots=False)
class Once(Workload):
    """A workload that returns the same iterator every time."""

    name = "once"
    key_tokens = 16

    rest: object = attrs.field(factory=lambda: iter([request()]))

    def __iter__(self):
        """Return the rest of the iterator."""
        return self.rest


def test_a_workload_without_requests_in_its_second_reading_is_refused():
    """A second reading of a workload that yields nothing raises PolicyError."""
    once = Once()
    assert list(once)
    with pytest.raises(
        PolicyError, match=r"'once' .* answered __iter__\(\) with nothing, the sec"
    ):
        list(once)


@pytest.mark.parametrize("what", ["key_tokens", "digest", "size", "notes"])
def test_an_exception_in_a_property_is_reported(what):
    """An exception in a property of a workload raises PolicyError that names it."""

    def fails(_):
        return {}[what]

    fails.__name__ = what
    torn = type("Torn", (Jsonl,), {"name": "torn", what: property(fails)})
    with pytest.raises(
        PolicyError, match=rf"'torn' .* raised KeyError in {what}\(\): '{what}' .*, fails\)"
    ):
        getattr(torn("a"), what)


def test_a_property_of_an_attrs_class_may_call_super():
    """A property of a slotted attrs class may call `super()`."""

    @attrs.define(eq=False)
    class Prefixed(Zipf):
        name = "prefixed"

        @property
        def digest(self):
            return f"my {super().digest}"

    assert Prefixed().digest.startswith("my ")


def test_a_format_whose_recognises_fails_is_skipped(tmp_path):
    """An exception in `recognises` does not prevent other formats from reading a file.

    If no format reads it, the error reports the exception.
    """

    class Torn(Failing):
        name = "torn"

        @classmethod
        def recognises(cls, first_line):
            return first_line.nothing

    known, unknown = tmp_path / "known", tmp_path / "unknown"
    known.write_text('{"event": "REQUEST", "id": 1, "prompt": 1}\n')
    unknown.write_text("1 2 3\n")
    assert isinstance(recognise(known, [Torn, Jsonl]), Jsonl)
    with pytest.raises(InputError, match=r"recognises\(\) of torn raised AttributeError"):
        recognise(unknown, [Torn, Jsonl])
