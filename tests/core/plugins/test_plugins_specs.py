"""Plugins given as text: how lists are parsed, options converted, and defaults passed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Optional

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Plugins
from kvcore.errors import InputError, KvcoreError, PluginError
from kvcore.plugins import Plugin
from kvcore.plugins.options import Spec, instantiate, parse, takes_path


def seconds(value: float) -> int:
    """Convert seconds to nanoseconds."""
    return round(float(value) * 1e9)


@attrs.define(slots=False, eq=False)
class Everything(Plugin):
    """A plugin with an option of every type."""

    kind = "eviction"
    name = "everything"

    count: int = 1
    rate: float = 0.5
    on: bool = False
    label: str = "x"
    path: Path | None = None
    limit: int | float | None = 3
    old: Optional[int] = None  # noqa: UP045 - some plugins write this
    unit: Literal["s", "accesses"] = "s"
    level: Literal[1, 2] | None = 1
    anything: Any = None
    converted: float = attrs.field(default=1, converter=seconds)
    checked: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    weights: dict[str, float] = attrs.field(factory=dict)
    _hidden: int = 0


@attrs.define(slots=False, eq=False)
class Required(Plugin):
    """A plugin that needs an option."""

    kind = "workload"
    name = "required"

    path: Path
    limit: int | None = None


class Broken(Plugin):
    """A plugin with a bug."""

    kind = "eviction"
    name = "broken"

    def __init__(self):
        """Raise KeyError."""
        raise KeyError("table")  # noqa: EM101


def error(call, *arguments):
    """Return the text of the InputError that a call raises."""
    with pytest.raises(InputError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        (
            "lru,lfu:half_life=300,unit=s,cost",
            [Spec("lru"), Spec("lfu", {"half_life": "300", "unit": "s"}), Spec("cost")],
        ),
        (" lru , lfu : age = 300 ", [Spec("lru"), Spec("lfu", {"age": "300"})]),
        ("jsonl:path=a=b:c,unit=d:e", [Spec("jsonl", {"path": "a=b:c", "unit": "d:e"})]),
        (
            "my.py:weight=2,lru,my.py:path=c:d,Class.py:Class:a=1",
            [
                Spec("my.py:", {"weight": "2"}),
                Spec("lru"),
                Spec("my.py:", {"path": "c:d"}),
                Spec("Class.py:Class", {"a": "1"}),
            ],
        ),
        (
            "a=b/my.py:Class,./a=b/my.py:c=1,path=my.py",
            [Spec("a=b/my.py:Class"), Spec("./a=b/my.py:", {"c": "1", "path": "my.py"})],
        ),
    ],
    ids=["list", "spaces", "signs", "files", "folders"],
)
def test_a_list_of_names_with_options(text, specs):
    """A piece with an equals sign continues the name before it; its value may have others."""
    assert parse(text) == specs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' has an empty name; write NAME or NAME:option=value,..."),
        ("lru,,cost", "'lru,,cost' has an empty name; write NAME or NAME:option=value,..."),
        (":a=1", "':a=1' has an empty name; write NAME or NAME:option=value,..."),
        ("a=1,lru", "'a=1,lru' starts with an option; write NAME:a=1"),
        ("lfu:300", "'300' in 'lfu:300' is no option; write lfu:option=value"),
        ("lfu:", "'' in 'lfu:' is no option; write lfu:option=value"),
        ("lfu:=3", "'=3' in 'lfu:=3' is no option; write lfu:option=value"),
        ("lfu:a=1,a=2", "option 'a' of 'lfu' is given twice in 'lfu:a=1,a=2'"),
    ],
)
def test_malformed_text_is_refused_with_the_accepted_form(text, message):
    """The error for malformed text names the fault and the form that is accepted."""
    assert error(parse, text) == message


WORDS = st.text("abcxyz_-.019", min_size=1, max_size=8)


@given(
    st.lists(
        st.builds(Spec, WORDS, st.dictionaries(WORDS, WORDS, max_size=3)),
        min_size=1,
        max_size=4,
    )
)
def test_the_text_of_specs_is_parsed_back_to_equal_specs(specs):
    """The text of any list of specs is parsed back to equal specs."""
    assert parse(",".join(map(str, specs))) == specs


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("count", "12", 12),
        ("rate", "0.25", 0.25),
        ("rate", "1e3", 1000.0),
        ("rate", "3", 3.0),
        ("rate", "inf", math.inf),
        ("on", "true", True),
        ("on", "false", False),
        ("label", "none", "none"),
        ("path", "a/b", Path("a/b")),
        ("path", "none", None),
        ("limit", "4", 4),
        ("limit", "4.5", 4.5),
        ("limit", "none", None),
        ("old", "7", 7),
        ("unit", "accesses", "accesses"),
        ("level", "2", 2),
        ("level", "none", None),
        ("anything", "12", "12"),
        ("converted", "1.5", 1_500_000_000),
        ("checked", "5", 5),
    ],
)
def test_an_option_is_converted_to_its_annotated_type(option, text, value):
    """The text of an option is converted to exactly the annotated type."""
    built = getattr(instantiate(Everything, {option: text}), option)
    assert built == value
    assert type(built) is type(value)


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("count", "1.5", "an integer"),
        ("rate", "fast", "a number"),
        ("rate", "nan", "a number"),
        ("on", "yes", "true or false"),
        ("limit", "many", "an integer or a number or none"),
        ("unit", "h", "s or accesses"),
        ("level", "3", "1 or 2 or none"),
        ("converted", "soon", "a number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(option, text, expected):
    """The error for a value of the wrong type names the types that the option takes."""
    assert error(instantiate, Everything, {option: text}) == (
        f"option {option!r} of eviction plugin 'everything' takes {expected}, not {text!r}"
    )


def test_a_value_rejected_by_a_validator_is_refused():
    """The error for a rejected value has the message of the validator and the whole spec."""
    assert error(instantiate, Everything, {"checked": "0"}) == (
        "eviction plugin 'everything' cannot be built as 'everything:checked=0': "
        "'checked' must be >= 1: 0"
    )


def test_a_type_validator_gives_its_message_alone():
    """The error of a type validator shows the message, without the attrs attribute."""

    @attrs.define(slots=False, eq=False)
    class Picky(Plugin):
        kind = "eviction"
        name = "picky"
        size: Any = attrs.field(default=1, validator=attrs.validators.instance_of(int))

    text = error(instantiate, Picky, {"size": "2"})
    assert "as 'picky:size=2': 'size' must be <class 'int'>" in text
    assert "Attribute(" not in text


def test_unknown_option_lists_the_options():
    """The error for an unknown option suggests a similar one and lists all with defaults."""
    assert error(instantiate, Everything, {"lable": "x"}) == (
        "eviction plugin 'everything' has no option 'lable' (did you mean 'label'?). "
        "Its options: count=1, rate=0.5, on=false, label=x, path=none, limit=3, old=none, "
        "unit=s, level=1, anything=none, converted=1, checked=1, weights (computed)."
    )


def test_missing_option_is_named():
    """The error for a missing required option names that option and lists all."""
    assert error(instantiate, Required, {}) == (
        "workload plugin 'required' needs a value for option 'path'. "
        "Its options: path (required), limit=none."
    )


def test_option_without_a_text_form():
    """The error for an option without a text form advises to build the plugin in code."""
    assert error(instantiate, Everything, {"weights": "1"}) == (
        "option 'weights' of eviction plugin 'everything' takes dict[str, float], which has "
        f"no text form; build {__name__}.Everything in code"
    )


def test_an_option_of_a_union_type_can_be_set_by_text():
    """Text can set an option of a union type if one of the types has a text form."""

    @attrs.define(slots=False, eq=False)
    class Mixed(Plugin):
        kind = "eviction"
        name = "mixed"
        table: str | dict[str, float] = ""
        weights: dict[str, float] | None = None

    assert instantiate(Mixed, {"table": "small"}).table == "small"
    assert "which has no text form" in error(instantiate, Mixed, {"weights": "none"})


def test_an_option_with_an_unresolvable_annotation_has_no_text_form():
    """An option whose annotation cannot be resolved at run time has no text form."""

    @attrs.define(slots=False, eq=False)
    class Typed(Plugin):
        kind = "eviction"
        name = "typed"
        table: Table = None  # type: ignore[name-defined] # noqa: F821

    assert "takes Table, which has no text form" in error(instantiate, Typed, {"table": "1"})


def test_an_inherited_annotation_is_resolved_in_the_declaring_module():
    """An annotation is resolved in the module of the class that declares the option."""

    class Child(Required):
        __module__ = "builtins"

    assert instantiate(Child, {"path": "a"}).path == Path("a")


def test_an_unexpected_exception_of_a_constructor_is_a_plugin_error():
    """An unexpected exception of a constructor becomes a PluginError that names the class."""
    with pytest.raises(PluginError) as caught:
        instantiate(Broken, {})
    assert str(caught.value) == (
        f"eviction plugin 'broken' ({__name__}.Broken) could not be built: it raised "
        "KeyError('table')"
    )


@pytest.mark.parametrize("raised", [InputError("row 3"), FileNotFoundError(2, "gone")])
def test_input_and_os_errors_of_a_constructor_are_raised_unchanged(raised):
    """InputError and OSError of a constructor are raised unchanged."""

    class Reads(Plugin):
        kind = "workload"
        name = "reads"

        def __init__(self):
            raise raised

    with pytest.raises(type(raised)) as caught:
        instantiate(Reads, {})
    assert caught.value is raised


POLICY = """
from kvcore import ScoreEviction

class Newest(ScoreEviction):
    name = "newest"

    def __init__(self, factor: float = 1.0):
        self.factor = factor

    def score(self, span, now):
        return -self.factor * span.last_access

number = 3
"""


def test_a_class_in_a_file_is_a_plugin(tmp_path):
    """`my.py:Class:option=value` builds the class of that file, beside plugins by name."""
    path = tmp_path / "my.py"
    path.write_text(POLICY)
    policies = Plugins().build_many("eviction", f"lru,{path}:Newest:factor=2,lfu,{path}:Newest")
    assert [policy.name for policy in policies] == ["lru", "newest", "lfu", "newest"]
    assert policies[1].factor == 2
    assert type(policies[1]) is type(policies[3])


@pytest.mark.parametrize(
    ("kind", "name", "text", "why"),
    [
        ("eviction", "Newst", POLICY, r"no class 'Newst' \(did you mean 'Newest'\?\)"),
        ("eviction", "number", POLICY, "number is 3, which is not a class derived from"),
        ("scheduler", "Newest", POLICY, "scheduler plugins: none"),
        ("eviction", "ScoreEviction", POLICY, "which does not define score"),
        ("eviction", "Newest", "1 / 0", r"raised ZeroDivisionError.*my\.py:1\)"),
        ("eviction", "Newest", None, "there is no such file"),
    ],
)
def test_a_file_without_that_plugin_is_refused(tmp_path, kind, name, text, why):
    """A file that is missing, fails, or has no such class of the kind is refused by name."""
    path = tmp_path / "my.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KvcoreError, match=why):
        Plugins().build(kind, f"{path}:{name}")


@pytest.mark.parametrize("told", [True, False])
def test_a_file_that_imports_its_neighbour_is_told_how(tmp_path, told):
    """The folder of a file is not searched; the error of what it imports from there says so."""
    (tmp_path / "my.py").write_text("import beside_it")
    (tmp_path / ("beside_it.py" if told else "other.py")).touch()
    with pytest.raises(PluginError, match="No module named 'beside_it'") as caught:
        Plugins().build("eviction", f"{tmp_path}/my.py")
    assert (f"set PYTHONPATH={tmp_path}" in str(caught.value)) is told


@pytest.fixture(scope="module")
def plugins():
    """Return the installed plugins."""
    return Plugins()


def test_a_default_is_used_if_the_text_omits_the_option(plugins):
    """A default is used if the text omits the option, and ignored if the text sets it."""
    assert plugins.build("eviction", "random", {"seed": 7}).seed == 7
    assert plugins.build("eviction", "random:seed=3", {"seed": 7}).seed == 3


def test_a_default_may_be_a_value_without_a_text_form(plugins):
    """A default is passed as a Python value, and can supply a required option."""
    with pytest.raises(InputError, match="needs a value for option 'path'"):
        plugins.build("workload", "jsonl", {"seed": 7})
    assert plugins.build("workload", "jsonl", {"path": Path("a.jsonl")}).path == Path("a.jsonl")


def test_takes_path_finds_options_that_accept_a_path(plugins):
    """`takes_path` returns True if a path is one of the values that the option may have."""
    assert takes_path(plugins.get("latency", "table"), "path")
    assert takes_path(plugins.get("workload", "mooncake"), "path")
    assert not takes_path(plugins.get("workload", "zipf"), "skew")
    assert not takes_path(plugins.get("workload", "zipf"), "path")
