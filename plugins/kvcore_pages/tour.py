"""The tour for learners: six questions on the KV cache, each answered by a run of kvcore.

The prompts are given below; model, cache and traces compute everything else on the page when it
is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from io import BytesIO
from typing import Any

import orjson

from kvcore.cache import KVCache
from kvcore.errors import InputError
from kvcore.models.catalogue import DEVICES, MODELS
from kvcore.models.codec import PLANE_BYTES
from kvcore.models.cost import prefill_flop
from kvcore.models.memory import KVLayout
from kvcore.models.spec import ModelSpec
from kvcore.plugins import resolve
from kvcore.request import Request, block_keys, text_request, word_tokens
from kvcore.serving import Batching
from kvcore.trace import Trace, decode_runs
from kvcore.trace.events import Header, decode
from kvcore_engine.engine import run
from kvcore_lab.demo import OneHead
from kvcore_lab.demo.caching import DTYPE, RecordingCache, generate, with_and_without_cache
from kvcore_pages.shell import Page, charting_library
from kvcore_plugins.traces.expansion import Expansion
from kvcore_replay.state.cache import CacheState
from kvcore_replay.untimed import replay

BLOCK = 4
"""Tokens of a block in all parts that draw one: few enough to be read at a glance."""

CODECS = ("fp16", "fp8-e4m3", "int8", "int4", "kivi:bits=2")
"""Codecs of the calculator."""

CALCULATOR_BLOCK = 16
"""Tokens of a block in the calculator: the default of `kvcore size`."""

CURVES = ("llama-2-7b", "llama-3.1-8b", "deepseek-v3", "mistral-7b-v0.1")
"""Models whose growth is drawn: MHA, GQA, MLA, and a window in all layers."""


SIZES = ("attention", "layers", "query_heads", "kv_heads", "head_dim", "latent")
"""Fields of a model that the calculator has."""


def tour_page() -> bytes:
    """Return the page. Equal installations give equal bytes. It takes a second or two.

    Raises:
        PluginError: torch or plotly is not installed.
    """
    charting_library()  # That it is missing is told before examples run.
    body = (files("kvcore_pages") / "static" / "tour.html").read_text("utf-8")
    return Page(
        title="A tour of the KV cache",
        body=body,
        scripts=["tour-memory.js", "tour.js"],
        styles=["tour.css"],
        data={"tour": tour()},
    ).render()


def tour() -> dict[str, Any]:
    """Run all examples of the page; return its data, by the names of its parts."""
    return {
        "caching": _caching(),
        "memory": _memory(),
        "sharing": _sharing(),
        "eviction": _eviction(),
        "window": _window(),
        "attention": _attention(),
    }


# What a cache saves, and how it grows.


def _caching() -> dict[str, Any]:
    """Generate the same tokens without a cache and with two kinds of it."""
    generator = resolve("generator", "transformer")
    prompt, output = 5, 8
    generations = with_and_without_cache(
        generator,
        resolve("backend", "torch-cpu"),
        prompt_tokens=prompt,
        output=output,
        block_size=BLOCK,
        threads=1,
    )
    spec: ModelSpec = generator.spec
    return {
        "prompt": prompt,
        "output": output,
        "block_size": BLOCK,
        "layers": spec.layers,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "number_bytes": PLANE_BYTES[DTYPE],
        "caches": [
            {
                "cache": generation.cache,
                "projections": generation.step_projections,
                "kv_bytes": generation.step_kv_bytes,
                "flop": [
                    prefill_flop(spec, new, prompt + step - new)
                    for step, new in enumerate(generation.step_projections)
                ],
            }
            for generation in generations
        ],
    }


def _memory() -> dict[str, Any]:
    """Return the data of the calculator: bytes of blocks, of weights, and of GPUs."""
    return {
        "block_size": CALCULATOR_BLOCK,
        "codecs": CODECS,
        "curves": CURVES,
        "models": {
            name: {
                **{field: getattr(model, field) for field in SIZES},
                "windows": [[w, model.windows.count(w)] for w in dict.fromkeys(model.windows)],
                "weight_bytes": model.weight_bytes,
                "codecs": {codec: _layout(model, codec) for codec in CODECS},
            }
            for name, model in MODELS.items()
            # The page computes with heads, latents and windows alone.
            if not model.caches
        },
        "devices": {name: device.hbm_bytes for name, device in DEVICES.items()},
    }


def _layout(model: ModelSpec, codec: str) -> dict[str, int] | None:
    """Return the bytes of a block in all layers, and the staged bytes of a sequence.

    None where the codec cannot code the heads of the model.
    """
    try:
        layout = KVLayout(model, codec, CALCULATOR_BLOCK)
    except InputError:
        return None
    return {"block_bytes": layout.bytes_per_block, "staged_bytes": layout.staged_bytes()}


# Traces, line by line.


def _traced(work: Callable[[Trace], object]) -> str:
    """Call `work` with a trace, and return the lines that it writes."""
    file = BytesIO()
    with Trace(file) as trace:
        work(trace)
    return file.getvalue().decode()


def _events(lines: str) -> Iterator[tuple[str, Any, CacheState]]:
    """Yield each line between HEADER and END, its event, and the cache after it."""
    header, *between, _ = lines.splitlines()
    about = decode(header.encode())
    assert isinstance(about, Header)
    state, expansion = CacheState(about), Expansion()
    for written in between:
        for event in expansion.expand(decode(written.encode())):
            line = orjson.dumps(event.as_dict()).decode()
            state.apply(event)
            yield line, event, state


def _ids(runs: Any) -> list[int]:
    """Return the block ids of runs."""
    return list(decode_runs(runs, 1 << 16))


# Sharing.

_SYSTEM = "You are a helpful assistant . Be brief"
_TEXTS = {
    "A": f"{_SYSTEM} Name a fruit",
    "B": f"{_SYSTEM} Count to ten . Begin",
    "C": f"{_SYSTEM} Count to ten . Slowly",
}
_ANSWERS = {"A": "Apple is mine", "A2": "Pear of course", "B": "One two"}
_SHARED_POOL = 12


def _sharing() -> dict[str, Any]:
    """Run two requests that share a prefix and a fork of one, with each trace line."""
    texts = {name: text.split() for name, text in _TEXTS.items()}
    # The time of a call is its number, so each line names the call that has written it.
    tokens: dict[int, dict[int, int]] = {}

    def work(trace: Trace) -> None:
        cache = KVCache(_SHARED_POOL, BLOCK, trace=trace)
        open_: dict[str, Any] = {}

        def done() -> None:
            tokens[cache.now] = {seq.id: seq.tokens for seq in open_.values()}

        def begin(name: str) -> None:
            keys = block_keys(word_tokens(_TEXTS[name], 1 << 30), BLOCK)
            request = Request(
                id=name, prompt_tokens=len(texts[name]), keys=keys, key_tokens=BLOCK
            )
            seq = open_[name] = cache.open(request, now=cache.now + 1)
            done()
            cache.commit(seq, seq.tokens - seq.computed, cache.now + 1)
            done()

        def write(name: str, count: int) -> None:
            cache.extend(open_[name], count, cache.now + 1)
            cache.commit(open_[name], count)
            done()

        def end(name: str) -> None:
            cache.close(open_.pop(name), cache.now + 1)
            done()

        begin("A")
        begin("B")
        open_["A2"] = cache.fork(open_["A"], cache.now + 1)
        done()
        write("A2", 1)
        write("A", 3)
        write("A2", 2)
        for name in ("A", "A2", "B"):
            end(name)
        begin("C")
        end("C")

    lines = _traced(work)
    for name, answer in _ANSWERS.items():
        texts[name] = _TEXTS.get(name, _TEXTS["A"]).split() + answer.split()
    return {
        "blocks": _SHARED_POOL,
        "block_size": BLOCK,
        "lines": lines,
        "frames": list(_sharing_frames(lines, texts, tokens)),
    }


def _sharing_frames(
    lines: str, texts: Mapping[str, Sequence[str]], tokens: Mapping[int, Mapping[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield pool, tables and a sentence after each line."""
    names: dict[int, str] = {}
    words: dict[int, list[str]] = {}
    before: Mapping[int, int] = {}
    now = 0
    for line, event, state in _events(lines):
        if event.t > now:
            before, now = tokens.get(now, {}), event.t
        if event.event in ("HIT", "MISS"):
            names[event.seq] = str(event.request)
        elif event.event == "FORK":
            names[event.child] = f"{names[event.seq]}2"
        tables = {number: list(seq.table()) for number, seq in state.sequences.items()}
        shared = {block for span in state.spans.values() for block in span.ids}
        for number, table in tables.items():
            text = texts[names[number]][: tokens[event.t].get(number, 0)]
            for index, block in enumerate(table):
                words[block] = list(text[index * BLOCK : (index + 1) * BLOCK])
        pool: list[dict[str, Any]] = []
        for block in range(_SHARED_POOL):
            by = [names[number] for number, table in tables.items() if block in table]
            kind = "cached" if block in shared else "private" if by else "free"
            held = [] if kind == "free" else words[block]
            pool.append({"kind": kind, "by": by, "words": held})
        yield {
            "line": line,
            "say": _sentence(event, state, names, [each["by"] for each in pool], before),
            "fresh": _touched(event, state),
            "pool": pool,
            "tables": [
                {
                    "name": names[number],
                    "tokens": tokens[event.t].get(number, 0),
                    "blocks": table,
                }
                for number, table in tables.items()
            ],
        }


def _touched(event: Any, state: CacheState) -> list[int]:
    """Return the blocks that a line is about."""
    name = event.event
    if name == "COPY":
        return [event.source, event.to]
    if name in ("ALLOC", "FREE"):
        return _ids(event.runs)
    if name not in ("HIT", "COMMIT", "FORK"):
        return []
    table = list(state.sequences[event.child if name == "FORK" else event.seq].table())
    return table[event.first :][: event.blocks] if name == "COMMIT" else table


def _sentence(  # noqa: C901, PLR0912 - a kind of line a case
    event: Any,
    state: CacheState,
    names: Mapping[int, str],
    holders: Sequence[Sequence[str]],
    before: Mapping[int, int],
) -> str:
    """Return a trace line in words, for readers who are new to blocks.

    Args:
        event: the event of the line.
        state: the cache after it.
        names: names of the sequences, by id.
        holders: names of the sequences with a block in their tables, by block.
        before: numbers of tokens before the call that wrote the line, by sequence.
    """
    if event.event == "REQUEST":
        full, rest = divmod(event.prompt, BLOCK)
        return (
            f"Request {event.id} arrives with {event.prompt} tokens: {full} full "
            f"blocks of {BLOCK}, and {rest} more. Each full block gets a key: a hash of its "
            "text and of all text before it."
        )
    who, touched = names[event.seq], _touched(event, state)
    about = _listed(touched) if touched else ""
    match event.event:
        case "HIT":
            count = event.blocks
            told = (
                f"A hit: {who} begins with the same {count * BLOCK} tokens, so the keys of "
                f"its first {count} blocks are known. Its table gets {about} as well. Nothing "
                "is computed for them, and they lie in memory once."
            )
        case "MISS" if not event.block:
            told = (
                f"A miss: the pool has nothing of {who}'s text yet. All of it must be computed."
            )
        case "MISS":
            why = "it is the last one, and not full: such a block has no key"
            if event.why == "absent":
                why = "nobody has computed that text yet"
            told = f"From its block {event.block + 1} on, {who} misses: {why}."
        case "ALLOC" if event.seq not in before:
            told = (
                f"{who} gets {about} from the pool, for the text that it has yet to compute. "
                "Its block table says where each part of its text lies."
            )
        case "ALLOC":
            last = state.sequences[event.seq].table()[event.first - 1]
            told = f"{who} writes on. Block {last} is full, so it gets {about}."
            if before[event.seq] % BLOCK:
                told = (
                    f"{who} writes on. Nobody else holds block {last} any more, so it fills "
                    f"that without a copy; for the rest it gets {about}."
                )
        case "COMMIT":
            told = (
                f"The model has computed {who}'s tokens. What is full, {about}, is entered "
                "under its key: from now on whoever begins with the same text can use it."
            )
        case "FORK":
            told = (
                f"{who} is to have two answers, so it is forked: {names[event.child]} gets a "
                "table with the very same blocks. Nothing is copied, nothing is allocated."
            )
        case "COPY":
            told = (
                f"Copy-on-write: {who} is about to write into block {event.source}, which "
                f"{' and '.join(holders[event.source])} holds too. So {who} gets a copy of its "
                f"own, block {event.to}, and writes there. The full blocks before it stay "
                "shared."
            )
        case _:
            gone = "Nothing is free by that"
            if touched:
                are = "are" if len(touched) > 1 else "is"
                gone = f"What only {who} needed, {about}, {are} free again"
            told = (
                f"{who} has its answer and ends. {gone}. Blocks with a key stay cached, for "
                "requests to come."
            )
    return told


def _listed(blocks: Sequence[int]) -> str:
    """Return the ids of blocks in words: `blocks 0, 1 and 2`."""
    *others, last = map(str, blocks)
    return f"blocks {', '.join(others)} and {last}" if others else f"block {last}"


# Eviction.

_PROMPT_BLOCKS = 3
_EVICTION_POOL = 7
_CASES = (
    (
        "Passers-by",
        "PPPDEFPGP",
        (
            "One prompt, P, is asked for again and again; the others pass by once. LRU forgets "
            "how often P was used, and gives it up for prompts that never return."
        ),
    ),
    (
        "A change of subject",
        "PPPDEDEDE",
        (
            "P was asked for often, but is over; D and E take turns now. LFU holds on to old "
            "fame, and lets D and E push each other out."
        ),
    ),
)
_POLICIES = ("lru", "lfu")


def _eviction() -> dict[str, Any]:
    """Replay short sequences of requests under two policies, in a pool that is too small."""
    return {
        "blocks": _EVICTION_POOL,
        "prompt_blocks": _PROMPT_BLOCKS,
        "cases": [
            {
                "name": name,
                "about": about,
                "requests": list(prompts),
                "runs": [_evicting(policy, prompts) for policy in _POLICIES],
            }
            for name, prompts, about in _CASES
        ],
    }


def _evicting(policy: str, prompts: str) -> dict[str, Any]:
    """Replay prompts of one letter each under a policy; return its trace and its frames."""
    requests = [
        Request(
            id=f"{prompt} ({index})",
            arrival=index,
            prompt_tokens=_PROMPT_BLOCKS * CALCULATOR_BLOCK,
            keys=[ord(prompt) * 100 + index for index in range(1, _PROMPT_BLOCKS + 1)],
            key_tokens=CALCULATOR_BLOCK,
        )
        for index, prompt in enumerate(prompts, 1)
    ]

    def work(trace: Trace) -> None:
        counting: Any = {"eviction": policy, "accounting": "keys", "trace": trace}
        replay(requests, KVCache(_EVICTION_POOL, CALCULATOR_BLOCK, **counting))

    lines = _traced(work)
    frames: list[dict[str, Any]] = [{"hit": 0, "evicted": [], "pool": []} for _ in prompts]
    before: list[str | None] = [None] * _EVICTION_POOL
    for _, event, state in _events(lines):
        frame = frames[event.t - 1]
        if event.event == "HIT":
            frame["hit"] = event.blocks
        elif event.event == "EVICT":
            frame["evicted"] += [before[block] for block in _ids(event.runs)]
        before = [None] * _EVICTION_POOL
        for span in state.spans.values():
            for offset, block in enumerate(span.ids, span.start):
                letter, index = divmod(span.keys[offset], 100)
                before[block] = f"{chr(letter)}{index}"
        frame["pool"] = before
    # An eviction costs the next request for its block, if there is one.
    for turn, frame in enumerate(frames, 1):
        frame["evicted"] = [
            {"block": label, "missed": prompts.find(label[0], turn) + 1 or None}
            for label in frame["evicted"]
        ]
    return {"policy": policy, "lines": lines, "frames": frames}


# Retention.

_STORY = (
    "Once upon a time there was a town and its code : tulip . The sun rose , birds sang and "
    "rain fell slowly . The code :"
)
_STORY_OUTPUT = 4
_STORY_POOL = 12
_VARIANTS = (
    ("Keep everything", None),
    ("Window of 20", "window:tokens=20"),
    ("Window of 16, 4 sinks", "window:tokens=16,sinks=4"),
    ("Window of 8, 4 sinks", "window:tokens=8,sinks=4"),
)


def _window() -> dict[str, Any]:
    """Run a model that reads a story and answers, under policies that drop parts of its K/V."""
    return {
        "words": _STORY.split(),
        "output": _STORY_OUTPUT,
        "block_size": BLOCK,
        "variants": [_forgetting(name, retention) for name, retention in _VARIANTS],
    }


def _forgetting(name: str, retention: str | None) -> dict[str, Any]:
    """Run the story on tensors under a policy, and the same calls on a cache alone."""
    generator = resolve("generator", "induction")
    ids = word_tokens(_STORY, generator.vocabulary)
    spelt = dict(zip(ids, _STORY.split(), strict=True))
    request = text_request("story", ids, output=_STORY_OUTPUT, block_size=BLOCK)

    def serve(trace: Trace) -> None:
        result = run(
            [request],
            cache=KVCache(_STORY_POOL, BLOCK, retention=retention, trace=trace),
            generator=generator,
            backend="torch-cpu",
            dtype=DTYPE,
            batching=Batching(max_tokens=BLOCK, max_seqs=1),
            threads=1,
        )
        output.extend(result.outputs["story"])

    output: list[int] = []
    lines = _traced(serve)
    frames = []

    def follow(trace: Trace) -> None:
        cache = KVCache(_STORY_POOL, BLOCK, retention=retention, trace=trace)
        seq = cache.open(request, 0)
        steps = [BLOCK] * (len(ids) // BLOCK) + [1] * (_STORY_OUTPUT - 1)
        for tokens in steps:
            cache.extend(seq, tokens, cache.now + 1)
            cache.commit(seq, tokens)
            frames.append(
                {
                    "computed": seq.computed,
                    "new": tokens,
                    "gone": [list(hole) for hole in seq.holes],
                    "table": list(cache.block_table(seq)),
                    "free": cache.pool.free_blocks,
                }
            )
        cache.close(seq)

    cache_lines = _traced(follow)
    model, recorded = _attended("induction", [*ids, *output[:-1]], 1)
    heads, layer = model.spec.query_heads, model.spec.layers - 1
    looks = [
        [recorded.head(layer, head, position).weights for head in range(heads)]
        for position in range(len(ids) + _STORY_OUTPUT - 1)
    ]
    return {
        "name": name,
        "retention": retention,
        "lines": lines,
        "cache_lines": cache_lines,
        "frames": frames,
        # Of the last layer, as a mean over its heads, if this text were read with nothing
        # forgotten: `[token][token that it attends to]`.
        "attention": [
            [round(sum(weights) / heads, 4) for weights in zip(*row, strict=True)]
            for row in looks
        ],
        "answer": [spelt.get(token, "?") for token in output],
    }


# One head.

_SENTENCE = "the cat sat on the mat"
_LAYER_HEAD = (0, 1)


def _attention() -> dict[str, Any]:
    """Return one decode step of one head: its inputs, and every intermediate number."""
    small = "transformer:layers=1,hidden=16,heads=2,kv_heads=1,head_dim=4,seed=3"
    prompt = word_tokens(_SENTENCE, resolve("generator", small).vocabulary)
    _, recorded = _attended(small, prompt, 2)
    layer, head = _LAYER_HEAD
    scaled = recorded.head(layer, head, len(prompt))
    width = len(scaled.query)
    unscaled = OneHead(
        [component * width**0.5 for component in scaled.query], scaled.keys, scaled.values
    )
    return {
        "words": _SENTENCE.split(),
        "width": width,
        "query": unscaled.query,
        "keys": scaled.keys,
        "values": scaled.values,
        "dots": unscaled.scores,
        "scores": scaled.scores,
        "exponentials": scaled.exponentials,
        "total": scaled.total,
        "weights": scaled.weights,
        "output": scaled.output,
        # As the model itself computed it, with matrices.
        "engine_output": recorded.outputs[layer][-1, head].tolist(),
    }


def _attended(generator: str, prompt: Sequence[int], output: int) -> tuple[Any, RecordingCache]:
    """Generate with a model, and return it with the queries, keys and values of all tokens."""
    built, backend = resolve("generator", generator), resolve("backend", "torch-cpu")
    cache = RecordingCache(len(prompt) + output - 1)
    with backend.limit_threads(1, built.spec):
        built.load(backend, DTYPE)
        generate(built, cache, prompt, output)
    return built, cache
