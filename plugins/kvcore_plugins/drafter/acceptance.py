"""Acceptance for simulations: given, or as a run on tensors has measured it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import attrs
from attrs import converters
from attrs.validators import instance_of, optional

from kvcore import Drafter, InputError, LatencyModel, Request
from kvcore.blake2 import blake2b
from kvcore.models.catalogue import find_model
from kvcore.models.memory import DraftMemory, KVLayout, can_share
from kvcore.models.spec import ModelSpec, bytes_of
from kvcore.serving import StepWork
from kvcore_plugins.drafter.cost import HeadCost, ModelCost
from kvcore_plugins.drafter.measured_acceptance import read_acceptance

KEPT = 4096
"""Requests whose last digest is kept."""


@attrs.define(slots=False, eq=False)
class Acceptance(Drafter):
    """Accept drafts by chance, with a probability for each position; computes nothing.

    A draft for output token j of a request is accepted if a number drawn for (seed, request,
    j) lies below the probability of its position, and all drafts before it were accepted. So
    nothing depends on the order of requests, and with more drafts a step none is lost.

    A file of `kvcore run --acceptance` gives the probabilities. If it has the same step (the
    request and the output token), the outcome of that step is repeated.

    Options:
        tokens: drafts a step, k.
        probability: of a draft to be accepted if all before it are; one for all positions, or
            one each with `/` between, as in `0.8/0.7/0.6`, the last for all that follow.
        file: measured acceptance, in place of `probability`.
        draft: the draft model, for its time and memory: a name of the catalogue, in code also
            a `ModelSpec`; None: there is no draft model.
        parameters: number of weights of extra heads on the served model, for their time and
            memory; K/V of heads, which some have, is not counted.
        seed: seed of the draws; None: the seed of the run.

    Raises:
        InputError: an unknown model, a wrong probability or number of weights, or a file
            without measured acceptance.

    Source: Leviathan et al., "Fast inference from transformers via speculative decoding",
    2023, for the expected tokens a step, (1 - a^(k + 1)) / (1 - a).
    """

    name: ClassVar[str] = "acceptance"

    tokens: int = attrs.field(default=4)
    probability: float | str | None = attrs.field(default=None)
    file: Path | None = attrs.field(default=None, converter=converters.optional(Path))
    draft: str | ModelSpec | None = attrs.field(
        default=None, validator=optional(instance_of((str, ModelSpec)))
    )
    parameters: int = attrs.field(default=0)
    seed: int | None = attrs.field(default=None)

    _shares: list[float] = attrs.field(init=False, repr=False, factory=list)
    _steps: dict[tuple[int | str, int], tuple[int, int]] = attrs.field(
        init=False, repr=False, factory=dict
    )
    _costs: list[ModelCost | HeadCost] = attrs.field(init=False, repr=False, factory=list)
    _digests: dict[int | str, tuple[int, bytes]] = attrs.field(
        init=False, repr=False, factory=dict
    )
    _key: bytes = attrs.field(init=False, repr=False, default=b"")

    def __attrs_post_init__(self) -> None:
        """Find the draft model, and read the probabilities, or the file that has them."""
        self._model()
        if type(self.parameters) is float and self.parameters.is_integer():  # 1e9
            self.parameters = int(self.parameters)
        if type(self.parameters) is not int or self.parameters < 0:
            msg = f"acceptance: parameters={self.parameters!r}: give whole weights, 0 or more"
            raise InputError(msg)
        if self.file is not None:
            if self.probability is not None:
                msg = "acceptance: probability and file both say what is accepted: give one"
                raise InputError(msg)
            self._shares, self._steps = read_acceptance(self.file)
            return
        shares = 0.7 if self.probability is None else self.probability
        try:
            self._shares = [float(part) for part in str(shares).split("/")]
        except ValueError:
            self._shares = []
        if not self._shares or not all(0 <= share <= 1 for share in self._shares):
            msg = (
                f"acceptance: probability={shares!r}: give numbers from 0 to 1, one for each "
                "position, such as 0.8/0.7/0.6"
            )
            raise InputError(msg)

    def attach(self, latency: LatencyModel, seed: int = 0) -> None:
        """Store the seed, and build the cost of the draft model."""
        super().attach(latency, seed)
        self._key = f"{seed if self.seed is None else self.seed} {self.name} ".encode()
        self._costs.clear()  # those of a run that was refused
        if (model := self._model()) is not None:
            self._costs.append(ModelCost(latency, model))
        if self.parameters:
            self._costs.append(HeadCost(latency, self.parameters))

    def accepted(self, request: Request, index: int, most: int) -> tuple[int, int]:
        """Return the measured outcome of this step; without one, draw by position."""
        measured = self._steps.get((request.id, index))
        if measured is not None:
            drafted = min(measured[0], most)
            return drafted, min(measured[1], drafted)
        shares, drafted = self._shares, min(most, self.tokens)
        if self.file is not None and not shares:
            return 0, 0
        for step in range(drafted):
            share = shares[min(step, len(shares) - 1)]
            if self._drawn(request.id, index + step) >= share:
                return drafted, step
        return drafted, drafted

    def duration(self, work: StepWork, drafts: Sequence[int]) -> int:
        """Return the time of the draft model and of extra heads; 0 without any."""
        return sum(cost.duration(work, drafts) for cost in self._costs)

    def memory(self, layout: KVLayout, devices: int) -> DraftMemory:
        """Return the weights of the draft model and of heads, and the K/V of the draft model.

        Its K/V lies under the block tables of the served model, in the same codec. A draft
        model that the devices cannot share takes as much of each of them as of one.
        """
        heads = bytes_of(self.parameters, layout.model.dtype)
        if (model := self._model()) is None:
            return DraftMemory(heads)
        own = KVLayout(model, layout.codec, layout.block_size)
        if can_share(model, devices):
            return DraftMemory(model.weight_bytes + heads, own.token_bytes(devices))
        return DraftMemory(devices * model.weight_bytes + heads, devices * own.token_bytes())

    def _model(self) -> ModelSpec | None:
        """Return the draft model; None if there is none."""
        return find_model(self.draft) if isinstance(self.draft, str) else self.draft

    def _drawn(self, name: int | str, index: int) -> float:
        """Return the number in [0, 1) of an output token; a digest has nine numbers."""
        block, slot = divmod(index, 9)
        known = self._digests.get(name)
        if known is None or known[0] != block:
            if len(self._digests) > KEPT:
                self._digests.clear()
            text = self._key + f"{name!r} {block}".encode()
            known = self._digests[name] = block, blake2b(text, digest_size=63).digest()
        return int.from_bytes(known[1][7 * slot : 7 * slot + 7], "little") / 2**56
