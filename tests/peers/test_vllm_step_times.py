"""Schedulers in vLLM's own engine loop record the steps that a device ran, and their times."""

from __future__ import annotations

import queue
from collections import deque
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from warnings import catch_warnings

import attrs
import pytest
from helpers.step_lists import random_server

from kvcore.serving import StepWork
from kvcore.units import NS_PER_S, PS_PER_S
from kvcore_lab.measured.calibration import fit_latency
from kvcore_plugins.latency import Linear, Roofline
from kvcore_plugins.latency.measured_steps import read_steps

with catch_warnings(action="ignore"):  # from packages that vLLM imports
    from helpers import vllm_engine
    from vllm.config import SchedulerConfig
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

    from kvcore_vllm.steps import WARM_UP

HOST = 0.0005
"""Seconds of the host to plan and launch a step."""


HOUR_NS = 3600 * NS_PER_S
"""Time between two bursts of requests, in which the server is idle."""


@attrs.frozen
class Ran:
    """A step that the device ran: its work as `StepWork` counts it, its start and its end."""

    work: tuple[int, int, int, int]
    start: float
    end: float


class Device:
    """A replacement of vLLM's executor that runs steps in order, on a clock of its own.

    It has the state of a model runner: the tokens of each sequence, and how many of them are
    computed. The duration of a step is that of `latency`, and time passes while its output is
    awaited.
    """

    def __init__(self, latency):
        self.latency = latency
        self.latency.bind()
        self.now = self.free = 0.0
        self.ran = []
        self.lengths, self.computed, self.generated = {}, {}, set()

    def execute_model(self, plan, *, non_block):
        """Launch a step; `sample_tokens` returns its tokens."""
        self.now += HOST
        done = Future()
        if not plan.num_scheduled_tokens:
            done.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
            return done
        work = self._work(plan)
        prefill, decode, context, pairs = work
        start = max(self.now, self.free)
        step = StepWork(prefill, (pairs,), decode, (context,))
        self.free = start + self.latency.duration(step) / PS_PER_S
        self.ran.append(Ran(work, start, self.free))
        self._launched = _Awaited(self, self.free, self._sample(plan))
        done.set_result(None)
        return done

    def sample_tokens(self, grammar, *, non_block=False):
        """Return the output of the step launched last, or a future of it."""
        return self._launched if non_block else self._launched.result()

    def _work(self, plan):
        for new in plan.scheduled_new_reqs:
            self.lengths.setdefault(new.req_id, new.prompt_len)
            self.computed[new.req_id] = new.num_computed_tokens
        known = plan.scheduled_cached_reqs
        admitted = known.resumed_req_ids | {new.req_id for new in plan.scheduled_new_reqs}
        for name, tokens in zip(known.req_ids, known.num_computed_tokens, strict=True):
            if name in known.resumed_req_ids:
                self.computed[name] = tokens
        prefill = decode = context = pairs = 0
        for name, tokens in plan.num_scheduled_tokens.items():
            attended = range(self.computed[name] + 1, self.computed[name] + tokens + 1)
            if tokens == 1 and name in self.generated - admitted:
                decode += 1
                context += sum(attended)
            else:
                prefill += tokens
                pairs += sum(attended)
            self.computed[name] += tokens
        return prefill, decode, context, pairs

    def _sample(self, plan):
        names = list(plan.num_scheduled_tokens)
        ready = [self.computed[name] == self.lengths[name] for name in names]
        for name in (name for name, done in zip(names, ready, strict=True) if done):
            self.lengths[name] += 1
            self.generated.add(name)
        places = {name: index for index, name in enumerate(names)}
        return ModelRunnerOutput(names, places, [[0] if done else [] for done in ready])


class _Awaited(Future):
    """The output of a step; waiting for it sets the clock to the end of the step."""

    def __init__(self, device, end, output):
        super().__init__()
        self.device, self.end = device, end
        self.set_result(output)

    def result(self, timeout=None):
        """Return the output at the end of the step."""
        self.device.now = max(self.device.now, self.end)
        return super().result(timeout)


def engine(scheduler, device, *, ahead):
    """Return vLLM's engine core around a scheduler; it has no model and is not started."""
    core = object.__new__(EngineCore)
    core.scheduler, core.model_executor = scheduler, device
    core.vllm_config, core.log_stats = scheduler.vllm_config, False
    core.batch_queue_size = 2
    core.batch_queue = deque(maxlen=2) if ahead else None
    core.is_mm_encoder_only = core.is_pooling_model = core.check_for_draft_tokens = False
    core.aborts_queue, core._weight_version = queue.Queue(), None
    core.step_fn = core.step_with_batch_queue if ahead else core.step
    return core


def record(server, latency, path, monkeypatch, *, ahead):
    """Serve `server` on a device; return the steps that ran, and the steps in the file."""
    kind = "TimedAsyncScheduler" if ahead else "TimedScheduler"
    dotted = f"kvcore_vllm.steps.{kind}"
    monkeypatch.setattr(
        vllm_engine, "SchedulerConfig", partial(SchedulerConfig, scheduler_cls=dotted)
    )
    monkeypatch.setenv("KVCORE_STEPS", str(path))
    device = Device(latency)
    bursts = [
        attrs.evolve(request, arrival=request.arrival + request.id // 50 * HOUR_NS)
        for request in server.requests
    ]
    server = attrs.evolve(server, lag=int(ahead), requests=bursts)
    scheduler = vllm_engine.make_scheduler(server)
    assert type(scheduler).__name__ == kind
    scheduler.clock = lambda: device.now
    core = engine(scheduler, device, ahead=ahead)
    arrivals = deque(server.requests)
    while arrivals or scheduler.has_requests() or core.batch_queue:
        if not scheduler.has_requests() and not core.batch_queue:
            device.now = max(device.now, arrivals[0].arrival / NS_PER_S)
        if not scheduler.has_unfinished_requests():
            device.now += HOST  # to wake up
        while arrivals and arrivals[0].arrival / NS_PER_S <= device.now:
            scheduler.add_request(vllm_engine.make_request(arrivals.popleft(), server))
        core.step_fn()
    scheduler.shutdown()
    return device.ran, read_steps(path)


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("seed", range(4))
def test_the_file_has_the_steps_that_ran_without_a_pause(tmp_path, monkeypatch, ahead, seed):
    """The file has the work and the time of each step that followed another without a pause.

    The first steps and those after idle time are missing. The time that the host takes to plan
    and launch is part of a step's time, unless the step before runs meanwhile.
    """
    latency = Linear(step=0.01, prefill=1e-5, decode=2e-5, context=1e-8)
    server = random_server(seed)
    path = tmp_path / "steps.csv"
    ran, found = record(server, latency, path, monkeypatch, ahead=ahead)
    gap = 0 if ahead else HOST
    expected = [
        (*each.work, each.end - before.end)
        for index, (before, each) in enumerate(pairwise(ran), 1)
        if index >= WARM_UP and each.start - before.end == pytest.approx(gap, abs=1e-9)
    ]
    assert 0 < len(expected) < len(ran) - WARM_UP  # some came after idle time
    assert [(*each.counts, each.pairs) for each in found] == [row[:4] for row in expected]
    times = [each.time / PS_PER_S for each in found]
    assert times == pytest.approx([row[4] for row in expected], abs=2e-9)


def test_a_host_that_is_slower_than_the_device_sets_the_time(tmp_path, monkeypatch):
    """A host slower than the device sets the time, even with asynchronous scheduling."""
    monkeypatch.setattr(f"{__name__}.HOST", 0.05)
    server, path = random_server(3), tmp_path / "steps.csv"
    ran, found = record(server, Linear(), path, monkeypatch, ahead=True)
    assert max(each.end - each.start for each in ran) < 0.05
    assert {each.time for each in found} == {round(0.05 * PS_PER_S)}


@pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "asynchronous"])
def test_calibrate_finds_the_constants_of_the_device(tmp_path, monkeypatch, ahead):
    """Fitting a recorded file finds the constants of the device's roofline.

    The time of a host that works between two steps is in the overhead of the layers.
    """
    device = Roofline(
        "llama-3.1-8b",
        "h100",
        tensor_parallel=1,
        compute=0.6,
        bandwidth=0.7,
        layer_overhead=6e-5,
    )
    path = tmp_path / "steps.csv"
    record(random_server(3), device, path, monkeypatch, ahead=ahead)
    found = fit_latency(path, Roofline("llama-3.1-8b", "h100", tensor_parallel=1))
    overhead = 6e-5 + (0 if ahead else HOST) / 32
    expected = {"compute": 0.6, "bandwidth": 0.7, "layer_overhead": overhead}
    assert found.fitted == pytest.approx(expected, rel=1e-3)
