"""Messages of chats and answers of servers, in the rows of a log."""

from __future__ import annotations

from typing import Any, TypeAlias

import orjson

from kvcore_plugins.workload.rows import Row
from kvcore_plugins.workload.times import find_times

RESPONSE = ("response", "body")
"""Names of the objects in a row that may hold what a server answered."""

ANSWER = "assistant"
"""The role whose messages are generated."""

_ROLES = {"human": "user", "gpt": ANSWER, "chatgpt": ANSWER, "bot": ANSWER, "model": ANSWER}
_ANSWERS = ("completion", "response", "output", "answer")

JSON_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")
"""Types of content blocks without a text, whose JSON stands for the text."""

MARK = "cache_control"
"""The field of a content block that sets a breakpoint."""

Message: TypeAlias = dict[str, Any]
"""A message for chat templates: `role`, `content`, and all its other fields."""


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


def messages_of(body: Row) -> list[Message]:
    """Return the messages of a chat, with their contents as texts.

    Raises:
        InputError: there is no message, or one that cannot be read, such as an image.
    """
    name = "messages" if "messages" in body.fields else "conversations"
    found = body.inner(name)
    if not found:
        raise body.error(field=name, expected="at least one message")
    if name == "messages":
        messages = [_message(row) for row in found]
        system = _system(body)
        first = [] if system is None else [{"role": "system", "content": system}]
        return first + messages
    return [
        {"role": _ROLES.get(row.text("from"), row.text("from")), "content": row.text("value")}
        for row in found
    ]


def _system(body: Row) -> str | None:
    """Return the system prompt that stands beside the messages, if there is one."""
    found = body.fields.get("system")
    if type(found) is not list:
        return body.optional(body.text, "system", None)
    return "".join(block_text(body, n, part) for n, part in enumerate(body.inner("system")))


def block_text(row: Row, place: int, part: Row) -> str:
    """Return the text of a content block of the message in `row`.

    Raises:
        InputError: the block has no text, such as an image.
    """
    if type(part.fields.get("text")) is str:
        return str(part.fields["text"])
    if part.fields.get("type") in JSON_BLOCKS:
        return orjson.dumps(unmarked(part.fields)).decode()
    expected = "a part with a text: how many tokens others have is not known here"
    raise row.error(field=f"content[{place}]", expected=expected, got=part.fields)


def unmarked(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an object without its breakpoint, which may move from turn to turn."""
    return {name: value for name, value in fields.items() if name != MARK}


def _message(row: Row) -> Message:
    content = row.fields.get("content")
    if type(content) is list:
        parts = enumerate(row.inner("content"))
        content = "".join(block_text(row, place, part) for place, part in parts)
    elif content is not None:
        content = row.text("content")
    return row.fields | {"role": row.text("role"), "content": content or ""}


def text_of(message: Message) -> str:
    """Return the text of a message, tool calls included."""
    calls = message.get("tool_calls")
    text: str = message["content"]
    return text + orjson.dumps(calls).decode() if calls else text


def answer_places(messages: list[Message]) -> list[int]:
    """Return the places of the answers in a conversation, with that of one to come."""
    last = len(messages) - 1
    places = [n for n, message in enumerate(messages) if n and message["role"] == ANSWER]
    return places if places and places[-1] == last else [*places, last + 1]


def answer_of(response: Row) -> str | None:
    """Return the text that a server answered, if it is recorded."""
    if type(response.fields.get("choices")) is list:
        choice, *_ = [*response.inner("choices"), None]
        if choice is None:
            return None
        message = choice.fields.get("message")
        if type(message) is not dict:
            return choice.optional(choice.text, "text", None)
        return text_of(_message(Row(choice.path, choice.line, {"role": ANSWER} | message)))
    if type(response.fields.get("content")) is list:
        fields = {"role": ANSWER} | response.fields
        return text_of(_message(Row(response.path, response.line, fields)))
    found = (response.fields.get(name) for name in _ANSWERS)
    return next((text for text in found if type(text) is str), None)


def output_count(body: Row, response: Row) -> int | None:
    """Return the number of tokens that were generated, if it is recorded."""
    usage = nested(response, "usage")
    for name in ("completion_tokens", "output_tokens") if usage is not response else ():
        if usage.fields.get(name) is not None:
            return usage.natural(name)
    return body.optional(body.natural, "output_tokens", None)


def tools_of(body: Row) -> Any:
    """Return the tools of a chat, without breakpoints."""
    tools = body.fields.get("tools")
    if type(tools) is not list:
        return tools
    return [unmarked(tool) if type(tool) is dict else tool for tool in tools]
