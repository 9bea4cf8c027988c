"""The conformance kit, on the codec."""

from kvcore.testing import CodecTests
from kvcore_shared_exponent import SharedExponent


class TestSharedExponent(CodecTests):
    """Everything kvcore expects of a codec holds."""

    codec = SharedExponent
    error = 1 / 127
