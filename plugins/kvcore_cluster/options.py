"""The options of a cluster: several servers under one clock that share the requests."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Annotated, Any, Literal, TypeAlias

from kvcore.config.options import (
    Option,
    SimulateOptions,
    check_names,
    read_option,
)
from kvcore.config.values import (
    PluginChoice,
    as_whole,
    read_text,
    refuse,
    tiers_text,
)
from kvcore.plugins.options import Spec, as_text
from kvcore.serving.rules import CHOICES
from kvcore.serving.scheduler import LIMITS
from kvcore.units import check_whole

CLUSTER = "Cluster"
"""The heading of help pages for these options."""

OF_REPLICAS = (
    *("model", "device", "tensor_parallel", "codec", "weights_dtype", "blocks", "memory"),
    *("eviction", "prefix", "retention", "checkpoint", "tier", "latency", "scheduler"),
    *("drafter", "like"),
    *LIMITS,
)
"""Options that servers of a cluster may have of their own."""


def as_failures(value: object) -> tuple[str, ...]:
    """Return the texts of failures, or of the only one; None is no failure."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        refuse("failures such as 'replica=3,at=600,for=120'", value)
    return tuple(map(read_text, value))


def as_replicas(value: object) -> Any:
    """Return the number of servers, or the options of each group of identical ones."""
    if isinstance(value, Integral | str):
        return check_whole(as_whole(value), 1)
    if isinstance(value, Mapping):
        value = (value,)
    if not isinstance(value, list | tuple) or not value:
        refuse("a number of servers, or a list of tables of their options", value)
    return tuple(_replica(table) for table in value)


def _replica(table: object) -> Mapping[str, Any]:
    """Parse the options of a group of identical replicas."""
    if not isinstance(table, Mapping):
        refuse("a table of options", table)
    options = {str(name).replace("-", "_"): value for name, value in table.items()}
    former = {name: options.pop(name) for name in CHOICES if name in options}
    check_names(options, ["count", *OF_REPLICAS])
    count = check_whole(as_whole(options.pop("count", 1)), 1)
    read = {name: read_option(name, options[name]) for name in options}
    return {"count": count, **read, **former}


def replicas_text(replicas: int | Sequence[Mapping[str, Any]]) -> int | str:
    """Return replicas as a table has them: `8`, or `2 x device=h200 + 6 x max_seqs=64`."""
    if isinstance(replicas, int):
        return replicas
    groups = []
    for table in replicas:
        own = ",".join(f"{k}={_shown(v)}" for k, v in table.items() if k != "count")
        groups.append(f"{table['count']} x {own}" if own else str(table["count"]))
    return " + ".join(groups)


def _shown(value: object) -> str:
    return tiers_text(value) if isinstance(value, tuple) else as_text(value)


FailureChoices: TypeAlias = Annotated[Sequence[str] | str, as_failures]
"""Failures of replicas: texts such as `replica=3,at=600,for=120`, in seconds."""

ReplicaChoices: TypeAlias = Annotated[int | Sequence[Mapping[str, Any]], as_replicas]
"""Servers of a cluster: how many, or tables of their options, with a `count` each."""


FirstOutput: TypeAlias = Literal["prefill", "transfer", "decode"]
"""Where the first token comes from that a client gets: from the prefill replica, at the end of
its step; from there with the K/V (SGLang); or from a step of the decode replica (vLLM)."""


class ClusterOptions(SimulateOptions, total=False):
    """Options of several servers that share requests: the keywords of `simulate_cluster`."""

    replicas: Annotated[
        ReplicaChoices,
        Option(
            1,
            "Number of servers that share the requests.",
            CLUSTER,
            what_if="Number of servers that share the requests, each like the recorded one.",
            metavar="INTEGER",
        ),
    ]
    router: Annotated[
        PluginChoice,
        Option(
            Spec("round-robin"),
            "Router: which of several servers gets a request.",
            CLUSTER,
            what_if=True,
        ),
    ]
    view: Annotated[
        str,
        Option(
            "index",
            "Source of the router's knowledge of caches: its own index of the prompts that it "
            "sent to each server (index), the KV events of the servers (events:delay=50ms), or "
            "their exact contents (exact).",
            CLUSTER,
            what_if=True,
            metavar="VIEW",
        ),
    ]
    fail: Annotated[
        FailureChoices,
        Option(
            (),
            "Server that fails, such as replica=3,at=600,for=120, in seconds.",
            CLUSTER,
            what_if="Replica that fails, such as replica=3,at=600,for=120, or `none`.",
            metavar="FAILURE",
            multiple=True,
        ),
    ]
    autoscale: Annotated[
        str | None,
        Option(
            None,
            "Planner that starts and stops servers, such as throughput:interval=60,least=2, or "
            "load; --replicas is the largest number of servers.",
            CLUSTER,
            what_if="Planner that starts and stops servers, or `none`.",
            metavar="PLANNER",
            optional=True,
        ),
    ]
    disaggregate: Annotated[
        str | None,
        Option(
            None,
            "Servers that prefill, and others that decode, such as prefill=4,decode=2; "
            "bandwidth=50GB/s, latency=10us and overlap=layers may follow, after commas.",
            CLUSTER,
            what_if="Servers that prefill and that decode, or `none`.",
            metavar="POOLS",
            optional=True,
        ),
    ]
    first_output: Annotated[
        FirstOutput | None,
        Option(
            None,
            "Where the first token comes from with --disaggregate: from the replica that "
            "prefills (prefill), from there with the K/V as in SGLang (transfer), or from the "
            "one that decodes as in vLLM (decode).  [default: prefill]",
            CLUSTER,
        ),
    ]
