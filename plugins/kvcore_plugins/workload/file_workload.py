"""The bases of workloads in one file, whose rows may have times or get random ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import tzinfo
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import attrs
from attrs.validators import ge, in_
from attrs.validators import optional as if_given

from kvcore import InputError
from kvcore.files import as_path
from kvcore.workloads import poisson_arrivals
from kvcore_plugins.workload.from_files import FromFiles
from kvcore_plugins.workload.rows import Row
from kvcore_plugins.workload.times import UNITS, is_zone, zone_of


@attrs.define(eq=False)
class FileWorkload(FromFiles):
    """A workload in one file.

    Attributes:
        path: path of the file.
        by_line: whether ids are numbers of lines, from 0; else of rows, without blank lines.
    """

    by_line: ClassVar[bool] = False

    path: Path = attrs.field(converter=as_path)

    @property
    def digest(self) -> str:
        """The digest of the file's bytes and of the other options."""
        options = self._digested()
        options.pop("path", None)
        return self._file_digest(self.path, **options)

    def _digested(self) -> dict[str, Any]:
        """Return the options as they are hashed."""
        return self.options()


@attrs.define(eq=False)
class TimedFile(FileWorkload):
    """A workload in one file whose rows have times, or get random ones.

    Attributes:
        path: path of the file.
        unit: unit of times that are numbers: s, ms, us, ns; None: that of the field's name, or
            of their size.
        tz: the time zone of dates and times without one, such as `Europe/Berlin`; None: UTC.
        rate: where rows have no times, requests a second, at random times (Poisson); `inf`:
            all at once.
        seed: seed of the random times.
    """

    unit: str | None = attrs.field(default=None, validator=if_given(in_(UNITS)), kw_only=True)
    tz: str | None = attrs.field(default=None, validator=if_given(is_zone), kw_only=True)
    rate: float | None = attrs.field(default=None, validator=if_given(ge(1e-9)), kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)

    def _digested(self) -> dict[str, Any]:
        """Return the options with a unit: one that is found as `s`, since it always was."""
        units = {None: "s", "s": "seconds"}
        return self.options() | {"unit": units.get(self.unit, self.unit)}

    @property
    def zone(self) -> tzinfo | None:
        """The time zone of dates and times without one; None: UTC."""
        return zone_of(self.tz)

    def drawn_arrivals(self) -> Iterator[int]:
        """Yield the times in ns of rows without times."""
        draw = Random(f"{self.seed}/arrivals").random  # noqa: S311 - a workload, no secret
        return poisson_arrivals(draw, math.inf if self.rate is None else self.rate)

    def refuse_rate(self, row: Row, field: str) -> None:
        """Raise InputError if a rate is given though `row` has a time in `field`."""
        if self.rate is not None:
            msg = (
                f"{row.path}:{row.line}: it has times ({field!r}): leave out rate={self.rate}; "
                "--rate-scale of `kvcore simulate` makes them faster"
            )
            raise InputError(msg)
