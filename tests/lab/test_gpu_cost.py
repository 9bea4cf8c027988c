"""Prices of GPU hours, and what a deployment costs by them."""

import json

import pytest
from helpers.commands import run_here

from kvcore import InputError, simulate, simulate_cluster
from kvcore.models.catalogue import DEVICES
from kvcore_lab.router_comparison import compare_routers
from kvcore_replay.gpu_cost import PRICES, Cost, read_gpu_prices

ZIPF = "zipf:requests=60,prefixes=5,rate=20"


def test_prices_are_of_known_devices_with_source_and_day():
    """Each price of the table is of a device of the catalogue, and has a source with a day."""
    assert PRICES.keys() <= DEVICES.keys()
    for price in PRICES.values():
        assert price.usd > 0
        source, day = price.source.split(", read ")
        assert source
        assert len(day.split("-")) == 3


@pytest.mark.parametrize(
    ("text", "prices"),
    [
        ("h100=2.5,b200=5", {"h100": 2.5, "b200": 5}),
        ("2", {"": 2}),
        ("3,H200=4", {"": 3, "h200": 4}),
        (
            {"": 3, "H200": 4, "h100:memory=84.9GB": 5},
            {"": 3, "h200": 4, "h100:memory=84.9GB": 5},
        ),
        (None, {}),
    ],
)
def test_prices_are_read_from_text_or_a_mapping(text, prices):
    """A text or a mapping has a price for each device, and one for all others."""
    assert read_gpu_prices(text) == prices


@pytest.mark.parametrize(
    "text",
    ["", "h100", "h100=", "h100=x", "h100=-1", "=2", "inf", "nan", {"h100": -3}, {"": True}],
)
def test_what_is_no_price_is_refused(text):
    """A text that is no price is an error that shows an example."""
    with pytest.raises(InputError, match=r"such as h100=2\.5,b200=5"):
        read_gpu_prices(text)


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("h100=2,H100=3", "h100"),
        ("2.5,3", "all devices"),
        ("2,h100=3,h100=3", "h100"),
        ({"h100": 2, "H100": 3}, "h100"),
    ],
)
def test_two_prices_of_a_device_are_refused(text, device):
    """Which of two prices holds is not guessed."""
    with pytest.raises(InputError, match=f"two prices of {device}: leave out one of them"):
        read_gpu_prices(text)


def test_gpus_that_cost_nothing_have_all_figures():
    """At a price of 0 all costs are known, and are 0."""
    assert str(Cost.for_gpus({"h100": 2}, {"h100": 0.0}, 1000.0, 4000.0)) == (
        "Cost: $0.0000 an hour, $0.0000 a day (h100 at $0.0000 an hour, given); "
        "$0.0000 per million generated tokens, $0.0000 per million tokens in all."
    )


def test_costs_follow_from_prices_and_rates():
    """Two GPUs at 1.80 dollars, at 1,000 tokens a second, cost a dollar a million."""
    cost = Cost.for_gpus({"h100": 2}, {"h100": 1.8}, 1000.0, 4000.0)
    assert cost.usd_per_hour == 3.6
    assert cost.usd_per_day == pytest.approx(86.4)
    assert cost.usd_per_million_output_tokens == pytest.approx(1.0)
    assert cost.usd_per_million_tokens == pytest.approx(0.25)
    assert str(cost) == (
        "Cost: $3.60 an hour, $86.40 a day (h100 at $1.80 an hour, given); $1.00 per million "
        "generated tokens, $0.2500 per million tokens in all."
    )


def test_a_simulation_ends_with_its_cost():
    """`simulate` prints the cost of its GPUs, which `cost` of the JSON has."""
    flags = ("simulate", ZIPF, "--tensor-parallel", 2, "--gpu-price", "h100=3")
    cost = json.loads(run_here(*flags, "--json").stdout)["cost"]
    result = simulate(ZIPF, tensor_parallel=2)
    assert cost["usd_per_hour"] == 6
    rate = result.throughput_tokens_s
    assert cost["usd_per_million_output_tokens"] == pytest.approx(6e6 / 3600 / rate)
    tokens = (sum(result.log.prompt) + sum(result.log.output)) / result.simulated_s
    assert cost["usd_per_million_tokens"] == pytest.approx(6e6 / 3600 / tokens)
    assert "Cost: $6.00 an hour, $144.00 a day" in run_here(*flags).stdout


@pytest.mark.parametrize(
    ("value", "hour"), [("2.5", 2.5), ("2", 2), ('"2.5"', 2.5), ('"h100=2.5"', 2.5)]
)
def test_a_file_has_the_price_of_a_gpu_as_a_number_or_text(tmp_path, value, hour):
    """`gpu_price` of a TOML file is what `--gpu-price` reads, or one number for all devices."""
    config = tmp_path / "run.toml"
    config.write_text(f'workload = "{ZIPF}"\ntensor_parallel = 1\ngpu_price = {value}\n')
    cost = json.loads(run_here("simulate", "--config", config, "--json").stdout)["cost"]
    assert cost["usd_per_hour"] == hour


@pytest.mark.parametrize(("value", "kind"), [("true", "true"), ("[2.5]", "a list")])
def test_a_price_in_a_file_that_is_none_is_refused(tmp_path, value, kind):
    """The error names the key, what it takes, and what it has."""
    config = tmp_path / "run.toml"
    config.write_text(f"gpu_price = {value}\n")
    done = run_here("simulate", ZIPF, "--config", config)
    assert done.returncode == 2
    assert (
        f"gpu_price: expected text such as 'h100=2.5', or a number, not {kind}" in done.stderr
    )


def test_a_simulation_has_the_figures_of_benchmarks():
    """Rates are those of `vllm bench serve`, with the tokens of a GPU and running requests."""
    document = json.loads(run_here("simulate", ZIPF, "--json").stdout)
    rates, result = document["rates"], simulate(ZIPF)
    seconds, log = result.simulated_s, result.log
    assert rates["request_throughput"] == pytest.approx(len(log.ids) / seconds)
    assert rates["output_throughput"] == pytest.approx(sum(log.output) / seconds)
    tokens = sum(log.prompt) + sum(log.output)
    assert rates["total_token_throughput"] == pytest.approx(tokens / seconds)
    assert rates["tokens_per_gpu"] == pytest.approx(tokens / seconds / 4)
    served = sum(log.finish) - sum(log.admitted)
    assert rates["running"] == pytest.approx(served / 1e9 / seconds)


def test_servers_that_are_down_cost_nothing():
    """A cluster whose planner stops servers costs those that are up, in the mean."""
    options = {"replicas": 4, "autoscale": "load:interval=0.2,start_up=0.1"}
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    cost = json.loads(run_here("simulate", ZIPF, *flags, "--gpu-price", 1, "--json").stdout)
    result = simulate_cluster(ZIPF, **options)
    up = result.replica_s / result.simulated_s
    assert up < 4
    assert cost["cost"]["usd_per_hour"] == pytest.approx(4 * up)


def test_a_server_that_was_never_started_costs_nothing():
    """Where servers differ, the cost is that of those which the planner had up."""
    servers = [{"device": "h100"}, {"count": 3, "device": "h200"}]
    given = {"gpu_price": {"h100": 1, "h200": 100}, "autoscale": "load"}
    found = compare_routers(ZIPF, "round-robin", servers, tensor_parallel=1, **given)
    assert [row.usd_per_day for row in found.rows] == [24]


def test_the_list_of_prices_is_printed():
    """`--gpu-price list` prints the table with sources, and simulates nothing."""
    done = run_here("simulate", "--gpu-price", "list")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == [*PRICES]


def test_a_sweep_has_costs_in_each_row(tmp_path):
    """Rows of a sweep have their costs; the table has the least where GPUs differ."""
    grid = tmp_path / "grid.toml"
    grid.write_text(f'workload = "{ZIPF}"\ntensor_parallel = [1, 2]\n')
    done = run_here("sweep", grid, "--jobs", 1, "--gpu-price", "h100=2", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [row["usd_per_day"] for row in rows] == [48, 96]
    costs = [row["usd_per_million_output_tokens"] for row in rows]
    assert costs[0] < costs[1]
    header = run_here("sweep", grid, "--jobs", 1).stdout.splitlines()[2]
    assert header.endswith("cost, $ per million tokens")


def test_routers_have_costs():
    """Each router has the cost of the cluster, and of a million tokens under it."""
    found = compare_routers(ZIPF, "round-robin", 2, gpu_price={"H100": 1.5}, tensor_parallel=1)
    (row,) = found.rows
    assert row.usd_per_day == 72
    assert row.usd_per_million_output_tokens > 0
    assert found.gpu_prices == "h100 at $1.50 an hour, given"


@pytest.mark.parametrize(
    ("given", "usd"), [({}, 3.99), ({"h100": 2.0}, 2.0), ({"h100:memory=84.9GB": 3.0}, 3.0)]
)
def test_a_gpu_with_other_figures_has_the_price_of_its_name(given, usd):
    """A device with figures after its name has the price of the device, or its own."""
    cost = Cost.for_gpus({"h100:memory=84.9GB": 1}, given, None)
    assert cost.usd_per_hour == usd
