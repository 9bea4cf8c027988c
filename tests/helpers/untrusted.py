"""Traces in which every string is malicious markup."""

from functools import cache

import msgspec
from helpers.traces import lines, seal, serve_tiers
from msgspec.inspect import (
    AnyType,
    DictType,
    IntType,
    ListType,
    Metadata,
    StrType,
    StructType,
    UnionType,
    type_info,
)

from kvcore.errors import TraceError
from kvcore.trace.events import End, _struct_of
from kvcore_replay.check.trace import check_trace

EVIL = (
    "<script>alert(1)</script></script></style></title><img src=x onerror=alert(1)><!--\"'>`"
    "&amp;<b>{{x}}%{y}${z}\u202e\u2066\u2028\x00\x07\x1b[31m\r\n]]>" + "x" * 500
)


def poison(path):
    """Put `EVIL` into every string of a trace that may be any text.

    The types of its lines say which strings these are. Returns the values, and the places
    (event, field), that the check of a trace refuses to accept as `EVIL`.
    """
    poisoner = Poisoner()
    poisoner.run(path)
    return poisoner.refused


class Poisoner:
    """Puts `EVIL` into strings, one by one, and into fields that a line leaves out.

    Attributes:
        refused: values, and places (event, field), for which the trace is not valid.
    """

    def __init__(self):
        """Start without any renamed string."""
        self.refused, self.seen, self.names = set(), set(), {}

    def run(self, path):
        """Poison the trace at `path`, and write it again."""
        found = lines(path)
        self.each(found, self.renamed)
        for value in sorted(self.seen):
            self.names[value] = f"{EVIL}{len(self.names)}"
            if not valid(path, self.each(found, self.renamed)):
                del self.names[value]
                self.refused.add(value)
        found = self.each(found, self.renamed)
        places = {(name, field) for line in found for name, field, _ in fields(line)}
        for place in sorted(places):
            made = self.each(found, filled, {place})
            if valid(path, made):
                found = made
            else:
                self.refused.add(place)
        seal(path, found)

    def each(self, found, change, places=None):
        """Return lines with all fields changed, or only those at `places`."""
        made = []
        for line in found:
            values = {
                field: change(kind, line.get(field))
                for event, field, kind in fields(line)
                if places is None or (event, field) in places
            }
            made.append(
                line | {name: value for name, value in values.items() if value is not None}
            )
        return made

    def renamed(self, kind, value):
        """Return a value of type `kind` with all renamed strings replaced."""
        if isinstance(kind, Metadata):
            value = self.renamed(kind.type, value)
        elif isinstance(kind, UnionType):
            fits = {int: IntType, str: StrType, dict: StructType}.get(type(value), ())
            for each in kind.types:
                value = self.renamed(each, value) if isinstance(each, fits) else value
        elif isinstance(value, str) and is_free(kind):
            self.seen.add(value)
            value = self.names.get(value, value)
        elif isinstance(value, list) and isinstance(kind, ListType):
            value = [self.renamed(kind.item_type, each) for each in value]
        elif isinstance(value, dict) and isinstance(kind, DictType):
            value = {name: self.renamed(kind.value_type, each) for name, each in value.items()}
        elif isinstance(value, dict) and isinstance(kind, StructType):
            kinds = {field.encode_name: field.type for field in kind.fields}
            value = {name: self.renamed(kinds[name], each) for name, each in value.items()}
        return value


def fields(line):
    """Return event, name and type of each field that a line may have.

    END has none: it counts events and has a digest, and both must be right.
    """
    return fields_of(_struct_of(line))


@cache
def fields_of(struct):
    """Return event, name and type of each field of the struct of a line."""
    found = () if struct is End else msgspec.structs.fields(struct)
    return [(struct.__name__, each.encode_name, type_info(each.type)) for each in found]


def is_free(kind):
    """Return True if a string of a type may be any text."""
    return isinstance(kind, AnyType) or (isinstance(kind, StrType) and kind.pattern is None)


def filled(kind, value):
    """Return a value of type `kind` with a text wherever one fits; None if none fits."""
    if isinstance(kind, Metadata):
        return filled(kind.type, value)
    if isinstance(kind, UnionType):
        made = (filled(each, value) for each in kind.types)
        return next((each for each in made if each is not None), None)
    known = value if isinstance(value, dict) else {}
    if isinstance(kind, AnyType):
        value = known | {"name": EVIL, EVIL: [EVIL]}
    elif is_free(kind) and value is None:
        value = EVIL
    elif isinstance(kind, ListType) and isinstance(kind.item_type, StructType):
        value = value and [filled(kind.item_type, each) for each in value]
    elif isinstance(kind, DictType) and isinstance(kind.key_type, StrType):
        more = filled(kind.value_type, None)
        value = known | {EVIL: 0 if more is None else more}
    elif isinstance(kind, StructType):
        made = {
            field.encode_name: filled(field.type, known.get(field.encode_name))
            for field in kind.fields
        }
        more = {name: each for name, each in made.items() if each is not None}
        value = known | more if more else value
    return value


def valid(path, found):
    """Write lines as a trace, and return True if the trace is valid and complete."""
    try:
        return check_trace(seal(path, found)).complete
    except TraceError:
        return False


def record_rejection(path):
    """Record a run with tiers, and with a request that is rejected as too large."""
    first, *others = lines(serve_tiers(path))
    huge = {"id": "huge", "prompt": 400, "output": 1, "keys": [], "key_tokens": 4}
    why = {"request": "huge", "why": "too large"}
    more = [{"t": 0, "event": "REQUEST"} | huge, {"t": 0, "event": "REJECT"} | why]
    return seal(path, [first, *more, *others])


def recovered(path):
    """Write a run on tensors that only recovers a block from a tier."""
    header = lines(serve_tiers(path))[0]
    tier = header["tiers"][1]
    tier["recovered"] = 1
    line = {"t": 0, "event": "RECOVER", "tier": tier["tier"], "request": "old"}
    line |= {"keys": [1], "first": 0, "blocks": 1}
    return seal(path, [header | {"mode": "wall", "executor": "run"}, line])
