"""The options of a run on tensors: its model, its device memory, its clock."""

from typing import Annotated, Literal

from kvcore.config.options import Option, SimulateOptions
from kvcore.config.values import PluginChoice
from kvcore.hookspecs import MODEL, REQUESTS
from kvcore.models.codec import TENSOR_DTYPES
from kvcore.plugins.options import Spec


class EngineOptions(SimulateOptions, total=False):
    """Options of a run on tensors: the keywords of `kvcore.run`.

    A `model` of None is the generator's own, and a `codec` of None keeps numbers as they are
    computed. There is no `weights_dtype`: the weights are those of the generator.
    """

    generator: Annotated[
        PluginChoice,
        Option(
            Spec("transformer"),
            "Generator: the model that computes K/V and next tokens.",
            MODEL,
        ),
    ]
    backend: Annotated[
        PluginChoice,
        Option(
            Spec("torch-cpu"),
            "Backend: the device memory that holds K/V as tensors.",
            MODEL,
        ),
    ]
    dtype: Annotated[
        str,
        Option(
            "fp32",
            "Number format in which the model computes.",
            MODEL,
            choices=TENSOR_DTYPES,
        ),
    ]
    """K/V without a codec is kept in it too."""
    clock: Annotated[
        Literal["model", "wall"],
        Option("model", "Time a step by the latency model, or by the wall clock.", MODEL),
    ]
    shrink: Annotated[
        int | None, Option(None, "Divisor of all lengths of the workload.", REQUESTS)
    ]
    """None: the one that makes a key of the workload a block."""
    stop_at_eos: Annotated[
        bool,
        Option(
            default=False,
            help="End a text at its end-of-sequence token; wall clock only.",
            heading=REQUESTS,
        ),
    ]
    threads: Annotated[
        int | None,
        Option(
            None,
            "Number of threads that compute.  [default: 1 for a tiny model, else one a CPU]",
            MODEL,
        ),
    ]
