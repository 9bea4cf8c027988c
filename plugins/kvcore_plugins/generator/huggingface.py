"""Any decoder-only model of Hugging Face transformers, its K/V in paged blocks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvcore import Backend, Generator, InputError
from kvcore.engine import Attend, TokenStep
from kvcore.models.spec import ModelSpec
from kvcore_plugins.generator.shape import checked_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@attrs.define(slots=False, eq=False)
class HuggingFace(Generator):
    """A decoder-only transformers model; every step is one ragged batch without padding.

    Llama, Qwen2, Qwen3 and Mistral are tested, sliding windows included; any model works
    whose attention goes through transformers' AttentionInterface, with one K and one V a
    head in every layer. Soft-capped scores and learned sinks are refused.

    Options:
        model: a folder as `save_pretrained` writes it, or a name that transformers finds;
            in code also a model, which is converted in place and stays switched over.
        tokenizer: likewise, where it is not in the model's folder. With none at all, texts
            become a hashed token a word.
        temperature, top_k: of sampling, by the sequences' seeds; 0 takes the likeliest token.

    Raises:
        InputError: when first used: a model that cannot be read, or not go through blocks.
    """

    name: ClassVar[str] = "huggingface"

    model: Path | Any
    tokenizer: Path | Any = None
    temperature: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    top_k: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )

    @classmethod
    def unavailable(cls) -> str | None:
        """Say which of torch and transformers is not installed."""
        missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
        return f"needs {' and '.join(missing)}: pip install 'kvcore[hf]'" if missing else None

    def options(self) -> dict[str, Any]:
        """Return the options as text can say them: models and tokenizers by their names."""
        return {name: _named(value) for name, value in super().options().items()}

    @cached_property
    def spec(self) -> ModelSpec:
        """The shape of the model, its parameters counted."""
        from kvcore_plugins.generator.hf_model import spec_of  # noqa: PLC0415 - transformers

        return spec_of(self.network)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows."""
        return int(self.network.config.get_text_config(decoder=True).vocab_size)

    @property
    def ends(self) -> frozenset[int]:
        """The token ids that end a text, by the generation config."""
        ends = getattr(self.network.generation_config, "eos_token_id", None)
        return frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))

    @cached_property
    def network(self) -> PreTrainedModel:
        """The transformers model itself, read when first asked for."""
        from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: PLC0415

        given = self.model
        is_path = isinstance(given, str | Path)
        network = _read(AutoModelForCausalLM, given, "model") if is_path else given
        if not isinstance(network, PreTrainedModel):
            msg = f"model={network!r} is no transformers model: give one, or its folder"
            raise InputError(msg)
        if "logits_to_keep" not in inspect.signature(network.forward).parameters:
            msg = f"{type(network).__name__} makes no next tokens: give a model for causal LM"
            raise InputError(msg)
        network.train(mode=False)
        return network

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        from transformers import AutoTokenizer  # noqa: PLC0415

        source = self.tokenizer
        if source is None and isinstance(self.model, str | Path):
            folder = Path(self.model)
            if not folder.is_dir() or any(folder.glob("tokenizer*")):
                source = folder
        if isinstance(source, str | Path):
            source = _read(AutoTokenizer, source, "tokenizer")
        return source  # type: ignore[no-any-return]

    def load(self, backend: Backend, dtype: str) -> None:
        """Convert the weights, put them on the backend's device, switch attention over."""
        from kvcore_plugins.generator.hf_model import DTYPES, switch_over  # noqa: PLC0415

        super().load(backend, checked_dtype(self, dtype))
        switch_over(self.network)
        self.network.to(device=backend.tensor([0]).device, dtype=DTYPES[dtype])  # type: ignore[call-arg]

    def forward(self, step: TokenStep, attend: Attend) -> list[int | None]:
        """Run the batch as one row of tokens; project those to logits that draw."""
        import torch  # noqa: PLC0415

        from kvcore_plugins.generator.hf_model import Packed  # noqa: PLC0415
        from kvcore_plugins.generator.sampling import sample  # noqa: PLC0415

        device, packed = self.network.device, Packed(attend)
        drawing = [
            (end - 1, (seed, place))
            for end, seed, place in zip(
                accumulate(step.lengths), step.seeds, step.draws, strict=True
            )
            if place is not None
        ]
        last = [row for row, _ in drawing]
        with torch.no_grad():
            out = self.network(
                input_ids=torch.tensor([step.tokens], device=device),
                position_ids=torch.tensor([step.positions], device=device),
                past_key_values=packed,
                use_cache=True,
                logits_to_keep=torch.tensor(last, dtype=torch.long, device=device),
                paged=packed,
            )
        drawn = iter(
            sample(out.logits[0], [mark for _, mark in drawing], self.temperature, self.top_k)
        )
        return [None if place is None else next(drawn) for place in step.draws]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text` by the tokenizer, or a hashed one a word."""
        if self._tokenizer is None:
            return super().encode(text)
        return list(self._tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` by the tokenizer, or their ids."""
        if self._tokenizer is None:
            return super().decode(tokens)
        return str(self._tokenizer.decode(list(tokens)))


def _read(auto: Any, source: str | Path, what: str) -> Any:
    """Read a pretrained model or tokenizer from a folder, or by name."""
    try:
        return auto.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        reason, _, _ = str(error).partition("\n")
        if not Path(source).exists():
            reason = f"there is no such folder, and transformers finds no such name: {reason}"
        msg = f"{source}: no {what} that transformers can read: {reason}"
        raise InputError(msg) from error


def _named(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    return str(value) if isinstance(value, str | Path) else type(value).__name__
