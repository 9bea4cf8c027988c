"""The conformance tests of drafters."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from typing import Any, ClassVar

import pytest

from kvcore.cache import KVCache
from kvcore.models.catalogue import find_model
from kvcore.models.memory import KVLayout
from kvcore.plugins.manager import resolve
from kvcore.request import Request, text_request
from kvcore.serving import Batching, LatencyModel, StepWork, simulate
from kvcore.serving.drafter import Drafter
from kvcore.trace import Trace
from kvcore_engine.drafter.token_drafter import TokenDrafter
from kvcore_testing.plugin import PluginTests, other_hashes, unshared

_MANY = 40


class DrafterTests(PluginTests[Drafter]):
    """Conformance tests of a drafter; a derived `Test...` class makes the drafter.

    The attribute `drafter` is what `make` calls:

        class TestMine(DrafterTests):
            drafter = Mine

    A drafter for simulations (`accepted`) serves requests in simulated time. A drafter of
    tokens (`kvcore_engine.drafter.TokenDrafter`) drafts continuations of texts of some 30
    tokens for a tiny model, in blocks of 4, which needs torch.

    Attributes:
        generator: the model that verifies the drafts, as text.
    """

    base = Drafter
    drafter: ClassVar[Callable[[], Drafter]]
    generator: ClassVar[str] = (
        "transformer:layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8,vocab_size=31"
    )

    def test_drafts_a_token_or_more(self) -> None:
        """`tokens`, the most tokens of a draft, is an integer of at least 1."""
        assert type(self.make().tokens) is int
        assert self.make().tokens >= 1

    def test_accepts_no_more_than_is_drafted(self) -> None:
        """In a simulation, 0 <= accepted <= drafted <= the limit, in any order of calls."""
        first, other = (self._attached() for _ in range(2))
        questions = [(name, index) for name in (7, "x") for index in range(1, _MANY)]
        limits = range(1, first.tokens + 1)
        answers = {}
        for name, index in questions:
            for limit in limits:
                drafted, accepted = first.accepted(_request(name), index, limit)
                assert 0 <= accepted <= drafted <= limit
                answers[name, index, limit] = drafted, accepted
        for (name, index, limit), answer in reversed(answers.items()):
            assert other.accepted(_request(name), index, limit) == answer

    def test_costs_whole_picoseconds(self) -> None:
        """The duration of a step with drafts is an integer of picoseconds, and not negative."""
        drafter = self._attached()
        works = StepWork(0, (0,), 3, (60,)), StepWork(9, (45,), 0, (0,))
        for work, drafts in zip(works, ([1, 0, drafter.tokens], []), strict=True):
            took = drafter.duration(work, drafts)
            assert type(took) is int
            assert took >= 0

    @pytest.mark.parametrize("devices", [1, 4])
    def test_tells_the_memory_that_it_takes(self, devices: int) -> None:
        """`memory` answers 0 bytes or more before `attach`, and the same if asked again."""
        layout = KVLayout(find_model("llama-3-70b"))
        answers = [self.make().memory(layout, devices) for _ in range(2)]
        assert answers[0] == answers[1], "asked again, it takes other memory"
        weights, token_bytes = answers[0]
        assert type(weights) is int
        assert isinstance(token_bytes, int | Fraction)
        assert weights >= 0
        assert token_bytes >= 0

    @pytest.mark.parametrize("blocks", [200, 26])
    def test_output_is_that_without_drafts(self, blocks: int) -> None:
        """On tensors, outputs are those without drafts, also where blocks run out."""
        if not isinstance(self.make(), TokenDrafter):
            pytest.skip("drafts no tokens")
        drafted, plain = self._run(self.make(), blocks)[0], self._run(None, 200)[0]
        assert drafted == plain, "with drafts, the output is another"

    def test_runs_are_repeated(self) -> None:
        """Two equal runs have the same outputs, and the same trace to the byte."""
        drafter = self.make()
        with unshared(drafter):
            once = self._run(drafter, 30)
        with other_hashes():
            again = self._run(self.make(), 30)
        assert once == again, "run again, its output or its trace is another"

    def _attached(self) -> Drafter:
        drafter = self.make()
        drafter.attach(_latency())
        if isinstance(drafter, TokenDrafter):
            pytest.skip("needs the tokens of a run")
        return drafter

    def _run(self, drafter: Drafter | None, blocks: int) -> tuple[Any, bytes]:
        """Serve texts with shared prefixes; return the generated tokens, and the trace."""
        prompts = ([1 + token % (3 + n) for token in range(9 + n)] for n in range(5))
        texts = [
            text_request(n, prompt, output=12 + n, block_size=4, arrival=n * 10**6)
            for n, prompt in enumerate(prompts)
        ]
        out = BytesIO()
        trace = Trace(out)
        cache = KVCache(blocks, 4, accounting="tokens", key_tokens=4, trace=trace)
        served: dict[str, Any] = {"latency": _latency(), "batching": Batching(watermark=0)}
        generated: Any = None
        if drafter is None or isinstance(drafter, TokenDrafter):
            pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
            from kvcore_engine.engine import run  # noqa: PLC0415 - torch

            generated = run(
                texts,
                cache=cache,
                generator=self.generator,
                backend="torch-cpu",
                dtype="fp64",
                drafter=drafter,
                threads=1,
                **served,
            ).outputs
        else:
            simulate(texts, cache=cache, drafter=drafter, **served)
        trace.close()
        cache.check_integrity()
        assert not cache.sequences
        return generated, out.getvalue()


def _request(name: int | str) -> Request:
    return Request(id=name, prompt_tokens=9, output_tokens=_MANY, key_tokens=4)


def _latency() -> LatencyModel:
    latency: LatencyModel = resolve("latency", "roofline")
    return latency
