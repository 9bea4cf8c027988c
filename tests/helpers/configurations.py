"""Configurations of plugins, by text, for the kit of their kind."""

from functools import cache

import pytest

from kvcore import Plugins
from kvcore.plugins import resolve


@cache
def registered(kind):
    """Return the names of the plugins of a kind."""
    return set(Plugins().names(kind))


def configured(kind, specs, about=lambda _: {}, *, elsewhere=(), defaults=False):
    """Return a class that gives a kit the plugins of `specs`: derive from it before the kit.

    `about(spec)` returns attributes of the kit, such as what plugins of the kind may not do.
    Each registered plugin must be in `specs`, with `defaults` by its name alone as well, unless
    it is one of those that are tested `elsewhere`.
    """
    tested = {spec if defaults else spec.partition(":")[0] for spec in specs}

    class Configured:
        @pytest.fixture(autouse=True, params=specs)
        def _configured(self, request):
            missing = registered(kind) - tested - {*elsewhere}
            assert not missing, f"{kind} plugins without a configuration: {missing}"
            self.spec = request.param
            vars(self).update(about(self.spec))

        def make(self):
            """Build the configured plugin."""
            return resolve(kind, self.spec)

    return Configured
