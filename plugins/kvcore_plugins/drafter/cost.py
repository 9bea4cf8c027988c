"""The cost of drafting in simulated time: of a draft model, or of heads on the served one."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore import InputError, LatencyModel
from kvcore.models.spec import ModelSpec
from kvcore.serving import StepWork


class ModelCost:
    """Cost of a draft model: a pass over the step's tokens, and one for each later draft.

    The draft model runs on the devices of the target, and reads K/V of its own. All decoding
    sequences are in every pass.

    Args:
        target: the latency model of the served model.
        model: the draft model.

    Raises:
        InputError: `target` cannot time another model, or the draft model has an attention
            window that the served one has not.
    """

    def __init__(self, target: LatencyModel, model: ModelSpec) -> None:
        self._latency = target.for_model(model)
        windows = self._latency.windows
        if not set(windows) <= set(target.windows):
            msg = (
                f"draft model {model.name!r} has attention windows {windows}, the served one "
                f"{target.windows}: take a draft model with windows of the served one"
            )
            raise InputError(msg)
        self._columns = [target.windows.index(window) for window in windows]

    def duration(self, work: StepWork, drafts: Sequence[int]) -> int:
        """Return the picoseconds of drafting."""
        pairs, context = (
            tuple(numbers[column] for column in self._columns)
            for numbers in (work.attended_pairs, work.context)
        )
        none = (0,) * len(pairs)
        passes = max(drafts, default=0)
        took_ps = 0
        if work.prefill or passes:
            first = work.decode if passes else 0
            took_ps += self._latency.duration(
                StepWork(work.prefill, pairs, first, context if passes else none)
            )
        for ahead in range(1, passes):
            # A window stays as long as it is, once the sequences have filled it.
            grown = tuple(
                min(length + ahead * work.decode, work.decode * (window or length + ahead))
                for length, window in zip(context, self._latency.windows, strict=True)
            )
            took_ps += self._latency.duration(StepWork(0, none, work.decode, grown))
        return took_ps


class HeadCost:
    """Cost of extra heads: their weights, read in the pass of the served model.

    Args:
        target: the latency model of the served model.
        parameters: weights of all heads together.

    Raises:
        InputError: `target` cannot time another model.
    """

    def __init__(self, target: LatencyModel, parameters: int) -> None:
        self._plain, self._grown = target.for_model(None), target.for_model(None, parameters)

    def duration(self, work: StepWork, drafts: Sequence[int]) -> int:
        """Return the picoseconds by which the heads make the step longer."""
        return self._grown.duration(work) - self._plain.duration(work) if work.decode else 0
