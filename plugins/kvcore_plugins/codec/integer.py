"""K/V in 8, 4 or 2 bits: steps of even grids, packed into bytes."""

from __future__ import annotations

from abc import abstractmethod
from math import gcd
from typing import Any, ClassVar, Literal

import attrs

from kvcore.errors import InputError
from kvcore.models.codec import Codec, Part, Plane

_GROUP = 32
"""Numbers of a group of KIVI, as published."""

_COUNT = attrs.validators.optional(attrs.validators.ge(1))


class _Grids(Codec):
    """Codes the numbers of a group as steps of a grid that spans them."""

    @property
    @abstractmethod
    def _bits(self) -> int:
        """Bits of a code: 8, 4 or 2."""

    @abstractmethod
    def _size(self, part: Part, tokens: int, width: int) -> int:
        """Return how many share a grid: tokens of a channel, or channels of a token."""

    def _across(self, part: Part) -> bool:
        """Return True if a grid spans a channel in some tokens: False unless overridden."""
        return False

    def by_token(self, part: Part) -> bool:
        """Return True if no grid is that of several tokens."""
        return not self._across(part)

    def planes(self, part: Part, tokens: int, width: int) -> tuple[Plane, ...]:
        """Return `codes` and, in fp16, `grids`: a scale and a zero for each group.

        Raises:
            InputError: codes do not fill bytes, or groups do not fill the block.
        """
        if width * self._bits % 8:
            msg = (
                f"codec {self.name!r} packs {8 // self._bits} numbers a byte, which a head of "
                f"{width} numbers does not fill: take int8"
            )
            raise InputError(msg)
        group = self._size(part, tokens, width)
        grids = (tokens, width // group, 2)
        if self._across(part):
            grids = (tokens // group, 2, width)
        codes = Plane("codes", "uint8", (tokens, width * self._bits // 8))
        return codes, Plane("grids", "fp16", grids)

    def encode(self, part: Part, rows: Any) -> tuple[Any, ...]:
        """Return codes and grids. Numbers beyond fp16 are cut; NaN makes its grid NaN."""
        from kvcore_plugins.codec import _uniform  # noqa: PLC0415 - torch

        group = self._size(part, *rows.shape[1:])
        return _uniform.encode(rows, self._bits, group, across=self._across(part))

    def decode(self, part: Part, planes: tuple[Any, ...]) -> Any:
        """Return the points of the grids, in fp32."""
        from kvcore_plugins.codec import _uniform  # noqa: PLC0415 - torch

        codes, grids = planes
        return _uniform.decode(codes, grids, self._bits, across=self._across(part))


@attrs.define(slots=False, eq=False)
class _Integer(_Grids):
    """Has one grid for each token and head, or, in keys, for each channel of a block."""

    keys: Literal["token", "channel"] = attrs.field(
        default="token", validator=attrs.validators.in_(("token", "channel")), kw_only=True
    )

    def _across(self, part: Part) -> bool:
        """Return True for keys by channel."""
        return part == "keys" and self.keys == "channel"

    def _size(self, part: Part, tokens: int, width: int) -> int:
        """Return the tokens of the block, or the width."""
        return tokens if self._across(part) else width


class INT8(_Integer):
    """Store K/V in 8 bits, with a scale and a zero for each token and head.

    Options:
        keys: numbers of keys that share a scale: `token`, all channels of a token, or
            `channel`, a channel in all tokens of a block; see `int4`.

    Source: Dettmers et al., "LLM.int8(): 8-bit matrix multiplication for transformers at
    scale", NeurIPS 2022, for scales by token; grids with a zero: Jacob et al., "Quantization
    and training of neural networks for efficient integer-arithmetic-only inference", CVPR
    2018.
    """

    name: ClassVar[str] = "int8"
    _bits = 8


class INT4(_Integer):
    """Store K/V in 4 bits, with a scale and a zero for each token and head.

    Options:
        keys: numbers of keys that share a scale: `token`, all channels of a token, or
            `channel`, a channel in all tokens of a block. Some channels of keys are far greater
            than the others, and dominate a scale by token. By channel, the tokens of a block
            wait in full precision until it is full.

    Source: Sheng et al., "FlexGen: high-throughput generative inference of large language
    models with a single GPU", ICML 2023, for K/V in 4 bits; Hooper et al., "KVQuant", NeurIPS
    2024, for keys by channel.
    """

    name: ClassVar[str] = "int4"
    _bits = 4


@attrs.define(slots=False, eq=False)
class KIVI(_Grids):
    """Store keys by channel and values by token, in 2 or 4 bits; the newest stay as they are.

    In keys a group is a channel of some tokens, in values some channels of a token. The
    newest tokens, in full precision, are those of a block that is not full yet: `residual`
    is the block size. As published: `group=32`, and blocks of 128 tokens.

    Options:
        bits: bits of a number, 2 or 4.
        group: numbers that share a scale and a zero; None: 32, or the block size, or the
            width of a head, where these are less.
        residual: most tokens in full precision; None: the block size, the only value that is
            accepted.

    Source: Liu et al., "KIVI: a tuning-free asymmetric 2bit quantization for KV cache", ICML
    2024. There the newest values stay one by one, so that always `residual` of them do; here
    a block is coded at once, keys and values.
    """

    name: ClassVar[str] = "kivi"

    bits: int = attrs.field(default=2, validator=attrs.validators.in_((2, 4)), kw_only=True)
    group: int | None = attrs.field(default=None, validator=_COUNT, kw_only=True)
    residual: int | None = attrs.field(default=None, validator=_COUNT, kw_only=True)

    def planes(self, part: Part, tokens: int, width: int) -> tuple[Plane, ...]:
        """Return `codes` and, in fp16, `grids`: a scale and a zero for each group.

        Raises:
            InputError: the residual is not the block size, groups do not fill the block or
                the head, or codes do not fill bytes.
        """
        if self.residual not in (None, tokens):
            msg = (
                f"kivi: residual={self.residual} with blocks of {tokens} tokens: what stays in "
                "full precision is the block that is not full yet; give --block-size "
                f"{self.residual}, or leave residual out"
            )
            raise InputError(msg)
        numbers, what = (width, "channels") if part == "values" else (tokens, "tokens")
        group = self._size(part, tokens, width)
        if numbers % group:
            holder = "heads" if part == "values" else "blocks"
            msg = (
                f"kivi: groups of {group} {what} do not fill {holder} of {numbers}; give "
                f"group={gcd(group, tokens, width)}"
            )
            if part == "keys" and width % group == 0:
                msg += f", or --block-size {-(-numbers // group) * group}"
            raise InputError(msg)
        return super().planes(part, tokens, width)

    def by_token(self, part: Part) -> bool:
        """Return False: values too stay in full precision until their block is full."""
        return False

    @property
    def _bits(self) -> int:
        return self.bits

    def _across(self, part: Part) -> bool:
        return part == "keys"

    def _size(self, part: Part, tokens: int, width: int) -> int:
        return self.group or min(_GROUP, tokens if part == "keys" else width)
