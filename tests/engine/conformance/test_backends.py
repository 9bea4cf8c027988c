"""The built-in backends pass the tests that every backend must pass."""

import os
from functools import partial
from importlib.util import find_spec

import pytest
from helpers.configurations import configured
from helpers.pages import class_on_page
from helpers.seeds import FewSeeds

from kvcore import Plugins
from kvcore.testing import BackendTests

torch = pytest.importorskip("torch", reason="the built-in backends keep K/V in torch tensors")

from kvcore_engine.backend import (  # noqa: E402 - these need torch
    TorchCPU,
    _sdpa,
    _step_plan,
)

CONFIGURATIONS = ["torch-cpu", "torch-cuda"]
HERE = [name for name in CONFIGURATIONS if Plugins().get("backend", name).unavailable() is None]
"""Those that can work on this machine: `torch-cuda` needs a GPU."""


@pytest.fixture(autouse=True)
def _one_thread():
    """Limit torch to one thread, which leaves the other cores to other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestBuiltIn(configured("backend", HERE, elsewhere=CONFIGURATIONS), BackendTests):
    """Every configuration in the list above that can work here."""


class TestOneSequenceAtATime(FewSeeds, TestBuiltIn):
    """Every configuration, computing one sequence and one head at a time, in small tiles."""

    @pytest.fixture(autouse=True)
    def _narrow(self, monkeypatch):
        monkeypatch.setattr(_sdpa, "CPU_GATHER_BYTES", 1)
        monkeypatch.setattr(_sdpa, "GPU_GATHER_BYTES", 1)
        monkeypatch.setattr(_step_plan, "MAX_MASK_PAIRS", 500)


class TestInOneBatch(FewSeeds, TestBuiltIn):
    """Every configuration, computing all sequences that decode in one batch."""

    @pytest.fixture(autouse=True)
    def _broad(self, monkeypatch):
        monkeypatch.setattr(_sdpa, "CPU_GATHER_BYTES", 1 << 40)
        monkeypatch.setattr(_step_plan, "GROUP_SPREAD", 1 << 40)


class WithTriton(BackendTests):
    """The kit on a backend whose decoding sequences are computed by Triton's kernels."""

    backend = partial(TorchCPU, attention="triton")
    dtypes = ("fp32", "fp16", "bf16")

    def batch(self, seed, dtype=None, **fixed):
        """Return a random batch, with a block size that the kernels support."""
        return super().batch(seed, dtype, **({"block_size": 16} | fixed))


@pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter",
)
@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        ("paged_is_dense", (2, "fp16")),
        ("paged_is_dense", (2, "bf16")),
        ("any_block_size", (7, 1)),
        ("windows_and_sinks", (4, 33, 40)),
        ("decode_alone", (2,)),
        ("scale", ()),
        ("chunks_are_one_prefill", (2,)),
        ("a_reused_block_leaks_nothing", (2,)),
        ("windows_go_by_position", (2, False)),
    ],
)
def test_triton_kernels_pass_the_attention_tests(test, arguments):
    """Triton's decoding kernels pass the attention tests of the kit.

    The other tests of the kit are left out, because the interpreter is slow. Block sizes,
    windows, query heads and weights are tested in `test_attention_kernel`.
    """
    getattr(WithTriton(), f"test_{test}")(*arguments)


class TestPage(FewSeeds, BackendTests):
    """The backend of the reference page: six methods, and the defaults of the others."""

    dtypes = ("fp64", "fp32")

    def make(self):
        """Build the backend from the code on the page."""
        return class_on_page("reference/backends.md", "Numpy")()
