"""A measurement of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvcore.plugins.options import as_text


@attrs.frozen
class Measured:
    """One measurement.

    Attributes:
        line: number of its line in the file, from 1.
        labels: its id, engine, version and source, if the row has them.
        options: options of `RunConfig`, such as the model and the device.
        load: options of the workload `bench`.
        values: the measured values, by the names of `MEASURES`.
    """

    line: int
    labels: Mapping[str, str]
    options: Mapping[str, Any]
    load: Mapping[str, Any]
    values: Mapping[str, float]

    def label(self, names: str) -> str:
        """Return the value of a column, or of several with `+` between their names.

        It is written as in a table, such as `2` and `true`; that which the row lacks is `-`.
        """
        known = {**self.values, **self.load, **self.options, **self.labels}
        return " ".join(written(known.get(name, "-")) for name in names.split("+"))


def written(value: Any) -> str:
    """Return a value as a table has it: `2` of 2.0."""
    text = as_text(value)
    return text.removesuffix(".0") if isinstance(value, float) else text
