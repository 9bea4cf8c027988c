"""A generator and a backend in plain Python, whose outputs depend on every slot read.

K/V of a token is its id. Attention returns all ids that a row may attend to, so the next token,
their digest, depends on whether each of them was read from the right slot.
"""

from array import array
from hashlib import blake2b
from io import BytesIO
from typing import Any, ClassVar

import attrs
from helpers.policies import build
from helpers.schedulers import scheduler_of
from helpers.serving import Bent, Run, batching_of

from kvcore import Backend, Generator, InputError, KVCache, Trace, run
from kvcore.models.spec import ModelSpec
from kvcore.plugins import resolve
from kvcore_engine.executor import tensor_layout
from kvcore_tiers.hierarchy import Tiers

SPEC = ModelSpec(
    name="exact", layers=2, query_heads=1, kv_heads=1, head_dim=1, hidden_size=1, parameters=1
)
VOCABULARY = 10_007
ENDS = (7, 11)


CODECS = (
    "fp32",
    "bf16",
    "fp8-e4m3",
    "fp8-e5m2:scale=head",
    "int8",
    "int4",
    "kivi",
    "int4:keys=channel",
)
"""A codec of each family, as texts."""


def digest(tokens):
    """Return the token that follows `tokens`."""
    state = blake2b(",".join(map(str, tokens)).encode(), digest_size=8)
    return int.from_bytes(state.digest(), "big") % VOCABULARY


@attrs.define(slots=False, eq=False)
class Exact(Generator):
    """A generator that draws the digest of all tokens that its last layer reads."""

    name: ClassVar[str] = "exact"

    ending: float = 0

    @property
    def spec(self):
        """A model of two layers, with one number for K/V."""
        return SPEC

    @property
    def vocabulary(self):
        """The size of the vocabulary, a prime."""
        return VOCABULARY

    @property
    def eos_token_ids(self):
        """The two tokens that end a text."""
        return frozenset(ENDS)

    def forward(self, batch, attend):
        """Attend in both layers, and return the next token of each output row."""
        attend(0, batch.token_ids, batch.token_ids, batch.token_ids)
        negative = [-token for token in batch.token_ids]
        seen = attend(1, batch.token_ids, batch.token_ids, negative)
        drawn, row = [], -1
        for length, draw in zip(batch.lengths, batch.output_indices, strict=True):
            row += length
            keys, end = seen[row]
            drawn.append(None if draw is None else self.next(keys[:end]))
        return drawn

    def next(self, tokens):
        """Return an end in `ending` of 100 cases, and else the digest of `tokens`."""
        token = digest(tokens)
        return ENDS[len(tokens) % 2] if token % 100 < self.ending else token


@attrs.define(slots=False, eq=False)
class Slots(Backend):
    """A backend that keeps a key and a value per slot; None in slots never stored."""

    name: ClassVar[str] = "slots"

    slots: list[Any] = attrs.field(init=False, factory=list)

    def allocate(self, layout):
        """Create empty slots."""
        if layout.dtype != "fp32":
            msg = f"slots: no {layout.dtype}; take fp32"
            raise InputError(msg)
        self.layout = layout
        self.slots = [self._empty() for _ in range(layout.layers)]

    def _empty(self):
        return [[None] * self.layout.block_size for _ in range(self.layout.blocks)]

    def tensor(self, data, dtype=None):
        """Return `data` unchanged."""
        return data

    def plan(self, batch):
        """Empty the slots that the step will fill, and return the batch."""
        assert all(
            len(table) * self.layout.block_size - length - context
            in range(self.layout.block_size)
            for table, context, length in zip(
                batch.block_tables, batch.contexts, batch.lengths, strict=True
            )
        )
        for layer in self.slots:
            for block, place in self._new(batch):
                layer[block][place] = None
        return batch

    def _new(self, batch):
        """Yield the block and the place of each new token."""
        size = self.layout.block_size
        for table, context, length in zip(
            batch.block_tables, batch.contexts, batch.lengths, strict=True
        ):
            for position in range(context, context + length):
                yield table[position // size], position % size

    def store(self, layer, plan, keys, values):
        """Store keys and values in the slots of the new tokens."""
        slots = list(self._new(plan))
        assert len(set(slots)) == len(slots) == plan.total_tokens
        for (block, place), key, value in zip(slots, keys, values, strict=True):
            self.slots[layer][block][place] = key, value

    def attend(self, layer, plan, queries, *, scale=None, window=None, sinks=0):
        """Return the keys, and the number that each row attends to; all must be stored."""
        outputs = []
        for table, context, length in zip(
            plan.block_tables, plan.contexts, plan.lengths, strict=True
        ):
            keys, values = self.read(layer, table, context + length)
            assert [abs(value) for value in values] == keys
            outputs += [(keys, context + row + 1) for row in range(length)]
        assert [keys[end - 1] for keys, end in outputs] == list(queries)
        return outputs

    def layer_blocks(self, layer):
        """Return the slots of a layer, twice: keys and values lie together."""
        return self.slots[layer], self.slots[layer]

    def read(self, layer, table, tokens):
        """Return the keys and the values of the first `tokens` slots of a table."""
        slots = [pair for block in table for pair in self.slots[layer][block]][:tokens]
        return [key for key, _ in slots], [value for _, value in slots]

    def read_blocks(self, blocks, into):
        """Write keys and values into a buffer, as integers of 4 bytes; 0 for empty slots."""
        numbers = [
            0 if pair is None else pair[half] + (1, -1)[half]
            for block in blocks
            for layer in self.slots
            for pair in layer[block]
            for half in (0, 1)
        ]
        into.cast("B")[:] = array("i", numbers).tobytes()

    def write_blocks(self, blocks, data):
        """Fill blocks from the integers that `read_blocks` has written."""
        numbers = iter(array("i", bytes(data)))
        for block in blocks:
            for layer in self.slots:
                pairs = [(next(numbers), next(numbers)) for _ in layer[block]]
                layer[block] = [(key - 1, value + 1) if key else None for key, value in pairs]

    def swap_out(self, blocks):
        """Return copies of the slots of `blocks`."""
        return [[list(layer[block]) for block in blocks] for layer in self.slots]

    def swap_in(self, host, blocks):
        """Restore the slots that `swap_out` returned."""
        for layer, content in zip(self.slots, host, strict=True):
            for block, slots in zip(blocks, content, strict=True):
                layer[block] = list(slots)

    def copy_blocks(self, pairs):
        """Copy the slots of each source block to its target."""
        for layer in self.slots:
            for source, target in pairs:
                layer[target] = list(layer[source])

    def fill(self, value, blocks=None):
        """Empty all slots, or those of `blocks`."""
        for layer in self.slots:
            for block in range(self.layout.blocks) if blocks is None else blocks:
                layer[block] = [None] * self.layout.block_size


def slot_bytes_of(spec, block_size, dtype="fp32", codec=None):
    """Return the bytes of a block in all layers."""
    codec = None if codec is None else resolve("codec", codec)
    return tensor_layout(spec, 1, block_size, dtype, codec).bytes_per_block


def compute(
    requests,
    *,
    blocks=1000,
    block_size=4,
    key_tokens=None,
    eviction="lru",
    retention=None,
    scheduler="fcfs",
    latency=None,
    generator=None,
    backend=None,
    clock="model",
    stop_at_eos=False,
    seed=0,
    rate_scale=1.0,
    dtype="fp32",
    codec=None,
    tiers=(),
    drafter=None,
    **batching,
):
    """Serve `requests` on tensors with the options of `serving.serve`, and return the same."""
    out = BytesIO()
    writer = Trace(out)
    cache = KVCache(
        blocks,
        block_size,
        eviction=build(eviction),
        retention=retention,
        key_tokens=block_size if key_tokens is None else key_tokens,
        trace=writer,
    )
    generator = resolve("generator", Exact() if generator is None else generator)
    if tiers:
        slot_bytes = slot_bytes_of(generator.spec, block_size, dtype, codec)
        Tiers(cache, tiers, slot_bytes, ids=True)
    result = run(
        requests,
        cache=cache,
        generator=generator,
        backend=Slots() if backend is None else backend,
        dtype=dtype,
        codec=codec,
        scheduler=scheduler_of(scheduler),
        latency=Bent() if latency is None else latency,
        batching=batching_of(**{"watermark": 0} | batching),
        rate_scale=rate_scale,
        clock=clock,
        stop_at_eos=stop_at_eos,
        seed=seed,
        drafter=drafter,
    )
    writer.close()
    cache.check_integrity()
    assert not cache.sequences
    return Run(result, out.getvalue(), {})


def decided(trace):
    """Return the lines of a trace between HEADER, which names the executor, and END."""
    return trace.splitlines()[1:-1]
