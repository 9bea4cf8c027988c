"""Split phases: prefill and decode on replicas of their own, between which K/V moves.

A request is prefilled by a replica of one pool, which gives its first token and keeps its
blocks, and goes on at a replica of another:

    prefill   ARRIVAL -> route -> chunk 1, chunk 2, ... first token | holds its blocks |
    link                                 [ K/V of 1 ][ K/V of 2 ]---------------------
    decode              route -> blocks allocated, LOADING .................. | MOVED, decode

Full blocks that the decode replica lacks are moved, and the last block. The K/V is complete
when the last transfer has ended; then the prefill replica frees its blocks, which stay cached
there. A request that is preempted while it decodes is computed again by its decode replica, as
in vLLM's decode instances, so no decode ever waits for a prefill.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from numbers import Integral
from typing import Any, ClassVar, Literal, get_args

import attrs

from kvcore.cache import KVCache
from kvcore.errors import InputError
from kvcore.plugins.options import nearest
from kvcore.request import SLO, Request
from kvcore.serving.job import DECODE, Job
from kvcore.serving.router import Replica, Router
from kvcore.units import (
    NS_PER_S,
    PS_PER_NS,
    parse_rate,
    parse_seconds,
    parse_whole,
    seconds_text,
)
from kvcore_cluster.cluster import MOVED, Cluster
from kvcore_cluster.dispatcher import Dispatcher, PrefixView
from kvcore_cluster.options import FirstOutput
from kvcore_cluster.planner import Autoscaler, Phase, Planner
from kvcore_cluster.replica import ReplicaLoop, Server
from kvcore_cluster.result import Phases, Transfers
from kvcore_tiers.link import Link

POOLS = ("prefill", "decode", "mixed")
"""The pools of a cluster with split phases, in the order of their replicas' numbers."""

FULL = 0.9
"""Share of blocks in use from which on a replica counts as full, and another is borrowed."""


def _one_of(*values: str) -> Callable[[str], str]:
    """Return a reader of a text that is one of `values`."""

    def read(text: str) -> str:
        if text not in values:
            msg = f"{text!r}: give {', '.join(values[:-1])} or {values[-1]}"
            raise InputError(msg)
        return text

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    **{pool: lambda text: parse_whole(text, 0) for pool in POOLS},
    "bandwidth": parse_rate,
    "latency": parse_seconds,
    "overlap": _one_of("layers", "whole"),
    "router": str,
    "queue": lambda text: parse_whole(text, 1),
    "first_output": _one_of(*get_args(FirstOutput)),
}


def _pieces(text: str) -> list[str]:
    """Return the fields of the text of a split, with the options of a router at its name."""
    pieces: list[str] = []
    names = Counter(piece.partition("=")[0] for piece in text.split(","))
    for piece in text.split(","):
        name, last = piece.partition("=")[0], pieces[-1] if pieces else ""
        further = name not in _READERS or names[name] > 1
        if further and last.startswith("router=") and ":" in last:
            pieces[-1] += f",{piece}"
            names[name] -= 1
        else:
            pieces.append(piece)
    return pieces


@attrs.frozen
class Split:
    """The pools of split phases, and the link between them.

    Attributes:
        prefill, decode, mixed: replicas of each pool; they are numbered in this order.
        bandwidth: bytes a second of the link out of each prefill replica, and of the link
            into each decode replica. A transfer holds both.
        latency: ns from the end of a transfer until its data can be used.
        overlap: `layers`: K/V moves layer by layer while the rest is computed; `whole`: all
            K/V moves after the prefill.
        router: the router of the decode pool, as text.
        queue: prompt tokens that wait at every prefill replica from which on a replica of
            the mixed pool is borrowed.
        first_output: where the first token comes from.
    """

    prefill: int
    decode: int
    mixed: int = 0
    bandwidth: int = 50_000_000_000
    latency: int = 10_000
    overlap: Literal["layers", "whole"] = "layers"
    router: str = "least-requests"
    queue: int = 8192
    first_output: FirstOutput = "prefill"

    def __attrs_post_init__(self) -> None:
        """Check the numbers."""
        numbers = (*attrs.astuple(self)[:5], self.queue)
        if not all(isinstance(number, Integral) for number in numbers):
            msg = f"{self!r}: give whole numbers of replicas, bytes a second, ns and tokens"
            raise InputError(msg)
        if self.prefill < 1 or self.decode < 1 or self.bandwidth < 1:
            msg = f"{self}: give 1 or more replicas of prefill and of decode, and a bandwidth"
            raise InputError(msg)
        if self.mixed < 0 or self.latency < 0 or self.queue < 1:
            msg = f"{self}: give mixed and latency of 0 or more, and a queue of 1 or more"
            raise InputError(msg)
        for name in "overlap", "first_output":
            _READERS[name](getattr(self, name))

    @classmethod
    def parse(cls, text: str) -> Split:
        """Read text such as `prefill=4,decode=2,bandwidth=50GB/s,latency=10us`.

        The options of a router follow it, as in `router=llm-d:queue=1,kv=2,latency=10us`: what
        is no name of a field, or is given once more elsewhere, is an option of the router.

        Raises:
            InputError: another name, a value that cannot be, or a pool without replicas.
        """
        pieces = [piece.partition("=") for piece in _pieces(text)]
        fields: dict[str, Any] = {}
        for name, equals, value in pieces:
            if not equals or name not in _READERS or name in fields:
                known = ", ".join(_READERS)
                piece = f"{name}{equals}{value}"
                why = " is there twice" if name in fields else nearest(name, _READERS)
                msg = f"{piece!r}{why}: write one of {known}, = and a value"
                raise InputError(msg)
            try:
                fields[name] = _READERS[name](value)
            except InputError as error:
                msg = f"{name}={value}: {error}"
                raise InputError(msg) from error
        if not {"prefill", "decode"} <= fields.keys():
            msg = f"{text!r}: give how many replicas do what, such as prefill=4,decode=2"
            raise InputError(msg)
        return cls(**fields)

    @property
    def replicas(self) -> int:
        """Replicas of all pools."""
        return self.prefill + self.decode + self.mixed

    def pool(self, replica: int) -> str:
        """Return the pool of the replica of that number."""
        if replica < self.prefill:
            return "prefill"
        return "decode" if replica < self.prefill + self.decode else "mixed"

    def __str__(self) -> str:
        """Return the split as `parse` reads it."""
        fields = attrs.asdict(self) | {
            "bandwidth": f"{self.bandwidth}B",
            "latency": f"{seconds_text(self.latency)}s",
        }
        if self.first_output == "prefill":
            del fields["first_output"]  # as traces had it before there was a choice
        return ",".join(f"{name}={value}" for name, value in fields.items())


REJECTED = "rejected"
"""The value of `Move.refused` if the decode replica itself has rejected the request."""


class Borrow(Router):
    """Picks the mixed replica with the fewest prompt tokens waiting, then the emptiest.

    That is how Splitwise borrows machines (Patel et al., ISCA 2024).
    """

    name: ClassVar[str] = "borrow"
    uses_hits: ClassVar[bool] = False

    def cost(self, request: Request, replica: Replica) -> float:
        """Return the prompt tokens that wait, and the share of the memory in use below that."""
        return replica.waiting_tokens + min(replica.usage, 0.999)


@attrs.define(eq=False)
class Move:
    """A request between its two replicas, and the transfers of its K/V.

    Times are nanoseconds, -1 where there is none yet.

    Attributes:
        request, arrival: the request, and when it arrived.
        serial: order in which requests were routed.
        source: the replica that prefills it.
        job: its job at `source`, once that has begun.
        held: whether `job` has its first token, and keeps its blocks.
        target: the replica that decodes it, once that is known.
        there: its job at `target`, once that has its blocks.
        first, sent: block positions from which on and up to which K/V has been moved.
        opened: when `there` got its blocks.
        ready: when the K/V sent so far can be used.
        size: bytes moved.
        refused: why no replica decodes it; "" if one does.
        over: whether the request decodes at `target`, or was abandoned.
    """

    request: Request
    arrival: int
    serial: int
    source: Server
    job: Job | None = None
    held: bool = False
    target: Server | None = None
    there: Job | None = None
    first: int = 0
    sent: int = 0
    opened: int = -1
    ready: int = -1
    size: int = 0
    refused: str = ""
    over: bool = False


class PhaseLoop(ReplicaLoop):
    """The loop of a replica that hands requests over after their prefill, or receives them.

    Attributes:
        phases: the cluster; set before the first turn.
        outgoing: requests that are decoded elsewhere after their prefill here, by id.
        incoming: requests that are or were prefilled elsewhere, by id.
        moved: incoming requests whose K/V has come since the last turn.
    """

    phases: PhaseCluster
    _cache: KVCache

    def __init__(self, *args: Any, **options: Any) -> None:
        from kvcore_plugins.layer_pools import PooledCache  # noqa: PLC0415 - few have phases

        super().__init__(*args, **options)
        msg = ""
        if self._lag is not None:
            msg = "lag=1 with split phases: a transfer begins when a step ends; leave out one"
        plain = isinstance(self.cache, KVCache)
        if not plain or isinstance(self.cache, PooledCache):
            parts = "pools of layers" if plain else "cache groups"
            msg = (
                f"split phases with {parts}, whose K/V has no transfer: leave disaggregate "
                "out, or serve the model as one group (disable_hybrid_kv_cache_manager)"
            )
        if msg:
            raise InputError(msg)
        self.outgoing: dict[int | str, Move] = {}
        self.incoming: dict[int | str, Move] = {}
        self.moved: list[Move] = []
        self.batcher.moved = self._opened

    def begin(self) -> bool:
        """Start decoding requests whose K/V has arrived, begin a turn, report new prefills."""
        ended = [job for move in self.moved if (job := self._join(move)) is not None]
        self.moved.clear()
        if ended:
            super()._finish(ended, self.clock_ps // PS_PER_NS)
        begun = super().begin()
        for job, move in self._leaving():
            if move.job is not job:
                move.job = job
                self.phases.begun(move, self.clock_ps // PS_PER_NS)
        return begun

    def release(self, move: Move, now: int) -> None:
        """Free the blocks of a request whose K/V has been moved, or will not be."""
        job = move.job
        assert job is not None
        del self.outgoing[move.request.id]
        self.batcher.running[job] = None
        super()._finish([job], now)
        self._cache.disown(job.request)
        self.handed.add(len(self.log.ids) - 1)
        self.log.own_slos -= job.request.slo is not None

    def drop(self, move: Move, now: int) -> None:
        """Remove a request whose K/V will not arrive."""
        batcher, job = self.batcher, move.there
        del self.incoming[move.request.id]
        if job is not None:
            if self._cache.trace is not None and job.seq is not None:
                self._cache.trace.preempt(
                    now,
                    request=job.request.id,
                    seq=job.seq.id,
                    how="recompute",
                    requester=None,
                )
            self.allocator.close(job, now)
            del batcher.running[job]
            batcher.ended(job, now)
        elif not self.inbox.remove(move.request.id):
            waiting = (job for job in batcher.waiting if job.request.id == move.request.id)
            batcher.withdraw(next(waiting), now)
        self._cache.disown(move.request)
        batcher.blocked_job, batcher.changed = None, True

    def _leaving(self) -> Iterator[tuple[Job, Move]]:
        """Yield the jobs that prefill in this step and are decoded elsewhere."""
        if self.outgoing:
            for job, _ in self.batcher.chunks:
                move = self.outgoing.get(job.request.id)
                if move is not None:
                    yield job, move

    def _take_arrivals(self, now: int) -> None:
        inbox = self.inbox
        while inbox.next_at <= now:
            sent, arrival, request = inbox.take_sent()
            move = self.incoming.get(request.id)
            if move is None:
                self._arrive(request, sent, arrival)
                continue
            before = move.job
            assert before is not None
            self._cache.adopt(request)
            known = ("admitted", "hit", "loaded", "pauses", "recomputes", "swaps")
            names = {name: getattr(before, name) for name in known}
            self._arrive(request, sent, arrival, **names)

    def _opened(self, job: Job, now: int) -> bool:
        """Request the K/V of an admitted job; return False if it is computed here."""
        move = self.incoming.get(job.request.id)
        if move is None:
            return False
        move.there = job
        self.phases.opened(move, now)
        return True

    def _join(self, move: Move) -> Job | None:
        """Start decoding a job whose K/V has arrived; return it if that is its last token."""
        job, before, now = move.there, move.job, self.clock_ps // PS_PER_NS
        assert job is not None
        assert before is not None
        assert job.seq is not None
        first = self.phases.split.first_output
        job.loaded, job.pauses, job.recomputes = before.loaded, before.pauses, before.recomputes
        # The token whose step gives the first one is computed here, or was before.
        computed = job.target - (first == "decode")
        if computed > job.computed:
            self._cache.commit(job.seq, computed - job.computed, now)
            job.computed = computed
        if first == "decode":
            self.batcher.prefill(job)
            return None
        job.first_token, job.last_token_ps = before.first_token, before.last_token_ps
        if first == "transfer":
            job.first_token, job.last_token_ps = now, self.clock_ps
            if self._cache.trace is not None:
                self._cache.trace.first_token(now, request=job.request.id, seq=job.seq.id)
        if job.output_tokens == 1:
            return job
        job.stage = DECODE
        self.batch.add(job, 1)
        self.batcher.computed()
        return None

    def _prefill_step(self) -> None:
        begun, leaving = self.clock_ps // PS_PER_NS, list(self._leaving())
        super()._prefill_step()
        for _, move in leaving:
            self.phases.computed(move, begun, self.clock_ps // PS_PER_NS)

    def _finish(self, jobs: list[Job], now: int) -> None:
        stay = []
        for job in jobs:
            move = self.outgoing.get(job.request.id)
            if move is None:
                stay.append(job)
            else:
                move.held = True
                del self.batcher.running[job]
        if stay:
            super()._finish(stay, now)


class PhaseCluster(Cluster):
    """Serves requests with replicas that prefill, and others that decode.

    Args:
        split: the pools, and the links between them.
        decode_router, decode_view: the router of the decode pool, and its view of the caches.
        block_bytes: bytes of a block in all layers.
        layers: number of layers of the model.
        arguments, options: those of `Cluster`, whose router is that of the prefill pool.

    Attributes:
        pools: the dispatcher of each pool, by its name.
        out, into: the links of each replica: K/V out of it is read, K/V into it written.
        transfers: the transfers so far.
    """

    def __init__(
        self,
        *arguments: Any,
        split: Split,
        decode_router: Router,
        decode_view: PrefixView,
        block_bytes: int,
        layers: int,
        **options: Any,
    ) -> None:
        self.split = split
        self.transfers = Transfers()
        self._decode = decode_router, decode_view
        self._block_bytes, self._layers = block_bytes, layers
        self._moves: dict[int | str, Move] = {}
        self._arriving: list[tuple[int, int, Move]] = []
        self._stalled: list[Move] = []
        self._serial = 0
        rate, seconds = split.bandwidth, split.latency / NS_PER_S
        self.out = [Link(rate, rate, seconds) for _ in range(split.replicas)]
        self.into = [Link(rate, rate, seconds) for _ in range(split.replicas)]
        super().__init__(*arguments, **options)
        self._chained = True

    def _handlers(self) -> dict[int, Callable[[Server, int], None]]:
        return {**super()._handlers(), MOVED: self._moved}

    def _connect(self, replicas: list[Replica], router: Router, view: PrefixView) -> bool:
        self.pools: dict[str, Dispatcher] = {}
        routers = (router, view), self._decode, (Borrow(), PrefixView())
        for name, (chosen, sees) in zip(POOLS, routers, strict=True):
            own = [replica for replica in replicas if self.split.pool(replica.number) == name]
            self.pools[name] = Dispatcher(chosen, own, sees)
        self.dispatcher = self.pools["prefill"]
        self._replicas = replicas
        return any(d.view.wants_events and d.router.uses_hits for d in self.pools.values())

    def _scaled(self, planner: Planner, slo: SLO | None) -> list[Autoscaler]:
        """Return the autoscalers of the prefill and decode pools; mixed replicas are all up."""
        phases: tuple[Phase, Phase] = ("prefill", "decode")
        return [
            Autoscaler(
                type(planner)(**planner.options()),
                [server for server in self.servers if self.split.pool(server.number) == phase],
                slo,
                self.begin,
                phase,
            )
            for phase in phases
        ]

    def _seen(self, server: Server) -> tuple[Dispatcher, Replica]:
        number = server.number
        return self.pools[self.split.pool(number)], self._replicas[number]

    def _join(self, server: Server, now: int) -> None:
        super()._join(server, now)
        assert isinstance(server.loop, PhaseLoop)
        server.loop.phases = self

    def _return(self, server: Server, now: int) -> None:
        super()._return(server, now)
        stalled, self._stalled = self._stalled, []
        for move in stalled:
            if not move.over:
                self._send(move, now)

    def _ended(self, server: Server, request: Request, now: int) -> None:
        move = self._moves.get(request.id)
        if move is None:
            super()._ended(server, request, now)
        elif not move.over:
            # Rejected at either end.
            if move.target is server:
                del _loop(server).incoming[request.id]
                move.target, move.refused = None, REJECTED
                self._give_up(move, now)
            else:
                del self._moves[request.id], _loop(server).outgoing[request.id]
                move.over = True
            super()._ended(server, request, now)

    def _route(self, request: Request, now: int, arrival: int) -> None:
        """ARRIVAL: send a request to a replica that prefills, or that does both."""
        name = "prefill"
        pool, mixed = self.pools["prefill"], self.pools["mixed"]
        least = min((replica.waiting_tokens for replica in pool.up), default=None)
        if mixed.up and (
            least is None
            or (
                least >= self.split.queue
                and min(replica.waiting_tokens for replica in mixed.up) < least
            )
        ):
            pool, name = mixed, "mixed"
        if not pool.up:
            self._hold(request, now, arrival, "all replicas that prefill have failed")
            return
        # One token needs no decode replica, unless it comes from there.
        least = 1 if self.split.first_output == "prefill" else 0
        splits = name == "prefill" and request.output_tokens > least
        leg = "prefill" if splits else ""
        server = self._dispatch(pool, request, now, arrival, leg)
        if server is None:
            self._refuse(request, now, arrival, "the router refused it")
            return
        sent = request
        if splits:
            self._serial += 1
            move = Move(request, arrival, self._serial, server)
            self._moves[request.id] = _loop(server).outgoing[request.id] = move
            sent = attrs.evolve(request, output_tokens=1, output_keys=())
        server.loop.receive(sent, now, arrival)
        self._touch(server, now)

    def _send(self, move: Move, now: int) -> None:
        """Send a request to a decode replica, which requests its K/V when it has blocks."""
        self._now = now
        pool, mixed = self.pools["decode"], self.pools["mixed"]
        if mixed.up and all(replica.usage >= FULL for replica in pool.up):
            emptiest = min(mixed.up, key=lambda replica: replica.usage)
            if not pool.up or emptiest.usage < FULL:
                pool = mixed
        if not pool.up and self._returns:
            self._stalled.append(move)
            return
        target = None
        if pool.up:
            target = self._dispatch(pool, move.request, now, move.arrival, "decode")
        move.target = target
        if target is None:
            move.refused = (
                "the router refused it" if pool.up else "all replicas that decode have failed"
            )
            self._give_up(move, now)
            return
        # The prompt does not wait for a prefill there.
        pool.first_token(move.request, self._replicas[target.number], now)
        loop = _loop(target)
        loop.incoming[move.request.id] = move
        loop.receive(move.request, now, move.arrival)
        self._touch(target, now)

    def _give_up(self, move: Move, now: int) -> None:
        """Refuse a request that no replica decodes, once its prefill has ended."""
        if move.held:
            move.over = True
            self._touch(move.source, now)
            self._release(move, now)
            if move.refused != REJECTED:
                self._refuse(move.request, now, move.arrival, move.refused)

    def _release(self, move: Move, now: int) -> None:
        """Free the blocks that the prefill replica keeps for a request."""
        _loop(move.source).release(move, now)
        del self._moves[move.request.id]

    def figures(self) -> Phases:
        """Return the results of the split phases."""
        numbers = range(self.split.replicas)
        pools = {
            name: [replica for replica in numbers if self.split.pool(replica) == name]
            for name in POOLS
        }
        links = {
            f"{direction} {index}": link.busy_ns
            for direction, all_ in (("out", self.out), ("into", self.into))
            for index, link in enumerate(all_)
            if link.read_bytes or link.written_bytes
        }
        moved = sum(link.written_bytes for link in self.into)
        return Phases(str(self.split), pools, self.transfers, links, moved)

    def begun(self, move: Move, now: int) -> None:
        """Called when the prefill of a request begins, also after a preemption."""
        if move.target is None and not move.refused and self.split.overlap == "layers":
            self._send(move, now)

    def opened(self, move: Move, now: int) -> None:
        """Called when the decode replica has the blocks of a request."""
        assert move.there is not None
        assert move.there.seq is not None
        move.opened, move.first = now, move.there.seq.hit_blocks
        move.sent = move.first
        self._transfer(move, now, now)

    def computed(self, move: Move, begun: int, now: int) -> None:
        """Called when a step of its prefill, from `begun` to `now` (ns), has ended."""
        if move.refused:
            self._give_up(move, now)
        elif move.there is not None:
            # The K/V of a layer moves while the next is computed.
            layer = (now - begun) // self._layers
            self._transfer(move, max(begun + layer, move.opened), now)
        elif move.held and move.target is None and move not in self._stalled:
            self._send(move, now)

    def _transfer(self, move: Move, begun: int, now: int) -> None:
        """Queue computed K/V that has not been sent; it may move from `begun` (ns) on."""
        job, there, source, target = move.job, move.there, move.source, move.target
        assert job is not None
        assert there is not None
        assert there.seq is not None
        assert target is not None
        size = source.loop.cache.geometry.block_size
        upto = there.seq.blocks if move.held else job.computed // size
        blocks = upto - move.sent
        if blocks > 0:
            amount = blocks * self._block_bytes
            out, into = self.out[source.number], self.into[target.number]
            first = begun + max(out.wait(begun), into.wait(begun))
            before = into.busy_ns
            out.load(amount, first)
            done = into.store(amount, first)
            if begun < now:
                # The last layer follows the step.
                last = -(-(into.busy_ns - before) // self._layers)
                done = max(done, now + last + self.split.latency)
            move.ready = max(move.ready, done)
            move.size += amount
            move.sent = upto
            if self._trace is not None:
                self._trace.transfer(
                    now, move.request, source.number, target.number, blocks, amount, done
                )
        if move.held:
            due = max(move.ready, now)
            heappush(self._arriving, (due, move.serial, move))
            self._put(MOVED, due, target.number)

    def _moved(self, _: Server, now: int) -> None:
        """MOVED: all K/V of a request has come; the prefill replica frees its blocks."""
        while self._arriving and self._arriving[0][0] <= now:
            move = heappop(self._arriving)[2]
            job, target = move.job, move.target
            if move.over or target is None or move.there is None:
                continue
            assert job is not None
            assert job.first_token is not None
            self._touch(move.source, now)
            self._touch(target, now)
            move.over = True
            self._release(move, now)
            loop = _loop(target)
            del loop.incoming[move.request.id]
            loop.moved.append(move)
            rows = self.transfers
            rows.ids.append(move.request.id)
            rows.source.append(move.source.number)
            rows.target.append(target.number)
            rows.ended.append(job.first_token)
            rows.opened.append(move.opened)
            rows.done.append(now)
            rows.blocks.append(move.sent - move.first)
            rows.reused.append(move.first)
            rows.size.append(move.size)

    def _serve_again(self, server: Server, request: Request, now: int, arrival: int) -> None:
        """Route a request again that `server` has lost.

        If `server` was to decode it and has no K/V yet, another replica decodes it.
        """
        move = self._moves.get(request.id)
        if move is None:
            super()._serve_again(server, request, now, arrival)
        elif move.source is server:
            del self._moves[request.id]
            move.over = True
            if move.refused == REJECTED:
                return
            target = move.target
            if target is not None:
                self._touch(target, now)
                _loop(target).drop(move, now)
                del target.sent[request.id]
                dispatcher, replica = self._seen(target)
                dispatcher.ended(request, replica, now)
            super()._serve_again(server, request, now, arrival)
        else:
            self.retried += 1
            # Events in the heap belong to the old move, which is over.
            self._serial += 1
            again = attrs.evolve(
                move, serial=self._serial, target=None, there=None, ready=-1, opened=-1, size=0
            )
            move.over = True
            self._moves[request.id] = _loop(move.source).outgoing[request.id] = again
            self._send(again, now)


def _loop(server: Server) -> PhaseLoop:
    """Return the loop of a replica of split phases."""
    loop = server.loop
    assert isinstance(loop, PhaseLoop)
    return loop
