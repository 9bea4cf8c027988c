"""Fewer random runs of a conformance kit, for kits that test many configurations."""

import pytest


class FewSeeds:
    """Give each test of a kit two seeds of its random input: derive from it before the kit."""

    @pytest.fixture(params=range(2))
    def seed(self, request):
        """Return a seed."""
        return request.param
