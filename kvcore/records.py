"""Classes of data as attrs makes them, at a tenth of the time that attrs adds to a start.

attrs takes 10 ms to import, and 0.6 ms a class for methods that few runs call. Here a class
gets a compiled constructor, and shares its other methods with all classes. The names are those
of attrs, and for type checkers they are attrs (`records.pyi`). So they are for attrs itself:
`attrs.evolve`, `attrs.fields` and `attrs.asdict` take these classes, and classes of attrs may
derive from them. Modules that `kvcore simulate` does not import use attrs.
"""

from __future__ import annotations

import inspect
import operator
from functools import partial


class _Nothing:
    def __repr__(self):
        return "NOTHING"


NOTHING = _Nothing()
"""The default of a field without one, or with one that is made for each instance."""


class Factory:
    """Makes the default of a field for each instance, perhaps from the fields before it."""

    def __init__(self, factory, takes_self=False):
        self.factory = factory
        self.takes_self = takes_self


class Attribute:
    """A field, as `field` describes it: `alias` is its name as a parameter."""

    name = type = alias = ""

    def __init__(self, default=NOTHING, factory=None, validator=(), converter=None, **options):
        self.default = default if factory is None else Factory(factory)
        self.validators = validator if isinstance(validator, (list, tuple)) else [validator]
        self.converter = converter
        self.metadata = options.get("metadata", {})
        self.init = options.get("init", True)
        self.repr = options.get("repr", True)
        self.eq = options.get("eq", True)
        self.kw_only = options.get("kw_only", False)

    def named(self, name, type_, kw_only):
        """Return the field itself, with its name and its annotation."""
        self.name, self.type, self.alias = name, type_, name.lstrip("_")
        self.kw_only = self.kw_only or kw_only
        return self

    def for_attrs(self):
        """Return the same field of attrs."""
        import attrs

        default = self.default
        if isinstance(default, Factory):
            default = attrs.Factory(default.factory, default.takes_self)
        return attrs.field(
            default=attrs.NOTHING if default is NOTHING else default,
            validator=[*self.validators] or None,
            converter=self.converter,
            metadata=self.metadata,
            repr=self.repr,
            eq=self.eq,
            init=self.init,
            kw_only=self.kw_only,
            type=self.type,
        )


field = Attribute


def define(cls=None, *, frozen=False, kw_only=False, eq=True, slots=True):
    """Make a record of a class: the attributes that it annotates are its fields."""
    if cls is None:
        return partial(define, frozen=frozen, kw_only=kw_only, eq=eq, slots=slots)
    own = _own_fields(cls, kw_only)
    inherited = {name: one for name, one in fields_dict(cls).items() if name not in own}
    if slots:
        cls = _slotted(cls, own)
    constructor = _constructor(cls, {**inherited, **own}, frozen)
    methods = {"__init__": constructor, "__repr__": _repr}
    if eq:
        methods |= {"__eq__": _eq, "__hash__": _hash if frozen else None}
    if frozen:
        methods |= {"__setattr__": _refuse, "__delattr__": _refuse, "__setstate__": _setstate}
    for name, method in methods.items():
        if name not in vars(cls) or vars(cls)[name] is None:
            setattr(cls, name, method)
    cls.__fields__, cls.__attrs_attrs__ = {**inherited, **own}, _Attributes()
    cls.__attrs_init__ = constructor
    return cls


frozen = partial(define, frozen=True)


def fields_dict(cls):
    """Return the fields of a record class by name; of another class, as of attrs, none."""
    for base in cls.__mro__:
        if "__fields__" in vars(base):
            return base.__fields__
        if "__attrs_attrs__" in vars(base):
            break
    return {}


def evolve(record, **changes):
    """Return a copy of a record, or of one of attrs, with other values of some fields."""
    fields = fields_dict(type(record)).values()
    if not fields:
        import attrs

        return attrs.evolve(record, **changes)
    kept = {one.alias: getattr(record, one.name) for one in fields if one.init}
    return type(record)(**kept | changes)


def asdict(record):
    """Return the fields of a record, or of one of attrs, and of those in it, by name."""
    fields = fields_dict(type(record))
    if not fields:
        import attrs

        return attrs.asdict(record)
    return {name: _plain(getattr(record, name)) for name in fields}


def ge(bound):
    """Return a validator of numbers from `bound` on."""
    return partial(_compare, operator.ge, ">=", bound)


def gt(bound):
    """Return a validator of numbers above `bound`."""
    return partial(_compare, operator.gt, ">", bound)


def le(bound):
    """Return a validator of numbers up to `bound`."""
    return partial(_compare, operator.le, "<=", bound)


def in_(choices):
    """Return a validator of values that are among `choices`."""

    def check(_, field, value):
        if value not in choices:
            msg = f"{field.name!r} must be in {choices!r} (got {value!r})"
            raise ValueError(msg)

    return check


def optional(validator):
    """Return a validator that lets None pass."""

    def check(record, field, value):
        if value is not None:
            validator(record, field, value)

    return check


def _compare(holds, sign, bound, _, field, value):
    if not holds(value, bound):
        msg = f"{field.name!r} must be {sign} {bound}: {value}"
        raise ValueError(msg)


def _own_fields(cls, kw_only):
    """Take the fields out of a class that annotates them, and return them by name."""
    own = {}
    for name, annotation in inspect.get_annotations(cls).items():
        if "ClassVar" not in str(annotation).partition("[")[0]:
            value = vars(cls).get(name, NOTHING)
            one = value if isinstance(value, Attribute) else Attribute(value)
            own[name] = one.named(name, annotation, kw_only)
            if value is not NOTHING:
                delattr(cls, name)
    return own


def _slotted(cls, own):
    """Return a class like `cls` whose instances have slots for its own fields."""
    body = {name: value for name, value in vars(cls).items() if name not in _OF_INSTANCES}
    weak = any("__weakref__" in vars(base) for base in cls.__mro__[1:-1])
    body["__slots__"] = (*own,) if weak else (*own, "__weakref__")
    body["__qualname__"] = cls.__qualname__
    made = type(cls)(cls.__name__, cls.__bases__, body)
    for value in body.values():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is cls:  # of `super()`
                cell.cell_contents = made
    return made


_OF_INSTANCES = {"__dict__", "__weakref__"}


def _constructor(cls, fields, frozen):
    """Compile the constructor of a record class."""
    names = {"NOTHING": NOTHING, "put": object.__setattr__}
    parameters, body, checks = ["self"], [], []
    for one in sorted(fields.values(), key=operator.attrgetter("kw_only")):
        if one.init:
            if one.kw_only and "*" not in parameters:
                parameters.append("*")
            parameters.append(
                one.alias if one.default is NOTHING else f"{one.alias}=d_{one.name}"
            )
    for name, one in fields.items():
        value = one.alias if one.init else f"d_{name}"
        names[f"d_{name}"], factory = one.default, one.default
        if isinstance(factory, Factory):
            names |= {f"d_{name}": NOTHING, f"f_{name}": factory.factory}
            made = f"f_{name}(self)" if factory.takes_self else f"f_{name}()"
            value = f"{made} if {value} is NOTHING else {value}"
        if one.converter is not None:
            names[f"c_{name}"] = one.converter
            value = f"c_{name}({value})"
        body.append(f"put(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
        for number, validator in enumerate(one.validators):
            names |= {f"v{number}_{name}": validator, f"a_{name}": one}
            checks.append(f"v{number}_{name}(self, a_{name}, self.{name})")
    if hasattr(cls, "__attrs_post_init__"):
        checks.append("self.__attrs_post_init__()")
    lines = "\n ".join([*body, *checks, "pass"])
    exec(f"def __init__({', '.join(parameters)}):\n {lines}", names)  # noqa: S102 - as attrs
    made = names["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made.__annotations__ = {
        one.alias: annotation
        for one in fields.values()
        if one.init and (annotation := _parameter_type(one)) is not None
    }
    made.__annotations__["return"] = None
    return made


def _parameter_type(field):
    """Return the annotation of a parameter: that of what its converter takes, or None."""
    if field.converter is None:
        return field.type
    types = getattr(field.converter, "__annotations__", {})
    return next((types[name] for name in types if name != "return"), None)


class _Attributes:
    """The fields of a record class as those of attrs, made when they are first read."""

    def __get__(self, instance, cls):
        """Return them, and keep them in the class."""
        import attrs

        made = {name: one.for_attrs() for name, one in fields_dict(cls).items()}
        cls.__attrs_attrs__ = attrs.make_class(cls.__name__, made).__attrs_attrs__
        return cls.__attrs_attrs__


def _values(record):
    """Return the values that are compared."""
    fields = record.__fields__.values()
    values = ((one.eq, getattr(record, one.name)) for one in fields if one.eq)
    return tuple(value if key is True else key(value) for key, value in values)


def _eq(self, other):
    """Return True if `other` is of the same class and has equal fields."""
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self):
    """Return the hash of the class and the fields."""
    return hash((type(self), *_values(self)))


def _repr(self):
    """Return the class and its fields, as code that makes an equal record."""
    fields = self.__fields__.values()
    values = ((one, getattr(self, one.name)) for one in fields if one.repr)
    texts = (
        f"{one.name}={repr(value) if one.repr is True else one.repr(value)}"
        for one, value in values
    )
    return f"{type(self).__qualname__.rpartition('>.')[2]}({', '.join(texts)})"


def _refuse(self, name, value=None):
    """Refuse to change a frozen record."""
    from attrs.exceptions import FrozenInstanceError

    del self, name, value
    raise FrozenInstanceError


def _setstate(self, state):
    """Restore a copy of a frozen record."""
    for fields in filter(None, state if isinstance(state, tuple) else (state,)):
        for name, value in fields.items():
            object.__setattr__(self, name, value)


def _plain(value):
    if fields_dict(type(value)) or hasattr(type(value), "__attrs_attrs__"):
        return asdict(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value
