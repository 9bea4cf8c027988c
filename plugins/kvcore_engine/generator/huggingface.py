"""Any decoder-only model of Hugging Face transformers, its K/V in paged blocks."""

from __future__ import annotations

import inspect
import os.path
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from hashlib import blake2b
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import attrs

from kvcore import Backend, InputError
from kvcore.engine import Attend, RaggedBatch, Rotary, Tensor
from kvcore.lazy import LazyModule
from kvcore.models.spec import ModelSpec
from kvcore_engine.generator.sampling import SamplingGenerator

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvcore_engine.generator._hf_model import TextLength
else:
    torch = LazyModule("torch", globals())


_MOST_LAYERS = 1_024
"""Largest number of layers: each takes transformers 17 ms, whatever weights there are."""

_PIECE, _PIECES = 4_096, 64
"""Bytes of a piece of a file, and pieces that tell it from others of its size."""

_ORIGIN = {"architectures", "_name_or_path", "transformers_version"}


@attrs.define(slots=False, eq=False)
class HuggingFace(SamplingGenerator):
    """Runs a decoder-only transformers model; every step is one batch without padding.

    Llama, Qwen2, Qwen3 and Mistral are tested, sliding windows included; any model works
    whose attention goes through transformers' AttentionInterface, with one K and one V a
    head in every layer. Soft-capped scores are refused.

    Options:
        model: a folder as `save_pretrained` writes it, or a name `org/name` that transformers
            finds, none of whose code is run; in code also a model, which is converted in
            place and stays switched over.
        tokenizer: the tokenizer's folder, name or object, where it is not in the model's
            folder. With none at all, each word of a text becomes a hashed token.
        temperature: divides the logits before sampling, by the sequences' seeds; 0: greedy.
        top_k: number of the likeliest tokens to sample from; None: all.

    Raises:
        InputError: there is no such folder; when first used: the model cannot be read, or
            cannot attend through blocks.
    """

    name: ClassVar[str] = "huggingface"

    model: Path | Any
    tokenizer: Path | Any = None
    temperature: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    top_k: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.ge(1))
    )

    # Of layers with K/V, if others keep a state: the number of each among them.
    _numbers: dict[int, int] = attrs.field(init=False, factory=dict, repr=False)
    _max_model_len: int | None = attrs.field(init=False, default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        """Check that folders are there, and that other names are names of the hub."""
        for source in (self.model, self.tokenizer):
            if isinstance(source, str | Path):
                _place(source)

    @classmethod
    def unavailable(cls) -> str | None:
        """Return which of torch and transformers is not installed."""
        missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
        return f"needs {' and '.join(missing)}: pip install 'kvcore[hf]'" if missing else None

    def options(self) -> dict[str, Any]:
        """Return the options as text can give them: models and tokenizers by their names."""
        return {name: _named(value) for name, value in super().options().items()}

    @cached_property
    def spec(self) -> ModelSpec:
        """The shape of the model, its parameters counted."""
        from kvcore_engine.generator._hf_model import spec_of  # noqa: PLC0415 - transformers

        return spec_of(self.network)

    @property
    def vocabulary(self) -> int:
        """Number of the model's token ids."""
        return int(self.network.config.get_text_config(decoder=True).vocab_size)

    @property
    def positions(self) -> int | None:
        """Number of positions in the model's table of them; None if it has no table.

        Of `longrope` embeddings it is the length up to which their short factors hold, unless
        `max_model_len` is longer.
        """
        from kvcore_engine.generator._hf_model import positions_of  # noqa: PLC0415

        length = self.text_length
        if length is not None and length.kind == "longrope":
            return length.tokens
        return positions_of(self.network)

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of a text of this run, which it tells before it loads the model.

        With more than the original length of `longrope` embeddings their long factors hold for
        all texts; None: the short ones do.
        """
        return self._max_model_len

    @max_model_len.setter
    def max_model_len(self, tokens: int | None) -> None:
        self._max_model_len = tokens
        vars(self).pop("text_length", None)

    @cached_property
    def text_length(self) -> TextLength | None:
        """The length that texts may have for the K/V of a token to be the same in all."""
        from kvcore_engine.generator._hf_model import TextLength  # noqa: PLC0415

        return TextLength.of(self.network, self._max_model_len)

    @cached_property
    def rotary(self) -> tuple[Rotary | None, ...]:
        """The rotary embedding of each layer, as the loaded model's keys show."""
        from kvcore_engine.generator._hf_model import rotary_of  # noqa: PLC0415

        return rotary_of(self.network)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The token ids that end a text, by the generation config."""
        ids = getattr(self.network.generation_config, "eos_token_id", None)
        listed = ids if isinstance(ids, list) else [ids]
        return frozenset(token for token in listed if isinstance(token, int))

    @cached_property
    def network(self) -> PreTrainedModel:
        """The transformers model itself, read at the first access."""
        network = self.model
        if isinstance(network, str | Path):
            network = _read("AutoModelForCausalLM", network, "model")

        from transformers import PreTrainedModel  # noqa: PLC0415

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
        source = self.tokenizer
        if source is None and isinstance(self.model, str | Path):
            source_path, is_folder = _place(self.model)
            if not is_folder or any(Path(source_path).glob("tokenizer*")):
                source = source_path
        if isinstance(source, str | Path):
            source = _read("AutoTokenizer", source, "tokenizer")
        return source

    def identity(self) -> str:
        """Return the files of the model with a digest of each, or a digest of its weights."""
        spec = f"{type(self).__qualname__} {self.spec!r}"
        if self.text_length is not None and self.text_length.extended:
            spec += " of long factors"
        if isinstance(self.model, str | Path):
            path, is_folder = _place(self.model)
            if is_folder:
                files = sorted(file for file in Path(path).iterdir() if file.is_file())
                return f"{spec} {[_fingerprint(file) for file in files]!r}"
            commit = getattr(self.network.config, "_commit_hash", None)
            if commit is not None:
                return f"{spec} {self.model} {commit}"
        digest = blake2b(digest_size=16)
        for name, weights in self.network.state_dict().items():
            digest.update(f"{name} {weights.dtype} {list(weights.shape)}".encode())
            digest.update(
                weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            )
        # Rotary embeddings and the like, without the origin of the model.
        config = self.network.config.to_dict()
        facts = {name: config[name] for name in sorted(config) if name not in _ORIGIN}
        return f"{spec} {facts!r} {digest.hexdigest()}"

    def load(self, backend: Backend, dtype: str) -> None:
        """Convert the weights, put them on the backend's device, attend through `attend`.

        Raises:
            InputError: no tensor has this dtype, or the model does not call attention by
                name.
        """
        from kvcore_engine.generator._hf_model import (  # noqa: PLC0415
            attention_numbers,
            convert,
            layer_types,
            switch_over,
        )
        from kvcore_engine.generator._hf_states import (  # noqa: PLC0415
            pass_through_blocks,
            state_layers,
        )
        from kvcore_plugins.codec.dtypes import TORCH_DTYPES  # noqa: PLC0415

        super().load(backend, dtype)
        switch_over(self.network)
        convert(self.network, backend.tensor([0]).device, TORCH_DTYPES[dtype])
        kinds = layer_types(self.network)
        pass_through_blocks(state_layers(self.network, kinds))
        self._numbers = attention_numbers(kinds)

    def logits(self, batch: RaggedBatch, attend: Attend) -> Tensor:
        """Run the batch as one row of tokens; return the logits where it samples.

        Raises:
            InputError: a position is beyond the length that texts may have.
        """
        from kvcore_engine.generator._hf_model import (  # noqa: PLC0415
            PackedCache,
            cache_argument,
        )

        length = self.text_length
        if length is not None:
            length.check(max(batch.positions))
        device, packed = self.network.device, PackedCache(attend, self._numbers)
        packed.spec = self.spec
        with torch.no_grad(), nullcontext() if length is None else length.fixed():
            out = self.network(
                input_ids=torch.tensor([batch.token_ids], device=device),
                position_ids=torch.tensor([batch.positions], device=device),
                use_cache=True,
                logits_to_keep=torch.tensor(
                    batch.sampled_rows, dtype=torch.long, device=device
                ),
                paged=packed,
                **{cache_argument(self.network): packed},
            )
        return out.logits[0]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text` by the tokenizer, or hashes of its words."""
        if self._tokenizer is None:
            return super().encode(text)
        with _refusing("the tokenizer of the model fails"):
            return list(self._tokenizer.encode(text))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids of a chat by the template of the tokenizer, if it has one.

        Raises:
            InputError: the template refuses the messages, such as a role that it does not know.
        """
        tokenizer = self._tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            return super().encode_chat(messages, tools)
        chat = [dict(message) for message in messages]
        with _refusing("the chat template of the model refuses the messages"):
            text = tokenizer.apply_chat_template(
                chat, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
            return list(tokenizer.encode(str(text), add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special ones, or the ids themselves."""
        if self._tokenizer is None:
            return super().decode(tokens)
        with _refusing("the tokenizer of the model fails"):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def _fingerprint(file: Path) -> tuple[str, int, int, str]:
    """Return name, size and time of a file, and a digest of pieces from its head to its end.

    A file of up to 256 KiB is read whole. The time alone would not do: all files of a
    container's image may have the same one.
    """
    stat, digest = file.stat(), blake2b(digest_size=16)
    with file.open("rb") as opened:
        for start in range(0, stat.st_size, max(_PIECE, -(-stat.st_size // _PIECES))):
            opened.seek(start)
            digest.update(opened.read(_PIECE))
    return file.name, stat.st_size, stat.st_mtime_ns, digest.hexdigest()


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise InputError for whatever a model, tokenizer or template raises: files describe them.

    A panic of a tokenizer, whose code is in Rust, is no `Exception`.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:
        msg = f"{what}: {_reason(error)}"
        raise InputError(msg) from error


def _reason(error: BaseException) -> str:
    """Return in one line why files of a model or a tokenizer cannot be used."""
    if "trust_remote_code" in str(error):
        return "it comes with code of its own, and kvcore runs none"
    if isinstance(error, UnpicklingError):
        return "its weights are a pickle of more than tensors: use safetensors"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _read(auto: str, source: str | Path, what: str) -> Any:
    """Return the object that the class `auto` of transformers reads from a folder or by name.

    No code that comes with a model is run, whatever its files name. A name is looked up in
    the cache of this machine first, and then on the hub, if that can be reached.

    Raises:
        InputError: transformers cannot read it, or not without running code.
    """
    path, is_folder = _place(source)

    import transformers  # noqa: PLC0415

    logging = transformers.utils.logging
    shows_progress = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        with _refusing(f"{source}: no {what} that transformers can read"):
            try:
                return _pretrained(auto, path, what, local=True)
            except OSError:
                if is_folder:
                    raise
            _announce_download(path, what)
            return _pretrained(auto, path, what, local=False)
    finally:
        if shows_progress:
            logging.enable_progress_bar()


def _pretrained(auto: str, path: str, what: str, *, local: bool) -> Any:
    """Return what transformers reads, with `local` without a look at the hub."""
    import transformers  # noqa: PLC0415

    # No code that files name is run: neither classes, nor kernels that would be fetched
    # for attention, which is replaced anyway.
    safely: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local}
    if what == "model":
        config = transformers.AutoConfig.from_pretrained(path, **safely)
        layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
        if layers > _MOST_LAYERS:
            msg = f"{path}: config.json: {layers:,} layers; {_MOST_LAYERS:,} are the most"
            raise InputError(msg)
        config._attn_implementation = "eager"  # noqa: SLF001 - it has no other name
        safely["config"] = config
    return getattr(transformers, auto).from_pretrained(path, **safely)


def _announce_download(name: str, what: str) -> None:
    """Log that a model or a tokenizer is downloaded.

    Raises:
        InputError: the hub cannot be reached, which transformers would find out by retries.
    """
    from huggingface_hub import constants  # noqa: PLC0415 - comes with transformers

    hub = urlsplit(constants.ENDPOINT)
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    if not why and not getproxies():
        try:
            socket.create_connection((hub.hostname, hub.port or 443), timeout=5).close()
        except OSError as error:
            why = f"{hub.hostname} cannot be reached ({error.strerror or error})"
    if why:
        msg = (
            f"{name}: the {what} is not in the cache of this machine, and {why}: download it "
            "where there is a network, or give a folder"
        )
        raise InputError(msg)
    text = "%s: the %s is not in the cache of this machine: downloading it from %s"
    getLogger("kvcore").warning(text, name, what, hub.hostname)


def _place(source: str | Path) -> tuple[str, bool]:
    """Return the path or name for transformers to read, and whether it is a folder.

    Raises:
        InputError: it is no folder, nor a name of the hub, which has the form org/name, and
            no folder org.
    """
    text = os.path.expanduser(source)  # noqa: PTH111 - Path's raises for unknown users
    org, slash, name = text.partition("/")
    is_path = text.startswith((".", "~")) or "/" in name or Path(org).is_dir()
    is_folder = Path(text).is_dir()
    if not is_folder and (is_path or not (org and slash and name)):
        msg = (
            f"{source}: there is no such folder, and models and tokenizers of the Hugging Face "
            "hub have names of the form org/name, such as Qwen/Qwen3-0.6B"
        )
        raise InputError(msg)
    return text, is_folder


def _named(value: Any) -> Any:
    """Return a number as it is, a path as text, and an object by its class."""
    if value is None or isinstance(value, int | float):
        return value
    return str(value) if isinstance(value, str | Path) else type(value).__name__
