"""Reports on miss reasons: one request in sentences, all requests in tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby, zip_longest
from typing import Any

import attrs

from kvcore.sections import Chart, Panel, Section, Table
from kvcore.units import NS_PER_S, format_number, format_seconds
from kvcore_cli.report.simulation import group_text
from kvcore_cli.report.tables import TableRow, counted, no_full_block, setup
from kvcore_replay.misses.reasons import (
    OF_CLUSTERS,
    OF_GROUPS,
    OF_POOLS,
    TOMBSTONE,
    WAYS,
    Explanation,
    MissSegment,
    RequestMisses,
    Summary,
)

CAUSES = ("capacity", "policy")

BOUND = (
    "The optimum evicts the block whose next request is furthest, deepest first among "
    "equals, and admits all that is computed."
)

SERIAL = (
    "This run had a clock; the optimum replays its requests one after another, in the order "
    "of their first admission."
)

NO_KEYS = "no keys: there is nothing to look up. --accounting tokens counts all tokens."


@attrs.frozen
class RequestReport:
    """Text about one request: its hit, and why the rest missed.

    Attributes:
        explanation: the explanation of the trace.
        reasons: the misses of the request.
    """

    explanation: Explanation
    reasons: RequestMisses

    @property
    def sections(self) -> list[Section]:
        """The whole report on the request."""
        return [str(self)]

    def __str__(self) -> str:
        """Return the text: the hit, then each missed segment in prompt order."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        reasons, losses = self.reasons, self.reasons.losses
        yield f"Request {reasons.request} of {self.explanation.source}: {self._life()}"
        if reasons.state != "admitted":
            return
        missed = sum(loss.tokens for loss in losses)
        tokens, size = counted(reasons.tokens, "token"), self.explanation.header["block_size"]
        loaded = sum(loss.tokens for loss in losses if loss.category == "loaded")
        some = f", of which {loaded:,} came from lower tiers" if loaded else ""
        end = f"{some}{':' if losses else '.'}"
        yield (
            f"Of {tokens}, {reasons.hit:,} hit and {missed:,} missed{end}"
            if reasons.tokens
            else no_full_block(reasons.prompt, size, alone=True) or f"It has {NO_KEYS}"
        )
        alike = groupby(
            losses, key=lambda loss: (loss.category, loss.other, loss.tier, loss.groups)
        )
        for _, run in alike:
            yield f"- {self._sentence(list(run))}"
        if any(loss.category in CAUSES for loss in losses):
            yield from _bound(self.explanation.header["mode"])
        if not self.explanation.complete:
            yield _cut(self.explanation.cut_reason)

    def _life(self) -> str:
        reasons = self.reasons
        arrived = f"arrived at {_moment(reasons.arrived)}"
        if reasons.admitted is None:
            if reasons.rejected is not None:
                return f"{arrived}, and was turned away: {reasons.rejected}."
            if reasons.again:
                return (
                    f"{arrived}, and was decoded here. Another replica prefilled it, and has "
                    "its hits and misses."
                )
            return f"{arrived}, and was not admitted before the trace ends."
        again = ""
        if reasons.again:
            times = counted(reasons.again, "time")
            again = f" It was preempted, and admitted again {times}; that counts nowhere here."
        replica = "" if reasons.replica is None else f" of replica {reasons.replica}"
        return (
            f"{arrived}, admitted at {_moment(reasons.admitted)} as sequence "
            f"{reasons.seq}{replica}.{again}"
        )

    def _sentence(self, losses: list[MissSegment]) -> str:
        """Return the sentence about adjacent segments that differ only in their evictions."""
        first, end = losses[0].first, losses[-1].end
        prefill = self._prefill(losses)
        return (
            f"from token {first:,} to {end:,} ({counted(end - first, 'token')}, {prefill} of "
            f"prefill): {spaced(losses[0].category)}. {self._why(losses)}"
        )

    def _prefill(self, losses: list[MissSegment]) -> str:
        """Return the least time to prefill the segments, as text."""
        seconds, prompt = self.explanation.prefill_seconds, self.reasons.prompt
        return format_seconds(sum(seconds(loss, prompt) for loss in losses))

    def _why(self, losses: list[MissSegment]) -> str:
        loss = losses[0]
        if loss.tier is not None:
            return self._in_tier(losses)
        if loss.eviction is not None:
            return self._evicted(losses) + self._dropped(losses) + self._short(loss)
        if loss.category == "compulsory":
            return _new(loss, cluster=self.reasons.replica is not None)
        return {
            "in_flight": f"Request {loss.other}, admitted before, was still computing them.",
            "unkept": (
                f"Request {loss.other} had them before. Windows and states stay cached where a "
                f"prompt ends, at a junction and at intervals, which is not here."
                f"{self._short(loss)}"
            ),
            "unstored": f"Request {loss.other} had them before, and did not store them.",
            "truncated": (
                f"Request {loss.other} had them before; of one request this pool of "
                f"{self.explanation.header['blocks']:,} blocks keeps no more."
            ),
            "granularity": (
                "Only whole blocks are shared, and the last token is always computed."
            ),
            "no_keys": "The request has no key for these.",
            "elsewhere": f"Replica {loss.replica} had them when the request was routed.",
        }[loss.category]

    def _evicted(self, losses: list[MissSegment]) -> str:
        """Return sentences about the time and the beneficiaries of the evictions."""
        now = self.reasons.admitted
        evictions = [loss.eviction for loss in losses if loss.eviction is not None]
        latest, earliest = evictions[0], evictions[-1]
        assert now is not None
        before = format_seconds((now - latest.time) / NS_PER_S)
        idle = format_seconds(latest.age / NS_PER_S)
        story = f"Used last by request {losses[0].other}. "
        if latest.expired:
            return (
                f"{story}Expired; dropped at {_moment(latest.time)}, {before} before this use "
                f"and {idle} after they were stored or hit last."
            )
        lost = {
            "policy": " The optimum would have kept them.",
            "capacity": " The optimum would not have had them.",
        }.get(losses[0].category, "")
        when = f"at {_moment(latest.time)} by {latest.by} for request {latest.beneficiary}"
        if latest is not earliest:
            when = (
                f"from {_moment(earliest.time)} (by {earliest.by} for request "
                f"{earliest.beneficiary}) to {_moment(latest.time)} (for request "
                f"{latest.beneficiary})"
            )
        return (
            f"{story}Evicted {when}, {before} before this use and {idle} after they were "
            f"stored or hit last, with {counted(latest.hits, 'hit')}.{lost}"
        )

    def _short(self, loss: MissSegment) -> str:
        """Return sentences about the groups, or pools, that lacked blocks; "" without any."""
        if not loss.groups:
            return ""
        part = "pool" if self.explanation.parts == "layer_pools" else "group"
        named = [f"{n} ({group['kind']})" for n, group in enumerate(self.explanation.groups)]
        short = [f"{part} {named[index]}" for index in loss.groups]
        complete = [each for index, each in enumerate(named) if index not in loss.groups]
        has = "have their blocks" if len(complete) > 1 else "has its blocks"
        others = f"; {', '.join(complete)} {has}" if complete else ""
        return f" Short at token {loss.end:,}: {', '.join(short)}{others}."

    def _in_tier(self, losses: list[MissSegment]) -> str:
        """Return the sentence about blocks that a lower tier holds."""
        loss, tier = losses[0], losses[0].tier
        prefill = self._prefill(losses)
        if loss.category == "unreadable":
            return f"Lower tier {tier} had them, but they could not be loaded."
        if loss.load_ns is None:
            return f"In lower tier {tier}, from which nothing is loaded (load=never)."
        took = format_seconds(loss.load_ns / NS_PER_S)
        if loss.category == "loaded":
            return (
                f"Lower tier {tier}: loaded in {took} instead of at least {prefill} of prefill."
            )
        return (
            f"In lower tier {tier}, but recomputing was cheaper: to load them would have "
            f"taken {took}."
        )

    def _dropped(self, losses: list[MissSegment]) -> str:
        """Return the sentence about how evicted blocks left the last tier that held them."""
        drops = list(dict.fromkeys(loss.drop for loss in losses if loss.drop is not None))
        if not drops:
            return ""
        last, times = drops[0], {_moment(drop.time): None for drop in reversed(drops)}
        when = " to ".join([*times][:: max(1, len(times) - 1)])
        room = "" if last.beneficiary is None else f" for blocks of request {last.beneficiary}"
        word = "from" if len(times) > 1 else "at"
        return f" They left lower tier {last.tier} {word} {when} ({last.reason}){room}."


@attrs.frozen
class SummaryReport:
    """Tables of the missed tokens of a trace by reason, divergence point and request.

    Attributes:
        summary: the JSON object of the explanation and its summary.
        header: the HEADER line of the trace, for the setup; empty: it is not known.
    """

    summary: Mapping[str, Any]
    header: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def from_explanation(cls, explanation: Explanation, summary: Summary) -> SummaryReport:
        """Return the report on an explanation."""
        return cls(explanation.as_dict() | summary.as_dict(), explanation.header)

    @property
    def sections(self) -> list[Section]:
        """The whole report on all requests."""
        charts = [self.chart()] if self.table.rows else []
        groups = [self.groups] if self.summary.get("groups") else []
        rankings = [*groups, self.places, self.requests]
        return [self.headline, self.table, *charts, *rankings, self.notes, setup(self.header)]

    @property
    def headline(self) -> str:
        """Sentences about the trace and its hits."""
        summary, requests = self.summary, self.summary["requests"]
        tokens, hits = summary["prompt_tokens"], summary["hit_tokens"]
        what = counted(tokens, "prompt token")
        if summary["count"] == "keys":
            what = f"{counted(tokens, 'token')} of keys"
        text = (
            f"Of {what}, {hits:,} hit "
            f"({hits / tokens if tokens else 0:.1%}) and {tokens - hits:,} missed."
        )
        if hits and "saved_s" in summary:  # earlier releases did not write it
            saved, prefill = summary["saved_s"], summary["prefill_s"]
            text += (
                f"\nHits saved at least {format_seconds(saved)} of prefill, of "
                f"{format_seconds(prefill)} in all."
            )
        if requests["admitted"] and not tokens:
            text = (
                no_full_block(summary.get("longest_prompt", 0), summary["block_size"])
                or f"The requests have {NO_KEYS}"
            )
        turned = (
            f"; {requests[name]:,} {what}"
            for name, what in (
                ("rejected", "rejected"),
                ("decoded", "decoded here, and prefilled on another replica"),
                ("waiting", "not admitted"),
                ("readmitted", "admitted again after preemption, counted once"),
            )
            if requests[name]
        )
        replicas = sum(group["count"] for group in self.header.get("replicas", ()))
        pools = f"{counted(replicas, 'replica')} of " if replicas else ""
        return (
            f"{summary['source']}: {counted(requests['admitted'], 'request')} in {pools}"
            f"{counted(summary['blocks'], 'block')} of "
            f"{counted(summary['block_size'], 'token')}, evicted by {summary['eviction']} "
            f"({summary['count']} counting){''.join(turned)}.\n{text}"
        )

    @property
    def table(self) -> Table:
        """The missed tokens by reason; reasons without misses are left out."""
        headers = ["lost", "tokens", "of missed", "prefill", "stopped", "because"]
        lost = self.summary["lost"]
        reasons = OF_CLUSTERS if "elsewhere" in lost else OF_GROUPS
        if TOMBSTONE in lost:
            reasons = OF_POOLS
        rows = []
        for name, missed in lost.items():
            if missed["tokens"]:
                rows.append(self._row(spaced(name), missed, reasons[name]))
            if name == "compulsory":
                rows += [
                    self._row(f"  {way}", part, WAYS[way])
                    for way, part in self.summary["compulsory"].items()
                    if part["tokens"]
                ]
        return Table(headers, rows, headers[1:5])

    @property
    def groups(self) -> Table:
        """The tokens for which each cache group or pool was short, alone or with others."""
        pools = self.summary.get("layer_pools")
        measures = ["short for", "prefill", "stopped"]
        pairs = zip(pools or self.summary["cache_groups"], self.summary["groups"], strict=True)
        rows = []
        for index, (group, short) in enumerate(pairs):
            keeps = (
                f"{group['slots']:,} slots ({group['kind']})" if pools else group_text(group)
            )
            tokens, stopped = (f"{short[name]:,}" for name in ("tokens", "stopped"))
            prefill = format_seconds(short["prefill_s"])
            rows.append([str(index), keeps, tokens, prefill, stopped])
        return Table(["group" if pools is None else "pool", "keeps", *measures], rows, measures)

    @property
    def places(self) -> Table:
        """The points at which most requests diverge."""
        headers = ["parting at token", "into prompt", "requests", "tokens", "such as"]
        rows = []
        for point in self.summary["places"]:
            counts = (f"{point[name]:,}" for name in ("requests", "tokens"))
            place = f"{point['first_token']:,}", f"{point['prompt_share']:.0%}"
            other = "" if point["other"] is None else f" from {point['other']}"
            rows.append([*place, *counts, f"{point['example']}{other}"])
        return Table(headers, rows)

    @property
    def requests(self) -> Table:
        """The requests that lost most to evictions, and those that caused most."""
        headers = ["request", "tokens it lost", "request ", "tokens lost for it"]
        victims, winners = (
            [(str(row["request"]), f"{row['tokens']:,}") for row in self.summary[name]]
            for name in ("victims", "beneficiaries")
        )
        pairs = zip_longest(victims, winners, fillvalue=("", ""))
        return Table(headers, [[*victim, *winner] for victim, winner in pairs])

    def chart(self) -> Chart:
        """Return a chart of the missed tokens by reason."""
        lost = {
            spaced(name): [(0.0, float(missed["tokens"]))]
            for name, missed in self.summary["lost"].items()
            if missed["tokens"]
        }
        return Chart("", "", "", [Panel("prompt tokens that missed", lost, format_number)])

    @property
    def notes(self) -> str:
        """Sentences on how to read the numbers."""
        return "\n".join(self._notes())

    def _row(self, name: str, lost: Mapping[str, Any], because: str) -> TableRow:
        return [
            name,
            f"{lost['tokens']:,}",
            f"{lost['tokens'] / self.summary['missed_tokens']:.1%}",
            format_seconds(lost["prefill_s"]),
            f"{lost['stopped']:,}",
            because,
        ]

    def _notes(self) -> Iterator[str]:
        summary, lost = self.summary, self.summary["lost"]
        cost = summary["recompute"]
        yield (
            f"Prefill: the least time {cost['model']} takes on one {cost['device']}. Stopped: "
            "requests whose hit ended there."
        )
        if loaded := lost["loaded"]["tokens"]:
            saved = format_seconds(lost["loaded"]["prefill_s"])
            took = format_seconds(summary["load_s"])
            yield (
                f"Lower tiers: {loaded:,} tokens were loaded in {took} in all, queues "
                f"included, instead of at least {saved} of prefill."
            )
        if any(lost[cause]["tokens"] for cause in CAUSES):
            yield from _bound(summary["mode"])
        if "groups" in summary:
            parts = "pools of layers" if "layer_pools" in summary else "cache groups"
            yield (
                f"No optimum is known of {parts}, so what was evicted is not divided into "
                "policy and capacity."
            )
        if salted := summary["other_salts"]["tokens"]:
            yield (
                f"Of what starts anew, {salted:,} tokens came after requests of "
                "other salts: how much of it these had as well cannot be told, since keys "
                "depend on the salt."
            )
        if not summary["complete"]:
            yield _cut(summary["cut_reason"])


def _bound(mode: str) -> Iterator[str]:
    """Yield the sentences about the bound that divides policy from capacity misses."""
    yield BOUND
    if mode != "untimed":
        yield SERIAL


def _cut(reason: str | None) -> str:
    """Return the sentence about where an incomplete trace ends."""
    return f"INCOMPLETE: {reason}; told as if nothing followed."


def _new(loss: MissSegment, *, cluster: bool) -> str:
    """Return the phrase about how a compulsory miss begins.

    On a cluster it is about the requests of one replica: another may have had these keys.
    """
    if loss.way == "starts":
        before = "that its replica admitted before" if cluster else "admitted before"
        story = f"No request {before} begins with this block."
        if loss.other_salts:
            story += (
                f" Of other salts there were {loss.other_salts:,}; whether one has the same "
                "text cannot be told, since keys depend on the salt."
            )
        return story
    # Only blocks that an earlier run left in a tier have no request.
    other = "an earlier run" if loss.other is None else f"request {loss.other}"
    if loss.way == "extends":
        here = " of its replica" if cluster else ""
        return f"Goes on where {other} ends, as no request{here} did before."
    if loss.way == "ends":
        return (
            f"Its last key covers a part of a block: {other} has what comes "
            f"before, {'no request of its replica' if cluster else 'nobody'} this."
        )
    point = loss.place
    assert point is not None
    share = point.shares / point.requests
    many = (
        "no other request parts here"
        if point.requests == 1
        else f"{point.requests:,} requests part here, {share:.0%} into their prompts"
    )
    return (
        f"Parts from request {loss.other} between tokens {point.first:,} and "
        f"{point.first + point.width:,}; {many}."
    )


def _moment(ns: int) -> str:
    seconds = ns / NS_PER_S
    return f"{round(seconds, 3):.12g} s" if seconds >= 1 else format_seconds(seconds)


def spaced(name: str) -> str:
    """Return the name of a category in words."""
    return name.replace("_", " ")
