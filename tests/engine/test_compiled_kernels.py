"""What Triton's kernels compile to, for GPUs that need not be there, as a table of limits."""

import json
import sys
from itertools import product

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("triton", reason="the kernels are Triton's")

AXES = {
    "numbers": [
        *("fp32", "fp16", "bf16"),
        *("fp8-e4m3", "fp8-e4m3:scale=head", "fp8-e5m2", "int8", "int4"),
    ],
    "new": [1, 64],
    "capability": [80, 90, 100],
    "group": [1, 8],
    "block_size": [16, 64],
}
"""What is combined: every dtype and codec, step, GPU, size of groups and size of blocks."""


def cases(*, thorough):
    """Return the cases to compile: all, or one for each dtype or codec and step.

    These go through the values of the other axes so that each pair of values is in one.
    """
    if thorough:
        chosen = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    else:
        chosen = []
        steps = [*product(AXES["numbers"], [1]), *product(AXES["numbers"][::2], [64])]
        for index, (numbers, new) in enumerate(steps):
            gpu, group, size = index % 3, index // 2 % 2, index // 4 % 2
            rest = AXES["capability"][gpu], AXES["group"][group], AXES["block_size"][size]
            chosen.append(dict(zip(AXES, (numbers, new, *rest), strict=True)))
    for case in chosen:
        windowed = (case["group"] == 1) != (case["block_size"] == 16)
        case["window"] = 50 if windowed else None
    return chosen


if __name__ == "__main__":
    print(json.dumps(cases(thorough=len(sys.argv) > 1)))
