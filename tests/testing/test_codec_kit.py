"""The conformance tests of codecs fail each wrong codec in the test about its fault."""

import pytest
from helpers.faults import faulty, run_test

from kvcore.testing import CodecTests

torch = pytest.importorskip("torch", reason="codecs code torch tensors")

from kvcore_plugins.codec import INT4, INT8, KIVI  # noqa: E402 - need torch


class Padded(INT8):
    """A codec that stores more than its planes declare."""

    def encode(self, part, rows):
        """Return codes with a number too many."""
        codes, grids = super().encode(part, rows)
        return torch.cat((codes, codes[..., :1]), -1), grids


class Coarse(INT8):
    """A codec that drops the lowest four bits."""

    def encode(self, part, rows):
        """Return codes in steps of 16."""
        codes, grids = super().encode(part, rows)
        return codes & 0xF0, grids


class Mixed(INT8):
    """A codec with one scale for all heads of a call."""

    def encode(self, part, rows):
        """Encode all rows with the scale of the greatest number."""
        greatest = rows.abs().amax().nan_to_num()
        return super().encode(
            part, rows.nan_to_num() * 0 + greatest * (rows / greatest).round()
        )


Neighbourly = faulty(
    "A codec that codes keys by channel, and declares that tokens are coded alone.",
    INT4,
    by_token=lambda *_: True,
)
Forgetful = faulty(
    "A codec that stores NaN as 0.",
    INT8,
    encode=lambda self, part, rows: INT8.encode(self, part, rows.nan_to_num(0)),
)
Small = faulty(
    "A codec that stores infinity as 0.",
    INT8,
    encode=lambda self, part, rows: INT8.encode(self, part, rows.where(~rows.isinf(), 0)),
)


class Level(INT8):
    """A codec that decodes all numbers of a token with infinity to the greatest."""

    def decode(self, part, planes):
        """Return the greatest number of a token in all its places, where it is infinite."""
        rows = super().decode(part, planes)
        greatest = rows.amax(-1, keepdim=True)
        return torch.where(greatest > 1e4, greatest, rows)


Shifted = faulty(
    "A codec that decodes 0 to another number.",
    KIVI,
    decode=lambda *given: KIVI.decode(*given) + 1e-3,
)


class Bounded(CodecTests):
    """The conformance tests with the bound of int8."""

    error = 1 / 127


@pytest.mark.parametrize(
    ("wrong", "test", "arguments"),
    [
        (Padded(), "planes_match_encoded_rows", ("keys",)),
        (Coarse(), "round_trip", ("values", "fp32")),
        (Mixed(), "heads_do_not_mix", ("keys",)),
        (Neighbourly(keys="channel"), "tokens_are_coded_alone", ("keys",)),
        (Forgetful(), "nan_is_not_lost", ("keys",)),
        (Small(), "infinity_stays_the_greatest", ("keys", 1)),
        (Level(), "infinity_stays_the_greatest", ("keys", 1)),
        (Shifted(), "constant_rows", ("keys", 0.0)),
        (Coarse(), "attention_is_near", (0,)),
    ],
)
def test_each_wrong_codec_fails_the_test_of_its_fault(wrong, test, arguments):
    """Each wrong codec fails the conformance test about its fault, which its base passes."""
    run_test(Bounded, type(wrong).__base__, test, *arguments)
    with pytest.raises(AssertionError):
        run_test(Bounded, lambda: wrong, test, *arguments)


def test_an_error_above_the_bound_is_told_with_it():
    """The error about a codec that is too coarse has the error, its bound, and whose it is."""
    with pytest.raises(AssertionError, match=r"an error is .*, the bound .*: `error` of "):
        run_test(Bounded, Coarse, "round_trip", "values", "fp32")


class Loose(CodecTests):
    """The conformance tests with one bound for all numbers."""

    def bound(self, part, rows):
        """Return 0.2 for each channel."""
        return torch.full((rows.shape[2],), 0.2, dtype=torch.float64)


@pytest.mark.parametrize("test", ["attention_is_near", "a_block_is_written_again"])
def test_a_bound_may_have_any_shape_that_expands(test):
    """A bound by channel, which expands to the shape of the rows, is a bound."""
    run_test(Loose, INT8, test, seed=0)
