"""Compaction in paged blocks against compaction of contiguous K/V, and their attention."""

from contextlib import suppress
from typing import ClassVar

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="K/V lies in tensors")

from helpers.forgetting import Forgetful  # noqa: E402 - needs torch
from helpers.paged import Paged, loaded_model  # noqa: E402 - needs torch

from kvcore import OutOfBlocks  # noqa: E402
from kvcore.plugins import resolve  # noqa: E402
from kvcore_engine.retention.token_retention import ScoreRetention, TokenRetention  # noqa: E402

pytestmark = pytest.mark.slow

MODELS = {
    "GQA": "layers=2,hidden=16,heads=4,kv_heads=2,head_dim=4,vocab_size=61",
    "MQA, window": "layers=2,hidden=16,heads=4,kv_heads=1,head_dim=4,vocab_size=61,window=7",
    "MHA": "layers=1,hidden=16,heads=2,kv_heads=2,head_dim=8,vocab_size=61",
}
POLICIES = (
    "full",
    "window:tokens=5,sinks=1",
    "window:tokens=5,sinks=2,positions=cache",
    "window:tokens=8,positions=cache",
    "h2o:budget=6",
    "h2o:budget=0.5,recent=1,sinks=2",
    "snapkv:budget=6,window=3,pool=3",
    "snapkv:budget=0.5,window=2,pool=1,when=always",
    "tova:budget=5,sinks=2",
    "knorm:budget=4,recent=2",
    "expected:budget=7,sinks=1,queries=4,ahead=8",
    "kvmerger:budget=6,threshold=0.2",
    "kvmerger:budget=0.5,threshold=-1,recent=2,sinks=1",
    "random:budget=0.25",
    "tied:budget=5,sinks=1",
)


@attrs.define(slots=False, eq=False, kw_only=True)
class Tied(ScoreRetention):
    """A policy whose scores are a few whole numbers, different in each layer and head."""

    name: ClassVar[str] = "tied"

    def score(self, held):
        """Return whole numbers with many ties."""
        layers, heads, _ = held.positions.shape
        kinds = torch.tensor(held.layers)[:, None] + torch.arange(heads)
        assert kinds.shape == (layers, heads)
        return held.positions * (kinds[..., None] + 3) % 5


actions = st.lists(
    st.tuples(
        st.sampled_from(["open"] * 2 + ["step"] * 7 + ["fork", "close", "again"]),
        st.integers(0, 5),
        st.integers(1, 13),
    ),
    min_size=24,
    max_size=36,
)


def built(text):
    """Return a policy whose scores are rounded, so that rounding errors decide nothing."""
    policy = Tied(budget=5, sinks=1) if text.startswith("tied") else resolve("retention", text)
    if isinstance(policy, TokenRetention):
        exact = policy.score
        policy.score = lambda held: (exact(held) * 2**24).round()
    return policy


def prompt(path, length):
    """Return a prompt that shares its beginning with others of the same path."""
    return [(7 * i + 31 * (path % 2) * (i >= 8)) % 61 for i in range(2 * length)]


class Pair:
    """Sequences in blocks, and a copy of each without blocks."""

    def __init__(self, model, blocks, size, policy):
        """Start without a sequence."""
        self.generator, self.policy = loaded_model(model), policy
        self.paged = Paged(self.generator, blocks, size, policy)
        self.alone = {}

    def play(self, what, which, number):
        """Perform an action if it is possible, and compare."""
        running = list(self.paged.texts)
        seq = running[which % len(running)] if running else None
        if what == "open":
            with suppress(OutOfBlocks):
                self._admitted(self.paged.open(prompt(which, number), seed=number))
        elif seq is None:
            return
        elif what == "close":
            del self.alone[seq]
            self.paged.close(seq)
        elif what == "again":
            del self.alone[seq]
            with suppress(OutOfBlocks):
                self._admitted(self.paged.recompute(seq))
        elif what == "fork" and seq.computed == seq.tokens:
            self.alone[self.paged.fork(seq, number)] = self.alone[seq].fork(number)
        elif what == "step":
            batch = [s for s in running if s is not seq or number % 3]
            self._step({s: min(self.paged.texts[s].left, number) for s in batch})

    def _admitted(self, seq):
        self.alone[seq] = Forgetful(self.generator, self.paged.texts[seq], seq.position)

    def _step(self, counts):
        before = {seq: seq.compacted for seq in counts}
        drawn = self.paged.step(counts)
        rows = iter(self.generator.seen if drawn else ())
        for seq, token in drawn.items():
            logits, alone = None if token is None else next(rows), self.alone[seq]
            expected = alone.step(counts[seq])
            if token is not None:
                torch.testing.assert_close(logits, expected[0], rtol=1e-10, atol=1e-10)
                alone.text.tokens.append(token)
            if seq.compacted != before[seq]:
                alone.compact(self.policy, seq, seq.held)
            size = self.paged.cache.geometry.block_size
            alone.forget({index for a, b in seq.holes for index in range(a * size, b * size)})
            self._compare(seq, alone)

    def _compare(self, seq, alone):
        """Check that every head holds the same tokens, with the same K and V."""
        positions = self.paged.compactor.positions(seq)
        for layer, heads in enumerate(alone.heads):
            kept = self.paged.kept(seq)[layer]
            for index, head in enumerate(heads):
                order = positions[layer, index].argsort()
                assert positions[layer, index][order].tolist() == head.at.tolist()
                for found, expected in zip(
                    kept, (alone.turned(layer, head), head.values), strict=True
                ):
                    got = found[order, index]
                    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=max(settings.default.max_examples // 3, 1))
@given(
    actions=actions,
    size=st.sampled_from((1, 4, 5)),
    model=st.sampled_from(sorted(MODELS)),
)
def test_paged_sequences_equal_contiguous_ones(policy, actions, size, model):
    """Paged sequences keep the same tokens as contiguous ones, with outputs within 1e-10.

    Sequences share prefixes, fork, are recomputed, and run in chunks of all sizes.
    """
    pair = Pair(MODELS[model], 60 // size, size, built(policy))
    for action in actions:
        pair.play(*action)
