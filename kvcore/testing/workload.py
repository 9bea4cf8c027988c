"""The conformance tests of workloads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar
from weakref import finalize

import pytest

from kvcore.request import Request
from kvcore.testing.plugin import check_is_named
from kvcore.workloads import Workload, checked

_FEW = 4


class WorkloadTests:
    """What holds of every workload. Derive a `Test...` class and say how to make yours.

    `workload` (or `make`, if that needs fixtures of the instance) returns a new one, made
    with the same options each time:

        class TestMine(WorkloadTests):
            workload = staticmethod(lambda: Mine(path="some.file"))

    The tests read the workload some 15 times, and one of them holds all its requests: give
    it a file or options that make a few hundred.
    """

    workload: ClassVar[Callable[[], Workload]]

    def make(self) -> Workload:
        """Return a new workload."""
        return type(self).workload()

    def test_is_a_named_workload(self) -> None:
        """Its class derives from Workload and has a name and a docstring of its own."""
        check_is_named(self.make(), Workload)

    def test_yields_requests(self) -> None:
        """It yields at least one, and nothing but instances of Request."""
        found = {type(request) for request in self.make()}
        assert found
        assert all(issubclass(each, Request) for each in found)

    def test_starts_again_from_the_beginning(self) -> None:
        """Iterating a second time yields equal requests."""
        workload = self.make()
        before = list(workload)
        for first, second in zip(before, workload, strict=True):
            assert first == second

    def test_iterators_do_not_disturb_each_other(self) -> None:
        """Two iterators taken in turns yield equal requests."""
        workload = self.make()
        for first, second in zip(workload, workload, strict=True):
            assert first == second

    def test_equal_options_give_equal_requests(self) -> None:
        """A workload rebuilt from its own `options()` has its requests and its digest."""
        workload = self.make()
        again = type(workload)(**workload.options())
        assert workload.digest == again.digest
        for first, second in zip(workload, again, strict=True):
            assert first == second

    def test_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At no time more than half of the requests exist, if the reader keeps none."""
        workload = self.make()
        total = sum(1 for _ in workload)
        if total < _FEW:
            pytest.skip(f"fewer than {_FEW} requests: streaming cannot be told from a list")
        alive = most = 0
        init = Request.__init__

        def built(request: Request, *args: Any, **fields: Any) -> None:
            nonlocal alive, most
            init(request, *args, **fields)
            finalize(request, gone)
            alive += 1
            most = max(most, alive)

        def gone() -> None:
            nonlocal alive
            alive -= 1

        monkeypatch.setattr(Request, "__init__", built)
        for _ in workload:
            pass
        assert most > 0, "no Request was built while iterating: they are kept from before"
        assert most <= total // 2, f"{most} of {total} requests existed at once"

    def test_arrivals_do_not_decrease(self) -> None:
        """Requests come in order of arrival, counted from 0 or later, in whole ns."""
        earliest = 0
        for request in self.make():
            assert type(request.arrival) is int, f"request {request.id!r}"
            assert request.arrival >= earliest, f"request {request.id!r}"
            earliest = request.arrival

    def test_ids_are_unique(self) -> None:
        """No two requests have one id, and each is an integer or a text."""
        ids = [request.id for request in self.make()]
        assert {type(name) for name in ids} <= {int, str}
        assert len(set(ids)) == len(ids)

    def test_keys_have_one_parent(self) -> None:
        """A key stands after the same key, or at the start, wherever it turns up."""
        for _ in checked(self.make()):
            pass

    def test_key_tokens_are_the_same_throughout(self) -> None:
        """`key_tokens` is positive, and what each request says."""
        workload = self.make()
        assert workload.key_tokens > 0
        for request in workload:
            assert request.key_tokens == workload.key_tokens, f"request {request.id!r}"

    def test_prompts_cover_their_keys(self) -> None:
        """A prompt has a token at least, and no key beyond its last token."""
        for request in self.make():
            assert request.prompt_tokens > 0, f"request {request.id!r}"
            assert request.output_tokens >= 0, f"request {request.id!r}"
            assert (len(request.keys) - 1) * request.key_tokens < request.prompt_tokens, (
                f"request {request.id!r}"
            )

    def test_sessions_are_closed_loops(self) -> None:
        """A request comes after an earlier one of its own session, if it says after which."""
        sessions: dict[int | str, str | None] = {}
        for request in self.make():
            if request.after is not None:
                assert request.session is not None, f"request {request.id!r}"
                assert sessions.get(request.after) == request.session, f"request {request.id!r}"
            sessions[request.id] = request.session

    def test_digest_is_stable(self) -> None:
        """Two workloads made alike have one digest, in hexadecimal."""
        digest = self.make().digest
        assert re.fullmatch("[0-9a-f]{16,}", digest)
        assert digest == self.make().digest

    def test_size_is_right(self) -> None:
        """`size` is the number of requests, or None."""
        workload = self.make()
        if workload.size is None:
            pytest.skip("does not know its size without reading")
        assert workload.size == sum(1 for _ in workload)
