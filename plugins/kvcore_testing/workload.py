"""The conformance tests of workloads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partialmethod
from typing import Any, ClassVar
from weakref import finalize

import pytest

from kvcore.request import Request
from kvcore.workloads import Workload, checked
from kvcore_testing.plugin import NamedTests, other_hashes, unshared

_FEW = 4


def _assert_equal(first: Iterable[Request], second: Iterable[Request]) -> None:
    """Assert that two readings, which advance in turns, give equal requests."""
    for one, other in zip(first, second, strict=True):
        assert one == other


class WorkloadTests(NamedTests[Workload]):
    """Conformance tests of a workload; a derived `Test...` class makes the workload.

    The attribute `workload` is what `make` calls:

        class TestMine(WorkloadTests):
            workload = staticmethod(lambda: Mine(path="some.file"))

    The tests read the workload some 15 times, and one of them holds all its requests: give
    it a file or options that make a few hundred.
    """

    base = Workload
    workload: ClassVar[Callable[[], Workload]]

    def test_yields_requests(self) -> None:
        """Iteration yields at least one item, and only instances of Request."""
        kinds = {type(request) for request in self.make()}
        assert kinds, "it has no requests"
        assert all(issubclass(kind, Request) for kind in kinds)

    def test_starts_again_from_the_beginning(self) -> None:
        """Iterating a second time yields equal requests."""
        workload = self.make()
        _assert_equal(list(workload), workload)

    def test_iterators_do_not_disturb_each_other(self) -> None:
        """Two iterators that advance in turns yield equal requests."""
        workload = self.make()
        _assert_equal(workload, workload)

    def test_equal_options_give_equal_requests(self) -> None:
        """A workload built from the `options()` of another has its requests and its digest."""
        workload = self.make()
        with unshared(workload):
            requests = list(workload)
        with other_hashes():
            again = type(workload)(**workload.options())
            assert workload.digest == again.digest
            _assert_equal(requests, again)

    def test_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """At no time do more than half of the requests exist, if the reader keeps none."""
        workload = self.make()
        kinds = Counter(map(type, workload))
        total = kinds.total()
        if total < _FEW:
            pytest.skip(f"fewer than {_FEW} requests: streaming cannot be told from a list")
        alive = most = 0

        def gone() -> None:
            nonlocal alive
            alive -= 1

        def built(request: Request, kind: type, init: Any, *args: Any, **fields: Any) -> None:
            nonlocal alive, most
            init(request, *args, **fields)
            if type(request) is kind:
                finalize(request, gone)
                alive += 1
                most = max(most, alive)

        for kind in kinds:
            init: Any = kind.__init__  # type: ignore[misc]
            monkeypatch.setattr(kind, "__init__", partialmethod(built, kind, init))
        for _ in workload:
            pass
        assert most > 0, "no Request was built while iterating: they are kept from before"
        assert most <= total // 2, f"{most} of {total} requests existed at once"

    def test_arrivals_do_not_decrease(self) -> None:
        """Requests are in order of arrival; arrivals are integers (ns), not negative."""
        previous = 0
        for request in self.make():
            where = f"request {request.id!r} arrives at {request.arrival!r}"
            assert type(request.arrival) is int, f"{where}: not an integer (ns)"
            assert request.arrival >= previous, f"{where}, after one at {previous}"
            previous = request.arrival

    def test_ids_are_unique(self) -> None:
        """No two requests share an id; ids are integers or strings."""
        ids = [request.id for request in self.make()]
        assert {type(name) for name in ids} <= {int, str}
        twice = [name for name, times in Counter(ids).items() if times > 1]
        assert not twice, f"ids of more than one request: {twice[:5]}"

    def test_keys_have_one_parent(self) -> None:
        """Every occurrence of a key has the same key before it, or begins a prompt."""
        for _ in checked(self.make()):
            pass

    def test_key_tokens_are_the_same_throughout(self) -> None:
        """`key_tokens` is positive, and equal to that of each request."""
        workload = self.make()
        assert workload.key_tokens > 0
        for request in workload:
            assert request.key_tokens == workload.key_tokens, (
                f"request {request.id!r} has keys of {request.key_tokens} tokens, the workload "
                f"of {workload.key_tokens}"
            )

    def test_prompts_cover_their_keys(self) -> None:
        """A prompt has at least one token, and each of its keys covers one of its tokens."""
        for request in self.make():
            where = f"request {request.id!r} has"
            assert request.prompt_tokens > 0, f"{where} no prompt"
            assert request.output_tokens >= 0, f"{where} {request.output_tokens} output tokens"
            assert (len(request.keys) - 1) * request.key_tokens < request.prompt_tokens, (
                f"{where} {len(request.keys)} keys of {request.key_tokens} tokens for "
                f"{request.prompt_tokens} prompt tokens"
            )

    def test_sessions_are_closed_loops(self) -> None:
        """A request with `after` names an earlier request of its own session."""
        sessions: dict[int | str, str | None] = {}
        for request in self.make():
            if request.after is not None:
                where = f"request {request.id!r} has after={request.after!r}"
                assert request.session is not None, f"{where} and no session"
                assert sessions.get(request.after) == request.session, (
                    f"{where}, which is no earlier request of session {request.session!r}"
                )
            sessions[request.id] = request.session

    def test_digest_is_stable(self) -> None:
        """Two workloads with equal options have the same digest, in hexadecimal."""
        digest = self.make().digest
        assert re.fullmatch("[0-9a-f]{16,}", digest), (
            f"digest is {digest!r}: expected 16 hexadecimal digits or more"
        )
        assert digest == self.make().digest, "made again, it has another digest"

    def test_size_is_right(self) -> None:
        """`size` is the number of requests, if it is not None."""
        workload = self.make()
        if workload.size is None:
            pytest.skip("does not know its size without reading")
        assert workload.size == sum(1 for _ in workload)
