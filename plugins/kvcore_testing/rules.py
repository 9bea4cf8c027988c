"""The conformance tests of rules of engines."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvcore.cache import KVCache
from kvcore.config import RunConfig
from kvcore.plugins import find_override
from kvcore.request import Request
from kvcore.serving import Batching, Result, Rules, simulate
from kvcore.serving.rules import DECISIONS
from kvcore.trace import Trace
from kvcore_replay.check.trace import check_trace
from kvcore_testing.plugin import PluginTests, other_hashes, seeds, unshared
from kvcore_testing.scheduler import Steady, pressing

_KEY = 4

_SERVERS: dict[str, dict[str, Any]] = {
    "ample": {"blocks": 1000},
    "tight": {"blocks": 14},
    "chunks": {"blocks": 20, "max_tokens": 12, "max_seqs": 6},
    "prefill-first": {"blocks": 14, "steps": "prefill-first", "max_tokens": 32},
    "whole": {"blocks": 16, "chunked": False, "max_tokens": 64},
}
"""Limits of a step, and blocks of the pool, of the servers under test."""

_servers = pytest.mark.parametrize("server", _SERVERS)


class RulesTests(PluginTests[Rules]):
    """Conformance tests of the rules of an engine; a derived `Test...` class makes the rules.

    `rules` (or `make`) returns new rules, made with the same options each time:

        class TestMine(RulesTests):
            rules = Mine

    They serve random requests in the serving loop, with much memory and with little.
    """

    base = Rules
    rules: ClassVar[Callable[[], Rules]]

    seed = seeds(4)

    def test_have_a_name_of_their_own(self) -> None:
        """Rules of a derived class do not have the name of those that they derive from."""
        rules = type(self.make())
        others = {vars(base).get("name") for base in rules.__mro__[1:]}
        assert rules.name not in others, "it needs its own name"

    def test_defaults_are_options_of_a_run(self) -> None:
        """`defaults` has options of a run, with values that these may have."""
        rules = self.make()
        config = RunConfig(like=rules)
        assert config.build().batching.rules is rules
        assert rules.defaults.keys() <= config.options.keys()

    @_servers
    def test_every_request_ends_once(self, seed: int, server: str, tmp_path: Path) -> None:
        """Each request finishes or is rejected, once, and the trace replays without error."""
        requests = pressing(seed, 40)
        result, trace = self.serve(server, requests)
        assert sorted(result.log.ids) == [request.id for request in requests]
        path = tmp_path / "trace.jsonl"
        path.write_bytes(trace)
        report = check_trace(path)
        assert report.finished + report.rejected == len(requests)

    @_servers
    def test_jumps_change_nothing(self, seed: int, server: str) -> None:
        """With and without event jumps, the same decisions are made at the same times."""
        requests = pressing(seed, 40)
        at_once = self.serve(server, requests)[1]
        assert at_once == self.serve(server, requests, jumps=False)[1]

    @_servers
    def test_decisions_are_pure(self, seed: int, server: str) -> None:
        """Asked twice, or for a second server, the rules decide as before."""
        requests, rules = pressing(seed, 40), self.make()
        with unshared(rules):
            once = self.serve(server, requests, rules=rules)[1]
        rules = _asked_twice(rules)
        more = [self.serve(server, requests, rules=rules)[1] for _ in range(2)]
        with other_hashes():
            more.append(self.serve(server, requests)[1])
        assert more == [once] * 3, "asked again, it decided otherwise"

    def serve(
        self,
        server: str,
        requests: list[Request],
        *,
        rules: Rules | None = None,
        jumps: bool = True,
    ) -> tuple[Result, bytes]:
        """Serve requests under `rules` (None: new ones); return the result and the trace."""
        rules = self.make() if rules is None else rules
        limits: dict[str, Any] = {"max_tokens": 40, "max_seqs": 4, **_SERVERS[server]}
        blocks = limits.pop("blocks")
        if rules.max_chunk is not None and not limits.get("chunked", True):
            pytest.skip("max_chunk of prompts that are not chunked")
        batching = Batching(**limits, rules=rules)
        out = BytesIO()
        trace = Trace(out)
        cache = KVCache(blocks, _KEY, accounting="tokens", key_tokens=_KEY, trace=trace)
        result = simulate(
            requests, cache=cache, latency=Steady(), batching=batching, jumps=jumps
        )
        trace.close()
        cache.check_integrity()
        assert not cache.sequences, f"{cache.sequences} were never closed"
        return result, out.getvalue()


def _asked_twice(rules: Rules) -> Rules:
    """Return the rules with methods that ask each decision twice, and compare the answers."""

    def twice(name: str) -> Callable[..., Any]:
        method = getattr(rules, name)

        def asked(*arguments: Any, **options: Any) -> Any:
            first, second = (method(*arguments, **options) for _ in range(2))
            assert first == second, f"{name}() answered {first!r}, then {second!r}"
            return first

        return asked

    for name in DECISIONS:
        if find_override(rules, name) is not None:
            vars(rules)[name] = twice(name)
    return rules
