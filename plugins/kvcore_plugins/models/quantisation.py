"""Bytes of quantised weights: which matrices are, and their codes, scales and zeros.

Embeddings, norms, biases and routers are never quantised, and neither is the output layer
unless a config says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from math import ceil
from typing import Any, NoReturn

import attrs

from kvcore.errors import shorten

_FORMATS = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "nvfp4"}

_SCALED = {"nvfp4": 16, "mxfp4": 32}
"""Weights that share a scale of 8 bits, by format."""

_BY_BITS = ("gptq", "awq", "auto-round")

_EXCLUDED = (
    *("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"),
    "llm_int8_skip_modules",
)
"""Fields with the modules that are not quantised: each method has its own."""

_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


@attrs.frozen
class Scheme:
    """The format of a quantised matrix.

    Attributes:
        dtype: number format of a weight.
        inputs, outputs: size of the tiles that share a scale; 0: as many as there are.
        scale_bits: bits of the scale and the zero of a tile.
        index_bits: bits that are stored for each input besides.
    """

    dtype: str
    inputs: int = 0
    outputs: int = 0
    scale_bits: Fraction | int = 32
    index_bits: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse sizes of tiles that are no whole numbers."""
        if not all(isinstance(size, int) and size >= 0 for size in (self.inputs, self.outputs)):
            msg = f"tiles of {self.outputs!r} x {self.inputs!r}"
            raise TypeError(msg)

    def matrix_bytes(self, inputs: int, outputs: int) -> int:
        """Return the bytes of a matrix with all its scales."""
        tiles = -(-inputs // (self.inputs or inputs)) * -(-outputs // (self.outputs or outputs))
        weights = inputs * outputs * (8 if self.dtype[-1] == "8" else 4)
        return ceil((weights + tiles * self.scale_bits + inputs * self.index_bits) / 8)


@attrs.frozen
class Quantisation:
    """The formats of the matrices of a model.

    Attributes:
        schemes: formats, each with the pattern of the modules that have it; the first holds.
        excluded: pattern of the modules that are not quantised.
    """

    schemes: list[tuple[re.Pattern[str], Scheme]]
    excluded: re.Pattern[str]

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the format of a module, such as `model.layers.0.mlp.up_proj`; None: as is."""
        parent, _, name = module.rpartition(".")
        names = (module, f"{parent}.{_FUSED[name]}") if name in _FUSED else (module,)
        if any(map(self.excluded.search, names)):
            return None
        schemes = (s for pattern, s in self.schemes if any(map(pattern.search, names)))
        return next(schemes, None)


def read_quantisation(
    fields: Mapping[str, Any], refuse: Callable[..., NoReturn]
) -> Quantisation:
    """Read the `quantization_config` of a Hugging Face config; `refuse` raises its errors."""
    # ModelOpt names its algorithm alone.
    method = fields.get("quant_method", "modelopt" if "quant_algo" in fields else None)
    if method is None:
        refuse("does not name its 'quant_method'; give --weights-dtype")
    try:
        excluded = [name for field in _EXCLUDED for name in _names(fields.get(field))]
        groups, alone = fields.get("config_groups"), fields.get("quantized_layers")
        if groups and method == "fp8":
            # Modules of no group may lie in blocks of fp8, or as they were.
            refuse("has groups beside blocks of fp8, of unknown size; give --weights-dtype")
        if groups:
            schemes = [
                (
                    _pattern(_names(group.get("targets", "Linear"))),
                    _group_scheme(group["weights"]),
                )
                for group in groups.values()
                if group.get("weights")
            ]
            # Targets by name hold before those by class.
            schemes.sort(key=lambda scheme: not scheme[0].pattern)
        elif alone and fields.get("quant_algo") == "MIXED_PRECISION":
            schemes = [
                (_pattern([name]), _scheme(str(method), {**fields, **options}))
                for name, options in alone.items()
            ]
        else:
            targets = _targets(fields)
            schemes = [(_pattern(targets), _scheme(str(method), fields))]
            # The output layer is quantised if a config says so, and no router is.
            excluded += [] if fields.get("lm_head") is True else ["lm_head"]
            for name, options in dict(fields.get("dynamic") or {}).items():
                if name.startswith("-:"):
                    excluded.append(f"re:{name[2:]}")
                else:
                    scheme = _scheme(str(method), {**fields, **options})
                    schemes.insert(0, (_pattern([f"re:{name.removeprefix('+:')}"]), scheme))
        return Quantisation(schemes, _pattern(excluded or ["re:(?!)"]))
    except _UnknownSizeError:
        bits = " with {} bits" if method in _BY_BITS else ""
        what = f"has weights by {{}}{bits}, of unknown size; give --weights-dtype"
        refuse(what, method, fields.get("bits"))
    except (TypeError, ValueError, LookupError, AttributeError, re.error) as error:
        reason = shorten(f"{type(error).__name__}: {error}", 200)
        refuse(f"cannot be read ({reason}); give --weights-dtype")


class _UnknownSizeError(Exception):
    """Raised for a method whose bytes are not known."""


def _targets(fields: Mapping[str, Any]) -> list[str]:
    """Return the modules that are quantised, if not all are."""
    if fields.get("quant_method") == "mxfp4":
        return ["experts"]
    return [
        name
        for block in _names(fields.get("modules_in_block_to_quantize"))
        for name in _names(block)
    ]


def _names(value: Any) -> list[Any]:
    """Return the items of a list; a text is the only one, and without a value there is none."""
    return [value] if isinstance(value, str) else list(value or ())


MOST_REPEATS = 4
"""Most repetitions in a pattern of a config: each may cost the length of a name once more."""

_TOKENS = re.compile(r"\\.|\[\^?\]?[^\]]*\]|\(\?|(?P<repeat>\)?[*+?{])")
"""Escaped characters, classes, beginnings of groups; and what repeats something, or a group."""


def _bounded(pattern: str) -> str:
    """Return a pattern that can be searched for in the time of MOST_REPEATS nested loops.

    Raises:
        ValueError: it has more repetitions, or repeats a group, which can take years.
    """
    repeats = [match["repeat"] for match in _TOKENS.finditer(pattern) if match["repeat"]]
    if len(repeats) > MOST_REPEATS or any(repeat.startswith(")") for repeat in repeats):
        msg = f"{pattern!r} repeats a group, or has more than {MOST_REPEATS} repetitions"
        raise ValueError(msg)
    return pattern


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of modules: by `re:` and a pattern, or by a part of their names.

    No names, or the class of all matrices, is a pattern of all modules.

    Raises:
        ValueError: to search for a pattern could take too long.
    """
    names = [
        name.replace("language_model.", "").replace("backbone.", "model.") for name in names
    ]
    if not names or "Linear" in names:
        return re.compile("")
    parts = [
        f"^(?:{name[3:]})"
        if name.startswith("re:")
        else rf"(?:^|\.){re.escape(name.rstrip('.')).replace(re.escape('*'), '.*')}(?:\.|$)"
        for name in names
    ]
    return re.compile("|".join(map(_bounded, parts)))


def _scheme(method: str, fields: Mapping[str, Any]) -> Scheme:
    """Return the format of a method that has one for all its matrices."""
    algorithm = fields.get("quant_algo")
    if method in _BY_BITS:
        bits = int(fields.get("bits") or 0)
        group = max(fields.get("group_size", 128), 0)
        # GPTQ stores the group of each input, for the case that inputs are permuted.
        indices = 32 if method == "gptq" else 0
        scheme = Scheme(_dtype("int", bits), group, 1, 16 + bits, indices)
    elif method == "bitsandbytes" and not fields.get("load_in_8bit"):
        # Scales in fp32, or in 8 bits with a scale of their own for 256 of them.
        doubled = fields.get("bnb_4bit_use_double_quant")
        scheme = Scheme("int4", 64, 1, 8 + Fraction(32, 256) if doubled else 32)
    elif method in ("int4", "int8", "bitsandbytes"):
        scheme = Scheme("int4" if method == "int4" else "int8", 0, 1)
    elif method == "mxfp4" or algorithm in ("NVFP4", "W4A8_NVFP4_FP8", "W4A16_NVFP4"):
        dtype = "nvfp4" if algorithm else "mxfp4"
        scheme = Scheme(dtype, fields.get("group_size", _SCALED[dtype]), 1, 8)
    elif method in ("fp8", "fbgemm_fp8") or algorithm == "FP8":
        outputs, inputs = fields.get("weight_block_size") or (method == "fbgemm_fp8", 0)
        scheme = Scheme("fp8", inputs, outputs)
    else:
        raise _UnknownSizeError
    return scheme


def _group_scheme(weights: Mapping[str, Any]) -> Scheme:
    """Return the format of a group of compressed-tensors."""
    bits, kind = weights["num_bits"], weights.get("type", "int")
    dtype = _dtype(kind, bits)
    if dtype == "nvfp4" and weights.get("group_size") == _SCALED["mxfp4"]:
        dtype = "mxfp4"
    outputs, inputs = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "block": weights.get("block_structure") or (0, 0),
    }.get(weights.get("strategy") or "", (1, weights.get("group_size") or 0))
    zero = 0 if weights.get("symmetric", True) else bits
    scale = 8 if dtype in _SCALED else 32 if dtype == "fp8" else 16
    return Scheme(dtype, max(inputs, 0), outputs, scale + zero)


def _dtype(kind: str, bits: Any) -> str:
    dtype = _FORMATS.get((kind, bits))
    if dtype is None:
        raise _UnknownSizeError
    return dtype
