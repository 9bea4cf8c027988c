"""A package of the name of AIConfigurator's, whose engine's times are sums."""

from __future__ import annotations

import sys
from types import ModuleType


class FakeEngine:
    """3 ms a step, 10 us a prompt token and sequence, 1 ns a pair, 10 ns a context token."""

    def predict_prefill_latency(self, prompts, length, before):
        """Return milliseconds; `before` tokens of `length` are in the cache."""
        tokens = length - before
        pairs = prompts * (before * tokens + tokens * (tokens + 1) // 2)
        return 3 + prompts * tokens / 100 + pairs * 1e-6

    def decode_step_latency(self, sequences, length, output):
        """Return milliseconds; at the first of `output` tokens contexts are one longer."""
        del output
        return 3 + sequences / 100 + sequences * (length + 1) * 1e-5

    def mixed_step_latency(self, tokens, sequences, length, output):
        """Return milliseconds of prompts and contexts of one length."""
        prefill = self.predict_prefill_latency(tokens // length, length, 0)
        return prefill + self.decode_step_latency(sequences, length, output) - 3


def fake_aic(monkeypatch):
    """Install it; return the list of what `EngineHandle.compile` is called with."""
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
