"""The frame of the command line: finds the verb, turns errors into exit codes."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from errno import ENOSPC
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from kvcore.cli.terminal import echo
from kvcore.errors import KvcoreError, PluginError
from kvcore.plugins.options import nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBS = {
    "calibrate": "kvcore.cli.calibrate",
    "compare": "kvcore.cli.compare",
    "curve": "kvcore.cli.curve",
    "demo": "kvcore.cli.demo",
    "explain": "kvcore.cli.explain",
    "export": "kvcore.cli.export",
    "plugins": "kvcore.cli.plugins",
    "record": "kvcore.cli.record",
    "replay": "kvcore.cli.replay",
    "run": "kvcore.cli.run",
    "simulate": "kvcore.cli.simulate",
    "size": "kvcore.cli.size",
    "sweep": "kvcore.cli.sweep",
}
"""Where each verb is: a module with a click command of the verb's name."""

USAGE, UNABLE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 3, 130, 141, 143
"""Exit codes besides an error's own; the last three are those a shell gives for the signal."""


class Terminated(KeyboardInterrupt):
    """Raised when the process is asked to end (SIGTERM): files are dropped as for Ctrl-C."""


class Verbs(click.Group):
    """A click group that imports a verb's module only when the verb is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs, sorted."""
        del ctx
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Return the command of a verb, or fail with the nearest one."""
        if cmd_name not in VERBS:
            ctx.fail(f"there is no verb {cmd_name!r}{nearest(cmd_name, VERBS)}")
        command: click.Command = getattr(import_module(VERBS[cmd_name]), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs with the whole of their first sentences."""
        verbs = {verb: self.get_command(ctx, verb) for verb in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (verb, command.get_short_help_str(sys.maxsize))
                    for verb, command in verbs.items()
                ]
            )


def print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:  # noqa: FBT001
    """Print the installed version, and end."""
    if not wanted or ctx.resilient_parsing:
        return
    from importlib import metadata  # noqa: PLC0415 - slow, and no verb needs it

    try:
        click.echo(f"kvcore {metadata.version('kvcore')}")
    except metadata.PackageNotFoundError as error:
        msg = "kvcore is not installed, so it has no version; run `pip install -e .`"
        raise PluginError(msg) from error
    ctx.exit()


@click.group(cls=Verbs, invoke_without_command=True)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_version,
    help="Print the version and exit.",
)
@click.pass_context
def kvcore(ctx: click.Context) -> None:
    """Study the KV cache of LLM serving: what fits, what hits, and which policy does best."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """Run the command line and exit: the `kvcore` program."""
    _replace_missing_streams()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    code = run(sys.argv[1:])
    # What is left goes with the process: looking through it for cycles takes 20 ms.
    gc.freeze()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors are printed on stderr.

    A reader of stdout that goes away early is no error. Errors of kvcore's own
    making (bugs) are not caught.
    """
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except KvcoreError as error:
        return _fail(f"error: {error}", error.exit_code)
    except click.ClickException as error:
        return _fail(_usage(error), USAGE)
    except (KeyboardInterrupt, click.Abort) as error:
        asked = isinstance(error, Terminated)
        return _fail("terminated", TERMINATED) if asked else _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return BROKEN_PIPE
    except OSError as error:
        return _fail(f"error: {_reason(error)}", USAGE if _unusable(error) else UNABLE)
    finally:
        _discard_unwritable()
    return code


def _invoke(arguments: Sequence[str]) -> int:
    try:
        with kvcore.make_context("kvcore", list(arguments)) as context:
            kvcore.invoke(context)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    return 0


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def _usage(error: click.ClickException) -> str:
    context: click.Context | None = getattr(error, "ctx", None)
    hint = f"; try `{context.command_path} --help`" if context else ""
    return f"error: {error.format_message().rstrip('.')}{hint}"


def _reason(error: OSError) -> str:
    if _unusable(error):
        return f"{error.filename}: cannot be read: {error.strerror}"
    # Whatever else is written says its name in the error.
    place = error.filename or ("standard output" if error.errno == ENOSPC else None)
    reason = error.strerror or str(error)
    return f"{place}: {reason}" if place else reason


def _unusable(error: OSError) -> bool:
    """Return True if the error is about a file that is missing or may not be read."""
    kinds = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
    return isinstance(error, kinds) and error.filename is not None


def _fail(message: str, code: int) -> int:
    with suppress(OSError):
        echo(f"kvcore: {message}", err=True)
    return code


def _replace_missing_streams() -> None:
    """Open the null device for a closed stdout or stderr, lest a file takes its number."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - until the end


def _discard_unwritable() -> None:
    """Drop output that cannot be written, which Python would try to write again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
