"""A process for code that is not trusted: no network, no writing, limits of time and memory.

The process is a fork of this one, so that what this one has imported and read is there at
once. It keeps one file of its parent, the pipe of its answer, which is read as data. In it, in
this order: limits of CPU time and memory; Landlock, by which the kernel refuses every write to
the file system, and devices; seccomp, by which it refuses all system calls but those that a
computation needs, with arguments that reach no other process. These hold whatever the code
does. The audit events of Python tell what it has tried, unless it takes care that they do not.

What the code says of itself it can make up: the kernel keeps it from the machine, not from
the objects of its own process.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from select import select
from stat import S_IFDIR, S_IFMT, S_IFREG
from time import monotonic, sleep
from typing import Any, NoReturn

import attrs
import msgspec

import kvcore.moved  # noqa: F401 - reads its table before files are watched
from kvcore.errors import InputError
from kvcore.untrusted import parse_json

_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 1, 38, 22, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ, _LIST = 1 << 2, 1 << 3
"""Landlock's rights to read files, and to list folders."""
_FILE_RIGHTS, _REFER, _TRUNCATE = (1 << 13) - 1, 1 << 13, 1 << 14
_VERSION = 1

_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""By machine its mark in a filter."""

_ALLOWED = """
read 0 63  write 1 64  close 3 57  stat 4 -  fstat 5 80  lstat 6 -  newfstatat 262 79
statx 332 291  access 21 -  faccessat 269 48  faccessat2 439 439  readlink 89 -
readlinkat 267 78  getcwd 79 17  getdents64 217 61  lseek 8 62  pread64 17 67  readv 19 65
writev 20 66  dup 32 23  dup2 33 -  dup3 292 24  pipe2 293 59  poll 7 -  ppoll 271 73
select 23 -  pselect6 270 72  mmap 9 222  mprotect 10 226  munmap 11 215  mremap 25 216
brk 12 214  rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139
sigaltstack 131 132  restart_syscall 219 128  setitimer 38 103  getitimer 36 102
nanosleep 35 101  clock_nanosleep 230 115  clock_gettime 228 113  clock_getres 229 114
gettimeofday 96 169  time 201 -  times 100 153  getrusage 98 165  sysinfo 99 179  uname 63 160
futex 202 98  set_robust_list 273 99  set_tid_address 218 96  rseq 334 293  membarrier 324 283
sched_yield 24 124  sched_getaffinity 204 123  getcpu 309 168  getpid 39 172  getppid 110 173
gettid 186 178  getuid 102 174  geteuid 107 175  getgid 104 176  getegid 108 177
getrandom 318 278  getrlimit 97 163  arch_prctl 158 -  exit 60 93  exit_group 231 94
"""
"""System calls that are let through, each with its number by machine: those that Python needs.

All others are refused: new calls come with each kernel, and old ones reach further than it
seems (`fcntl` sends signals, `shmctl` removes the memory of others).
"""

_CHECKED = (
    "open 2 -  openat 257 56  fcntl 72 25  clone 56 220  prlimit64 302 261  clone3 435 435  "
    "madvise 28 233"
)
"""System calls whose arguments decide; the C library starts threads by `clone` for `clone3`."""

_THREAD, _DUPLICATE, _STATUS_FLAGS, _POISON = 0x10000, 1030, 4, 100
"""The flag of threads; what `fcntl` may do: copies with CLOEXEC, and what is below F_SETFL, by
whose O_ASYNC a terminal sends signals to those who use it; and the first advice to `madvise`
that takes pages out of use, which root may give for those of others, too."""

MOST_BYTES = 1 << 22
"""Largest number of bytes of an answer."""

BEGUN = b" "
"""What is written before code that is not trusted runs, which may write the rest."""

MOST_THREADS = 64
"""Largest number of threads: no limit of a process counts the kernel's memory for them."""

MOST_FILES = 64
"""Largest number of open files: no limit of a process counts the content of its pipes, 64 KiB
of each."""

_PAUSE_SECONDS = 0.01

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
    """Raised by a check which a policy fails, in the sandbox and again in its judge.

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


def run_in_sandbox(
    function: Callable[[], Any], kind: Any, limits: Limits, *, unsafe: bool = False
) -> Any:
    """Run `function` in a sandbox; return its result, sent as JSON.

    Args:
        function: the function. It may raise InputError, which is raised here.
        kind: the type of its result, which msgspec checks.
        limits: time and memory.
        unsafe: whether to run it although the kernel cannot refuse writes and connections.

    Raises:
        BrokenRuleError: it broke a rule, or its process did.
        InputError: this system has no Landlock or seccomp, and `unsafe` is False; or it does
            not give a process these limits.
    """
    if not (unsafe or (landlock_version() and platform.machine() in _MACHINES)):
        msg = (
            "this system has no Landlock (Linux 5.13, x86-64 or ARM64), so that a policy could "
            "write files and open connections: run it elsewhere, or with --unsafe if you trust "
            "it"
        )
        raise InputError(msg)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _run_child(function, limits, writer, unsafe=unsafe)
    os.close(writer)
    data, status, excess = _watch(child, reader, limits)
    if excess or status or not data.strip():
        broken, what = excess or _how_it_died(status)
        raise BrokenRuleError(what, rule=broken)
    try:
        form: Any = tuple[kind | None, str, str, str | None]
        result, rule, what, wrong = msgspec.convert(parse_json(bytes(data)), form)
    except (ValueError, msgspec.ValidationError) as error:
        what = f"its process answers what is no verdict: {error}"
        raise BrokenRuleError(what, rule="contract") from error
    if wrong is not None:
        who = "the process of the policy says: " if data.startswith(BEGUN) else ""
        msg = f"{who}{wrong}"
        raise InputError(msg)
    if result is None and not rule:
        rule, what = "contract", "its process answers neither a result nor a rule"
    if rule:
        raise BrokenRuleError(what, rule=rule)
    return result


def _watch(
    child: int, reader: int, limits: Limits
) -> tuple[bytearray, int, tuple[str, str] | None]:
    """Return what a process writes to a pipe, how it ended, and the limit that it exceeded.

    A process that exceeds one is killed, and so is any if this one is interrupted.
    """
    data, status, until = bytearray(), None, monotonic() + 2 * limits.seconds
    try:
        with open(reader, "rb", buffering=0):
            while not (excess := _excess(child, limits, until)) and len(data) <= MOST_BYTES:
                if select([reader], [], [], _PAUSE_SECONDS)[0]:
                    part = os.read(reader, 1 << 16)
                    if not part:
                        break
                    data += part
        # It may have closed its end of the pipe, and go on.
        while status is None and not (excess := excess or _excess(child, limits, until)):
            ended, died, used = os.wait4(child, os.WNOHANG)
            if ended:
                status = died
            else:
                sleep(_PAUSE_SECONDS)
    finally:
        if status is None:
            os.kill(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
    # One that ignores SIGXCPU is killed a second later.
    seconds = used.ru_utime + used.ru_stime
    died = -os.waitstatus_to_exitcode(status)
    if died == signal.SIGXCPU or (died == signal.SIGKILL and seconds >= limits.seconds):
        excess = _too_long(limits)
    return data, status, excess


def _excess(child: int, limits: Limits, until: float) -> tuple[str, str] | None:
    """Return the rule that a process breaks by its time or its threads, and what it did."""
    if monotonic() >= until:
        return _too_long(limits)
    try:
        threads = len(os.listdir(f"/proc/{child}/task"))  # noqa: PTH208 - by its name alone
    except OSError:  # a system without this folder, which needs --unsafe
        return None
    if threads > MOST_THREADS:
        return "processes", f"it started more than {MOST_THREADS} threads"
    return None


def _too_long(limits: Limits) -> tuple[str, str]:
    return "time", f"it took more than {limits.seconds} s of CPU time, or twice that"


def _how_it_died(status: int) -> tuple[str, str]:
    """Return the rule that a process broke which ended without a result, and what happened."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return "memory", "the system killed it, as it does when memory is short"
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return "ends the process", f"the process ended by {how}"


def _run_child(
    function: Callable[[], Any], limits: Limits, writer: int, *, unsafe: bool
) -> NoReturn:
    """Run `function` in this process, the child; write what came of it, and end."""
    answer: tuple[Any, str, str, str | None]
    try:
        try:
            answer = _attempt(function, limits, writer, unsafe=unsafe), "", "", None
        except InputError as error:
            answer = None, "", "", str(error)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            answer = None, *_told(error), None
        _state.watching = False
        try:
            data = msgspec.json.encode(answer)
        except Exception as error:  # noqa: BLE001 - of whatever class the policy has
            what = f"{type(error).__name__}: {error!a}"
            data = msgspec.json.encode((None, "contract", what, None))
        view = memoryview(data)
        while view:
            view = view[os.write(writer, view) :]
    finally:
        os._exit(0)


def _told(error: BaseException) -> tuple[str, str]:
    """Return the rule that an exception stands for, and what it says."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, (Breach, BrokenRuleError)):
            return chain.rule, chain.what
        if isinstance(chain, MemoryError):
            return "memory", "it needed more memory than the limit"
        chain = chain.__cause__ or chain.__context__
    return "contract", f"{type(error).__name__}: {error}"


def _attempt(function: Callable[[], Any], limits: Limits, writer: int, *, unsafe: bool) -> Any:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.setsid()
    address_space = _address_space() + limits.memory
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, writer)
    os.closerange(writer + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 1))
        resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
        for unused in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):  # of files in memory, too
            resource.setrlimit(unused, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, MOST_FILES))
    except (OverflowError, ValueError) as error:
        msg = (
            f"a policy cannot get {limits.seconds:,} s of CPU time, {limits.memory >> 20:,} MiB"
            f" of memory and {MOST_FILES} files here: {error}; give it less (--seconds, "
            "--memory), or this process more (ulimit)"
        )
        raise InputError(msg) from error
    if not unsafe:
        _lock()
    sys.dont_write_bytecode = True
    sys.addaudithook(_audit)
    _state.watching = True
    os.write(writer, BEGUN)
    result = function()
    if _state.breach is not None:
        raise _state.breach
    return result


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
    "os.kill": "processes",
    "resource": "processes",
    "ctypes": "processes",
    "os.remove": "files",
    "os.rename": "files",
    "os.mkdir": "files",
    "os.ch": "files",
    "os.utime": "files",
    "os.setxattr": "files",
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
    """Bar this process from network, writing and other processes for good."""
    version = landlock_version()
    rights = _FILE_RIGHTS
    rights |= _REFER if version >= 2 else 0  # noqa: PLR2004 - versions of Landlock
    rights |= _TRUNCATE if version >= 3 else 0  # noqa: PLR2004
    ruleset = _syscall(_CREATE_RULESET, struct.pack("Q", rights), 8, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)  # also if this process is killed
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    done = ruleset >= 0
    # All can be listed, but not read what is in that of devices: nobody's terminal.
    root = Path("/")
    for path in (root, *root.iterdir()):
        with suppress(OSError):  # one that cannot be opened stays refused
            if path.name != "dev" and S_IFMT(path.lstat().st_mode) in (S_IFDIR, S_IFREG):
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
                allowed = struct.pack("=Qi", _LIST if path == root else _READ, opened)
                done = done and _syscall(_ADD_RULE, ruleset, 1, allowed, 0) == 0
                os.close(opened)
    done = done and _syscall(_RESTRICT_SELF, ruleset, 0) == 0
    code = b"".join(struct.pack("HBBI", *step) for step in _filter())
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    if not done or libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) != 0:
        msg = "the kernel refused the sandbox: run the policy elsewhere, or with --unsafe"
        raise InputError(msg)
    os.close(ruleset)


def _filter() -> Iterator[tuple[int, int, int, int]]:
    """Yield the steps of the filter of system calls.

    A step is its code, how many steps to skip if it is true and if not, and a number. The
    filter reads the number of a call at 0, the machine at 4, and the arguments, of 8 bytes
    each, from 16 on. Files may be opened for reading, threads started, limits read.
    """
    column = 1 + list(_MACHINES).index(platform.machine())
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, lacking = ((answer, 0, 0, to) for to in (0x7FFF0000, 0x50001, 0x50026))
    flags, end = (any_bit, 0, 1, WRITES), (refuse, allow)
    rules = {
        "open": ((load, 0, 0, 24), flags, *end),
        "openat": ((load, 0, 0, 32), flags, *end),
        "fcntl": (
            (load, 0, 0, 24),
            (equal, 2, 0, _DUPLICATE),
            (at_least, 0, 1, _STATUS_FLAGS),
            *end,
        ),
        "madvise": ((load, 0, 0, 32), (at_least, 0, 1, _POISON), *end),
        "clone": ((load, 0, 0, 16), (any_bit, 1, 0, _THREAD), *end),
        # No new limits: both halves of their address are 0.
        "prlimit64": (
            *((load, 0, 0, 16), (equal, 0, 4, 0)),
            *((load, 0, 0, 32), (equal, 0, 2, 0)),
            *((load, 0, 0, 36), (equal, 1, 0, 0)),
            *end,
        ),
        "clone3": (lacking,),
    }
    yield from ((load, 0, 0, 4), (equal, 1, 0, _MACHINES[platform.machine()]), refuse)
    yield load, 0, 0, 0
    words = f"{_CHECKED} {_ALLOWED}".split()
    for name, number in zip(words[::3], words[column::3], strict=True):
        if number != "-":
            steps = rules.get(name, (allow,))
            yield from ((equal, 0, len(steps), int(number)), *steps)
    yield refuse
