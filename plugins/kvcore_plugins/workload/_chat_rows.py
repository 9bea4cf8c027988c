"""One reading of a file of chats: its rows in order of time, as requests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import attrs
import orjson

from kvcore import InputError, Request
from kvcore.request import Key, block_keys
from kvcore.units import INT64_LIMIT, NS_PER_S
from kvcore.untrusted import parse_digits
from kvcore.workloads import lines
from kvcore_plugins.workload._chat_log import log_parts
from kvcore_plugins.workload._chat_options import ChatFile
from kvcore_plugins.workload._encoders import ESTIMATES, Encoder, encoder_of
from kvcore_plugins.workload._messages import (
    ANSWER,
    IMAGES,
    RESPONSE,
    TOKEN_IDS,
    Answer,
    answer_indices,
    answer_of,
    beside_answer,
    chat_body,
    chat_field,
    fault_of,
    generated_nothing,
    is_response,
    messages_of,
    nested,
    reasoning_of,
    text_of,
    times_of,
    token_ids,
    unpacked,
    unusable,
)
from kvcore_plugins.workload.left_out import LeftOut, models_note, no_model, unread_fields
from kvcore_plugins.workload.logged import LoggedRequest, PromptPart
from kvcore_plugins.workload.rows import Names, Pending, Row, parse_row, time_order
from kvcore_plugins.workload.times import HEAD, Clock, Timed, TimeOrder, finest
from kvcore_plugins.workload.turns import Turns
from kvcore_plugins.workload.usage import Usage, generated_tokens, reported_note, usage_of

_HEAD_TOKENS = 250_000
_ISOLATING = frozenset(("cache_salt", "cache_salt_id", "extra_key", "lora_request", "lora_name",
              "lora_path", "lora", "adapter_id", "adapter"))  # fmt: skip
# Of fields whose names would say that they change a request, those that do not, or are read.
_KNOWN = frozenset((
    *_ISOLATING, "reasoning_content", "reasoning_effort", "prompt_cache_key",
    "prompt_cache_retention", "background", "usage", "cached_tokens", "prompt_cache_hit_tokens",
))  # fmt: skip
# Largest ratio of the tokens that are reported to those of the texts, either way, with which
# the texts are taken to be the prompts.
_RATIO = 2.0
# Names of fields: words in those of times, and those that may be what an option asks for.
_TIME = "time|date|stamp|created"
_LIKELY = re.compile(rf"{_TIME}|_at$|(^|_)ts$", re.IGNORECASE)
_PROMPT = re.compile(r"(prompt|question|instruction|query|input|text)\w*$", re.IGNORECASE)
_ROLES: Sequence[tuple[str, re.Pattern[str], tuple[type, ...]]] = tuple(
    (role, re.compile(rf"({words})$", re.IGNORECASE), kinds)
    for role, words, kinds in (
        ("answer", r"(answer|completion|repl|respons|output)\w*", (str,)),
        ("usage", r"(usage|tokens)\w*", (dict,)),
        ("model", r"model(_?(name|id))?", (str,)),
        ("time", rf"{_TIME}|_at|ts", (int, float, str)),
    )
)
# Fields where an answer would be, and those inside them that have its text.
_ANSWERED = re.compile(
    r"(^|[._])(answer|completion|reply|replie|response|output|generation|generated)s?"
    r"(_?(text|message|body|content))?(\.([^.]+\.)*(text|content|value|parts|messages))?$",
    re.IGNORECASE,
)
_DEPTH = 4


class Exchange(NamedTuple):
    """A row of a log: what was asked, and what was answered.

    Attributes:
        row: the row.
        body, response: the objects in it that have the request and the answer; the row itself
            if it has none.
    """

    row: Row
    body: Row
    response: Row


@attrs.define
class _Tokens:
    """The tokens of a row, before their lengths are compared with those that were reported.

    Attributes:
        exchange: the row.
        prompts: of each turn, the tokens of the prompt.
        answers: of each turn, those of what was generated; None: it is not recorded.
        usage: the tokens that were reported.
        explicit: whether the API caches at breakpoints alone.
        parts: the content blocks of the prompt; None: it is no logged chat.
        hidden: whether tokens were generated between the prompt and the answer that are not
            recorded.
        said: what a later prompt has of the answer, where that is not all that was generated.
        salt: the model, with all that keeps the cache of the request apart.
        output: the number of tokens that were generated, where it alone is recorded.
    """

    exchange: Exchange
    prompts: list[list[int]]
    answers: list[list[int] | None]
    usage: Usage | None = None
    explicit: bool = False
    parts: tuple[PromptPart, ...] | None = None
    hidden: bool = False
    said: list[int] | None = None
    salt: str | None = None
    output: int | None = None


class Reading:
    """One pass over a file of chats, and what is to be said about it.

    Args:
        chat: the workload, whose options say how to read.

    Attributes:
        left_out: rows that are no requests.
        turns: the rows that continue earlier ones.
    """

    def __init__(self, chat: ChatFile) -> None:
        self._chat = chat
        self.turns = Turns()
        self._names = chat.field_names
        self._tenants = Names(self._names.get("tenant"))
        self._encoder: Encoder = encoder_of(chat.tokens, chat.tokenizer, chat.image_tokens)
        self.left_out = LeftOut(strict=chat.strict)
        self._models = Counter[str]()
        self._unread: list[str] = []
        self._rows = self._unanswered = self._hidden = self._answers = self._unfound = 0
        self._likely_answer = ""
        self._lacking = Counter[str]()
        self._estimated = self._unlike = False
        self._other_prompts = self._other_outputs = 0
        self._reported = self._counted = self._cached = 0
        self._key_text = chat.key_tokens
        self._clock: Clock | None = None
        self._order: TimeOrder | None = None
        self._likely: list[str] = []

    def sessions(self) -> Iterator[tuple[int, Callable[[], list[Pending]]]]:
        """Yield the arrival of the first request of each row, and its reader.

        Readers count what `notes` tells of the rows.
        """
        drawn, first = self._chat.drawn_arrivals(), None
        for time, tokens in self._measured(self._tokens()):
            self._rows += 1
            if (model := _model_of(tokens.exchange)) is not None:
                self._models[model] += 1
            if time is None:
                start = next(drawn)
            else:
                first = time if first is None else first
                start = time - first
            yield start, partial(self._turns, tokens, start)
        if not self._rows:
            chosen = self._chat.only_model
            if chosen is not None and not models_in_head(self._chat):
                raise no_model(self._chat.path, chosen, self._models)
            why = self.left_out.first
            if why is not None and self.left_out.reasons.total() == 1:
                raise why
            notes = "; ".join(self.left_out.notes)
            msg = f"{self._chat.path}: no row is a request of a prompt; {notes}"
            raise InputError(msg)

    def timed(self) -> bool:
        """Return True if the rows have times."""
        return self._clock is not None

    def notes(self) -> list[str]:
        """Return the assumptions about the rows that were read, and what was left out."""
        chat = self._chat
        notes = [ESTIMATES[chat.tokens]] if self._estimated and not chat.tokenizer else []
        if self._order is not None and self._clock is not None:
            notes += self._order.notes(self._clock)
        elif chat.rate is None:
            likely = " or ".join(f"time={name}" for name in self._likely)
            hint = f" (or does {likely} have them?)" if likely else ""
            notes.append(
                f"the file has no times{hint}: all arrives at once, a conversation's turns in "
                "a row; rate=PER_SECOND and think=SECONDS spread them"
            )
        if self.turns.linked:
            notes.append(
                f"rows that continue an earlier one: {self.turns.linked:,}, each sent after "
                "the answer that it quotes and the time between the two; turns=false sends all "
                "at their times"
            )
        notes += [f"rows without {name}: {count:,}" for name, count in self._lacking.items()]
        notes += models_note(self._models, chat.only_model, "only_model")
        notes += self.left_out.notes
        notes += self._usage_notes()
        if self._unanswered:
            notes.append(
                f"requests without an answer: {self._unanswered}, each of which is said "
                f"to generate output_tokens={chat.output_tokens}"
            )
        if self._unread:
            notes.append(f"fields that are not read: {', '.join(self._unread)}")
        return notes

    def reported_hit_ratio(self) -> float | None:
        """Return the share of the reported prompt tokens that was cached; None: none was."""
        return self._cached / self._reported if self._cached else None

    def _usage_notes(self) -> Iterator[str]:
        if (ratio := self.reported_hit_ratio()) is not None:
            yield reported_note(ratio)
        if self._unfound:
            named, likely = self._names.get("answer"), self._likely_answer
            hint = f"answer={named} has none" if named else "answer=FIELD names it"
            hint += f", such as answer={likely}" if likely else ""
            yield f"rows whose answer was not found: {self._unfound:,} ({hint})"
        if self._other_prompts or self._other_outputs:
            others = f" and {self._other_outputs:,} answers in {self._rows:,} rows"
            text = (
                f"lengths are those of usage, which differ from the texts' in "
                f"{self._other_prompts:,} prompts ({self._reported:,} tokens, by the texts "
                f"{self._counted:,})"
            )
            text += others if self._answers else f", in {self._rows:,} rows without an answer"
            if self._key_text != self._chat.key_tokens:
                text += (
                    f"; a key of {self._chat.key_tokens} tokens is one of {self._key_text} "
                    "tokens of the texts"
                )
            yield text
        if self._hidden:
            form = ", or in another form than their prompts" if self._unlike else ""
            yield (
                f"answers with tokens that are not in the file, such as reasoning{form}: "
                f"{self._hidden:,}; what follows their prompts in the cache is unknown, and "
                "nothing hits it"
            )

    def _tokens(self) -> Iterator[tuple[int | None, _Tokens]]:
        """Yield the time and the tokens of each row that can be read, in order of time."""
        for time, exchange in self._timed():
            if self._rows < HEAD:
                self._look_for_unread(exchange)
            try:
                tokens = self._tokens_of(exchange)
                tokens.salt = _salt_of(exchange, self._chat.isolate)
                told = tokens.usage is not None and tokens.usage.output_tokens > 0
                if not (told or all(tokens.answers)):
                    tokens.output = _output_count(exchange)
            except InputError as error:
                self.left_out.add(getattr(error, "reason", "not readable"), error)
            else:
                yield time, tokens

    def _timed(self) -> Iterator[tuple[int | None, Exchange]]:
        """Yield each row that may be a request, in order of time; without times as they are."""
        chat, named = self._chat, self._names.get("time")
        source = self._chosen(exchanges(chat, self.left_out, self._names))
        head = list(islice(source, HEAD))
        rows, clock = chain(head, source), _time_clock(head, named, chat.unit)
        if clock is None:
            self._likely = _likely_times(head)
            if named is not None and head:
                msg = f"{chat.path}: no field {named!r} in most of the first rows"
                msg += f"; there are: {', '.join(self._likely)}" if self._likely else ""
                raise InputError(msg)
            yield from ((None, exchange) for exchange in map(self._untimed, rows))
            return
        field = clock.name
        chat.refuse_rate(next(row for row, _, _ in head if times_of(row, field)), field)
        clock.zone = chat.zone
        self._clock, self._order = clock, time_order(clock)
        for time, _, exchange in self._order.sort(self._clocked(rows, clock)):
            yield time, exchange

    def _chosen(self, source: Iterable[Exchange]) -> Iterator[Exchange]:
        """Yield the rows of the models that are read; count those of others."""
        chosen = self._chat.only_model
        for exchange in source:
            model = _model_of(exchange)
            if chosen in (None, model):
                yield exchange
            elif model is not None:
                self._models[model] += 1

    def _clocked(self, rows: Iterable[Exchange], clock: Clock) -> Iterator[Timed[Exchange]]:
        """Yield the rows that have a time."""
        field, latest = clock.name, -INT64_LIMIT
        for exchange in rows:
            row = exchange.row
            holder = row if row.fields.get(field) is not None else nested(row, *RESPONSE)
            try:
                if holder.fields.get(field) is None:
                    raise row.error(field=field, expected="a time, as the first row has")
                time = holder.time(field, clock)
                if self._chat.strict:
                    expected = "no earlier time than before (sort the rows by time)"
                    latest = holder.in_order(field, time, latest, expected)
            except InputError as error:
                self.left_out.add("without a time", error)
            else:
                yield time, row.line, exchange

    def _untimed(self, exchange: Exchange) -> Exchange:
        """Return a row of a file without times, or refuse one with a time if that is strict."""
        if self._chat.strict and (times := times_of(exchange.row)):
            expected = "none, as in the first row"
            raise exchange.row.error(field=next(iter(times)), expected=expected)
        return exchange

    def _look_for_unread(self, exchange: Exchange) -> None:
        row, body = exchange.row, exchange.body
        clock = () if self._clock is None else (self._clock.name, self._clock.date or "")
        read = _KNOWN.union(clock, self._names.values(), _isolating(self._chat.isolate))
        for name in unread_fields({**row.fields, **body.fields}, read):
            value = body.fields.get(name, row.fields.get(name))
            if name in self._unread or value is None or (
                name == "reasoning" and type(value) is not str
            ):  # fmt: skip
                continue
            self._unread.append(name)
            if self._chat.strict:
                raise row.error(field=name, expected="no field that is not read", got=value)

    def _tokens_of(self, exchange: Exchange) -> _Tokens:
        """Return the tokens of the prompts and answers of a row."""
        row, body, response = exchange
        holders = [response] if response is row else [response, row]
        if "usage" in self._names:
            holders.reverse()
        usage, explicit = usage_of(*holders)
        answer = answer_of(response)
        if answer is None and generated_nothing(response):
            raise unusable(row, "without generated tokens")
        ids, unlike = _prompt_ids(exchange), False
        if answer is not None and self._chat.tokenizer is None:
            # Estimated tokens are none of the model's: these neither follow nor precede them.
            if ids is None and answer.text:
                answer = answer._replace(tokens=None)
            is_text = answer.tokens is None and bool(answer.text or answer.reasoning)
            unlike = answer.tokens is not None if ids is None else is_text
        self._estimated = self._estimated or ids is None or unlike
        if ids is None and chat_field(body.fields) is None:
            ids = self._text_tokens(body)
        if ids is not None:
            tokens = self._one(exchange, ids, answer, usage, explicit=explicit)
        else:
            tokens = self._chat_tokens(exchange, answer, usage, explicit=explicit)
        if unlike:
            tokens.hidden, tokens.said, self._unlike = True, None, True
        return tokens

    def _text_tokens(self, body: Row) -> list[int]:
        """Return the tokens of a prompt that is a text, perhaps alone in a list."""
        text = body.fields.get("prompt")
        if type(text) is list and len(text) == 1:
            (text,) = text
        if type(text) is not str:
            raise body.error(field="prompt", expected="a text")
        if not (tokens := self._encoder.begin(text)):
            raise body.error(field="prompt", expected="at least one token")
        return tokens

    def _chat_tokens(
        self, exchange: Exchange, answer: Answer | None, usage: Usage | None, *, explicit: bool
    ) -> _Tokens:
        """Return the tokens of a chat: of one request, or of each answer in it."""
        body, encoder = exchange.body, self._encoder
        messages = messages_of(body)
        answered = messages[-1]["role"] == ANSWER and len(messages) > 1
        logged = chat_field(body.fields) == "messages"
        if answer is not None or (logged and (usage is not None or not answered)):
            if answer is None and answered:
                answer = Answer(text_of(messages[-1]), reasoning_of(messages.pop()))
                body.fields["messages"] = body.fields["messages"][:-1]  # no part of the prompt
            ((prompt, ends),) = encoder.prompts(messages, [len(messages)], body)
            tokens = self._one(exchange, prompt, answer, usage, explicit=explicit)
            if logged:
                tokens.parts, marked = log_parts(body, ends, len(prompt))
                tokens.explicit = explicit or marked
            return tokens
        indices = answer_indices(messages)
        prompts = [prompt for prompt, _ in encoder.prompts(messages, indices, body)]
        answers = [
            self._encoded(reasoning_of(messages[index]), text_of(messages[index]))
            if index < len(messages)
            else None
            for index in indices
        ]
        return _Tokens(exchange, prompts, answers)

    def _one(
        self,
        exchange: Exchange,
        prompt: list[int],
        answer: Answer | None,
        usage: Usage | None,
        *,
        explicit: bool,
    ) -> _Tokens:
        """Return the tokens of a row that is one request."""
        if answer is None:
            generated = None
        else:
            generated = answer.tokens or self._encoded(answer.reasoning, answer.text)
        tokens = _Tokens(exchange, [prompt], [generated], usage, explicit)
        if usage is not None and answer is not None and answer.choices == 1:
            recorded = len(generated or ())
            untold = usage.reasoning_tokens > 0 and not (answer.reasoning or answer.tokens)
            tokens.hidden = untold or usage.output_tokens > 2 * recorded + 8
        if answer is not None and (answer.reasoning or answer.choices > 1 or tokens.hidden):
            tokens.said = answer.tokens or self._encoded("", answer.text)
        return tokens

    def _encoded(self, reasoning: str, text: str) -> list[int]:
        tokens = self._encoder.encode(text) if text else []
        return [*self._encoder.encode(reasoning), *tokens] if reasoning else tokens

    def _measured(
        self, source: Iterator[tuple[int | None, _Tokens]]
    ) -> Iterator[tuple[int | None, _Tokens]]:
        """Yield `source`, after its first rows have told the tokens of text in a key.

        Texts are counted by another tokenizer than the server's, or estimated: a key of a block
        is that of as much text as has the tokens of a block in the reported lengths. So equal
        prefixes have equal keys, and as many keys as the server had blocks.
        """
        head, tokens_held = [], 0
        for time, tokens in islice(source, HEAD):
            head.append((time, tokens))
            tokens_held += sum(map(len, tokens.prompts))
            if tokens_held > _HEAD_TOKENS:
                break
        ratios = [
            tokens.usage.prompt_tokens / len(tokens.prompts[0])
            for _, tokens in head
            if tokens.usage is not None
        ]
        ratio = sorted(ratios)[len(ratios) // 2] if ratios else 1.0
        if 1 / _RATIO <= ratio <= _RATIO:
            self._key_text = max(1, round(self._chat.key_tokens / ratio))
        yield from chain(head, source)

    def _scaled(self, tokens: int) -> int:
        """Return the tokens that a number of tokens of the texts stands for."""
        return max(1, tokens * self._chat.key_tokens // self._key_text)

    def _turns(self, tokens: _Tokens, start: int) -> list[Pending]:
        """Return the turns of a row, the last one first; count what `notes` tells of them."""
        exchange, chat = tokens.exchange, self._chat
        serial, think = exchange.row.line - 1, round(chat.think * NS_PER_S)
        salt, size = tokens.salt, chat.key_tokens
        tenant = self._tenants.of(_tenant_of(exchange, self._names.get("tenant", "tenant")))
        self._lacking.update(self._lacks(exchange, tenant))
        alone = len(tokens.prompts) == 1
        make, turns = self._maker(tokens), list[Pending]()
        for turn, (prompt, answer) in enumerate(
            zip(tokens.prompts, tokens.answers, strict=True)
        ):
            usage, generated = tokens.usage, answer or []
            self._answers += answer is not None
            if answer is None and alone:
                likely = _likely_answer(exchange.row.fields)
                self._unfound += "answer" in self._names or bool(likely)
                self._likely_answer = self._likely_answer or likely
            prompt_tokens = usage.prompt_tokens if usage else self._scaled(len(prompt))
            output = self._output_tokens(tokens, generated)
            if output is None:
                self._unanswered += 1
                output = chat.output_tokens
            if usage is not None:
                self._reported += prompt_tokens
                self._counted += len(prompt)
                self._cached += usage.read_tokens
                self._other_prompts += prompt_tokens != len(prompt)
                self._other_outputs += answer is not None and output != len(generated)
            # Reported lengths and those of the text differ by some blocks. Of a prompt with
            # many more tokens than its text, such as those of an image, the rest is unknown.
            known, full_blocks = len(prompt) // self._key_text, prompt_tokens // size
            last = (prompt_tokens + output) // size
            if tokens.hidden or full_blocks - known > max(1, full_blocks // 10):
                self._hidden += answer is not None
                full_blocks, generated = min(full_blocks, known), []
            keys = block_keys([*prompt, *generated], self._key_text, salt=salt)
            arrival = start + turn * think
            build = partial(
                make,
                id=serial if alone else f"{serial}/{turn}",
                arrival=arrival,
                prompt_tokens=prompt_tokens,
                output_tokens=output,
                keys=keys[:full_blocks],
                key_tokens=size,
                salt=salt,
                tenant=tenant,
                session=None if alone else str(serial),
                after=f"{serial}/{turn - 1}" if turn else None,
                think_time=think if turn else 0,
                output_keys=keys[full_blocks:last] if generated and output else (),
            )
            turns.append((arrival, build))
        turns.reverse()
        return turns

    def _quoted(self, tokens: _Tokens) -> tuple[Key, int] | None:
        """Return the last key and the tokens of what later prompts quote, if it is not all."""
        (prompt, *_), said, usage = tokens.prompts, tokens.said, tokens.usage
        if said is None:
            return None
        asked, told = self._scaled(len(prompt)), self._scaled(len(said)) if said else 0
        known = [*prompt, *said]
        if usage is not None:
            asked = usage.prompt_tokens
            told = min(told, usage.output_tokens - usage.reasoning_tokens)
            if tokens.hidden and not usage.reasoning_tokens:
                known = prompt  # what is not in the file may have been said
        keys = block_keys(known, self._key_text, salt=tokens.salt)
        return (keys[-1], asked + told) if keys else None

    def _lacks(self, exchange: Exchange, tenant: str | None) -> Iterator[str]:
        """Yield the options that name a field which a row lacks, and would be read unsaid."""
        found = {**exchange.row.fields, "tenant": tenant}
        for role in ("tenant", "usage", "model"):
            if role in self._names and found.get(role) is None:
                yield f"{role}={self._names[role]}"
        for name in _isolating(self._chat.isolate):
            if all(_dotted(holder, name) is None for holder in _holders(exchange)):
                yield f"isolate={name}"

    def _output_tokens(self, tokens: _Tokens, generated: list[int]) -> int | None:
        """Return the generated tokens: as reported, or of the answer; None: it has neither."""
        if tokens.usage is not None and tokens.usage.output_tokens:
            return tokens.usage.output_tokens
        if generated:
            return self._scaled(len(generated))
        return tokens.output

    def _maker(self, tokens: _Tokens) -> Callable[..., Request]:
        """Return the function that builds a row's requests."""
        if tokens.usage is None and tokens.parts is None:
            return Request
        return partial(
            LoggedRequest,
            quoted=self._quoted(tokens),
            parts=tokens.parts or (),
            explicit=tokens.explicit,
            usage=tokens.usage,
            text_tokens=len(tokens.prompts[0]),
            key_text_tokens=self._key_text,
        )


def models_in_head(chat: ChatFile) -> list[str]:
    """Return the models of the first rows of a file that name one."""
    head = islice(exchanges(chat, LeftOut(strict=False), chat.field_names), HEAD)
    models = filter(None, map(_model_of, head))
    return [name for name in models if chat.only_model in (None, name)]


def _model_of(exchange: Exchange) -> str | None:
    """Return the model that a row names: what was asked for, rather than what answered."""
    row, body, response = exchange
    names = (holder.fields.get("model") for holder in (body, row, response))
    return next((name for name in names if type(name) is str and name), None)


def exchanges(
    chat: ChatFile, left_out: LeftOut, names: Mapping[str, str]
) -> Iterator[Exchange]:
    """Yield the rows of a file that may be requests; count the others in `left_out`.

    Raises:
        InputError: the file cannot be read, or with `strict` the first other row.
    """
    for line_number, line in lines(chat.path):
        try:
            row = parse_row(chat.path, line_number, line)
        except InputError as error:
            left_out.add("not readable", error)
            continue
        exchange = _exchange(row, names, chat)
        fault = fault_of(row, exchange.body, exchange.response)
        if fault is None and not _has_prompt(exchange):
            fault = "without a prompt"
        if fault is None:
            yield exchange
        else:
            left_out.add(fault, unusable(row, fault))


def _time_clock(head: list[Exchange], named: str | None, unit: str | None) -> Clock | None:
    """Return the clock of the field with the times of the first rows; None: most have none.

    Args:
        head: the first rows.
        named: the field that an option gives; None: those with usual names are looked at.
        unit: the unit that an option gives.
    """
    samples = [times_of(row) | times_of(row, named) for row, _, _ in head]
    dates = list(dict.fromkeys(name for times in samples for name in times))
    names = dates if named is None else [named]
    if clock := finest(names, samples, unit, dates):
        return clock
    # A field that most rows have counts even if others lack it, or have no time in it: these
    # rows are left out.
    counts = {name: sum(name in times for times in samples) for name in names}
    field = next((name for name, count in counts.items() if 2 * count > len(head)), None)
    return None if field is None else Clock(field, unit)


def _likely_times(head: list[Exchange]) -> list[str]:
    """Return the fields of the first row that may be times by their names."""
    return [
        name
        for name, value in (head[0].row.fields.items() if head else ())
        if _LIKELY.search(name) and type(value) in (int, float, str)
    ]


def _exchange(row: Row, names: Mapping[str, str], chat: ChatFile) -> Exchange:
    """Return a row with its request and its answer, whatever its format."""
    fields = row.fields
    texts = {name: fields.get(name) for name in ("response", "output")}
    unpacked(fields, "request", "body", "response", "messages", "input", "output")
    for name, text in texts.items():
        if type(text) is str and not is_response(fields[name]):
            fields[name] = text  # JSON that the model was asked for
    # All are read before one is put in the place of what another may lie in.
    named = [(role, name, _dotted(fields, name)) for role, name in names.items()]
    apart = [(name, _dotted(fields, name)) for name in _isolating(chat.isolate)]
    for role, name, value in named:
        if role == "time":
            fields[name] = value
        elif role == "tenant":
            apart.append((name, value))
        elif role == "answer":
            said = value if type(value) is dict else {"output": value}
            response = nested(row, *RESPONSE)
            fields["response"] = ({} if response is row else beside_answer(response)) | said
        else:
            fields[role] = value
            unpacked(fields, role)
    # What is not of the row may be of the request in it.
    fields |= {name: value for name, value in apart if value is not None}
    if "prompt" in names and "messages" not in names and fields["prompt"] is not None:
        # A chat beside the prompt that an option names is another text.
        body = Row(row.path, row.line, fields | dict.fromkeys(("messages", "conversations")))
    else:
        found = names.keys() & {"messages", "prompt"}
        body = chat_body(row if found else nested(row, "request", "body"))
    if "model" in names and fields["model"] is not None:
        body.fields["model"] = fields["model"]
    if chat.image_tokens is not None:
        body.fields[IMAGES] = chat.image_tokens
    return Exchange(row, body, nested(row, "response", "body"))


def _dotted(fields: Any, name: str) -> Any:
    """Return the value under a dotted name such as `payload.messages`; None: there is none."""
    if type(fields) is dict and name in fields:
        return fields[name]
    for part in name.split("."):
        if type(fields) is list:
            index = parse_digits(part)
            fields = None if index is None or index >= len(fields) else fields[index]
        else:
            fields = fields.get(part) if type(fields) is dict else None
    return fields


def likely_fields(line: bytes) -> dict[str, str]:
    """Return the fields of a row that look like those of a request, by the options' names.

    There are none if it has neither messages nor a text that may be a prompt.
    """
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    fields = list(_fields_in(row, "")) if type(row) is dict else []
    names: dict[str, str] = {}
    for name, value in fields:
        if type(value) is list and value and type(value[0]) is dict and "content" in value[0]:
            names.setdefault("messages", name)
    texts = [name for name, value in fields if type(value) is str and _PROMPT.search(name)]
    if not names and texts:
        names["prompt"] = texts[0]
    if not names:
        return {}
    for role, pattern, kinds in _ROLES:
        for name, value in fields:
            if type(value) in kinds and pattern.search(name) and name not in names.values():
                names[role] = name
                break
    return names


def _likely_answer(fields: dict[str, Any]) -> str:
    """Return the field of a row that looks like an answer; empty: none does."""
    found = (
        name
        for name, value in _fields_in(fields, "")
        if value and type(value) in (str, list) and _ANSWERED.search(name)
    )
    return next(found, "")


def _fields_in(fields: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an object and of those inside it, by dotted names."""
    for name, value in fields.items():
        yield f"{prefix}{name}", value
        if type(value) is dict and prefix.count(".") < _DEPTH:
            yield from _fields_in(value, f"{prefix}{name}.")


def _has_prompt(exchange: Exchange) -> bool:
    fields = exchange.body.fields
    if chat_field(fields) is not None:
        return True
    names = ("prompt", *TOKEN_IDS)
    return any(fields.get(name) is not None for name in names) or bool(_prompt_ids(exchange))


def _prompt_ids(exchange: Exchange) -> list[int] | None:
    """Return the token ids of a prompt that is no chat; None: it has none."""
    fields = exchange.body.fields
    if chat_field(fields) is not None:
        return None
    for value in (fields.get("prompt"), *map(fields.get, TOKEN_IDS)):
        if (ids := token_ids(value)) is not None:
            return ids
    return token_ids(exchange.response.fields.get("prompt_token_ids"))


def _salt_of(exchange: Exchange, isolate: str | None) -> str | None:
    """Return the model of a request, with all that keeps its cache apart from others'.

    Args:
        exchange: the row.
        isolate: further fields that do so, joined by `+`.
    """
    row, body, _ = exchange
    model = body.optional(body.text, "model", None) or row.optional(row.text, "model", None)
    apart: dict[str, Any] = {}
    for holder in _holders(exchange):
        for name in (*(holder.keys() & _ISOLATING), *_isolating(isolate)):
            value = _dotted(holder, name)
            if value not in (None, "", {}, []):
                apart.setdefault(name, value)
    if not apart:
        return model
    return orjson.dumps([model, apart], option=orjson.OPT_SORT_KEYS).decode()


def _isolating(isolate: str | None) -> list[str]:
    """Return the fields that the option `isolate` names."""
    return isolate.split("+") if isolate else []


def _holders(exchange: Exchange) -> Iterator[dict[str, Any]]:
    """Yield the objects of a row whose fields may keep its cache apart."""
    body = exchange.body.fields
    extra = body.get("extra_body")
    yield from (body, exchange.row.fields, *([extra] if type(extra) is dict else ()))


def _tenant_of(exchange: Exchange, name: str) -> str | None:
    """Return the tenant of a row, in the field `name` of it or of its request."""
    for holder in (exchange.row, exchange.body):
        value = _dotted(holder.fields, name)
        if type(value) in (str, int) and value != "":
            return str(value)
    return None


def _output_count(exchange: Exchange) -> int | None:
    """Return the number of tokens that were generated, if it is recorded without a prompt's."""
    row, body, response = exchange
    count = generated_tokens(response)
    for holder in (response, body, row):
        if count is None:
            count = holder.optional(holder.natural, "output_tokens", None)
    return count
