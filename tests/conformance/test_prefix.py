"""The built-in prefix caches pass the tests that every prefix cache must pass."""

from kvcore.testing.prefix import PrefixCacheTests
from kvcore_plugins.prefix import NoPrefix, Radix


class TestRadix(PrefixCacheTests):
    """The radix tree can do all there is to test."""

    prefix = Radix


class TestNone(PrefixCacheTests):
    """Without a prefix cache there are only private blocks."""

    prefix = NoPrefix
    shares = False
