"""Files of measured acceptance: the drafts of a run on tensors, and how many were accepted.

JSON lines. The first has, by position, the share of the drafts that were accepted, of those
after accepted ones. Each other line is a step of a request: the number of output tokens that
it had (`output`), of drafts after these, and of drafts that were accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TextIO, TypeAlias

import orjson

from kvcore.errors import InputError

DraftedStep: TypeAlias = tuple[int | str, int, int, int]
"""(request id, output tokens it had, drafts, accepted drafts)."""


def write_acceptance(
    file: TextIO, probabilities: Iterable[float], steps: Iterable[DraftedStep]
) -> None:
    """Write measured acceptance."""
    head = orjson.dumps({"acceptance": list(probabilities)})
    file.write(f"{head.decode()}\n")
    for request, output, drafts, accepted in steps:
        line = {"request": request, "output": output, "drafts": drafts, "accepted": accepted}
        file.write(f"{orjson.dumps(line).decode()}\n")


def read_acceptance(
    path: Path,
) -> tuple[list[float], dict[tuple[int | str, int], tuple[int, int]]]:
    """Return the shares by position, and (drafts, accepted) by (request id, output tokens).

    Raises:
        InputError: the file cannot be read, or is none of measured acceptance.
    """
    row = 1
    try:
        head, *lines = path.read_bytes().splitlines()
        shares = [float(share) for share in orjson.loads(head)["acceptance"]]
        sound = all(0 <= share <= 1 for share in shares)
        steps = {}
        for row, line in enumerate(lines if sound else (), 2):  # noqa: B007 - for the error
            step = orjson.loads(line)
            drafts, accepted = step["drafts"], step["accepted"]
            sound &= type(drafts) is type(accepted) is int and 0 <= accepted <= drafts
            steps[step["request"], step["output"]] = drafts, accepted
            if not sound:
                break
    except OSError as error:
        msg = f"acceptance: {path} cannot be read: {error.strerror or error}"
        raise InputError(msg) from error
    except (ValueError, LookupError, TypeError):
        sound = False
    if not sound:
        msg = (
            f"acceptance: {path}, line {row}, is none of measured acceptance: give a file "
            "that `kvcore run --drafter NAME --acceptance FILE` wrote"
        )
        raise InputError(msg)
    return shares, steps
