"""What a policy keeps in blocks is what it keeps without them, and attention is the same."""

from contextlib import suppress

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="K/V lies in tensors")

from helpers.forgetting import Forgetful  # noqa: E402 - needs torch
from helpers.paged import Paged, loaded_model  # noqa: E402 - needs torch

from kvcore import OutOfBlocks  # noqa: E402
from kvcore.engine import Reads, ScoreRetention  # noqa: E402

pytestmark = pytest.mark.slow

MODELS = {
    "GQA": "layers=2,hidden=16,heads=4,kv_heads=2,head_dim=4,vocab_size=61",
    "MQA, window": "layers=2,hidden=16,heads=4,kv_heads=1,head_dim=4,vocab_size=61,window=7",
    "MHA": "layers=1,hidden=16,heads=2,kv_heads=2,head_dim=8,vocab_size=61",
}
SIZES = (1, 4, 5)


@attrs.define(slots=False, eq=False, kw_only=True)
class ByKeys(ScoreRetention):
    """Keeps large keys."""

    name = "by-keys"
    reads = Reads(keys=True)

    def score(self, held):
        """Return the norms."""
        return held.keys.norm(dim=-1)


@attrs.define(slots=False, eq=False, kw_only=True)
class ByValues(ScoreRetention):
    """Keeps what has got much attention and has small values."""

    name = "by-values"
    reads = Reads(values=True, attention=True)

    def score(self, held):
        """Return the mass by the norm."""
        return held.attention / (1 + held.values.norm(dim=-1))


@attrs.define(slots=False, eq=False, kw_only=True)
class ByWeights(ScoreRetention):
    """Keeps what the newest tokens attend to, and is asked with their queries."""

    name = "by-weights"
    reads = Reads(queries=3)

    def score(self, held):
        """Return the sum of weights over queries and query heads, and of the queries."""
        layers, heads, _ = held.positions.shape
        late = held.weights * (held.query_positions - held.seq.position + 4)[:, None]
        return late.view(layers, heads, -1, late.shape[-1]).sum(2) + held.queries.sum()


@attrs.define(slots=False, eq=False, kw_only=True)
class ByPosition(ScoreRetention):
    """Keeps another choice of positions in each layer and head, many of them tied."""

    name = "by-position"

    def score(self, held):
        """Return a number of a few."""
        layers, heads, _ = held.positions.shape
        kinds = torch.tensor(held.layers)[:, None] + torch.arange(heads)
        assert kinds.shape == (layers, heads)
        return held.positions * (kinds[..., None] + 3) % 5


POLICIES = [ByKeys, ByValues, ByWeights, ByPosition]

actions = st.lists(
    st.tuples(
        st.sampled_from(["open"] * 2 + ["step"] * 7 + ["fork", "close", "again"]),
        st.integers(0, 5),
        st.integers(1, 13),
    ),
    min_size=24,
    max_size=36,
)


def rounded(policy):
    """Return `policy` with scores that do not tell numbers of different roundings apart."""
    exact = policy.score
    policy.score = lambda held: (exact(held) * 2**24).round()
    return policy


def prompt(path, length):
    """Return a prompt that shares its beginning with others of the same path."""
    return [(7 * i + 31 * (path % 2) * (i >= 8)) % 61 for i in range(2 * length)]


class Pair:
    """Sequences in blocks, and each of them alone without any."""

    def __init__(self, model, blocks, size, policy):
        """Begin without a sequence."""
        self.generator, self.policy = loaded_model(model), policy
        self.paged = Paged(self.generator, blocks, size, policy)
        self.alone = {}

    def play(self, what, which, number):
        """Do what is asked, as far as it is possible, and compare."""
        running = list(self.paged.texts)
        seq = running[which % len(running)] if running else None
        if what == "open":
            with suppress(OutOfBlocks):
                self._admitted(self.paged.open(prompt(which, number), seed=number))
        elif seq is None:
            return
        elif what == "close":
            self._closed(seq)
            self.paged.close(seq)
        elif what == "again":
            self._closed(seq)
            with suppress(OutOfBlocks):
                self._admitted(self.paged.recompute(seq))
        elif what == "fork" and seq.computed == seq.tokens:
            self.alone[self.paged.fork(seq, number)] = self.alone[seq].fork(number)
        elif what == "step":
            batch = [s for s in running if s is not seq or number % 3]
            self._step({s: min(self.paged.texts[s].left, number) for s in batch})

    def _admitted(self, seq):
        self.alone[seq] = Forgetful(self.generator, self.paged.texts[seq], seq.position)

    def _closed(self, seq):
        del self.alone[seq]

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
            self._compare(seq, alone)

    def _compare(self, seq, alone):
        """Check that every head holds the same tokens, with the same K and V."""
        positions, table = (
            self.paged.compactor.positions(seq),
            self.paged.cache.block_table(seq),
        )
        for layer, heads in enumerate(alone.heads):
            keys, values = (
                self.paged.backend.read_heads(layer, part, table, seq.held)
                for part in ("keys", "values")
            )
            for number, head in enumerate(heads):
                order = positions[layer, number].argsort()
                assert positions[layer, number][order].tolist() == head.at.tolist()
                close = {"rtol": 1e-10, "atol": 1e-10}
                expected = alone.turned(layer, head)
                torch.testing.assert_close(keys[number][order], expected, **close)
                torch.testing.assert_close(values[number][order], head.values, **close)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", POLICIES)
@given(
    actions=actions,
    model=st.sampled_from(sorted(MODELS)),
    budget=st.sampled_from((3, 6, 0.5)),
    recent=st.integers(1, 3),
    sinks=st.sampled_from((0, 0, 2)),
)
def test_paged_is_dense(policy, size, actions, model, budget, recent, sinks):
    """Shared, forked, returning, in chunks of all sizes: the same tokens, outputs to 1e-10."""
    if budget == 3 and recent + sinks > 3:
        budget = 5
    made = rounded(policy(budget=budget, recent=recent, sinks=sinks))
    pair = Pair(MODELS[model], 60 // size, size, made)
    for action in actions:
        pair.play(*action)
