"""Texts as requests: prompts, chats and logs of an OpenAI-compatible server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, ClassVar

import attrs
import orjson
from attrs.converters import optional
from attrs.validators import ge, in_, lt

from kvcore import InputError, Request
from kvcore.files import as_path
from kvcore.lazy import import_extra
from kvcore.request import block_keys
from kvcore.units import NS_PER_S, as_float
from kvcore.workloads import file_digest
from kvcore_plugins.workload._messages import (
    ANSWER,
    RESPONSE,
    Message,
    answer_of,
    answer_places,
    messages_of,
    nested,
    output_count,
    text_of,
    times_of,
    tools_of,
)
from kvcore_plugins.workload.rows import Row, TimedFile, Turn, merged, rows, time_order
from kvcore_plugins.workload.times import HEAD, Clock, Timed, TimeOrder, finest

_PIECES = re.compile(r"[A-Za-z]{1,7}|[0-9]{1,3}|\n+|[^\sA-Za-z0-9]")
_ESTIMATES = {
    "words": "tokens are pieces of words, which only estimates what a model's tokenizer makes",
    "bytes": "tokens are bytes, some four times as many as a model's tokenizer makes",
}


@attrs.define(eq=False)
class Chat(TimedFile):
    """Prompts and chats as texts, whose keys are the hashes of their tokens.

    A row is a JSON object, of a file with one a line or of one JSON array:

    - `prompt`: a text, perhaps with its `completion`;
    - `messages`, each of `role` and `content`. If the last one is the assistant's, this is a
      recorded conversation, and each answer in it a request; else one request;
    - `conversations`, each of `from` and `value` (ShareGPT): a recorded conversation;
    - a logged request: an object with one of these under `request` or `body`, and what a
      server answered (`choices`, `usage`) beside it, or under `response`.

    The prompt of a turn is all text before its answer, so it starts with the prompt and the
    answer of the turn before, whose blocks it hits: the keys of answers are known. The output
    has the length of the answer, or else the number in `usage` or in `output_tokens` of the
    row, or else that of the option.

    A row arrives at its time, the finest one of the row and of the response in it; rows without
    times arrive at `rate`. Rows are sorted by time. The turns of a conversation follow one
    another: each is sent `think` seconds after the answer before it.

    The id of a request is its row, from 0, and in a conversation its turn, as in `17/2`.

    Attributes:
        path: path of the file.
        tokenizer: folder of a Hugging Face tokenizer, which counts exactly; its chat template
            is applied if it has one. Nothing is downloaded, and no code of the folder run.
        tokens: the tokens without a tokenizer: `words` (pieces of up to seven letters or three
            digits, signs, line ends) or `bytes`.
        time: field of the time; None: the finest one with a usual name.
        output_tokens: tokens that a request without an answer generates.
        think: seconds from an answer to the next message of its conversation.
        key_tokens: tokens of a key.
        unit, rate, seed: of times, as every `TimedFile` has them; without `rate` all rows
            without times arrive at once.
    """

    name: ClassVar[str] = "chat"
    line_fields = (("messages",), ("conversations",), ("prompt",))

    tokenizer: Path | None = attrs.field(default=None, converter=optional(as_path))
    tokens: str = attrs.field(default="words", validator=in_(tuple(_ESTIMATES)))
    time: str | None = None
    output_tokens: int = attrs.field(default=0, validator=ge(0))
    think: float = attrs.field(default=0.0, converter=as_float, validator=[ge(0), lt(1e9)])
    key_tokens: int = attrs.field(default=16, validator=ge(1))
    _timed: bool | None = attrs.field(default=None, init=False, repr=False)
    _clock: Clock = attrs.field(factory=lambda: Clock(""), init=False, repr=False)
    _order: TimeOrder | None = attrs.field(default=None, init=False, repr=False)
    _unanswered: list[int] = attrs.field(factory=list, init=False, repr=False)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests. Keeps the conversations in memory that have begun."""
        return merged(self._rows())

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if the line is an object with messages or a prompt of text."""
        try:
            fields = orjson.loads(first_line)
        except orjson.JSONDecodeError:
            return False
        if type(fields) is not dict:
            return False
        body = nested(Row(Path(), 1, fields), "request", "body").fields
        lists = type(body.get("messages")), type(body.get("conversations"))
        return list in lists or type(body.get("prompt")) is str

    @property
    def digest(self) -> str:
        """The digest of the file's bytes, the options, and the tokenizer's files."""
        options = self.options() | {"unit": self.unit or "s"}
        if self.tokenizer is not None:
            options["tokenizer"] = _digests(self.tokenizer)
        return file_digest(options.pop("path"), **options)

    @property
    def notes(self) -> Sequence[str]:
        """Assumptions about the rows that were read last."""
        if self._timed is None:
            return ()
        notes = [] if self.tokenizer else [_ESTIMATES[self.tokens]]
        if self._order is not None:
            notes += self._order.notes(self._clock)
        if not self._timed and self.rate is None:
            notes.append(
                "the file has no times: all arrives at once, a conversation's turns in a row; "
                "rate=PER_SECOND and think=SECONDS spread them"
            )
        if self._unanswered:
            notes.append(
                f"requests without an answer: {len(self._unanswered)}, each of which is said "
                f"to generate output_tokens={self.output_tokens}"
            )
        return notes

    def _rows(self) -> Iterator[tuple[int, Callable[[], list[Turn]]]]:
        """Yield the arrival of the first request of each row, and its reader."""
        encoder, unanswered = self._encoder(), list[int]()
        source = rows(self.path)
        head = list(islice(source, HEAD))
        samples = [times_of(row, self.time) for row in head]
        name = finest(list(samples[0]), samples, self.unit) or next(iter(samples[0]), None)
        self._timed, self._unanswered = name is not None, unanswered
        timed = self._timed_rows(chain(head, source), name)
        if name is not None:
            self._order = time_order(name)
            timed = self._order.sort(timed)
        first: int | None = None
        for time, _, row in timed:
            if first is None:
                first = 0 if name is None else time
            start = time - first
            yield start, partial(self._turns, row, start, encoder, unanswered)

    def _timed_rows(self, source: Iterable[Row], name: str | None) -> Iterator[Timed[Row]]:
        """Yield the rows with their times in the field `name`; None: drawn ones."""
        drawn, clock = self.drawn_arrivals(), Clock(name or "", self.unit)
        self._clock = clock
        for serial, row in enumerate(source):
            times = times_of(row, self.time if name is None else name)
            if bool(times) is not (name is not None):
                expected = (
                    "a time, as the first row has" if name else "none, as in the first row"
                )
                raise row.error(field=name or next(iter(times)), expected=expected)
            if name is None:
                yield next(drawn), row.line, row
                continue
            holder = row if row.fields.get(name) is not None else nested(row, *RESPONSE)
            if not serial:
                self.refuse_rate(row, name)
            yield holder.time(name, clock), row.line, row

    def _encoder(self) -> _Encoder:
        if self.tokenizer is not None:
            return _Tokenizer(_pretrained(self.tokenizer, _digests(self.tokenizer)))
        return _Encoder(_words if self.tokens == "words" else _bytes)

    def _turns(
        self, row: Row, start: int, encoder: _Encoder, unanswered: list[int]
    ) -> list[Turn]:
        """Return the turns of a row, the last one first."""
        body, response = nested(row, "request", "body"), nested(row, "response", "body")
        answer, count = answer_of(response), output_count(body, response)
        serial, think = row.line - 1, round(self.think * NS_PER_S)
        make: Callable[..., Request] = Request
        model = body.optional(body.text, "model", None)
        if "messages" not in body.fields and "conversations" not in body.fields:
            prompts = [encoder.encode(body.text("prompt"), begins=True)]
            answers = [answer]
        else:
            messages = messages_of(body)
            single = answer is not None or (
                "messages" in body.fields and messages[-1]["role"] != ANSWER
            )
            places = [len(messages)] if single else answer_places(messages)
            prompts = list(encoder.prompts(messages, places, body))
            if single and "messages" in body.fields:
                # Imported late: every command imports this module.
                from kvcore_plugins.workload._chat_log import logged  # noqa: PLC0415

                make = logged(body, response, encoder.ends, len(prompts[0]))
            answers = [
                text_of(messages[place]) if place < len(messages) else answer
                for place in places
            ]
        alone = len(prompts) == 1
        turns: list[Turn] = []
        for turn, (prompt, text) in enumerate(zip(prompts, answers, strict=True)):
            generated = encoder.encode(text) if text else []
            output = len(generated) or count
            if output is None:
                unanswered.append(serial)
                output = self.output_tokens
            if not prompt:
                raise body.error(field="prompt", expected="at least one token")
            whole = len(prompt) // self.key_tokens
            keys = block_keys([*prompt, *generated], self.key_tokens, salt=model)
            arrival = start + turn * think
            build = partial(
                make,
                id=serial if alone else f"{serial}/{turn}",
                arrival=arrival,
                prompt_tokens=len(prompt),
                output_tokens=output,
                keys=keys[:whole],
                key_tokens=self.key_tokens,
                salt=model,
                session=None if alone else str(serial),
                after=f"{serial}/{turn - 1}" if turn else None,
                think_time=think if turn else 0,
                output_keys=keys[whole:] or (),
            )
            turns.append((arrival, build))
        turns.reverse()
        return turns


class _Encoder:
    """Turns texts into tokens by a function; chats by a template of roles and line ends."""

    def __init__(self, tokens: Callable[[str], list[int]]) -> None:
        self._tokens = tokens
        self._ends: list[int] = []

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        """Return the tokens of a text, with the special ones of a prompt if it `begins` one."""
        del begins
        return self._tokens(text)

    def prompts(
        self, messages: list[Message], places: list[int], body: Row
    ) -> Iterator[list[int]]:
        """Yield the tokens of all messages before each of the ascending `places`."""
        tokens: list[int] = []
        self._ends = ends = []
        tools = tools_of(body)
        if tools:
            tokens += self.encode(orjson.dumps(tools).decode())
            ends.append(len(tokens))
        done = 0
        for place in places:
            for message in messages[done:place]:
                # Encoded apart, so that a prompt starts with the prompt and answer before it.
                for text in (f"{message['role']}\n", text_of(message), "\n"):
                    tokens += self.encode(text)
                ends.append(len(tokens))
            done = place
            yield [*tokens, *self.encode(f"{ANSWER}\n")]

    def ends(self, lengths: Sequence[int], total: int) -> Iterable[int]:
        """Return the ends of tools and messages of these lengths in the last prompt."""
        del lengths, total
        return self._ends


def _words(text: str) -> list[int]:
    return list(map(_piece_id, _PIECES.findall(text)))


def _bytes(text: str) -> list[int]:
    return list(text.encode())


class _Tokenizer(_Encoder):
    """The tokenizer of a model, and its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=begins)
        return tokens

    def prompts(
        self, messages: list[Message], places: list[int], body: Row
    ) -> Iterator[list[int]]:
        if self._tokenizer.chat_template is None:
            yield from super().prompts(messages, places, body)
            return
        for place in places:
            try:
                yield self._tokenizer.apply_chat_template(
                    messages[:place],
                    tools=tools_of(body),
                    add_generation_prompt=True,
                    return_dict=False,
                )
            except Exception as error:
                msg = f"{body.path}:{body.line}: the tokenizer's chat template fails: {error}"
                raise InputError(msg) from error

    def ends(self, lengths: Sequence[int], total: int) -> Iterable[int]:
        if self._tokenizer.chat_template is None:
            return super().ends(lengths, total)
        # A template gives only the length of the whole, which is divided by those of the texts.
        return [total * length // (sum(lengths) or 1) for length in accumulate(lengths)]


def _digests(folder: Path) -> tuple[str, ...]:
    """Return the digests of the files that determine the tokens of a tokenizer."""
    kinds = ("*.json", "*.jinja", "*.txt", "*.model")
    return tuple(file_digest(file) for kind in kinds for file in sorted(folder.glob(kind)))


@lru_cache(maxsize=1)
def _pretrained(folder: Path, digests: tuple[str, ...]) -> Any:
    """Return the tokenizer in a folder, whose files have these digests."""
    if not digests:
        why = "it has no tokenizer.json" if folder.is_dir() else "there is no such folder"
        msg = f"tokenizer={folder}: {why}"
        raise InputError(msg)
    needed = "tokenizer=FOLDER needs transformers"
    auto = import_extra("transformers", needed, "hf", ", or leave it out").AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason, _, _ = str(error).partition("\n")
        msg = f"tokenizer={folder}: transformers cannot read it: {reason}"
        raise InputError(msg) from error
    # A long prompt would print a warning.
    tokenizer.model_max_length = 1 << 62
    return tokenizer


@lru_cache(maxsize=1 << 18)
def _piece_id(piece: str) -> int:
    return int.from_bytes(blake2b(piece.encode(), digest_size=8).digest(), "little")
