"""The options of a file of chats, and the names of its fields."""

from __future__ import annotations

from pathlib import Path

import attrs
from attrs.converters import optional
from attrs.validators import ge, in_, lt
from attrs.validators import optional as if_given

from kvcore import InputError
from kvcore.files import as_path, unreadable_reason
from kvcore.plugins.options import nearest
from kvcore.units import as_float
from kvcore.untrusted import load_toml
from kvcore_plugins.workload.file_workload import TimedFile

_NAMES = ("messages", "prompt", "answer", "usage", "model", "tenant", "time")
_LATER = (
    "tz", "image_tokens", "isolate", "strict", "turns", "fields", "only_model", *_NAMES[:-1],
)  # fmt: skip


@attrs.define(eq=False)
class ChatFile(TimedFile):
    """A file of prompts and chats, and how it is to be read: the options of `Chat`."""

    later_options = _LATER
    by_line = True

    tokenizer: Path | None = attrs.field(default=None, converter=optional(as_path))
    tokens: str = attrs.field(default="words", validator=in_(("words", "bytes")))
    time: str | None = None
    output_tokens: int = attrs.field(default=0, validator=ge(0))
    think: float = attrs.field(default=0.0, converter=as_float, validator=[ge(0), lt(1e9)])
    key_tokens: int = attrs.field(default=16, validator=ge(1))
    image_tokens: int | None = attrs.field(default=None, validator=if_given(ge(1)))
    isolate: str | None = None
    strict: bool = attrs.field(default=False)
    turns: bool = True
    messages: str | None = None
    prompt: str | None = None
    answer: str | None = None
    usage: str | None = None
    model: str | None = None
    tenant: str | None = None
    only_model: str | None = None
    fields: Path | None = attrs.field(default=None, converter=optional(as_path))

    @property
    def field_names(self) -> dict[str, str]:
        """The names of fields that options give, by what the fields are.

        Raises:
            InputError: the file `fields` cannot be read, or has other names.
        """
        names = {} if self.fields is None else _read_names(self.fields)
        fields = {name: getattr(self, name) for name in _NAMES}
        return names | {name: field for name, field in fields.items() if field is not None}


def _read_names(path: Path) -> dict[str, str]:
    """Return the names of fields in a TOML file.

    Raises:
        InputError: it cannot be read, or has other keys than `_NAMES`, or values than texts.
    """
    try:
        names = load_toml(path)
    except (OSError, ValueError) as error:
        reason = unreadable_reason(path, error) if isinstance(error, OSError) else error
        msg = f"fields={path}: cannot be read: {reason}"
        raise InputError(msg) from error
    for name, field in names.items():
        if name not in _NAMES:
            msg = (
                f"fields={path}: {name!r} is none of {', '.join(_NAMES)}{nearest(name, _NAMES)}"
            )
            raise InputError(msg)
        if type(field) is not str:
            msg = f"fields={path}: {name}: expected the name of a field, got {field!r}"
            raise InputError(msg)
    return names
