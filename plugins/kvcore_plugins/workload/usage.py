"""The tokens that an API reported for a request, in the names of any API or gateway."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import attrs

from kvcore.units import INT64_LIMIT
from kvcore_plugins.workload.rows import Row

USAGE_FIELDS = ("usage", "usageMetadata", "usage_metadata", "usage_details", "usageDetails")
"""Fields of an answer, or of a row, that hold the reported tokens."""

UNKNOWN_PROMPTS = (
    "prompts are not known, so nothing hits: times, GPUs and bills are an upper bound"
)
"""The note on a file without prompts."""

_OPEN_TELEMETRY = ("gen_ai.usage.", "llm.token_count.", "llm.usage.")
_SIGNS = re.compile(r"[^a-z0-9.]")

# Names in lower case, without signs but the dots between an object and its fields.
_PROMPT = ("prompttokens", "prompttokencount", "numprompttokens", "promptevalcount", "prompt")
_INPUT = ("inputtokens", "inputtokencount", "numinputtokens", "input")
_OUTPUT = ("completiontokens", "outputtokens", "candidatestokencount", "generatedtokens",
           "outputtokencount", "numoutputtokens", "evalcount", "completion",
           "output")  # fmt: skip
_TOTAL = ("totaltokens", "totaltokencount", "total")
_DETAILS = [
    f"{kind}{noun}"
    for kind in ("prompt", "input")
    for noun in ("tokensdetails", "tokendetails")
]
# Parts of the prompt's tokens by their names, whatever the API.
_READ_INSIDE = (
    *(f"{name}.{part}" for name in _DETAILS for part in ("cachedtokens", "cacheread")),
    "promptdetails.cacheread", "inputtokens.cached", "cacheread.inputtokens",
    "prompttokens.cached", "cachedcontenttokencount", "prompttokensfromcache",
    "promptcachehittokens", "cachedtokens", "cachedinputtokens", "numcachedtokens",
)  # fmt: skip
_WRITTEN_INSIDE = (
    *(
        f"{name}.{part}"
        for name in _DETAILS
        for part in ("cachewritetokens", "cachecreationtokens", "cachecreation",
                     "cachecreationinputtokens", "cachewrite")
    ),
    "promptdetails.cachewrite", "inputtokens.cachewrite", "cachecreation.inputtokens",
    "cachewritetokens",
)  # fmt: skip
# Beside the uncached tokens in Anthropic's and Bedrock's own format; in the formats of gateways
# parts of the prompt again. Langfuse has what is cached beside all inputs.
_READ_MARKED = ("cachereadinputtokens", "cachereadinputtokencount")
_READ_BESIDE = (*_READ_MARKED, "inputcachedtokens")
_WRITTEN_BESIDE = ("cachecreationinputtokens", "cachewriteinputtokens",
                   "cachewriteinputtokencount")  # fmt: skip
_WRITTEN_1H = (
    "cachecreation.ephemeral1hinputtokens",
    *(f"{name}.cachecreationtokendetails.ephemeral1hinputtokens" for name in _DETAILS),
    *(f"{name}.cachecreation.ephemeral1hinputtokens" for name in _DETAILS),
    "cachedetails.1h",
)
_REASONING = (
    *(
        f"{kind}{noun}.{part}"
        for kind in ("completion", "output")
        for noun in ("tokensdetails", "tokendetails", "details")
        for part in ("reasoningtokens", "reasoning", "thinkingtokens")
    ),
    "reasoning.outputtokens", "outputtokens.reasoning", "reasoningtokens",
    "reasoningtokencount",
)  # fmt: skip
_REASONING_BESIDE = ("thoughtstokencount", "outputreasoningtokens")
_TOOL_RESULTS = ("tooluseprompttokencount",)
# What is the sum of a few counts is below 2^63 as well.
_COUNT_LIMIT = INT64_LIMIT >> 3
_COUNT_NAMES = frozenset((
    *_PROMPT[:-1], *_INPUT[:-1], *_OUTPUT[:-2], *_TOTAL[:-1], *_READ_INSIDE, *_READ_BESIDE,
    *_WRITTEN_INSIDE, *_WRITTEN_BESIDE, *_REASONING, *_REASONING_BESIDE,
))  # fmt: skip


@attrs.frozen
class Usage:
    """The tokens that an API reported for a request.

    Those of the first four add up to the prompt.

    Attributes:
        uncached_tokens: of the prompt, neither read from the cache nor written to it.
        read_tokens: of the prompt, read from the cache.
        written_tokens, written_1h_tokens: of the prompt, written to the cache, with a TTL below
            an hour and of one.
        output_tokens: generated, with reasoning and with every choice of the answer.
        reasoning_tokens: of these, those of reasoning.
    """

    uncached_tokens: int
    read_tokens: int = 0
    written_tokens: int = 0
    written_1h_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, cached or not."""
        written = self.written_tokens + self.written_1h_tokens
        return self.uncached_tokens + self.read_tokens + written


@attrs.frozen
class _Counts:
    """The numbers of tokens of a usage, by name.

    Attributes:
        row: the object that has them, for errors.
        values: what is not null, by names in lower case without signs.
        spelled: the names as they are in the row.
        telemetry: whether names are those of OpenTelemetry, where the tokens of a prompt are
            all of them, of any API.
    """

    row: Row
    values: Mapping[str, Any]
    spelled: Mapping[str, str]
    telemetry: bool

    def has(self, names: Iterable[str]) -> bool:
        """Return True if the usage has any of `names`."""
        return any(name in self.values for name in names)

    def largest(self, names: Iterable[str]) -> int:
        """Return the largest count under any of `names`: several are one count said twice."""
        return max((self._count(name) for name in names if name in self.values), default=0)

    def _count(self, name: str) -> int:
        value = self.values[name]
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is int and 0 <= value < _COUNT_LIMIT:
            return value
        expected = f"a whole number of tokens, from 0 to {_COUNT_LIMIT - 1}"
        raise self.row.error(field=self.spelled[name], expected=expected, got=value)


def reported_note(ratio: float) -> str:
    """Return the note on the share of its prompt tokens that a log reports as cached."""
    return f"the log reports {ratio:.1%} of its prompt tokens as cached"


def usage_of(*holders: Row) -> tuple[Usage | None, bool]:
    """Return the tokens that an API reported, and whether it caches at breakpoints alone.

    Read are the names of OpenAI's chat completions and Responses, of Anthropic's messages, of
    Bedrock, Gemini and DeepSeek, of gateways in front of them, and of OpenTelemetry's spans.

    Args:
        holders: objects that may have a usage: a response, a row. The first usage counts.

    Raises:
        InputError: a field that is no number of tokens, or a prompt shorter than its parts.
    """
    counts = next(filter(None, map(_counts, holders)), None)
    if counts is None:
        return None, False
    inside = counts.largest(_READ_INSIDE), counts.largest(_WRITTEN_INSIDE)
    beside = counts.largest(_READ_BESIDE), counts.largest(_WRITTEN_BESIDE)
    read, written = map(max, inside, beside)
    prompt = counts.largest(_PROMPT) or counts.largest(_INPUT)
    output, reasoning = _generated(counts, prompt)
    # A prompt named so holds all its tokens, and so does one whose parts are named details.
    # Anthropic's and Bedrock's own input is what was neither read nor written.
    apart = not (counts.telemetry or counts.has((*_PROMPT, *_READ_INSIDE, *_WRITTEN_INSIDE)))
    explicit = bool(beside[1]) or (apart and counts.has((*_READ_MARKED, *_WRITTEN_BESIDE)))
    if apart or sum(beside) > prompt:
        prompt += sum(beside)
    elif counts.telemetry and read + written > prompt:
        # Older instrumentations pass on what Anthropic says.
        prompt += read + written
    if not prompt:
        return None, explicit
    long = counts.largest(_WRITTEN_1H)
    if read + written > prompt or long > written:
        usage_row = Row(counts.row.path, counts.row.line, {"usage": counts.row.fields})
        raise usage_row.error(field="usage", expected="no part larger than the whole")
    prompt += counts.largest(_TOOL_RESULTS)
    uncached = prompt - read - written
    return Usage(uncached, read, written - long, long, output, reasoning), explicit


def generated_tokens(*holders: Row) -> int | None:
    """Return the generated tokens that an API reported, perhaps alone; None: it did not."""
    counts = next(filter(None, map(_counts, holders)), None)
    if counts is None or not counts.has(_OUTPUT):
        return None
    return _generated(counts, counts.largest((*_PROMPT, *_INPUT)))[0]


def _generated(counts: _Counts, prompt: int) -> tuple[int, int]:
    """Return the generated tokens, and those of reasoning among them.

    APIs differ in whether the former hold the latter: the total tells, where there is one.
    """
    output = counts.largest(_OUTPUT)
    inside, beside = counts.largest(_REASONING), counts.largest(_REASONING_BESIDE)
    reasoning, total = max(inside, beside), counts.largest(_TOTAL)
    prompt += counts.largest(_TOOL_RESULTS)
    apart = beside > 0
    if total == prompt + output:
        apart = False
    elif total == prompt + output + reasoning:
        apart = True
    apart = apart or reasoning > output
    return output + reasoning if apart else output, reasoning


def _counts(holder: Row) -> _Counts | None:
    """Return the counts in the usage of an answer or a row; None: it has no usage."""
    fields = holder.fields
    if not any(map(_may_count, fields)):  # as in most rows without one
        return None
    for name in USAGE_FIELDS:
        usage = fields.get(name)
        if type(usage) is dict:
            prefix = f"{holder.prefix}{name}."
            counts = _counted(Row(holder.path, holder.line, usage, prefix), usage, "")
            if counts.values:
                return counts
    for prefix in _OPEN_TELEMETRY:
        flat = {name: fields[name] for name in fields if name.startswith(prefix)}
        if flat:
            return _counted(holder, flat, prefix)
    # Beside the prompt itself, as in tables of gateways. An output alone is no usage.
    flat = {name: fields[name] for name in fields if _plain(name) in _COUNT_NAMES}
    counts = _counted(holder, flat, "")
    return counts if len(flat) > 1 and counts.has((*_PROMPT, *_INPUT)) else None


@lru_cache(maxsize=1024)
def _may_count(name: str) -> bool:
    """Return True if a field of this name may be a usage, or a count of one."""
    return (
        name in USAGE_FIELDS or name.startswith(_OPEN_TELEMETRY) or _plain(name) in _COUNT_NAMES
    )


def _counted(row: Row, fields: Mapping[str, Any], prefix: str) -> _Counts:
    values, spelled = {}, {}
    for name, value in _flat(fields, ""):
        plain = _plain(name.removeprefix(prefix))
        if value is not None:
            values[plain], spelled[plain] = value, name
    return _Counts(row, values, spelled, telemetry=bool(prefix))


def _flat(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an object and of those inside it, by dotted names."""
    for name, value in fields.items():
        if type(value) is dict:
            yield from _flat(value, f"{prefix}{name}.")
        elif type(value) is list:
            # Bedrock's writes by TTL.
            for entry in value:
                if type(entry) is dict and "ttl" in entry:
                    yield f"{prefix}{name}.{entry['ttl']}", entry.get("inputTokens")
        else:
            yield f"{prefix}{name}", value


@lru_cache(maxsize=1024)
def _plain(name: str) -> str:
    return _SIGNS.sub("", name.lower())
