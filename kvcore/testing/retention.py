"""The conformance tests of retention policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from kvcore.cache import KVCache, RetentionPolicy, Sequence
from kvcore.request import Request
from kvcore.serving import simulate
from kvcore.testing.plugin import check_is_named

BLOCK = 4
_lengths = pytest.mark.parametrize("prompt", [1, 7, 64, 400])
_chunks = pytest.mark.parametrize("chunk", [1, 5, 64])


class RetentionPolicyTests:
    """What holds of every retention policy. Derive a `Test...` class and say how to make yours.

    `retention` (or `make`, if that needs fixtures of the instance) returns a new policy, made
    with the same options each time:

        class TestMine(RetentionPolicyTests):
            retention = Mine

    The tests let sequences of up to some hundred tokens forget, in blocks of 4.

    Attributes:
        forgets: whether a sequence of 400 tokens forgets some of them.
    """

    retention: ClassVar[Callable[[], RetentionPolicy]]
    forgets: ClassVar[bool] = True

    def make(self) -> RetentionPolicy:
        """Return a new retention policy."""
        return type(self).retention()

    def test_is_a_named_policy(self) -> None:
        """Its class derives from RetentionPolicy and has a name and a docstring of its own."""
        check_is_named(self.make(), RetentionPolicy)

    @_lengths
    @_chunks
    def test_names_computed_tokens(self, prompt: int, chunk: int) -> None:
        """Each range begins before it ends, and lies within what is computed."""
        policy = self.make()
        for seq in _grow(policy, prompt, chunk):
            for start, end in policy.droppable(seq):
                assert 0 <= start <= end <= seq.computed, f"{start} to {end} of {seq.computed}"

    @_lengths
    def test_answers_alike_when_asked_again(self, prompt: int) -> None:
        """Asking changes nothing: neither the answer, nor the sequence."""
        policy, other = self.make(), self.make()
        for seq in _grow(policy, prompt, 5):
            before = repr(seq), seq.computed, seq.holes
            answers = [list(policy.droppable(seq)) for _ in range(2)]
            answers.append(list(other.droppable(seq)))
            assert answers[0] == answers[1] == answers[2]
            assert (repr(seq), seq.computed, seq.holes) == before

    @_lengths
    @_chunks
    def test_keeps_the_newest_token(self, prompt: int, chunk: int) -> None:
        """The block of the newest token stays: the next one attends to it at least."""
        for seq in _grow(self.make(), prompt, chunk):
            assert seq.private_blocks + seq.span.end > seq.dropped - seq.freed
            assert seq.dropped * BLOCK < seq.computed

    def test_forgets(self) -> None:
        """A long sequence forgets some of its tokens, unless the class says otherwise."""
        if not self.forgets:
            pytest.skip("the policy declares that it forgets nothing of 400 tokens")
        *_, seq = _grow(self.make(), 400, 5)
        assert seq.dropped, "of 400 tokens nothing was forgotten"

    def test_serves_many_at_once(self) -> None:
        """Requests that share prompts, crowd and preempt one another are all served."""
        keys = range(40)
        requests = [
            Request(
                id=i,
                arrival=i,
                prompt_tokens=90 + i,
                output_tokens=60,
                keys=keys[: 22 + i % 5],
                key_tokens=4,
            )
            for i in range(8)
        ]
        cache = KVCache(80, BLOCK, retention=self.make())
        result = simulate(requests, cache=cache)
        cache.check_integrity()
        assert result.summary()["completed"] == len(requests)
        assert cache.pool.free_blocks + cache.tree.cached_blocks == cache.pool.blocks


def _grow(policy: RetentionPolicy, prompt: int, chunk: int) -> Iterator[Sequence]:
    """Compute a prompt in chunks, then generate 100 tokens; yield the sequence after each."""
    cache = KVCache(1000, BLOCK, retention=policy, ids=True)
    keys = range(prompt // (2 * BLOCK))
    request = Request(id=0, prompt_tokens=prompt, keys=keys, key_tokens=BLOCK)
    seq = cache.open(request)
    while seq.computed < prompt:
        cache.commit(seq, min(chunk, prompt - seq.computed))
        cache.check_integrity()
        yield seq
    for _ in range(100):
        cache.extend(seq, 1)
        cache.commit(seq, 1)
        cache.check_integrity()
        yield seq
