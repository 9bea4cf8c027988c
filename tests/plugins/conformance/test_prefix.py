"""The built-in prefix caches pass the tests that every prefix cache must pass."""

from kvcore.testing.prefix import PrefixIndexTests
from kvcore_plugins.prefix import NoPrefix, Radix


class TestRadix(PrefixIndexTests):
    """The prefix cache `radix`, which shares blocks."""

    prefix = Radix


class TestNone(PrefixIndexTests):
    """The prefix cache `none`, which has private blocks only."""

    prefix = NoPrefix
    shares = False
