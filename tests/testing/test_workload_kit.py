"""The conformance tests of workloads: each of them fails for a broken workload."""

import re
from itertools import count

import attrs
import pytest

from kvcore.errors import InputError, PolicyError
from kvcore.request import Request
from kvcore.testing.workload import WorkloadTests
from kvcore.workloads import Workload


def request(name=0, **fields):
    """Return a valid request with these fields changed."""
    return Request(id=name, **({"prompt_tokens": 16, "key_tokens": 16} | fields))


@attrs.define(slots=False, eq=False)
class Made(Workload):
    """A workload of the requests, digest and size that its options give."""

    name = "made"
    key_tokens = 16

    make: object = lambda: [request(index) for index in range(8)]
    digests: object = "0123456789abcdef"
    length: int | None = None

    def __iter__(self):
        """Yield the requests that `make` returns."""
        yield from self.make()

    @property
    def digest(self):
        """The option `digests`, or its next item."""
        return self.digests if isinstance(self.digests, str) else next(self.digests)

    @property
    def size(self):
        """The option `length`."""
        return self.length


class Renamed(Made):
    """A workload with a name that cannot be given on a command line."""

    name = "no name"


def kit(workload, **options):
    """Return the conformance tests of a workload, to be called and not collected."""

    class Kit(WorkloadTests):
        def make(self):
            return workload(**options)

    return Kit()


def consumed():
    """Return a `make` that returns requests only the first time."""
    left = [request(index) for index in range(8)]
    return lambda: (left.pop() for _ in range(len(left)))


def hashed():
    """Return requests whose prompts have a length by the hash of their names."""
    return [request(name, prompt_tokens=16 + hash(name) % 999) for name in "abcdefgh"]


def numbered():
    """Return a `make` that continues its numbers when it is called again."""
    serial = count()
    return lambda: (request(next(serial)) for _ in range(8))


BROKEN = {
    "test_is_a_named_plugin": [
        ({"workload": Renamed}, "a name is letters, digits, _ . -: not 'no name'"),
    ],
    "test_yields_requests": [
        ({"make": list}, "it has no requests"),
        ({"make": lambda: ["request"]}, "answered __iter__() with 'request': yield instances"),
    ],
    "test_starts_again_from_the_beginning": [
        ({"make": consumed()}, "answered __iter__() with nothing, the second time"),
        ({"make": numbered()}, None),
    ],
    "test_iterators_do_not_disturb_each_other": [({"make": numbered()}, None)],
    "test_equal_options_give_equal_requests": [
        ({"make": numbered()}, None),
        ({"make": hashed}, None),
        ({"digests": map("{:016x}".format, count())}, None),
    ],
    "test_streams": [
        ({}, "8 of 8 requests existed at once"),
        ({"make": ([request()] * 8).copy}, "no Request was built while iterating"),
    ],
    "test_arrivals_do_not_decrease": [
        (
            {"make": lambda: [request(0, arrival=1), request(1, arrival=0)]},
            "request 1 arrives at 0, after one at 1",
        ),
        ({"make": lambda: [request(arrival=-1)]}, "request 0 arrives at -1"),
    ],
    "test_ids_are_unique": [
        ({"make": lambda: [request(1), request(1)]}, "ids of more than one request: [1]"),
        ({"make": lambda: [request(1.5)]}, None),
    ],
    "test_key_tokens_are_the_same_throughout": [
        (
            {"make": lambda: [request(key_tokens=32)]},
            "has keys of 32 tokens, the workload of 16",
        ),
    ],
    "test_prompts_cover_their_keys": [
        ({"make": lambda: [request(keys=[1, 2])]}, "2 keys of 16 tokens for 16 prompt tokens"),
        ({"make": lambda: [request(prompt_tokens=0)]}, "request 0 has no prompt"),
    ],
    "test_sessions_are_closed_loops": [
        (
            {"make": lambda: [request(after=7, session="a")]},
            "request 0 has after=7, which is no",
        ),
        (
            {"make": lambda: [request(1), request(2, after=1)]},
            "request 2 has after=1 and no session",
        ),
        (
            {"make": lambda: [request(1, session="b"), request(2, after=1, session="a")]},
            "request 2 has after=1, which is no earlier request of session 'a'",
        ),
    ],
    "test_digest_is_stable": [
        ({"digests": "no digest"}, "digest is 'no digest': expected 16 hexadecimal digits"),
        ({"digests": map("{:016x}".format, count())}, "made again, it has another digest"),
    ],
    "test_size_is_right": [({"length": 7}, None)],
}
"""Options of broken workloads for each test, with the message of the failure if it has one."""

CASES = [(test, *case) for test, cases in BROKEN.items() for case in cases]


@pytest.mark.parametrize(("test", "options", "reason"), CASES)
def test_each_test_of_the_kit_fails_for_a_broken_workload(test, options, reason, monkeypatch):
    """Each test of the kit fails for a workload that breaks its rule, with the reason."""
    tests = kit(**({"workload": Made} | options))
    arguments = {"monkeypatch": monkeypatch} if test == "test_streams" else {}
    kinds = (AssertionError, PolicyError) if reason else AssertionError
    with pytest.raises(kinds, match=reason and re.escape(reason)):
        getattr(tests, test)(**arguments)


def test_the_kit_refuses_a_key_with_two_parents():
    """The kit refuses a workload whose keys are not chained, as `checked` does."""
    tests = kit(
        Made, make=lambda: [request(1, keys=[1]), request(2, prompt_tokens=32, keys=[2, 1])]
    )
    with pytest.raises(InputError, match="key 1 stands after key 2"):
        tests.test_keys_have_one_parent()


def test_every_test_of_the_kit_has_a_workload_that_fails():
    """Every test of the kit has a workload here for which it fails."""
    tests = {name for name in dir(WorkloadTests) if name.startswith("test_")}
    assert tests == BROKEN.keys() | {"test_keys_have_one_parent"}


def test_the_kit_skips_streaming_for_few_requests(monkeypatch):
    """The kit skips its test of streaming for fewer than 4 requests, with the reason."""
    tests = kit(Made, make=lambda: [request()])
    with pytest.raises(pytest.skip.Exception, match="fewer than 4 requests"):
        tests.test_streams(monkeypatch)


@attrs.define(kw_only=True)
class Priced(Request):
    """A request with a field more."""

    price: int = 0


def test_requests_of_a_derived_class_stream(monkeypatch):
    """Requests of a class with a constructor of its own are seen while they stream."""
    fields = {"prompt_tokens": 16, "key_tokens": 16}
    tests = kit(Made, make=lambda: (Priced(id=index, **fields) for index in range(8)))
    tests.test_streams(monkeypatch)


def test_the_attribute_workload_may_be_a_class():
    """The attribute `workload` may be a class, if that needs no options."""

    class Kit(WorkloadTests):
        workload = Made

    assert type(Kit().make()) is Made
