"""A reference of attention over a text that drops tokens, with a list of tokens per head.

It has plain tensors and no blocks. Attention masses and weights are computed from whole
matrices, and the tokens to keep are found by sorting.
"""

import attrs
import torch

from kvcore.testing.dense import Text, next_batch
from kvcore_engine.retention.token_retention import HeldTokens


@attrs.define(eq=False)
class Head:
    """The tokens of a K/V head, oldest first; rows of K are `[positions, head_dim]`.

    Attributes:
        at: positions in the text.
        keys, values: K and V as computed.
        mass: sum of the attention weights of each token.
        seen_at: positions where attention sees the tokens; `at` unless they are rebased.
    """

    at: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mass: torch.Tensor
    seen_at: torch.Tensor

    def append(self, at, keys, values):
        """Add tokens."""
        self.at = torch.cat((self.at, at))
        self.seen_at = torch.cat((self.seen_at, at))
        self.keys = torch.cat((self.keys, keys))
        self.values = torch.cat((self.values, values))
        self.mass = torch.cat((self.mass, torch.zeros(len(at), dtype=torch.float64)))

    def only(self, keep):
        """Keep only the tokens in the rows `keep`."""
        for name in ("at", "keys", "values", "mass", "seen_at"):
            setattr(self, name, getattr(self, name)[keep])


class Forgetful:
    """A text that is computed alone, with nothing shared, and can drop tokens."""

    def __init__(self, generator, text, hit=0):
        """Begin with `hit` computed tokens; what they attend to is not counted as mass."""
        spec = generator.spec
        self.generator, self.windows = generator, spec.windows
        self.text = Text(list(text.tokens), text.prompt, text.seed)
        self.heads = [
            [_empty(spec.head_dim, spec.value_dim) for _ in range(spec.kv_heads)]
            for _ in range(spec.layers)
        ]
        self.queries = [torch.empty(0, spec.query_heads, spec.head_dim).double()] * spec.layers
        self.query_positions = []
        if hit:
            self.step(hit)
            self.query_positions = []
            self.queries = [rows[:0] for rows in self.queries]
            for head in self.all_heads:
                head.mass.zero_()

    @property
    def all_heads(self):
        """The heads of all layers."""
        return [head for layer in self.heads for head in layer]

    def fork(self, seed):
        """Return a copy that continues by itself."""
        child = Forgetful(self.generator, self.text)
        child.text.seed, child.text.computed = seed, self.text.computed
        child.heads = [[attrs.evolve(head) for head in layer] for layer in self.heads]
        child.queries, child.query_positions = [*self.queries], [*self.query_positions]
        return child

    def step(self, count):
        """Compute `count` more tokens, and return the generator's logits."""
        at = torch.arange(self.text.computed, self.text.computed + count)

        def attend(layer, queries, keys, values, **_how):
            self.queries[layer] = torch.cat((self.queries[layer], queries))
            group = queries.shape[1] // keys.shape[1]
            out = []
            for index, head in enumerate(self.heads[layer]):
                head.append(at, keys[:, index], values[:, index])
                some = queries[:, index * group : (index + 1) * group]
                weights = self.weights(layer, head, some, at)
                head.mass = head.mass + weights.sum((0, 1))
                out.append(weights @ head.values)
            return torch.cat(out).transpose(0, 1)

        self.query_positions += at.tolist()
        self.generator.forward(next_batch([self.text], [count]), attend)
        self.text.computed += count
        return self.generator.seen

    def weights(self, layer, head, queries, at):
        """Return the weights, `[heads, n, tokens]`, of queries, `[n, heads, width]`."""
        keys = self.turned(layer, head)
        scores = torch.einsum("nhd,td->hnt", queries, keys) / queries.shape[2] ** 0.5
        hidden = head.seen_at > at[:, None]
        if self.windows[layer] is not None:
            hidden |= head.seen_at <= at[:, None] - self.windows[layer]
        return scores.masked_fill(hidden, -torch.inf).softmax(2).nan_to_num(0)

    def turned(self, layer, head):
        """Return the keys of a head, rotated to the positions where attention sees them."""
        shift = head.seen_at - head.at
        if not shift.any():
            return head.keys
        rotary = self.generator.rotary[layer]
        a, b = head.keys.chunk(2, 1)
        angle = shift[:, None] * torch.tensor(rotary.speeds, dtype=torch.float64)
        both = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((both.real, both.imag), 1)

    def forget(self, positions):
        """Drop the tokens at `positions` in all heads."""
        for head in self.all_heads:
            head.only([row for row, at in enumerate(head.at.tolist()) if at not in positions])

    def compact(self, policy, seq, count):
        """Keep the `count` best tokens of each head by the scores of `policy`; merge others."""
        now = self.text.computed
        for layer, heads in enumerate(self.heads):
            held = self.held(layer, policy.reads, seq)
            (scores,) = policy.score(held)
            kept = []
            for head, got in zip(heads, scores.tolist(), strict=True):
                oldest = now - (self.windows[layer] or now + 1)

                def rank(row, head=head, got=got, oldest=oldest):
                    at = int(head.at[row])
                    stays = at >= now - policy.recent_of(seq) or at < policy.sinks
                    if stays:
                        return 2, 0, at
                    if head.seen_at[row] <= oldest:
                        return 0, 0, at
                    return 1, got[row], at

                best = sorted(range(len(got)), key=rank, reverse=True)[:count]
                reached = {row for row in range(len(got)) if rank(row)[0]}
                kept.append((sorted(best), reached.union(best)))
            if policy.merges:
                self._merge(policy, heads, held, kept)
            for head, (best, _) in zip(heads, kept, strict=True):
                head.only(best)
                if policy.rebases:
                    head.seen_at = torch.arange(now - count, now)

    def _merge(self, policy, heads, held, kept):
        """Replace K/V of tokens that stay by the means of reached tokens merged into them."""
        stays = torch.zeros(held.positions.shape, dtype=torch.bool)
        for number, (best, _) in enumerate(kept):
            stays[0, number, best] = True
        targets, weights = (part[0].tolist() for part in policy.merge(held, stays))
        for number, (head, (best, reached)) in enumerate(zip(heads, kept, strict=True)):
            before = head.keys, head.values
            head.keys, head.values = (part.clone() for part in before)
            for row in best:
                run = [at for at in reached if targets[number][at] == row]
                whole = sum(weights[number][at] for at in run)
                for part, old in zip((head.keys, head.values), before, strict=True):
                    part[row] = sum(weights[number][at] / whole * old[at] for at in run)

    def held(self, layer, reads, seq):
        """Return the tokens of a layer as a policy reads them, in the order of the text."""
        heads = self.heads[layer]
        at = torch.tensor(self.query_positions[-reads.queries :])
        queries = self.queries[layer][len(self.queries[layer]) - len(at) :]
        group = queries.shape[1] // len(heads)
        return HeldTokens(
            seq=seq,
            layers=range(layer, layer + 1),
            positions=torch.stack([head.at for head in heads])[None],
            keys=torch.stack([self.turned(layer, head) for head in heads])[None],
            values=torch.stack([head.values for head in heads])[None],
            attention=torch.stack([head.mass for head in heads])[None],
            queries=queries.transpose(0, 1)[None],
            query_positions=at,
            weights=torch.cat(
                [
                    self.weights(layer, head, queries[:, n * group : (n + 1) * group], at)
                    for n, head in enumerate(heads)
                ]
            )[None],
            windows=(self.windows[layer],),
            rotary=(self.generator.rotary[layer],),
        )


def _empty(key_width, value_width):
    keys, values = torch.empty(0, key_width).double(), torch.empty(0, value_width).double()
    at = torch.empty(0, dtype=torch.int64)
    return Head(at, keys, values, torch.empty(0).double(), at)
