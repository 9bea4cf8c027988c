"""The policies of an analysis: names, classes, functions and Belady's bound as candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations
from typing import Any, TypeAlias

import attrs

from kvcore.cache import CheckpointPolicy, EvictionPolicy
from kvcore.errors import InputError
from kvcore.plugins.base import qualified
from kvcore.plugins.manager import Plugins, resolve
from kvcore.plugins.options import Spec, parse
from kvcore.trace.fields import plain
from kvcore_replay.belady import Belady

Policy: TypeAlias = str | Belady | Callable[[], EvictionPolicy]
"""A name with its options, the optimum, a policy class, or a function that builds a policy."""


@attrs.frozen
class Candidate:
    """A policy to compare, or Belady's bound. Equal class and options make equal candidates.

    Attributes:
        kind: the class of the policy, or `Belady`.
        options: the options as JSON values.
        make: builds a new instance of the policy for each pool; None: it is the bound.
        optimum: the bound; None: it is a policy.
        checkpoint: the checkpoint policy of pools with cache groups, as text; None: the
            default.
        make_checkpoint: builds a new instance of it.
    """

    kind: type[EvictionPolicy | Belady]
    options: dict[str, Any]
    make: Callable[[], EvictionPolicy] | None = attrs.field(default=None, eq=False)
    optimum: Belady | None = None
    checkpoint: str | None = None
    make_checkpoint: Callable[[], CheckpointPolicy] = attrs.field(
        default=CheckpointPolicy, eq=False
    )

    @classmethod
    def building(cls, make: Callable[[], EvictionPolicy]) -> Candidate:
        """Return the candidate of `make`, which is called once to check that it works.

        Raises:
            InputError: it builds something else than an eviction policy.
            PluginError: the policy that it builds has no name.
        """
        policy = resolve("eviction", make)
        return cls(type(policy), plain(policy.options()), make=make)

    @classmethod
    def bound(cls, optimum: Belady) -> Candidate:
        """Return Belady's bound as a candidate."""
        return cls(Belady, optimum.options(), optimum=optimum)

    def build(self) -> EvictionPolicy:
        """Return a new instance of the policy; the candidate is not the bound."""
        assert self.make is not None
        return self.make()

    @property
    def name(self) -> str:
        """Name of the policy, or `optimum`."""
        return self.kind.name


def has_bound(candidates: Iterable[Candidate]) -> bool:
    """Return True if Belady's bound is among the candidates."""
    return any(policy.optimum is not None for policy in candidates)


def refuse_bound(candidates: Iterable[Candidate], accounting: str) -> None:
    """Raise InputError if Belady's bound is a candidate in another accounting than `keys`."""
    if accounting != "keys" and has_bound(candidates):
        msg = (
            f"the optimum is known in `keys` accounting alone, not in {accounting!r}: leave it "
            "out"
        )
        raise InputError(msg)


def with_checkpoints(
    candidates: list[Candidate], policies: str | Iterable[str], plugins: Plugins
) -> list[Candidate]:
    """Return each candidate with each of the checkpoint policies, and their bound at the end.

    Raises:
        InputError: a checkpoint policy that cannot be built; or one of eviction is a bound.
        PluginError: a plugin cannot be used here.
    """
    if has_bound(candidates):
        msg = "the optimum comes by itself with checkpoint policies: leave it out"
        raise InputError(msg)
    limited: list[Candidate] = []
    for text in [policies] if isinstance(policies, str) else policies:
        for spec in parse(text):
            make = partial(plugins.build, "checkpoint", spec, {})
            make()
            limited += [
                attrs.evolve(candidate, checkpoint=str(spec), make_checkpoint=make)
                for candidate in candidates
            ]
    return [*_distinct(limited), Candidate.bound(Belady(bypass=True))]


def candidates_of(
    policies: Policy | Iterable[Policy], plugins: Plugins, seed: int | None
) -> list[Candidate]:
    """Return the candidates that `policies` names, without repetitions.

    `seed` is the seed of named policies that have an option `seed` and do not set it.

    Raises:
        InputError: there is no policy, one cannot be built, or two have one name and options.
        PluginError: a plugin cannot be used here.
    """
    if isinstance(policies, str) or not isinstance(policies, Iterable):
        policies = [policies]
    found: list[Candidate] = []
    for policy in policies:
        if isinstance(policy, str):
            found.extend(_named(spec, plugins, seed) for spec in parse(policy))
        elif isinstance(policy, Belady):
            found.append(Candidate.bound(policy))
        elif callable(policy):
            found.append(Candidate.building(policy))
        else:
            msg = (
                f"{policy!r} cannot be compared: give a name, a policy class, or a function "
                "that builds a policy, since every pool needs one of its own"
            )
            raise InputError(msg)
    if not found:
        msg = "there is nothing to compare: name at least one eviction policy"
        raise InputError(msg)
    candidates = _distinct(found)
    for first, second in combinations(candidates, 2):
        if (first.name, first.options) == (second.name, second.options):
            msg = (
                f"two policies are named {first.name!r}, {qualified(first.kind)} and "
                f"{qualified(second.kind)}: give one of the classes another name"
            )
            raise InputError(msg)
    return candidates


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates without repetitions, in their order."""
    # Options are dicts, so that candidates have no hash.
    return [
        candidate for n, candidate in enumerate(candidates) if candidate not in candidates[:n]
    ]


def _named(spec: Spec, plugins: Plugins, seed: int | None) -> Candidate:
    if spec.name in Belady.names:
        return Candidate.bound(Belady.from_text(spec.options))
    defaults = {} if seed is None else {"seed": seed}
    return Candidate.building(partial(plugins.build, "eviction", spec, defaults))
