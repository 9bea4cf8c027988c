"""Kernels that store, copy and swap: run in Triton's interpreter."""

import os
from math import nan

import pytest

from kvcore import Plugins, run
from kvcore.engine import RaggedBatch, Rotary, Rotation, TensorLayout
from kvcore_engine.backend import TorchCPU

torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
pytest.importorskip("triton", reason="the kernels are Triton's")

from kvcore_engine.backend import _coded_pool, _pool  # noqa: E402 - these need torch
from kvcore_engine.backend.kernels import store  # noqa: E402 - needs Triton
from kvcore_engine.backend.kernels.copy import RowMover  # noqa: E402 - needs Triton
from kvcore_engine.backend.kernels.store import (  # noqa: E402 - likewise
    PLAIN,
    Target,
    store_rows,
)

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off"
    ),
    # The interpreter computes with numpy, which warns of invalid values.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(*shape, seed=0):
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spec",
    [
        "int8",
        "fp8-e4m3",
        "fp8-e4m3:factor=0.25",
        "fp8-e4m3:scale=head",
        "fp8-e5m2",
        "fp8-e5m2:scale=head",
    ],
)
def test_stored_codes_equal_those_of_the_codec(spec, dtype):
    """Stored codes and scales equal the codec's, also for zeros, NaN and overflow."""
    codec = Plugins().build("codec", spec)
    rows = (3 * drawn(9, 2, 80)).to(dtype)
    rows[2] /= 4096
    rows[3], rows[4, 1, 3], rows[5, 0, 7] = 0, 1e9, nan
    planes = [torch.zeros(50, p.bytes, dtype=torch.uint8) for p in codec.planes("keys", 1, 80)]
    slots = torch.randperm(50)[:18]
    store_rows((Target.from_codec(codec, "keys", dtype, planes), slots, rows, None))
    coded = codec.encode("keys", rows.flatten(0, 1)[:, None])
    lost = rows.flatten(0, 1).isnan()
    if len(planes) > 1:  # a NaN makes the scale NaN, and the codes mean nothing
        lost |= lost.any(1, keepdim=True)
    found = [
        plane[slots].view(data.dtype).view(data.shape).float()
        for plane, data in zip(planes, coded, strict=True)
    ]
    expected = [data.float() for data in coded]
    assert found[0][:, 0][~lost].equal(expected[0][:, 0][~lost])
    if spec.startswith("fp8") and len(planes) == 1:
        assert found[0].isnan().equal(lost[:, None])
    for scales, right in zip(found[1:], expected[1:], strict=True):
        assert scales.nan_to_num(-1).equal(right.nan_to_num(-1))


ROTATIONS = [(8, False), (8, True), (5, False), (5, True), (1, True)]
"""The rotated pairs of a key of 16 numbers, and whether the two of a pair are adjacent."""


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("pairs", "adjacent"), ROTATIONS)
def test_stored_keys_are_rotated(pairs, adjacent, dtype):
    """Keys are rotated as in float64 and rounded once; values are stored as they are."""
    keys, values = drawn(9, 3, 16).to(dtype), drawn(9, 3, 24, seed=1).to(dtype)
    speeds = tuple(0.5**i for i in range(pairs))
    cos, sin = Rotary(speeds, adjacent).angles(torch.arange(3, 12))
    places = [torch.full((50, width), nan, dtype=dtype) for width in (16, 24)]
    slots = torch.randperm(50)[:27]
    store_rows(
        (Target(PLAIN, places[:1]), slots, keys, Rotation(cos, sin, adjacent=adjacent)),
        (Target(PLAIN, places[1:]), slots.flip(0), values, None),
    )
    exact = Rotary(speeds, adjacent).rotate(keys.double(), cos[:, None], sin[:, None])
    found = places[0][slots].view(9, 3, 16).double()
    # The interpreter rounds to bf16 towards zero.
    step = torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 else 2)
    limit = step * exact.abs() + (1e-6 if dtype.itemsize < 8 else 1e-12)
    assert ((found - exact).abs() <= 1.01 * limit).all()
    assert found[..., 2 * pairs :].equal(keys[..., 2 * pairs :].double())
    assert places[1][slots.flip(0)].equal(values.flatten(0, 1))
    assert sum(place.isnan().any(1).sum() for place in places) == 2 * (50 - 27)


@pytest.mark.parametrize("stride", [1, 2])
def test_rotation_by_a_table_equals_rotation_by_angles(stride):
    """Rotation by a table of all positions equals rotation by the tokens' own angles.

    However far apart in memory the places are that name its rows.
    """
    keys, positions = drawn(6, 2, 16), torch.tensor([7, 0, 3, 3, 99, 50])
    positions = positions.repeat_interleave(stride)[::stride]
    rotary, slots, found = Rotary((1.0, 0.1, 0.01)), torch.arange(12), []
    table = rotary.rotation(torch.arange(100))
    named = Rotation(table.cos, table.sin, positions)
    for rotation in (named, rotary.rotation(positions)):
        found.append(torch.zeros(12, 16))
        store_rows((Target(PLAIN, found[-1:]), slots, keys, rotation))
    assert found[0].equal(found[1])
    torch.testing.assert_close(found[0], named.rotate(keys).flatten(0, 1))


@pytest.mark.parametrize("spec", ["int8", "fp8-e4m3", "fp8-e5m2:scale=head"])
@pytest.mark.parametrize("adjacent", [False, True])
def test_stored_codes_are_those_of_rotated_keys(spec, adjacent):
    """Codes are those of rotated keys; rounding may change a code by one."""
    codec, keys = Plugins().build("codec", spec), drawn(9, 2, 80).half()
    rotation = Rotary(tuple(0.8**i for i in range(30)), adjacent).rotation(torch.arange(9))
    planes = [torch.zeros(18, p.bytes, dtype=torch.uint8) for p in codec.planes("keys", 1, 80)]
    target = Target.from_codec(codec, "keys", torch.float16, planes)
    store_rows((target, torch.arange(18), keys, rotation))
    coded = codec.encode("keys", rotation.rotate(keys).flatten(0, 1)[:, None])
    codes = planes[0].int(), coded[0].view(torch.uint8).flatten(1).int()
    apart = (codes[0] - codes[1]).abs()
    assert apart.max() <= 1
    assert apart.float().mean() < 0.01


def test_codecs_without_a_kernel_have_no_target():
    """Codecs without a kernel, and int8 of float64 rows, have no target for a kernel."""
    for spec in ("int4", "int8:keys=channel", "kivi:bits=2"):
        assert (
            Target.from_codec(Plugins().build("codec", spec), "keys", torch.float32, []) is None
        )
    assert (
        Target.from_codec(Plugins().build("codec", "int8"), "keys", torch.float64, []) is None
    )


@pytest.mark.parametrize(
    ("dtype", "widths"),
    [
        (torch.float32, (32, 48)),
        (torch.bfloat16, (4200, 16)),
        (torch.float16, (5, 7)),
        (torch.uint8, (3, 9)),
    ],
)
def test_row_mover_moves_rows_of_all_matrices(dtype, widths):
    """`RowMover` moves rows of all matrices, whatever their alignment, and no others."""
    matrices = [drawn(20, width, seed=width).mul(50).to(dtype) for width in widths]
    expected = [matrix.clone() for matrix in matrices]
    mover, sources, targets = RowMover(matrices), torch.tensor([3, 5]), torch.tensor([0, 19])
    mover.copy(sources, targets)
    for each in expected:
        each[targets] = each[sources]
    assert all(map(torch.equal, matrices, expected))
    stage = mover.gather(sources)
    held = [matrix[sources].view(torch.uint8) for matrix in matrices]
    assert stage.equal(torch.cat(held, 1))
    mover.scatter(stage, torch.tensor([11, 10]))
    assert all(matrix[[11, 10]].equal(matrix[[3, 5]]) for matrix in matrices)


OVERLAPS = {
    "chain": [(0, 1), (1, 2), (2, 3)],
    "cycle": [(0, 1), (1, 2), (2, 0)],
    "fan": [(0, 1), (0, 2), (3, 0), (5, 5), (6, 7)],
}
"""Pairs (source, target) in which the target of one may be the source of another."""


@pytest.mark.parametrize("way", ["kernel", "rows", "index"])
@pytest.mark.parametrize("pairs", OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_blocks_are_copied(monkeypatch, pairs, way):
    """All sources are read before any target is written, in every way to copy."""
    monkeypatch.setattr(_pool, "kernels_for", lambda _: way == "kernel")
    monkeypatch.setattr(_pool, "LONG_ROW", 1 if way == "rows" else 1 << 40)
    backend = TorchCPU()
    backend.allocate(
        TensorLayout(blocks=8, block_size=4, layers=2, kv_heads=2, head_dim=8, value_dim=12)
    )
    before = []
    for layer in (0, 1):
        for part in backend.layer_blocks(layer):
            part.copy_(drawn(*part.shape, seed=layer))
            before.append(part.clone())
    backend.copy_blocks(pairs)
    after = [part for layer in (0, 1) for part in backend.layer_blocks(layer)]
    for old, new in zip(before, after, strict=True):
        expected = old.clone()
        for source, target in pairs:
            expected[target] = old[source]
        assert new.equal(expected)


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("spec", [None, "int8", "fp8-e4m3", "int4", "kivi:bits=4"])
def test_stored_blocks_are_the_same_with_kernels_as_without(monkeypatch, spec, rotated):
    """Stored, copied and swapped blocks are the same with kernels as without."""
    codec = None if spec is None else Plugins().build("codec", spec)
    found = []
    for kernels in (True, False):
        for module in (_pool, _coded_pool):
            monkeypatch.setattr(module, "kernels_for", lambda _, known=kernels: known)
        backend = TorchCPU()
        sizes = {"block_size": 32, "layers": 1, "kv_heads": 2, "head_dim": 32, "value_dim": 64}
        backend.allocate(TensorLayout(blocks=6, dtype="fp16", codec=codec, **sizes))
        plan = backend.plan(RaggedBatch([[4, 1]], [0], [43]))
        rows = (drawn(43, 2, width, seed=width).half() for width in (32, 64))
        if rotated:
            turn = Rotary((1.0, 0.5, 0.1)).rotation(torch.arange(43))
            backend.store_rotated(0, plan, *rows, turn)
        else:
            backend.store(0, plan, *rows)
        backend.copy_blocks([(4, 0), (1, 4)])
        backend.swap_in(backend.swap_out([0, 4]), [2, 3])
        found.append(backend.read(0, [2, 3], 43))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("spec", [None, "int8"])
def test_one_launch_stores_the_kv_of_a_layer(monkeypatch, spec):
    """K and V of a layer are stored by one launch, rotated keys included."""
    for module in (_pool, _coded_pool):
        monkeypatch.setattr(module, "kernels_for", lambda _: True)
    codec = None if spec is None else Plugins().build("codec", spec)
    backend, kernel = TorchCPU(), store._store
    sizes = {"block_size": 16, "layers": 1, "kv_heads": 2, "head_dim": 32, "value_dim": 16}
    backend.allocate(TensorLayout(blocks=2, codec=codec, **sizes))
    launches = []

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(store, "_store", Counted())
    plan = backend.plan(RaggedBatch([[1]], [0], [5]))
    turn = Rotary((1.0,)).rotation(torch.arange(5))
    backend.store_rotated(0, plan, drawn(5, 2, 32), drawn(5, 2, 16), turn)
    assert launches == [(1, 2)]


@pytest.mark.parametrize("way", ["kernel", "index", "runs"])
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_swapped_blocks_come_back_unchanged(monkeypatch, way, together):
    """Blocks that are swapped out and in, and read and written, come back unchanged."""
    # A device with an index differs from that of tensors, which has none, but is the same.
    monkeypatch.setattr(_pool.Pool, "device", torch.device("cpu", 0))
    monkeypatch.setattr(_pool, "kernels_for", lambda _: way == "kernel")
    monkeypatch.setattr(_pool, "LONG_RUN", 1 if way == "runs" else 1 << 40)
    backend = TorchCPU()
    sizes = {"block_size": 4, "layers": 2, "kv_heads": 2, "head_dim": 8, "value_dim": 12}
    backend.allocate(TensorLayout(blocks=8, together=together, **sizes))
    for layer in (0, 1):
        for part in backend.layer_blocks(layer):
            part.copy_(drawn(*part.shape, seed=layer))
    before = [backend.read_heads(1, part, [5, 0, 3], 12) for part in ("keys", "values")]
    backend.swap_in(backend.swap_out([5, 0, 3]), [7, 1, 2])
    buffer = backend.host_buffer(3)
    backend.read_blocks([7, 1, 2], buffer)
    backend.fill(nan, [5, 0, 3, 7, 1, 2])
    backend.write_blocks([0, 3, 5], buffer)
    after = [backend.read_heads(1, part, [0, 3, 5], 12) for part in ("keys", "values")]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_kernels_and_torch_generate_the_same_tokens(monkeypatch, codec):
    """A model generates the same tokens whether kernels or torch rotate its keys."""
    found, rotated = [], []
    rotate = Rotation.rotate
    monkeypatch.setattr(Rotation, "rotate", lambda *both: rotated.append(1) or rotate(*both))
    for kernels in (True, False):
        for module in (_pool, _coded_pool):
            monkeypatch.setattr(module, "kernels_for", lambda _, known=kernels: known)
        model = "transformer:layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8"
        prompts = ["a prompt of some words", "another"]
        options = {"latency": "linear", "memory": "4MiB", "codec": codec}
        done = run(prompts=prompts, max_output=6, generator=model, **options)
        found.append((done.outputs, len(rotated)))
        rotated.clear()
    (tokens, fused), (as_torch, apart) = found
    assert tokens == as_torch
    # With kernels torch rotates only the queries.
    assert fused == (apart // 2 if codec != "int4" else apart)
