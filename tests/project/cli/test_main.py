"""Tests of the frame of the command line: verbs, exit codes, streams and signals."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from helpers.commands import run_here

from kvcore import native
from kvcore.errors import InputError, OutOfBlocks, PluginError, TraceError
from kvcore.hookspecs import Verb
from kvcore_cli import main as frame

IMPORTS = """
import ctypes, os, signal, sys, types, click
from pathlib import Path
from kvcore_cli import main
from kvcore.trace import Trace
"""


def program(verb):
    """Return a program with a verb `talk`, from the source of its function."""
    registered = """
sys.modules["talk"] = types.SimpleNamespace(talk=talk)
main.VERBS["talk"] = main.Verb("talk:talk", "Talk.")
main.main()
"""
    return IMPORTS + verb + registered


TALK = program("""
@click.command()
@click.argument("words", type=int)
def talk(words):
    click.echo("word " * words)
""")

MURMURS = program("""
@click.command()
def talk():
    try:
        sys.stderr.write("a word\\n")
    except OSError:
        pass
""")

ASKED_TO_END = program("""
@click.command()
@click.argument("file")
def talk(file):
    with Trace(file):
        assert Path(f"{file}.part").exists()
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
""")

CLEARED_IN_C = program("""
class Odd:
    def __getattr__(self, name):
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
        return sum(range(10**6))

@click.command()
@click.argument("number")
def talk(number):
    # The timer must not look before the verb waits for it, however slow the machine is.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    # PyObject_HasAttrString returns 0 for whatever exception.
    assert not ctypes.pythonapi.PyObject_HasAttrString(ctypes.py_object(Odd()), b"name")
    print("cleared", flush=True)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        while True:
            pass
    finally:
        while any(signal.getitimer(signal.ITIMER_REAL)):
            pass  # until the timer has looked
        print("ended", flush=True)
""")

ASKED_TO_END_BY_A_MODULE = program("""
@click.command()
def talk():
    import swallows
    while True:
        pass
""")


@pytest.fixture
def verb(monkeypatch):
    """Return a function that defines a verb `act`, which raises or prints its argument."""

    def define(outcome, about="Do what the test says."):
        @click.command()
        @click.option("--times", type=int, default=1)
        def act(times):
            """Do what the test says."""
            if isinstance(outcome, BaseException):
                raise outcome
            click.echo(outcome * times)

        act_ = Verb("verb_of_a_test:act", about)
        monkeypatch.setattr(frame, "known_verbs", lambda: {"act": act_})
        monkeypatch.setitem(sys.modules, "verb_of_a_test", SimpleNamespace(act=act))

    return define


def test_verb_runs(verb, capsys):
    """A verb receives its options, its output goes to stdout, and the exit code is 0."""
    verb("done")
    assert frame.run(["act", "--times", "2"]) == 0
    assert capsys.readouterr() == ("donedone\n", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "cp437", "utf-8"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("words", [["simulate", "zipf:requests=50"], ["sweep", "--help"]])
def test_output_fits_any_encoding(monkeypatch, encoding, errors, words):
    """A character that an encoding lacks is written as similar ASCII, without an error.

    `surrogateescape` is the error handler of streams in the locale C.
    """
    stream = TextIOWrapper(BytesIO(), encoding, errors, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    frame._prepare_streams()
    assert frame.run(words) == 0
    text = stream.buffer.getvalue().decode(encoding)
    assert "\\u" not in text
    assert ("over time" in text) is (words[0] == "simulate")


def test_output_goes_to_a_stream_without_an_encoding(monkeypatch):
    """A stream of text alone, as a browser's Python has one, is written to as it is."""
    stream = StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    frame._prepare_streams()
    click.echo("ü × ▁")
    assert stream.getvalue() == "ü × ▁\n"


def test_names_that_cannot_be_encoded_are_escaped(monkeypatch):
    """A character without a similar one in ASCII is escaped by its number."""
    stream = TextIOWrapper(BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    frame._prepare_streams()
    click.echo("ü × ▁")
    assert stream.buffer.getvalue() == b"\\xfc x _\n"


@pytest.mark.parametrize(
    "words", [["-h"], ["help"], ["help", "demo", "paging"], ["size", "-h"]]
)
def test_h_and_help_print_the_help_page(words, capsys):
    """`-h` and `help` print the help page of kvcore or of a verb."""
    assert frame.run(words) == 0
    wanted = [word for word in words if word not in ("-h", "help")]
    page = capsys.readouterr().out
    assert page.startswith(f"Usage: {' '.join(['kvcore', *wanted])} ")
    assert ":" not in page.splitlines()  # a heading without a name


@pytest.mark.parametrize("verb_name", frame.known_verbs())
def test_help_pages_end_with_examples_that_can_be_read(verb_name, capsys):
    """The help page of each verb ends with examples that use options of the page."""
    assert frame.run([verb_name, "--help"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 96
    if verb_name == "demo":
        return
    _, _, examples = page.partition("Examples:\n")
    lines = [line.split("| ")[-1] for line in examples.splitlines() if " kvcore " in f" {line}"]
    assert lines
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["kvcore", verb_name]
        assert all(word in page for word in words if word.startswith("--"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("kvcore si", ["simulate", "size"]),
        ("kvcore simulate --tens", ["--tensor-parallel"]),
        ("kvcore simulate --scheduler s", ["sjf", "slo", "srpt"]),
        ("kvcore compare --eviction lru,lf", ["lru,lfu"]),
        ("kvcore compare zi", ["zipf", "zi"]),
        ("kvcore run --backend torch-cp", ["torch-cpu"]),
    ],
)
def test_a_shell_completes_verbs_options_and_plugins(monkeypatch, capsys, words, expected):
    """Shell completion in bash proposes verbs, options and names of plugins."""
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    monkeypatch.setenv(frame.COMPLETE, "bash_complete")
    with pytest.raises(SystemExit):
        frame.run([])
    found = capsys.readouterr().out.split()
    assert [line.partition(",")[2] for line in found] == expected


def test_the_script_for_a_shell_is_printed(monkeypatch, capsys):
    """`_KVCORE_COMPLETE=zsh_source kvcore` prints the completion script of zsh."""
    monkeypatch.setenv(frame.COMPLETE, "zsh_source")
    with pytest.raises(SystemExit):
        frame.run([])
    assert "#compdef kvcore" in capsys.readouterr().out


def ended(program, *words, modules=""):
    """Run a program, which finds `modules` first, to its end; return its process."""
    path = os.pathsep.join(filter(None, (str(modules), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_ctrl_c_while_modules_load_exits_130(tmp_path):
    """Ctrl-C while modules load exits with code 130 and no traceback."""
    (tmp_path / "pluggy.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    )
    program = "from kvcore.__main__ import main; main()"
    done = ended(program, "simulate", modules=tmp_path)
    assert (done.returncode, done.stderr) == (130, "kvcore: interrupted\n")


def test_an_interrupt_that_no_signal_has_raised_is_an_error(tmp_path):
    """A KeyboardInterrupt raised by code is told as an error of that code, with its place."""
    policy = tmp_path / "policy.py"
    policy.write_text(
        "from kvcore_plugins.eviction import FIFO\n"
        "def victim(self, *_):\n"
        "    raise KeyboardInterrupt\n"
        "FIFO.victim = victim\n"
    )
    words = ["simulate", "zipf:requests=40", "--blocks", "160", "--eviction", "fifo"]
    program = "import policy; from kvcore.__main__ import main; main()"
    done = ended(program, *words, modules=tmp_path)
    expected = f"kvcore: error: {policy}:3, victim raised KeyboardInterrupt\n"
    assert (done.returncode, done.stderr) == (3, expected)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("raise GeneratorExit", 4),
        ("class Mine(LRU):\n    name = 'mine'\n    def __init__(self): raise GeneratorExit", 6),
    ],
    ids=["import", "constructor"],
)
def test_what_a_plugin_of_a_file_raises_is_an_error(tmp_path, code, line):
    """An error that is no Exception, as a panic in Rust is, is told with its place."""
    policy = tmp_path / "policy.py"
    policy.write_text(f"from kvcore_plugins.eviction import LRU\n\n\n{code}\n")
    done = run_here("simulate", "zipf:requests=3", "--eviction", f"{policy}:Mine")
    expected = f"kvcore: error: a plugin raised GeneratorExit() ({policy}:{line})\n"
    assert (done.returncode, done.stderr) == (3, expected)


def test_sigterm_while_a_verb_loads_ends_the_process(tmp_path):
    """SIGTERM while a verb loads kills the process, since a module might catch an exception."""
    (tmp_path / "talk.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    program = (
        "from kvcore_cli import main; "
        "main.VERBS['talk'] = main.Verb('talk:talk', 'Talk.'); main.main()"
    )
    done = ended(program, "talk", modules=tmp_path)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


SIGNALS = pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        ("SIGINT", 130, "interrupted"),
        ("SIGTERM", 143, "terminated"),
        ("SIGHUP", 143, "terminated"),
    ],
)


@SIGNALS
def test_a_signal_while_a_verb_loads_modules_is_not_lost(tmp_path, number, code, word):
    """A signal is not lost in a module that catches all exceptions on import, as torch does."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\n"
        "try:\n"
        f"    os.kill(os.getpid(), signal.{number})\n"
        "    sum(range(10**6))\n"
        "except BaseException:\n"
        "    pass\n"
    )
    done = ended(ASKED_TO_END_BY_A_MODULE, "talk", modules=tmp_path)
    assert (done.returncode, done.stderr) == (code, f"kvcore: {word}\n")


@SIGNALS
def test_a_signal_that_code_in_c_clears_is_not_lost(number, code, word):
    """A signal whose exception code in C clears ends the verb all the same, and once."""
    done = ended(CLEARED_IN_C, "talk", number)
    # Before its line newer Pythons tell of the exception that was cleared.
    told = [line for line in done.stderr.splitlines() if line.startswith("kvcore: ")]
    assert (done.returncode, told) == (code, [f"kvcore: {word}"])
    assert done.stdout == "cleared\nended\n"


def test_no_verb_prints_help(verb, capsys):
    """Without a verb kvcore prints its help on stdout, with a summary of each verb."""
    verb("done")
    assert frame.run([]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Usage: kvcore [OPTIONS] ")
    assert "act  Do what the test says." in out
    assert err == ""


def test_other_verbs_are_not_imported(monkeypatch, verb):
    """Running one verb does not import the module of another."""
    verb("done")
    monkeypatch.setitem(frame.VERBS, "other", Verb("module_that_does_not_exist:other", "Do."))
    assert frame.run(["act"]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("no such thing"), 2),
        (PluginError("broken"), 3),
        (OutOfBlocks("full"), 3),
        (TraceError("t.jsonl:3: bad"), 1),
    ],
    ids=["input", "plugin", "blocks", "trace"],
)
def test_own_errors_are_one_message(verb, capsys, error, code):
    """An error of kvcore is one message on stderr, with the exit code of its class."""
    verb(error)
    assert frame.run(["act"]) == code
    assert capsys.readouterr() == ("", f"kvcore: error: {error}\n")


@pytest.mark.parametrize(
    ("arguments", "message", "command"),
    [
        (
            ["act", "--tmies", "2"],
            "no option '--tmies' (did you mean '--times'?)",
            "kvcore act",
        ),
        (["act", "--times", "x"], "'x' is not a valid integer", "kvcore act"),
        (["acts"], "there is no verb 'acts' (did you mean 'act'?)", "kvcore"),
        (["--verison"], "did you mean '--version'?", "kvcore"),
    ],
)
def test_usage_errors_exit_2(verb, capsys, arguments, message, command):
    """An invalid command line exits with code 2, the reason and the command for help."""
    verb("done")
    assert frame.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcore: error: ")
    assert message in err
    assert err.endswith(f"; try `{command} --help`\n")


def test_interrupt_exits_130(verb, capsys):
    """Ctrl-C ends a verb with exit code 130 and without a traceback."""
    verb(KeyboardInterrupt())
    assert frame.run(["act"]) == 130
    assert capsys.readouterr().err == "kvcore: interrupted\n"


@pytest.mark.parametrize("error", [click.UsageError("odd"), ValueError("odd")], ids=repr)
def test_an_interrupt_while_an_error_is_told_exits_130(verb, capsys, monkeypatch, error):
    """Ctrl-C while the words of another error are looked up ends the verb, as elsewhere."""

    def interrupted(*_):
        raise KeyboardInterrupt

    verb(error)
    monkeypatch.setattr(frame, "_usage", interrupted)
    monkeypatch.setattr(frame.installed(), "bug", interrupted, raising=False)
    assert frame.run(["act"]) == 130
    assert capsys.readouterr().err == "kvcore: interrupted\n"


@pytest.mark.parametrize("outcome", [KeyboardInterrupt(), "done"], ids=repr)
def test_an_interrupt_as_the_timer_is_stopped_exits_130(verb, capsys, monkeypatch, outcome):
    """The timer that repeats Ctrl-C raises wherever no interrupt is handled, until it stops."""
    stop = frame._Repeat.stop

    def interrupted():
        if not frame._is_handled():
            raise KeyboardInterrupt
        stop()

    verb(outcome)
    monkeypatch.setattr(frame._Repeat, "stop", staticmethod(interrupted))
    assert frame.run(["act"]) == 130
    assert capsys.readouterr().err == "kvcore: interrupted\n"


def test_sigterm_exits_143_and_leaves_no_partial_file(tmp_path):
    """SIGTERM ends a verb with exit code 143 and one message, and leaves no partial file."""
    done = ended(ASKED_TO_END, "talk", str(tmp_path / "run.jsonl"))
    assert (done.returncode, done.stdout) == (143, "")
    assert done.stderr == "kvcore: terminated\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "standard output: No space left on device",
            3,
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "run.jsonl"),
            "run.jsonl: No space left on device",
            3,
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
            "x: cannot be read: No such file or directory",
            2,
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "x"),
            "x: cannot be read: Permission denied",
            2,
        ),
        (OSError("odd"), "odd", 3),
    ],
    ids=["full", "full-with-name", "missing", "forbidden", "bare"],
)
def test_system_errors_are_one_message(verb, capsys, error, message, code):
    """An error of the operating system is one message with the name of the file or stream."""
    verb(error)
    assert frame.run(["act"]) == code
    assert capsys.readouterr().err == f"kvcore: error: {message}\n"


def test_bugs_are_not_hidden(verb):
    """An unexpected exception is not caught, so that its traceback is printed."""
    verb(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        frame.run(["act"])


@pytest.mark.parametrize(("asked", "notices"), [("", 0), ("0", 0), ("1", 1)])
def test_version_is_the_installed_one(asked, notices, monkeypatch, capsys):
    """`--version` prints the installed version, and that KVCORE_COMPILE has no effect."""
    monkeypatch.setattr(frame, "version", {"kvcore": "1.2.3"}.__getitem__)
    monkeypatch.setenv("KVCORE_COMPILE", asked)
    assert frame.run(["--version"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"kvcore 1.2.3 (loop {native.state()})\n"
    assert printed.err.count("KVCORE_COMPILE does nothing any more") == notices


def test_verbose_version_says_what_python_serves(capsys):
    """`--version -v` prints what the core in C leaves to the loop in Python."""
    assert frame.run(["--version", "-v"]) == 0
    assert native.LACKS[0] in capsys.readouterr().out


def test_version_without_installation(monkeypatch, capsys):
    """`--version` in a checkout that is not installed is an error that names the remedy."""
    monkeypatch.setattr(frame, "version", {}.get)
    assert frame.run(["--version"]) == 3
    assert "run `pip install -e .`" in capsys.readouterr().err


@pytest.mark.parametrize("words", [1, 100_000])
def test_a_closed_pipe_exits_141_without_a_message(words):
    """A closed pipe ends the program with code 141 and no message."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", TALK, "talk", str(words)],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_closed_pipe_behind_stderr_leaves_the_exit_code():
    """A message that cannot be read any more does not change how the program ends."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        words = [sys.executable, "-c", MURMURS, "talk"]
        buffered = {
            name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"
        }
        done = subprocess.run(words, stderr=writer, env=buffered, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [1, 100_000])
def test_a_full_disk_behind_stdout_is_one_message(words):
    """Output that does not fit on the disk is an error with a message, not a traceback."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", TALK, "talk", str(words)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        3,
        b"kvcore: error: standard output: No space left on device\n",
    )


@pytest.mark.parametrize("closed", ["1", "2", "0<&- 1"])
def test_closed_streams_are_no_error(closed):
    """If stdout or stderr is closed, its output is lost and the exit code is 0."""
    command = f'"$0" -c "$1" talk 1 {closed}>&-'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, TALK], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_shows_whole_summaries(verb, capsys):
    """The list of verbs wraps a long summary instead of cutting it."""
    sentence = f"Do {'what the test says ' * 8}to the end."
    verb("done", sentence)
    assert frame.run(["--help"]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_main_exits_with_the_code(monkeypatch, verb):
    """`main` reads the arguments of the process and exits with the code of the verb."""
    verb(TraceError("bad"))
    monkeypatch.setattr(sys, "argv", ["kvcore", "act"])
    with pytest.raises(SystemExit) as caught:
        frame.main()
    assert caught.value.code == 1


def test_the_list_of_verbs_has_their_first_sentences():
    """The list of verbs has the first sentence of the help page of each."""
    context = click.Context(frame.kvcore)
    commands = {verb: frame.kvcore.get_command(context, verb) for verb in frame.known_verbs()}
    summaries = {
        verb: command.get_short_help_str(sys.maxsize) for verb, command in commands.items()
    }
    assert summaries == {name: verb.about for name, verb in frame.known_verbs().items()}


def test_verbs_are_listed_in_groups():
    """The list of verbs has the groups in order, and each verb once, under its group."""
    lines = run_here("--help").stdout.splitlines()
    heads = [line.rstrip(":") for line in lines if line.endswith(":") and line[0] != " "]
    assert heads[1:] == [*frame.GROUPS]
    places = {group: lines.index(f"{group}:") for group in frame.GROUPS}
    for name, verb in frame.known_verbs().items():
        (line,) = (n for n, text in enumerate(lines) if text.startswith(f"  {name} "))
        before = [group for group, place in places.items() if place < line]
        assert max(before, key=places.get) == verb.group, name


def test_names_of_plugins_may_be_in_capitals():
    """A plugin is found by its name in capitals, if no other one has that name."""
    asked = ("simulate", "zipf:requests=5", "--json", "--eviction")
    documents = [json.loads(run_here(*asked, name).stdout) for name in ("LRU", "lru")]
    assert documents[0]["config"]["plugins"] == documents[1]["config"]["plugins"]
