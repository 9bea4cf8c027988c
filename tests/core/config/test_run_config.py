"""`RunConfig`: the values that it accepts or refuses, and the parts that it makes."""

from __future__ import annotations

from copy import copy, deepcopy
from functools import partial
from pathlib import Path

import attrs
import pytest

from kvcore import SLO, InputError, recorded_config, simulate, simulate_cluster
from kvcore.config import RunConfig, RunParts, read_toml
from kvcore.config.values import as_slo, convert, slo_text
from kvcore.models.catalogue import find_device, find_model
from kvcore.plugins.options import Spec
from kvcore_plugins.eviction import LFU
from kvcore_plugins.workload import Zipf

ZIPF = "zipf:requests=20,prefixes=3"


def test_sizes_slos_and_plugins_are_read_from_text():
    """Sizes, SLOs and plugins are read from the text that the command line takes."""
    config = RunConfig(memory="1GiB", slo="ttft=3,tpot=0.1", eviction="lfu:half_life=3")
    assert config.memory == 2**30
    assert config.slo == SLO(ttft_ns=3 * 10**9, tpot_ns=10**8)
    assert config.eviction == Spec("lfu", {"half_life": "3"})


@pytest.mark.parametrize("text", ["²", "١٢", pytest.param("1" * 5000, id="endless")])
def test_a_checkpoint_that_is_no_number_in_ascii_names_a_plugin(text):
    """Digits of other alphabets, and thousands of digits, are no retention interval."""
    assert RunConfig(checkpoint=text).checkpoint == Spec(text)


@pytest.mark.parametrize("tokens", [64, "64"])
def test_a_checkpoint_may_be_a_number_of_tokens(tokens):
    """A number, also as text, is vLLM's retention interval."""
    assert RunConfig(checkpoint=tokens).checkpoint == Spec("every", {"tokens": "64"})


def test_slos_and_plugins_are_read_from_tables():
    """SLOs and plugins are read from tables as TOML has them."""
    config = RunConfig(slo={"ttft": 1.5}, scheduler={"name": "srpt", "preemptive": False})
    assert config.slo == SLO(ttft_ns=1_500_000_000)
    assert config.scheduler == Spec("srpt", {"preemptive": "false"})
    for name in ("retention", "autoscale"):
        assert getattr(RunConfig(**{name: {"name": "none"}}), name) is None


def test_standard_input_is_no_path_in_a_file(tmp_path):
    """The workload `-` is standard input, as on the command line."""
    (tmp_path / "run.toml").write_text('workload = "-"')
    assert RunConfig.from_toml(tmp_path / "run.toml").workload == "-"


def test_a_short_window_in_a_text_stays_one_when_it_is_read_again(tmp_path):
    """A text is in seconds, however short the window: in a file, and in a changed copy."""
    (tmp_path / "run.toml").write_text('window = "0:0.0005"')
    config = RunConfig.from_toml(tmp_path / "run.toml")
    assert config.changed(limit=3).window == (0, 500_000)


@pytest.mark.parametrize("text", ["ttft=1.234567891,tpot=0.000000001", "deadline=120", "none"])
def test_the_text_of_an_slo_has_all_of_its_digits(text):
    """Two SLOs that differ have two texts, as in the rows of a sweep."""
    assert slo_text(as_slo(text)) == text


@pytest.mark.parametrize(("given", "slo"), [(None, SLO()), ("none", SLO())])
def test_the_slo_may_be_left_out(given, slo):
    """The SLO may be left out with the text `none` or with None."""
    assert RunConfig(slo=given).slo == slo


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"slo": {"tft": 3}}, "slo: an SLO has no 'tft' (did you mean 'ttft'?)"),
        ({"slo": {1: 3}}, "slo: an SLO has no '1'"),
        ({"like": {}}, "like: the table needs a name"),
        ({"window": (5, 3)}, "window: expected a window of time in ns, such as (0, 10**9)"),
        ({"window": (1.5, None)}, "window: expected a window of time in ns"),
        ({"window": (False, True)}, "window: expected a window of time in ns"),
        ({"window": (True, None)}, "window: expected a window of time in ns"),
        ({"window": (1, 2, 3)}, "window: expected a window of time in ns"),
        ({"window": ("1", "2")}, "window: expected a window of time in ns"),
        ({"workload": 3}, "workload: expected a workload: "),
    ],
)
def test_the_error_for_a_wrong_value_begins_with_the_option(options, reason):
    """The error for a wrong value begins with the name of the option."""
    with pytest.raises(InputError) as refused:
        RunConfig(**options)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize("kind", [int | None, None | int])
def test_none_may_be_either_member_of_a_union(kind):
    """A type that may be None is read whether None is its first member or its last."""
    assert (convert("3", kind), convert(None, kind)) == (3, None)


def test_evolve_checks_the_changed_options():
    """`attrs.evolve` converts and checks the changed options, by their names too."""
    assert attrs.evolve(RunConfig(), memory="1KiB").memory == 1024
    with pytest.raises(InputError, match="blocks: expected a whole number"):
        attrs.evolve(RunConfig(), blocks="many")
    with pytest.raises(InputError, match="there is no option 'bloks'"):
        attrs.evolve(RunConfig(), options={"bloks": 3})


@pytest.mark.parametrize("policy", ["lfu", LFU, LFU(), partial(LFU), Spec("lfu")])
def test_plugins_of_every_form_make_the_same_cache(policy):
    """A plugin given by name, class, instance, function or Spec makes the same cache."""
    cache = RunParts(RunConfig(workload=ZIPF, blocks=9, eviction=policy)).cache()
    assert isinstance(cache.eviction, LFU)


def test_models_and_devices_may_be_names_or_objects(tmp_path):
    """Models and devices may be names or objects; a workload a name, a path or an object."""
    path = tmp_path / "mine.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n"
    )
    named = RunParts(RunConfig(workload=str(path), device="h200"))
    whole = RunParts(
        RunConfig(
            workload=Path(path), model=find_model("llama-3.1-8b"), device=find_device("h200")
        )
    )
    assert named.describe() == whole.describe()
    assert RunParts(RunConfig(workload=Zipf(requests=3))).workload.name == "zipf"


def test_a_simulation_without_a_codec_is_refused():
    """A simulation without a codec raises InputError that names the option."""
    with pytest.raises(InputError, match=r"^codec: no codec is given"):
        simulate("zipf:requests=2", codec=None)


def test_an_error_names_its_option_once():
    """An error has the name of its option once, even if several parts use the option."""
    with pytest.raises(InputError, match=r"^fail: 'replica=1': a failure needs"):
        simulate_cluster("zipf:requests=2", blocks=60, replicas=2, fail="replica=1")


def test_an_impossible_workload_path_is_a_missing_file():
    """A workload path that is impossible is reported as a missing file."""
    with pytest.raises(InputError, match="there is no such file"):
        RunParts(RunConfig(workload="a\0b"))


def test_defaults_follow_the_mode():
    """A replay defaults to blocks of one key and `keys` accounting.

    A simulation defaults to blocks of 16 tokens and `tokens` accounting.
    """
    replayed = RunParts(RunConfig("compare", workload="mooncake", blocks=9))
    served = RunParts(RunConfig("simulate", workload="mooncake", blocks=9))
    assert (replayed.geometry.block_size, replayed.geometry.accounting) == (512, "keys")
    assert (served.geometry.block_size, served.geometry.accounting) == (16, "tokens")


def test_keys_are_not_counted_under_a_clock():
    """Under a clock `accounting` of tokens is what there is, and that of keys is refused."""
    timed = RunParts(RunConfig("simulate", workload=ZIPF, blocks=9, accounting="tokens"))
    assert timed.geometry.accounting == "tokens"
    for call in (simulate, simulate_cluster):
        with pytest.raises(InputError, match=r"^accounting: under a clock tokens count"):
            call(ZIPF, blocks=99, accounting="keys")


def test_a_configuration_has_the_defaults_of_its_mode_and_rules():
    """A mode and rules bring their defaults, which given options replace."""
    assert (RunConfig().max_seqs, RunConfig().tensor_parallel) == (256, 4)
    like = RunConfig(like="vllm", max_seqs=7)
    assert (like.max_tokens, like.watermark, like.max_seqs) == (8192, 0, 7)
    assert like.prefix == Spec("hashed")
    assert RunConfig("compare").tensor_parallel == 1


@pytest.mark.parametrize("copied", [copy, deepcopy, attrs.evolve])
def test_a_copy_has_the_values_of_its_original(copied):
    """A copy keeps its values, where those of the rules differ too."""
    config = RunConfig(limit=3).changed(like="vllm")
    assert (config.like, config.max_seqs) == (Spec("vllm"), 256)
    assert copied(config) == config


def test_options_are_read_from_a_toml_file(tmp_path):
    """Options are read from a TOML file, whose paths are relative to it."""
    (tmp_path / "run.toml").write_text(
        'workload = "zipf:requests=9"\nmax-seqs = 4\nmodel = "mine"\n'
        "[batching]\nchunked = false\n"
    )
    (tmp_path / "mine").mkdir()
    config = RunConfig.from_toml(tmp_path / "run.toml")
    assert (config.max_seqs, config.chunked) == (4, False)
    assert config.model == str(tmp_path / "mine")
    (tmp_path / "run.toml").write_text("bloks = 4\n")
    with pytest.raises(InputError, match=r"run\.toml: there is no option 'bloks'"):
        RunConfig.from_toml(tmp_path / "run.toml")
    with pytest.raises(InputError, match=r"run\.toml: there is no option 'bloks'"):
        read_toml(str(tmp_path / "run.toml"))


def test_an_unknown_mode_is_refused():
    """An unknown mode raises InputError that names those that there are."""
    with pytest.raises(InputError, match="mode: 'plan' is not one of 'simulate'"):
        RunConfig("plan")


def test_options_choose_no_mode_beside_a_named_one():
    """A configuration that names its mode refuses options that choose another one."""
    with pytest.raises(InputError, match="replicas: this is for one server"):
        RunConfig("compare", workload=ZIPF, replicas=2).build()


def test_a_trace_gives_the_configuration_of_its_run(tmp_path):
    """`recorded_config` restores the options and plugins of a run, and has its requests."""
    path = tmp_path / "trace.jsonl"
    options = {"blocks": 60, "max_seqs": 5, "device": "h200", "seed": 3}
    simulate(ZIPF, trace=path, eviction="lfu:half_life=3", slo="ttft=1", **options)
    config = recorded_config(path)
    assert (config.mode, config.slo) == ("simulate", SLO(ttft_ns=10**9))
    assert {name: getattr(config, name) for name in options} == options
    parts = RunParts(config)
    assert parts.cache().eviction.half_life == 3
    assert parts.latency().device == "h200"
    assert len(list(parts.workload)) == 20


def test_a_recorded_configuration_has_the_values_of_the_run(tmp_path):
    """A run under rules, with another limit and policy than theirs, is read back as it was."""
    path = tmp_path / "trace.jsonl"
    simulate(ZIPF, trace=path, blocks=60, like="vllm", max_seqs=5, prefix="radix")
    config = recorded_config(path)
    assert (config.like.lag, config.max_seqs, config.prefix().name) == (1, 5, "radix")
