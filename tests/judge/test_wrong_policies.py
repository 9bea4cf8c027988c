"""The judge: each wrong policy gets the verdict that names its rule, and leaves nothing."""

import os
import select
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from textwrap import dedent, indent

import pytest

from kvcore.errors import InputError
from kvcore_judge.entries import Entry
from kvcore_judge.protocol import Panel, Stream
from kvcore_judge.sandbox import BrokenRuleError, Limits, landlock_version, run_in_sandbox
from kvcore_judge.verdict import Judge

pytestmark = pytest.mark.skipif(
    not landlock_version(), reason="this kernel has no Landlock to run the policies in"
)

HEAD = '''
"""A policy to judge."""

import os
import pickle
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict

from kvcore import EvictionPolicy
from kvcore_judge.cells import CellResult

SEEN = []


def tell(answer):
    """Write to whatever is open, as to the judge."""
    for file in range(3, 256):
        try:
            os.write(file, answer)
        except OSError:
            pass


def upcoming():
    """Return the requests of the replay, from the frame that has them."""
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get('requests'), list):
        frame = frame.f_back
    return frame.f_locals['requests']


class Judged(EvictionPolicy):
    """LRU, but for one thing."""

    name = "judged"

    def attach(self, blocks, block_size):
        super().attach(blocks, block_size)
        self._order = OrderedDict()

    def on_pin(self, span):
        del self._order[span]

    def on_release(self, span, now):
        self._order[span] = None

    def on_remove(self, span, reason):
        del self._order[span]

    def victim(self, now):
        return next(iter(self._order))

'''

WRONG = {
    "evicts-pinned": ("contract", "def on_pin(self, span):\n    pass"),
    "evicts-parents": (
        "contract",
        "def victim(self, now):\n    return next(reversed(self._order))",
    ),
    "evicts-nothing": ("contract", "def victim(self, now):\n    return None"),
    "raises": ("contract", "def on_remove(self, span, reason):\n    raise ValueError('no')"),
    "keeps-gone-spans": (
        "contract",
        "def on_remove(self, span, reason):\n    SEEN.append(span)",
    ),
    "hears-of-the-queue": (
        "future",
        "lookahead = 8\ndef on_queued(self, request, now, *, front):\n    pass",
    ),
    "answers-with-code": (
        "contract",
        """
        def __reduce__(self):
            return os.mkdir, ('left_behind',)

        def victim(self, now):
            tell(pickle.dumps(self))
            os._exit(0)
        """,
    ),
}
"""By name: the rule that it breaks, and the methods in which it differs from LRU."""

CHOOSES = {
    "draws": ("deterministic", "random.choice(leaves)"),
    "by-address": (
        "deterministic",
        "min(leaves, key=lambda span: (id(span) ^ os.getpid()) % 97)",
    ),
    "by-hash": ("deterministic", "min(leaves, key=lambda span: hash(f'{span.id}'))"),
    "by-the-order-of-a-set": (
        "deterministic",
        "leaves[int(next(iter({*map(str, range(len(leaves)))})))]",
    ),
    "by-clock": ("deterministic", "leaves[time.perf_counter_ns() % len(leaves)]"),
    "looks-at-the-requests-to-come": ("future", "leaves[len(upcoming()) % len(leaves)]"),
}
"""By name: the rule that it breaks, and which of the leaves it evicts."""

DOES = {
    "never-returns": ("time", "while True: pass"),
    "eats-memory": ("memory", "SEEN.append(bytearray(1 << 27))"),
    "writes": ("files", "open('left_behind', 'w').close()"),
    "writes-and-hides-it": (
        "files",
        """
        try:
            open('left_behind', 'w').close()
        except BaseException:
            pass
        """,
    ),
    "reads": ("files", "open('/proc/self/maps').read()"),
    "connects": ("network", "socket.create_connection(('127.0.0.1', 9))"),
    "starts-a-process": ("processes", "subprocess.run(['true'])"),
    "starts-many-threads": (
        "processes",
        """
        threading.stack_size(1 << 15)
        for _ in range(1000):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        time.sleep(60)
        """,
    ),
    "ends-the-process": ("ends the process", "os._exit(0)"),
    "answers-without-end": (
        "contract",
        """
        for _ in range(100):
            tell(bytes(1 << 16))
        os._exit(0)
        """,
    ),
    "answers-too-deeply": ("contract", "tell(b'[[{\"\":' + b'[' * 60_000)\nos._exit(0)"),
    "answers-nothing": ("contract", 'tell(b\'[null,"","",null]\')\nos._exit(0)'),
    "makes-up-its-hits": (
        "contract",
        """
        sys.modules['kvcore_judge.verdict'].run_cell = lambda cell: CellResult(
            1, 1, [10**9], 0.0, 0, '')
        """,
    ),
    "is-late": ("time", "os.closerange(3, 256)\ntime.sleep(60)"),
}
"""By name: the rule that it breaks, and what it does before it evicts as LRU does."""


def evicting(before, victim):
    """Return the method of a policy that does something, and then evicts `victim`."""
    body = indent(dedent(before).strip(), "    ")
    return f"def victim(self, now):\n{body}\n    return {victim}"


LEAVES = "leaves = [span for span in self._order if not span.children]"
WRONG |= {name: (rule, evicting(LEAVES, leaf)) for name, (rule, leaf) in CHOOSES.items()}
WRONG |= {
    name: (rule, evicting(does, "next(iter(self._order))"))
    for name, (rule, does) in DOES.items()
}

HIDDEN = {
    "forks": "os.fork()",
    "runs a program": "os.posix_spawn('/bin/true', ['true'], {})",
    "sends a signal": "os.kill(os.getppid(), 0)",
    "limits another process": "resource.prlimit(os.getppid(), resource.RLIMIT_CORE, (0, 0))",
    "opens a socket": "socket.socket(socket.AF_UNIX)",
    "changes a mode": "os.chmod(__file__, 0)",
    "changes a time": "os.utime(__file__, (0, 0))",
    "writes": "open('left_behind', 'w')",
    "truncates": "os.truncate(__file__, 0)",
    "truncates what it reads": "os.open(__file__, os.O_RDONLY | os.O_TRUNC)",
    "sends signals by a pipe": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "sends signals by a terminal": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)",
    "reads a device": "os.open('/dev/null', os.O_RDONLY)",
    "poisons a page": "call('madvise', 0, 0, 100)",
    "removes shared memory": "call('shmctl', 0, 0, 0)",
    "writes to shared memory": "call('shmat', 0, 0, 0)",
    "changes a keyring": "call('add_key', b'user', b'a', b'b', 1, -3)",
    "leaves the user": "call('unshare', 0x10000000)",
}
"""What a policy does that has switched the audit off."""

OFF = dedent("""
    sys.modules['kvcore_judge.sandbox']._state.watching = False
    import ctypes, fcntl
    library = ctypes.CDLL(None, use_errno=True)

    def call(name, *arguments):
        number = {"shmat": (30, 196), "shmctl": (31, 195), "add_key": (248, 217),
                  "madvise": (28, 233), "unshare": (272, 97)}[name]
        library.syscall(number[os.uname().machine == "aarch64"], *arguments)
        raise OSError(ctypes.get_errno(), name)
""")

PANEL = Panel("test", (Stream("tools", "agents:sessions=30"),), (50, 200))


@pytest.fixture(scope="module")
def judge():
    """Return a judge that gives policies few seconds."""
    return judge_of(3)


def judge_of(seconds):
    """Return a judge that gives policies this time and little memory, without the kit."""
    return Judge(PANEL, Limits(seconds=seconds, memory=1 << 29), kit=False)


def written(folder, methods):
    """Return the entry of a policy with these methods."""
    path = Path(folder, "judged.py")
    path.write_text(HEAD + indent(dedent(methods).strip(), "    ") + "\n", "utf-8")
    return Entry(str(path))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_policy_gets_the_verdict_of_its_rule(name, judge, tmp_path, monkeypatch):
    """The verdict names the rule, and nothing of the policy survives in the working folder."""
    monkeypatch.chdir(tmp_path)
    rule, methods = WRONG[name]
    # Policies that take too long take all that they are given.
    verdict = (judge_of(1) if rule == "time" else judge).judge(written(tmp_path, methods))
    assert (verdict.passed, verdict.rule) == (False, rule), verdict.what
    assert sorted(path.name for path in tmp_path.iterdir()) == ["judged.py"]


@pytest.mark.parametrize("name", HIDDEN)
def test_the_kernel_refuses_what_the_audit_does_not_see(name, judge, tmp_path, monkeypatch):
    """A policy that switches the audit off reaches nothing, by the first Landlock either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvcore_judge.sandbox.landlock_version", lambda: 1)
    entry = written(
        tmp_path, f"def victim(self, now):\n{indent(OFF, '    ')}\n    {HIDDEN[name]}"
    )
    verdict = judge.judge(entry)
    assert verdict.rule == "contract"
    assert "PermissionError" in verdict.what


def test_the_root_folder_can_be_listed_and_its_files_read():
    """A policy in `/`, where a container may have it, finds its modules there."""
    files = [str(path) for path in Path("/").iterdir() if path.is_file()]
    files = [path for path in files if os.access(path, os.R_OK)]

    def listed():
        sys.path.extend(files)  # these may be opened
        for path in files:
            Path(path).open("rb").close()
        return len([*Path("/").iterdir()])

    assert run_in_sandbox(listed, int, Limits()) == len([*Path("/").iterdir()])


def test_a_policy_opens_few_files(judge, tmp_path):
    """The kernel's memory for open pipes is in no limit: there are few of them."""
    methods = "def victim(self, now):\n    raise ValueError([os.pipe() for _ in range(64)])"
    verdict = judge.judge(written(tmp_path, methods))
    assert "Too many open files" in verdict.what


@pytest.mark.parametrize("limits", [Limits(seconds=1 << 63), Limits(memory=1 << 80)], ids=str)
def test_limits_that_no_process_can_have_are_no_fault_of_a_policy(limits):
    """Whoever asks for more than the system gives is told so, and no rule is broken."""
    with pytest.raises(InputError, match="give it less"):
        run_in_sandbox(int, int, limits)


def test_a_policy_that_ignores_the_signal_of_its_limit_took_too_long(monkeypatch):
    """A policy that the kernel kills for its CPU time is not told as short of memory."""
    monkeypatch.setattr("kvcore_judge.sandbox.monotonic", lambda: 0.0)

    def spin():
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        while True:
            pass

    with pytest.raises(BrokenRuleError) as broken:
        run_in_sandbox(spin, int, Limits(seconds=1))
    assert broken.value.rule == "time"


def test_a_policy_ends_if_its_judge_is_interrupted(monkeypatch):
    """Ctrl-C while a policy runs leaves no process."""

    def interrupted(*_):
        raise KeyboardInterrupt

    fork, children = os.fork, []

    def forked():
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", forked)
    monkeypatch.setattr("kvcore_judge.sandbox.select", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_sandbox(lambda: time.sleep(60), int, Limits(seconds=60))
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


def test_a_policy_ends_if_its_judge_is_killed():
    """A policy that uses no CPU time, so that no limit ends it, ends with its judge."""
    judge = """
        import os, time
        from kvcore_judge.sandbox import Limits, run_in_sandbox

        def policy():
            for file in range(3, 256):
                try:
                    os.write(file, b" ")  # to its judge
                except OSError:
                    pass
            time.sleep(60)

        read, fork, children = os.read, os.fork, []
        os.fork = lambda: children.append(fork()) or children[-1]
        os.read = lambda *more: print(children[-1], flush=True) or read(*more)
        run_in_sandbox(policy, int, Limits(seconds=60))
    """
    with Popen([sys.executable, "-c", dedent(judge)], stdout=PIPE) as process:
        policy = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    ended, _, _ = select.select([policy], [], [], 30)
    os.close(policy)
    assert ended


def test_a_policy_cannot_speak_for_its_judge(judge, tmp_path):
    """Wrong input of which a policy tells is told as its own: it may ask for `--unsafe`."""
    answer = """tell(b'[null,"","","run it with --unsafe"]')\nos._exit(0)"""
    with pytest.raises(InputError, match=r"^the process of the policy says: run it with"):
        judge.judge(written(tmp_path, evicting(answer, None)))
    for name in ("missing.py", "missing.txt"):
        with pytest.raises(InputError, match=name) as error:
            judge.judge(Entry(str(tmp_path / name)))
        assert "process" not in str(error.value)


def test_what_a_policy_prints_is_dropped(judge, tmp_path, capfd):
    """Nothing that it prints stands beside its verdict, which may be read as JSON."""
    entry = written(
        tmp_path, "def on_pin(self, span):\n    os.write(1, b'{}')\n    del self._order[span]"
    )
    assert judge.judge(entry).passed
    assert capfd.readouterr() == ("", "")


def test_right_policy_passes_and_scores(judge, tmp_path):
    """LRU in a file passes, and has the hits of LRU in each cell."""
    verdict = judge.judge(written(tmp_path, "pass"))
    assert verdict.passed, verdict.what
    assert verdict.score.headline == "1.0000"
    assert all(cell["hits"] == cell["lru"] > 0 for cell in verdict.cells)


def test_the_kit_comes_first(tmp_path):
    """A policy that only the kit finds wrong fails it, with the name of the test."""
    methods = "def attach(self, blocks, block_size):\n    self._order = OrderedDict()\n"
    methods += "def __deepcopy__(self, memo):\n    return self"
    verdict = Judge(PANEL).judge(written(tmp_path, methods))
    assert verdict.rule == "contract"
    assert "test_" in verdict.what
