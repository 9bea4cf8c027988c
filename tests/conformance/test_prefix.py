"""The built-in prefix caches pass the tests that every prefix cache must pass."""

from kvcore.testing.prefix import PrefixIndexTests
from kvcore_plugins.prefix import NoPrefix, Radix


class TestRadix(PrefixIndexTests):
    """The radix tree can do all there is to test."""

    prefix = Radix


class TestNone(PrefixIndexTests):
    """Without a prefix cache there are only private blocks."""

    prefix = NoPrefix
    shares = False
