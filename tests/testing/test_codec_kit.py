"""The conformance tests of codecs fail each wrong codec in the test about its fault."""

import pytest

from kvcore.testing import CodecTests

torch = pytest.importorskip("torch", reason="codecs code torch tensors")

from kvcore_plugins.codec import INT4, INT8, KIVI  # noqa: E402 - need torch


class Padded(INT8):
    """A codec that stores more than its planes declare."""

    name = "padded"

    def encode(self, part, rows):
        """Return codes with a number too many."""
        codes, grids = super().encode(part, rows)
        return torch.cat((codes, codes[..., :1]), -1), grids


class Coarse(INT8):
    """A codec that drops the lowest four bits."""

    name = "coarse"

    def encode(self, part, rows):
        """Return codes in steps of 16."""
        codes, grids = super().encode(part, rows)
        return codes & 0xF0, grids


class Mixed(INT8):
    """A codec with one scale for all heads of a call."""

    name = "mixed"

    def encode(self, part, rows):
        """Encode all rows with the scale of the greatest number."""
        greatest = rows.abs().amax().nan_to_num()
        return super().encode(
            part, rows.nan_to_num() * 0 + greatest * (rows / greatest).round()
        )


class Neighbourly(INT4):
    """A codec that codes keys by channel, and declares that tokens are coded alone."""

    name = "neighbourly"

    def by_token(self, part):
        """Return True, which is wrong for keys."""
        return True


class Forgetful(INT8):
    """A codec that stores NaN as 0."""

    name = "forgetful"

    def encode(self, part, rows):
        """Encode the rows with NaN replaced by 0."""
        return super().encode(part, rows.nan_to_num(0))


class Small(INT8):
    """A codec that stores infinity as 0."""

    name = "small"

    def encode(self, part, rows):
        """Encode the rows with infinity replaced by 0."""
        return super().encode(part, torch.where(rows.isinf(), 0, rows))


class Shifted(KIVI):
    """A codec that decodes 0 to another number."""

    name = "shifted"

    def decode(self, part, planes):
        """Return the decoded numbers plus 0.001."""
        return super().decode(part, planes) + 1e-3


class Kit(CodecTests):
    """The conformance tests, called by hand; its name keeps pytest from collecting it."""

    error = 1 / 127

    def make(self):
        """Return the wrong codec."""
        return self.wrong


@pytest.mark.parametrize(
    ("wrong", "test", "arguments"),
    [
        (Padded(), "test_planes_match_encoded_rows", ("keys",)),
        (Coarse(), "test_round_trip", ("values", "fp32")),
        (Mixed(), "test_heads_do_not_mix", ("keys",)),
        (Neighbourly(keys="channel"), "test_tokens_are_coded_alone", ("keys",)),
        (Forgetful(), "test_nan_is_not_lost", ("keys",)),
        (Small(), "test_infinity_stays_the_greatest", ("keys", 1)),
        (Shifted(), "test_constant_rows", ("keys", 0.0)),
        (Coarse(), "test_attention_is_near", (0,)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_each_wrong_codec_fails_the_test_of_its_fault(wrong, test, arguments):
    """Each wrong codec fails the conformance test about its fault, which its base passes."""
    kit = Kit()
    kit.wrong = type(wrong).__base__()
    getattr(kit, test)(*arguments)
    kit.wrong = wrong
    with pytest.raises(AssertionError):
        getattr(kit, test)(*arguments)
