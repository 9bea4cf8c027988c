"""The torch backends: refusals, the layout of memory, and when torch is imported."""

import subprocess
import sys

import attrs
import pytest

from kvcore import InputError, PluginError, Plugins, StorageError
from kvcore.engine import RaggedBatch, Rotary, Rotation, TensorLayout
from kvcore.models.catalogue import MODELS
from kvcore_engine.backend import TorchCPU, TorchCUDA, torch_backend, torch_cuda
from kvcore_plugins import host

torch = pytest.importorskip("torch", reason="these keep K/V in torch tensors")

SMALL = TensorLayout(blocks=8, block_size=4, layers=2, kv_heads=2, head_dim=6, value_dim=6)


def layout(**fields):
    """Return the small layout with some fields replaced."""
    names = ("blocks", "block_size", "layers", "kv_heads", "head_dim", "value_dim")
    return TensorLayout(**({name: getattr(SMALL, name) for name in names} | fields))


@pytest.fixture
def backend():
    """Return a CPU backend with a small pool of zeros."""
    made = TorchCPU()
    made.allocate(SMALL)
    made.fill(0)
    return made


def rows(*, heads=2, width=6, tokens=1, dtype=torch.float32):
    """Return zeros as queries, keys or values of new tokens."""
    return torch.zeros(tokens, heads, width, dtype=dtype)


def test_plugin_lookup_does_not_import_torch():
    """Loading, listing and building plugins does not import torch."""
    code = (
        "import sys; from kvcore import Plugins; plugins = Plugins(); plugins.names('backend');"
        "plugins.build('backend', 'torch-cpu'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["torch-cpu", "torch-cuda"])
def test_without_torch_backends_are_unavailable(name, monkeypatch):
    """Without torch a backend is listed as unusable, and building it names the extra."""
    monkeypatch.setattr(torch_backend, "find_spec", lambda _: None)
    (info,) = (info for info in Plugins().listing() if info.name == name)
    assert not info.usable
    with pytest.raises(PluginError, match=r"pip install 'kvcore\[torch\]'"):
        Plugins().build("backend", name)


def test_without_a_driver_cuda_is_unavailable(monkeypatch):
    """Without an NVIDIA driver, `unavailable()` returns that reason and does not call torch."""
    monkeypatch.setattr(torch_cuda, "DRIVERS", ("libnone.so.7",))
    monkeypatch.setattr(torch_cuda, "_without_gpu", lambda: pytest.fail("asked"))
    assert TorchCUDA.unavailable() == "there is no NVIDIA driver: use torch-cpu"


@pytest.mark.parametrize(
    ("cuda", "available", "reason"),
    [
        (None, False, "is built without CUDA"),
        ("12.8", False, "torch finds no GPU"),
        ("12.8", True, None),
    ],
)
def test_with_a_driver_torch_decides_whether_cuda_is_available(
    cuda, available, reason, monkeypatch
):
    """With a driver, `unavailable()` reports a torch without CUDA or GPU, or returns None."""
    monkeypatch.setattr(torch_cuda, "_loads", lambda _: True)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    found = TorchCUDA.unavailable()
    assert found is None if reason is None else reason in found


def test_a_missing_gpu_is_refused(monkeypatch):
    """The error about a GPU that does not exist gives the number of GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="device=2 is not there; there are 2, from 0"):
        TorchCUDA(device=2).allocate(SMALL)


def test_bf16_needs_a_newer_gpu(monkeypatch):
    """bf16 is refused on a GPU of compute capability 7.5, with the dtypes to use instead."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(InputError, match=r"has 7.5: use fp16, or fp32"):
        TorchCUDA().check(layout(dtype="bf16"))
    TorchCUDA().check(layout(dtype="fp16"))


def test_free_gpu_memory_includes_the_reserve_of_torch(monkeypatch):
    """The free memory of a GPU includes memory that torch has reserved and does not use."""
    for name, value in (
        ("device_count", 1),
        ("mem_get_info", (100, 1000)),
        ("memory_allocated", 300),
        ("memory_reserved", 350),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    memory = TorchCUDA().memory()
    assert (memory.allocated, memory.free, memory.total) == (300, 150, 1000)


class Recorded:
    """A fake tensor or stream that records the calls of its methods."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def __getattr__(self, method):
        """Return a method that records its name, recorded arguments and names of options."""

        def call(*given, **options):
            names = [x.name for x in given if isinstance(x, Recorded)]
            self.log.append((self.name, method, *names, *options))
            return self

        return call

    def __enter__(self):
        """Record that this stream becomes the current one."""
        self.log.append((self.name, "begins"))

    def __exit__(self, *_):
        """Record that this stream is no longer the current one."""
        self.log.append((self.name, "ends"))


def test_staging_copies_beside_the_current_stream(monkeypatch):
    """`stage` pins a tensor and copies it on a stream of its own.

    The current stream waits for the copy; the host does not.
    """
    log = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Recorded(log, "side"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Recorded(log, "current"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    keys = Recorded(log, "keys")
    keys.device = torch.device("cpu")
    TorchCUDA().stage(keys)
    assert log == [
        ("keys", "pin_memory"),
        ("side", "begins"),
        ("keys", "to", "non_blocking"),
        ("side", "ends"),
        ("current", "wait_stream", "side"),
        ("keys", "record_stream", "current"),
    ]


def test_the_error_of_too_large_a_pool_has_the_size_that_fits(monkeypatch, tmp_path):
    """An error gives the memory asked for, the free memory, and how many blocks would fit."""
    (tmp_path / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:  4 kB\n")
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    with pytest.raises(StorageError) as caught:
        TorchCPU().allocate(layout(blocks=100))
    assert str(caught.value) == (
        "100 blocks of 768 B are 75 KiB, and cpu has 4 KiB free: 5 blocks would fit"
    )


def test_a_failed_allocation_raises_storage_error(monkeypatch, tmp_path):
    """If the free memory is unknown, a failed allocation of torch raises StorageError."""
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "none")
    backend = TorchCPU()
    assert backend.memory().free is None
    with pytest.raises(StorageError, match="cpu does not have: ask for fewer"):
        backend.allocate(layout(blocks=2**50))


@pytest.mark.parametrize(
    ("asked", "parameters", "cpus", "expected"),
    [
        (None, 10**6, 8, 1),  # a tiny model
        (None, 10**9, 8, 4),  # the setting of torch
        (None, 10**9, 2, 2),  # the CPUs of this process
        (3, 10**6, 8, 3),
    ],
)
def test_threads_fit_the_model_and_the_process(monkeypatch, asked, parameters, cpus, expected):
    """A tiny model gets one thread; others get torch's setting or the CPUs of the process.

    The former number of threads is restored, also after an exception.
    """
    found = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(torch_backend, "cpus", lambda: cpus)
    model = attrs.evolve(
        MODELS["llama-3.1-8b"], parameters=parameters, active_parameters=parameters
    )
    with pytest.raises(KeyError), TorchCPU().limit_threads(asked, model):
        raise KeyError
    assert found == [expected, 4]


@pytest.mark.parametrize("asked", [0, -1, 9])
def test_threads_without_a_cpu_are_refused(monkeypatch, asked):
    """Less than one thread, or more threads than CPUs, is refused with the allowed range."""
    monkeypatch.setattr(torch_backend, "cpus", lambda: 8)
    context = TorchCPU().limit_threads(asked, MODELS["llama-3.1-8b"])
    with pytest.raises(InputError, match=rf"threads must be 1 to 8, .* not {asked}"), context:
        pass


def test_with_together_a_block_is_contiguous(backend):
    """With `together`, K and V of all layers of a block are contiguous, layer after layer."""
    assert len(backend._pool.matrices) == 2 * SMALL.layers
    backend.allocate(layout(together=True))
    (matrix,) = backend._pool.matrices
    assert matrix.is_contiguous()
    assert matrix.shape == (SMALL.blocks, SMALL.bytes_per_block // 4)
    parts = [backend._pool.keys[0], backend._pool.values[0], backend._pool.keys[1]]
    half = SMALL.bytes_per_block // 4 // SMALL.layers // 2
    assert [part.blocks.storage_offset() for part in parts] == [0, half, 2 * half]


def test_by_default_k_and_v_of_a_layer_are_contiguous(backend):
    """By default, K of a layer is one contiguous tensor, and so is V."""
    parts = [*backend._pool.keys, *backend._pool.values]
    assert all(part.blocks.is_contiguous() for part in parts)
    assert backend.memory().allocated == SMALL.bytes


def test_gather_buffers_are_reused_and_reported(backend):
    """A second step of equal size reuses the gather buffers, and `memory` counts them."""
    plan = backend.plan(RaggedBatch([[1, 2]], [0], [6]))
    for _ in range(2):
        backend.attend(0, plan, rows(tokens=6))
        held = {name: x.data_ptr() for name, x in backend._kernel._buffers.items()}
    backend.attend(1, plan, rows(tokens=6))
    assert {name: x.data_ptr() for name, x in backend._kernel._buffers.items()} == held
    assert backend.memory().allocated > SMALL.bytes


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (RaggedBatch([], [], []), "at least one sequence"),
        (RaggedBatch([[1]], [0], [0]), "0 new tokens after 0"),
        (RaggedBatch([[1]], [-1], [1]), "1 new tokens after -1"),
        (
            RaggedBatch([[0], [1]], [0, 4], [1, 1]),
            "sequence 1 has 1 blocks of 4 tokens .* 2 are needed",
        ),
        (RaggedBatch([[8]], [0], [1]), "has block 8: there are 0 to 7"),
        (RaggedBatch([[-1]], [0], [1]), "has block -1"),
        (RaggedBatch([[1], [2, 2**40]], [0, 4], [1, 1]), f"sequence 1 has block {2**40}: "),
    ],
)
def test_impossible_steps_are_refused(backend, step, message):
    """`plan` refuses empty steps, impossible lengths, and missing or unknown blocks."""
    with pytest.raises(InputError, match=message):
        backend.plan(step)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (rows(tokens=2), r"keys are \[2, 2, 6\] of torch.float32"),
        (rows(width=5), r"need \[1, 2, 6\]"),
        (rows(dtype=torch.float16), "of torch.float16"),
    ],
)
def test_keys_of_a_wrong_shape_or_dtype_are_refused(backend, keys, message):
    """`store` refuses keys of a wrong shape or dtype; the error gives both."""
    plan = backend.plan(RaggedBatch([[1]], [0], [1]))
    with pytest.raises(InputError, match=message):
        backend.store(0, plan, keys, rows())


@pytest.mark.parametrize("most", [1, 3])
def test_moves_put_aside_no_more_than_moved_bytes(backend, monkeypatch, most):
    """`move_blocks` makes no tensor of more than `moved_bytes`, in a cycle of all blocks."""
    blocks = 32
    monkeypatch.setattr(TorchCPU, "moved_bytes", most * SMALL.bytes_per_block)
    backend.allocate(layout(blocks=blocks))
    for block in range(blocks):
        backend.fill(block, [block])
    with torch.profiler.profile(profile_memory=True) as profile:
        backend.move_blocks([(block, (block + 3) % blocks) for block in range(blocks)])
    keys = backend.read(1, [*range(blocks)], 4 * blocks)[0][::4, 0, 0]
    assert keys.tolist() == [(block - 3) % blocks for block in range(blocks)]
    made = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < made <= backend.moved_bytes


@pytest.mark.parametrize(
    "rotation",
    [
        Rotary((1.0,)).rotation(torch.arange(2)),
        Rotary((1.0,) * 4).rotation(torch.arange(1)),
        Rotation(torch.ones(9, 2), torch.ones(9, 2), torch.tensor([1, 2])),
        Rotation(torch.ones(1, 2), torch.ones(1, 1)),
        Rotation(torch.ones(1), torch.ones(1)),
    ],
    ids=["tokens", "pairs", "places", "tables", "flat"],
)
def test_rotations_of_a_wrong_shape_are_refused(backend, rotation):
    """`store_rotated` refuses rotations that do not fit the tokens or the width of the keys."""
    plan = backend.plan(RaggedBatch([[1]], [0], [1]))
    with pytest.raises(InputError, match="step has 1 tokens and keys are 6 wide"):
        backend.store_rotated(0, plan, rows(), rows(), rotation)


@pytest.mark.parametrize(
    ("queries", "options", "message"),
    [
        (rows(heads=3), {}, "3 query heads cannot share 2 K/V heads"),
        (rows(width=5), {}, "queries are"),
        (rows(), {"window": 0}, "window=0"),
        (rows(), {"window": 4, "sinks": -1}, "sinks=-1"),
    ],
)
def test_invalid_queries_windows_and_sinks_are_refused(backend, queries, options, message):
    """`attend` refuses queries that do not fit the K/V heads, and invalid windows and sinks."""
    plan = backend.plan(RaggedBatch([[1]], [0], [1]))
    with pytest.raises(InputError, match=message):
        backend.attend(0, plan, queries, **options)


def test_swapping_in_needs_as_many_blocks_as_were_swapped_out(backend):
    """`swap_in` refuses another number of blocks than were swapped out."""
    host = backend.swap_out([1, 2])
    with pytest.raises(InputError, match="2 blocks were swapped out"):
        backend.swap_in(host, [3])


@pytest.mark.parametrize("block_size", [4, 1024], ids=["short", "long"])
def test_no_blocks_are_swapped_and_moved(backend, block_size):
    """Operations on no blocks do nothing, however long the rows of a block are."""
    backend.allocate(layout(block_size=block_size))
    backend.swap_in(backend.swap_out([]), [])
    backend.move_tokens(0, [], [], torch.empty(3, 0, dtype=torch.int64))


def test_read_blocks_refuses_read_only_memory(backend):
    """`read_blocks` refuses read-only memory; `write_blocks` accepts it."""
    kept = backend.host_buffer(1)
    backend.read_blocks([1], kept)
    with pytest.raises(InputError, match="read-only"):
        backend.read_blocks([1], memoryview(bytes(kept)))
    backend.write_blocks([2], memoryview(bytes(kept)))
    again = backend.host_buffer(1)
    backend.read_blocks([2], again)
    assert bytes(again) == bytes(kept)


def test_an_unknown_dtype_is_refused(backend):
    """`tensor` refuses an unknown dtype, and the error lists the known ones."""
    with pytest.raises(InputError, match="dtype 'fp8' is not known; there are: fp64"):
        backend.tensor([1.0], "fp8")


def test_queries_without_heads_are_refused(backend):
    """Queries of one dimension are refused as those of another shape are."""
    plan = backend.plan(RaggedBatch([[1]], [0], [1]))
    with pytest.raises(InputError, match=r"queries are \[6\]"):
        backend.attend(0, plan, torch.zeros(6))


@pytest.mark.parametrize("method", ["read_blocks", "write_blocks"])
def test_no_blocks_have_no_bytes(backend, method):
    """Memory for no block has no bytes; other sizes are refused."""
    getattr(backend, method)([], memoryview(bytearray()))
    with pytest.raises(InputError, match=r"0 blocks of .* do not go into 8 bytes"):
        getattr(backend, method)([], memoryview(bytearray(8)))


def test_a_failed_allocation_has_the_words_of_torch(monkeypatch):
    """An error of torch is told beside the sizes: it may be of something else than memory."""

    def fail(*_):
        msg = "no kernel image is available\nCompile with ..."
        raise RuntimeError(msg)

    monkeypatch.setattr("kvcore_engine.backend._pool.Pool.__init__", fail)
    with pytest.raises(StorageError, match=r"8 blocks of .* \(no kernel image is available\)$"):
        TorchCPU().allocate(SMALL)
