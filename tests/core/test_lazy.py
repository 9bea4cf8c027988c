"""`LazyModule`, which imports a module at its first use."""

import sys

import pytest

from kvcore.lazy import LazyModule


def test_a_module_is_imported_when_a_name_is_used(tmp_path, monkeypatch):
    """The first use of a name imports the module, which replaces its stand-in."""
    (tmp_path / "heavy_thing.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    variables = {}
    variables["heavy_thing"] = stand_in = LazyModule("heavy_thing", variables)
    assert "heavy_thing" not in sys.modules
    assert stand_in.answer == 42
    assert variables["heavy_thing"] is sys.modules["heavy_thing"]


def test_a_missing_module_fails_at_its_first_use():
    """A missing module raises ModuleNotFoundError at the first use."""
    stand_in = LazyModule("no_such_thing", {})
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        _ = stand_in.answer
