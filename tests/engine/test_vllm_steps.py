"""The vLLM schedulers that record steps, tested on fakes of vLLM's own schedulers.

`tests/peers/test_vllm_step_times.py` runs them in the real package.
"""

import ast
import sys
from collections import deque
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from io import FileIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvcore_lab.measured.calibration import fit_latency
from kvcore_plugins.latency import Linear
from kvcore_plugins.latency.measured_steps import read_steps

SOURCE = Path(__file__).parents[2] / "plugins/kvcore-vllm/kvcore_vllm/steps.py"


class Base:
    """A fake of vLLM's scheduler that plans the steps of a script and is then idle."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.script = deque()
        self.closed = False

    def schedule(self):
        """Return the next plan."""
        return self.script.popleft()

    def update_from_output(self, scheduler_output, model_runner_output):
        """Return the output unchanged."""
        return model_runner_output

    def has_unfinished_requests(self):
        """Return True while there are plans."""
        return bool(self.script)

    def shutdown(self):
        """Record the call."""
        self.closed = True


class AsyncBase(Base):
    """A fake of vLLM's scheduler that plans ahead."""


@pytest.fixture
def steps(monkeypatch):
    """Import the module as vLLM would, without vLLM; record steps from the first on."""
    for name, members in {
        "vllm.v1.core.sched.scheduler": {"Scheduler": Base},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncBase},
    }.items():
        stub = ModuleType(name)
        vars(stub).update(members)
        monkeypatch.setitem(sys.modules, name, stub)
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    spec = spec_from_file_location("steps", SOURCE)
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    monkeypatch.setattr(found, "WARM_UP", 0)
    return found


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Return the path of the recording, and set it in the environment."""
    path = tmp_path / "steps.csv"
    monkeypatch.setenv("KVCORE_STEPS", str(path))
    return path


@pytest.fixture
def server(steps):
    """Yield a function that starts a scheduler; shut all down after the test."""
    started = []

    def start(kind=None, **options):
        kind = kind or (
            steps.TimedAsyncScheduler if options.get("lag") else steps.TimedScheduler
        )
        started.append(kind(config(**options)))
        return started[-1]

    yield start
    for each in started:
        each.shutdown()


def config(*, lag=False, pipeline=1, data=1, rank=0, drafts=None, lora=None):
    """Return the parts of a `VllmConfig` that the schedulers read."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=lag),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=pipeline, data_parallel_size=data, data_parallel_index=rank
        ),
        speculative_config=drafts,
        lora_config=lora,
    )


def step(*, new=(), known=(), resumed=(), **special):
    """Return a plan of requests, each given as (tokens, tokens before).

    Known requests have the number of generated tokens as a third item.
    """
    counts = {f"new {i}": tokens for i, (tokens, _) in enumerate(new)}
    counts |= {f"known {i}": tokens for i, (tokens, *_) in enumerate(known)}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=f"new {i}", num_computed_tokens=before)
            for i, (_, before) in enumerate(new)
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[f"known {i}" for i in range(len(known))],
            num_computed_tokens=[before for _, before, _ in known],
            num_output_tokens=[generated for *_, generated in known],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        **special,
    )


def decode(context):
    """Return a plan with one sequence that generates."""
    return step(known=[(1, context - 1, 1)])


def serve(scheduler, plans, ends, *, ahead=0):
    """Plan steps, `ahead` of the running one, and end them; return their outputs."""
    scheduler.script.extend(plans)
    running, times = deque(), iter(ends)
    scheduler.clock = lambda: next(times)
    outputs = []
    while scheduler.script or running:
        while scheduler.script and len(running) <= ahead:
            running.append(scheduler.schedule())
        outputs.append(scheduler.update_from_output(running.popleft(), len(outputs)))
    return outputs


def rows(path):
    """Return (prefill, decode, context, pairs, milliseconds) of each row."""
    lines = path.read_text().splitlines()
    if len(lines) == 1:
        return []
    return [(*each.counts, each.pairs, each.time // 10**9) for each in read_steps(path)]


def test_the_module_needs_only_vllm_and_the_standard_library():
    """The file imports only vLLM and the standard library, and so works without kvcore."""
    nodes = ast.walk(ast.parse(SOURCE.read_text("utf-8")))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    nodes = ast.walk(ast.parse(SOURCE.read_text("utf-8")))
    names |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"vllm"}


def test_a_row_has_the_work_and_the_time_of_a_step(server, path):
    """A row has the work of a step and the time since the end of the step before.

    The work is prompt tokens with their pairs, and decoding sequences with their contexts.
    """
    scheduler = server()
    mixed = step(new=[(3, 16)], known=[(1, 9, 4), (1, 99, 1), (5, 20, 0)])
    assert serve(scheduler, [decode(5), mixed, decode(6)], [1, 1.004, 1.010]) == [0, 1, 2]
    scheduler.shutdown()
    pairs = (17 + 18 + 19) + (21 + 22 + 23 + 24 + 25)
    assert rows(path) == [(8, 2, 10 + 100, pairs, 4), (0, 1, 6, 0, 6)]


@pytest.mark.parametrize(
    ("plan", "prefill", "decoding"),
    [
        ({"known": [(1, 30, 0)]}, 1, 0),
        ({"known": [(1, 30, 1)]}, 0, 1),
        ({"known": [(7, 0, 3)]}, 7, 0),
        ({"known": [(1, 30, 3)], "resumed": ["known 0"]}, 1, 0),
    ],
    ids=["last token of a prompt", "generates", "again after a preemption", "one token again"],
)
def test_a_token_of_a_request_that_has_generated_is_decoding(
    server, path, plan, prefill, decoding
):
    """A single token of a request that has generated is decoding.

    All other tokens are prompt tokens.
    """
    scheduler = server()
    serve(scheduler, [decode(5), step(**plan)], [1, 2])
    assert rows(path)[0][:2] == (prefill, decoding)


def test_the_first_step_after_idle_time_is_left_out(server, path):
    """The first step after idle time is not recorded, since its time is unknown."""
    scheduler = server()
    serve(scheduler, [decode(5), decode(6)], [1, 2])
    serve(scheduler, [decode(7), decode(8)], [60, 63])
    assert [(row[2], row[-1]) for row in rows(path)] == [(6, 1000), (8, 3000)]


@pytest.mark.parametrize(
    "special",
    [
        {"scheduled_spec_decode_tokens": {"known 0": [1]}},
        {"scheduled_encoder_inputs": {"known 0": [0]}},
        {"has_structured_output_requests": True},
        {"has_sync_kv_loads": True},
        {"kv_cache_block_copies": [object()]},
    ],
    ids=lambda special: next(iter(special)),
)
def test_steps_with_other_work_are_left_out(server, path, special):
    """Steps with drafts, encoders, grammars, loads or copies are not recorded.

    The step after such a step is recorded.
    """
    odd = step(known=[(1, 5, 1)], **special)
    serve(server(), [decode(5), odd, decode(7)], [1, 2, 3])
    assert [row[2] for row in rows(path)] == [7]


def test_a_step_that_was_not_planned_here_is_left_out(server, path):
    """The end of a step that was never planned has no work: that of another is not its own."""
    scheduler = server()
    scheduler.script.extend([decode(5), decode(6), decode(7)])
    for now, foreign in ((1, None), (2, decode(8))):
        scheduler.clock = partial(int, now)
        planned = scheduler.schedule()
        scheduler.update_from_output(foreign or planned, 0)
    scheduler.shutdown()
    assert rows(path) == []


def test_recording_ends_after_the_greatest_number_of_rows(server, steps, path, monkeypatch):
    """Recording ends after `MOST_ROWS` rows, so that it does not fill a disk."""
    monkeypatch.setattr(steps, "MOST_ROWS", 4)
    serve(server(), map(decode, range(1, 9)), range(8))
    assert len(rows(path)) == 4


class FullDisk(FileIO):
    """A file on a disk with room for two and a half rows."""

    left = 50

    def write(self, data):
        """Write as much as there is room for."""
        if not self.left:
            msg = "no space left on device"
            raise OSError(msg)
        written = super().write(data[: self.left])
        self.left -= written
        return written


def test_a_full_disk_ends_recording_with_one_warning(server, steps, path, monkeypatch, caplog):
    """On a full disk recording ends with whole rows and one warning. The server continues."""
    monkeypatch.setattr(steps, "ROWS_AT_ONCE", 1)
    scheduler = server()
    scheduler._recorder._file.close()
    scheduler._recorder._file = FullDisk(path, "ab")
    assert serve(scheduler, map(decode, range(1, 9)), range(8)) == [*range(8)]
    scheduler.shutdown()
    assert [row[2] for row in rows(path)] == [2, 3]
    (warning,) = caplog.records
    assert "recording has ended" in warning.message
    assert scheduler.closed


def test_a_disk_without_room_for_the_header_gets_no_file(server, path, monkeypatch, caplog):
    """Without room for the header no steps are recorded, and no file is in the way later."""
    monkeypatch.setattr(FullDisk, "left", 20)
    monkeypatch.setattr(Path, "open", lambda path, mode, **_: FullDisk(path, mode))
    assert serve(server(), [decode(1), decode(2)], [1, 2]) == [0, 1]
    assert not path.exists()
    assert "no steps are recorded: no space" in caplog.text


def test_a_plan_of_another_layout_ends_only_the_recording(server, path, caplog):
    """A plan with unknown attributes ends recording with one warning. The server continues.

    The file has the rows of all steps before.
    """
    scheduler = server()
    other = SimpleNamespace(total_num_scheduled_tokens=1)
    assert serve(scheduler, [decode(1), decode(2), other, decode(3)], range(4)) == [*range(4)]
    assert [row[2] for row in rows(path)] == [2]
    (warning,) = caplog.records
    assert "recording has ended (AttributeError" in warning.message
    assert warning.message.endswith(f"; 1 steps are in {path}")


def test_an_existing_file_is_not_overwritten(server, path, caplog):
    """An existing file is not overwritten: the server logs a warning and continues."""
    path.write_text("mine")
    assert serve(server(), [decode(1), decode(2)], [1, 2]) == [0, 1]
    assert path.read_text() == "mine"
    assert "File exists" in caplog.text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"lag": True}, "TimedAsyncScheduler"),
        ({"pipeline": 2}, "pipeline"),
        ({"data": 2}, "data-parallel"),
        ({"drafts": object()}, "drafts"),
        ({"lora": object()}, "LoRA"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_a_server_without_plain_steps_warns_and_records_nothing(
    server, steps, path, caplog, options, why
):
    """A server whose steps cannot be recorded writes one warning with the reason.

    It writes no file and continues.
    """
    scheduler = server(steps.TimedScheduler, **options)
    assert serve(scheduler, [decode(1), decode(2)], [1, 2]) == [0, 1]
    scheduler.shutdown()
    assert not path.exists()
    (warning,) = caplog.records
    assert why in warning.message


def test_without_the_variable_nothing_is_recorded(server, tmp_path, monkeypatch, caplog):
    """Without KVCORE_STEPS nothing is recorded, and the log names the variable."""
    monkeypatch.delenv("KVCORE_STEPS", raising=False)
    monkeypatch.chdir(tmp_path)
    scheduler = server()
    assert serve(scheduler, [decode(1), decode(2)], [1, 2]) == [0, 1]
    scheduler.shutdown()
    assert not list(tmp_path.iterdir())
    assert "KVCORE_STEPS" in caplog.text


def test_the_recorded_steps_calibrate_a_latency_model(server, steps, path):
    """Constants fitted to the recorded steps are those that the times were made from."""
    plans = [
        step(new=[(tokens, 0)] * bool(tokens), known=[(1, context - 1, 1)] * seqs)
        for tokens in (0, 512, 2048)
        for seqs, context in ((1, 2000), (64, 250), (64, 3000), (256, 400))
    ]
    works = [steps.work_of(plan) for plan in plans]
    ends = [0.0]
    for prefill, seqs, context, _ in works:
        ends.append(ends[-1] + 0.003 + prefill * 1e-5 + seqs * 2e-5 + context * 1e-8)
    serve(server(), [decode(1), *plans], ends)
    assert [list(row[:4]) for row in rows(path)] == [[*work] for work in works]
    found = fit_latency(path, Linear())
    expected = {"step": 0.003, "prefill": 1e-5, "decode": 2e-5, "context": 1e-8}
    assert found.fitted == pytest.approx(expected, rel=1e-4)
