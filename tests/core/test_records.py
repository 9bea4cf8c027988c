"""Records are what attrs makes of the same class."""

import copy
import inspect
import pickle
from typing import ClassVar

import attrs
import attrs.exceptions
import pytest

from kvcore import records


def scaled(number):
    """Return twice a number: a converter."""
    return 2 * number


del scaled.__annotations__


def made(module, **options):
    """Return classes of the same body, a base and one derived from it."""
    validators = records if module is records else attrs.validators

    class Base:
        name: str = "name"

        def title(self):
            return self.name.title()

    define = module.define(**options)
    base = define(Base)

    class Point(base):
        kinds: ClassVar[tuple[str, ...]] = ("a", "b")

        x: int = module.field(default=1, converter=scaled, validator=validators.ge(0))
        y: int = module.field(default=module.Factory(lambda self: self.x + 1, takes_self=True))
        path: list = module.field(factory=list, repr=False)
        kind: str = module.field(
            default="a",
            validator=validators.optional(validators.in_(kinds)),
            kw_only=True,
        )
        size: float = module.field(
            default=1.0, validator=[validators.gt(0), validators.le(9)], eq=round
        )
        _hidden: int = module.field(default=5, init=False, repr=False, eq=False)

        def title(self):
            return super().title() + "!"

        @property
        def shout(self):
            return super().title()

    return define(Point)


BOTH = (records, attrs)

OPTIONS = [
    {},
    {"frozen": True},
    {"kw_only": True},
    {"eq": False},
    {"slots": False},
    {"frozen": True, "slots": False},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_constructor_is_that_of_attrs(options):
    """The parameters, their annotations and their defaults are those of attrs."""
    ours, theirs = (inspect.signature(made(module, **options)) for module in BOTH)
    assert str(ours) == str(theirs)


@pytest.mark.parametrize("options", OPTIONS)
def test_instances_are_those_of_attrs(options):
    """Values are converted and computed, shown, and seen by `super()`, as by attrs."""
    for given in ({}, {"x": 4, "name": "no"}, {"kind": None, "size": 9, "path": [3]}):
        ours, theirs = (made(module, **options)(**given) for module in BOTH)
        assert repr(ours) == repr(theirs)
        assert (ours.title(), ours.shout) == (theirs.title(), theirs.shout)
        assert attrs.asdict(ours) == attrs.asdict(theirs) == records.asdict(ours)
        assert hasattr(ours, "__dict__") == hasattr(theirs, "__dict__")


@pytest.mark.parametrize(
    "given",
    [{"x": -1}, {"kind": "c"}, {"size": 0}, {"size": 10}, {"z": 3}],
    ids=str,
)
def test_errors_are_those_of_attrs(given):
    """A value or a parameter that attrs refuses is refused with the same text."""
    texts = []
    for module in BOTH:
        with pytest.raises((ValueError, TypeError)) as error:
            made(module)(**given)
        texts.append((error.type, str(error.value.args[0])))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("options", OPTIONS)
def test_equality_and_hashes_are_those_of_attrs(options):
    """Records are equal, and can be hashed, where those of attrs are."""
    for module in BOTH:
        cls = made(module, **options)
        one, same, other = cls(), cls(size=1.2), cls(x=7)
        equal = options.get("eq", True)
        assert (one == same) is equal
        assert one != other
        if options.get("frozen"):
            with pytest.raises(TypeError, match="unhashable type: 'list'"):
                hash(one)
        else:
            assert (cls.__hash__ is None) is equal


def test_a_frozen_record_does_not_change():
    """Assignments and deletions are refused, and copies of all kinds are equal."""
    point = FROZEN(3)
    for change in (lambda: setattr(point, "x", 1), lambda: delattr(point, "x")):
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            change()
    copies = copy.copy(point), copy.deepcopy(point), pickle.loads(pickle.dumps(point))  # noqa: S301 - our own
    assert {*copies} == {point}
    assert records.evolve(point, x=4) == attrs.evolve(point, x=4) == FROZEN(4)


@records.frozen
class FROZEN:
    """A record that can be pickled: its class has a name in this module."""

    x: int
    y: int = 2


def test_a_class_of_attrs_may_derive_from_a_record():
    """It has the fields of the record and its own, and attrs copies all."""

    @attrs.define
    class Derived(made(records)):
        extra: int = 7

    @attrs.define(eq=False)
    class Bare(made(records)):
        extra: int = 7

    derived = attrs.evolve(Derived(x=2), extra=8)
    assert (derived.x, derived.extra) == (8, 8)
    assert records.evolve(Derived(x=4), extra=8) == attrs.evolve(Derived(x=4), extra=8)
    assert records.asdict(derived) == attrs.asdict(derived)
    assert Bare(x=2) == Bare(x=2, extra=1) != Bare(x=3)
    assert records.fields_dict(Derived) == {}
    assert [field.name for field in attrs.fields(Derived)][-1] == "extra"


def test_a_constructor_of_its_own_stays():
    """A class with one keeps it, and fills the fields by the generated one."""

    @records.frozen
    class Own:
        text: str

        def __init__(self, number):
            self.__attrs_init__(str(number))

    assert Own(3).text == "3"
