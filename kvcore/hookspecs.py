"""The hooks: one for each kind of plugin, and those that add to the command line.

The hook of a kind returns classes derived from `Plugin`, or the places of classes by the names
of plugins. A place is a text such as `package.module:Class`. The class is imported when it is
first used: the names of plugins are known without an import.

In the order in which a command calls them (`kvcore.simulate` calls those of kinds alone):

    kvcore_commands    the command line begins
    kvcore_modes       a verb is loaded that has the options of modes
    kvcore_options     then: packages add options to this verb
    those of kinds     a plugin of the kind is looked up for the first time
    kvcore_formats     the workload is a file, whose format is to be recognised
    kvcore_running     workload, model and pool are known, and nothing is served yet
    kvcore_ran         the run has ended, and its report is not printed yet
"""

# Specifications have no body: pluggy reads their names and signatures.
# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pluggy

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kvcore.plugins.base import Plugin

PROJECT = "kvcore"
"""Name of the pluggy project, and of the entry-point group of plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as an implementation of the hook of the same name."""


REQUESTS, MODEL, POOL = "Requests", "Model and device", "Pool"
POLICIES, STEPS, OUTPUT = "Policies", "Steps", "Output"
"""Headings for options on help pages. A package may have others."""


ASK, LOOK, CHECK, REAL, PLUMBING = "Ask", "Look", "Check", "Real", "Plumbing"
"""Groups of verbs in the list of them: questions to a simulation; pictures and pages; whether
something is right; servers and tensors; files and plugins."""


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        command: the place of its click command, which is imported when the verb is used.
        about: one sentence on what it does, for the list of verbs.
        group: the group of that list which it is in.
    """

    command: str
    about: str
    group: str = "Others"


class Mode(NamedTuple):
    """A way in which a configuration is run.

    A configuration names its mode. One that names `simulate` is run in another mode if an
    option chooses that, by a value other than its default.

    Attributes:
        parts: the place of its class derived from `RunParts`, whose `run` serves a workload.
        report: the place of the function that makes the report of a result, for people, from
            the result and its document; empty: that of a run on one server.
        options: the place of a TypedDict of the options that it adds; empty: none.
        chosen_by: those of its options that choose it; empty: it can only be named.
        defaults: defaults of options, where they are others than elsewhere.
        refusal: the end of the error where an option of `chosen_by` is given, and the run
            cannot be in this mode: why not, and what to do.
        missing: the end of the error where another option of this mode is given, and none of
            `chosen_by`: why it has no effect, and what to give too.
    """

    parts: str = "kvcore.config.parts:RunParts"
    report: str = ""
    options: str = ""
    chosen_by: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    refusal: str = ""
    missing: str = ""


class Running(NamedTuple):
    """The part of a package in a run that is under way.

    Attributes:
        recorder: the `Recorder` of the run in place of its trace, which this then writes.
        ran: called with the result of the run and its document, before files are closed.
        shows: whether it shows the run on the terminal, so that no progress is shown.
        silences: whether it prints on stdout, so that no report and no JSON is printed.
    """

    recorder: Any = None
    ran: Callable[[Any, dict[str, Any]], object] | None = None
    shows: bool = False
    silences: bool = False


class Ran(NamedTuple):
    """The words of a package on a run that has ended.

    Attributes:
        fields: fields of its JSON document; a table is added to one of the same name.
        sections: sentences and tables below its report: those of `kvcore.sections`.
        later: returns more, which takes a while to compute; called when files are written and
            the report is printed.
    """

    fields: Mapping[str, Any] = {}
    sections: Sequence[Any] = ()
    later: Callable[[], Ran] | None = None


@hookspec
def kvcore_eviction_policies() -> list[type[Plugin]] | dict[str, str]:
    """Return eviction policies, which choose the cached blocks to evict from a full pool."""


@hookspec
def kvcore_prefix_indexes() -> list[type[Plugin]] | dict[str, str]:
    """Return prefix indexes, which look up the cached blocks of a prompt."""


@hookspec
def kvcore_retention_policies() -> list[type[Plugin]] | dict[str, str]:
    """Return retention policies: which K/V of a running sequence is kept, and what is read."""


@hookspec
def kvcore_schedulers() -> list[type[Plugin]] | dict[str, str]:
    """Return schedulers, which order waiting jobs, and choose jobs to preempt."""


@hookspec
def kvcore_rules() -> list[type[Plugin]] | dict[str, str]:
    """Return the rules of engines, which plan the steps of a server."""


@hookspec
def kvcore_latency_models() -> list[type[Plugin]] | dict[str, str]:
    """Return latency models, which compute the time of a step of a server."""


@hookspec
def kvcore_backends() -> list[type[Plugin]] | dict[str, str]:
    """Return backends, which store K/V as tensors, and compute attention over it."""


@hookspec
def kvcore_codecs() -> list[type[Plugin]] | dict[str, str]:
    """Return codecs, which encode the numbers of K/V in a block."""


@hookspec
def kvcore_tiers() -> list[type[Plugin]] | dict[str, str]:
    """Return tiers, which store blocks outside the pool."""


@hookspec
def kvcore_generators() -> list[type[Plugin]] | dict[str, str]:
    """Return generators, models that compute K/V and the next tokens from tokens."""


@hookspec
def kvcore_workloads() -> list[type[Plugin]] | dict[str, str]:
    """Return workloads, sources of recorded or generated requests."""


@hookspec
def kvcore_formats() -> dict[str, list[set[str]]]:
    """Return fields of files that are of one workload alone, by the name of the workload.

    A file whose first lines are JSON objects of exactly these fields, or whose first line has
    exactly these columns, is of that workload: others that have entries are not imported.
    """


@hookspec
def kvcore_routers() -> list[type[Plugin]] | dict[str, str]:
    """Return routers, which choose the server of a cluster for a request."""


@hookspec
def kvcore_drafters() -> list[type[Plugin]] | dict[str, str]:
    """Return drafters, which propose tokens for speculative decoding."""


@hookspec
def kvcore_checkpoint_policies() -> list[type[Plugin]] | dict[str, str]:
    """Return checkpoint policies, which choose where windows and states are kept."""


@hookspec
def kvcore_commands() -> dict[str, Verb]:
    """Return verbs of the command line, by name."""


@hookspec
def kvcore_modes() -> dict[str, Mode]:
    """Return modes, ways in which a configuration is run, by name."""


@hookspec
def kvcore_options(verb: str) -> list[Callable[[Any], Any]]:
    """Return options to add to a verb: what `click.option` returns."""


@hookspec
def kvcore_running(
    parts: Any, given: Mapping[str, Any]
) -> AbstractContextManager[Running] | None:
    """Called before a run of the command line; return what is entered around it, or None.

    `parts` are its `RunParts`, and `given` the options of the verb by name. An implementation
    that cannot do its part raises InputError here: no request has been served yet.
    """


@hookspec
def kvcore_ran(parts: Any, result: Any, given: Mapping[str, Any]) -> Ran | None:
    """Called after a run of the command line; return what to add to its report, or None.

    `parts` and `given` are those of `kvcore_running`, and `result` is what `kvcore.simulate` or
    the call of its mode returns.
    """
