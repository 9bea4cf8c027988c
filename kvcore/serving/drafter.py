"""The drafter contract, as far as the serving loop goes: how much is drafted, and its cost.

A step of a decoding job computes its newest token and up to k drafts after it in one pass of
the served model, which accepts the first few of them and adds one token of its own:

    text so far    ... t                         the newest token, whose K/V is yet to come
    drafts             t   d1  d2  d3            computed together, in four slots
    model's tokens     d1  d2  x                 the tokens after t, d1 and d2
    new text       ... t   d1  d2  x             d3 is rejected, and its slot rolled back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvcore.errors import InputError
from kvcore.lazy import former
from kvcore.models.memory import DraftMemory, KVLayout
from kvcore.plugins.base import Plugin
from kvcore.request import Request
from kvcore.serving.latency import LatencyModel, StepWork


class Drafter(Plugin):
    """Drafts tokens that the served model verifies: speculative decoding.

    Simulations and runs on tensors both use its limit and its cost. A simulation calls
    `accepted`, and computes nothing; on tensors tokens are drafted by a subclass,
    `kvcore_engine.drafter.TokenDrafter`.

    Attributes:
        tokens: the most drafts for a sequence in a step, k; an option of every drafter.
        latency: the latency model of the served model; set by `attach`.

    Source: Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
    decoding", ICML 2023.
    """

    kind: ClassVar[str] = "drafter"

    tokens: int = 4
    latency: LatencyModel

    def attach(self, latency: LatencyModel, seed: int = 0) -> None:
        """Store the latency model of the served model. Called once, before the run.

        Raises:
            InputError: the drafter cannot work beside this model.
        """
        del seed
        if type(self.tokens) is not int or self.tokens < 1:
            msg = f"{self.name}: tokens={self.tokens!r}: give 1 draft a step or more"
            raise InputError(msg)
        self.latency = latency

    def accepted(self, request: Request, index: int, most: int) -> tuple[int, int]:
        """Return how many tokens are drafted, and how many of them the model accepts.

        Args:
            request: the request, which may have any number of steps.
            index: output tokens that it has: its drafts are for this index and those after.
            most: the most tokens that may be drafted, 1 or more.

        A drafter that drafts from tokens does not define it, and cannot be used in a
        simulation, which has no tokens.
        """
        raise NotImplementedError

    def duration(self, work: StepWork, drafts: Sequence[int]) -> int:
        """Return the picoseconds that drafting takes in a step: 0 unless overridden.

        Args:
            work: the step without drafts; it may prefill alone.
            drafts: how many tokens are drafted, by decoding sequence.
        """
        del work, drafts
        return 0

    def memory(self, layout: KVLayout, devices: int) -> DraftMemory:
        """Return what drafting adds to a model that `devices` share: nothing unless overridden.

        The pool is smaller by it. Called before `attach`, with the layout of the model's K/V.
        """
        del layout, devices
        return DraftMemory()


__getattr__ = former(__name__)
