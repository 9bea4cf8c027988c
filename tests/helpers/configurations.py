"""Configurations of plugins, by text, for the kit of their kind."""

import pytest

from kvcore.plugins import resolve


def configured(kind, specs, about=lambda _: {}):
    """Return a class that gives a kit the plugins of `specs`: derive from it before the kit.

    `about(spec)` returns attributes of the kit, such as what plugins of the kind may not do.
    """

    class Configured:
        @pytest.fixture(autouse=True, params=specs)
        def _configured(self, request):
            self.spec = request.param
            vars(self).update(about(self.spec))

        def make(self):
            """Build the configured plugin."""
            return resolve(kind, self.spec)

    return Configured


def names(specs):
    """Return the names of the plugins in `specs`."""
    return {spec.partition(":")[0] for spec in specs}
