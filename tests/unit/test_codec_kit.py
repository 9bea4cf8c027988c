"""The conformance tests of codecs: wrong ones fail, each in the test that is meant for it."""

import pytest

from kvcore.testing import CodecTests

torch = pytest.importorskip("torch", reason="codecs code torch tensors")

from kvcore_plugins.codec import INT4, INT8, KIVI  # noqa: E402 - need torch


class Padded(INT8):
    """Says less than it stores."""

    name = "padded"

    def encode(self, part, rows):
        """Return a number too many."""
        codes, grids = super().encode(part, rows)
        return torch.cat((codes, codes[..., :1]), -1), grids


class Coarse(INT8):
    """Drops the lowest bits."""

    name = "coarse"

    def encode(self, part, rows):
        """Return steps of 16."""
        codes, grids = super().encode(part, rows)
        return codes & 0xF0, grids


class Mixed(INT8):
    """Has one scale for all heads of a call."""

    name = "mixed"

    def encode(self, part, rows):
        """Scale all to the first."""
        greatest = rows.abs().amax().nan_to_num()
        return super().encode(
            part, rows.nan_to_num() * 0 + greatest * (rows / greatest).round()
        )


class Neighbourly(INT4):
    """Codes keys by channel, and says that tokens are coded alone."""

    name = "neighbourly"

    def by_token(self, part):
        """Say what is not so."""
        return True


class Forgetful(INT8):
    """Lets NaN be 0."""

    name = "forgetful"

    def encode(self, part, rows):
        """Code what is left."""
        return super().encode(part, rows.nan_to_num(0))


class Small(INT8):
    """Lets infinity be 0."""

    name = "small"

    def encode(self, part, rows):
        """Code what is left."""
        return super().encode(part, torch.where(rows.isinf(), 0, rows))


class Shifted(KIVI):
    """Decodes 0 to something else."""

    name = "shifted"

    def decode(self, part, planes):
        """Add a little."""
        return super().decode(part, planes) + 1e-3


class Kit(CodecTests):
    """The kit, by hand; its name keeps pytest from collecting it."""

    error = 1 / 127

    def make(self):
        """Build the wrong codec."""
        return self.wrong


@pytest.mark.parametrize(
    ("wrong", "test", "arguments"),
    [
        (Padded(), "test_planes_are_what_it_encodes", ("keys",)),
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
def test_wrong_codecs_fail(wrong, test, arguments):
    """Each fails the test that is meant for it."""
    kit = Kit()
    kit.wrong = wrong
    with pytest.raises(AssertionError):
        getattr(kit, test)(*arguments)
