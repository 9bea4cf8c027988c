"""The executor that verifies drafts: one pass of the model over several tokens a sequence.

The output of a sequence does not depend on a drafter. A draft that was chosen is accepted if
the model draws the same token, by the same seed and index as without a drafter: the output is
the same, token for token. A draft x that was drawn from probabilities q is accepted with
probability min(1, p(x) / q(x)), else a token is drawn from max(0, p - q), normalized: the
token has the distribution p of the model exactly.

Source: Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
decoding", ICML 2023; Chen et al., "Accelerating large language model decoding with speculative
sampling", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from time import perf_counter_ns
from typing import Any

import attrs

from kvcore.cache import KVCache
from kvcore.engine.backend import Backend
from kvcore.engine.batch import RaggedBatch
from kvcore.engine.generator import Attend, Generator
from kvcore.errors import InputError, shorten
from kvcore.plugins import wrong_answer
from kvcore.request import Key
from kvcore.serving import Job, LatencyModel, StepResult, StepWork
from kvcore.serving.drafter import Drafter
from kvcore_engine.drafter.token_drafter import Draft, DraftSequence, TokenDrafter
from kvcore_engine.executor import ScheduledSequence, TensorExecutor, call
from kvcore_engine.tokens import uniform
from kvcore_plugins.drafter.speculation import step_ps, with_drafts

Weights = Sequence[float]
"""Probabilities of all tokens, by id."""


class SpeculativeTensorExecutor(TensorExecutor):
    """Computes steps in which decoding sequences verify drafts.

    In the batch each draft is a sequence by itself, with the block table of its own and one
    token more of context than the one before: since a layer stores the K/V of all tokens
    before it attends, that is the same computation. Any generator and backend can verify.

    Args:
        drafter: drafts the tokens.
        seed: as for `TensorExecutor`, with all its other arguments.

    Raises:
        InputError: as `TensorExecutor`; the drafter cannot work here.
    """

    def __init__(
        self,
        cache: KVCache,
        generator: Generator,
        backend: Backend,
        latency: LatencyModel,
        *,
        drafter: Drafter,
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not isinstance(drafter, TokenDrafter):
            msg = (
                f"drafter {drafter.name!r} drafts no tokens: it is for simulations; take "
                "prompt-lookup, draft-model or medusa"
            )
            raise InputError(msg)
        drafter.check_unused()
        drafter.attach(latency, seed)
        super().__init__(cache, generator, backend, latency, seed=seed, **options)
        self.drafter: TokenDrafter = drafter
        self.plugins = (*self.plugins, drafter)
        try:
            drafter.bind()
            call(drafter, drafter.load, self._generator, self._backend, seed)
            if self._mover is not None:
                self._mover.on_loaded = partial(call, drafter, drafter.on_loaded)
        except BaseException:
            self.close(whole=False)
            raise

    def speculate(
        self,
        work: StepWork,
        chunks: Sequence[tuple[Job, int]],
        decoding: Sequence[Job],
        limits: Sequence[int],
    ) -> StepResult:
        """Run one step; return its duration, its effects and the accepted tokens."""
        began_ns = perf_counter_ns()
        prefilled = [self._prefilled(job, tokens) for job, tokens in chunks]
        newest = [self._scheduled(job, job.length, 1, job.generated) for job in decoding]
        drafts = self._drafts(newest, limits)
        counts = [len(draft.tokens) for draft in drafts]
        if prefilled:
            ids = [sequence.job.request.id for sequence in prefilled]
            call(self.drafter, self.drafter.on_prefill, ids, self._batch(prefilled))
        behind = [
            self._behind(first, draft) for first, draft in zip(newest, drafts, strict=True)
        ]
        # Drafts go before the newest tokens: the last sequences are measured as decoding.
        sequences = [*prefilled, *chain.from_iterable(behind), *newest]
        sampled = any(draft.probabilities is not None for draft in drafts)
        outcomes = iter(self._forward(sequences, self._weigh if sampled else None))
        tokens = [
            drawn(outcome, row.stream.seed, row.output_index or 0)
            if isinstance(outcome, list)
            else outcome
            for row, outcome in zip(prefilled, outcomes, strict=False)
        ]
        ended, named = self._append(prefilled, tokens)
        of_drafts = [[next(outcomes) for _ in sequences_behind] for sequences_behind in behind]
        verified = [
            (len(later), self._verify(job, draft, [outcome, *later], ended, named))
            for job, draft, outcome, later in zip(
                decoding, drafts, outcomes, of_drafts, strict=True
            )
        ]
        self.drafted += [
            (job.request.id, job.generated, *outcome)
            for job, outcome, limit in zip(decoding, verified, limits, strict=True)
            if limit
        ]
        lasts = [
            (first, *later)[accepted]
            for first, later, (_, accepted) in zip(newest, behind, verified, strict=True)
        ]
        self._pass_states(sequences, [*prefilled, *lasts])
        early = {job.request.id for job, _ in ended}
        done = [
            sequence.job.request.id
            for sequence in [*prefilled, *newest]
            if len(sequence.stream.output) >= sequence.job.output_tokens
            or sequence.job.request.id in early
        ]
        call(self.drafter, self.drafter.on_end, done)
        if self._wall:
            complete = with_drafts(work, decoding, counts, self.latency.windows)
            took_ps = self._spent_ps(began_ns, sequences, complete)
        else:
            took_ps = step_ps(self.latency, self.drafter, work, decoding, counts)
        return StepResult(took_ps, ended, named, verified)

    def _behind(self, first: ScheduledSequence, draft: Draft) -> list[ScheduledSequence]:
        """Return the drafts for a sequence, each as a sequence behind the token before it."""
        return [
            attrs.evolve(
                first,
                block_table=self._blocks(first.seq, first.context + index + 1),
                context=first.context + index,
                position=first.position + index,
                token_ids=[token],
                output_index=first.job.generated + index,
            )
            for index, token in enumerate(draft.tokens, 1)
        ]

    def _drafts(
        self, newest: Sequence[ScheduledSequence], limits: Sequence[int]
    ) -> list[Draft]:
        """Return drafts for the sequences that may have some, empty ones for the others.

        Raises:
            PolicyError: the drafter failed, drafted too many tokens, or ids that are none, or
                answered something else than a draft for each sequence.
        """
        asking = {
            index: DraftSequence(
                sequence.job.request.id,
                sequence.stream,
                sequence.position,
                sequence.job.generated,
                limit,
                self._blocks(sequence.seq, sequence.context + 1 + limit),
            )
            for index, (sequence, limit) in enumerate(zip(newest, limits, strict=True))
            if limit
        }
        drafts_of = [Draft()] * len(newest)
        if not asking:
            return drafts_of
        drafts = call(self.drafter, self.drafter.drafts, [*asking.values()])
        if not (isinstance(drafts, Sequence) and len(drafts) == len(asking)):
            why = f"{shorten(repr(drafts))}: give a Draft for each of {len(asking)} sequences"
            raise wrong_answer(self.drafter, "drafts()", why)
        known = range(self._generator.vocabulary)
        for (index, sequence), draft in zip(asking.items(), drafts, strict=True):
            if not (isinstance(draft, Draft) and isinstance(draft.tokens, Sequence)):
                why = f"{shorten(repr(draft))}: give a Draft with a sequence of token ids"
                raise wrong_answer(self.drafter, "drafts()", why)
            if len(draft.tokens) > sequence.most or any(t not in known for t in draft.tokens):
                why = (
                    f"tokens {shorten(repr(draft.tokens))}: give at most {sequence.most}, "
                    f"each an id from 0 to {len(known) - 1}"
                )
                raise wrong_answer(self.drafter, "drafts()", why)
            shape = [*getattr(draft.probabilities, "shape", ())]
            wanted = [len(draft.tokens), len(known)]
            if draft.tokens and draft.probabilities is not None and shape != wanted:
                why = f"probabilities of shape {shape}: give {wanted}, a row for each token"
                raise wrong_answer(self.drafter, "drafts()", why)
            drafts_of[index] = draft
        return drafts_of

    def _verify(
        self,
        job: Job,
        draft: Draft,
        outcomes: Sequence[Any],
        ended: list[tuple[Job, int]],
        named: list[tuple[Job, Sequence[Key]]],
    ) -> int:
        """Append accepted drafts and the token after them; return how many came before it.

        An accepted draft that ends the text is that token itself.
        """
        stream, index = self.streams[job.request.id], job.generated
        weights = None if draft.probabilities is None else draft.probabilities.tolist()
        accepted = 0
        for accepted, outcome in enumerate(outcomes):
            drafted = draft.tokens[accepted] if accepted < len(draft.tokens) else None
            token = outcome
            if isinstance(outcome, list):
                marks = stream.seed, index + accepted
                if drafted is None or weights is None:
                    token = drawn(outcome, *marks)
                else:
                    levels = uniform("accept", *marks), uniform("residual", *marks)
                    token = judged(outcome, weights[accepted], drafted, *levels)
            # An output key of the request may stand for another token.
            appended = stream.append(token)
            if appended in self._eos_token_ids and len(stream.output) < job.output_tokens:
                ended.append((job, len(stream.output)))
                break
            if appended != drafted:
                break
        keys = stream.new_keys(
            ended[-1][1] if ended and ended[-1][0] is job else job.output_tokens
        )
        if keys:
            named.append((job, keys))
        return accepted

    def _weigh(self, batch: RaggedBatch, attend: Attend) -> list[list[float] | None]:
        """Run the model; return the probabilities of the sequences that sample."""
        return batch.spread(self._generator.probabilities(batch, attend).tolist())

    def _pass_states(
        self, sequences: Sequence[ScheduledSequence], lasts: Sequence[ScheduledSequence]
    ) -> None:
        """Pass to the drafter the rows of states that the newest tokens were drawn from.

        These are the states of `lasts`, some of the `sequences` of the step.
        """
        sampled = [sequence for sequence in sequences if sequence.output_index is not None]
        row_of = {id(sequence): row for row, sequence in enumerate(sampled)}
        drawn_from = [sequence for sequence in lasts if id(sequence) in row_of]
        ids = [sequence.job.request.id for sequence in drawn_from]
        rows = [row_of[id(sequence)] for sequence in drawn_from]
        call(self.drafter, self.drafter.on_drawn, ids, rows)


def drawn(p: Weights, seed: int, index: int) -> int:
    """Return a token drawn from `p`."""
    return inverted(p, uniform("draw", seed, index))


def judged(p: Weights, q: Weights, drafted: int, level: float, other: float) -> int:
    """Return the token that `drafted`, drawn from `q`, becomes: itself, or another one.

    It has the distribution `p`. O(vocabulary).

    Args:
        p: probabilities of the model.
        q: probabilities that it was drawn from.
        drafted: the token.
        level: a number drawn from [0, 1), by which it is accepted.
        other: a number drawn from [0, 1), by which another token is drawn.
    """
    if level * q[drafted] < p[drafted]:
        return drafted
    rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    # Rounding may leave nothing where the two are equal.
    return inverted(rest if any(rest) else p, other)


def inverted(weights: Weights, level: float) -> int:
    """Return the first token whose cumulative weight exceeds the share `level` of the sum."""
    reached, wanted, last = 0.0, level * sum(weights), 0
    for token, weight in enumerate(weights):
        if weight > 0:
            reached, last = reached + weight, token
            if reached > wanted:
                break
    return last
