"""The generator contract: a model, as far as its K/V and its next tokens go."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Unpack

from kvcore.engine.backend import AttendOptions, Backend
from kvcore.engine.batch import RaggedBatch, Tensor
from kvcore.engine.rotary import Rotary, Rotation
from kvcore.errors import InputError
from kvcore.models.codec import TENSOR_DTYPES
from kvcore.models.spec import ModelSpec
from kvcore.plugins.base import Plugin


class Attend(Protocol):
    """The function through which a generator reaches the K/V cache."""

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        rotation: Rotation | None = None,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Store the K/V of the step's tokens in the cache; return attention's output.

        Shapes and options are those of `Backend.store` and `Backend.attend`. Keys are stored
        after the `rotation`, if there is one: a generator leaves it to this function if
        `RaggedBatch.fuses_rotation` is True.
        """


def attend_through(
    plan: Any, store: Callable[..., object], attend: Callable[..., Tensor]
) -> Attend:
    """Return the `Attend` of a step whose K/V lies in the blocks of a backend.

    Args:
        plan: the plan that the backend made for the batch of the step.
        store: `Backend.store_rotated` of that backend.
        attend: `Backend.attend` of that backend, or the function that `Compactor.attend`
            returns in its place.
    """

    def through(
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        rotation: Rotation | None = None,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        store(layer, plan, keys, values, rotation)
        return attend(layer, plan, queries, **options)

    return through


def chat_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return a line `role: content` for each message, tools before them, `assistant:` below."""
    lines = [f"tools: {list(tools)}"] if tools else []
    for message in messages:
        calls = message.get("tool_calls", "")
        lines.append(f"{message['role']}: {message['content']}{calls}")
    return "\n".join([*lines, "assistant:"])


class Generator(Plugin):
    """Turns tokens into K/V and next tokens, layer by layer, through a paged cache.

    Deterministic: the output of a sequence depends on its own tokens and seed alone, never
    on the other sequences of a batch.

    Attributes:
        backend: the backend on whose device the tensors live; set by `load`.
        dtype: the dtype of the computation, one of `TENSOR_DTYPES`; set by `load`.
        takes_sampling: whether `forward` draws by `RaggedBatch.samplings`.
        states: hidden states from which the last step's tokens were drawn, `[sequences with
            an output index, hidden]`, for drafters that read them; None: it exposes none.
    """

    kind: ClassVar[str] = "generator"

    backend: Backend
    dtype: str = "fp32"
    takes_sampling: ClassVar[bool] = False
    states: Tensor = None

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """The shape of the model: layers, heads, widths. Known before `load`."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids, which count from 0."""

    @property
    def positions(self) -> int | None:
        """Number of positions that the model has; None unless overridden: no limit."""
        return None

    @property
    def rotary(self) -> tuple[Rotary | None, ...]:
        """The rotary embedding of each layer, known after `load`; None unless overridden.

        A layer has one only if its keys are cached as this embedding has rotated them.
        """
        return (None,) * self.spec.layers

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The token ids that end a text; none unless overridden."""
        return frozenset()

    def identity(self) -> str:
        """Return a text that names all that K/V depends on, apart from tokens and positions.

        Tiers keep K/V for later runs: generators that compute different K/V have different
        texts, and a generator that is made again has the same one. It consists of class,
        options and shape; a generator that reads weights from files overrides it.
        """
        cls = type(self)
        return f"{cls.__module__}.{cls.__qualname__} {self.options()!r} {self.spec!r}"

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of the weights that `load` makes: 0 unless overridden."""
        del dtype
        return 0

    def load(self, backend: Backend, dtype: str) -> None:
        """Move the weights to the backend's device. Called once, before `Backend.allocate`.

        Of the backend only `tensor` and `memory` may be used.

        Raises:
            InputError: the generator cannot compute in `dtype`.
        """
        if dtype not in TENSOR_DTYPES:
            known = ", ".join(TENSOR_DTYPES)
            msg = f"generator {self.name!r} cannot compute in {dtype!r}; it can in: {known}"
            raise InputError(msg)
        self.backend = backend
        self.dtype = dtype

    @abstractmethod
    def forward(self, batch: RaggedBatch, attend: Attend) -> list[int | None]:
        """Run a step: call `attend` once in each layer, in order.

        Returns the next token of each sequence; None if its output index is None.
        """

    def logits(self, batch: RaggedBatch, attend: Attend) -> Tensor:
        """Run a step as `forward` does; return the logits of the sequences that sample.

        `[sequences with an output index, vocabulary]`, before any temperature.

        Raises:
            InputError: the generator has no logits; unless overridden.
        """
        del batch, attend
        msg = (
            f"generator {self.name!r} has no logits to compare: take `transformer`, or a model "
            "of `huggingface`"
        )
        raise InputError(msg)

    def probabilities(self, batch: RaggedBatch, attend: Attend) -> Tensor:
        """Run a step as `forward` does; return the distributions of the next tokens.

        `[sequences with an output index, vocabulary]`, after temperature and top-k, for
        drafts that are sampled.

        Raises:
            InputError: the generator has no probabilities; unless overridden.
        """
        del batch, attend
        msg = (
            f"generator {self.name!r} does not tell the probabilities of tokens, which drafts "
            "that are sampled need: let the drafter draft greedily, with temperature=0"
        )
        raise InputError(msg)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`: a hash of each word unless overridden."""
        from kvcore.request import word_tokens  # noqa: PLC0415 - hashing is for texts alone

        return word_tokens(text, self.vocabulary)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids of a chat, up to the beginning of its next answer.

        Unless overridden, the text is that of `chat_text`.

        Args:
            messages: each with its `role` and `content`, and calls of tools as in OpenAI's API.
            tools: the tools that its answer may call, as in that API; left out if none.
        """
        return self.encode(chat_text(messages, tools))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids: the ids themselves unless overridden."""
        return " ".join(map(str, tokens))
