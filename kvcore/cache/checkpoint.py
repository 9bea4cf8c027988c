"""The contract of checkpoint policies: where windows and states are kept.

Full attention keeps all tokens, so a request can resume after any block. A window or a
recurrent state is kept at some lengths of a text alone, its *boundaries*: a later request that
shares the text resumes at the last of them, and computes what follows again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import attrs

from kvcore.plugins.base import Plugin, find_override
from kvcore.record import Record
from kvcore.request import Request, whole_key_tokens


@attrs.define(eq=False, slots=True, repr=False)
class Segment(Record):
    """The cached blocks of a text from one boundary to the next.

    Attributes:
        start, end: tokens before it, and up to the boundary at its end.
        resumable: whether a request can resume at `end`. If not, it follows the last boundary
            of a text, or blocks before it have left.
        last_use: serial number of the last admission that stored it, or resumed at its end.
        order: rises from segment to segment as they are stored, or resumed at.
        children: number of boundaries that come next after its own, in different texts.
        below: number of boundaries after its own in the same text, up to where texts part.
        blocks: number of its blocks: those of full attention, and of windows and states.
        seconds: seconds of prefill that a hit at `end` saves beside one at `start`.
    """

    start: int
    end: int
    resumable: bool
    last_use: int
    children: int = 0
    below: int = 0
    blocks: int = 0
    seconds: float = 0.0
    order: int = 0


class CheckpointPolicy(Plugin):
    """Keeps windows and states at the ends of prompts and at junctions, as vLLM does.

    Where a key of several blocks is partial, a longer prompt has another: the end is then that
    of the last whole one. The base class of the kind, and its default. The easy tier is one
    method, `boundaries`. A policy that overrides `victim` decides too what leaves a full pool;
    others leave that to the eviction policy. One instance serves one cache.

    Attributes:
        interval: windows and states are kept at multiples of so many tokens too, if a chunk
            ends there; 0: they are not; None: they are wherever a chunk ends.
        output: whether they are kept at each block of the output.
        unit: tokens of a block that is whole in all groups; set by the cache, as `replay`.
        replay: returns the tokens that the prompts of requests hit, one by one, in an empty
            cache like this under another policy; for a policy with a `victim`.
    """

    kind: ClassVar[str] = "checkpoint"
    name: ClassVar[str] = "default"
    interval: int | None = 0
    output: ClassVar[bool] = False

    unit: int = 0
    replay: Callable[[CheckpointPolicy, Iterable[Request]], int]

    def boundaries(self, request: Request, hit: int, junction: int) -> Iterable[int]:
        """Return the lengths, in tokens, at which a later request shall be able to resume.

        A length is rounded down to whole units, and is below that of the prompt. Where there
        are states, chunks of the prompt end there. The answer depends on the arguments, and on
        earlier calls of `on_admitted`, alone: it is asked for at every look-up.

        Args:
            request: the request; its `output_tokens` must not be used.
            hit: the tokens of its prompt that hit.
            junction: the longest prefix that full attention has, if that is longer; else 0.
                Others share it, and no state is kept at its end.
        """
        del hit
        end, key = request.prompt_tokens - 1, request.key_tokens
        if key > self.unit and not request.publishes:
            whole = whole_key_tokens(request.prompt_tokens, len(request.keys), key)
            end = min(end, whole) or end
        return end, junction

    def on_admitted(self, request: Request, hit: int, junction: int) -> None:
        """Called at the first admission of `request`, with the arguments of `boundaries`."""

    def on_changed(self, segment: Segment) -> None:
        """Called when `segment` is new or has changed; one that has left has no blocks."""

    def victim(self, segments: Sequence[Segment]) -> Segment:
        """Return the segment that leaves, of those of which a block can be evicted.

        It loses its windows and states first; and then, if it has no children, its blocks of
        full attention, from the end on. `segments` are sorted by `order`. `in` is O(1); `len`
        and an index look at all. Those with two children or more are not among them.
        """
        return segments[0]

    @property
    def is_interval(self) -> bool:
        """Whether its interval says all that it does: reports need not name it."""
        methods = "boundaries", "victim"
        return not (self.output or any(find_override(self, name) for name in methods))
