"""A model with windows and states on tensors, whose tokens depend on all that it reads."""

from hashlib import blake2b
from io import BytesIO
from random import Random
from typing import ClassVar

import attrs
import torch
from helpers.grouped_traces import FULL, RULES, STATE, WINDOW, requests
from helpers.hugging import Poisoned

from kvcore import Generator, GroupedCache, HostedGroups, LayerGroup, Trace, run
from kvcore.config.values import as_checkpoint
from kvcore.models.layers import LayerCache
from kvcore.models.spec import ModelSpec
from kvcore.serving import Batching, simulate
from kvcore_engine.tokens import TokenStream

VOCABULARY = 97
PRIME = 10_007

GROUPS = {
    "window": [FULL, WINDOW],
    "windows": [WINDOW, LayerGroup("window", 8, 11), FULL, WINDOW],
    "windows alone": [WINDOW, LayerGroup("window", 8, 50)],
    "two layers": [attrs.evolve(FULL, layers=2), attrs.evolve(WINDOW, layers=2), WINDOW],
    "states": [FULL, STATE, STATE],
}
"""Groups of models with K/V of one shape."""

SHAPE = {"query_heads": 1, "kv_heads": 1, "head_dim": 2, "hidden_size": 2, "parameters": 1}


def spec_of(groups):
    """Return a model with these groups."""
    windows = [group.window for group in groups if group.kind != "state"]
    layers = [
        window for window in dict.fromkeys(windows) for _ in range(_count(groups, window))
    ]
    states = sum(group.layers for group in groups if group.kind == "state")
    if not states:
        return ModelSpec(name="sums", layers=len(layers), windows=layers, **SHAPE)
    full = LayerCache(kind="full", layers=len(layers), kv_heads=1, key_dim=2, value_dim=2)
    state = LayerCache(kind="state", layers=states, state_bytes=4)
    total = len(layers) + states
    return ModelSpec(name="sums", layers=total, caches=(full, state), **SHAPE)


def _count(groups, window):
    """Return the layers with a window, of all groups with it."""
    kinds = ("full", "window", "chunk")
    return sum(g.layers for g in groups if g.kind in kinds and g.window == window)


def follow(state, token, layer):
    """Return the state of a layer after a token."""
    return (state * (31 + layer) + token + 1) % PRIME


def draw(read):
    """Return the token that follows what a model has read."""
    state = blake2b(repr(read).encode(), digest_size=8).digest()
    return int.from_bytes(state, "big") % VOCABULARY


@attrs.define(slots=False, eq=False)
class Sums(Generator):
    """A generator whose tokens depend on sums over what attention reads, and on states."""

    name: ClassVar[str] = "sums"

    groups: list[LayerGroup]

    @property
    def spec(self):
        """A model with the groups."""
        return spec_of(self.groups)

    @property
    def vocabulary(self):
        """The size of the vocabulary."""
        return VOCABULARY

    def forward(self, batch, attend):
        """Attend in all layers, and return the next token of each output row."""
        tokens = torch.tensor(batch.token_ids, dtype=torch.float64)
        values = tokens[:, None, None].expand(-1, 1, 2).contiguous()
        windows, states = layers_of(self.spec)
        read = [[] for _ in batch.last_rows]
        for layer, window in enumerate(windows):
            # Queries of zeros attend to all tokens alike.
            out = attend(layer, torch.zeros_like(values), values, values, window=window)
            for own, row in zip(read, batch.last_rows, strict=True):
                count = batch.positions[row] + 1
                count = count if window is None else min(count, window)
                own.append(round(float(out[row, 0, 0]) * count))
        parts = tokens.split(list(batch.lengths))
        for layer in range(states):
            for sequences in attend.states.rounds:
                kept = [0.0] * len(sequences)
                if attend.states.begins[sequences[0]]:
                    kept = attend.states.read(layer, sequences, 1)[:, 0].tolist()
                for index, sequence in enumerate(sequences):
                    for token in parts[sequence].tolist():
                        kept[index] = follow(kept[index], token, layer)
                    read[sequence].append(int(kept[index]))
                new = torch.tensor(kept, dtype=torch.float64)[:, None]
                attend.states.write(layer, sequences, new)
        return batch.spread(
            draw(own)
            for own, index in zip(read, batch.output_indices, strict=True)
            if index is not None
        )


def layers_of(spec):
    """Return the windows of the layers with K/V, and the number of layers with a state."""
    if not spec.caches:
        return spec.windows, 0
    attention, state = spec.caches
    return (None,) * attention.layers, state.layers


def expected(request, groups):
    """Return the output of a request if it is computed without a cache."""
    stream = TokenStream(request, VOCABULARY, 0)
    tokens = stream.token_ids(0, request.prompt_tokens)
    windows, count = layers_of(spec_of(groups))
    states = [0.0] * count
    done = 0
    for _ in range(request.output_tokens):
        for token in tokens[done:]:
            states = [follow(state, token, layer) for layer, state in enumerate(states)]
        done = len(tokens)
        read = [sum(tokens if window is None else tokens[-window:]) for window in windows]
        tokens.append(stream.append(draw(read + [int(state) for state in states])))
    return tokens[request.prompt_tokens :]


def grouped_servers(seed, blocks=90, count=24):
    """Serve random requests in random groups by simulation, and on tensors.

    Returns the results and the traces of both, the requests and the groups.
    """
    rng = Random(seed)
    groups = GROUPS[rng.choice(list(GROUPS))]
    options = {"rules": rng.choice(RULES), "max_tokens": rng.choice((64, 100)), "max_seqs": 16}
    interval = rng.choice((0, 0, 32, None))
    eviction = rng.choice(("lru", "lru", "lfu"))
    served = requests(rng, count)
    parts = {"generator": Sums(groups), "backend": Poisoned(), "dtype": "fp64"}
    results, traces = [], []
    for serve, more in ((simulate, {}), (run, parts)):
        out = BytesIO()
        writer = Trace(out)
        cache = (GroupedCache if eviction == "lru" else HostedGroups)(
            groups, blocks, checkpoint=as_checkpoint(interval), key_tokens=8, trace=writer,
            eviction=eviction,
        )  # fmt: skip
        results.append(serve(served, cache=cache, batching=Batching(**options), **more))
        writer.close()
        cache.check_integrity()
        traces.append(out.getvalue())
    return results, traces, served, groups
