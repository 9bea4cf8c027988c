"""What takes part in a comparison: policies by name, class or function, and the optimum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import attrs

from kvcore.errors import InputError
from kvcore.lab.optimum import Optimum
from kvcore.plugins import Plugins, check_name
from kvcore.policy import EvictionPolicy
from kvcore.specs import Spec, parse
from kvcore.trace.fields import plain

Policy: TypeAlias = str | Optimum | Callable[[], EvictionPolicy]
"""A name with its options, the optimum, a policy class, or a function that builds a policy."""


@attrs.frozen
class Contender:
    """A policy to be built afresh for every pool, or the optimum.

    Attributes:
        kind: its class.
        options: its options, as JSON has them.
        make: what builds it, or the optimum itself. Contenders of equal class and options
            are equal.
    """

    kind: type[EvictionPolicy | Optimum]
    options: dict[str, Any]
    make: Callable[[], EvictionPolicy] | Optimum = attrs.field(eq=False)

    @classmethod
    def building(cls, make: Callable[[], EvictionPolicy]) -> Contender:
        """Return the contender that `make` builds; it is called once, to see that it works.

        Raises:
            PluginError: what it builds has no name.
        """
        policy = make()
        check_name(type(policy))
        return cls(type(policy), plain(policy.options()), make)

    @classmethod
    def bound(cls, optimum: Optimum) -> Contender:
        """Return the optimum as a contender."""
        return cls(Optimum, optimum.options(), optimum)

    @property
    def name(self) -> str:
        """The name of the policy, or `optimum`."""
        return self.kind.name


def contenders(
    policies: Policy | Iterable[Policy], plugins: Plugins, seed: int | None
) -> list[Contender]:
    """Return what `policies` names, one or several, each once.

    `seed` is that of the named policies with an option `seed` that do not set it.

    Raises:
        InputError: none at all, or one that cannot be built as given.
        PluginError: a plugin that cannot work here.
    """
    if isinstance(policies, str) or not isinstance(policies, Iterable):
        policies = [policies]
    found: list[Contender] = []
    for policy in policies:
        if isinstance(policy, str):
            found.extend(_named(spec, plugins, seed) for spec in parse(policy))
        elif isinstance(policy, Optimum):
            found.append(Contender.bound(policy))
        elif callable(policy):
            found.append(Contender.building(policy))
        else:
            msg = (
                f"{policy!r} cannot be compared: give a name, a policy class, or a function "
                "that builds a policy, since every pool needs one of its own"
            )
            raise InputError(msg)
    if not found:
        msg = "there is nothing to compare: name at least one eviction policy"
        raise InputError(msg)
    return [one for place, one in enumerate(found) if one not in found[:place]]


def _named(spec: Spec, plugins: Plugins, seed: int | None) -> Contender:
    if spec.name == Optimum.name:
        return Contender.bound(Optimum.from_text(spec.options))
    defaults = {} if seed is None else {"seed": seed}
    return Contender.building(partial(plugins.build, "eviction", spec, defaults))
