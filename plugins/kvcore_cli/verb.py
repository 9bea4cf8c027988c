"""The parts of verbs: help pages with headings, types of values, completion by a shell.

Text for a terminal is escaped here, so that no file or server can control the terminal.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import click

from kvcore.errors import InputError
from kvcore.hookspecs import MODEL, OUTPUT, POLICIES, POOL, REQUESTS, STEPS
from kvcore.plugins.manager import Plugins
from kvcore.units import NS_PER_S, check_whole, parse_seconds, parse_whole
from kvcore.untrusted import escaped

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def flag_of(name: str) -> str:
    """Return the flag of an option by its name: `--block-size` of `block_size`."""
    return f"--{name.replace('_', '-')}"


def flags_of(params: Iterable[click.Parameter]) -> list[str]:
    """Return the flags of options, those that switch them off too, and names of arguments."""
    return [flag for param in params for flag in (*param.opts, *param.secondary_opts)]


COMMAND_LINE = "kvcore.command_line"
"""Key in a context's `meta`: the words of the command line behind `kvcore`."""

VerbT = TypeVar("VerbT", bound=Callable[..., Any])


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print `text` on stdout, or with `err` on stderr, with control characters escaped."""
    click.echo(escaped(text), file=None if err else results(), err=err, nl=nl)


def end_signals() -> list[signal.Signals]:
    """Return the signals that ask a verb to end: SIGHUP too, unless `nohup` ignores it."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    signals = [signal.Signals[name] for name in names if name in signal.Signals.__members__]
    return [sent for sent in signals if signal.getsignal(sent) is not signal.SIG_IGN]


_RESULTS = "kvcore.results"


def results() -> TextIO:
    """Return the stream for results: stdout at the start of the verb."""
    context = click.get_current_context(silent=True)
    return cast("TextIO", context.meta.get(_RESULTS, sys.stdout) if context else sys.stdout)


def results_alone(verb: VerbT) -> VerbT:
    """Return `verb` with stdout for results alone: output of plugins goes to stderr."""

    @wraps(verb)
    def called(*args: Any, **options: Any) -> Any:
        click.get_current_context().meta[_RESULTS] = sys.stdout
        with redirect_stdout(sys.stderr):
            return verb(*args, **options)

    return called  # type: ignore[return-value]


RENAMED = {
    "--count": "--accounting",
    "--kv-dtype": "--codec",
    "--prefix-cache-retention-interval": "--checkpoint",
}
"""Options of earlier releases, which are still accepted, and their present names."""


class Helped(click.Command):
    """A command whose `--help` is made without a search for translations of its text."""

    _help: click.Option | None = None

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option that shows the help page; None if its flags are other options'."""
        if self._help is None and (flags := self.get_help_option_names(ctx)):
            self._help = click.Option(
                [*flags, "_shows_help"],
                is_flag=True,
                expose_value=False,
                is_eager=True,
                help="Show this message and exit.",
                callback=_show_help,
            )
        return self._help


def _show_help(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Print the help page and exit, if its flag is given."""
    del param
    if value and not ctx.resilient_parsing:
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class VerbCommand(Helped):
    """The command of a verb. If it has many options, its help page has them under headings.

    Attributes:
        renamed: present names of options of earlier releases.
    """

    def __init__(
        self, *args: Any, renamed: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self.renamed = {**RENAMED, **(renamed or {})}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line; accept options under their earlier names with a notice."""
        own = {flag for param in self.params for flag in param.opts}
        ends = args.index("--") if "--" in args else len(args)
        for index, text in enumerate(args[:ends]):
            flag, equals, value = text.partition("=")
            now = self.renamed.get(flag)
            if now in own:
                echo(f"kvcore: {flag} is called {now} now; use that", err=True)
                args[index] = f"{now}{equals}{value}"
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description, with a paragraph on WORKLOAD if that is an argument."""
        super().format_help_text(ctx, formatter)
        arguments = (param.name for param in self.params if isinstance(param, click.Argument))
        if "workload" in arguments:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(WORKLOAD)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options under their headings."""
        listed: dict[str, list[tuple[str, str]]] = {heading: [] for heading in HEADINGS}
        params = self.get_params(ctx)
        few = len(params) < MANY
        for param in params:
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                heading = REST if few else _heading_of(param)
                listed.setdefault(heading, []).append(record)
        # The others keep their order.
        for heading in sorted(listed, key=lambda heading: (heading == REST, heading == OUTPUT)):
            if listed[heading]:
                with formatter.section(heading):
                    formatter.write_dl(listed[heading])


def _heading_of(param: click.Option) -> str:
    from kvcore.config.options import find_option  # noqa: PLC0415 - for help pages alone

    known = find_option(str(param.name))
    own: str = getattr(param, "heading", "")
    return own or (known.heading if known else "") or REST


def verb(
    *examples: str, more: str | None = None, **settings: Any
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a function a verb.

    Args:
        examples: command lines for the end of the help page.
        more: a paragraph below them.
        settings: as for `click.command`.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    epilog = "\n\n".join(filter(None, (f"\b\nExamples:\n{lines}", more)))
    settings = {"cls": VerbCommand, "context_settings": SHOWN, **settings}
    return click.command(epilog=epilog, **settings)


WORKLOAD = (
    "WORKLOAD is a workload plugin with options, such as zipf:requests=1000,skew=1.5, or a "
    "file of any known format; `-` reads stdin. Without it, it is the trace that comes with "
    "kvcore."
)
"""The paragraph of help pages on the argument WORKLOAD."""

WIDTH = 96
"""Largest number of columns of a help page."""

SHOWN = {"show_default": True, "max_content_width": WIDTH}

MANY = 14
"""Number of options from which on a help page has headings."""

REST = "Options"

HEADINGS = (REQUESTS, MODEL, POOL, POLICIES, STEPS)
"""The headings that come first on long help pages. `OUTPUT` comes last but for `REST`."""


class Flag(click.Option):
    """An option of a verb, with the heading that it has on long help pages.

    Without one it is listed under that of the option of a run that has its name, if any.
    """

    def __init__(self, *args: Any, heading: str = "", **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.heading = heading


class Unrecorded(Flag):
    """An option without which results are the same: where and how they are written, or made."""


option = partial(click.option, cls=Flag)
"""Return a decorator that gives a verb an option, which may have a `heading`."""


class Count(click.ParamType):  # type: ignore[type-arg]  # generic in new releases
    """A whole number of at least `least`, such as `8192`, `8k` or `1e5`."""

    name = "integer"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Read the text of a number, or check a number from a file."""
        try:
            is_text = isinstance(value, str)
            read = parse_whole if is_text else check_whole
            return read(value, self.least)
        except InputError as error:
            self.fail(str(error), param, ctx)


class Time(click.ParamType):  # type: ignore[type-arg]  # generic in new releases
    """A time such as `90`, `1.5` or `50ms`, in seconds; a verb receives it in ns."""

    name = "seconds"  # in help pages

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Read the text of a time, or a number of seconds from a file."""
        try:
            return parse_seconds(str(value))
        except InputError as error:
            self.fail(str(error), param, ctx)


class Seconds(Time):
    """A time above 0, such as `90`, `1.5` or `50ms`; a verb receives it in seconds."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a time as `Time` does; refuse 0."""
        time = super().convert(value, param, ctx) / NS_PER_S
        if not time:
            self.fail("must be above 0 seconds", param, ctx)
        return float(time)


def complete_workload(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the workload plugins that begin with `incomplete`; the shell adds files."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells alone

    names = complete_plugin("workload", ctx, param, incomplete)
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


def complete_plugin(
    kind: str, ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[str]:
    """Return the completions of the last plugin name in an option's value."""
    del ctx, param
    before, comma, begun = incomplete.rpartition(",")
    names = [name for name in Plugins().names(kind) if name.startswith(begun)]
    return [f"{before}{comma}{name}" for name in names]


def plugin_completion(kind: str, metavar: str = "PLUGIN") -> dict[str, Any]:
    """Return the settings of an option that names plugins of a kind, and completes them."""
    return {"metavar": metavar, "shell_complete": partial(complete_plugin, kind)}
