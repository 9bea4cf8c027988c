"""Every hook has a kind, and classes that a hook gives as import paths are looked up."""

from __future__ import annotations

import sys
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

from kvcore import hookspecs
from kvcore.distributions import entry_points
from kvcore.errors import PluginError
from kvcore.hookspecs import PROJECT, hookimpl
from kvcore.plugins.manager import EXTENSIONS, KINDS, Plugins


def test_every_hook_has_a_kind():
    """Each hook belongs to exactly one kind of plugin, or is one of the others."""
    hooks = sorted(name for name in vars(hookspecs) if name.startswith("kvcore_"))
    assert hooks == sorted([*KINDS.values(), *EXTENSIONS])


def plugins_by_import_path(**places):
    """Return plugins of one entry point whose hook gives import paths of eviction policies."""
    given = {name.replace("_", "-"): place for name, place in places.items()}

    @hookimpl
    def kvcore_eviction_policies():
        return given

    hooks = SimpleNamespace(kvcore_eviction_policies=kvcore_eviction_policies)
    dist = SimpleNamespace(name="acme", version="1.0")
    point = SimpleNamespace(
        name="acme", value="acme", module="acme", dist=dist, load=lambda: hooks
    )
    return Plugins(entry_points=[point])


def test_a_class_given_as_import_path_is_imported_by_get_only(tmp_path, monkeypatch):
    """A class given as an import path is listed by name, and imported by `get` only."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("soon", "late"):
        code = (
            f"from kvcore_plugins.eviction import LRU\nclass Own(LRU):\n    name = {name!r}\n"
        )
        (tmp_path / f"placed_{name}.py").write_text(code)
    plugins = plugins_by_import_path(soon="placed_soon:Own", late="placed_late:Own")
    assert plugins.names("eviction") == ["late", "soon"]
    assert plugins.get("eviction", "soon").__module__ == "placed_soon"
    assert "placed_late" not in sys.modules
    assert sorted(plugins.classes("eviction")) == ["late", "soon"]
    for name in ("soon", "late"):
        del sys.modules[f"placed_{name}"]


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("no_such:LRU", "which cannot be imported: ModuleNotFoundError"),
        ("kvcore_plugins.eviction:LRU", "named 'lru'"),
        ("kvcore.cache:KVCache", "which is not a class derived from"),
    ],
)
def test_a_wrong_import_path_is_an_error_for_its_name_only(place, fault):
    """A wrong import path is an error for its name only, and is listed with the reason."""
    plugins = plugins_by_import_path(odd=place, lru="kvcore_plugins.eviction:LRU")
    with pytest.raises(PluginError, match=r"entry point 'acme' of acme 1\.0") as caught:
        plugins.get("eviction", "odd")
    assert fault in str(caught.value)
    assert list(plugins.classes("eviction")) == ["lru"]
    (info,) = (info for info in plugins.listing() if not info.usable)
    assert (info.name, info.reason) == ("odd", str(caught.value))


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_name_every_exported_built_in(kind):
    """The hooks of a kind name classes by their names, and all that their package exports."""
    points = entry_points(PROJECT, of=PROJECT)
    found = [getattr(point.load(), KINDS[kind], dict) for point in points]
    places = {name: place for hook in found for name, place in hook().items()}
    classes = {name: resolve_name(place) for name, place in places.items()}
    assert all(cls.name == name for name, cls in classes.items())
    for folder in {place.rpartition(".")[0] for place in places.values()}:
        package = sys.modules[folder]
        exported = [getattr(package, name) for name in getattr(package, "__all__", ())]
        # The contracts beside them have no name.
        assert {cls for cls in exported if getattr(cls, "name", "")} <= {*classes.values()}
