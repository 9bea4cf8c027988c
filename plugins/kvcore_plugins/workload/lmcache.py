"""The lookups that an LMCache server logs: which chunks each request asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from fractions import Fraction
from typing import ClassVar

import attrs
from attrs.validators import ge

from kvcore import Request
from kvcore.blake2 import blake2b
from kvcore.request import KEY_BYTES
from kvcore.units import NS_PER_S
from kvcore_plugins.workload.file_workload import FileWorkload
from kvcore_plugins.workload.left_out import models_note, no_model
from kvcore_plugins.workload.rows import Row, rows

_HASH = re.compile(r"-?0x[0-9a-fA-F]{1,128}")


@attrs.define(eq=False)
class LMCache(FileWorkload):
    """Requests as an LMCache server looked them up, with a key for every full chunk.

    A line is an object of `timestamp` (s), `request_id`, `model_name`, `chunk_size` and
    `seq_len` (tokens), and `chunk_hashes`, in hexadecimal, chained; other fields are ignored.
    A key is a hash of model and chunk hash: two models share nothing, though their tokens
    may be equal. Requests have their model for a salt. Arrivals count from the first row's;
    the id of a request is its own and its line, as in `req-abc/17`, since one that is looked
    up again has a line again.

    The log is written by several threads: a row up to a second earlier than the one before
    it arrives with that one.

    Source: LMCache, `mp_observability/subscribers/logging/lookup_hash.py`
    (`--lookup-hash-log-dir`).

    Attributes:
        path: path of the file.
        model: read only the rows of this `model_name`; None: all.
        output_tokens: tokens that each request generates, which the log does not record.
    """

    name: ClassVar[str] = "lmcache"
    line_fields = (("chunk_size", "seq_len", "chunk_hashes"),)

    model: str | None = None
    output_tokens: int = attrs.field(default=0, validator=ge(0))

    _models: Counter[str] = attrs.field(factory=Counter, init=False, repr=False)

    def __iter__(self) -> Iterator[Request]:
        """Yield one request for each row. Keeps one row in memory."""
        key_tokens = self.key_tokens
        first, latest = None, 0
        self._models = models = Counter[str]()
        for row in self._rows(models):
            time = _time(row)
            first = time if first is None else first
            latest = max(latest, first)
            if time < latest - NS_PER_S:
                expected = f"no time more than a second before {latest / NS_PER_S}"
                raise row.error(field="timestamp", expected=expected)
            latest = max(latest, time)
            if row.natural("chunk_size", 1) != key_tokens:
                expected = f"{key_tokens}, as before; for rows of one model say model=NAME"
                raise row.error(field="chunk_size", expected=expected)
            model, prompt = row.text("model_name"), row.natural("seq_len", 1)
            yield Request(
                id=f"{row.text('request_id')}/{row.line}",
                arrival=latest - first,
                prompt_tokens=prompt,
                output_tokens=self.output_tokens,
                keys=_keys(row, model.encode(), prompt // key_tokens),
                key_tokens=key_tokens,
                salt=model,
            )

    @property
    def key_tokens(self) -> int:
        """Tokens of a chunk, read from the first row."""
        with closing(self._rows(Counter())) as rows:
            return next(rows).natural("chunk_size", 1)

    @property
    def served_model(self) -> str:
        """The model of the first row."""
        with closing(self._rows(Counter())) as found:
            return next(found).text("model_name")

    @property
    def notes(self) -> list[str]:
        """The models of the rows that were read last, if there are several."""
        return models_note(self._models, self.model, "model")

    def _rows(self, models: Counter[str]) -> Generator[Row, None, None]:
        """Yield the rows of the models that are read; count those of each in `models`."""
        for row in rows(self.path):
            name = row.text("model_name")
            models[name] += 1
            if self.model in (None, name):
                yield row
        if self.model is not None and self.model not in models:
            raise no_model(self.path, self.model, models)


def _time(row: Row) -> int:
    """Return the time in nanoseconds, without the error of a float product."""
    row.nanoseconds("timestamp")
    return round(Fraction(row.fields["timestamp"]) * NS_PER_S)


def _keys(row: Row, model: bytes, most: int) -> list[bytes]:
    """Return keys of the hashes of a prompt's full chunks, at most `most` of them."""
    hashes = row.fields.get("chunk_hashes")
    if type(hashes) is not list:
        raise row.error(field="chunk_hashes", expected="a list of hexadecimal texts")
    if len(hashes) > most:
        expected = f"at most {most} hashes, of full chunks"
        raise row.error(field="chunk_hashes", expected=expected, got=len(hashes))
    start = blake2b(model + b"\0", digest_size=KEY_BYTES)
    keys = []
    for index, value in enumerate(hashes):
        if type(value) is not str or _HASH.fullmatch(value) is None:
            where = f"chunk_hashes[{index}]"
            raise row.error(field=where, expected='a text such as "0x1f"', got=value)
        state = start.copy()
        state.update(value.lower().encode())
        keys.append(state.digest())
    return keys
