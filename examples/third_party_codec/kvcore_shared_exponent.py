"""Store K/V in 8 bits with shared exponents, as block floating point does."""

import torch

from kvcore import Codec, hookimpl
from kvcore.engine import Plane

NAN = -128


class SharedExponent(Codec):
    """Store numbers as integers up to 127, times a power of two for each token and head."""

    name = "shared-exponent"

    def planes(self, part, tokens, width):
        """Return a byte for each number, and one for each exponent."""
        return Plane("codes", "int8", (tokens, width)), Plane("exponents", "int8", (tokens, 1))

    def encode(self, part, rows):
        """Return the codes and exponents; what is infinite becomes 2**100."""
        rows = rows.float().clamp(-(2.0**100), 2.0**100)
        greatest = rows.nan_to_num().abs().amax(-1, keepdim=True)
        exponents = torch.frexp(greatest / 127).exponent.clamp_min(-126)
        codes = torch.ldexp(rows, -exponents).round().nan_to_num(NAN)
        return codes.to(torch.int8), exponents.to(torch.int8)

    def decode(self, part, planes):
        """Return the numbers."""
        codes, exponents = planes
        return torch.ldexp(codes.float().masked_fill(codes == NAN, torch.nan), exponents)


@hookimpl
def kvcore_codecs():
    """Register the codec."""
    return [SharedExponent]
