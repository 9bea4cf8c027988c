"""The entry of the command line: finds the verb, and turns errors into exit codes."""

from __future__ import annotations

import codecs
import gc
import os
import signal
import sys
import warnings
from contextlib import redirect_stdout, suppress
from copy import copy
from errno import ENOSPC
from typing import TYPE_CHECKING, NoReturn

import click

from kvcore import native
from kvcore.distributions import version
from kvcore.errors import KvcoreError, PluginError
from kvcore.hookspecs import ASK, CHECK, LOOK, PLUMBING, REAL, Verb
from kvcore.plugins.base import FAILURES
from kvcore.plugins.manager import error_line, imported_place, installed
from kvcore.plugins.options import nearest
from kvcore_cli.verb import COMMAND_LINE, Helped, echo, end_signals, flags_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from click.shell_completion import CompletionItem

VERBS = {
    "plugins": Verb(
        "kvcore_cli.plugins:plugins",
        "List the plugins, all or those of a kind, where each is from, and whether it works "
        "here.",
        PLUMBING,
    ),
    "simulate": Verb(
        "kvcore_cli.simulate:simulate",
        "Simulate serving WORKLOAD: latency, throughput, goodput, hits, preemptions.",
        ASK,
    ),
}
"""The verbs that are always there. Packages add theirs by the hook `kvcore_commands`."""

GROUPS = (ASK, LOOK, CHECK, REAL, PLUMBING)
"""The order in which groups of verbs are listed; those of other packages follow."""

SYNONYMS = {
    f"--{other}": f"--{flag}"
    for flag, others in {
        "tensor-parallel": "tp tp-size tensor-parallel-size gpus num-gpus",
        "device": "gpu gpu-type",
        "eviction": "policy eviction-policy",
        "rate-scale": "qps rate request-rate speed",
        "limit": "num-requests num-prompts n requests",
        "codec": "kv-cache-dtype dtype kv-dtype",
        "block-size": "page-size",
        "blocks": "num-gpu-blocks-override num-blocks max-total-tokens",
        "memory": "kv-cache-memory-bytes gpu-memory-utilization mem-fraction-static",
        "max-tokens": "max-num-batched-tokens chunked-prefill-size batch-size",
        "max-seqs": "max-num-seqs max-running-requests",
        "scheduler": "schedule-policy scheduling-policy",
        "tier": "cpu-offload-gb kv-offloading-size swap-space hicache-size",
        "replicas": "dp data-parallel-size dp-size servers",
        "weights-dtype": "quantization",
        "no-chunked": "no-enable-chunked-prefill",
        "prefix": "enable-prefix-caching",
        "drafter": "speculative-config speculative-algorithm num-speculative-tokens",
        "prefix none": "no-enable-prefix-caching disable-radix-cache",
        "out": "output output-dir result-dir",
    }.items()
    for other in others.split()
}
"""Options by the names that they have in vLLM, SGLang and tools that measure servers."""

LOOK_AGAIN_SECONDS = 0.02
"""Time between two looks whether the exception of a signal can be raised, or is handled."""

USAGE, UNABLE, INTERRUPTED, BROKEN_PIPE, TERMINATED = 2, 3, 130, 141, 143
"""Exit codes besides those of errors; the last three are those of a shell for the signal."""

COMPLETE = "_KVCORE_COMPLETE"
"""Environment variable by which a shell asks for completions, as click defines it."""

PLAIN = str.maketrans(
    {
        "×": "x",
        "–": "-",
        "—": "-",
        "≈": "~",
        "·": "*",
        "²": "^2",
        "³": "^3",
        "…": "...",
        "µ": "u",
    }
    | dict(zip("▁▂▃▄▅▆▇█", "_.-=+*%#", strict=True))
)
"""ASCII for the characters that kvcore itself prints, where a stream cannot encode them."""


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM and SIGHUP: files are discarded as for Ctrl-C."""


class Verbs(Helped, click.Group):
    """A click group that imports a verb's module only when the verb is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs, sorted."""
        del ctx
        return sorted(known_verbs())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """Return the command of a verb; fail with the nearest verb if there is none.

        Raises:
            PluginError: the verb is of a package that cannot be loaded, or is perhaps.
        """
        if cmd_name == help_page.name:
            return help_page
        verbs = known_verbs()
        if cmd_name in verbs:
            command = loaded_verb(cmd_name)
            _name_faults("kvcore_modes", "kvcore_options")
            return command
        msg = f"there is no verb {cmd_name!r}{nearest(cmd_name, verbs)}"
        missing = installed().not_found("kvcore_commands", msg)
        if isinstance(missing, PluginError):
            raise missing
        raise click.UsageError(str(missing), ctx)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the verbs that begin with `incomplete`, without importing them."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells alone

        options = click.Command.shell_complete(self, ctx, incomplete)
        verbs = [verb for verb in self.list_commands(ctx) if verb.startswith(incomplete)]
        return [*map(CompletionItem, verbs), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs by group with their first sentences; name packages that fail."""
        del ctx
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, verb in sorted(known_verbs().items()):
            groups.setdefault(verb.group, []).append((name, verb.about))
        for group in dict.fromkeys(filter(groups.get, (*GROUPS, *groups))):
            with formatter.section(group):
                formatter.write_dl(groups[group])
        _name_faults(None, "kvcore_commands")


def known_verbs() -> Mapping[str, Verb]:
    """Return all verbs by name. One of the command line itself is never replaced."""
    with redirect_stdout(sys.stderr):  # plugins may print when they are loaded
        return {**installed().verbs({*VERBS, "help"}), **VERBS}


def loaded_verb(name: str) -> click.Command:
    """Return the command of a verb, with the options that packages add to it.

    Raises:
        PluginError: it cannot be imported, or is no click command.
    """
    import_path = known_verbs()[name].command
    try:
        # A copy: the command itself stays as it is, for other plugins may add other options.
        command = copy(imported_place(import_path))
    except FAILURES as error:
        if name in VERBS:
            raise
        msg = f"verb {name!r} cannot be loaded from {import_path}: "
        if isinstance(error, KvcoreError):  # such as an option of a package that is skipped
            msg += str(error)
            raise type(error)(msg) from error
        msg += f"{type(error).__name__}: {error}{error_line(error)}"
        raise PluginError(msg) from error
    if not isinstance(command, click.Command):
        msg = f"verb {name!r}: {import_path} is {command!r}, which is no click command"
        raise PluginError(msg)
    from kvcore_cli.options import added_options  # noqa: PLC0415 - the list of verbs does without

    with redirect_stdout(sys.stderr):
        added = added_options(name, installed(), command)
    command.params = [*command.params, *added]
    return command


def _name_faults(*hooks: str | None) -> None:
    """Print one line on stderr for each package of which something cannot be used here."""
    for fault in installed().faults(*hooks):
        echo(f"kvcore: {' '.join(fault.split())}", err=True)


def print_version(*, verbose: bool) -> None:
    """Print the installed version and the core; what that leaves to Python, if `verbose`."""
    installed = version("kvcore")
    if installed is None:
        msg = "kvcore is not installed, so it has no version; run `pip install -e .`"
        raise PluginError(msg)
    click.echo(f"kvcore {installed} (loop {native.state()})")
    if verbose:
        click.echo("\nThe loop in Python serves alone:\n")
        click.echo("\n".join(f"    {part}" for part in native.LACKS))
    if os.environ.get("KVCORE_COMPILE", "0") not in {"", "0"}:
        echo("kvcore: KVCORE_COMPILE does nothing any more; unset it", err=True)


@click.command("help")
@click.argument("words", nargs=-1, metavar="[VERB]")
@click.pass_context
def help_page(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show the help page of VERB, or of all."""
    assert ctx.parent is not None
    shown, command = ctx.parent, ctx.parent.command
    for word in words:
        child = command.get_command(shown, word) if isinstance(command, click.Group) else None
        if child is None:
            ctx.fail(f"{shown.command_path} has no {word!r}")
        command, shown = child, click.Context(child, info_name=word, parent=shown)
    click.echo(command.get_help(shown))


@click.group(
    cls=Verbs,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`kvcore help VERB` shows the options of a verb, with examples.",
)
@click.option(
    "--version", "shows_version", is_flag=True, help="Print the version and the core, and exit."
)
@click.option(
    "-v", "verbose", is_flag=True, help="With --version: what the core in C leaves to Python."
)
@click.pass_context
def kvcore(ctx: click.Context, *, shows_version: bool, verbose: bool) -> None:
    """Study the KV cache of LLM serving: what fits, what hits, and which policy does best."""
    if shows_version:
        print_version(verbose=verbose)
        ctx.exit()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """Run the command line of this process, and exit.

    Ctrl-C, SIGTERM and SIGHUP raise once the verb is loaded: an import may lose an exception.
    While the verb loads further modules, they raise when these are loaded, or the second time.
    """
    _prepare_streams()
    warnings.showwarning = _print_warning  # type: ignore[assignment]
    # torch warns on import if there is no numpy, which kvcore does not need.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    with suppress(KvcoreError):  # reported when the command line is read
        for verb in known_verbs().keys() & set(sys.argv[1:2]):
            loaded_verb(verb)
    for sent in end_signals():
        if signal.getsignal(sent) is signal.SIG_DFL:
            signal.signal(sent, _interrupt)
    before = signal.getsignal(signal.SIGINT)
    if callable(before):  # not ignored
        signal.signal(signal.SIGINT, _interrupt)
    # Imported objects are in no cycle that could be freed.
    gc.freeze()
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, before)
    # The process ends: a last search for cycles would take 20 ms.
    gc.freeze()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors are printed on stderr.

    Nothing is printed if the reader of stdout closes it early. Exceptions that are bugs of
    kvcore are not caught; those of packages become errors that name the package.
    """
    try:
        try:
            return _run(arguments)
        finally:
            _Repeat.stop()  # a signal may have come as the verb ended
    except (KeyboardInterrupt, click.Abort) as error:  # also while another error is told
        _Repeat.stop()  # here, where the timer raises nothing: it may have done so just above
        if where := _raised_by_code(error):
            return _fail(f"error: {where} raised KeyboardInterrupt", UNABLE)
        ended = isinstance(error, Terminated)
        return _fail("terminated", TERMINATED) if ended else _fail("interrupted", INTERRUPTED)
    finally:
        _discard_unwritable()


def _run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; all errors but interrupts are printed."""
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except KvcoreError as error:
        return _fail(f"error: {error}", error.exit_code)
    except click.Abort:
        raise
    except click.ClickException as error:
        return _fail(*_usage(error))
    except BrokenPipeError:
        code = BROKEN_PIPE
    except OSError as error:
        return _fail(f"error: {_reason(error)}", USAGE if _unusable(error) else UNABLE)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or not (bug := installed().bug(error)):
            raise
        code = _fail(f"error: {bug}", UNABLE)
    return code


def _invoke(arguments: Sequence[str]) -> int:
    if COMPLETE in os.environ:
        kvcore.main(list(arguments), "kvcore", COMPLETE)
    try:
        with kvcore.make_context("kvcore", list(arguments)) as context:
            context.meta[COMMAND_LINE] = tuple(arguments)
            kvcore.invoke(context)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    return 0


def _print_warning(message: Warning | str, *_: object) -> None:
    """Print a warning as one line, without its place in the code."""
    echo(f"kvcore: {message}", err=True)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt or `Terminated` for a signal, once no module is being loaded.

    A signal that comes a second time raises at once.
    """
    repeat = _Repeat(signal_number)
    if hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.signal(signal.SIGALRM, repeat)
        signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN_SECONDS, LOOK_AGAIN_SECONDS)
        if _is_loading(frame):
            return
    raise repeat.error


class _Repeat:
    """The handler of a timer: raises the exception of a signal until it is handled.

    The exception may be lost: a module may catch it while it loads, and code in C that calls
    Python may clear it. The verb may have a handler of its own by the time the timer looks.
    """

    def __init__(self, signal_number: int) -> None:
        self._number = signal_number
        self.error = KeyboardInterrupt if signal_number == signal.SIGINT else Terminated

    def __call__(self, _: int, frame: FrameType | None) -> None:
        if _is_loading(frame):
            return
        if signal.getsignal(self._number) is not _interrupt:
            self.stop()
            signal.raise_signal(self._number)
        elif _is_handled():
            self.stop()
        else:
            raise self.error

    @staticmethod
    def stop() -> None:
        """Stop the timer, if it is one of these."""
        if isinstance(signal.getsignal(getattr(signal, "SIGALRM", signal.SIGTERM)), _Repeat):
            signal.setitimer(signal.ITIMER_REAL, 0)


def _raised_by_code(error: BaseException) -> str | None:
    """Return the place that has raised an interrupt; None if a signal has.

    A signal's handler is the innermost function, or, in C, none: then the signal is known by
    the handler that `main` has not replaced.
    """
    handled = signal.getsignal(signal.SIGINT) is _interrupt
    from traceback import walk_tb  # noqa: PLC0415 - for errors alone

    *_, (frame, line) = walk_tb(error.__traceback__)
    code = frame.f_code
    if not handled or type(error) is not KeyboardInterrupt or code.co_filename == __file__:
        return None
    return f"{code.co_filename}:{line}, {code.co_name}"


def _is_handled() -> bool:
    """Return True if the running code handles a KeyboardInterrupt, or cleans up after it."""
    error: BaseException | None = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _is_loading(frame: FrameType | None) -> bool:
    """Return True if the code of `frame` runs within an import of a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _usage(error: click.ClickException) -> tuple[str, int]:
    """Return the message and the exit code of an error about a command line."""
    context: click.Context | None = getattr(error, "ctx", None)
    hint = f"; try `{context.command_path} --help`" if context else ""
    if isinstance(error, click.NoSuchOption) and context is not None:
        # Options that cannot be added have been named already.
        missing = installed().not_found("", _no_such_option(error.option_name, context))
        hint = "" if isinstance(missing, PluginError) else hint
        return f"error: {missing}{hint}", missing.exit_code
    # click lists choices a line each.
    message = " ".join(error.format_message().split())
    choices = getattr(getattr(getattr(error, "param", None), "type", None), "choices", ())
    wrong, among, _ = error.message.partition(" is not one of ")
    near = nearest(wrong.strip("'"), choices, 0.75)
    message = message.replace(among, near + among, 1) if among else message
    if not message.endswith("..."):
        message = message.removesuffix(".")
    return f"error: {message}{hint}", USAGE


def _no_such_option(flag: str, context: click.Context) -> str:
    """Return a sentence with the nearest option of this verb, or the verbs that have it."""
    own = flags_of(context.command.params)
    lacks = f"{context.command_path} has no option {flag!r}"
    if SYNONYMS.get(flag, "").partition(" ")[0] in own:
        return f"{lacks}; what comes nearest is {SYNONYMS[flag]}"
    if (name := flag.lstrip("-")) in own:
        return f"{lacks}: {name.upper()} is an argument, without a flag"
    others = []
    if context.parent is not None and not nearest(flag, own, 0.8):
        for verb in sorted(known_verbs().keys() - {context.command.name}):
            with suppress(KvcoreError):  # of a verb that cannot be loaded
                if flag in flags_of(loaded_verb(verb).params):
                    others.append(verb)
    hint = nearest(flag, own, 0.75)
    if others:
        verbs_named = ", ".join(f"`kvcore {verb}`" for verb in others)
        hint = f"; {verbs_named} {'has' if len(others) == 1 else 'have'} it"
    return f"{lacks}{hint}"


def _reason(error: OSError) -> str:
    if _unusable(error):
        return f"{error.filename}: cannot be read: {error.strerror}"
    # Other files are named in their errors.
    output = error.filename or ("standard output" if error.errno == ENOSPC else None)
    reason = error.strerror or str(error)
    return f"{output}: {reason}" if output else reason


def _unusable(error: OSError) -> bool:
    """Return True if the error is about a file that is missing or may not be read."""
    kinds = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
    return isinstance(error, kinds) and error.filename is not None


def _fail(message: str, code: int) -> int:
    with suppress(OSError):
        echo(f"kvcore: {message}", err=True)
    return code


def _prepare_streams() -> None:
    """Make stdout and stderr write any text, even if they are closed or have few characters."""
    codecs.register_error("kvcore", _plain)
    # click takes "ascii" for a mistake, and writes UTF-8 there.
    codecs.register(lambda name: _ascii() if name == "kvcore_ascii" else None)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next file that is opened would get its number
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - until the end
            continue
        if getattr(stream, "encoding", None) is None:  # takes any text, as `io.StringIO` does
            continue
        encoding = codecs.lookup(stream.encoding).name
        # The locale C has the last of these, with which UTF-8 writes the names of all files.
        if stream.errors in ("strict", "backslashreplace") or (
            stream.errors == "surrogateescape" and encoding != "utf-8"
        ):
            stream.reconfigure(
                encoding="kvcore_ascii" if encoding == "ascii" else stream.encoding,
                errors="kvcore",
            )


def _ascii() -> codecs.CodecInfo:
    """Return the ASCII codec under another name."""
    made = codecs.lookup("ascii")
    return codecs.CodecInfo(
        made.encode,
        made.decode,
        incrementalencoder=made.incrementalencoder,
        incrementaldecoder=made.incrementaldecoder,
        name="kvcore_ascii",
    )


def _plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return ASCII for characters that cannot be encoded: similar ones, or escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(PLAIN)
    return text.encode("ascii", "backslashreplace").decode(), error.end


def _discard_unwritable() -> None:
    """Discard output that cannot be written, so that Python does not try again at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
