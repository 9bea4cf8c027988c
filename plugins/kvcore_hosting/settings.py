"""Settings of the engine adapters, from the environment: the policy, and the recording."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvcore.cache import EvictionPolicy
from kvcore.errors import InputError
from kvcore.plugins import resolve
from kvcore.untrusted import load_toml

EVICTION = "KVCORE_EVICTION"
"""Variable with the policy: a name with options, or the path of a TOML file of settings."""

TRACE = "KVCORE_TRACE"
"""Variable with the path of the recording; without it nothing is recorded."""


@attrs.frozen
class HostSettings:
    """The settings of an adapter.

    Engines load an adapter by the name of a class, without options, in processes that they
    start themselves: so its settings are in the environment.

    Attributes:
        eviction: name of the policy, with options, such as `slru:protected=0.8`.
        trace: path of the recording; None: decisions are not recorded.
    """

    eviction: str = "lru"
    trace: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> HostSettings:
        """Return the settings in `KVCORE_EVICTION` and `KVCORE_TRACE`.

        Raises:
            InputError: no such policy or option, or a file that cannot be read.
            PluginError: the policy is broken.
        """
        environment = os.environ if environment is None else environment
        eviction = environment.get(EVICTION, "").strip()
        settings = _read(eviction) if eviction.endswith(".toml") else {"eviction": eviction}
        trace = environment.get(TRACE) or settings.get("trace")
        settings_read = cls(settings.get("eviction") or "lru", Path(trace) if trace else None)
        try:
            settings_read.build()
        except InputError as error:
            msg = f"{EVICTION}={eviction!r}: {error}"
            raise InputError(msg) from error
        return settings_read

    def build(self) -> EvictionPolicy:
        """Return a new policy."""
        policy: EvictionPolicy = resolve("eviction", self.eviction)
        return policy


def _read(path: str) -> dict[str, str]:
    """Return the settings of a TOML file."""
    try:
        settings = load_toml(Path(path))
    except (OSError, ValueError) as error:
        msg = f"{EVICTION}={path!r} cannot be read: {error}"
        raise InputError(msg) from error
    known = [field.name for field in attrs.fields(HostSettings)]
    for name, value in settings.items():
        if name not in known or not isinstance(value, str):
            msg = (
                f"{path}: {name} = {value!r} is no setting; there are, as text: eviction, trace"
            )
            raise InputError(msg)
    return settings
