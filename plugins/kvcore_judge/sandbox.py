"""A process for code that is not trusted: no network, no writing, limits of time and memory.

The process is a fork of this one, so that what this one has imported and read is there at
once. In it, in this order: limits of CPU time and memory; a network namespace without
interfaces; Landlock, by which the kernel refuses every write to the file system and every
connection. The audit events of Python then tell which of these the code has tried.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from select import select
from time import monotonic
from typing import Any, NoReturn

import attrs

from kvcore.errors import InputError

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_NO_NEW_PRIVILEGES = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = (1 << 0) | (1 << 2) | (1 << 3)
"""Landlock's rights to execute files, to read them, and to list folders."""
_FILE_RIGHTS, _REFER, _TRUNCATE, _IOCTL = (1 << 13) - 1, 1 << 13, 1 << 14, 1 << 15
_TCP = 3
_VERSION = 1

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CODE = (".py", ".pyc", ".so")
"""Suffixes of files that an import may read."""


class Breach(BaseException):
    """Raised in the sandbox when code does what it must not.

    No `Exception`, so that `except Exception` does not hide it.

    Attributes:
        rule: `files`, `network` or `processes`.
        what: what it did.
    """

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(rule, what)
        self.rule, self.what = rule, what


class BrokenRuleError(Exception):
    """Raised in the sandbox by a check which a policy fails.

    Attributes:
        rule: name of the rule.
        what: what the policy did, with an example.
    """

    def __init__(self, what: str, *, rule: str) -> None:
        super().__init__(what)
        self.rule, self.what = rule, what


@attrs.frozen
class Limits:
    """The limits of a sandbox.

    Attributes:
        seconds: CPU time, and half of the time that may pass.
        memory: bytes of memory beyond that of the process that forks.
    """

    seconds: int = 60
    memory: int = 2 << 30


@attrs.frozen
class Ended:
    """How a sandbox ended: with a result, or by a rule that was broken.

    Attributes:
        result: what the function returned; None if a rule was broken.
        rule: the rule; empty if none was.
        what: what happened.
    """

    result: Any = None
    rule: str = ""
    what: str = ""


def run_in_sandbox(
    function: Callable[[], Any], limits: Limits, *, unsafe: bool = False
) -> Ended:
    """Run `function` in a sandbox; return its result, which is pickled, or the broken rule.

    Args:
        function: the function. It may raise exceptions of kvcore, which are raised here.
        limits: time and memory.
        unsafe: whether to run it although the kernel cannot refuse writes and connections.

    Raises:
        InputError: this system has no Landlock, and `unsafe` is False.
    """
    if not (unsafe or landlock_version()):
        msg = (
            "this system has no Landlock (Linux 5.13), so that a policy could write files and "
            "open connections: run it elsewhere, or with --unsafe if you trust it"
        )
        raise InputError(msg)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _run_child(function, limits, writer, unsafe=unsafe)
    os.close(writer)
    data = _read_all(reader, 2 * limits.seconds)
    os.close(reader)
    if data is None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if data:
        kind, value = pickle.loads(data)  # noqa: S301 - see `_run_child`
        if kind == "error":
            raise value
        return Ended(*value)
    return Ended(None, *_how_it_died(status, limits, late=data is None))


def _how_it_died(status: int, limits: Limits, *, late: bool) -> tuple[str, str]:
    """Return the rule that a process broke which ended without a result, and what happened."""
    died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if late or died == signal.SIGXCPU:
        return "time", f"it took more than {limits.seconds} s of CPU time, or twice that"
    if died == signal.SIGKILL:
        return "memory", "the system killed it, as it does when memory is short"
    code = os.WEXITSTATUS(status) if not died else 0
    how = signal.Signals(died).name if died else f"exit code {code}"
    return "ends the process", f"the process ended by {how}"


def _read_all(reader: int, seconds: float) -> bytes | None:
    """Return what is written to a pipe until its end; None if that does not come in time."""
    end = monotonic() + seconds
    parts: list[bytes] = []
    while (left := end - monotonic()) > 0:
        if select([reader], [], [], left)[0]:
            part = os.read(reader, 1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None


def _run_child(
    function: Callable[[], Any], limits: Limits, writer: int, *, unsafe: bool
) -> NoReturn:
    """Run `function` in this process, the child; write what came of it, and end."""
    answer: tuple[str, Any]
    try:
        answer = "ended", _attempt(function, limits, unsafe=unsafe)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        answer = ("error", error) if isinstance(error, InputError) else ("ended", _told(error))
    _state.watching = False
    try:
        data = pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001 - of whatever class the policy has
        data = pickle.dumps(("ended", (None, "contract", f"{type(error).__name__}: {error}")))
    view = memoryview(data)
    while view:
        view = view[os.write(writer, view) :]
    os._exit(0)


def _told(error: BaseException) -> tuple[Any, str, str]:
    """Return the rule that an exception stands for, and what it says."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, (Breach, BrokenRuleError)):
            return None, chain.rule, chain.what
        if isinstance(chain, MemoryError):
            return None, "memory", "it needed more memory than the limit"
        chain = chain.__cause__ or chain.__context__
    return None, "contract", f"{type(error).__name__}: {error}"


def _attempt(
    function: Callable[[], Any], limits: Limits, *, unsafe: bool
) -> tuple[Any, str, str]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 1))
    address_space = _address_space() + limits.memory
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not unsafe:
        _lock()
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.addaudithook(_audit)
    _state.watching = True
    result = function()
    if _state.breach is not None:
        return None, _state.breach.rule, _state.breach.what
    return result, "", ""


def _address_space() -> int:
    """Return the bytes of the address space of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no path object
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@attrs.define
class _State:
    """The state of the audit hook, which cannot be removed once it is added."""

    watching: bool = False
    breach: Breach | None = None


_state = _State()

_RULES = {
    "socket": "network",
    "subprocess": "processes",
    "os.system": "processes",
    "os.exec": "processes",
    "os.fork": "processes",
    "os.posix_spawn": "processes",
    "os.spawn": "processes",
    "ctypes": "processes",
    "os.remove": "files",
    "os.rename": "files",
    "os.mkdir": "files",
    "shutil": "files",
}
"""Beginnings of the names of audit events, and the rules that these break."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Raise Breach if an event of the interpreter breaks a rule."""
    if not _state.watching:
        return
    rule = next((rule for begin, rule in _RULES.items() if event.startswith(begin)), "")
    what = event
    if event == "open":
        path, mode, flags = arguments
        writes = isinstance(flags, int) and flags & WRITES
        if writes or (isinstance(mode, str) and set(mode) & set("wxa+")):
            rule, what = "files", f"it opened {path!r} for writing"
        elif not (str(path).endswith(CODE) or path in sys.path) and os.path.exists(path):  # noqa: PTH110
            rule, what = "files", f"it opened {path!r}, which is no module"
    if rule:
        # Kept, since a policy may catch the exception.
        _state.breach = _state.breach or Breach(rule, what)
        raise _state.breach


def landlock_version() -> int:
    """Return the version of Landlock in this kernel; 0: it has none."""
    if sys.platform != "linux":
        return 0
    return max(0, _syscall(_CREATE_RULESET, None, 0, _VERSION))


def _syscall(number: int, *arguments: Any) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(number, *arguments))


def _lock() -> None:
    """Take network and writing from this process for good."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Without the right to make namespaces, Landlock still refuses TCP.
    libc.unshare(_NEW_USER | _NEW_NETWORK)
    version = landlock_version()
    rights = _FILE_RIGHTS
    rights |= _REFER if version >= 2 else 0  # noqa: PLR2004 - versions of Landlock
    rights |= _TRUNCATE if version >= 3 else 0  # noqa: PLR2004
    rights |= _IOCTL if version >= 5 else 0  # noqa: PLR2004
    rules = struct.pack("QQ", rights, _TCP) if version >= 4 else struct.pack("Q", rights)  # noqa: PLR2004
    ruleset = _syscall(_CREATE_RULESET, rules, len(rules), 0)
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    allowed = struct.pack("=Qi", _READ, root)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    done = ruleset >= 0 and _syscall(_ADD_RULE, ruleset, 1, allowed, 0) == 0
    if not done or _syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        msg = "the kernel refused the sandbox: run the policy elsewhere, or with --unsafe"
        raise InputError(msg)
    os.close(root)
    os.close(ruleset)
