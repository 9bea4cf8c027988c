"""A fake AIConfigurator package, whose engine computes latencies as sums."""

from __future__ import annotations

import sys
from types import ModuleType


class FakeEngine:
    """An engine whose latencies are sums of simple terms.

    A step takes 3 ms, a prompt token or a sequence 10 us, a pair of tokens 1 ns, and a context
    token 10 ns.
    """

    def predict_prefill_latency(self, prompts, length, before):
        """Return the milliseconds of prompts with `before` of `length` tokens in the cache."""
        tokens = length - before
        pairs = prompts * (before * tokens + tokens * (tokens + 1) // 2)
        return 3 + prompts * tokens / 100 + pairs * 1e-6

    def decode_step_latency(self, sequences, length, output):
        """Return the milliseconds of a step in which contexts are one token longer."""
        del output
        return 3 + sequences / 100 + sequences * (length + 1) * 1e-5

    def mixed_step_latency(self, tokens, sequences, length, output):
        """Return the milliseconds of a step with prompts and contexts of one length."""
        prefill = self.predict_prefill_latency(tokens // length, length, 0)
        return prefill + self.decode_step_latency(sequences, length, output) - 3


def fake_aic(monkeypatch):
    """Install the fake package, and return the list of calls of `EngineHandle.compile`."""
    calls = []

    class EngineHandle:
        @staticmethod
        def compile(*names, **options):
            calls.append((names, options))
            if names[0] == "no/such":
                msg = "no such model"
                raise ValueError(msg)
            return FakeEngine()

    modules = {
        "aiconfigurator_core": {},
        "aiconfigurator_core.sdk": {},
        "aiconfigurator_core.sdk.common": {"SupportedSystems": {"h100_sxm", "h200_sxm"}},
        "aiconfigurator_core.sdk.engine": {"EngineHandle": EngineHandle},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return calls
