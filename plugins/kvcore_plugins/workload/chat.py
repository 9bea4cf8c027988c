"""Texts as requests: prompts, chats and logs of an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import orjson

from kvcore import Request
from kvcore_plugins.workload._chat_options import ChatFile
from kvcore_plugins.workload._messages import is_chat, nested, token_ids, unpacked
from kvcore_plugins.workload.left_out import most_named
from kvcore_plugins.workload.rows import Row, merged

if TYPE_CHECKING:
    from kvcore_plugins.workload._chat_rows import Reading


@attrs.define(eq=False)
class Chat(ChatFile):
    """Prompts and chats as texts, whose keys are the hashes of their tokens.

    A row is a JSON object, of a file with one a line or of one JSON array:

    - `prompt`: a text, perhaps with its `completion`;
    - `messages`, each of `role` and `content`. If the last one is the assistant's, this is a
      recorded conversation, and each answer in it a request; else one request;
    - `conversations`, each of `from` and `value` (ShareGPT): a recorded conversation;
    - `input` of OpenAI's Responses, `contents` of Gemini;
    - token ids as `prompt` or `prompt_token_ids`;
    - a logged request: an object with one of these under `request` or `body`, and what a
      server answered (`choices`, `usage`) beside it, or under `response`.

    The prompt of a turn is all text before its answer, so it starts with the prompt and the
    answer of the turn before, whose blocks it hits: the keys of answers are known, unless
    reasoning that is not recorded stands before them. Lengths are those of the usage that a
    server reported, else those of the texts, else of `output_tokens` of the row or the option.

    Rows that are no completions, have failed, or cannot be read are left out, and noted.

    A row arrives at its time, the finest one of the row and of the response in it, and rows are
    sorted by it; rows without times arrive at `rate`. The turns of a conversation follow one
    another: each is sent `think` seconds after the answer before it. A row with a time whose
    prompt begins with the prompt and the answer of an earlier row is a later turn of it: it is
    sent after that answer, after the time between the two rows.

    The id of a request is its row, from 0, and in a conversation its turn, as in `17/2`.

    Attributes:
        path: path of the file.
        tokenizer: folder of a Hugging Face tokenizer, which counts exactly; its chat template
            is applied if it has one. Nothing is downloaded, and no code of the folder run.
        tokens: the tokens without a tokenizer: `words` (pieces of up to seven letters or three
            digits, signs, line ends) or `bytes`.
        time, messages, prompt, answer, usage, model: fields of a row, where they have other
            names or lie deeper than those above, such as `payload.messages`.
        tenant: the field of a row or of the request in it with the tenant, such as `user`;
            None: `tenant`, where rows have it, with numbers for the names.
        only_model: the model whose rows alone are read; None: those of all models are.
        fields: path of a TOML file with these names.
        image_tokens: tokens of an image, or of another part without a text; None: rows with
            such parts are left out.
        isolate: fields whose values keep equal prompts apart in the cache, joined by `+`, such
            as `user`; beside the model, `cache_salt` and LoRA adapters, which always do.
        strict: whether a row that would be left out, a field that changes the meaning and is
            not read, or rows that are not sorted are errors.
        turns: whether rows follow the rows that they continue; else each comes at its time.
        output_tokens: tokens that a request without an answer generates.
        think: seconds from an answer to the next message of its conversation.
        key_tokens: tokens of a key.
        unit, tz, rate, seed: of times, as every `TimedFile` has them; without `rate` all rows
            without times arrive at once.
    """

    name: ClassVar[str] = "chat"
    line_fields = (("messages",), ("conversations",), ("prompt",))

    _reading: Reading | None = attrs.field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests. Keeps the conversations in memory that have begun."""
        # Imported late: every command imports this module.
        from kvcore_plugins.workload._chat_rows import Reading  # noqa: PLC0415

        self._reading = reading = Reading(self)
        requests = merged(reading.sessions())
        return reading.turns.link(requests, reading.timed) if self.turns else requests

    @classmethod
    def recognises(cls, first_line: bytes) -> bool:
        """Return True if the line is an object with messages or a prompt of text."""
        try:
            fields = orjson.loads(first_line)
        except orjson.JSONDecodeError:
            return False
        # Reports of inference-perf have answers as raw chunks, but all lengths: see `lengths`.
        if type(fields) is not dict or fields.keys() >= {"start_time", "request", "info"}:
            return False
        unpacked(fields, "request", "body", "messages", "input")
        body = nested(Row(Path(), 1, fields), "request", "body").fields
        prompts = (body.get("prompt"), body.get("prompt_token_ids"), body.get("input_ids"))
        return (
            type(body.get("conversations")) is list
            or is_chat(body)
            or any(type(prompt) is str or token_ids(prompt) is not None for prompt in prompts)
        )

    @classmethod
    def suggestion(cls, head: Sequence[bytes]) -> str:
        """Return options that name the fields of a row with messages or a long text."""
        from kvcore_plugins.workload._chat_rows import likely_fields  # noqa: PLC0415

        names = next(filter(None, map(likely_fields, head)), {})
        return ",".join(f"{role}={name}" for role, name in names.items())

    def _digested(self) -> dict[str, Any]:
        """Return the options, with the tokenizer's files and the fields as they are read."""
        options = super()._digested()
        if self.tokenizer is not None:
            from kvcore_plugins.workload._encoders import tokenizer_digests  # noqa: PLC0415

            options["tokenizer"] = tokenizer_digests(self.tokenizer)
        if self.fields is not None:
            options["fields"] = self.field_names
        return options

    @property
    def served_model(self) -> str | None:
        """The model that most of the first rows name."""
        from kvcore_plugins.workload._chat_rows import models_in_head  # noqa: PLC0415 - as above

        return most_named(models_in_head(self))

    @property
    def reported_hit_ratio(self) -> float | None:
        """The share of the reported prompt tokens that was cached; None: no row reports any."""
        return None if self._reading is None else self._reading.reported_hit_ratio()

    @property
    def notes(self) -> Sequence[str]:
        """Assumptions about the rows that were read last, and the rows that were left out."""
        return () if self._reading is None else self._reading.notes()
