"""Fewer random runs of a conformance kit, for tests that run many kits or configurations."""

import pytest


class FewSeeds:
    """Give each test of a kit one seed for a configuration: derive from it before the kit."""

    @pytest.fixture
    def seed(self, request):
        """Return a seed, another one for the next configuration."""
        callspec = getattr(request.node, "callspec", None)
        return sum(callspec.indices.values()) % 8 if callspec else 0


class FirstSeeds:
    """A plugin of pytest: of tests of random input it runs those of the first seed alone."""

    @staticmethod
    def pytest_collection_modifyitems(items):
        """Leave out the items of other seeds."""
        items[:] = [item for item in items if not seed_of(item)]


def seed_of(item):
    """Return the seed of a test, or 0 if it has none."""
    return item.callspec.params.get("seed", 0) if hasattr(item, "callspec") else 0
