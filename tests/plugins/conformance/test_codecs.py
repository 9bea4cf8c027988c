"""The built-in codecs pass the tests that every codec must pass, within tighter bounds."""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from helpers.configurations import configured
from helpers.seeds import FewSeeds

from kvcore.testing import CodecTests

torch = pytest.importorskip("torch", reason="codecs code torch tensors")

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/third_party_codec/kvcore_shared_exponent.py"
PAGES = {"Truncated": "docs/reference/codecs.md", "SharedExponent": "docs/how-to/quantise.md"}
"""Codecs whose code, with that of their tests, is on a page of the docs."""
CONFIGURATIONS = [
    "fp64",
    "fp32",
    "fp16",
    "bf16",
    "fp8-e4m3",
    "fp8-e5m2:factor=0.5",
    "fp8-e4m3:scale=head",
    "fp8-e5m2:scale=head",
    "int8",
    "int8:keys=channel",
    "int4",
    "int4:keys=channel",
    "kivi",
    "kivi:bits=4,group=8,residual=32",
]
PRECISION = {"fp64": 53, "fp32": 24, "fp16": 11, "bf16": 8, "fp8-e4m3": 4, "fp8-e5m2": 3}
"""Significant bits of floating-point formats."""
SMALLEST = {"fp16": 2**-24, "fp8-e4m3": 2**-9, "fp8-e5m2": 2**-16}
"""Smallest positive numbers of the formats in which rows come near them."""
GREATEST = {"fp8-e4m3": 448, "fp8-e5m2": 57344}


class TestBuiltIn(FewSeeds, configured("codec", CONFIGURATIONS), CodecTests):
    """Every configuration in the list above, within the bounds of the reference page."""

    def bound(self, part, rows):
        """Return half a step: of the floating-point format, or of the grid."""
        codec, rows = self.make(), rows.double()
        if codec.name in PRECISION:
            scale = getattr(codec, "factor", 1)
            if getattr(codec, "scale", None) == "head":
                scale = rows.abs().amax(-1, keepdim=True) / GREATEST[codec.name] * (1 + 2**-9)
            least = SMALLEST.get(codec.name, 0) * scale
            return rows.abs() * 2.0 ** -PRECISION[codec.name] + least / 2
        _, grids = codec.encode(part, rows)
        if grids.shape[3] == 2:
            steps = grids[..., :1].expand(-1, -1, -1, rows.shape[2] // grids.shape[2])
        else:
            steps = grids[:, :, :1].expand(-1, -1, rows.shape[1] // grids.shape[1], -1)
        return steps.reshape(rows.shape).double() / 2 + 1e-6 * rows.abs().amax()


def example():
    """Return the module of the example, which is not installed here."""
    spec = spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestExample(CodecTests):
    """The example of a third party's codec, of thirty lines."""

    codec = example().SharedExponent
    error = 1 / 127


@pytest.mark.parametrize("name", PAGES)
def test_the_codec_on_the_docs_page_keeps_its_error_bound(name):
    """The codec on a page of the docs keeps the error bound of its test class, and NaN."""
    page = (ROOT / PAGES[name]).read_text("utf-8")
    fences = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names = {"__name__": "page"}
    for fence in fences:
        if name in fence:
            exec(fence.partition("\nfound = ")[0], names)  # noqa: S102
    kit = names[f"Test{name}"]()
    for part in ("keys", "values"):
        for dtype in ("fp32", "fp64", "fp16", "bf16"):
            kit.test_round_trip(part, dtype)
        kit.test_nan_is_not_lost(part)
        kit.test_infinity_stays_the_greatest(part, 1)
        kit.test_tokens_are_coded_alone(part)
    kit.test_attention_is_near(0)
