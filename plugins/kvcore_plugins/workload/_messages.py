"""Messages of chats in the rows of a log, in the format of any API."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar

import orjson

from kvcore import InputError
from kvcore.blake2 import blake2b
from kvcore.untrusted import parse_digits
from kvcore_plugins.workload.rows import Row, in_words, parse_nested
from kvcore_plugins.workload.times import find_times

RESPONSE = ("response", "body")
"""Names of the objects in a row that may hold what a server answered."""

ANSWER = "assistant"
"""The role whose messages are generated."""

_ROLES = {"human": "user", "gpt": ANSWER, "chatgpt": ANSWER, "bot": ANSWER, "model": ANSWER}

JSON_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking", "toolUse",
               "toolResult", "functionCall", "functionResponse")  # fmt: skip
"""Types of content blocks without a text, whose JSON stands for the text."""

MARK = "cache_control"
"""The field of a content block that sets a breakpoint."""

IMAGES = "\0image_tokens"
"""The field of a request that has the option `image_tokens`."""

TOKEN_IDS = ("prompt_token_ids", "input_ids", "token_ids")
"""Fields of a request, or of the answer, that have the token ids of the prompt."""

Message: TypeAlias = dict[str, Any]
"""A message for chat templates: `role`, `content`, and all its other fields."""


class UnusableRowError(InputError):
    """A row is no request that can be run.

    Attributes:
        reason: what such rows are called in a note.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


_SHORT = 1 << 13

_T = TypeVar("_T")


def unusable(row: Row, reason: str) -> UnusableRowError:
    """Return the error of a row that is no completion, for a reason of a few words."""
    return UnusableRowError(f"{row.path}:{row.line}: no completion: {reason}", reason)


def nested(row: Row, *names: str) -> Row:
    """Return the object nested deepest in `row` under any of `names`, or `row` itself."""
    while True:
        for name in names:
            fields = row.fields.get(name)
            if type(fields) is dict:
                row = Row(row.path, row.line, fields, f"{row.prefix}{name}.")
                break
        else:
            return row


def unpacked(fields: dict[str, Any], *names: str) -> None:
    """Replace fields that are JSON in a text, as databases of gateways have them."""
    for name in names:
        text = fields.get(name)
        if type(text) is str and text[:1] in ("{", "["):
            with suppress(orjson.JSONDecodeError, orjson.JSONEncodeError):
                fields[name] = parse_nested(text.encode())


def times_of(row: Row, name: str | None = None) -> dict[str, Any]:
    """Return the times of a row and of the response in it, by field; those of the row win.

    Args:
        row: the row.
        name: the field; None: those with a usual name of a time.
    """
    times: dict[str, Any] = {}
    response = nested(row, *RESPONSE)
    for holder in (row,) if response is row else (response, row):
        names = find_times(tuple(holder.fields)) if name is None else [name]
        times |= {
            name: holder.fields[name] for name in names if holder.fields.get(name) is not None
        }
    return times


def is_chat(fields: dict[str, Any]) -> bool:
    """Return True if the fields of a request have messages in the format of any API."""
    return type(fields.get("messages")) is list or _translated(fields) is not None


def token_ids(value: Any) -> list[int] | None:
    """Return a list of token ids, or the only one in a list; None: it is no such list."""
    if type(value) is list and len(value) == 1 and type(value[0]) is list:
        (value,) = value
    is_ids = type(value) is list and value and all(type(token) is int for token in value)
    return value if is_ids and min(value) >= 0 else None


def chat_body(body: Row) -> Row:
    """Return the request of a chat with `messages` and `system`, whatever its API."""
    if body.fields.get("messages") is not None:
        return body
    translated = _translated(body.fields)
    if translated is None:
        return body
    return Row(body.path, body.line, body.fields | translated, body.prefix)


def _translated(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return `messages` and `system` of other APIs and data sets; None: it is none of these.

    These are Responses, Gemini, and WildChat's and LMSYS's `conversation`.
    """
    entries = fields.get("conversation")
    if type(entries) is list and entries and all(map(_is_item, entries)):
        return {"messages": entries}
    entries = fields.get("input")
    if type(entries) is list and entries and all(map(_is_item, entries)):
        return {"messages": list(map(item_message, entries)),
                "system": fields.get("instructions")}  # fmt: skip
    if type(entries) is str and ("instructions" in fields or "max_output_tokens" in fields):
        message = {"role": "user", "content": entries}
        return {"messages": [message], "system": fields.get("instructions")}
    contents = fields.get("contents")
    if (
        type(contents) is list
        and contents
        and all(type(content) is dict for content in contents)
    ):
        system = fields.get("systemInstruction") or fields.get("system_instruction") or {}
        return {
            "messages": [
                {"role": _ROLES.get(f"{content.get('role')}", "user"),
                 "content": content.get("parts")}
                for content in contents
            ],
            "system": system.get("parts") if type(system) is dict else system,
        }  # fmt: skip
    return None


def _is_item(item: Any) -> bool:
    return type(item) is dict and ("role" in item or "type" in item)


def item_message(item: dict[str, Any]) -> Message:
    """Return the message of an item of Responses; of one that is none, its JSON."""
    if "role" in item:
        return item
    return {"role": item["type"], "content": orjson.dumps(item).decode()}


def chat_field(fields: dict[str, Any]) -> str | None:
    """Return the field of a request with the messages of a chat; None: it is no chat."""
    names = ("messages", "conversations")
    return next((name for name in names if fields.get(name) is not None), None)


def messages_of(body: Row) -> list[Message]:
    """Return the messages of a chat, with their contents as texts.

    Raises:
        UnusableRowError: a part has no text, such as an image.
        InputError: there is no message, or one that cannot be read.
    """
    name = chat_field(body.fields) or "messages"
    rows = body.inner(name)
    if not rows:
        raise body.error(field=name, expected="at least one message")
    if name == "messages":
        images = body.fields.get(IMAGES)
        messages = [_message(row, images) for row in rows]
        system = _system(body)
        first = [] if system is None else [{"role": "system", "content": system}]
        return first + messages
    return [
        {"role": _ROLES.get(row.text("from"), row.text("from")), "content": row.text("value")}
        for row in rows
    ]


def _system(body: Row) -> str | None:
    """Return the system prompt that stands beside the messages, if there is one."""
    parts = body.fields.get("system")
    if type(parts) is not list:
        return body.optional(body.text, "system", None)
    images = body.fields.get(IMAGES)
    return "".join(
        block_text(body, index, part, images) for index, part in enumerate(body.inner("system"))
    )


def block_text(row: Row, index: int, part: Row, images: int | None = None) -> str:
    """Return the text of a content block of the message in `row`.

    Args:
        row: the message.
        index: that of the block.
        part: the block.
        images: tokens that a block without a text, such as an image, is said to have.

    Raises:
        UnusableRowError: the block has no text, and `images` is None.
    """
    for name in ("text", "refusal"):
        if type(text := part.fields.get(name)) is str:
            return text
    kind = part.fields.get("type")
    if kind in JSON_BLOCKS or any(name in part.fields for name in JSON_BLOCKS):
        return orjson.dumps(unmarked(part.fields)).decode()
    if images is not None:
        content = orjson.dumps(unmarked(part.fields), option=orjson.OPT_SORT_KEYS)
        return image_text(blake2b(content, digest_size=16).hexdigest(), images)
    expected = "a part with a text: how many tokens others have is not known here"
    error = row.error(field=f"content[{index}]", expected=expected, got=part.fields)
    raise UnusableRowError(str(error), "with an image: image_tokens=N counts it")


def image_text(digest: str, tokens: int) -> str:
    """Return the text that stands for `tokens` tokens of an image with this hash."""
    return f"\0{digest}:{tokens}\0"


def unmarked(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an object without its breakpoint, which may move from turn to turn."""
    return {name: value for name, value in fields.items() if name != MARK}


def _message(row: Row, images: int | None = None) -> Message:
    content = row.fields.get("content")
    if type(content) is list:
        parts = enumerate(row.inner("content"))
        content = "".join(block_text(row, index, part, images) for index, part in parts)
    elif content is not None:
        content = row.text("content")
    return row.fields | {"role": row.text("role"), "content": content or ""}


def remembered(function: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `function`, whose last results for texts of up to 8,192 characters are kept.

    Roles and line ends come back in each message, and messages in each later turn.
    """
    kept = lru_cache(maxsize=1 << 12)(function)

    @wraps(function)
    def result(text: str) -> _T:
        return (kept if len(text) <= _SHORT else function)(text)

    return result


def text_of(message: Message) -> str:
    """Return the text of a message, tool calls included."""
    calls = message.get("tool_calls")
    text: str = message["content"]
    return text + orjson.dumps(calls).decode() if calls else text


def reasoning_of(message: Message) -> str:
    """Return the reasoning that a message was generated with, and that prompts leave out."""
    values = (message.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return next((text for text in values if type(text) is str), "")


def answer_indices(messages: list[Message]) -> list[int]:
    """Return the indices of the answers in a conversation, with that of one to come."""
    last = len(messages) - 1
    indices = [n for n, message in enumerate(messages) if n and message["role"] == ANSWER]
    return indices if indices and indices[-1] == last else [*indices, last + 1]


def tools_of(body: Row) -> Any:
    """Return the tools of a chat, without breakpoints."""
    tools = body.fields.get("tools")
    if type(tools) is not list:
        return tools
    return [unmarked(tool) if type(tool) is dict else tool for tool in tools]


class Answer(NamedTuple):
    """The answer of a server.

    Attributes:
        text: the visible text, tool calls included.
        reasoning: what was generated before it, and is left out of later prompts.
        choices: number of answers to the one prompt.
        tokens: token ids of all of it; None: they are not recorded.
    """

    text: str
    reasoning: str = ""
    choices: int = 1
    tokens: list[int] | None = None


_TEXTS = ("completion", "response", "output", "answer", "generated_text", "output_text")


_ENVELOPE = frozenset(("choices", "candidates", "content", "message", "usage", "error", "body",
                       "id", "object", *_TEXTS))  # fmt: skip


_SAID = frozenset(("choices", "candidates", "content", "message", "text", "role", "tool_calls",
                   "completion_token_ids", "output_ids", "body", *_TEXTS))  # fmt: skip


def beside_answer(response: Row) -> dict[str, Any]:
    """Return the fields of a response that hold no answer, such as its usage and its times."""
    return {name: value for name, value in response.fields.items() if name not in _SAID}


def is_response(value: Any) -> bool:
    """Return True if what was JSON in a text may be a response or messages, and no answer."""
    first = value[0] if type(value) is list and value else value
    return type(first) is dict and not _ENVELOPE.isdisjoint(first)


def answer_of(response: Row) -> Answer | None:
    """Return what a server answered, if it is recorded."""
    fields = response.fields
    if type(fields.get("choices")) is list:
        return _choice(response)
    if type(fields.get("output")) is list and type(_only(fields["output"])) is not str:
        return _items(response)
    candidates = fields.get("candidates")
    if type(candidates) is list:
        first = candidates[0] if candidates and type(candidates[0]) is dict else {}
        return _parts(first.get("content"), max(len(candidates), 1))
    if _is_answer(response):
        return _spoken(response, fields)
    for name in (*_TEXTS, "message"):
        inside = _only(fields.get(name))
        if type(inside) is dict:
            prefix = f"{response.prefix}{name}."
            answer = answer_of(Row(response.path, response.line, inside, prefix))
            if answer is not None:
                return answer
    names = (*_TEXTS, "text") if _is_inside(response) else _TEXTS
    texts = (_only(fields.get(name)) for name in names)
    text = next((text for text in texts if type(text) is str), None)
    ids = next(filter(None, map(token_ids, (fields.get("completion_token_ids"),
                                            fields.get("output_ids")))), None)  # fmt: skip
    return None if text is None and ids is None else Answer(text or "", tokens=ids)


def _only(value: Any) -> Any:
    """Return the one element of a list of one, or else the value itself."""
    return value[0] if type(value) is list and len(value) == 1 else value


def _is_inside(response: Row) -> bool:
    """Return True if an object has what was answered alone, and no request beside it."""
    return response.prefix not in ("", "body.")


def _is_answer(response: Row) -> bool:
    """Return True if an object is an assistant's message; beside a request, by its role."""
    fields = response.fields
    content = fields.get("content", 0)
    if type(content) not in (str, list) and content is not None and "tool_calls" not in fields:
        return False
    role = fields.get("role", ANSWER if type(content) is list or _is_inside(response) else "")
    return type(role) is str and _ROLES.get(role, role) == ANSWER


def _spoken(response: Row, fields: dict[str, Any]) -> Answer:
    """Return the answer in an assistant's message."""
    row = Row(response.path, response.line, {"role": ANSWER} | fields, response.prefix)
    message = _message(row)
    return Answer(text_of(message), reasoning_of(message))


def _choice(response: Row) -> Answer | None:
    """Return the first choice of OpenAI's chat completions and completions."""
    choice, *_ = [*response.inner("choices"), None]
    if choice is None:
        return None
    count, ids = len(response.fields["choices"]), token_ids(choice.fields.get("token_ids"))
    message = choice.fields.get("message")
    if type(message) is not dict:
        text = choice.optional(choice.text, "text", None)
        return None if text is None and ids is None else Answer(text or "", "", count, ids)
    return _spoken(choice, message)._replace(choices=count, tokens=ids)


def _items(response: Row) -> Answer | None:
    """Return the answer of Responses: its messages and calls, and summaries of reasoning."""
    text, reasoning = "", ""
    for item in response.inner("output"):
        if item.fields.get("type") == "reasoning":
            for name in ("content", "summary"):
                parts = item.fields.get(name)
                for part in parts if type(parts) is list else ():
                    reasoning += str(part.get("text") or "") if type(part) is dict else ""
        elif item.fields.get("type", "message") == "message":
            text += _spoken(item, item.fields).text
        else:
            text += orjson.dumps(item.fields).decode()
    return Answer(text, reasoning) if text or reasoning else None


def _parts(content: Any, count: int) -> Answer | None:
    """Return the answer in the parts of a candidate of Gemini."""
    parts = content.get("parts") if type(content) is dict else None
    if type(parts) is not list:
        return None
    texts = {True: "", False: ""}
    for part in parts:
        if type(part) is dict:
            text = part.get("text")
            said = text if type(text) is str else orjson.dumps(part).decode()
            texts[part.get("thought") is True] += said
    return Answer(texts[False], texts[True], count)


_FAILED = ("failure", "failed", "error", "cancelled", "canceled", "timeout")
_STATUS = ("status", "status_code", "statusCode", "http_status", "response_status",
           "response_code")  # fmt: skip
_ERRORS = ("error", "errors", "exception", "error_str", "error_message", "errorMessage",
           "error_code")  # fmt: skip
_CACHED = ("cache_hit",)
_ENDPOINTS = ("path", "url", "endpoint", "route", "uri", "request_path", "call_type",
              "operation", "api")  # fmt: skip
_KINDS = ("type", "object")
_TELLING = (*_STATUS, *_ERRORS, *_CACHED, *_ENDPOINTS, *_KINDS)
_TELLS = frozenset(_TELLING)
_COMPLETES = ("completion", "messages", "responses", "generate", "chat", "converse", "invoke")
_OTHER = ("embed", "count_tokens", "counttokens", "rerank", "moderation", "tokenize",
          "transcri", "speech")  # fmt: skip
_OTHERS = ("models", "audio", "images", "image_generation", "files", "health", "metrics",
           "batches", "score", "classify")  # fmt: skip
_HTTP_ERRORS = range(400, 600)


def fault_of(*holders: Row) -> str | None:
    """Return why a row is no completion: it failed, or is of another endpoint; None: it is one.

    Args:
        holders: the row, and the request and the response in it.
    """
    for holder in holders:
        if _TELLS.isdisjoint(holder.fields):
            continue
        for name in filter(holder.fields.__contains__, _TELLING):
            if (fault := _fault(name, holder.fields[name])) is not None:
                return fault
    return None


def _fault(name: str, value: Any) -> str | None:
    """Return why a row is no completion, as one of the fields that may tell says."""
    if name in _STATUS:
        return "failed" if _has_failed(value) else None
    if name in _ERRORS:
        return "failed" if value else None
    if name in _KINDS:
        faults = {"error": "failed", "list": "of another endpoint"}
        return faults.get(value) if type(value) is str else None
    if name in _CACHED:
        return "answered by a cache of answers" if value in (True, "True", "true") else None
    is_other = type(value) is str and _is_other(value.lower())
    return "of another endpoint" if is_other else None


def _is_other(endpoint: str) -> bool:
    """Return True if an endpoint is none that completes prompts, as far as its name tells."""
    if any(word in endpoint for word in _OTHER):
        return True
    # A path such as `models/NAME:generateContent` has both.
    completes = any(word in endpoint for word in _COMPLETES)
    return not completes and any(word in endpoint for word in _OTHERS)


def _has_failed(status: Any) -> bool:
    """Return True if a status is that of an error, as a word or as HTTP has it."""
    if type(status) not in (int, float, str):
        return False
    text = in_words(status)
    return text in _FAILED or parse_digits(text) in _HTTP_ERRORS


def generated_nothing(response: Row) -> bool:
    """Return True if the usage of a response says that no token was generated."""
    usage = response.fields.get("usage")
    names = ("completion_tokens", "output_tokens", "outputTokens")
    return type(usage) is dict and any(usage.get(name) == 0 for name in names)
