"""The policies of an analysis: names, classes, functions and Belady's bound as candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import partial
from itertools import combinations
from typing import Any, TypeAlias

import attrs

from kvcore.cache import CheckpointPolicy, EvictionPolicy
from kvcore.config import RunConfig
from kvcore.errors import InputError
from kvcore.plugins.base import Plugin, qualified
from kvcore.plugins.manager import Plugins, resolve
from kvcore.plugins.options import Spec, parse, spec_of
from kvcore.trace.fields import plain
from kvcore.workloads import Workload
from kvcore_replay.belady import Belady

Policy: TypeAlias = str | Belady | EvictionPolicy | Callable[[], EvictionPolicy]
"""A name with its options, the optimum, a policy, its class, or a function that builds one."""

Checkpoint: TypeAlias = str | CheckpointPolicy | Callable[[], CheckpointPolicy]
"""Checkpoint policies as text, one as an instance, its class, or a function that builds one."""


def copies(value: Any) -> Any:
    """Return a function that copies a plugin, which one run uses up; else the value."""
    if isinstance(value, Mapping):  # the options of some replicas
        return {name: copies(option) for name, option in value.items()}
    if type(value) is tuple:  # none with a name: a window that was text stays one
        return tuple(map(copies, value))
    used_up = isinstance(value, Plugin) and not isinstance(value, Workload)
    return partial(deepcopy, value) if used_up else value


def for_several_runs(config: RunConfig) -> RunConfig:
    """Return a configuration of which each run has copies of the plugins that are instances."""
    own = {name: copies(value) for name, value in config.options.items()}
    return config if own == config.options else config.changed(**own)


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
    candidates: list[Candidate], policies: Checkpoint | Iterable[Checkpoint], plugins: Plugins
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
    if isinstance(policies, str) or not isinstance(policies, Iterable):
        policies = [policies]
    for policy in policies:
        for given in parse(policy) if isinstance(policy, str) else [copies(policy)]:
            make = partial(resolve, "checkpoint", given, plugins=plugins)
            made = make()
            text = str(given if isinstance(given, Spec) else spec_of(made))
            limited += [
                attrs.evolve(candidate, checkpoint=text, make_checkpoint=make)
                for candidate in candidates
            ]
    return [*_distinct(limited), Candidate.bound(Belady(bypass=True))]


def candidates_of(
    policies: Policy | Iterable[Policy], plugins: Plugins, seed: int | None
) -> list[Candidate]:
    """Return the candidates that `policies` names, without repetitions.

    A policy that is given as an instance is copied for each pool.

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
        elif callable(make := copies(policy)):
            found.append(Candidate.building(make))
        else:
            msg = (
                f"{policy!r} cannot be compared: give a name, a policy, its class, or a "
                "function that builds one"
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
