"""Measure decode steps of a model with graphs and without, once their tokens are equal.

python -m kvcore_testing.gpu.steps BACKEND FILE [--quick]

The file has the rows so far after each batch size.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from kvcore.engine import RaggedBatch, attend_through
from kvcore.errors import KvcoreError
from kvcore.files import atomic_file
from kvcore.plugins import Plugins
from kvcore_engine.executor import tensor_layout
from kvcore_engine.graphs import StepGraphs

MODEL = "transformer:layers=8,hidden=1024,heads=16,kv_heads=4,head_dim=64,vocab_size=1024"
SMALL = "transformer:layers=2,hidden=64,heads=8,kv_heads=2,head_dim=16,vocab_size=97"

BLOCK = 16

WARM = 4
"""Steps that are not timed: kernels are compiled, and a graph is captured."""


def steps(
    spec: str, model: str, sequences: int, context: int, count: int
) -> tuple[list[list[int]], float, dict[str, Any]]:
    """Prefill sequences and decode `count` tokens of each.

    Returns the tokens of each step, the median of the steps' seconds, and counts of graphs.
    """
    plugins = Plugins()
    generator, backend = plugins.build("generator", model), plugins.build("backend", spec)
    width = -(-(context + count) // BLOCK)
    dtype = "fp32"
    generator.load(backend, dtype)
    backend.allocate(tensor_layout(generator.spec, sequences * width, BLOCK, dtype))
    graphs = StepGraphs.of(generator, backend)
    tables = [range(n * width, (n + 1) * width) for n in range(sequences)]
    through = partial(attend_through, store=backend.store_rotated, attend=backend.attend)
    tokens = [[(7 * n + 3 * i) % 97 for i in range(context)] for n in range(sequences)]
    drawn: list[list[int]] = []
    seconds = []
    for step in range(count + 1):
        position = context + step - 1 if step else 0
        new = len(tokens[0])
        batch = RaggedBatch(
            block_tables=tables,
            contexts=[position] * sequences,
            lengths=[new] * sequences,
            token_ids=[token for own in tokens for token in own],
            positions=[*range(position, position + new)] * sequences,
            output_indices=[step] * sequences,
            seeds=[0] * sequences,
            fuses_rotation=backend.fuses_rotation,
        )
        begun = perf_counter()
        if graphs is None:
            outcome = generator.forward(batch, through(backend.plan(batch)))
        else:
            outcome = graphs.forward(batch, backend.attend, through)
        backend.synchronize()
        seconds.append(perf_counter() - begun)
        drawn.append(outcome)
        tokens = [[token] for token in outcome]
    counts = {} if graphs is None else {"replays": graphs.replays, "launched": graphs.launched}
    return drawn, median(seconds[1 + min(WARM, count // 2) :]), counts


def row(spec: str, model: str, sequences: int, context: int, count: int) -> dict[str, Any]:
    """Return the row of a batch size; `ok` is whether tokens are equal and steps replayed."""
    case = {"sequences": sequences, "context": context, "steps": count}
    expected, launched, _ = steps(spec, model, sequences, context, count)
    joint = "," if ":" in spec else ":"
    try:
        drawn, replayed, counts = steps(
            f"{spec}{joint}graphs=true", model, sequences, context, count
        )
    except KvcoreError as error:  # the backend has no graphs
        return {**case, "ok": True, "launched_us": launched * 1e6, "note": str(error)}
    return {
        **case,
        "ok": drawn == expected and counts.get("replays", 0) > 0,
        "equal_tokens": drawn == expected,
        "launched_us": launched * 1e6,
        "replayed_us": replayed * 1e6,
        **counts,
    }


def main(spec: str, out: Path, *, quick: bool) -> int:
    """Measure all batch sizes; return 0, or 1 if a row is not right."""
    rows = []
    model, context, count = (SMALL, 40, 8) if quick else (MODEL, 1000, 64)
    for sequences in (1, 4) if quick else (1, 8, 32, 128):
        rows.append(row(spec, model, sequences, context, count))
        with atomic_file(out) as file:
            print(json.dumps({"rows": rows}), file=file)
    return 0 if all(each["ok"] for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), quick="--quick" in sys.argv))
