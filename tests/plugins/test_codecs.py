"""The numbers to which codecs round, byte by byte, and the blocks that they refuse."""

from math import inf, nan

import pytest
from helpers.faults import fail, faulty

from kvcore import Codec, InputError, Plugins, PolicyError
from kvcore.engine import Plane

torch = pytest.importorskip("torch", reason="codecs code torch tensors")

from kvcore_plugins.codec import E4M3, E5M2, INT4, INT8, KIVI  # noqa: E402 - need torch
from kvcore_plugins.codec._uniform import rounded_up  # noqa: E402


def coded(codec, rows, part="keys"):
    """Return rows, `[tokens, width]`, encoded and decoded."""
    planes = codec.encode(part, torch.tensor(rows, dtype=torch.float64)[None])
    return codec.decode(part, planes)[0]


def test_int4_packs_two_codes_a_byte():
    """A byte of int4 has a code of the first half of the head in its lower bits.

    The upper bits have the code of the second half.
    """
    codes, grids = INT4().encode("keys", torch.arange(16.0)[None, None])
    assert codes.flatten().tolist() == [low + 16 * (low + 8) for low in range(8)]
    assert grids.flatten().tolist() == [1, 0]


def test_kivi_packs_four_codes_a_byte():
    """A byte of 2-bit KIVI has a code of each quarter of the head."""
    rows = torch.tensor([0.0, 3, 1, 2, 2, 2, 3, 0])[None, None]
    codes, grids = KIVI(bits=2).encode("values", rows)
    assert codes.flatten().tolist() == [
        0 + 4 * 1 + 16 * 2 + 64 * 3,
        3 + 4 * 2 + 16 * 2 + 64 * 0,
    ]
    assert grids.flatten().tolist() == [1, 0]


def test_each_kivi_group_has_its_own_grid():
    """In KIVI a spike widens only the grid of its own group.

    A group has several tokens of a channel in keys, several channels of a token in values.
    """
    codec = KIVI(bits=2, group=4)
    rows = torch.zeros(1, 8, 8)
    rows[0, 1, 2] = 300
    _, keys = codec.encode("keys", rows)
    assert keys[0, :, 0].nonzero().tolist() == [[0, 2]]
    _, values = codec.encode("values", rows)
    assert values[0, :, :, 0].nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("codec", [INT8(), INT4(), INT4(keys="channel"), KIVI()], ids=repr)
def test_numbers_beyond_fp16_are_clipped(codec):
    """Numbers beyond 65,504, infinities included, are clipped to it, within half a step."""
    rows = [[0.0, 1e6, -inf, 5.0, inf, -7e4, 3.0, 1.0]] * 4
    expected = torch.tensor(rows).clamp(-65504, 65504)
    steps = {"int8": 255, "int4": 15, "kivi": 3}[codec.name]
    found = coded(codec, rows)
    assert ((found - expected).abs() <= 1.001 * 131008 / steps / 2).all()


@pytest.mark.parametrize("codec", [INT8(), INT4(), INT4(keys="channel"), KIVI()], ids=repr)
@pytest.mark.parametrize("size", [0.1, 1, 300])
def test_repeated_coding_does_not_drift(codec, size):
    """Numbers that are decoded and coded again and again, as after rollbacks, do not drift."""
    draws = torch.Generator().manual_seed(1)
    rows = size * torch.randn(4, 32, 64, generator=draws)
    once = again = codec.decode("keys", codec.encode("keys", rows))
    for _ in range(20):
        again = codec.decode("keys", codec.encode("keys", again))
    torch.testing.assert_close(again, once, rtol=1e-6, atol=1e-6 * size)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    ("codec", "steps"), [(INT8(), 255), (INT4(), 15), (KIVI(), 3)], ids=repr
)
def test_a_grid_spans_numbers_far_from_zero(codec, steps, sign):
    """A grid covers numbers far from zero, even though its zero is rounded to fp16.

    Near 1000 the numbers of fp16 are half a unit apart.
    """
    rows = sign * (1000.3 + 0.2 * torch.rand(2, 8, 16, dtype=torch.float64))
    for part in ("keys", "values"):
        found = codec.decode(part, codec.encode(part, rows))
        assert (found - rows).abs().max() <= 0.701 / steps / 2


def test_a_nan_spreads_to_its_token_or_group():
    """A NaN makes its whole token NaN if coded by token, and its group if coded by channel."""
    rows = torch.zeros(8, 8)
    rows[3, 5] = nan
    lost = coded(INT4(), rows.tolist()).isnan()
    assert lost.nonzero()[:, 0].unique().tolist() == [3]
    lost = coded(KIVI(group=4), rows.tolist()).isnan()
    assert lost.nonzero().tolist() == [[token, 5] for token in range(4)]


def test_rounded_up_returns_the_next_fp16_number():
    """`rounded_up` returns the least fp16 number that is not less, of either sign."""
    given = torch.tensor([1.0, 1.0001, -1.0001, 0.0, 1e-9, -1e-9, 65504.0, nan])
    found = rounded_up(given).double()
    assert found[:-1].tolist() == [1, 1 + 2**-10, -1, 0, 2**-24, 0, 65504]
    assert found[-1].isnan()


@pytest.mark.parametrize("codec", [E4M3(), E5M2()], ids=repr)
def test_fp8_decodes_every_byte_as_torch_does(codec):
    """The fp8 codecs decode all 256 bytes as torch does, NaN and infinity included."""
    dtype = torch.float8_e4m3fn if codec.name == "fp8-e4m3" else torch.float8_e5m2
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)[None, None]
    found = codec.decode("keys", (numbers,))
    torch.testing.assert_close(found, numbers.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("codec", "greatest"), [(E4M3, 448), (E5M2, 57344)])
def test_fp8_saturates(codec, greatest):
    """fp8 clips greater numbers, infinities included, to its greatest number, and keeps NaN."""
    rows = [[1e6, -1e6, inf, -inf, 1.0, nan]]
    found = coded(codec(factor=2), rows)[0].tolist()
    assert found[:5] == [2 * greatest, -2 * greatest, 2 * greatest, -2 * greatest, 1]
    assert found[5] != found[5]


def test_fp8_by_head_codes_tiny_and_large_rows_equally_well():
    """With a scale for each token and head, fp8 codes tiny and large rows equally precisely."""
    for size in (1e-3, 1.0, 1e4):
        rows = [[size, -size / 2, size / 3, 0.0]]
        found = coded(E4M3(scale="head"), rows)
        assert ((found - torch.tensor(rows)).abs() <= size / 16).all()


@pytest.mark.parametrize(
    ("spec", "tokens", "width", "message"),
    [
        ("int4", 16, 7, "packs 2 numbers a byte, which a head of 7 .* take int8"),
        ("kivi:residual=128", 16, 64, "--block-size 128, or leave residual out"),
        ("kivi:group=12", 16, 64, "12 tokens do not fill blocks of 16; give group=4"),
        (
            "kivi",
            48,
            64,
            "32 tokens do not fill blocks of 48; give group=16, or --block-size 64",
        ),
        ("kivi:group=15", 20, 128, "15 tokens do not fill blocks of 20; give group=1"),
        ("kivi:group=16", 16, 40, "16 channels do not fill heads of 40; give group=8"),
    ],
)
def test_blocks_that_a_codec_cannot_code_are_refused(spec, tokens, width, message):
    """A codec refuses blocks that it cannot code, and the error suggests others."""
    codec = Plugins().build("codec", spec)
    with pytest.raises(InputError, match=message):
        codec.head_bytes(tokens, width, width)


@pytest.mark.parametrize(
    ("dtype", "shape", "message"),
    [
        ("int3", (16, 8), "no dtype 'int3'; there are: uint8"),
        ("fp16", (16, 8 / 3), "is not of whole numbers"),
        ("fp16", (16, 0), "is not of whole numbers, 1 or more"),
        ("fp16", (16, True), r"shape \(16, True\) is not of whole numbers"),
        ("fp16", 16, "shape 16 is not of whole numbers"),
        (["fp16"], (16, 8), r"no dtype \['fp16'\]; there are: uint8"),
    ],
)
def test_impossible_planes_are_refused(dtype, shape, message):
    """Impossible planes raise PolicyError with the name of the codec and the reason."""
    wrong = faulty(
        "Describes an impossible plane.", Codec, name="wrong", encode=fail, decode=fail,
        planes=lambda *_: (Plane("numbers", dtype, shape),),
    )  # fmt: skip
    with pytest.raises(PolicyError, match=rf"plugin 'wrong'.* in planes\(\): .*{message}"):
        wrong().head_bytes(16, 8, 8)
