"""The rows that a reader leaves out, and the fields that it leaves unread."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import attrs

from kvcore.errors import InputError

_MEANINGFUL = re.compile(
    r"prefix|cached|salt|wait|think_?time|delay|round|reasoning|increment|previous"
    r"|(time|start|arriv|gap)\w*_(s|ms|us|ns)$"
)


@attrs.define
class LeftOut:
    """The rows that a reader leaves out: what is no request, has failed, or cannot be read.

    Attributes:
        strict: whether the first of them is refused.
        reasons: number of rows by reason.
        first: the error of the first of them.
    """

    strict: bool = False
    reasons: Counter[str] = attrs.field(factory=Counter)
    first: InputError | None = None

    def add(self, reason: str, error: InputError) -> None:
        """Count a row that is left out, or raise its error if the reading is strict."""
        if self.strict:
            raise error
        self.first = self.first or error
        self.reasons[reason] += 1

    @property
    def notes(self) -> list[str]:
        """The number of rows by reason, and the first error; no note if there are none."""
        if self.first is None:
            return []
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.items())
        total = self.reasons.total()
        return [f"left out: {total:,} ({reasons}); the first: {self.first}"]


_MODELS = 3


def most_named(models: Iterable[str]) -> str | None:
    """Return the model that most rows name, the first of several; None: none names one."""
    counts = Counter(models)
    return max(counts, key=counts.__getitem__, default=None)


def of_models(models: Counter[str]) -> str:
    """Return the models with the most rows, each with their number."""
    shown = ", ".join(f"{name} ({count:,})" for name, count in models.most_common(_MODELS))
    others = len(models) - _MODELS
    return shown + (f" and {others:,} more" if others > 0 else "")


def models_note(models: Counter[str], chosen: str | None, option: str) -> list[str]:
    """Return the note on a log of several models; none if there is one.

    Args:
        models: rows by model.
        chosen: the model whose rows alone are read; None: those of all are.
        option: the option that chooses it.
    """
    if len(models) < 2:  # noqa: PLR2004 - several
        return []
    told = f"rows are of {len(models):,} models: {of_models(models)}"
    if chosen is not None:
        return [f"{told}; those of {chosen} alone are read"]
    return [f"{told}, all read as the requests of one; {option}=NAME reads those of one alone"]


def no_model(path: Path, chosen: str, models: Counter[str]) -> InputError:
    """Return the error of a model that no row names."""
    there = of_models(models) if models else "none"
    return InputError(f"{path}: no row is of the model {chosen!r}; there are: {there}")


def unread_fields(names: Iterable[str], read: Collection[str]) -> list[str]:
    """Return the fields that are not `read`, and whose names say that they change a request."""
    return [name for name in names if name not in read and _MEANINGFUL.search(name.lower())]
