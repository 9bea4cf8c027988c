"""vLLM's schedulers, recording the steps of a server for `kvcore calibrate`.

vLLM loads a class of this module (`vllm serve --scheduler-cls`), and nothing in kvcore does. It
imports vLLM and the standard library alone: where kvcore is not installed, a copy of the file
on `PYTHONPATH` will do.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from time import perf_counter
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

VARIABLE = "KVCORE_STEPS"
"""The environment variable with the path of the CSV file. Without it nothing is recorded."""

WARM_UP = 100
"""How many steps after the start of the server are not recorded: kernels are compiled and
memory is found in them."""

ROWS_AT_ONCE = 1_000
"""How many rows wait for a write while the server is busy; when it is idle, none do."""

MOST_ROWS = 100_000
"""Rows after which recording ends, so that a forgotten variable does not fill a disk."""

HEADER = "prefill_tokens,decode_sequences,context_tokens,attended_pairs,seconds\n"

NOT_PLAIN = (
    "scheduled_spec_decode_tokens",
    "scheduled_encoder_inputs",
    "has_structured_output_requests",
    "has_sync_kv_loads",
    "kv_cache_block_copies",
)
"""Fields of a `SchedulerOutput` that are true if a step does more than prefill and decode."""

_log = getLogger("vllm.kvcore")  # vLLM shows what is logged below its own name


class TimedScheduler(Scheduler):
    """vLLM's scheduler for `--no-async-scheduling`, recording the time of each step.

    A step ends when vLLM takes its output, and takes the time since the end of the step before:
    planning, launches and sampling are in it, as they are in the time between two tokens of a
    request. Nothing that goes wrong in recording reaches the server: it ends with a warning.
    """

    clock = staticmethod(perf_counter)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = _recorder(self)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next step, and note its work."""
        output = super().schedule(*args, **kwargs)
        if self._recorder:
            self._recorder.plan(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Process the output of a step that has ended now, and note its time."""
        now = self.clock()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._recorder:
            self._recorder.end(scheduler_output, now, busy=self.has_unfinished_requests())
        return outputs

    def shutdown(self) -> None:
        """Write what waits for a write, and shut down vLLM's scheduler."""
        if self._recorder:
            self._recorder.stop("the server shuts down")
        super().shutdown()


class TimedAsyncScheduler(TimedScheduler, AsyncScheduler):
    """vLLM's scheduler for asynchronous scheduling, its default, recording each step's time.

    A step is planned and launched while the one before runs, so the device goes from one to the
    next, and outputs come as far apart as steps take. Steps planned too late for that, as after
    idle time, are left out.
    """


class StepRecorder:
    """Writes the steps of one scheduler to a CSV file.

    Args:
        path: the file, which must not exist.
        ahead: whether steps are planned while the one before runs.

    Raises:
        OSError: the file exists, or cannot be written.
    """

    def __init__(self, path: Path, *, ahead: bool) -> None:
        self._path = path
        self._ahead = ahead
        self._plans: deque[tuple[Any, tuple[int, int, int, int] | None]] = deque()
        self._steps = 0
        self._since: float | None = None  # the end of the step before; None after idle time
        self._rows: list[str] = []
        self._written = 0
        self._size = 0
        # Unbuffered: a write is whole, or what there is of it can be cut off.
        self._file = path.open("xb", buffering=0)
        try:
            self._append(HEADER)
        except OSError:
            self._file.close()
            path.unlink(missing_ok=True)  # the next start would refuse to write over it
            raise

    def __bool__(self) -> bool:
        """Return True while steps are recorded."""
        return not self._file.closed

    def plan(self, output: Any) -> None:
        """Record the work of the step `output` that is run next. O(requests in the step)."""
        try:
            self._plans.append((output, work_of(output)))
        except Exception as error:  # noqa: BLE001 - no change of vLLM may end a server
            self._fail(error)

    def end(self, output: Any, now: float, *, busy: bool) -> None:
        """Record that the step `output` ended at `now` seconds; `busy` if requests are left."""
        try:
            self._end(output, now, busy=busy)
        except Exception as error:  # noqa: BLE001 - nor may a full disk
            self._fail(error)

    def stop(self, why: str) -> None:
        """Stop recording, and log how many steps are in the file."""
        try:
            self._write()
            self._file.close()
        except OSError as error:
            self._fail(error)
        else:
            _log.info("%s: %d steps in %s: %s", VARIABLE, self._written, self._path, why)

    def _end(self, output: Any, now: float, *, busy: bool) -> None:
        while self._plans:
            plan, work = self._plans.popleft()
            if plan is output:
                break
        else:
            work = None  # of a step that was not planned here nothing is known
        computed = output.total_num_scheduled_tokens > 0
        self._steps += computed
        since = self._since
        if work and since is not None and now > since and self._steps > WARM_UP:
            self._rows.append(f"{','.join(map(str, work))},{now - since:.9f}\n")
        goes_on = bool(self._plans) if self._ahead else busy
        self._since = now if computed and goes_on else None
        if self._written + len(self._rows) >= MOST_ROWS:
            self.stop("as many as are recorded")
        elif len(self._rows) >= (ROWS_AT_ONCE if goes_on else 1):
            self._write()

    def _write(self) -> None:
        self._append("".join(self._rows))
        self._written += len(self._rows)
        self._rows.clear()

    def _append(self, text: str) -> None:
        data = text.encode()
        if self._file.write(data) < len(data):
            msg = f"no space for {len(data)} bytes"
            raise OSError(msg)
        self._size += len(data)

    def _fail(self, error: Exception) -> None:
        """Stop recording, keep all rows that the disk takes, and log why, once."""
        if not isinstance(error, OSError):
            with suppress(OSError):
                self._write()
        with suppress(OSError):
            self._file.truncate(self._size)
        with suppress(OSError):
            self._file.close()
        steps = f"{self._written} steps are in {self._path}"
        _log.warning("%s: recording has ended (%r); %s", VARIABLE, error, steps)


def work_of(output: Any) -> tuple[int, int, int, int] | None:
    """Return the work of a step that vLLM has planned, in the order of the CSV's columns.

    A sequence decodes if it has generated a token and one token is computed. Other tokens are
    prompt tokens, also those that are computed again after a preemption. None for a step that
    does anything else, or nothing.
    """
    if any(getattr(output, name, None) for name in NOT_PLAIN):
        return None
    tokens_of = output.num_scheduled_tokens
    chunks = [(tokens_of[r.req_id], r.num_computed_tokens) for r in output.scheduled_new_reqs]
    decode = context = 0
    known = output.scheduled_cached_reqs
    for name, before, generated in zip(
        known.req_ids, known.num_computed_tokens, known.num_output_tokens, strict=True
    ):
        tokens = tokens_of[name]
        if tokens == 1 and generated and name not in known.resumed_req_ids:
            decode += 1
            context += before + 1
        else:
            chunks.append((tokens, before))
    prefill = sum(tokens for tokens, _ in chunks)
    pairs = sum(tokens * before + tokens * (tokens + 1) // 2 for tokens, before in chunks)
    return (prefill, decode, context, pairs) if prefill or decode else None


def _recorder(scheduler: TimedScheduler) -> StepRecorder | None:
    """Return the recorder of a scheduler; None, saying why, if it can record nothing."""
    config = scheduler.vllm_config
    ahead = bool(config.scheduler_config.async_scheduling)
    parallel = config.parallel_config
    reasons = {
        "the variable is not set": not os.environ.get(VARIABLE),
        "asynchronous scheduling takes TimedAsyncScheduler": ahead
        and not isinstance(scheduler, AsyncScheduler),
        "steps of a pipeline overlap": parallel.pipeline_parallel_size > 1,
        # Dense models come with a size of 1 here: their ranks do not wait.
        "data-parallel ranks wait for each other": parallel.data_parallel_size > 1,
        "every step computes drafts": config.speculative_config is not None,
        "steps compute LoRA": config.lora_config is not None,
    }
    why: object = next((reason for reason, holds in reasons.items() if holds), None)
    if why is None:
        path = Path(os.environ[VARIABLE])
        if parallel.data_parallel_index:
            path = path.with_stem(f"{path.stem}-{parallel.data_parallel_index}")
        try:
            return StepRecorder(path, ahead=ahead)
        except OSError as error:
            why = error
    _log.warning("%s: no steps are recorded: %s", VARIABLE, why)
    return None
