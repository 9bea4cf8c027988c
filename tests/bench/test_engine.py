"""The overhead of the engine: the time spent outside generator and backend."""

from time import perf_counter

import pytest

torch = pytest.importorskip("torch", reason="the engine computes on torch")

from kvcore import KVCache, run  # noqa: E402
from kvcore.request import text_request  # noqa: E402
from kvcore.serving import Batching  # noqa: E402
from kvcore_engine.backend import TorchCPU  # noqa: E402
from kvcore_engine.generator import Transformer  # noqa: E402

SEQUENCES, PROMPT, OUTPUT = 32, 64, 24


class Timed:
    """A decorator that adds up the seconds of calls."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self, function):
        """Return `function` with its calls timed."""

        def timed(*arguments, **options):
            start = perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += perf_counter() - start

        return timed


def test_engine_overhead(monkeypatch):
    """Less than a tenth of the time at batch 32 is spent outside generator and backend.

    The layer has the shapes of Llama 3.1 8B.
    """
    inside = Timed()
    monkeypatch.setattr(Transformer, "forward", inside(Transformer.forward))
    monkeypatch.setattr(TorchCPU, "plan", inside(TorchCPU.plan))
    requests = []
    for index in range(SEQUENCES):
        tokens = range(7 * index, 7 * index + PROMPT)
        requests.append(text_request(index, tokens, output=OUTPUT, block_size=16))
    result = run(
        requests,
        cache=KVCache(SEQUENCES * 8, 16, ids=True),
        generator=Transformer(model="llama-3.1-8b", layers=1, vocab_size=4096),
        backend=TorchCPU(),
        batching=Batching(max_seqs=SEQUENCES),
        clock="wall",
    )
    steps = [step for step in result.steps if step.decode == SEQUENCES]
    assert len(steps) >= OUTPUT - 2
    share = 1 - inside.seconds / result.wall_s
    print(
        f"\nengine, batch {SEQUENCES}, one layer of llama-3.1-8b in fp32: "
        f"{result.wall_s / result.log.steps * 1e3:.1f} ms a step, {share:.2%} of it outside "
        "generator and backend (promised 10%)"
    )
    assert share < 0.1
