"""Worker processes: what is said of one that dies."""

from __future__ import annotations

import os
import signal
from multiprocessing.popen_fork import Popen
from threading import Event, current_thread, main_thread

from helpers.sweeps import suicide

from kvcore.analysis import workers
from kvcore.analysis.workers import WorkerDied, work_all


def test_the_end_of_a_worker_is_known_however_late_its_exit_code_is(monkeypatch):
    """Also if the thread of the pool has taken it from the kernel, but not stored it yet."""
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
            asked.wait(0.1)  # nobody should
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    monkeypatch.setattr(Popen, "poll", slow)
    monkeypatch.setattr(workers, "ATTEMPTS", 1)
    assert list(work_all(suicide, [signal.SIGKILL], 1)) == [
        (signal.SIGKILL, WorkerDied("SIGKILL"))
    ]
