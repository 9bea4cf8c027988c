"""The built-in backends pass the tests that every backend must pass."""

import re
from pathlib import Path

import pytest

from kvcore import Plugins
from kvcore.testing import BackendTests

torch = pytest.importorskip("torch", reason="the built-in backends keep K/V in torch tensors")

from kvcore_plugins.backend import _sdpa  # noqa: E402 - these need torch

CONFIGURATIONS = ["torch-cpu", "torch-cuda"]


@pytest.fixture(autouse=True)
def _one_thread():
    """Leave the other cores to other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestBuiltIn(BackendTests):
    """Every configuration in the list above."""

    @pytest.fixture(autouse=True, params=CONFIGURATIONS)
    def _configured(self, request):
        self.spec = request.param
        reason = Plugins().get("backend", request.param.partition(":")[0]).unavailable()
        if reason is not None:
            pytest.skip(reason)

    def make(self):
        """Build it."""
        return Plugins().build("backend", self.spec)


class TestByItself(TestBuiltIn):
    """Nothing fits into the caches: sequence by sequence, head by head, in small tiles."""

    @pytest.fixture(autouse=True)
    def _narrow(self, monkeypatch):
        monkeypatch.setattr(_sdpa, "CPU_GATHER_BYTES", 1)
        monkeypatch.setattr(_sdpa, "GPU_GATHER_BYTES", 1)
        monkeypatch.setattr(_sdpa, "MAX_MASK_PAIRS", 500)


class TestInOneBatch(TestBuiltIn):
    """Everything fits: all sequences that decode are one batch, however short some are."""

    @pytest.fixture(autouse=True)
    def _broad(self, monkeypatch):
        monkeypatch.setattr(_sdpa, "CPU_GATHER_BYTES", 1 << 40)
        monkeypatch.setattr(_sdpa, "GROUP_SPREAD", 1 << 40)


class TestPage(BackendTests):
    """The backend that the reference page writes: six methods, and the defaults of the rest."""

    dtypes = ("fp64", "fp32")

    def make(self):
        """Take it from the page."""
        page = Path(__file__).parents[2] / "docs/reference/backends.md"
        (source,) = re.findall(
            r"^```python\n([^`]*?\nclass Numpy.*?)^```$",
            page.read_text("utf-8"),
            re.DOTALL | re.MULTILINE,
        )
        names = {"__name__": "page"}
        exec(source, names)  # noqa: S102
        return names["Numpy"]()


def test_every_backend_is_in_the_list():
    """Each registered backend is tested in at least one configuration."""
    assert {spec.partition(":")[0] for spec in CONFIGURATIONS} == set(
        Plugins().names("backend")
    )
