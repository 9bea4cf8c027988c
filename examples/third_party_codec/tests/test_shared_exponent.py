"""The conformance kit, on the codec."""

from kvcore_shared_exponent import SharedExponent

from kvcore.testing import CodecTests


class TestSharedExponent(CodecTests):
    """Everything kvcore expects of a codec holds."""

    codec = SharedExponent
    error = 1 / 127
