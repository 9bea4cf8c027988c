"""Fewer random runs of a conformance kit, for kits that test many configurations."""

import pytest


class FewSeeds:
    """Give each test of a kit one seed for a configuration: derive from it before the kit."""

    @pytest.fixture
    def seed(self, request):
        """Return a seed, another one for the next configuration."""
        return sum(request.node.callspec.indices.values()) % 8
