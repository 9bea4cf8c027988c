"""Functions that serve requests by simulation, and strategies for random servers.

Steps take nanoseconds here, and a block is 4 tokens.
"""

from functools import partial
from io import BytesIO
from random import Random
from typing import Any, ClassVar

import attrs
import hypothesis.strategies as st
import orjson
from helpers.policies import POLICIES, build
from helpers.schedulers import scheduler_of

import kvcore
from kvcore import SLO, KVCache, LatencyModel, Request, Trace
from kvcore.request import NO_HINTS, Hints
from kvcore.serving import Batching, Rules, simulate
from kvcore.serving.rules import CHOICES
from kvcore.trace.events import decode
from kvcore_plugins.eviction import LRU
from kvcore_plugins.traces.expansion import Expansion

BLOCK = 4
STEP = 10
"""Nanoseconds that `Even` takes for a step."""


@attrs.define(slots=False, eq=False)
class Slow(LatencyModel):
    """A latency model of 100 ns for each prompt token and for each step that decodes."""

    name = "slow"

    def pieces(self, work):
        """Return a single constant piece."""
        return [(100_000 * (work.prefill + (work.decode > 0)), 0)]


@attrs.define(slots=False, eq=False)
class Even(LatencyModel):
    """A latency model in which every step takes 10 ns."""

    name: ClassVar[str] = "even"

    def pieces(self, work):
        """Return one flat piece."""
        del work
        return [(STEP * 1000, 0)]


@attrs.define(slots=False, eq=False)
class Bent(LatencyModel):
    """A latency model of three pieces, each the longest for some steps.

    A step takes a few ns, never a whole number.
    """

    name: ClassVar[str] = "bent"

    reach: tuple[int | None, ...] = (None,)

    @property
    def windows(self):
        """The attention windows of the model."""
        return self.reach

    def pieces(self, work):
        """Return the three pieces, with a slope for each window."""
        cost = 300 * work.prefill + sum(work.attended_pairs) + 50 * work.decode
        lines = ((1_000 + cost, 7), (4_000 + 100 * work.prefill, 19), (9_000, 3))
        return [(a, *(b for _ in work.context)) for a, b in lines]


@attrs.define(slots=False, eq=False)
class Single(Bent):
    """The latencies of `Bent`, but computed step by step, without jumps."""

    name: ClassVar[str] = "single"
    jumps = False


@attrs.define(slots=False, eq=False)
class Tally(LatencyModel):
    """A latency model whose times show the numbers of prompt and of output tokens.

    A generated token takes a microsecond, and a prompt token a picosecond.
    """

    name: ClassVar[str] = "tally"
    TOKEN: ClassVar[int] = 10**6

    def pieces(self, work):
        """Return one flat piece."""
        return [(work.prefill + self.TOKEN * work.decode, 0)]


SLOT = 64
"""Bytes of a block."""

RATES = ("640GB", "64GB", "6400GB", "1GB")
"""Bandwidths at which a block takes 0.1 ns, 1 ns, 0.01 ns and 64 ns."""

TIER_EVICTIONS = [name for name in POLICIES if "," not in name]
"""Policies for the text of a tier, where a policy can have only one option."""

EVICTIONS = (*POLICIES, "lfu:half_life=1e-6", "ttl:ttl=3e-7")


def ask(name, at=0, prompt=BLOCK, output=1, **fields):
    """Return a request with a prompt of its own, which arrives at `at` ns."""
    fields = {"key_tokens": BLOCK} | fields
    return Request(id=name, arrival=at, prompt_tokens=prompt, output_tokens=output, **fields)


@attrs.frozen
class Run:
    """The result and the trace of served requests.

    Attributes:
        result: the result of the simulation.
        trace: the bytes of the trace; None without one.
        rows: a dict for each finished request, by id: its times (ns) and numbers.
    """

    result: Any
    trace: bytes | None
    rows: dict[Any, dict[str, int]]

    @property
    def lines(self):
        """The lines of the trace between HEADER and END, expanded, as dicts."""
        expansion, lines = Expansion(), []
        grouped = b'"cache_groups"' in self.trace.partition(b"\n")[0]
        for line in self.trace.splitlines():
            written = orjson.loads(line)
            expanded = expansion.expand(decode(line, grouped=grouped))
            if written["event"] == "GROW" or "evicted" in written:
                lines += orjson.loads(orjson.dumps([event.as_dict() for event in expanded]))
            else:
                lines.append(written)
        return lines[1:-1]

    @property
    def rejected(self):
        """The reasons of the rejected requests, by id."""
        log = self.result.log
        return {log.ids[row]: why for row, why in log.reasons.items()}

    def of(self, event):
        """Return (time, request) for each line of `event`."""
        return [(line["t"], line["request"]) for line in self.lines if line["event"] == event]

    def timeline(self, *events):
        """Return "time EVENT request" for each line of `events`, or for all lines."""
        both = {"request", "seq"}
        names = {line["seq"]: line["request"] for line in self.lines if both <= line.keys()}
        lines = []
        for line in self.lines:
            name = line.get("id", line.get("request", names.get(line.get("seq"))))
            if not events or line["event"] in events:
                lines.append(f"{line['t']} {line['event']} {name}")
        return lines

    @property
    def decisions(self):
        """All decisions and statistics that are known without a trace."""
        log, cache = self.result.log, self.result.cache
        stats = attrs.asdict(cache.stats), cache.residency_by_tier()
        tiers = cache.tiers.as_dict() if cache.tiers else []
        summary = self.result.summary() | {"wall_s": 0}
        itl = log.itl.percentiles(1)
        return log.columns(), log.reasons, log.busy_ps, itl, stats, tiers, summary

    def sum(self, column):
        """Return the sum of a column over all finished requests."""
        return sum(row[column] for row in self.rows.values())


def batching_of(**options):
    """Return a `Batching` of these limits, and of rules of a class with these choices."""
    choices = {name: options.pop(name) for name in CHOICES if name in options}
    return Batching(**options | {"rules": options.get("rules", Rules)(**choices)})


def serve(
    requests,
    *,
    blocks=1000,
    block_size=BLOCK,
    key_tokens=None,
    eviction=None,
    retention=None,
    scheduler=None,
    latency=None,
    trace=True,
    jumps=True,
    rate_scale=1.0,
    tiers=(),
    slot_bytes=SLOT,
    drafter=None,
    **batching,
):
    """Serve `requests`, and check that no block is lost; by default FCFS, LRU and `Even`.

    `tiers` are texts; a block has 64 bytes unless `slot_bytes` is given.
    """
    out = BytesIO()
    writer = Trace(out, mode="model") if trace else None
    cache = KVCache(
        blocks,
        block_size,
        eviction=LRU() if eviction is None else eviction,
        retention=retention,
        accounting="tokens",
        key_tokens=block_size if key_tokens is None else key_tokens,
        trace=writer,
    )
    if tiers:
        kvcore.Tiers(cache, tiers, slot_bytes)
    result = simulate(
        requests,
        cache=cache,
        scheduler=scheduler_of("fcfs") if scheduler is None else scheduler,
        latency=Even() if latency is None else latency,
        batching=batching_of(**{"watermark": 0} | batching),
        rate_scale=rate_scale,
        jumps=jumps,
        drafter=drafter,
    )
    if writer is not None:
        writer.close()
    cache.check_integrity()
    assert not cache.sequences
    assert cache.pool.free_blocks + cache.tree.cached_blocks == blocks
    for level in cache.tiers.levels if tiers else ():
        assert level.pool.free_blocks + level.tree.cached_blocks == level.pool.blocks
    log = result.log
    columns = log.columns()
    rows = {
        log.ids[index]: dict(zip(columns, row, strict=True))
        for index, row in enumerate(zip(*columns.values(), strict=True))
        if index not in log.reasons
    }
    assert len(rows) + len(log.reasons) == len(log.ids)
    return Run(result, out.getvalue() if trace else None, rows)


@attrs.frozen
class Server:
    """The options of a server and its requests."""

    requests: list[Request]
    eviction: str
    windows: tuple[int | None, ...]
    options: dict[str, Any]
    tiers: tuple[str, ...] = ()

    def run(self, scheduler, **options):
        """Serve the requests with a new scheduler of this name, and new other parts."""
        options = {"latency": Bent(reach=self.windows)} | options
        return serve(
            self.requests,
            scheduler=scheduler_of(scheduler),
            eviction=build(self.eviction),
            tiers=self.tiers,
            **self.options,
            **options,
        )


def random_server(draw):
    """Make a server by `draw(low, high)`, with a small pool for the requests at one time."""

    def one_of(*values):
        return values[draw(0, len(values) - 1)]

    size = one_of(4, 1, 2, 16)
    key_tokens = size * one_of(1, 1, 2, 4)
    requests = _requests(draw, draw(0, 24), key_tokens, one_of(0, 0, 2))
    needs = [-(-(r.prompt_tokens + max(r.output_tokens - 1, 0)) // size) for r in requests]
    blocks = max(needs, default=1) * one_of(10, 15, 20, 40, 9, 1000) // 10
    options = {
        "blocks": max(blocks, 1),
        "block_size": size,
        "key_tokens": key_tokens,
        "max_seqs": one_of(4, 1, 2, 8),
        "max_tokens": one_of(256, 8, 16, 64),
        "chunked": draw(0, 2) > 0,
        "steps": one_of("mixed", "mixed", "prefill-first"),
        "watermark": one_of(0, 0.01, 0.2),
    }
    eviction = EVICTIONS[draw(0, len(EVICTIONS) - 1)]
    return Server(
        requests, eviction, one_of((None,), (None,), (None, 8), (5, None, 20)), options
    )


RULES = {
    "unchunked": ("wait", "alone"),
    "max_chunk": (None, 1, 5, 40),
    "reserve": ("chunk", "prompt", "first-chunk"),
    "commit": ("scheduled", "computed"),
    "generated": ("cached", "keyed"),
    "admit_after_preemption": (False, True),
    "ties": ("first", "last"),
    "lag": (1, 0),
    "null_block": (True, False),
    "max_model_len": (None, None, 20, 60),
    "new_token_ratio": (0.7, None, 0.3),
    "preempts": ("shortest", "last"),
}
"""Values of each rule by which engines differ."""


def random_ruled_server(draw):
    """Make a server as `random_server` does, with random `RULES`: all of them, or one."""
    server = random_server(draw)
    names, alone = list(RULES), draw(0, len(RULES))
    rules = {
        name: values[draw(0, len(values) - 1)]
        for name, values in RULES.items()
        if alone == len(names) or name == names[alone]
    }
    if not server.options["chunked"]:
        rules.pop("max_chunk", None)
    return attrs.evolve(server, options=server.options | rules)


def _requests(draw, count, key_tokens, followers):
    """Make requests; about `followers` in 5 of them follow an earlier one."""
    requests: list[Request] = []
    longest, spread = (8, 30, 90)[draw(0, 2)], (3, 30, 300)[draw(0, 2)]
    now, hinted = 0, draw(0, 2) == 2
    for index in range(count):
        now += draw(0, spread) * draw(0, 1)
        prompt, output = (
            draw(min(draw(0, 20), 1), longest),
            draw(0, 40) * draw(0, 1) + draw(0, 2),
        )
        follows = index and draw(0, 4) < followers
        prompt_keys, output_keys = _keys(draw, index, prompt, output, key_tokens)
        requests.append(
            ask(
                index,
                now,
                prompt,
                output,
                keys=prompt_keys,
                output_keys=output_keys,
                key_tokens=key_tokens,
                priority=draw(0, 2),
                predicted_output_tokens=draw(1, 40) if draw(0, 1) else None,
                slo=SLO(deadline_ns=draw(1, 900)) if draw(0, 1) else None,
                tenant=f"tenant {draw(0, 2)}",
                session="session" if followers else None,
                after=draw(0, index - 1) if follows else None,
                think_time=draw(0, 300) if follows else 0,
                hints=_hints(draw, prompt) if hinted else NO_HINTS,
            )
        )
    return requests


def _hints(draw, prompt):
    """Return hints: about half of them pin; the others share a part of the prompt or demote."""
    if draw(0, 1):
        return Hints(pin=draw(1, 900))
    share = True if draw(0, 1) else draw(0, prompt)
    return Hints(share=share, demote=bool(draw(0, 1)))


def _keys(draw, number, prompt, output, key_tokens):
    """Return keys of a prompt, whose start is shared with others, and of its output."""
    generated = draw(0, 3) == 3
    full = prompt // key_tokens
    count = full if generated else -(-prompt // key_tokens)
    own, shared, root = (number + 1) * 10_000, draw(0, 2) * draw(0, 8), draw(0, 1) * 1000
    keys = [root + index if index < shared else own + index for index in range(count)]
    end = (prompt + max(output - 1, 0)) // key_tokens if generated else full
    return keys, [own + index for index in range(full, end)]


def random_tiers(draw):
    """Make the texts of one or two tiers that are small and slow for random servers."""

    def one_of(*values):
        return values[draw(0, len(values) - 1)]

    return tuple(
        f"{one_of('host', 'disk')}:memory={SLOT * one_of(40, 1, 3, 10, 1000)}"
        f",eviction={one_of('lru', one_of(*TIER_EVICTIONS))}"
        f",write={one_of('evict', 'through', 1, 2)},keep={one_of('inclusive', 'exclusive')}"
        f",load={one_of('cost', 'cost', 'always', 'never')}"
        f",read_bandwidth={one_of(*RATES)},write_bandwidth={one_of(*RATES)}"
        f",latency={one_of(0, 1e-9, 3e-8)},max_wait={one_of(1, 1, 2e-8, 0)}"
        for _ in range(one_of(1, 2))
    )


def early(request, prefetch):
    """Return `request` with `prefetch` as its hint for a prefetch."""
    return attrs.evolve(request, hints=attrs.evolve(request.hints, prefetch=prefetch))


def random_tiered_server(draw):
    """Make a server as `random_server` does, with tiers and longer shared prefixes."""
    server = random_server(draw)
    requests = []
    for request in server.requests:
        branch, shared = draw(1, 2), draw(0, 40)
        keys = [
            1000 * branch + index if index < shared else (request.id + 1) * 10_000 + index
            for index in range(len(request.keys))
        ]
        prefetch = draw(1, 300) if draw(0, 2) == 2 else None
        requests.append(early(attrs.evolve(request, keys=keys), prefetch))
    return attrs.evolve(server, requests=requests, tiers=random_tiers(draw))


def random_talks(draw):
    """Make a server with tiers for conversations, most of which announce their next turn."""
    server = random_tiered_server(draw)
    size, unit = server.options["block_size"], server.options["key_tokens"]
    requests: list[Request] = []
    for user in range(draw(2, 5)):
        length, last = unit * draw(1, 6), None
        for _ in range(draw(1, 5)):
            length += unit * draw(0, 2)
            prefetch = draw(1, 2000) if draw(0, 3) else None
            share = draw(0, length) if draw(0, 4) == 0 else None
            requests.append(
                ask(
                    len(requests),
                    0,
                    length + draw(0, 1),
                    draw(0, 6),
                    keys=[1000 * user + index for index in range(length // unit)],
                    key_tokens=unit,
                    session=f"user {user}",
                    after=last,
                    think_time=draw(0, 3000),
                    hints=Hints(prefetch=prefetch, share=share, demote=draw(0, 5) == 0),
                )
            )
            last = requests[-1].id
    longest = max(-(-(request.prompt_tokens + 6) // size) for request in requests)
    options = server.options | {"blocks": longest * draw(10, 25) // 10}
    return attrs.evolve(server, requests=requests, options=options)


@st.composite
def _drawn(draw, make):
    return make(lambda low, high: draw(st.integers(low, high)))


def servers(make=random_server):
    """Return a strategy for servers.

    Half of them are drawn by hypothesis, which can shrink them; half at random, for breadth.
    """
    seeds = st.integers(0, 2**32)
    return _drawn(make) | seeds.map(lambda seed: make(Random(seed).randint))


tiered_servers = partial(servers, random_tiered_server)
ruled_servers = partial(servers, random_ruled_server)
talks = partial(servers, random_talks)
"""Functions like `servers`, for servers with tiers, with random rules, and of conversations."""
