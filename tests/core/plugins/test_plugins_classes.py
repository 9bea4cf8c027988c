"""Plugin classes as people write them: plain, as dataclasses, and with attrs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from hashlib import blake2b
from time import time_ns
from types import SimpleNamespace
from typing import ClassVar, Literal

import attrs
import pytest

from kvcore import KVCache, Plugins, Request, ScoreEviction, hookimpl
from kvcore.errors import InputError, PluginError
from kvcore.plugins import describe, options_of, resolve
from kvcore.plugins.base import COMPUTED, REQUIRED, Plugin, find_override, uncalled
from kvcore.plugins.manager import KINDS, base_of
from kvcore.plugins.options import instantiate, summary
from kvcore.serving.rules import CHOICES
from kvcore.units import NS_PER_S
from kvcore_plugins.eviction import LRU

BY_KIND = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tier"])
"""All kinds except tiers, whose base class has options of its own."""


def contract(kind):
    """Return a concrete class of a kind that defines all required methods, but no options."""
    base = base_of(kind)
    must = dict.fromkeys(base.__abstractmethods__)
    return type("Contract", (base,), must | {"name": f"some-{kind}", "__module__": "m"})


def plain(kind):
    """Return a class with a constructor that does not call the base's."""

    class Plain(contract(kind)):
        name = f"some-{kind}"

        def __init__(self, width: int = 4, unit: Literal["s", "ms"] = "s") -> None:
            self.width = width
            self.unit = unit

    return Plain


def data(kind):
    """Return a dataclass."""

    @dataclass
    class Data(contract(kind)):
        name = f"some-{kind}"
        width: int = 4
        unit: Literal["s", "ms"] = "s"
        _seen: list = field(default_factory=list, init=False, repr=False)

    return Data


def checked(kind):
    """Return an attrs class with slots."""

    @attrs.define
    class Checked(contract(kind)):
        name = f"some-{kind}"
        width: int = attrs.field(default=4, validator=attrs.validators.ge(1))
        unit: Literal["s", "ms"] = "s"
        _seen: list = attrs.field(factory=list, init=False)

    return Checked


BY_STYLE = pytest.mark.parametrize("style", [plain, data, checked])


@BY_KIND
@BY_STYLE
def test_options_are_the_parameters_of_the_constructor(kind, style):
    """Options are the constructor's parameters, whatever makes the constructor."""
    cls = style(kind)
    built = instantiate(cls, {"width": "8"})
    assert (built.width, built.unit) == (8, "s")
    inherited = CHOICES if kind == "rules" else ()  # which a decorator keeps
    described = describe(built)
    own = {n: v for n, v in described["options"].items() if n not in inherited}
    assert (described["name"], own) == (f"some-{kind}", {"width": 8, "unit": "s"})
    assert summary(cls).startswith("Its options: width=4, unit=s")
    with pytest.raises(InputError, match="takes an integer, not 'wide'"):
        instantiate(cls, {"width": "wide"})
    with pytest.raises(InputError, match=r"has no option 'wdith'.*did you mean 'width'"):
        instantiate(cls, {"wdith": "8"})


@BY_KIND
@BY_STYLE
def test_an_instance_can_be_claimed_once(kind, style):
    """An instance can be bound once, even if it does not call the base's constructor.

    Rules are pure, so that any number of servers can have the same.
    """
    built = style(kind)()
    built.bind()
    if kind == "rules":
        built.bind()
        return
    with pytest.raises(InputError, match="is in use already"):
        built.bind()
    style(kind)().bind()


@BY_KIND
def test_an_annotation_without_a_decorator_is_refused(kind):
    """An annotation without a decorator raises PluginError with the line to add."""
    base = contract(kind)

    class Bare(base):
        name = "bare"
        width: int = 4

    says = (
        r"test_plugins_classes\..*Bare, which annotates 'width' but has no decorator that "
        r"makes it an option: write `@attrs.define\(eq=False\)` above `class Bare`"
    )
    for make in (Bare, lambda: Bare(width=8), lambda: resolve(kind, Bare)):
        with pytest.raises(PluginError, match=says):
            make()

    @hookimpl
    def hook():
        return [Bare]

    plugins = Plugins([SimpleNamespace(**{KINDS[kind]: hook})], entry_points=())
    with pytest.raises(PluginError, match=says):
        plugins.names(kind)


def test_annotations_that_are_no_options_are_allowed():
    """Annotations of class variables, private names and contract names are allowed.

    So are those of a class with a constructor of its own, which defines the options.
    """

    class Base(Plugin):
        kind = "eviction"
        pool: int = 0

    class Fine(Base):
        name: str = "fine"
        pool: int = 8
        table: ClassVar[dict] = {}
        _heap: list = []  # noqa: RUF012

    class Own(Base):
        name = "own"
        width: int

        def __init__(self, width: int = 4) -> None:
            self.width = width

    assert Fine().options() == {}
    assert Own(5).options() == {"width": 5}


def test_required_options_and_made_defaults_are_marked():
    """Required options and defaults made for each instance are marked as such."""

    @dataclass
    class Data(contract("eviction")):
        path: str
        table: dict = field(default_factory=dict)

    @attrs.define
    class Checked(contract("eviction")):
        path: str
        table: dict = attrs.Factory(dict)

    for cls in (Data, Checked):
        assert [option.default for option in options_of(cls)] == [REQUIRED, COMPUTED]
        assert summary(cls) == "Its options: path (required), table (computed)."


def test_parameters_that_collect_are_no_options():
    """Collecting and private parameters are no options; one without an annotation is text."""

    class Plain(contract("eviction")):
        def __init__(self, label, *rest, _hidden=1, **more):
            self.label = label

    assert [option.name for option in options_of(Plain)] == ["label"]
    assert instantiate(Plain, {"label": "12"}).label == "12"


def test_an_option_that_is_not_kept_is_named():
    """An option that the constructor does not store raises PluginError with its name."""

    class Forgets(contract("eviction")):
        def __init__(self, width=4):
            self._width = width

    with pytest.raises(PluginError, match=r"does not keep its option 'width'.*self.width = w"):
        Forgets().options()


def test_the_text_of_an_instance_has_its_options():
    """The `repr` of an instance shows its options."""
    assert repr(plain("eviction")(width=5)) == "Plain(width=5, unit='s')"


@pytest.mark.parametrize("kind", ["eviction", "scheduler", "latency"])
def test_resolve_accepts_a_name_a_class_an_instance_or_none(kind):
    """`resolve` accepts a name, a class, an instance or None."""
    name = {"eviction": "lru", "scheduler": "fcfs", "latency": "roofline"}[kind]
    cls = Plugins().get(kind, name)
    instance = cls()
    assert type(resolve(kind, None, name)) is cls
    assert type(resolve(kind, name)) is cls
    assert type(resolve(kind, cls)) is cls
    assert resolve(kind, instance) is instance
    assert resolve(kind, None) is None
    with pytest.raises(InputError, match=f"{kind}=8 is no {kind} plugin: give a name such as"):
        resolve(kind, 8, name)


def test_resolve_refuses_incomplete_classes():
    """An abstract class, and one that lacks a required option, are errors."""
    pytest.importorskip("kvcore_tiers")
    with pytest.raises(PluginError, match="which does not define victim"):
        resolve("eviction", type("Unfinished", (base_of("eviction"),), {"name": "x"}))
    with pytest.raises(InputError, match="needs a value for option 'memory'"):
        resolve("tier", Plugins().get("tier", "host"))


def test_resolve_searches_the_given_plugins():
    """`resolve` searches the plugins that it is given."""
    cls = plain("eviction")

    @hookimpl
    def hook():
        return [cls]

    plugins = Plugins([SimpleNamespace(kvcore_eviction_policies=hook)], entry_points=())
    found = resolve("eviction", "some-eviction:width=6", plugins=plugins)
    assert (type(found), found.width) == (cls, 6)


class PlainNewest(ScoreEviction):
    """A policy that evicts the most recent span; it does not call the base's constructor."""

    name = "newest"

    def __init__(self, width=4):
        """Store the option."""
        self.width = width

    def score(self, span, now):
        """Return a lower score for later use."""
        return -now


@dataclass
class DataNewest(PlainNewest):
    """The policy `newest` with a dataclass's constructor."""

    width: int = 4


@attrs.define
class CheckedNewest(PlainNewest):
    """The policy `newest` with an attrs constructor and slots."""

    width: int = 4


@pytest.mark.parametrize("cls", [PlainNewest, DataNewest, CheckedNewest])
def test_a_policy_of_any_style_works(cls):
    """A policy works in a cache that evicts, whatever makes its constructor."""
    policy = cls(width=8)
    cache = KVCache(blocks=8, block_size=16, eviction=policy)
    for index in range(6):
        keys = [(index, block) for block in range(4)]
        request = Request(id=index, prompt_tokens=64, keys=keys, key_tokens=16)
        sequence = cache.open(request, now=index)
        cache.commit(sequence, sequence.tokens - sequence.computed, now=index)
        cache.close(sequence, now=index)
    cache.check_integrity()
    assert cache.tree.evicted_blocks == 16
    assert policy.options() == {"width": 8}


@pytest.mark.parametrize(
    ("name", "meant"),
    [("relased", "on_release"), ("on_relase", "on_release"), ("inserted", "on_insert")],
)
def test_a_misspelled_hook_warns_when_the_plugin_is_used(name, meant):
    """A misspelled hook warns when the policy is used, with the hook's name."""
    cls = type("Mine", (PlainNewest,), {name: lambda *_: None})
    with pytest.warns(UserWarning, match=rf"has a method {name}\(\), which .*: {meant}\(\) is"):
        KVCache(blocks=8, eviction=cls)


@pytest.mark.parametrize("fields", [{}, {"kind": "eviction"}])
def test_what_a_class_overrides_is_called(fields):
    """A method that a class overrides is found, also if the class repeats its kind."""
    cls = type("Mine", (PlainNewest,), {"on_insert": lambda *_: None} | fields)
    assert find_override(cls(), "on_insert")
    assert find_override(cls(), "on_miss") is None


@pytest.mark.parametrize("names", [["helper"], ["_relased"], ["relased", "on_release"]])
def test_own_methods_do_not_warn(names):
    """Own methods, private ones, and ones beside the real hook, do not warn."""
    cls = type("Mine", (PlainNewest,), {name: lambda *_: None for name in names})
    assert KVCache(blocks=8, eviction=cls).eviction.name == "newest"


def test_no_built_in_has_a_misspelled_hook():
    """No built-in plugin has a method that warns as misspelled."""
    plugins = Plugins()
    found = {kind: [plugins.get(kind, name) for name in plugins.names(kind)] for kind in KINDS}
    assert [hint for classes in found.values() for hint in map(uncalled, classes) if hint] == []


def test_a_helper_whose_name_resembles_a_callback_is_no_misspelling():
    """A method that the class itself calls may be named much as a callback; others warn."""

    class Helped(LRU):
        def released(self, span):
            return span.released_order

        def victim(self, now):
            return min(self._order, key=self.released)

    class Misspelled(LRU):
        def released(self, span, now):
            """Stand where nothing calls it."""

    assert uncalled(Helped) is None
    assert "released(), which nothing calls: on_release() is" in uncalled(Misspelled)


@pytest.mark.parametrize("kind", ["eviction", "workload", "codec"])
def test_a_class_that_lacks_a_method_says_which(kind):
    """An instance of an abstract class cannot be made: the error names kind and methods."""
    base = base_of(kind)
    missing = ", ".join(sorted(base.__abstractmethods__))
    cls = type("Unfinished", (base,), {"name": "unfinished"})
    wanted = f"^{kind} plugin .*Unfinished, which does not define {missing}$"
    with pytest.raises(PluginError, match=wanted):
        cls()


class Written(ScoreEviction):
    """A policy with a constructor that is written by hand."""

    name = "written"

    def __init__(self, width: int = 4) -> None:
        self.width = width

    def score(self, span, now):
        """Return the width."""
        return self.width


def test_an_annotation_below_a_written_constructor_is_to_be_a_parameter():
    """A class that inherits a constructor is not told to add a decorator, which hides it."""

    class Added(Written):
        name = "added"
        extra: int = 7

    with pytest.raises(PluginError, match="write an `__init__` with it that calls"):
        Added()


def test_a_plugin_in_a_file_is_described_with_the_digest_of_its_file(tmp_path):
    """`source` is the file's digest, and is left out where the file was edited since."""
    file = tmp_path / "written.py"
    file.write_text(
        "from kvcore import ScoreEviction\n"
        "class Deepest(ScoreEviction):\n"
        "    name = 'deepest'\n"
        "    def score(self, span, now): return -span.end\n"
    )
    policy = resolve("eviction", str(file))
    digest = blake2b(file.read_bytes(), digest_size=16).hexdigest()
    assert describe(policy) == {"name": "deepest", "options": {}, "source": digest}
    os.utime(file, ns=(time_ns() + NS_PER_S, time_ns() + NS_PER_S))
    assert describe(policy) == {"name": "deepest", "options": {}}
    assert "source" not in describe(LRU())
