"""Readies pytest for the kits; imported before them.

pytest explains a failed `assert` only in modules that it rewrites, and those of an installed
package it rewrites only if they are registered before they are imported.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import iter_modules

try:
    import hypothesis  # noqa: F401 - imported here so that one error says what is missing
    import pytest
except ModuleNotFoundError as error:
    MISSING = f"kvcore.testing needs {error.name}: run `pip install 'kvcore[testing]'`"
    raise ImportError(MISSING, name=error.name) from error

_KITS = [
    f"kvcore_testing.{module.name}"
    for module in iter_modules([str(Path(__file__).parent)])
    if module.name != "assertions"
]
pytest.register_assert_rewrite(*_KITS)
