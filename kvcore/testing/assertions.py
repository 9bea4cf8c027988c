"""Readies pytest for the kits; imported before them.

pytest explains a failed `assert` only in modules that it rewrites, and those of an installed
package it rewrites only if told to before they are imported.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401 - asked for here so that one place says what is missing
    import pytest
except ModuleNotFoundError as error:
    MISSING = f"kvcore.testing needs {error.name}: run `pip install 'kvcore[testing]'`"
    raise ImportError(MISSING, name=error.name) from error

_KITS = "backend eviction generator harness latency plugin prefix retention scheduler workload"
pytest.register_assert_rewrite(*(f"kvcore.testing.{module}" for module in _KITS.split()))
