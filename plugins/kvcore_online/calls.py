"""Calls of the server's API: read, checked, and made into requests."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, cast

import attrs

from kvcore.engine import Generator, Sampling
from kvcore.errors import shorten
from kvcore.plugins.options import nearest
from kvcore.request import block_keys
from kvcore.untrusted import LONGEST_SALT, parse_json
from kvcore_engine.executor import call
from kvcore_engine.tokens import SampledRequest, hashed
from kvcore_online.listener import ApiError
from kvcore_online.prompts import ASKED_OUTPUT, token_ids
from kvcore_online.simulated import SimulatedModel

MOST_STOPS = 4
MOST_CHOICES = 128
MOST_NAMED = 64
"""Characters of the name of an option from which on an error has only its beginning."""

MOST_URGENT = 1 << 31

READ = frozenset({
    *("model", "prompt", "messages", "tools", "tool_choice", "function_call", "cache_salt"),
    *("n", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos"),
    *("stop", "stop_token_ids", "include_stop_str_in_output"),
    *(*Sampling._fields, "seed", "stream", "stream_options", "priority"),
})  # fmt: skip
"""Options of the API that this server reads."""

WITHOUT_EFFECT = frozenset({
    # Of whose call it is, and what is kept of it.
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("request_id", "safety_identifier", "service_tier", "store", "user"),
    # Of what this server has in no answer: beams, pictures, grammars, cut prompts.
    *("early_stopping", "length_penalty", "media_io_kwargs", "mm_processor_kwargs"),
    *("guided_decoding_backend", "guided_whitespace_pattern", "truncation_side"),
    *("prediction", "spaces_between_special_tokens"),
})  # fmt: skip
"""Options of the API by which no answer of this server changes, whatever their values are."""

UNSUPPORTED: Mapping[str, Any] = {
    "best_of": 1,
    "use_beam_search": False,
    "logprobs": False,
    "top_logprobs": 0,
    "prompt_logprobs": False,
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "return_token_strs": False,
    "functions": [],
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "structured_outputs": {},
    "structural_tag": None,
    **dict.fromkeys(("guided_choice", "guided_regex", "guided_json", "guided_grammar")),
    **dict.fromkeys(("regex", "ebnf", "json_schema")),
    "suffix": "",
    "echo": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "repetition_detection": None,
    "min_p": 0,
    "logit_bias": {},
    "logits_processors": [],
    "allowed_token_ids": [],
    "bad_words": [],
    "skip_special_tokens": True,
    "truncate_prompt_tokens": None,
    "prompt_embeds": None,
    "add_special_tokens": True,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "documents": [],
    "reasoning_effort": None,
    "include_reasoning": True,
    "thinking_token_budget": None,
    "verbosity": "medium",
    "modalities": ["text"],
    "audio": None,
    "moderation": None,
    "web_search_options": None,
    "kv_transfer_params": {},
    "vllm_xargs": {},
}
"""Options of the API that this server does not have, and the values that change nothing.

None is such a value of each, and False of `add_special_tokens` in a chat, whose template has
them. Those of vLLM and OpenAI are here; an option that is in none of these tables is refused
too: nobody knows what an answer without it would be.
"""

MESSAGE_FIELDS = ("name", "tool_call_id")
"""Fields of a message that its chat template may read, beside role, content and tool calls."""


@attrs.frozen
class Call:
    """A checked call of the API.

    Attributes:
        chat: whether it is a chat.
        prompts: token ids of each prompt.
        choices: number of answers to each prompt.
        output: largest number of output tokens of an answer.
        stream, counted: whether the answers are streamed, and with the usage at the end.
        stop: texts that end an answer.
        stop_ids: tokens that end an answer, beside those of the model.
        stop_shown: whether an answer has the text or the token that ends it.
        priority: how urgent it is to schedulers that ask: higher comes first.
        salt: text that keeps equal prompts apart in the cache (`cache_salt` in vLLM).
        sampling: how tokens are drawn; None: as those of the generator.
        seed: seed of the samples; None: each answer has its own.
    """

    chat: bool
    prompts: Sequence[array[int]]
    choices: int
    output: int
    stream: bool
    counted: bool
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    stop_shown: bool
    priority: int
    salt: str | None
    sampling: Sampling | None
    seed: int | None

    @property
    def answers(self) -> int:
        """Number of answers to all prompts."""
        return len(self.prompts) * self.choices

    def requests(
        self, key_tokens: int, salt: str | None, *, publish: bool
    ) -> Iterator[SampledRequest]:
        """Yield a request for each answer, prompt by prompt; the id of each is 0. O(tokens).

        Args:
            key_tokens: tokens of a key.
            salt: the salt of the call as the trace may show it.
            publish: whether generated blocks are shared.
        """
        for tokens in self.prompts:
            keys = block_keys(tokens.tolist(), key_tokens, salt=salt)
            for choice in range(self.choices):
                yield SampledRequest(
                    id=0,
                    prompt_tokens=len(tokens),
                    output_tokens=self.output,
                    keys=keys,
                    key_tokens=key_tokens,
                    salt=salt,
                    priority=self.priority,
                    tokens=tokens,
                    publish=publish,
                    sampling=self.sampling,
                    seed=None if self.seed is None else hashed("choice", self.seed, choice),
                )


@attrs.frozen
class CallReader:
    """Reads the calls of clients.

    Args:
        model: the generator, or what stands for it in a simulation.
        name: name of the model for clients.
        longest: largest number of tokens of a prompt and its output.
        limit: the limit that `longest` is, in words.
        answers: largest number of answers to a call.
    """

    model: Generator | SimulatedModel
    name: str
    longest: int
    limit: str
    answers: int

    def read(self, document: dict[str, Any], *, chat: bool) -> Call:
        """Return the call that a body makes.

        Raises:
            ApiError: it is wrong, or asks for what this server does not have.
        """
        model = document.get("model")
        if model is not None and model != self.name:
            named = shorten(repr(model))
            raise ApiError(404, f"there is no model {named}; this is {self.name!r}", "model")
        output = ASKED_OUTPUT
        for name in ("max_tokens", "max_completion_tokens"):
            output = _number(document, name, output, 1, whole=True)
        # Kept as long as the call waits and runs: a list takes 10 times the memory.
        prompts = [array("I", tokens) for tokens in self.prompts(document, chat=chat)]
        tokens = max(map(len, prompts))
        if tokens + output > self.longest:
            msg = (
                f"{tokens} tokens and {output} of output do not fit into the "
                f"{self.longest} tokens of {self.limit}"
            )
            raise ApiError(400, msg, "messages" if chat else "prompt")
        choices = _number(document, "n", 1, 1, MOST_CHOICES, whole=True)
        if len(prompts) * choices > self.answers:
            msg = f"the call has more answers than the {self.answers} requests of this server"
            raise ApiError(400, msg, "n")  # of one answer each, `prompts` has taken no more
        options = document.get("stream_options")
        options = options if isinstance(options, dict) else {}
        if options.get("continuous_usage_stats"):
            msg = "continuous_usage_stats is not supported: leave it out"
            raise ApiError(400, msg, "stream_options")
        counted = options.get("include_usage") is True
        salt = document.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= LONGEST_SALT):
            msg = f"cache_salt must be a text of 1 to {LONGEST_SALT:,} characters"
            raise ApiError(400, msg, "cache_salt")
        stop, stop_ids = _stops(document), _stop_ids(document)
        self._refuse_length(document, output, stops=bool(stop or stop_ids))
        return Call(
            chat=chat,
            prompts=prompts,
            choices=choices,
            output=output,
            stream=_flag(document, "stream"),
            counted=counted,
            stop=stop,
            stop_ids=stop_ids,
            stop_shown=_flag(document, "include_stop_str_in_output"),
            # vLLM serves the lowest first.
            priority=-_number(document, "priority", 0, -MOST_URGENT, MOST_URGENT, whole=True),
            salt=salt,
            sampling=self._sampling(document),
            seed=_number(document, "seed", None, -(1 << 63), 1 << 63, whole=True),
        )

    def _refuse_length(self, document: dict[str, Any], output: int, *, stops: bool) -> None:
        """Raise ApiError if an answer may end earlier than the call says."""
        _number(document, "min_tokens", None, 0, output, whole=True)
        _flag(document, "ignore_eos")
        ends = bool(self.model.eos_token_ids)
        for name, wrong in (("ignore_eos", ends), ("min_tokens", ends or stops)):
            if wrong and document.get(name):
                msg = f"{name} is not supported where an answer may end early: leave it out"
                raise ApiError(400, msg, name)

    def prompts(self, document: dict[str, Any], *, chat: bool) -> list[Sequence[int]]:
        """Return the tokens of each prompt, or of messages.

        Raises:
            ApiError: there is none, or one that the model cannot have.
        """
        _refuse_unsupported(document, chat=chat)
        tools = document.get("tools") or ()
        if chat:
            return [self._chat(document.get("messages"), tools)]
        if tools:
            raise ApiError(400, "tools are for chats: leave them out", "tools")
        prompt = document.get("prompt")
        if not (isinstance(prompt, list) and prompt and type(prompt[0]) is not int):
            prompt = [prompt]
        if len(prompt) > self.answers:  # before they are read: 2 s for 200,000 of them
            msg = f"the call has more prompts than the {self.answers} requests of this server"
            raise ApiError(400, msg, "prompt")
        prompts = [self._text(text) for text in prompt]
        vocabulary = self.model.vocabulary
        if not all(
            tokens and 0 <= min(tokens) <= max(tokens) < vocabulary for tokens in prompts
        ):
            raise ApiError(400, "prompt has no tokens, or some that the model lacks", "prompt")
        return prompts

    def _text(self, prompt: Any) -> Sequence[int]:
        """Return the tokens of a prompt: a text, or token ids."""
        if isinstance(prompt, str) and prompt:
            return self._encoded(self.model.encode, prompt)
        if tokens := token_ids(prompt):
            return tokens
        raise ApiError(400, "prompt must be a text, or token ids, or a list of these", "prompt")

    def _chat(self, messages: Any, tools: Any) -> Sequence[int]:
        """Return the tokens of a chat."""
        if not isinstance(messages, list) or not messages:
            raise ApiError(400, "messages must be a list that is not empty", "messages")
        if not (isinstance(tools, list | tuple) and all(isinstance(t, dict) for t in tools)):
            raise ApiError(400, "tools must be a list of objects", "tools")
        read = [list(map(_message, messages)), *([tools] if tools else [])]
        tokens = self._encoded(self.model.encode_chat, *read)
        if not tokens:
            raise ApiError(400, "messages have no tokens", "messages")
        return tokens

    def _encoded(self, encode: Callable[..., list[int]], *texts: Any) -> list[int]:
        """Return the token ids of a text or a chat, or report that the generator has failed."""
        ids: list[int] = call(cast("Generator", self.model), encode, *texts)
        return ids

    def _sampling(self, document: dict[str, Any]) -> Sampling | None:
        """Return how the tokens of a call are drawn; None: as those of the generator."""
        if document.keys().isdisjoint(Sampling._fields):
            return None
        own = Sampling(
            getattr(self.model, "temperature", 0.0), getattr(self.model, "top_k", None)
        )
        top_k = _number(document, "top_k", own.top_k, -1, whole=True)
        sampling = Sampling(
            _number(document, "temperature", own.temperature, 0),
            None if top_k in (0, -1) else top_k,  # as vLLM has them: all tokens
            _number(document, "top_p", own.top_p, 0),
        )
        if not 0 < sampling.top_p <= 1:
            raise ApiError(400, "top_p must be above 0, and at most 1", "top_p")
        for name, value, default in zip(Sampling._fields, sampling, own, strict=True):
            if value != default and not self.model.takes_sampling:
                msg = f"{name}: generator {self.model.name!r} draws no samples; leave it out"
                raise ApiError(400, msg, name)
        return None if sampling == own else sampling


def _refuse_unsupported(document: dict[str, Any], *, chat: bool) -> None:
    """Raise ApiError for options that this server does not have, or that no API has."""
    for name, value in document.items():
        if value is None or name in READ or name in WITHOUT_EFFECT:
            continue
        if name not in UNSUPPORTED:
            hint = nearest(name[:MOST_NAMED], [*READ, *UNSUPPORTED], 0.75)
            msg = f"there is no option {shorten(repr(name))}{hint}: leave it out"
            raise ApiError(400, msg, name[:MOST_NAMED])
        neutral = not chat if name == "add_special_tokens" else UNSUPPORTED[name]
        # False is no number here: `"logprobs": 0` asks for those of the chosen tokens.
        same = value is neutral if isinstance(neutral, bool) else value == neutral
        if not same:
            raise ApiError(400, f"{name} is not supported: leave it out", name)
    for name in ("tool_choice", "function_call"):
        if document.get(name) not in (None, "auto", "none"):
            msg = f"{name} can be auto or none, since no call is enforced: leave it out"
            raise ApiError(400, msg, name)


def _flag(document: dict[str, Any], name: str) -> bool:
    """Return whether a body asks for something; null and no value do not."""
    value = document.get(name)
    if value is not None and type(value) is not bool:
        raise ApiError(400, f"{name} must be true or false", name)
    return bool(value)


def _number(
    document: dict[str, Any],
    name: str,
    default: Any,
    least: int,
    most: float = inf,
    *,
    whole: bool = False,
) -> Any:
    """Return the number that a body has under a name, or `default`.

    Raises:
        ApiError: it is no number from `least` to `most`, or not whole where it must be.
    """
    value = document.get(name)
    if value is None:
        return default
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not least <= value <= most or value == inf:
        what = "a whole number" if whole else "a number"
        upto = "on" if most == inf else f"to {most}"
        raise ApiError(400, f"{name} must be {what} from {least} {upto}", name)
    return value


def _stops(document: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts that end an answer."""
    stop = document.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if type(stop) is list else stop
    texts = type(stop) is tuple and all(isinstance(text, str) and text for text in stop)
    if not texts or len(stop) > MOST_STOPS:
        raise ApiError(400, f"stop must be a text, or up to {MOST_STOPS} of them", "stop")
    return stop


def _stop_ids(document: dict[str, Any]) -> frozenset[int]:
    """Return the token ids that end an answer."""
    ids = document.get("stop_token_ids") or []
    if not (type(ids) is list and all(type(token) is int for token in ids)):
        raise ApiError(400, "stop_token_ids must be a list of token ids", "stop_token_ids")
    return frozenset(ids)


def _message(value: Any) -> dict[str, Any]:
    """Return a message with its role, its text, and what a chat template reads of tools."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ApiError(400, "a message needs a role and a content", "messages")
    content, calls = value.get("content"), value.get("tool_calls")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            content = "".join(texts)  # type: ignore[arg-type]  # just checked
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ApiError(400, "the content of a message must be text", "messages")
    message = {"role": value["role"], "content": content}
    message |= {name: value[name] for name in MESSAGE_FIELDS if name in value}
    if calls:
        message["tool_calls"] = _tool_calls(calls)
    return message


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Return calls of tools with their arguments as objects: so templates read them."""
    try:
        return [
            call | {"function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in calls
        ]
    except (TypeError, KeyError, ValueError) as error:
        msg = (
            "tool_calls must be functions, each with a name and arguments as an object in JSON"
        )
        raise ApiError(400, msg, "messages") from error


def _arguments(function: Mapping[str, Any]) -> Any:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = parse_json(arguments.encode() or b"{}")  # tools without any have no text
    if arguments is None:
        arguments = {}
    if not (isinstance(arguments, dict) and isinstance(function["name"], str)):
        raise TypeError
    return arguments
