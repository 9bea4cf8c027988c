"""The events of a trace, one Struct each: the fields of a line, and their validation.

`kvcore.cache.Recorder` has a method for each of them; a test compares the two. Modules that
commands without a trace need do not import this one, since msgspec takes a while to import.
"""

from collections.abc import Callable
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    TypeAlias,
    Union,
    get_args,
)

import msgspec
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError

from kvcore.errors import shorten
from kvcore.untrusted import parse_json as check_json

# Of 64 bits, so that no reader of a trace needs to look whether its arithmetic holds a number.
_LARGEST = 2**63 - 1

Count: TypeAlias = Annotated[int, Meta(ge=0, le=_LARGEST, description="an integer from 0 on")]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=_LARGEST, description="an integer from 1 on")]
PoolSize: TypeAlias = Annotated[
    int, Meta(ge=1, le=2**31 - 1, description="an integer from 1 to 2**31 - 1")
]
Integer: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=_LARGEST, description="an integer")]
Number: TypeAlias = Annotated[
    Annotated[int, Meta(gt=0, le=_LARGEST)] | Annotated[float, Meta(gt=0)],
    Meta(description="a number above 0"),
]
Text: TypeAlias = Annotated[str, Meta(description="a string")]
Json: TypeAlias = Annotated[Any, Meta(description="any JSON")]
Object: TypeAlias = Annotated[dict[str, Any], Meta(description="an object")]
RequestId: TypeAlias = Annotated[
    Annotated[int, Meta(ge=-(2**63), le=_LARGEST)] | str,
    Meta(description="an integer or a string"),
]

# `$` also matches before a newline at the end, so the length is bounded as well.
Key: TypeAlias = (
    Annotated[int, Meta(ge=0, le=_LARGEST)]
    | Annotated[str, Meta(pattern="^[0-9a-fA-F]{32}$", max_length=32)]
)
BlockKeys: TypeAlias = Annotated[
    list[Key],
    Meta(description="a list of integers from 0 to 2**63 - 1 and strings of 32 hex digits"),
]
Runs: TypeAlias = Annotated[
    list[tuple[int, int]], Meta(description="a list of runs [first, count]")
]
"""Block ids as runs `[first, count]`; a negative count descends."""

SpanIds: TypeAlias = Annotated[list[Count], Meta(description="a list of integers from 0 on")]
Flag: TypeAlias = Annotated[bool, Meta(description="true or false")]
RetentionHints: TypeAlias = Annotated[
    list[tuple[Count, Count | None, Count, Count | None]],
    Meta(description="a list of [start, end or null, priority, ns or null]"),
]
HintValues: TypeAlias = Annotated[
    dict[Literal["share", "pin", "demote", "prefetch"], bool | Count],
    Meta(description="an object of any of share, pin, demote, prefetch; times in ns"),
]
SloTimes: TypeAlias = Annotated[
    dict[Literal["ttft", "tpot", "deadline"], Size],
    Meta(description="an object of any of ttft, tpot, deadline, in ns from 1 on"),
]
EventCounts: TypeAlias = Annotated[
    dict[str, Count], Meta(description="an object of event counts")
]
_SCOPE = Meta(description="one of cache, sequence")


class ViolationError(ValueError):
    """A line that cannot follow from the lines before it."""


def unfit(error: Exception) -> ViolationError:
    """Return the error of a line that names what the lines before it do not have."""
    return ViolationError(f"it does not fit the lines before it ({error!r})")


def methods_by_event(reader: object, *events: str) -> dict[str, Callable[[Any], None]]:
    """Return the methods of a reader by the events that they take: `_hit` takes HIT."""
    return {event: getattr(reader, f"_{event.lower()}") for event in events}


def violated(reason: str) -> NoReturn:
    """Raise ViolationError."""
    raise ViolationError(reason)


class PluginRecord(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A plugin of a run: its name, its options, and the digest of its file if it is in one."""

    name: str
    options: dict[str, Any]
    source: str | UnsetType = UNSET


class WorkloadRecord(Struct, forbid_unknown_fields=True):
    """The source of the requests of a run."""

    name: str
    digest: str
    options: dict[str, Any]


class TierRecord(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A tier of a run: its name in lines, its plugin, and its size.

    Attributes:
        tier: its name in lines, and in the field `from` of lines of other tiers.
        name, options, source: what a `PluginRecord` has of its plugin.
        slots, slot_bytes: number of blocks that it holds, and the bytes of one.
        devices: number of GPUs, whose links to the tier add up.
        recovered: number of blocks that an earlier run had left in it.
    """

    tier: str
    name: str
    options: dict[str, Any]
    slots: Size
    slot_bytes: Size
    devices: Size
    recovered: Count = 0
    source: str | UnsetType = UNSET


class ReplicaRecord(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Consecutive identical replicas of a cluster, and where they differ from HEADER.

    Attributes:
        count: number of these replicas.
        blocks, plugins, batching, latency, model, device, recompute, tiers: fields that differ.
    """

    count: Size
    blocks: PoolSize | UnsetType = UNSET
    plugins: dict[str, PluginRecord] | UnsetType = UNSET
    batching: dict[str, Any] | UnsetType = UNSET
    latency: dict[str, Any] | UnsetType = UNSET
    model: Any | UnsetType = UNSET
    device: Any | UnsetType = UNSET
    recompute: Any | UnsetType = UNSET
    tiers: list[TierRecord] | UnsetType = UNSET


class GroupRecord(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A cache group of a run: the fields of `kvcore.LayerGroup`."""

    kind: Literal["full", "window", "chunk", "state"]
    block_size: Size
    window: Size | None
    layers: Size
    block_bytes: Size | None = None


class GroupsRecord(Struct, forbid_unknown_fields=True):
    """The cache groups of a run, and which of their blocks get names."""

    prefix_cache_retention_interval: Count | None
    groups: Annotated[list[GroupRecord], Meta(min_length=1)]


class PoolsRecord(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The pools of windows and of states beside that of full attention.

    Attributes:
        window: tokens that a token attends to in layers with a window, itself included.
        window_slots: window slots, a block each; None: no layer has a window.
        state_slots: slots of states; None: no layer has a state.
    """

    window: Size | None = None
    window_slots: Size | None = None
    state_slots: Size | None = None


class _Placed(Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """The field of a line that belongs to a replica, or is about one."""

    replica: Count | UnsetType = UNSET


class Event(_Placed, tag_field="event", forbid_unknown_fields=True, gc=False):
    """A line of a trace, read and checked.

    Fields have their names in the file, except two that are Python keywords: `for` is
    `requester`, and `from` is `source`. An optional field that the line leaves out is
    `msgspec.UNSET`, which is false.

    Attributes:
        n: number of the line, from 0 on.
        t: time in ns, by the clock that HEADER names.
        event: the name of the event.
        replica: in the trace of a cluster, the number of the replica that wrote the line or
            that the line is about.
    """

    event: ClassVar[str]

    n: Count
    t: Count

    def as_dict(self) -> dict[str, Any]:
        """Return the line as a dict for JSON. O(its values)."""
        line: dict[str, Any] = msgspec.to_builtins(self)
        return {"n": line.pop("n"), "t": line.pop("t")} | line


class SequenceEvent(Event):
    """A line about an open sequence."""

    seq: Count


class RequestEvent(Event):
    """A line about a request and its sequence."""

    request: RequestId
    seq: Count


class TierEvent(Event):
    """A line about blocks of a prompt in a tier."""

    tier: Text
    request: RequestId


class Header(Event, tag="HEADER", kw_only=True):
    """The first line: the cache, the workload, and the server of its requests."""

    schema: Integer
    kvcore: Text
    mode: Literal["untimed", "model", "wall"]
    count: Literal["keys", "tokens"]
    block_size: Size
    key_tokens: Size
    blocks: PoolSize
    plugins: Annotated[
        dict[str, PluginRecord],
        Meta(
            description="an object of kinds, each with name and options, and source if it is "
            "in a file"
        ),
    ]
    workload: Annotated[
        WorkloadRecord | None,
        Meta(description="null or an object with name, digest and options"),
    ]
    seed: Annotated[Integer | None, Meta(description="an integer or null")]
    model: Json | UnsetType = UNSET
    device: Json | UnsetType = UNSET
    recompute: Json | UnsetType = UNSET
    tiers: (
        Annotated[
            list[TierRecord],
            Meta(
                description="a list of tiers, each with tier, name, options, slots, slot_bytes "
                "and devices"
            ),
        ]
        | UnsetType
    ) = UNSET
    cache_groups: (
        Annotated[
            GroupsRecord,
            Meta(
                description="an object with prefix_cache_retention_interval and groups, each "
                "with kind, block_size, window, layers and perhaps block_bytes"
            ),
        ]
        | UnsetType
    ) = UNSET
    layer_pools: (
        Annotated[
            PoolsRecord,
            Meta(description="an object of any of window, window_slots, state_slots"),
        ]
        | UnsetType
    ) = UNSET
    replicas: (
        Annotated[
            list[ReplicaRecord],
            Meta(
                description="a list of replicas that are alike: their count, and where they "
                "differ from the header"
            ),
        ]
        | UnsetType
    ) = UNSET
    routing: Object | UnsetType = UNSET
    executor: Text | UnsetType = UNSET
    engine: Text | UnsetType = UNSET
    batching: Object | UnsetType = UNSET
    latency: Object | UnsetType = UNSET
    rate_scale: Number | UnsetType = UNSET
    slo: SloTimes | UnsetType = UNSET
    anonymised: Flag | UnsetType = UNSET


class Request(Event, tag="REQUEST"):
    """A request arrived, or reached an untimed cache for the first time."""

    id: RequestId
    prompt: Count
    output: Count
    keys: BlockKeys
    key_tokens: Size
    salt: Text | UnsetType = UNSET
    tenant: Text | UnsetType = UNSET
    priority: Integer | UnsetType = UNSET
    slo: SloTimes | UnsetType = UNSET
    predicted: Count | UnsetType = UNSET
    retention: RetentionHints | UnsetType = UNSET
    hints: HintValues | UnsetType = UNSET
    session: Text | UnsetType = UNSET
    after: RequestId | UnsetType = UNSET
    think: Count | UnsetType = UNSET
    tool: Text | UnsetType = UNSET
    output_keys: BlockKeys | UnsetType = UNSET


class Route(Event, tag="ROUTE"):
    """A request is sent to a replica, where the router expects `tokens` prompt tokens to hit.

    With split phases, `leg` is the phase: `prefill` generates the first token, `decode` all
    others.
    """

    request: RequestId
    tokens: Count | UnsetType = UNSET
    leg: Literal["prefill", "decode"] | UnsetType = UNSET


class Transfer(Event, tag="TRANSFER"):
    """K/V of a request begins to move to the replica that decodes it.

    `blocks` blocks, `bytes` bytes in all, move from replica `source` to `target`, which can
    use them at `done` (ns).
    """

    request: RequestId
    source: Count
    target: Count
    blocks: Count
    bytes: Count
    done: Count


class Fail(Event, tag="FAIL"):
    """A replica failed, or stopped: its K/V and its requests are gone."""


class Return(Event, tag="RETURN"):
    """A replica is up again, or for the first time, with an empty cache."""


class Leave(Event, tag="LEAVE"):
    """A replica gets no more requests; it stops, by FAIL, when all of its own have ended."""


class Hit(RequestEvent, tag="HIT"):
    """A sequence opened, and the first blocks of its prompt were cached."""

    blocks: Size
    span: Count
    again: Flag | UnsetType = UNSET


class Miss(RequestEvent, tag="MISS"):
    """A sequence opened, and a block of its prompt was not cached."""

    block: Count
    why: Literal["absent", "partial", "expired", "no keys"]
    again: Flag | UnsetType = UNSET


class Prefetch(RequestEvent, tag="PREFETCH"):
    """A sequence opened to load blocks of a prompt before its request arrives."""

    keys: BlockKeys
    blocks: Count
    span: Count | UnsetType = UNSET


class Split(Event, tag="SPLIT"):
    """A span was cut in two; the lower half keeps the id."""

    span: Count
    upper: Count
    at: Size


class Alloc(SequenceEvent, tag="ALLOC"):
    """A sequence got private blocks: readers add those of `evicted` to `runs`."""

    first: Count
    runs: Runs
    evicted: Size | UnsetType = UNSET


class Commit(SequenceEvent, tag="COMMIT"):
    """Blocks of a sequence are computed, and can be shared."""

    span: Count
    first: Count
    blocks: Size
    how: Literal["new", "grown", "same", "shared"]
    generated: Flag | UnsetType = UNSET


class Keep(SequenceEvent, tag="KEEP"):
    """Spans got the private window and state slots of a sequence, which shares their blocks."""

    windows: SpanIds | UnsetType = UNSET
    state: Count | UnsetType = UNSET


class Evict(Event, tag="EVICT"):
    """Blocks left the cache, from the tail of a span (EVICT of scope `cache`)."""

    span: Count
    runs: Runs
    by: Text
    requester: RequestId = msgspec.field(name="for")
    age: Count
    hits: Count
    reason: Literal["capacity", "expired", "gone"]
    scope: Annotated[Literal["cache"], _SCOPE]


class Tombstone(Event, tag="TOMBSTONE"):
    """A span lost its windows or its state, and keeps its K/V of full attention."""

    span: Count
    pool: Literal["window", "state"]
    requester: RequestId = msgspec.field(name="for")


class Grow(Event, tag="GROW"):
    """Sequences got a block each, one after another: free ones, then those of victims.

    It stands for the ALLOC of each block and the EVICT before it, and takes as many numbers.
    """

    grown: Annotated[
        list[tuple[Count, Count, Count, Count]],
        Meta(min_length=1, description="a list of [t, seq, index in its block table, block]"),
    ]
    by: Text | UnsetType = UNSET
    victims: (
        Annotated[
            list[tuple[Count, Size, Count, Count]],
            Meta(description="a list of [span, blocks, hits, time of its last access]"),
        ]
        | UnsetType
    ) = UNSET
    requesters: (
        Annotated[list[RequestId], Meta(description="a list of integers and strings")]
        | UnsetType
    ) = msgspec.field(name="for", default=UNSET)


class Drop(SequenceEvent, tag="EVICT"):
    """A running sequence dropped blocks by its retention policy (EVICT of scope `sequence`)."""

    first: Count
    blocks: Size
    runs: Runs
    by: Text
    reason: Literal["retention"]
    scope: Annotated[Literal["sequence"], _SCOPE]


class GroupHit(RequestEvent, tag="HIT"):
    """A sequence opened, and all cache groups can go on after its first blocks."""

    blocks: Size
    again: Flag | UnsetType = UNSET


class GroupAlloc(SequenceEvent, tag="ALLOC"):
    """A sequence got blocks of a cache group."""

    group: Count
    first: Count
    runs: Runs


class GroupCommit(SequenceEvent, tag="COMMIT"):
    """Blocks of a sequence in a cache group got names, by which others can hit them."""

    group: Count
    first: Count
    blocks: Size
    how: Literal["new", "copy"]
    generated: Flag | UnsetType = UNSET


class GroupEvict(Event, tag="EVICT"):
    """Blocks of a cache group lost their names (EVICT of scope `cache`)."""

    group: Count
    runs: Runs
    by: Text
    requester: RequestId = msgspec.field(name="for")
    reason: Literal["capacity"]
    scope: Literal["cache"]


class GroupFree(SequenceEvent, tag="FREE"):
    """A sequence closed, or needs no block of a cache group before `first` any more."""

    runs: Runs
    reason: Literal["close", "passed"]
    group: Count | UnsetType = UNSET
    first: Count | UnsetType = UNSET


class Compact(SequenceEvent, tag="COMPACT"):
    """A sequence keeps some of the tokens that it held, in private blocks."""

    tokens: Size
    held: Size
    runs: Runs
    new: Runs | UnsetType = UNSET
    ahead: Count | UnsetType = UNSET


class Free(SequenceEvent, tag="FREE"):
    """Private blocks of a sequence are free again, deepest first; or window slots of them."""

    runs: Runs
    reason: Literal["close", "duplicate", "rollback", "passed"]
    first: Count | UnsetType = UNSET
    forgotten: Runs | UnsetType = UNSET
    compacted: Count | UnsetType = UNSET


class Fork(SequenceEvent, tag="FORK"):
    """A sequence got a sibling that shares all of its blocks."""

    child: Count


class Copy(SequenceEvent, tag="COPY"):
    """A sequence got a copy of a partial block that it shares, to write into it."""

    block: Count
    source: Count = msgspec.field(name="from")
    to: Count


class FirstToken(RequestEvent, tag="FIRST_TOKEN"):
    """A step has ended that generated the first token of a request."""


class Preempt(RequestEvent, tag="PREEMPT"):
    """A request no longer runs, and waits to run again."""

    how: Literal["pause", "recompute", "swap"]
    requester: RequestId | UnsetType = msgspec.field(name="for", default=UNSET)


class Resume(RequestEvent, tag="RESUME"):
    """A request that was paused runs again."""


class Recover(TierEvent, tag="RECOVER"):
    """Blocks of a path are in a tier from the start, left by an earlier run."""

    keys: BlockKeys
    first: Count
    blocks: Size


class Offload(TierEvent, tag="OFFLOAD"):
    """Blocks of a prompt are written into a tier, and can be used there from `done` (ns) on."""

    first: Count
    blocks: Size
    done: Count
    source: Text | UnsetType = msgspec.field(name="from", default=UNSET)
    parked: Flag | UnsetType = UNSET
    group: Count | UnsetType = UNSET


class LoadStart(TierEvent, tag="LOAD_START"):
    """A sequence waits for blocks from a tier, which are in the pool at `done` (ns)."""

    seq: Count
    first: Count
    blocks: Size
    done: Count
    group: Count | UnsetType = UNSET
    hit: Size | UnsetType = UNSET


class Load(TierEvent, tag="LOAD"):
    """Blocks from a tier are in the private blocks of a sequence."""

    seq: Count
    first: Count
    blocks: Count
    group: Count | UnsetType = UNSET
    hit: Size | UnsetType = UNSET


class Discard(TierEvent, tag="DROP"):
    """Blocks of a prompt are no longer in a tier."""

    first: Count
    blocks: Size
    reason: Literal["capacity", "expired", "moved", "parked", "corrupt", "gone", "failed"]
    group: Count | UnsetType = UNSET


class Keys(Event, tag="KEYS"):
    """A request has generated tokens that fill blocks, which are shared by these keys."""

    request: RequestId
    keys: BlockKeys


class Finish(RequestEvent, tag="FINISH"):
    """A request has all of its output."""

    output: Count
    output_keys: BlockKeys | UnsetType = UNSET


class Reject(Event, tag="REJECT"):
    """A request was rejected, and was never admitted."""

    request: RequestId
    why: Text


class End(Event, tag="END"):
    """The last line: without it the file is incomplete."""

    lines: Count
    events: EventCounts
    digest: Text


_TAGGED = (
    Header | Request | Route | Transfer | Fail | Return | Leave | Prefetch | Hit | Miss
    | Split | Alloc | Commit | Keep | Evict | Tombstone | Grow | Compact | Free | Fork | Copy
    | FirstToken | Preempt | Resume | Recover | Offload | LoadStart | Load | Discard | Keys
    | Finish | Reject | End
)  # fmt: skip

_GROUPED = GroupHit | GroupAlloc | GroupCommit | GroupEvict | GroupFree

GROUPED_EVENTS: dict[str, type[Event]] = {
    str(struct.__struct_config__.tag): struct for struct in get_args(_GROUPED)
}
"""The Structs of events that have other fields where HEADER has cache groups, by name."""

EVENTS: dict[str, type[Event]] = {
    str(struct.__struct_config__.tag): struct for struct in get_args(_TAGGED)
}
"""The Struct of each event by its name; that of EVICT of scope `sequence` is `Drop`."""

POOL_EVENTS = ("KEEP", "TOMBSTONE")
"""Events that only the trace of a cache with a pool for each kind of layer has."""

CLUSTER_EVENTS = ("ROUTE", "TRANSFER", "FAIL", "RETURN", "LEAVE")
"""Events that only the trace of a cluster has."""

STRUCTS: list[type[Event]] = [*EVENTS.values(), Drop, *GROUPED_EVENTS.values()]
"""All Structs of events."""

# Not as a property: readers ask for it several times a line.
for _struct in STRUCTS:
    _struct.event = str(_struct.__struct_config__.tag)

_decode_tagged = msgspec.json.Decoder(_TAGGED).decode
_decode_grouped: Callable[[bytes], Event] = msgspec.json.Decoder(
    Union[*({**EVENTS, **GROUPED_EVENTS}.values())]
).decode

# A union has one Struct a tag, so lines of the other scope are known by how the writer
# ends them; a line that has its scope elsewhere takes the slow way of `decode`.
_decode_drop = msgspec.json.Decoder(Drop).decode
_DROP_ENDS = b'"scope":"sequence"}'


def decode(raw: bytes, *, grouped: bool = False) -> Event:
    """Return the event of a line. Costs about 0.3 µs.

    `grouped` is whether HEADER has cache groups.

    Raises:
        ValueError: the line is not JSON, or breaks the schema; names the field, the expected
            values, and the value.
    """
    try:
        if grouped:
            return _decode_grouped(raw)
        return (_decode_drop if raw.endswith(_DROP_ENDS) else _decode_tagged)(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec names a path and a type; the message is to name the field and its values.
        value = parse_json(raw)
        reason = find_fault(value, grouped=grouped)
        if reason is not None:
            raise ValueError(reason) from error
        return msgspec.convert(value, _struct_of(value, grouped=grouped))


def parse_json(raw: bytes) -> Any:
    """Return the value of a line.

    Raises:
        ValueError: the line is not JSON; names the column.
    """
    try:
        check_json(raw)
    except orjson.JSONDecodeError as error:
        msg = f"not JSON: {error.msg}, at column {error.colno}"
        raise ValueError(msg) from error
    # Parsed again, since orjson makes floats of integers beyond 64 bits.
    return msgspec.json.decode(raw)


def find_fault(line: Any, *, grouped: bool = False) -> str | None:
    """Return the fault of a line, parsed from JSON; None if it is valid.

    `grouped` is that of `decode`.
    """
    if type(line) is not dict:
        return f"a line must be a JSON object, not {_shown(line)}"
    name = line.get("event")
    if type(name) is not str or name not in EVENTS:
        return f"unknown event {_shown(name)}; there are: {', '.join(EVENTS)}"
    fields = describe_fields(_struct_of(line, grouped=grouped))
    required = [field.name for field in fields.values() if field.required]
    # Required fields in the order of the schema, then all fields in the order of the line.
    for field in dict.fromkeys([*required, *line]):
        if field not in line:
            return f"{name} has no field {field!r}"
        if field not in fields:
            return f"{name} has an unknown field {field!r}"
        if reason := fields[field].fault(line[field]):
            return f"{name} field {field!r} {reason}"
    return None


class Field(NamedTuple):
    """A field of an event: its name in JSON, and its values, in words and as a type."""

    name: str
    holds: str
    type: Any
    required: bool

    def fault(self, value: Any) -> str | None:
        """Return why the field cannot hold `value`; None if it can."""
        try:
            msgspec.convert(value, self.type)
        except ValidationError:
            too_large = type(value) is int and not -(2**63) <= value <= _LARGEST
            holds = f"{self.holds}, of 64 bits" if too_large else self.holds
            return f"must be {holds}, not {_shown(value)}"
        return None


@cache
def describe_fields(event: type[Event]) -> dict[str, Field]:
    """Return the fields of an event by their names in JSON: `n`, `t`, `event`, then others."""
    fields = [Field("event", "a string", str, required=True)]
    for field in msgspec.structs.fields(event):
        optional = field.default is UNSET
        # An optional field is the union of its type and UNSET's.
        kind = get_args(field.type)[0] if optional else field.type
        parts = get_args(kind)  # of Literal, its words
        holds = [str(part.description) for part in parts if isinstance(part, Meta)]
        holds = holds or [f"one of {', '.join(parts)}" if len(parts) > 1 else parts[0]]
        fields.append(Field(field.encode_name, holds[0], kind, not optional))
    fields[:3] = fields[1], fields[2], fields[0]
    return {field.name: field for field in fields}


def _struct_of(line: dict[str, Any], *, grouped: bool = False) -> type[Event]:
    name = line["event"]
    if grouped and name in GROUPED_EVENTS:
        return GROUPED_EVENTS[name]
    return Drop if name == "EVICT" and line.get("scope") == "sequence" else EVENTS[name]


def _shown(value: object) -> str:
    return shorten(repr(value))
