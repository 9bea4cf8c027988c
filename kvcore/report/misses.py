"""Reports on miss reasons: one request in sentences, all requests in tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest

import attrs

from kvcore.analysis import Explanation
from kvcore.analysis.miss_reasons import WAYS, MissedTokens, MissSegment, RequestMisses, Summary
from kvcore.report.tables import TableRow, counted, setup
from kvcore.sections import Chart, Panel, Section, Table
from kvcore.units import NS_PER_S, format_number, format_seconds

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
        tokens = counted(reasons.tokens, "token")
        loaded = sum(loss.tokens for loss in losses if loss.category == "loaded")
        some = f", of which {loaded:,} came from lower tiers" if loaded else ""
        end = f"{some}{':' if losses else '.'}"
        yield (
            f"Of {tokens}, {reasons.hit:,} hit and {missed:,} missed{end}"
            if reasons.tokens
            else f"It has {NO_KEYS}"
        )
        alike = groupby(losses, key=lambda loss: (loss.category, loss.other, loss.tier))
        for _, run in alike:
            yield f"- {self._sentence(list(run))}"
        if any(loss.category in CAUSES for loss in losses):
            yield from _bound(self.explanation)
        yield from _cut(self.explanation)

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
        place = "" if reasons.replica is None else f" of replica {reasons.replica}"
        return (
            f"{arrived}, admitted at {_moment(reasons.admitted)} as sequence "
            f"{reasons.seq}{place}.{again}"
        )

    def _sentence(self, losses: list[MissSegment]) -> str:
        """Return the sentence about adjacent segments that differ only in their evictions."""
        first, end = losses[0].first, losses[-1].end
        prefill = format_seconds(sum(map(self.explanation.prefill_seconds, losses)))
        return (
            f"from token {first:,} to {end:,} ({counted(end - first, 'token')}, {prefill} of "
            f"prefill): {spaced(losses[0].category)}. {self._why(losses)}"
        )

    def _why(self, losses: list[MissSegment]) -> str:
        loss = losses[0]
        if loss.tier is not None:
            return self._in_tier(losses)
        if loss.eviction is not None:
            return self._evicted(losses) + self._dropped(losses)
        if loss.category == "compulsory":
            return _new(loss)
        return {
            "in_flight": f"Request {loss.other}, admitted before, was still computing them.",
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
        lost = "would have kept" if losses[0].category == "policy" else "would not have had"
        when = f"at {_moment(latest.time)} by {latest.by} for request {latest.beneficiary}"
        if latest is not earliest:
            when = (
                f"from {_moment(earliest.time)} (by {earliest.by} for request "
                f"{earliest.beneficiary}) to {_moment(latest.time)} (for request "
                f"{latest.beneficiary})"
            )
        return (
            f"{story}Evicted {when}, {before} before this use and {idle} after they were "
            f"stored or hit last, with {counted(latest.hits, 'hit')}. The optimum {lost} them."
        )

    def _in_tier(self, losses: list[MissSegment]) -> str:
        """Return the sentence about blocks that a lower tier holds."""
        loss, tier = losses[0], losses[0].tier
        prefill = format_seconds(sum(map(self.explanation.prefill_seconds, losses)))
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
        explanation: the explanation of the trace.
        summary: its summary.
    """

    explanation: Explanation
    summary: Summary

    @property
    def sections(self) -> list[Section]:
        """The whole report on all requests."""
        charts = [self.chart()] if self.table.rows else []
        rankings, setting = [self.places, self.requests], setup(self.explanation.header)
        return [self.headline, self.table, *charts, *rankings, self.notes, setting]

    @property
    def headline(self) -> str:
        """Sentences about the trace and its hits."""
        explanation, summary = self.explanation, self.summary
        header = explanation.header
        hit = summary.hit_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
        found = (
            f"Of {counted(summary.prompt_tokens, 'prompt token')}, {summary.hit_tokens:,} hit "
            f"({hit:.1%}) and {summary.missed_tokens:,} missed."
        )
        if summary.admitted and not summary.prompt_tokens:
            found = f"The requests have {NO_KEYS}"
        turned = (
            f"; {number:,} {what}"
            for number, what in (
                (summary.rejected, "rejected"),
                (summary.decoded, "decoded here, and prefilled on another replica"),
                (summary.waiting, "not admitted"),
                (summary.readmitted, "admitted again after preemption, counted once"),
            )
            if number
        )
        replicas = sum(each["count"] for each in header.get("replicas", ()))
        pools = f"{counted(replicas, 'replica')} of " if replicas else ""
        return (
            f"{explanation.source}: {counted(summary.admitted, 'request')} in {pools}"
            f"{counted(header['blocks'], 'block')} of "
            f"{counted(header['block_size'], 'token')}, evicted by "
            f"{explanation.plugin('eviction')} ({header['count']} counting){''.join(turned)}.\n"
            f"{found}"
        )

    @property
    def table(self) -> Table:
        """The missed tokens by reason; reasons without misses are left out."""
        headers = ["lost", "tokens", "of missed", "prefill", "stopped", "because"]
        rows = []
        for name, lost in self.summary.categories.items():
            if lost.tokens:
                rows.append(self._row(spaced(name), lost, self.explanation.categories[name]))
            if name == "compulsory":
                rows += [
                    self._row(f"  {way}", part, WAYS[way])
                    for way, part in self.summary.ways.items()
                    if part.tokens
                ]
        return Table(headers, rows, headers[1:5])

    @property
    def places(self) -> Table:
        """The points at which most requests diverge."""
        headers = ["parting at token", "into prompt", "requests", "tokens", "such as"]
        rows = [
            [
                f"{place.first:,}",
                f"{place.shares / place.requests:.0%}",
                f"{place.requests:,}",
                f"{place.tokens:,}",
                f"{place.example}"
                if place.other is None
                else f"{place.example} from {place.other}",
            ]
            for place in self.summary.places
        ]
        return Table(headers, rows)

    @property
    def requests(self) -> Table:
        """The requests that lost most to evictions, and those that caused most."""
        headers = ["request", "tokens it lost", "request ", "tokens lost for it"]
        pairs = zip_longest(_ranked(self.summary.victims), _ranked(self.summary.beneficiaries))
        rows = [[*(victim or ("", "")), *(winner or ("", ""))] for victim, winner in pairs]
        return Table(headers, rows)

    def chart(self) -> Chart:
        """Return a chart of the missed tokens by reason."""
        lost = {
            spaced(name): [(0.0, float(missed.tokens))]
            for name, missed in self.summary.categories.items()
            if missed.tokens
        }
        return Chart("", "", "", [Panel("prompt tokens that missed", lost, format_number)])

    @property
    def notes(self) -> str:
        """Sentences on how to read the numbers."""
        return "\n".join(self._notes())

    def _row(self, name: str, lost: MissedTokens, because: str) -> TableRow:
        return [
            name,
            f"{lost.tokens:,}",
            f"{lost.tokens / self.summary.missed_tokens:.1%}",
            format_seconds(lost.seconds),
            f"{lost.stopped:,}",
            because,
        ]

    def _notes(self) -> Iterator[str]:
        cost, summary = self.explanation.cost, self.summary
        yield (
            f"Prefill: the least time {cost.model} takes on one {cost.device}. Stopped: "
            "requests whose hit ended there."
        )
        if loaded := summary.categories["loaded"].tokens:
            saved = format_seconds(summary.categories["loaded"].seconds)
            took = format_seconds(summary.load_s)
            yield (
                f"Lower tiers: {loaded:,} tokens were loaded in {took} in all, queues "
                f"included, instead of at least {saved} of prefill."
            )
        if any(summary.categories[cause].tokens for cause in CAUSES):
            yield from _bound(self.explanation)
        if summary.salted.tokens:
            yield (
                f"Of what starts anew, {summary.salted.tokens:,} tokens came after requests of "
                "other salts: how much of it these had as well cannot be told, since keys "
                "depend on the salt."
            )
        yield from _cut(self.explanation)


def _bound(explanation: Explanation) -> Iterator[str]:
    """Return the sentence about the bound that divides policy from capacity misses."""
    yield BOUND
    if explanation.header["mode"] != "untimed":
        yield SERIAL


def _cut(explanation: Explanation) -> Iterator[str]:
    """Return the sentence about where an incomplete trace ends."""
    if not explanation.complete:
        yield f"INCOMPLETE: {explanation.cut_reason}; told as if nothing followed."


def _ranked(requests: Iterable[tuple[int | str, int]]) -> Iterator[tuple[str, str]]:
    return ((str(request), f"{tokens:,}") for request, tokens in requests)


def _new(loss: MissSegment) -> str:
    """Return the phrase about how a compulsory miss begins."""
    if loss.way == "starts":
        story = "No request admitted before begins with this block."
        if loss.other_salts:
            story += (
                f" Of other salts there were {loss.other_salts:,}; whether one has the same "
                "text cannot be told, since keys depend on the salt."
            )
        return story
    # Only blocks that an earlier run left in a tier have no request.
    other = "an earlier run" if loss.other is None else f"request {loss.other}"
    if loss.way == "extends":
        return f"Goes on where {other} ends, as no request did before."
    if loss.way == "ends":
        return (
            f"Its last key covers a part of a block: {other} has what comes "
            "before, nobody this."
        )
    place = loss.place
    assert place is not None
    share = place.shares / place.requests
    many = (
        "no other request parts here"
        if place.requests == 1
        else f"{place.requests:,} requests part here, {share:.0%} into their prompts"
    )
    return (
        f"Parts from request {loss.other} between tokens {place.first:,} and "
        f"{place.first + place.width:,}; {many}."
    )


def _moment(ns: int) -> str:
    seconds = ns / NS_PER_S
    return f"{round(seconds, 3):.12g} s" if seconds >= 1 else format_seconds(seconds)


def spaced(name: str) -> str:
    """Return the name of a category in words."""
    return name.replace("_", " ")
