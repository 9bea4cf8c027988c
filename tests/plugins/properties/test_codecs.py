"""K/V in a pool of encoded blocks against a plain model of the blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Plugins
from kvcore.engine import RaggedBatch, TensorLayout

torch = pytest.importorskip("torch", reason="K/V lies in tensors")

from kvcore.testing.dense import attention  # noqa: E402 - needs torch

pytestmark = pytest.mark.slow

CODECS = ["fp16", "fp8-e4m3:scale=head", "int4", "int4:keys=channel", "kivi:group=4"]
SIZE, BLOCKS, WIDTH = 8, 40, 8
HEADS = [(1, 1), (1, 3), (2, 2)]
"""Numbers of K/V heads, and of query heads that share one."""

actions = st.lists(
    st.tuples(
        st.sampled_from(["step"] * 5 + ["fork", "swap", "roll back", "compact", "close"]),
        st.integers(0, 5),
        st.integers(0, 2**16),
    ),
    min_size=8,
    max_size=16,
)


class Half:
    """K or V of some blocks, as it is read; `waiting` blocks are not encoded yet."""

    def __init__(self, codec, part, heads):
        self.codec, self.part = codec, part
        self.rows = torch.zeros(BLOCKS, heads, SIZE, WIDTH)
        self.waiting = set()

    def coded(self, rows):
        """Return `[heads, tokens, width]` encoded and decoded."""
        return self.codec.decode(self.part, self.codec.encode(self.part, rows)).float()

    def write(self, table, begin, new):
        """Write `[tokens, heads, width]` to the slots of a table from `begin` on."""
        for index, row in enumerate(new.unbind()):
            block, slot = table[(begin + index) // SIZE], (begin + index) % SIZE
            if self.codec.by_token(self.part):
                self.rows[block, :, slot] = self.coded(row[:, None])[:, 0]
                continue
            self.rows[block, :, slot] = row
            self.waiting.add(block)
            if slot == SIZE - 1:
                self.seal(block)

    def seal(self, block):
        """Encode a block."""
        self.rows[block] = self.coded(self.rows[block])
        self.waiting.discard(block)

    def copy(self, sources, targets):
        """Copy blocks."""
        self.rows[targets] = self.rows[sources]
        for source, target in zip(sources, targets, strict=True):
            self.waiting.discard(target)
            if source in self.waiting:
                self.waiting.add(target)

    def move(self, table, into, moves):
        """Move tokens, given as head, place in `table`, place in `into`."""
        found = [self.rows[table[s // SIZE], head, s % SIZE].clone() for head, s, _ in moves]
        for (head, _, target), row in zip(moves, found, strict=True):
            self.rows[into[target // SIZE], head, target % SIZE] = row
        if self.codec.by_token(self.part):
            return
        changed = {target // SIZE for _, _, target in moves}
        ended = any(target == len(into) * SIZE - 1 for _, _, target in moves)
        for index, block in enumerate(into):
            if index == len(into) - 1 and not ended:
                if index in changed:
                    self.waiting.add(block)
            elif index in changed or block in self.waiting:
                self.seal(block)

    def read(self, table, tokens):
        """Return `[tokens, heads, width]`."""
        return self.rows[table].transpose(1, 2).flatten(0, 1)[:tokens]


class Run:
    """Sequences of random K/V in a pool of torch-cpu, and in the model."""

    def __init__(self, spec, heads, group):
        codec = Plugins().build("codec", spec)
        self.backend = Plugins().build("backend", "torch-cpu")
        self.backend.allocate(
            TensorLayout(
                blocks=BLOCKS,
                block_size=SIZE,
                layers=1,
                kv_heads=heads,
                head_dim=WIDTH,
                value_dim=WIDTH,
                codec=codec,
            )
        )
        self.backend.fill(float("nan"))
        self.halves = [Half(codec, part, heads) for part in ("keys", "values")]
        self.heads, self.group = heads, group
        self.free = list(range(BLOCKS))
        self.sequences = [[[], 0]]
        self.draws = torch.Generator().manual_seed(0)

    def drawn(self, tokens, heads):
        """Return random rows."""
        return torch.randn(tokens, heads, WIDTH, generator=self.draws)

    def allocated(self, count):
        """Return free blocks, the last freed first; None if there are too few."""
        if count > len(self.free):
            return None
        return [self.free.pop() for _ in range(count)]

    def step(self, sequence, number):
        """Compute a chunk of a sequence, and one token of others that have begun."""
        batch = []
        for other in self.sequences:
            length = 1 + number % (2 * SIZE) if other is sequence else 1
            if other is not sequence and (not other[1] or number % 3 == 0):
                continue
            table, context = other
            more = self.allocated(-(-(context + length) // SIZE) - len(table))
            if more is not None:
                table += more
                other[1] += length
                batch.append((table, context, length))
        if not batch:
            return
        tables, contexts, lengths = map(list, zip(*batch, strict=True))
        new = [[self.drawn(length, self.heads) for length in lengths] for _ in range(2)]
        for half, rows in zip(self.halves, new, strict=True):
            for table, context, row in zip(tables, contexts, rows, strict=True):
                half.write(table, context, row)
        queries = [self.drawn(length, self.heads * self.group) for length in lengths]
        plan = self.backend.plan(RaggedBatch(tables, contexts, lengths))
        self.backend.store(0, plan, *map(torch.cat, new))
        windows = {"window": 1 + number % 20, "sinks": number % 5} if number % 2 else {}
        found = self.backend.attend(0, plan, torch.cat(queries), **windows)
        expected = [
            attention(
                asked.double(),
                *(half.read(table, context + length).double() for half in self.halves),
                **windows,
            )
            for asked, (table, context, length) in zip(queries, batch, strict=True)
        ]
        torch.testing.assert_close(
            found.double(), torch.cat(expected), rtol=1e-6, atol=1e-6 * WIDTH
        )

    def fork(self, sequence, _):
        """Copy a sequence."""
        table, tokens = sequence
        if (targets := self.allocated(len(table))) is not None and len(self.sequences) < 4:
            self.backend.copy_blocks(zip(table, targets, strict=True))
            for half in self.halves:
                half.copy(table, targets)
            self.sequences.append([targets, tokens])

    def swap(self, sequence, _):
        """Swap a sequence out, overwrite its blocks, and swap it in elsewhere."""
        table, _ = sequence
        if (targets := self.allocated(len(table))) is not None:
            host = self.backend.swap_out(table)
            for half in self.halves:
                half.copy(table, targets)
                half.waiting.difference_update(table)
            if table:
                self.backend.fill(float("nan"), table)
            self.backend.swap_in(host, targets)
            self.free += table
            table[:] = targets

    def roll_back(self, sequence, number):
        """Drop the last tokens of a sequence."""
        table, tokens = sequence
        sequence[1] = tokens - min(tokens, number % SIZE)
        held = -(-sequence[1] // SIZE)
        self.free += table[held:]
        del table[held:]

    def compact(self, sequence, number):
        """Keep some tokens of each head, in some blocks of the sequence and a new one."""
        table, tokens = sequence
        fresh = self.allocated(1)
        kept = tokens * (1 + number % 3) // 4
        if fresh is None or not kept:
            self.free += fresh or []
            return
        count = -(-kept // SIZE)
        into = [*table[: count - 1], *fresh] if number % 2 else table[:count]
        moves = []
        for head in range(self.heads):
            order = torch.randperm(tokens, generator=self.draws).tolist()[:kept]
            shared = [index for index in range(kept) if into[index // SIZE] in table]
            stay = [place for place in order if place in shared]
            empty = [index for index in range(kept) if index not in stay]
            come = [place for place in order if place not in stay]
            moves += [(head, *pair) for pair in zip(come, empty, strict=True)]
        if moves:
            self.backend.move_tokens(0, table, into, torch.tensor(moves).t())
        for half in self.halves:
            half.move(table, into, moves) if moves else None
        self.free += [block for block in [*table, *fresh] if block not in into]
        sequence[:] = [into, kept]

    def close(self, sequence, _):
        """Free the blocks of a sequence, and begin another."""
        self.free += sequence[0]
        sequence[:] = [[], 0]


@pytest.mark.parametrize("codec", CODECS)
@given(todo=actions, heads=st.sampled_from(HEADS))
def test_encoded_blocks_equal_those_of_the_model(codec, todo, heads):
    """Reads and attention over encoded blocks equal those of the model.

    Blocks go through chunks, windows, forks, swaps, rollbacks and compactions.
    """
    run = Run(codec, *heads)
    for what, which, number in todo:
        sequence = run.sequences[which % len(run.sequences)]
        getattr(run, what.replace(" ", "_"))(sequence, number)
        for table, tokens in run.sequences:
            if not tokens:
                continue
            for half, rows in zip(run.halves, run.backend.read(0, table, tokens), strict=True):
                assert torch.equal(rows, half.read(table, tokens)), what
