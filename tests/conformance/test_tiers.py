"""The built-in tiers pass the tests that every tier must pass."""

from kvcore import Plugins
from kvcore.testing import TierTests
from kvcore_plugins.tier import Disk, Host, Redis


class TestHost(TierTests):
    """The memory of the host."""

    tier = Host


class TestDisk(TierTests):
    """A disk."""

    tier = Disk


class TestRedis(TierTests):
    """A server of Redis or Valkey."""

    tier = Redis


def test_every_tier_is_in_the_list():
    """Each registered tier is tested above."""
    assert {Disk.name, Host.name, Redis.name} == set(Plugins().names("tier"))
