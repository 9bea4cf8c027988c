"""What-if: another model, device, number of GPUs or memory."""

import re

import pytest
from helpers.recordings import PLUGINS, timed, untimed
from helpers.serving import ask
from helpers.traces import lines, seal

from kvcore import InputError, simulate
from kvcore_replay.what_if import whatif

ZIPF = "zipf:requests=60,prefixes=9,rate=30"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return the trace of a simulation whose pool is all that fits beside the weights."""
    path = tmp_path_factory.mktemp("whatif") / "trace.jsonl"
    simulate(ZIPF, trace=path)
    return path


@pytest.mark.parametrize(
    "changed",
    [
        {"device": "b200"},
        {"device": "memory=141GB,bandwidth=4.8TB,flops=989T"},
        {"tensor_parallel": 1},
        {"model": "llama-3-70b"},
        {"model": "qwen3-8b", "device": "h200", "tensor_parallel": 2},
        {"memory": "2GiB"},
        {"device": "b200", "memory": "2GiB"},
        {"device": "b200", "blocks": 500},
        {"device": "b200", "block_size": 32},
    ],
    ids=str,
)
def test_the_exported_trace_is_that_of_a_fresh_simulation(path, tmp_path, changed):
    """A run on another deployment has the bytes of a fresh simulation with these options."""
    whatif(path, export=tmp_path / "new.jsonl", **changed)
    simulate(ZIPF, trace=tmp_path / "fresh.jsonl", **changed)
    assert (tmp_path / "new.jsonl").read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()


def test_weights_keep_their_number_format(tmp_path):
    """Weights that were in another number format than released are that on another device."""
    simulate(ZIPF, weights_dtype="fp8", trace=tmp_path / "trace.jsonl")
    whatif(tmp_path / "trace.jsonl", device="b200", export=tmp_path / "new.jsonl")
    simulate(ZIPF, weights_dtype="fp8", device="b200", trace=tmp_path / "fresh.jsonl")
    assert (tmp_path / "new.jsonl").read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()


def test_both_runs_have_the_cost_of_their_gpus(path):
    """A day on two GPUs at 3 dollars an hour costs 144, beside 192 on four at 2."""
    found = whatif(path, device="b200", tensor_parallel=2, gpu_price="h100=2,b200=3")
    days = [run.cost["usd_per_day"] for run in (found.recorded, found.rerun)]
    assert days == [192, 144]
    for run in (found.recorded, found.rerun):
        day_tokens = run.throughput_tokens_s * 86400 / 1e6
        a_million = run.cost["usd_per_million_output_tokens"]
        assert a_million == pytest.approx(run.cost["usd_per_day"] / day_tokens)
    text = str(found)
    assert re.search(r"cost a day, \$ +192\.00 +144\.00 +-25\.0%", text)
    assert "GPUs: h100 at $2.00 an hour, given; b200 at $3.00 an hour, given." in text


def test_costs_of_clusters_are_those_of_all_replicas(path):
    """Three replicas cost three times as much; without a price there is no cost."""
    found = whatif(path, replicas=3, gpu_price={"h100": 1})
    assert (found.recorded.cost["usd_per_hour"], found.rerun.cost["usd_per_hour"]) == (4, 12)
    several = [{"count": 2, "tensor_parallel": 2}, {"device": "b200", "tensor_parallel": 1}]
    found = whatif(path, replicas=several, gpu_price={"H100": 1, "b200": 3})
    assert found.rerun.cost["usd_per_hour"] == 2 * 2 + 3
    found = whatif(path, device="memory=141GB,bandwidth=4.8TB,flops=989T")
    assert found.rerun.cost is None
    assert "cost a day, $" in str(found)


def test_a_pool_of_a_size_that_was_given_keeps_its_blocks(tmp_path):
    """A pool that is not all that fits keeps its number of blocks, with its tiers."""
    options = {"blocks": 300, "tier": "host:memory=8GiB"}
    simulate(ZIPF, trace=tmp_path / "trace.jsonl", **options)
    found = whatif(tmp_path / "trace.jsonl", device="b200", tensor_parallel=2)
    assert found.recorded.config["blocks"] == found.rerun.config["blocks"] == 300
    assert found.recorded.config["device"] == {"name": "h100", "count": 4}
    assert found.rerun.config["device"] == {"name": "b200", "count": 2}
    assert found.rerun.config["tiers"] == found.recorded.config["tiers"]


def test_a_run_without_a_clock_has_no_device(tmp_path):
    """A deployment is refused for a trace without a clock."""
    path = untimed(tmp_path / "trace.jsonl", ["ab"])
    with pytest.raises(InputError, match="without a clock: it has no device"):
        whatif(path, device="b200")


@pytest.mark.parametrize("changed", [{"device": "b200"}, {"memory": "1GiB"}], ids=str)
def test_a_header_without_a_model_is_refused(tmp_path, changed):
    """A deployment, or memory, is refused if the header does not name the model."""
    path = timed(tmp_path / "trace.jsonl", [ask("a")])
    with pytest.raises(InputError, match=r"says nothing of the model.*: give blocks"):
        whatif(path, plugins=PLUGINS, **changed)


def test_a_latency_model_that_knows_no_device_is_refused(tmp_path):
    """Another device is refused if recorded times would be the same on it."""
    path, latency = tmp_path / "trace.jsonl", "linear:step=0.001"
    simulate(ZIPF, latency=latency, trace=path)
    with pytest.raises(InputError, match="'linear', whose times are the same on every device"):
        whatif(path, device="b200")
    assert whatif(path, device="b200", latency="roofline").rerun.config["blocks"] > 129_670


def test_a_latency_model_of_a_file_is_refused(path, tmp_path):
    """No file is opened because a trace names it, on another device neither."""
    events = lines(path)
    options = {"model": "llama-3.1-8b", "device": "h100", "path": "/etc/hostname"}
    events[0]["plugins"]["latency"] = {"name": "table", "options": options}
    with pytest.raises(InputError, match="no file is opened because a trace names it"):
        whatif(seal(tmp_path / "trace.jsonl", events), device="b200")


def test_cache_groups_keep_their_deployment(tmp_path):
    """Another deployment is refused for a trace of cache groups, whose sizes would change."""
    path = tmp_path / "trace.jsonl"
    simulate(ZIPF, model="gemma-3-4b", trace=path)
    with pytest.raises(InputError, match="recorded with cache groups"):
        whatif(path, device="b200")
