"""Looking plugins up and building them, with plugins that are registered in code."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest

from kvcore.cache import EvictionPolicy
from kvcore.errors import InputError, PluginError
from kvcore.hookspecs import Verb, hookimpl
from kvcore.plugins.manager import EXTENSIONS, KINDS, Plugins, error_line, resolve
from kvcore.workloads import Workload


@attrs.define(slots=False, eq=False)
class Oldest(EvictionPolicy):
    """An eviction policy with an option, which has no victim."""

    name = "oldest"
    patience: float = attrs.field(default=1.5, validator=attrs.validators.gt(0))

    def victim(self, now):
        """Raise LookupError."""
        raise LookupError(now)


class Newest(Oldest):
    """A second policy."""

    name = "newest"


class NeedsGpu(Oldest):
    """A policy that cannot work here."""

    name = "needs-gpu"

    @classmethod
    def unavailable(cls):
        """Return the reason."""
        return "there is no GPU"


class BrokenCheck(Oldest):
    """A policy whose `unavailable` raises."""

    name = "cannot-tell"

    @classmethod
    def unavailable(cls):
        """Raise RuntimeError."""
        msg = "driver too old"
        raise RuntimeError(msg)


class Twin(Oldest):
    """A policy that inherits its name."""


class Requests(Workload):
    """A workload without requests."""

    name = "requests"
    key_tokens = 16
    digest = "0"

    def __iter__(self):
        """Yield no requests."""
        return iter(())


UNFINISHED = type("Unfinished", (EvictionPolicy,), {"name": "x", "__module__": "m"})
NAMELESS = type("Nameless", (EvictionPolicy,), {"victim": None, "__module__": "m"})
ODD = type("Odd", (Oldest,), {"name": "a,b", "__module__": "m"})


def module(**hooks):
    """Return an object with a hook implementation for each keyword, returning its value."""
    return SimpleNamespace(**{name: implement(value) for name, value in hooks.items()})


def implement(value):
    """Return a hook implementation that returns `value`."""

    @hookimpl
    def hook():
        return value

    return hook


def evictions(*classes):
    """Return plugins with `classes` as the only eviction policies."""
    return Plugins([module(kvcore_eviction_policies=list(classes))], entry_points=())


def error(kind, call, *arguments):
    """Return the text of the error of type `kind` that a call raises."""
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert type(caught.value) is kind
    return str(caught.value)


def test_names_are_sorted():
    """Names are sorted, whatever the order of registration."""
    assert evictions(Oldest, NeedsGpu, Newest).names("eviction") == [
        "needs-gpu",
        "newest",
        "oldest",
    ]


def test_a_hook_runs_once_and_only_when_its_kind_is_looked_up():
    """Looking up one kind calls that kind's hook once, and no other hook."""
    calls = []

    @hookimpl
    def kvcore_eviction_policies():
        calls.append("eviction")
        return [Oldest]

    @hookimpl
    def kvcore_workloads():
        calls.append("workload")
        return [Requests]

    hooks = SimpleNamespace(
        kvcore_eviction_policies=kvcore_eviction_policies, kvcore_workloads=kvcore_workloads
    )
    plugins = Plugins([hooks], entry_points=())
    assert calls == []
    plugins.names("eviction")
    plugins.build("eviction", "oldest")
    assert calls == ["eviction"]


def test_the_same_object_twice_is_registered_once():
    """Registering an object a second time changes nothing."""
    hooks = module(kvcore_eviction_policies=[Oldest])
    assert Plugins([hooks, hooks], entry_points=()).names("eviction") == ["oldest"]


def test_build_many_builds_each_piece():
    """A list is built in order, each piece as an instance of its own for one cache."""
    built = evictions(Oldest, Newest).build_many("eviction", "newest,oldest:patience=2,newest")
    assert [p.name for p in built] == ["newest", "oldest", "newest"]
    assert [p.patience for p in built] == [1.5, 2.0, 1.5]
    assert built[0] is not built[2]


def test_build_refuses_several():
    """Several names, where one plugin is needed, raise InputError."""
    assert error(InputError, evictions(Oldest).build, "eviction", "oldest,oldest") == (
        "'oldest,oldest' names 2 eviction plugins where one is needed"
    )


def test_unknown_name_offers_the_nearest_and_the_list():
    """A misspelled name raises InputError with the nearest name and all names."""
    assert error(InputError, evictions(Oldest, Newest).get, "eviction", "oldset") == (
        "no eviction plugin is named 'oldset' (did you mean 'oldest'?). "
        "There are: newest, oldest; in comparisons also the bounds belady, optimum"
    )


def test_the_optimum_is_no_plugin():
    """The error of `optimum` explains that it is a bound, not a policy."""
    assert error(InputError, evictions(Oldest).build, "eviction", "optimum") == (
        "no eviction plugin is named 'optimum': it is no policy but a bound, and comparisons "
        "alone know it. There are: oldest; in comparisons also the bounds belady, optimum"
    )


def test_a_misspelled_bound_offers_the_bound():
    """The error of a name that is like that of a bound offers the bound."""
    assert "(did you mean 'optimum'?)" in error(
        InputError, evictions(Oldest).get, "eviction", "optimal"
    )


def test_unknown_kind_offers_the_nearest_and_the_list():
    """A misspelled kind raises InputError with the nearest kind and all kinds."""
    assert error(InputError, evictions().names, "evicton") == (
        "'evicton' is no kind of plugin (did you mean 'eviction'?). "
        f"The kinds are: {', '.join(KINDS)}"
    )


def test_listing_is_by_kind_and_name():
    """The listing is sorted by kind and name."""
    hooks = module(kvcore_workloads=[Requests], kvcore_eviction_policies=[Oldest, Newest])
    infos = Plugins([hooks], entry_points=()).listing()
    assert [(i.kind, i.name) for i in infos] == [
        ("eviction", "newest"),
        ("eviction", "oldest"),
        ("workload", "requests"),
    ]


def test_building_an_unusable_plugin_gives_its_reason():
    """Building a plugin that cannot work here raises PluginError with the reason."""
    assert error(PluginError, evictions(NeedsGpu).build, "eviction", "needs-gpu") == (
        "eviction plugin 'needs-gpu' cannot work here: there is no GPU"
    )


def test_a_plugin_with_an_error_in_unavailable_is_unusable():
    """An error in `unavailable` is the reason of the plugin in the listing."""
    (info,) = evictions(BrokenCheck).listing()
    assert info.reason == (
        f"{__name__}.BrokenCheck.unavailable raised RuntimeError('driver too old')"
    )


def test_duplicate_names_name_both_classes():
    """Two classes of one name raise PluginError with both and their origins."""
    assert error(PluginError, evictions(Oldest, Twin).names, "eviction") == (
        f"two eviction plugins are named 'oldest': {__name__}.Oldest of extra[0] (registered "
        f"in code), and {__name__}.Twin of extra[0] (registered in code); rename one, or skip "
        "the entry point of one with KVCORE_DISABLE_PLUGINS"
    )


def test_misspelled_hook_offers_the_nearest_and_the_list():
    """A misspelled hook raises PluginError with the nearest hook and all hooks."""
    hooks = module(kvcore_eviction_policy=[Oldest])
    assert error(PluginError, lambda: Plugins([hooks], entry_points=())) == (
        "extra[0] (registered in code) implements 'kvcore_eviction_policy', which is no hook "
        "of kvcore (did you mean 'kvcore_eviction_policies'?). The hooks are "
        + ", ".join([*KINDS.values(), *EXTENSIONS])
    )


def test_wrong_hook_argument_names_the_argument():
    """A hook with an unknown argument raises PluginError with the hook and the argument."""

    @hookimpl
    def kvcore_eviction_policies(config):
        return [config]

    hooks = SimpleNamespace(kvcore_eviction_policies=kvcore_eviction_policies)
    text = error(PluginError, lambda: Plugins([hooks], entry_points=()))
    assert text == (
        "extra[0] (registered in code) implements 'kvcore_eviction_policies' with an argument "
        "'config', which kvcore does not pass: write kvcore_eviction_policies()"
    )


def test_object_without_hooks_is_refused():
    """An object without marked hooks raises PluginError that names the marker."""

    def kvcore_eviction_policies():
        return [Oldest]

    hooks = SimpleNamespace(kvcore_eviction_policies=kvcore_eviction_policies)
    text = error(PluginError, lambda: Plugins([hooks], entry_points=()))
    assert text.startswith("extra[0] (registered in code) has no hooks: it is namespace(")
    assert text.endswith("no function is marked with kvcore.hookimpl")


NOT_EVICTION = "which is not a class derived from kvcore.cache.eviction.EvictionPolicy"
BAD_NAME = "a plugin class needs an attribute `name` of letters, digits, `_`, `-` and `.`"


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (Oldest, f"<class '{__name__}.Oldest'>, not a list of classes"),
        (None, "None, not a list of classes"),
        (["lru"], f"'lru', {NOT_EVICTION}"),
        ([Requests], f"<class '{__name__}.Requests'>, {NOT_EVICTION}"),
        ([UNFINISHED], "m.Unfinished, which does not define victim"),
        ([NAMELESS], f"m.Nameless, whose name is None; {BAD_NAME}"),
        ([ODD], f"m.Odd, whose name is 'a,b'; {BAD_NAME}"),
    ],
    ids=["class", "nothing", "text", "other-kind", "abstract", "nameless", "odd-name"],
)
def test_hook_result_that_is_no_list_of_plugin_classes_is_refused(value, fault):
    """A hook that does not return plugin classes raises PluginError with its result."""
    plugins = Plugins([module(kvcore_eviction_policies=value)], entry_points=())
    assert error(PluginError, plugins.names, "eviction") == (
        f"kvcore_eviction_policies of extra[0] (registered in code) returned {fault}"
    )


@pytest.mark.parametrize("failure", [ZeroDivisionError("bad"), SystemExit(4)])
def test_hook_that_raises_is_reported(failure):
    """A hook that raises, or exits, is reported with its name, the error and the line."""

    @hookimpl
    def kvcore_workloads():
        raise failure

    plugins = Plugins([SimpleNamespace(kvcore_workloads=kvcore_workloads)], entry_points=())
    text = error(PluginError, plugins.names, "workload")
    hook = "kvcore_workloads of extra[0] (registered in code)"
    assert text.startswith(f"{hook} raised {failure!r} ({__file__}:")


def test_a_class_that_is_registered_twice_is_one():
    """A class that one hook returns twice, or two hooks each, is no duplicate of itself."""
    twice, again, twin = (
        module(kvcore_eviction_policies=classes)
        for classes in ([Oldest, Oldest], [Oldest], [Twin, Twin])
    )
    assert Plugins([twice, again], entry_points=()).names("eviction") == ["oldest"]
    both = Plugins([twice, twin], entry_points=())
    assert error(PluginError, both.names, "eviction").startswith(
        f"two eviction plugins are named 'oldest': {__name__}.Oldest of extra[0] (registered "
        f"in code), and {__name__}.Twin of extra[1]"
    )


def test_a_file_alone_stands_for_its_only_class(tmp_path):
    """`my.py` is the only class of a kind in that file, as `my.py:` is."""
    file = tmp_path / "my.py"
    file.write_text(
        "import kvcore\nclass Deepest(kvcore.ScoreEviction):\n    name = 'deepest'\n"
        "    def score(self, span, now):\n        return -span.depth\n"
    )
    assert Plugins().get("eviction", str(file)).name == "deepest"
    assert Plugins().get("eviction", f"{file}:").name == "deepest"


def test_other_names_have_no_case():
    """The other name of a plugin is found in capitals too, as its name is."""
    plugins = Plugins()
    assert plugins.get("codec", "FP8") is plugins.get("codec", "fp8")


def test_a_class_that_cannot_work_here_is_not_built():
    """A class that is given instead of a name is refused with its reason, as by its name."""
    with pytest.raises(PluginError, match="'needs-gpu' cannot work here: there is no GPU"):
        resolve("eviction", NeedsGpu)


def test_classes_of_names_that_are_none_are_left_out():
    """Of the names to load, those of no plugin have no class."""
    assert list(Plugins().classes("eviction", ["nope", "lru"])) == ["lru"]


def test_a_taken_verb_is_refused_after_a_listing():
    """A verb of the core's name is refused also if all additions were listed before."""

    class Added:
        @hookimpl
        def kvcore_commands(self):
            return {"simulate": Verb("a:b", "about", "group")}

    plugins = Plugins([Added()])
    plugins.additions()
    with pytest.raises(PluginError, match="'simulate' is of the core; rename it"):
        plugins.verbs({"simulate"})


def test_an_error_without_a_traceback_has_no_line():
    """An error that was never raised has no file and line."""
    assert error_line(ValueError("x")) == ""
