"""The built-in prefix caches pass the tests that every prefix cache must pass."""

from kvcore.testing.prefix import PrefixIndexTests
from kvcore_plugins.prefix import Hashed, NoPrefix, Radix


class TestRadix(PrefixIndexTests):
    """The prefix cache `radix`, which shares blocks."""

    prefix = Radix


class TestHashed(PrefixIndexTests):
    """The prefix cache `hashed`, which looks up whole blocks."""

    prefix = Hashed


class TestNone(PrefixIndexTests):
    """The prefix cache `none`, which has private blocks only."""

    prefix = NoPrefix
