"""A simulated model behind the API: no tensors, a latency model's times, tokens from hashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from kvcore.engine.generator import chat_text
from kvcore.serving.job import Job
from kvcore.serving.latency import LatencyModel, SimulatedExecutor, StepResult, StepWork
from kvcore_engine.tokens import TokenStream, hashed
from kvcore_plugins.latency.measured_steps import MeasuredStep
from kvcore_plugins.workload._encoders import encoder_of

_TEXT = """
the of and a to in is you that it he was for on are as with his they at be this have from or one
had by word but not what all were we when your can said there use an each which she do how their
if will up other about out many then them these so some her would make like him into time has
look two more write go see number no way could people my than first water been call who oil its
now find long down day did get come made may part over new sound take only little work know
"""
WORDS = tuple(_TEXT.split())
"""The words of answers, each of at most seven letters, so that it is one token."""

VOCABULARY = 1 << 31
"""Number of token ids: those of KV events fit into 32 bits."""


class SimulatedModel:
    """The text side of a model that computes nothing: tokens are pieces of words.

    An answer is made of `WORDS`. Its text is read back as the tokens that were generated, so
    that the next turn of a conversation hits the blocks of the answer, as in a real server.

    Attributes:
        eos_token_ids: no token ends a text: an answer has the tokens that it may have.
    """

    name: ClassVar[str] = "simulated"
    takes_sampling: ClassVar[bool] = True
    vocabulary: ClassVar[int] = VOCABULARY
    eos_token_ids: ClassVar[frozenset[int]] = frozenset()

    def __init__(self) -> None:
        self._encoder = encoder_of("words", None)
        self._words = {token: word for word in WORDS for token in self.encode(word)}
        self._tokens = tuple(self._words)

    def encode(self, text: str) -> list[int]:
        """Return a token id for each piece of a word."""
        return [token % VOCABULARY for token in self._encoder.encode(text)]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids of a chat, as a generator without a template does."""
        return self.encode(chat_text(messages, tools))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the words of generated tokens, and the ids of others."""
        return "".join(f" {self._words.get(token, token)}" for token in tokens)

    def next_token(self, stream: TokenStream) -> int:
        """Return the token that follows: a hash of the stream's seed and its place."""
        return self._tokens[hashed(stream.seed, len(stream.output)) % len(self._tokens)]


class SimulatedTokens(SimulatedExecutor):
    """Waits the time of a latency model for each step, and generates tokens by hashes.

    Steps are run one by one: clients may come and leave after each.

    Attributes:
        streams: token ids of the requests that run, by request id.
        measured: no steps: none is measured.
    """

    mode = "wall"

    def __init__(self, latency: LatencyModel, model: SimulatedModel, seed: int) -> None:
        super().__init__(latency)
        self.jumps = False
        self.streams: dict[int | str, TokenStream] = {}
        self.measured: list[MeasuredStep] = []
        self._model, self._seed = model, seed

    def run(
        self, work: StepWork, chunks: Sequence[tuple[Job, int]], decoding: Iterable[Job]
    ) -> StepResult:
        """Return the time of the step, and the keys of blocks that its tokens complete."""
        prefilled = (
            job
            for job, tokens in chunks
            if job.computed + tokens == job.target and job.output_tokens
        )
        named = []
        for job in chain(prefilled, decoding):
            name = job.request.id
            stream = self.streams.get(name)
            if stream is None:
                stream = TokenStream(job.request, VOCABULARY, self._seed)
                self.streams[name] = stream
            stream.append(self._model.next_token(stream))
            keys = stream.new_keys(job.output_tokens)
            if keys:
                named.append((job, keys))
        return StepResult(self.latency.duration(work), (), named)
