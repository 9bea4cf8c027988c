"""vLLM's real scheduler and cache manager beside kvcore like vLLM: the same steps.

`tox -e like-vllm` runs this with the installed package. `KVCORE_LIKE_SERVERS` is the number of
random servers, and `KVCORE_LIKE_FIRST` the first seed, so that it can run in parts;
`KVCORE_LIKE_WRITE=1` writes the golden file again.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib.metadata import version
from warnings import catch_warnings

import attrs
import orjson
import pytest
from helpers.step_lists import (
    GOLDEN,
    GROUPED,
    HOSTED,
    HOSTED_SEEDS,
    POLICIES,
    checksum,
    compressed_server,
    conversation,
    duplicated_server,
    encode,
    first_difference,
    golden_servers,
    grouped_server,
    grouped_servers,
    hosted_server,
    kvcore_evictions,
    kvcore_steps,
    random_server,
    read,
    write,
)

from kvcore_plugins.cache_groups import LayerGroup

with catch_warnings(action="ignore"):  # from packages that vLLM imports
    from helpers import vllm_engine

FIRST = int(os.environ.get("KVCORE_LIKE_FIRST", "1000"))
SERVERS = int(os.environ.get("KVCORE_LIKE_SERVERS", "200"))

OPTIONS = (
    {"reserve": "first-chunk"},
    {"max_chunk": 48},
    {"max_model_len": 300},
    {"reserve": "first-chunk", "max_chunk": 96, "max_model_len": 500},
)
"""Options of vLLM that are not its defaults: `scheduler_reserve_full_isl=False`,
`long_prefill_token_threshold`, `max_model_len`."""


def compare(servers):
    """Run both on `servers`; return counts, and differences that duplicates do not explain.

    vLLM keeps a block twice if two requests compute it: the last one of a prompt of whole
    blocks, which is never hit. From that step on the two may differ; those of kvcore
    with `duplicates`, here one group with full attention, may not.
    """
    counts, wrong = Counter(), []
    for server in servers:
        real = vllm_engine.run(server)
        steps = real.steps
        found = first_difference(encode(kvcore_steps(server)), encode(steps))
        at = len(steps) if found is None else found[0]
        counts += Counter(
            servers=1,
            steps=len(steps),
            admissions=sum(len(step.admitted) for step in steps),
            preemptions=real.over + sum(len(step.preempted) for step in steps),
            duplicates=len(real.duplicates),
            identical=found is None,
            identical_steps=at,
            apart_by_duplicates=found is not None,
        )
        if found is None:
            continue
        copies = attrs.evolve(server, groups=[LayerGroup("full", server.block_size)])
        apart = first_difference(encode(kvcore_steps(copies)), encode(steps))
        if apart is not None or not (real.duplicates and real.duplicates[0] <= found[2]):
            wrong.append(f"{server.name}, {server.options}: {found[1]}; {apart}")
    return counts, wrong


def test_vllm_makes_the_recorded_steps():
    """The step lists in the repository are those of the installed package."""
    assert version("vllm") == "0.33.0"
    for path, servers in ((GOLDEN, golden_servers()), (GROUPED, grouped_servers())):
        made = {server.name: encode(vllm_engine.run(server).steps) for server in servers}
        if os.environ.get("KVCORE_LIKE_WRITE"):
            write(path, made)
        assert made == read(path)


def test_random_servers_make_the_steps_of_vllm():
    """Steps, admissions, hits, preemptions and free blocks are those of vLLM."""
    counts, wrong = compare(map(random_server, range(FIRST, FIRST + SERVERS)))
    print("\nrandom servers:", dict(counts))  # noqa: T201 - the figures of the claim
    assert not wrong
    assert counts["servers"] == SERVERS


def test_random_servers_with_cache_groups_make_the_steps_of_vllm():
    """Windows and states make the steps of vLLM, duplicates too."""
    counts = Counter()
    for server in map(grouped_server, range(FIRST, FIRST + SERVERS)):
        real = vllm_engine.run(server)
        found = first_difference(encode(kvcore_steps(server)), encode(real.steps))
        has_states = any(group.kind == "state" for group in server.groups)
        assert found is None, f"{server.name}: {found}"
        kind = "states" if has_states else "windows"
        counts += Counter({
            kind: 1,
            "steps": len(real.steps),
            "duplicates": len(real.duplicates),
        })  # fmt: skip
    print("\nrandom servers with cache groups:", dict(counts))  # noqa: T201
    assert counts["windows"] + counts["states"] == SERVERS


def test_random_servers_with_chunks_make_the_steps_of_vllm():
    """Chunked local attention beside full attention makes the steps of vLLM."""
    for seed in range(FIRST, FIRST + max(1, SERVERS // 10)):
        server = grouped_server(seed)
        size = server.block_size
        chunk = LayerGroup("chunk", size, size * (2 + seed % 9))
        groups = [LayerGroup("full", size), *[chunk] * (1 + seed % 3)]
        server = attrs.evolve(server, groups=groups, interval=0, blocks=2 * server.blocks)
        steps = encode(vllm_engine.run(server).steps)
        assert first_difference(encode(kvcore_steps(server)), steps) is None


def test_random_servers_with_compressed_entries_make_the_steps_of_vllm():
    """Groups as those of DeepSeek V4, with blocks of four sizes, make the steps of vLLM."""
    counts = Counter()
    for server in map(compressed_server, range(FIRST, FIRST + max(1, SERVERS // 4))):
        steps = vllm_engine.run(server).steps
        found = first_difference(encode(kvcore_steps(server)), encode(steps))
        assert found is None, f"{server.name}: {found}"
        counts += Counter(servers=1, steps=len(steps))
    print("\nrandom servers with compressed entries:", dict(counts))  # noqa: T201


def test_random_servers_with_duplicates_make_the_steps_of_vllm():
    """Where many blocks are computed twice, one group with copies makes the steps of vLLM."""
    counts = Counter()
    for seed in range(FIRST, FIRST + max(1, 3 * SERVERS // 10)):
        server = duplicated_server(seed)
        real = vllm_engine.run(server)
        found = first_difference(encode(kvcore_steps(server)), encode(real.steps))
        assert found is None, f"{server.name}: {found}"
        counts += Counter(
            servers=1,
            steps=len(real.steps),
            preemptions=real.over + sum(len(step.preempted) for step in real.steps),
            duplicates=len(real.duplicates),
        )
    print("\nrandom servers with duplicates:", dict(counts))  # noqa: T201


def test_policies_evict_the_recorded_blocks():
    """The evictions in the repository are those of policies in the installed package."""
    made = {
        str(seed): {
            policy: checksum(vllm_engine.evictions(hosted_server(seed), policy))
            for policy in POLICIES
        }
        for seed in HOSTED_SEEDS
    }
    if os.environ.get("KVCORE_LIKE_WRITE"):
        HOSTED.write_bytes(orjson.dumps(made, option=orjson.OPT_INDENT_2) + b"\n")
    assert made == orjson.loads(HOSTED.read_bytes())


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_evict_the_same_blocks_in_vllm(policy):
    """A policy evicts the same blocks in kvcore like vLLM as in vLLM's scheduler.

    On random servers, a half of them with chats, at either lag.
    """
    seeds = range(FIRST, FIRST + max(1, SERVERS // 10))
    apart = [
        seed
        for seed in seeds
        if kvcore_evictions(hosted_server(seed), policy)
        != vllm_engine.evictions(hosted_server(seed), policy)
    ]
    assert not apart


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_other_than_the_defaults_make_the_steps_of_vllm(options):
    """Steps are those of vLLM if an option of vLLM and its equivalent in kvcore are set."""
    numbers = range(FIRST, FIRST + max(1, SERVERS // 10))
    servers = [random_server(number, **options) for number in numbers]
    if "max_chunk" in options:
        servers = [apart(server) for server in servers if server.chunked]
    counts, wrong = compare(servers)
    print(f"\n{options}:", dict(counts))  # noqa: T201
    assert not wrong


def apart(server):
    """Return `server` with requests that share nothing.

    Prompts of which each gets a small part of a step are computed side by side, so that vLLM
    would have two copies of all blocks that two of them share.
    """
    requests = [
        attrs.evolve(
            request, keys=[(request.id << 20) + index for index in range(len(request.keys))]
        )
        for request in server.requests
    ]
    return attrs.evolve(server, requests=requests)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_rule_of_kvcore_in_place_of_vllms_changes_the_steps(lag):
    """Replacing one of vLLM's rules by one of kvcore's changes the steps."""
    server = conversation(400, 512, lag)
    real = encode(vllm_engine.run(server).steps)
    other = attrs.evolve(server, options={"commit": "computed"})
    assert first_difference(encode(kvcore_steps(server)), real) is None
    assert first_difference(encode(kvcore_steps(other)), real) is not None
