"""Worker processes that die or are interrupted."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children
from multiprocessing.popen_fork import Popen
from threading import Event, Thread, current_thread, get_ident, main_thread

import pytest
from helpers.sweeps import read_no_row, suicide

from kvcore import PluginError
from kvcore_lab import workers
from kvcore_lab.workers import Call, WorkerDied, call_all, work_all


def test_the_signal_that_killed_a_worker_is_reported(monkeypatch):
    """The signal that killed a worker is reported even if its exit code is stored late.

    Another thread may have collected the process from the kernel.
    """
    poll, taken, asked = Popen.poll, Event(), Event()

    def slow(self, flag=os.WNOHANG):
        if self.returncode is not None:
            return self.returncode
        if current_thread() is main_thread():
            if flag != os.WNOHANG:
                taken.wait()
                asked.set()
            return poll(self, flag)
        pid, status = os.waitpid(self.pid, flag)
        if pid:
            taken.set()
            asked.wait(0.1)  # the main thread should not ask
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    monkeypatch.setattr(Popen, "poll", slow)
    monkeypatch.setattr(workers, "ATTEMPTS", 1)
    assert list(work_all(suicide, [signal.SIGKILL], 1)) == [
        (signal.SIGKILL, WorkerDied("SIGKILL"))
    ]


def test_a_signal_without_a_name_is_reported_by_its_number(monkeypatch):
    """A worker that a real-time signal killed has the number of the signal in its outcome."""
    monkeypatch.setattr(workers, "ATTEMPTS", 1)
    number = signal.SIGRTMIN + 1
    assert list(work_all(suicide, [number], 1)) == [(number, WorkerDied(f"signal {number}"))]


def test_an_interrupt_during_the_start_of_a_worker_is_raised_later(monkeypatch):
    """An interrupt during the start of a worker is raised afterwards, and ends the worker."""
    start = ProcessPoolExecutor._spawn_process
    started = []

    def interrupted(self):
        # A thread that does not block the signal, as most do.
        thread = Thread(target=interrupt)
        thread.start()
        thread.join()
        start(self)
        started.extend(active_children())

    def interrupt():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.pthread_kill(get_ident(), signal.SIGINT)

    monkeypatch.setattr(ProcessPoolExecutor, "_spawn_process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(work_all(suicide, [signal.SIGKILL], 1))
    assert started
    assert not any(process.is_alive() for process in started)


def test_sigterm_waits_until_a_worker_has_started(monkeypatch):
    """SIGTERM is delayed while a worker starts: else it would miss what it is to do.

    It is not blocked in the worker, which the pool ends by it.
    """
    start = ProcessPoolExecutor._spawn_process
    started = []

    class TerminatedError(Exception):
        """Raised by the handler of SIGTERM."""

    def terminate(*_):
        raise TerminatedError

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        start(self)
        started.extend(active_children())

    monkeypatch.setattr(ProcessPoolExecutor, "_spawn_process", interrupted)
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with pytest.raises(TerminatedError):
            list(work_all(suicide, [signal.SIGKILL], 1))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert started
    assert not any(process.is_alive() for process in started)


def test_forks_call_functions_that_cannot_be_pickled(monkeypatch):
    """A fork calls any function, with all that this process has; errors come back as raised."""
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    read = {"requests": 3}

    def wrong():
        msg = "no row"
        raise ValueError(msg)

    calls = [Call(lambda n=n: (n, read["requests"], os.getpid()), "") for n in range(4)]
    results = dict(call_all(calls, 2))
    assert [results[n][:2] for n in range(4)] == [(n, 3) for n in range(4)]
    assert os.getpid() not in {pid for *_, pid in results.values()}
    assert not active_children()
    with pytest.raises(ValueError, match="no row"):
        list(call_all([*calls, Call(wrong, "")], 2))


def test_an_exception_that_cannot_be_sent_is_told_in_words():
    """The exception of a call is no crash of its worker, whatever its class needs."""
    with pytest.raises(PluginError, match=r"^NoRowError: no row 7$"):
        list(call_all([Call(read_no_row, "the first call"), Call(int, "")], 2))
