"""The built-in tiers pass the tests that every tier must pass."""

from functools import partial

import pytest

from kvcore import Plugins
from kvcore.testing import TierTests
from kvcore_tiers.tier import Disk, Host, Redis
from kvcore_tiers.tier._sealing import HEADER_BYTES


class TestHost(TierTests):
    """A tier in the memory of the host."""

    tier = Host
    unchecked = True


class TestDisk(TierTests):
    """A tier on a disk."""

    tier = Disk
    survives = True

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path):
        self.path = tmp_path

    def open(self, *size, **options):
        """Open a store in the test's directory."""
        self.tier = partial(Disk, path=self.path)
        return super().open(*size, **options)

    def make(self, **options):
        """Build the tier, in the test's directory once `open` has been called."""
        return self.tier(**({"memory": 12000} | options))

    def pieces(self, block):
        """Yield the header and the K/V of a block, each with a function that overwrites it."""
        for suffix, size, at in (
            ("headers", HEADER_BYTES, block.slot + 1),
            ("slots", 1000, block.slot),
        ):
            (path,) = self.path.glob(f"*.{suffix}")

            def put(data, path=path, size=size, at=at):
                with path.open("r+b") as file:
                    file.seek(at * size)
                    file.write(data.ljust(size, b"\0"))

            with path.open("rb") as file:
                file.seek(at * size)
                yield file.read(size), put


class TestRedis(TierTests):
    """A tier on a server of Redis or Valkey."""

    tier = Redis
    survives = True

    @pytest.fixture(autouse=True)
    def _server(self, request):
        self.request = request

    def open(self, *size, **options):
        """Open a store on the test's server, which is empty."""
        url = self.request.getfixturevalue("redis_server").url
        self.request.getfixturevalue("redis_client")
        self.tier = partial(Redis, url=url)
        return super().open(*size, **options)

    def make(self, **options):
        """Build the tier, on the test's server once `open` has been called."""
        return self.tier(**({"memory": 12000} | options))

    def pieces(self, block):
        """Yield the fields of the block's hash, each with a function that overwrites it."""
        client = self.request.getfixturevalue("redis_client")
        (name,) = client.keys("*")
        for field, data in client.hgetall(name).items():
            yield data, partial(client.hset, name, field)


@pytest.mark.parametrize("tier", [Disk, Host, Redis])
def test_a_tier_is_itself_alone(tier):
    """Two tiers of equal options are two, since one serves one run; options have names."""
    assert len({tier(memory=9), tier(memory=9)}) == 2
    with pytest.raises(TypeError):
        tier("9GB", memory=9)


def test_every_tier_is_in_the_list():
    """Each registered tier is tested above."""
    assert {Disk.name, Host.name, Redis.name} == set(Plugins().names("tier"))
