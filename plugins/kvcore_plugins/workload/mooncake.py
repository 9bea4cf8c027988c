"""The Mooncake trace format, and the trace that comes with kvcore."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

import attrs
from attrs.converters import optional
from attrs.validators import ge

from kvcore import Request, Workload
from kvcore.files import as_path
from kvcore.request import chain_keys
from kvcore.units import INT64_LIMIT, NS_PER_S
from kvcore.workloads import file_digest
from kvcore_plugins.workload.rows import rows

BUNDLED_REQUESTS = 12_031

PUBLISHED_KEY_TOKENS = 512
"""Prompt tokens of a key in the traces that were published with Mooncake."""

_MILLISECOND = NS_PER_S // 1000


@attrs.define(eq=False)
class Mooncake(Workload):
    """Requests of a deployed chat service, with a key for each block of the prompt.

    A line is an object of `timestamp` (ms), `input_length`, `output_length` (tokens) and
    `hash_ids`. Rows are in order of arrival; the id of a request is its line, from 0.

    Source: Qin et al., Mooncake, FAST'25.

    Attributes:
        path: the file; None is the conversation trace that comes with kvcore.
        chain: whether `hash_ids` are hashes of each block alone, to be chained here.
        key_tokens: number of prompt tokens of a key, which the file does not have.
    """

    name: ClassVar[str] = "mooncake"
    later_options = ("key_tokens",)
    line_fields = (("timestamp", "input_length", "hash_ids"),)

    path: Path | None = attrs.field(default=None, converter=optional(as_path))
    chain: bool = False
    key_tokens: int = attrs.field(default=PUBLISHED_KEY_TOKENS, validator=ge(1))

    def __iter__(self) -> Iterator[Request]:
        """Yield one request for each row. Keeps one row in memory."""
        earliest = 0
        for row in rows(self._file):
            arrival = row.natural("timestamp", below=INT64_LIMIT // _MILLISECOND)
            expected = f"{earliest} or later (sorted rows)"
            earliest = row.in_order("timestamp", arrival, earliest, expected)
            prompt = row.natural("input_length", 1)
            hint = "; the option key_tokens says how many"
            keys = row.prompt_keys("hash_ids", prompt, self.key_tokens, hint=hint)
            yield Request(
                id=row.line - 1,
                arrival=arrival * _MILLISECOND,
                prompt_tokens=prompt,
                output_tokens=row.natural("output_length"),
                keys=chain_keys(keys) if self.chain else keys,
                key_tokens=self.key_tokens,
            )

    @property
    def digest(self) -> str:
        """The digest of the file's bytes, and of the options that have no default."""
        options: dict[str, Any] = {"chain": True} if self.chain else {}
        if self.key_tokens != PUBLISHED_KEY_TOKENS:
            options["key_tokens"] = self.key_tokens
        return file_digest(self._file, **options)

    @property
    def size(self) -> int | None:
        """The number of requests, known for the trace that comes with kvcore."""
        return BUNDLED_REQUESTS if self.path is None else None

    @property
    def _file(self) -> Path:
        if self.path is not None:
            return self.path
        return Path(str(files("kvcore") / "data" / "mooncake_conversation.jsonl.gz"))
