"""Plans for several devices, and the commands that start their fleets."""

import json

import attrs
import pytest
from helpers.commands import run_here
from helpers.serving import ask

from kvcore import InputError
from kvcore.models.catalogue import DEVICES
from kvcore_lab.api import plan_devices
from kvcore_lab.plans.devices import devices_of
from kvcore_lab.plans.start import not_in_start, start_command
from kvcore_lab.report.plan import counted_memory

SMALL = {"tier": "none", "tensor_parallel": [1, 2], "max_gpus": 2, "slo": "ttft=0.2"}
ZIPF = "zipf:requests=40,prefixes=4,rate=4"

SETUP = {
    "model": "llama-3.1-8b",
    "block_size": 16,
    "max_tokens": 8192,
    "max_seqs": 256,
    "codec": "fp16",
    "chunked": True,
    "prefix": "radix",
    "scheduler": "fcfs",
    "eviction": "lru",
    "tier": "host:memory=1TiB",
    "weights_dtype": None,
    "retention": None,
    "drafter": None,
}
FLEET = {"tensor_parallel": 2, "pool_bytes": 2**30, "host_bytes": 0, "blocks": 512}
FLEET["max_model_len"] = 4096


@pytest.fixture(scope="module")
def plans():
    """Return plans for three devices, of which one has no price."""
    return plan_devices(["h100", "b200", "mi300x"], ZIPF, **SMALL, policies=[])


def test_fleets_are_ordered_by_cost(plans):
    """Fleets of all devices are ordered by cost, those without a price last."""
    fleets = plans.fleets
    assert {fleet["device"] for fleet in fleets} == {"h100", "b200", "mi300x"}
    costs = [fleet["usd_per_day"] for fleet in fleets]
    priced = [cost for cost in costs if cost is not None]
    assert costs == sorted(priced) + [None] * (len(costs) - len(priced))
    assert plans.best == fleets[0]


def test_devices_may_be_data_sheets():
    """A device given by its figures is told by its name, in plans, prices, notes and JSON."""
    small = attrs.evolve(DEVICES["l4"], name="small", hbm_bytes=2**30)
    plans = plan_devices([DEVICES["h100"], small], ZIPF, **SMALL, policies=[])
    assert plans.best["device"] == "h100"
    assert plans.best["usd_per_day"] is not None
    assert json.loads(json.dumps(plans.as_dict()))["plans"][0]["setup"]["device"] == "h100"
    assert [note.partition(":")[0] for note in plans.notes] == ["small"]


def test_fleets_that_cost_nothing_come_first():
    """A price of 0 is known: such a fleet is before those that cost something."""
    given = {"gpu_price": {"b200": 0.0}, "policies": []}
    plans = plan_devices(["h100", "b200"], ZIPF, **SMALL, **given)
    assert (plans.best["device"], plans.best["usd_per_day"]) == ("b200", 0.0)


def test_the_front_has_the_fleets_that_no_other_beats(plans):
    """A fleet is on the front unless another is as good in all objectives, and not equal."""

    def objectives(fleet):
        return fleet["usd_per_day"], -fleet["throughput_tokens_s"], fleet["ttft_p99_s"]

    priced = [fleet for fleet in plans.fleets if fleet["usd_per_day"] is not None]
    for fleet in priced:
        own = objectives(fleet)
        better = [
            other
            for other in map(objectives, priced)
            if other != own and all(a <= b for a, b in zip(other, own, strict=True))
        ]
        assert fleet["pareto"] is not bool(better)
    unpriced = [fleet for fleet in plans.fleets if fleet["usd_per_day"] is None]
    assert {fleet["pareto"] for fleet in unpriced} == {None}


def test_a_device_on_which_the_model_does_not_fit_is_left_out():
    """A device that is too small is left out with the reason; if all are, that is an error."""
    options = SMALL | {"tensor_parallel": [1], "max_gpus": 1, "policies": []}
    found = plan_devices(["rtx-4090", "h200"], ZIPF, model="qwen3-32b", **options)
    assert [plan.setup["device"] for plan in found.plans] == ["h200"]
    assert found.notes[0].startswith("rtx-4090: ")
    with pytest.raises(InputError, match="qwen3-32b"):
        plan_devices(["rtx-4090", "l4"], ZIPF, model="qwen3-32b", **options)


def test_the_verb_compares_devices(tmp_path):
    """`plan --device` with several names prints one table, and writes its document."""
    flags = ("--slo", "ttft=0.2", "--tensor-parallel", 1, "--max-gpus", 1, "--tier", "none")
    asked = ("plan", ZIPF, *flags, "--device", "h100,l4", "--jobs", 1, "--gpu-price", "l4=1")
    done = run_here(*asked, cwd=tmp_path)
    written = json.loads((tmp_path / "plan-results" / "plan.json").read_bytes())
    assert [fleet["device"] for fleet in written["fleets"]] == ["h100"]
    assert written["fleets"][0]["start"].startswith("vllm serve meta-llama/Llama-3.1-8B ")
    lines = done.stdout.splitlines()
    assert any(line.startswith("Take 1 replica on 1 x h100") for line in lines)
    assert "Start each replica, with all the K/V memory of its GPUs:" in lines
    assert "busiest" not in done.stdout  # the table has no such column
    assert "$/M: dollars per million" in " ".join(done.stdout.split())
    assert json.loads(run_here(*asked, "--json", cwd=tmp_path).stdout) == written


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("h100", ["h100"]),
        ("h100,b200", ["h100", "b200"]),
        (
            "h100,memory=141GB,bandwidth=4.8TB,flops=989T,b200",
            ["h100", "memory=141GB,bandwidth=4.8TB,flops=989T", "b200"],
        ),
        (
            "h100:memory=84.9GB,link=1GB,h200:memory=150GB,b200",
            ["h100:memory=84.9GB,link=1GB", "h200:memory=150GB", "b200"],
        ),
    ],
)
def test_figures_of_a_device_are_one_of_a_list(text, devices):
    """Figures with commas are one device of a list."""
    assert devices_of(text) == devices


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        (["h100"], "(80 GB of h100)"),
        (["h100:memory=84.9GB", "b200"], "(180 GB of b200)"),
        (["h100:memory=84.9GB"], ""),
    ],
)
def test_the_memory_that_was_counted_is_told(devices, told):
    """A plan says which memory of a GPU it counted, unless it was given."""
    text = counted_memory(devices)
    assert (told in text) if told else text == ""
    assert not text or f"--device {devices[-1]}:memory=SIZE" in text


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        ({}, "--tensor-parallel-size 2 --kv-cache-memory-bytes 536870912 --block-size 16"),
        ({}, "--max-model-len 4096"),
        ({"codec": "fp8"}, "--kv-cache-dtype fp8"),
        ({"weights_dtype": "fp8"}, "--quantization fp8"),
        ({"chunked": False}, "--no-enable-chunked-prefill"),
        ({"prefix": "none"}, "--no-enable-prefix-caching"),
        ({"host_bytes": 2**31}, "--kv-offloading-backend native --kv-offloading-size 2"),
    ],
)
def test_vllm_is_started_with_the_options_of_the_fleet(changed, flags):
    """The command of vLLM has the memory of one GPU, and a flag for each option."""
    fleet = {name: changed.get(name, value) for name, value in FLEET.items()}
    command = start_command(SETUP | changed, fleet)
    assert command.startswith("vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2")
    assert flags in command


def test_sglang_is_started_under_its_rules():
    """Under the rules of SGLang the command is its own, with tokens in place of bytes."""
    changed = {"like": "sglang:lag=0", "block_size": 1, "scheduler": "lpm", "chunked": False}
    command = start_command(SETUP | changed, FLEET | {"host_bytes": 4 * 10**9})
    assert command == (
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --tp-size 2 "
        "--max-total-tokens 512 --page-size 1 --chunked-prefill-size -1 --max-running-requests "
        "256 --schedule-policy lpm --context-length 4096 --enable-hierarchical-cache "
        "--hicache-size 2"
    )


@pytest.mark.parametrize(
    ("changed", "absent"),
    [
        ({}, []),
        ({"codec": "fp8", "weights_dtype": "fp8"}, []),
        ({"like": "sglang", "scheduler": "lpm", "eviction": "lru:renew_split=true"}, []),
        (
            {"scheduler": "slo"},
            ["scheduler slo (vLLM has fcfs, and priority with lower values first)"],
        ),
        (
            {"like": "sglang", "scheduler": "slo", "eviction": "slru"},
            ["scheduler slo (SGLang has fcfs and lpm by these names)", "eviction slru"],
        ),
        ({"eviction": "my.py:P"}, ["eviction my.py:P (docs/how-to/deploy-in-vllm.md)"]),
        (
            {"codec": "int8", "tier": "host:memory=1GiB,disk:path=kv,memory=1TiB"},
            ["tier disk:path=kv,memory=1TiB", "codec int8"],
        ),
    ],
)
def test_what_no_flag_of_the_engine_sets_is_named(changed, absent):
    """Policies, tiers and codecs of the plan that the engine has no flag for are listed."""
    assert not_in_start(SETUP | changed) == absent


def test_sglang_is_started_without_a_scheduler_that_it_lacks():
    """SGLang refuses names of schedulers that it does not have."""
    assert "slo" not in start_command(SETUP | {"like": "sglang", "scheduler": "slo"}, FLEET)


def test_a_note_about_the_workload_is_told_once_for_all_devices():
    """Prompts beyond the positions of the model are so on every device."""
    workload = "zipf:requests=4,prefixes=1,prefix_tokens=9000"
    options = SMALL | {"model": "llama-3-8b", "slo": "ttft=9", "policies": []}
    (note,) = plan_devices(["h100", "h200"], workload, **options).workload_notes
    assert "beyond the 8,192 positions of llama-3-8b (4 of 4)" in note


@pytest.mark.parametrize("once", ["devices", "workload", "tensor_parallel", "replicas"])
def test_what_can_be_read_once_is_read_for_all_devices(once):
    """An iterator in place of a list gives the plans of the list."""
    requests = [ask(n, n * 10**8, 16, keys=[n % 5], key_tokens=16) for n in range(40)]
    given = {"devices": ["h100", "h200"], "workload": requests, "replicas": [1]}
    given |= SMALL | {"policies": []}
    found = plan_devices(**given | {once: iter(given[once])})
    assert found.as_dict() == plan_devices(**given).as_dict()
    assert len(found.plans) == 2


def test_devices_are_read_as_on_the_command_line():
    """Text has devices, not letters; and there is at least one."""
    options = SMALL | {"tensor_parallel": 1, "policies": []}
    found = plan_devices("h100,h200", ZIPF, **options)
    assert [plan.setup["device"] for plan in found.plans] == ["h100", "h200"]
    with pytest.raises(InputError, match="devices: none was given"):
        plan_devices([], ZIPF, **options)


def test_a_report_says_which_devices_were_left_out(tmp_path):
    """The table has no line of them, so that a sentence says why, once."""
    flags = ("--slo", "ttft=0.2", "--tensor-parallel", 1, "--max-gpus", 1, "--tier", "none")
    asked = ("plan", ZIPF, *flags, "--model", "qwen3-32b", "--device", "rtx-4090,h200")
    done = run_here(*asked, "--jobs", 1, cwd=tmp_path)
    assert "\nLeft out: rtx-4090: " in done.stdout
    assert "rtx-4090" not in done.stderr
    assert "rtx-4090" in run_here(*asked, "--json", "--jobs", 1, cwd=tmp_path).stderr


def test_plans_for_devices_go_on_from_one_journal(tmp_path):
    """`kvcore.plan_devices` takes the options of `kvcore.plan`: a journal's path, and jobs."""
    journal, cells = tmp_path / "journal", []
    for _ in range(2):
        plan_devices("h100,h200", ZIPF, **SMALL, policies=[], journal=journal, jobs=1)
        cells.append(journal.read_text().count('"cell"'))
    assert 0 < cells[0] == cells[1]
