"""Tests of `--codec`: every verb sizes K/V by any codec, and its earlier names still work."""

from __future__ import annotations

import sys

import orjson
import pytest
from helpers.commands import json_of as document
from helpers.commands import run_here
from helpers.distributions import install
from helpers.recordings import timed
from helpers.serving import ask
from helpers.traces import lines

import kvcore
from kvcore.config import RunConfig, RunParts
from kvcore.config.files import read_toml
from kvcore.plugins import Plugins
from kvcore_lab.sweep import Grid
from kvcore_plugins.latency import Roofline
from kvcore_replay.what_if import whatif

MIB = 2**20
HEADS = 32 * 8
SMALL = "zipf:requests=4,prefixes=2,prefix_tokens=32,suffix_tokens=16,output_tokens=4"

THIRDS = '''
from kvcore import Codec, hookimpl
from kvcore.engine import Plane

class Thirds(Codec):
    """Stores a number in 3 bytes, and some bytes a block; keys wait until it is full."""

    name = "thirds"

    def __init__(self, more: int = 1):
        self.more = more

    def planes(self, part, tokens, width):
        return Plane("bytes", "uint8", (tokens, 3 * width)), Plane("top", "int8", (self.more,))

    def encode(self, part, rows):
        raise NotImplementedError

    def decode(self, part, planes):
        raise NotImplementedError

    def by_token(self, part):
        return part == "values"

@hookimpl
def kvcore_codecs():
    return [Thirds]
'''
BLOCK = HEADS * 2 * (3 * 16 * 128 + 5)
"""Bytes of a block of 16 tokens of Llama 3.1 8B with codec `thirds:more=5`."""


@pytest.fixture
def thirds(tmp_path, monkeypatch):
    """Install a codec in a distribution of its own, and return the text that names it."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "kv_thirds.py").write_text(THIRDS)
    install(site, "kv-thirds", [("thirds", "kv_thirds")])
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "kv_thirds", raising=False)
    return "thirds:more=5"


@pytest.fixture
def staged():
    """Return the bytes of keys in bf16 that each running sequence stages."""
    return HEADS * 16 * 128 * 2


def test_size_uses_a_third_party_codec(thirds, staged):
    """`size` counts the planes and the staged bytes of a third-party codec."""
    found = document("size", "llama-3.1-8b", "--codec", thirds, "--tokens", 32)
    assert found["codec"] == thirds
    assert found["kv"] == {
        "bytes_per_token": BLOCK // 16,
        "bytes_per_block": BLOCK,
        "blocks_per_request": 2,
        "bytes_per_request": 2 * BLOCK,
        "bytes_per_batch": 2 * BLOCK,
        "staged_bytes_per_request": staged,
    }
    printed = run_here("size", "llama-3.1-8b", "--codec", thirds).stdout
    assert f"and each running request stages    {staged // MIB} MiB" in printed


def test_simulate_uses_a_third_party_codec(thirds, staged, tmp_path):
    """`--memory`, the latency model and the trace's header use a third-party codec."""
    memory = 20 * BLOCK + 2 * staged
    options = ["--codec", thirds, "--max-seqs", 2, "--trace", tmp_path / "t.jsonl"]
    found = document("simulate", SMALL, "--memory", f"{memory}B", *options)
    assert found["pool"]["blocks"] == 20
    config = found["config"]
    assert (config["codec"], config["bytes_per_block"]) == (thirds, BLOCK)
    latency = config["plugins"]["latency"]["options"]
    assert (latency["codec"], latency["block_size"]) == (thirds, 16)
    header = lines(tmp_path / "t.jsonl")[0]
    assert header["model"] == {"name": "llama-3.1-8b", "codec": thirds}
    fp16 = document("simulate", SMALL, "--blocks", 20)["config"]["plugins"]["latency"]
    assert fp16["options"] == {**latency, "codec": "fp16"}
    again = whatif(tmp_path / "t.jsonl", eviction="fifo").rerun
    assert again.config["latency"]["options"] == latency


def test_compare_curve_and_sweep_use_a_third_party_codec(thirds):
    """`compare --memory`, `curve --model` and sweeps size blocks by a third-party codec."""
    words = [SMALL, "--eviction", "lru", "--codec", thirds]
    memory = document("compare", *words, "--memory", f"{9 * BLOCK}B")["memory"]
    assert (memory["codec"], memory["bytes_per_block"]) == (thirds, BLOCK)
    assert memory["budgets"][0]["blocks"] == 9
    curve = document("curve", *words, "--jobs", 1, "--model", "llama-3.1-8b")
    assert curve["memory"] == {
        "model": "llama-3.1-8b", "codec": thirds, "bytes_per_block": BLOCK,
    }  # fmt: skip
    cells = [*Grid("compare", workload=SMALL, memory=9 * BLOCK, codec=["fp16", thirds])]
    assert [RunParts(cell).blocks for cell in cells] == [9 * BLOCK // (2 * MIB), 9]


def test_instances_classes_and_functions_are_codecs():
    """In Python a codec may be an instance, a class or a function that is not installed."""
    names = {}
    exec(THIRDS, names)  # noqa: S102 - the codec above
    thirds = names["Thirds"]
    for codec in (thirds(more=5), lambda: thirds(more=5)):
        found = RunParts(RunConfig(workload=SMALL, codec=codec, blocks=5)).describe()
        assert (found["codec"], found["bytes_per_block"]) == ("thirds:more=5", BLOCK)
    assert kvcore.simulate(SMALL, codec=thirds, blocks=50).latency.codec.more == 1
    rows = kvcore.compare(SMALL, "lru", memory=9 * BLOCK, codec=thirds(more=5)).rows
    assert rows[0].blocks == 9


def test_no_memory_beside_the_staged_blocks_is_an_error(thirds):
    """Too little memory for a block beside the staged blocks is an error with both sizes.

    The error names the number of sequences and what to change.
    """
    done = run_here("simulate", SMALL, "--codec", thirds, "--memory", "200MiB")
    assert done.returncode == 2
    assert done.stderr == (
        "kvcore: error: --memory: 200 MiB is less than a block of thirds:more=5, which takes "
        "3 MiB, beside the unfinished blocks of 256 sequences, which take 256 MiB: give more, "
        "or a smaller max_seqs\n"
    )


@pytest.mark.parametrize(
    ("words", "old"),
    [
        (["size", "llama-3.1-8b"], "--dtype"),
        (["size", "llama-3.1-8b"], "--kv-dtype"),
        (["simulate", SMALL, "--blocks", 50, "--no-search"], "--kv-dtype"),
        (["compare", SMALL, "--eviction", "lru", "--memory", "1GiB"], "--kv-dtype"),
        (["curve", SMALL, "--sizes", "2", "--jobs", "1", "--model", "gpt2"], "--kv-dtype"),
    ],
)
def test_earlier_names_of_the_option_work_with_a_notice(words, old):
    """The earlier options `--dtype` and `--kv-dtype` work and print a notice."""
    for given in ([old, "fp8"], [f"{old}=fp8"]):
        done = run_here(*words, *given, "--json")
        assert done.returncode == 0
        assert done.stderr == f"kvcore: {old} is called --codec now; use that\n"
        assert b'"codec": "fp8-e4m3"' in orjson.dumps(orjson.loads(done.stdout)).replace(
            b'":"', b'": "'
        )


def test_the_earlier_key_works_with_a_warning(tmp_path):
    """The earlier key `kv_dtype` works in TOML and in Python with a FutureWarning.

    Given beside `codec` it raises InputError.
    """
    (tmp_path / "c.toml").write_text('kv-dtype = "fp8"')
    notice = "option 'kv_dtype' is called 'codec' now; use that"
    with pytest.warns(FutureWarning, match=notice):
        assert read_toml(tmp_path / "c.toml")["codec"].name == "fp8"
    with pytest.warns(FutureWarning, match=notice):
        assert str(RunParts(RunConfig(kv_dtype="fp8")).codec) == "fp8-e4m3"
    with pytest.warns(FutureWarning, match=notice):
        assert list(Grid("simulate", kv_dtype="bf16").axes) == ["codec"]
    with pytest.warns(FutureWarning, match=notice):
        kvcore.compare(SMALL, "lru", 9, kv_dtype="bf16")
    with pytest.warns(FutureWarning, match="'kv_dtype' of latency plugin 'roofline'"):
        assert Plugins().build("latency", "roofline:kv_dtype=fp8").codec == "fp8-e4m3"
    with pytest.raises(kvcore.InputError, match="'kv_dtype' is the earlier name of 'codec'"):
        RunConfig(kv_dtype="fp8", codec="fp8")


def test_a_codec_with_a_path_option_is_not_built_from_a_trace(thirds, tmp_path):
    """A codec with a path option is not built from a trace, so a trace cannot open a file."""
    source = "from pathlib import Path" + THIRDS.replace("more: int", "more: Path")
    (tmp_path / "site" / "kv_thirds.py").write_text(source)
    about = {"model": {"name": "llama-3.1-8b", "codec": thirds}}
    path = timed(tmp_path / "t.jsonl", [ask("a")], header=about)
    with pytest.raises(kvcore.InputError, match="its more='5': no file is opened"):
        kvcore.recorded_config(path)


class EarlierRoofline(Roofline):
    """A roofline that describes itself as releases without codecs did."""

    def options(self):
        """Return the options with `kv_dtype` in place of `codec` and `block_size`."""
        given = {**super().options(), "kv_dtype": "fp8"}
        return {name: given[name] for name in given if name not in ("codec", "block_size")}


def test_traces_with_kv_dtype_are_replayed_without_a_warning(tmp_path):
    """A trace whose header has `kv_dtype` is replayed and run again without a warning."""
    about = {
        "model": {"name": "llama-3.1-8b", "kv_dtype": "fp8"},
        "device": {"name": "h100", "count": 4},
    }
    path = timed(
        tmp_path / "t.jsonl", [ask("a")], header=about, latency=EarlierRoofline(codec="fp8")
    )
    assert "codec" not in lines(path)[0]["plugins"]["latency"]["options"]
    options = whatif(path, eviction="fifo", plugins=Plugins()).rerun.config["latency"][
        "options"
    ]
    assert options["codec"] == "fp8-e4m3"
    assert kvcore.recorded_config(path).codec.name == "fp8"
    report = run_here("replay", path, "--json")
    assert (report.returncode, report.stderr) == (0, "")
