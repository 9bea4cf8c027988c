"""The engine on torch: outputs are right despite sharing, eviction and preemption."""

import math
from functools import cache

import pytest
from helpers.engine import compute
from helpers.rows import write_rows
from helpers.serving import ask

import kvcore
from kvcore import Plugins, read_events
from kvcore_replay.check.trace import replay

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
torch.set_num_threads(1)

PLUGINS = Plugins()
SIZE = "layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8,vocab_size=97"
GENERATORS = [f"transformer:{SIZE}", "sincos:layers=2,heads=4,kv_heads=2,head_dim=8"]
BACKENDS = PLUGINS.names("backend")


def backend_of(name):
    """Return a backend in which K/V is NaN until it is stored, in every step."""
    cls = PLUGINS.get("backend", name)
    if cls.unavailable():
        pytest.skip(cls.unavailable())

    class Poisoned(cls):
        def allocate(self, layout):
            super().allocate(layout)
            self.fill(math.nan)

        def plan(self, rows):
            size = self.layout.block_size
            pairs = zip(rows.block_tables, rows.contexts, strict=True)
            fresh = [
                block for table, context in pairs for block in table[-(-context // size) :]
            ]
            self.fill(math.nan, fresh)
            return super().plan(rows)

    return Poisoned()


def requests(count=14):
    """Return requests that share prefixes and need more blocks than a small pool has."""
    return [
        ask(
            index,
            index * 5,
            9 + 5 * index % 23,
            4 + 3 * index % 11,
            keys=[*range(1 + index % 3), *range(100 * index + 9, 100 * index + 14)][
                : (9 + 5 * index % 23) // 4
            ],
        )
        for index in range(count)
    ]


def in_fp64(requests, generator, backend, **options):
    """Return the run of requests whose K/V is in fp64."""
    generator, backend = PLUGINS.build("generator", generator), backend_of(backend)
    return compute(requests, generator=generator, backend=backend, dtype="fp64", **options)


@cache
def alone(generator, backend):
    """Return the outputs of servers with one request."""
    runs = (in_fp64([request], generator, backend) for request in requests())
    return {name: text for run in runs for name, text in run.result.outputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 16, "scheduler": "latest", "max_tokens": 8, "max_seqs": 4},
        {"blocks": 40, "eviction": "random", "max_tokens": 300},
        {"blocks": 20, "scheduler": "planning", "steps": "prefill-first", "chunked": False},
    ],
    ids=["preempting", "evicting", "planning"],
)
def test_a_crowded_server_computes_what_a_lone_request_gets(generator, backend, options):
    """In fp64 each output of a crowded server is that of a server with one request."""
    crowded = in_fp64(requests(), generator, backend, **options)
    assert crowded.result.outputs == alone(generator, backend)
    assert crowded.result.cache.tree.evicted_blocks or crowded.of("PREEMPT")


@pytest.mark.parametrize("lengths", [(2, 3, 1), (3, 2, 1), (5, 3, 2)])
def test_a_preempted_short_prompt_misses_its_full_block_as_partial(tmp_path, lengths):
    """A prompt shorter than a block that returns with a full one misses it as `partial`.

    It was preempted when it had generated the rest of the block.
    """
    texts = [
        " ".join(f"word{index}{place}" for place in range(length))
        for index, length in enumerate(lengths)
    ]
    path = tmp_path / "trace.jsonl"
    kvcore.run(prompts=texts, max_output=9, block_size=4, blocks=4, watermark=0, trace=path)
    missed = [event for event in read_events(path) if event.event == "MISS" and event.again]
    assert "partial" in {event.why for event in missed}
    assert replay(path).finished == len(texts)


def test_a_run_has_the_notes_of_its_workload(tmp_path):
    """A run on tensors has what its workload says of its rows, in its summary too."""
    rows = {"prompt": "a question " * 20, "output_tokens": 2}, {"of": "no prompt"}
    result = kvcore.run(write_rows(tmp_path / "log.jsonl", *rows), blocks=9)
    assert any(note.startswith("chat: left out: 1") for note in result.notes)
    assert result.summary()["notes"] == result.notes
