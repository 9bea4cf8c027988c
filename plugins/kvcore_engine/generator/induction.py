"""A model that copies from its context: an induction circuit with constructed weights."""

from __future__ import annotations

from math import ceil, log, tau
from typing import TYPE_CHECKING, ClassVar

import attrs

from kvcore import Backend, InputError
from kvcore.engine import Attend, RaggedBatch, Tensor
from kvcore.engine.rotary import Rotary
from kvcore.lazy import LazyModule
from kvcore.models.spec import ModelSpec
from kvcore_engine.generator.sampling import SamplingGenerator

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

MATCH, REST = 120.0, 102.0
"""Attention scores of a token that matches, and of the first token, where heads rest."""

BEFORE = 16.0
"""Score of the token before per agreeing frequency; any other token has 3.4 x that less."""

SURE = 100.0
"""The logit of a token that is copied."""

SILENT = 1.0
"""The logits below it are 0: what all tokens that are looked up in vain add up to."""

WIDTH_PER_NAT = 8.2
"""Numbers of a code per ln(vocabulary), mostly enough to tell any two codes apart."""

ALIKE = 0.7
"""The largest cosine of two codes: `MATCH` times as much is well below `REST`."""

_CHUNK = 1 << 10
"""The codes that are compared with all others at a time."""


@attrs.define(slots=False, eq=False)
class Induction(SamplingGenerator):
    """Answers a token with the token that followed it before, by construction, untrained.

    Two layers of attention and nothing else. A token has a code: `head_dim - 1` random
    numbers of norm 1.

        text          ...  key   value  ...   key
                            |      |           |
        layer 0             +----> |           |      each position attends to the one before,
        (positions)       code of key          |      and reads the code of its token
                                   |           |
        layer 1                    | <---------+      the query is a token's own code, the key
        (tokens)                   |                  the code of the token before
                                   +---------->       value: the code of the token, the answer

    A key of layer 0 is the cosine and the sine of its position times 2 pi / 2^i, i = 1, 2,
    ...: the query, as those of the position before, agrees with that one alone in all of
    them. A query of layer 1 that matches no key rests on the first token of the text, whose
    value there is zero. So an answer comes from one place in the cache, and without the K/V
    of that place there is no answer. In layer 1 query head h looks up the tokens t with
    t % heads = h, and rests for all others: one K/V head has the answer.

    Token 0 is a blank with a code of zero, which matches nothing. It means "no answer": where
    there is none all logits are 0, so that a greedy text has token 0. Codes are drawn at
    random; `load` refuses those of which two have a cosine above 0.7.

    Options:
        heads, kv_heads, head_dim: sizes; query heads that share a K/V head are neighbours.
        vocab_size: number of token ids.
        seed: seed of the codes.
        temperature: divides the logits before sampling; 0: greedy.

    Raises:
        InputError: sizes that do not fit, or codes too narrow for the vocabulary; from `load`:
            two codes could be mistaken for one another.

    Source: Olsson et al., "In-context learning and induction heads", 2022, find this circuit
    in trained models.
    """

    name: ClassVar[str] = "induction"

    heads: int = attrs.field(default=4)
    kv_heads: int = attrs.field(default=2)
    head_dim: int = attrs.field(default=64)
    vocab_size: int = attrs.field(default=1024)
    seed: int = attrs.field(default=0)
    temperature: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))

    _spec: ModelSpec = attrs.field(init=False, repr=False)
    _codes: Tensor = attrs.field(init=False, default=None, repr=False)
    _speeds: Tensor = attrs.field(init=False, default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check the sizes."""
        for name in ("heads", "kv_heads", "head_dim", "vocab_size", "seed"):
            if type(getattr(self, name)) is not int:
                msg = f"induction: {name}={getattr(self, name)!r}: give a whole number"
                raise InputError(msg)
        least = 2 * ceil((WIDTH_PER_NAT * log(max(self.vocab_size, 2)) + 1) / 2)
        if self.vocab_size <= 1 or not 0 <= self.seed < 2**63:
            msg = "induction: vocab_size must be 2 or more, seed 0 to 2^63 - 1"
            raise InputError(msg)
        if self.head_dim < least or self.head_dim % 2:
            msg = (
                f"induction: head_dim={self.head_dim} must be even, and {least} or more for "
                f"the codes of {self.vocab_size} tokens not to be mistaken for one another"
            )
            raise InputError(msg)
        self._spec = ModelSpec(
            name="induction",
            layers=2,
            query_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_size=2 * self.head_dim,
            parameters=self.vocab_size * self.head_dim,
            dtype="fp32",
        )

    @property
    def spec(self) -> ModelSpec:
        """The shape of the model. Its parameters are the codes."""
        return self._spec

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.vocab_size

    @property
    def rotary(self) -> tuple[Rotary | None, ...]:
        """The frequencies of the positions in layer 0; layer 1 has no positions."""
        return Rotary(tuple(_speeds(self.head_dim))), Rotary(())

    def load(self, backend: Backend, dtype: str) -> None:
        """Draw the codes, `[vocabulary, head_dim]`, the last number of each 0."""
        super().load(backend, dtype)
        source = torch.Generator().manual_seed(self.seed)
        codes = torch.randn(self.vocab_size, self.head_dim, generator=source)
        codes[0], codes[:, -1] = 0, 0
        codes[1:] /= codes[1:].norm(dim=1, keepdim=True)
        self._check_apart(codes)
        self._codes = backend.tensor(codes, dtype)
        self._speeds = backend.tensor(_speeds(self.head_dim), "fp64")

    def logits(self, batch: RaggedBatch, attend: Attend) -> Tensor:
        """Run a step; return the logits of the sequences that sample, before temperature.

        `[sequences with an output index, vocabulary]`.
        """
        spec, codes = self._spec, self._codes
        tokens = self.backend.tensor(batch.token_ids)
        positions = self.backend.tensor(batch.positions)
        code, is_first = codes[tokens], (positions == 0)[:, None]
        # Layer 0: from every position to the one before. The first has none.
        here, before = self._places(positions), self._places(positions - 1)
        attended = attend(
            0,
            _each(before * BEFORE * self.head_dim**0.5, spec.query_heads),
            _each(here, spec.kv_heads),
            _each(code, spec.kv_heads),
            window=None,
        )
        previous = attended.mean(1).masked_fill(is_first, 0)
        # Layer 1: from every token to the one that followed it before, else to the first
        # position, by the last number of queries and keys.
        key, value = previous.clone(), code.masked_fill(is_first, 0)
        key[:, -1:] = is_first
        head = self.backend.tensor([*range(spec.query_heads)])
        looks = (tokens[:, None] % spec.query_heads == head)[:, :, None]
        queries = _each(code * MATCH, spec.query_heads) * looks
        queries[:, :, -1] = REST
        answer = attend(
            1,
            queries * self.head_dim**0.5,
            _each(key, spec.kv_heads),
            _each(value, spec.kv_heads),
            window=None,
        )
        logits = answer[batch.sampled_rows].sum(1) @ (codes.T * SURE)
        return logits.masked_fill(logits.abs() < SILENT, 0)

    def _check_apart(self, codes: Tensor) -> None:
        """Raise InputError if a token could be mistaken for another one."""
        for begin in range(0, len(codes), _CHUNK):
            likeness = codes[begin : begin + _CHUNK] @ codes.T
            likeness.diagonal(begin).fill_(0)
            most = float(likeness.max())
            if most > ALIKE:
                msg = (
                    f"induction: with seed={self.seed} the codes of two tokens have a cosine "
                    f"of {most:.2f}, above {ALIKE}, and would be mistaken for one another: "
                    "give another seed, or a larger head_dim"
                )
                raise InputError(msg)

    def _places(self, positions: Tensor) -> Tensor:
        """Return the codes of positions: cosines, then sines, `[rows, head_dim]`."""
        angles = positions[:, None] * self._speeds
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(self._codes.dtype)


def _speeds(width: int) -> list[float]:
    """Return half as many frequencies as `width`, each half the one before."""
    return [tau / 2**i for i in range(1, width // 2 + 1)]


def _each(rows: Tensor, heads: int) -> Tensor:
    """Return `[rows, width]` repeated for each of `heads` heads, `[rows, heads, width]`."""
    return rows[:, None].repeat(1, heads, 1)
