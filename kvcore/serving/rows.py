"""The rows of a step on tensors, put together sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.cache import Ids
from kvcore.policy import Job
from kvcore.serving.tokens import TokenStream


class Step:
    """The rows of a step, as they are put together.

    Attributes:
        jobs, streams: of each sequence.
        tables, contexts, lengths: as in `Rows`.
        tokens, positions, draws, seeds: as in `TokenStep`.
    """

    __slots__ = (
        *("contexts", "draws", "jobs", "lengths", "positions", "seeds", "size"),
        *("streams", "tables", "tokens"),
    )

    def __init__(self, block_size: int) -> None:
        """Start empty."""
        self.size = block_size
        self.jobs: list[Job] = []
        self.streams: list[TokenStream] = []
        self.tables: list[Ids] = []
        self.contexts: list[int] = []
        self.lengths: list[int] = []
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.draws: list[int | None] = []
        self.seeds: list[int] = []

    def add(
        self,
        job: Job,
        stream: TokenStream,
        table: Ids,
        tokens: Sequence[int],
        context: int,
        draw: int | None,
    ) -> None:
        """Add a sequence that computes `tokens` after the `context` tokens it has.

        `table` is without the blocks it has forgotten: K/V carries its position, so that it
        is attended to alike wherever it lies.
        """
        assert job.seq is not None
        kept = context - job.seq.forgotten_tokens
        end = context + len(tokens)
        self.jobs.append(job)
        self.streams.append(stream)
        self.tables.append(table[: -(-(kept + len(tokens)) // self.size)])
        self.contexts.append(kept)
        self.lengths.append(len(tokens))
        self.tokens.extend(tokens)
        self.positions.extend(range(context, end))
        self.draws.append(draw)
        self.seeds.append(stream.seed)
