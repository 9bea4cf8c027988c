"""Selected pages on tensors: bounds of Quest, reads, and what preemption and drafts change."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="K/V lies in tensors")

from helpers.engine import Slots, compute  # noqa: E402 - needs torch
from helpers.paged import Paged, loaded_model  # noqa: E402

from kvcore import InputError, KVCache, PolicyError, Request, simulate  # noqa: E402
from kvcore.engine import RaggedBatch, TensorLayout  # noqa: E402
from kvcore.plugins import resolve  # noqa: E402
from kvcore.plugins.options import Spec  # noqa: E402
from kvcore.request import text_request  # noqa: E402
from kvcore.testing.dense import Text, next_batch  # noqa: E402
from kvcore_engine.backend import TorchCPU  # noqa: E402
from kvcore_engine.page_reader import BlockSelection  # noqa: E402
from kvcore_engine.retention.quest import Quest  # noqa: E402
from kvcore_replay.check.trace import check_trace  # noqa: E402
from kvcore_tiers.tier.host import Host  # noqa: E402

MODEL = "layers=3,hidden=16,heads=4,kv_heads=2,head_dim=4,vocab_size=61"
SERVED = "transformer:layers=3,hidden=32,heads=4,kv_heads=2,head_dim=8,vocab_size=31"
PROMPT = [7 * i % 61 for i in range(30)]


def paged(retention=None, blocks=60, size=4, model=MODEL):
    """Return paged sequences of a model under a retention policy."""
    return Paged(loaded_model(model), blocks, size, retention)


def written(texts, output=20, prompt=PROMPT):
    """Return the tokens of a text that is continued, and the logits of its last token."""
    seq = texts.open(prompt)
    texts.run(seq, output=output)
    return texts.texts[seq].tokens, texts.generator.seen[0]


def numbers(*shape, seed=0):
    """Return random numbers from -1 to 1, in fp64."""
    source = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=source, dtype=torch.float64) * 2 - 1


# Quest.


@given(
    seed=st.integers(0, 999),
    page=st.integers(1, 9),
    group=st.integers(1, 4),
    factor=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_the_score_bounds_each_product_of_its_page(seed, page, group, factor):
    """No key of a page has a larger product with a query of the K/V head than the score."""
    keys = numbers(2, 5, page, 8, seed=seed) * factor
    queries = numbers(2, group, 8, seed=seed + 1)
    policy = Quest()
    bound = policy.score(policy.summarise(keys), queries)
    products = torch.einsum("hptw,hgw->hptg", keys, queries).amax((2, 3))
    assert (bound >= products - 1e-12 * factor).all()


@given(seed=st.integers(0, 999), count=st.integers(1, 5))
def test_tight_bounds_select_the_best_pages(seed, count):
    """Where all keys of a page are equal, the best scores are those of the best products."""
    keys = numbers(2, 6, 1, 8, seed=seed).expand(-1, -1, 4, -1)
    queries = numbers(2, 1, 8, seed=seed + 1)
    policy = Quest()
    scores = policy.score(policy.summarise(keys), queries)
    products = torch.einsum("hptw,hgw->hp", keys[:, :, :1], queries)
    assert scores.topk(count, 1).indices.equal(products.topk(count, 1).indices)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"budget": 8}, "budget=8: give 16 tokens, a page, or more"),
        ({"budget": 1.5}, "budget=1.5: give a number of tokens, or a share"),
        ({"budget": 0.0}, "budget=0.0: give"),
        ({"page": 0}, "page=0, dense_layers=2: give 1 token or more"),
        ({"dense_layers": -1}, "dense_layers=-1: give"),
    ],
)
def test_impossible_options_are_refused(options, wrong):
    """Impossible options raise InputError with what can be given."""
    with pytest.raises(InputError, match=wrong):
        Quest(**options)


# What is read.


@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_budget_of_all_pages_is_dense_attention(size):
    """A budget of the whole text gives the logits without a policy, bit for bit."""
    everything = paged(Quest(budget=64, page=8, dense_layers=0), size=size, blocks=600 // size)
    tokens, logits = written(everything)
    wanted, right = written(paged(size=size, blocks=600 // size))
    assert tokens == wanted
    assert logits.equal(right)
    reads = everything.compactor.reads
    assert reads.bytes == reads.text_bytes > 0


def stored(codec, contexts, lengths):
    """Return a backend with random K/V of sequences, the plan of a step, and its queries."""
    backend = TorchCPU()
    backend.allocate(
        TensorLayout(
            blocks=32,
            block_size=4,
            layers=1,
            kv_heads=2,
            head_dim=8,
            value_dim=8,
            dtype="fp32",
            codec=None if codec is None else resolve("codec", codec),
        )
    )
    tables = [list(range(n, 32, len(contexts))) for n in range(len(contexts))]
    for before, new in (([0] * len(contexts), contexts), (contexts, lengths)):
        plan = backend.plan(RaggedBatch(tables, before, new))
        backend.store(0, plan, *numbers(2, sum(new), 2, 8).float())
    return backend, tables, plan, numbers(sum(lengths), 6, 8, seed=2).float()


@pytest.mark.parametrize("codec", [None, "int8", "kivi"])
def test_selecting_all_blocks_equals_attending_to_all(codec):
    """A selection of all blocks has the output of `attend`, coded blocks included."""
    backend, (table,), plan, queries = stored(codec, [13], [1])
    selection = BlockSelection(0, torch.tensor([table[:4]] * 2), 14)
    found = backend.attend_selected(0, plan, queries, [0], [selection], scale=0.3)
    torch.testing.assert_close(found, backend.attend(0, plan, queries, scale=0.3))


def test_tokens_of_a_step_that_select_nothing_attend_to_all():
    """In a step of chunks and single tokens, only those that select read a part."""
    backend, tables, plan, queries = stored(None, [13, 9, 5], [1, 1, 6])
    blocks = torch.tensor([[tables[1][0], tables[1][2]], [tables[1][1], tables[1][2]]])
    selection = BlockSelection(1, blocks, 6)
    found = backend.attend_selected(0, plan, queries, [1, 0, 6], [selection])
    dense = backend.attend(0, plan, queries)
    others = [0, *range(2, 8)]
    torch.testing.assert_close(found[others], dense[others])
    for head, places in enumerate(([0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 8, 9])):
        keys, values = (part[places, head] for part in backend.read(0, tables[1], 10))
        group = queries[1, 3 * head : 3 * head + 3]
        weights = (group @ keys.T / 8**0.5).softmax(-1)
        torch.testing.assert_close(found[1, 3 * head : 3 * head + 3], weights @ values)


def reference(prompt, count, page, pages, dense_layers):
    """Return the tokens of a text, each read by hand from pages of contiguous K/V."""
    generator = loaded_model(MODEL)
    held = {}

    def attend(layer, queries, keys, values, **_):
        before = held.get(layer)
        if before is not None:
            keys, values = (torch.cat(p) for p in zip(before, (keys, values), strict=True))
        held[layer] = keys, values
        out = []
        for row, query in enumerate(queries):
            seen = len(keys) - len(queries) + row + 1
            out.append([])
            for head, asked in enumerate(query):
                chosen = list(range(seen))
                if layer >= dense_layers and seen > len(prompt):
                    chosen = read(keys[:seen, head // 2], query.unflatten(0, (2, 2))[head // 2])
                part = keys[chosen, head // 2]
                weights = (part @ asked / 2).softmax(0)
                out[-1].append(weights @ values[chosen, head // 2])
        return torch.stack([torch.stack(row) for row in out])

    def read(keys, group):
        first = (len(keys) - 1) // page * page
        bounds = []
        for start in range(0, first, page):
            inside = keys[start : start + page]
            both = group[:, None] * torch.stack((inside.amin(0), inside.amax(0)))
            bounds.append((float(both.amax(1).sum(1).max()), start))
        best = sorted(bounds, reverse=True)[: pages - 1]
        starts = [*(start for _, start in best), first]
        return [*chain(*(range(s, min(s + page, len(keys))) for s in starts))]

    text = Text(list(prompt))
    for _ in range(count):
        new = len(text.tokens) - text.computed
        logits = generator.logits(next_batch([text], [new]), attend)
        text.computed += new
        text.tokens.append(int(logits[0].argmax()))
    return text.tokens


@pytest.mark.parametrize("dense_layers", [0, 1])
@pytest.mark.parametrize("page", [4, 8])
def test_tokens_equal_those_read_by_hand_from_contiguous_keys(page, dense_layers):
    """Tokens equal those of a computation by hand over contiguous K/V, page by page."""
    policy = Quest(budget=16, page=page, dense_layers=dense_layers)
    tokens, _ = written(paged(policy), output=24)
    assert tokens == reference(PROMPT, 24, page, 16 // page, dense_layers)
    assert tokens != written(paged(), output=24)[0]


def test_what_generated_tokens_read_is_counted():
    """Tokens, K/V and summaries that generated tokens read are counted, by hand here."""
    texts = paged(Quest(budget=8, page=4, dense_layers=1))
    written(texts, output=3)
    reads = texts.compactor.reads
    # Tokens 31 and 32 of the text are computed, and read 1 of 3 layers whole. In the others
    # they read a page beside their own, which has 3 tokens and then 4.
    assert (reads.tokens, reads.text_layer_tokens) == (2, 3 * 31 + 3 * 32)
    assert reads.layer_tokens == 31 + 32 + 2 * (4 + 3) + 2 * (4 + 4)
    # 7 pages of 2 x 4 numbers in 2 heads and 2 layers, read twice.
    assert reads.summary_bytes == 2 * 7 * 2 * 4 * 2 * 2 * 8
    assert reads.bytes == reads.layer_tokens * 2 * (4 + 4) * 8 + reads.summary_bytes


def test_a_run_has_what_its_tokens_read():
    """The summary of a run has the bytes that generated tokens read, and those of the texts."""
    sparse, dense = (
        compute(
            requests(), retention=policy, generator=SERVED, backend="torch-cpu", dtype="fp64"
        ).result.summary()["attention_reads"]
        for policy in (Quest(budget=12, page=4, dense_layers=1), None)
    )
    computed = sum(request.output_tokens - 1 for request in requests())
    assert sparse["tokens"] == dense["tokens"] == computed
    assert sparse["bytes"] < sparse["text_bytes"] == dense["text_bytes"] == dense["bytes"]


def test_a_simulation_takes_the_time_of_what_is_read():
    """Steps of `roofline` read the budget of the policy, and a share of all to select it."""
    sizes = "zipf:requests=5,prefix_tokens=2048,suffix_tokens=64,output_tokens=30"
    sparse = {"attended": 64, "selection": 1 / 16, "dense_layers": 2}
    times = [
        simulate(sizes, memory="2GiB", tensor_parallel=1, **options).summary()["tpot_s"]
        for options in (
            {"retention": "quest:budget=64"},
            {"latency": Spec("roofline", {name: str(value) for name, value in sparse.items()})},
            {"retention": "quest:budget=0.5"},
            {},
        )
    ]
    assert times[0] == times[1] != times[2] == times[3]


def test_layers_with_a_window_read_their_window():
    """Layers with a window attend as without the policy."""
    model = MODEL + ",window=7"
    policy = Quest(budget=4, page=4, dense_layers=0)
    assert written(paged(policy, model=model))[0] == written(paged(model=model))[0]


# What is computed again, drafted, forked, moved.


def requests(count=8):
    """Return texts of several lengths, some with a common beginning."""
    return [
        text_request(
            index,
            [*range(12 + index % 3), *(7 * index % 31 for _ in range(index % 9))],
            output=16 + 7 * index % 23,
            block_size=4,
            arrival=index,
        )
        for index in range(count)
    ]


def served(**options):
    """Return the result of serving the texts, each token of which reads three pages."""
    policy = Quest(budget=12, page=4, dense_layers=1)
    options = {"generator": SERVED, "backend": "torch-cpu", "dtype": "fp64"} | options
    return compute(requests(), retention=policy, **options).result


def test_preemption_changes_no_token():
    """Tokens that are computed again read the pages that they read before."""
    tight = served(blocks=18)
    assert tight.summary()["preemptions"]["recompute"] > 0
    assert tight.outputs == served().outputs


def test_a_swap_changes_no_token():
    """A sequence that is swapped out and back reads the pages that it would have read."""
    tiers = [Host(memory=1 << 20, load="always")]
    swapped = served(blocks=18, tiers=tiers)
    assert swapped.summary()["preemptions"]["swap"] > 0
    assert swapped.outputs == served().outputs


def test_drafts_change_no_token():
    """Verified drafts read the pages that the tokens would have read one by one."""
    drafted = served(drafter="prompt-lookup")
    assert drafted.log.drafts.accepted > 0
    assert drafted.outputs == served().outputs


def test_forks_read_pages_of_their_own():
    """A fork goes on as its parent would from the same tokens."""
    texts = paged(Quest(budget=8, page=4, dense_layers=0))
    seq = texts.open(PROMPT)
    texts.run(seq, output=9)
    child = texts.fork(seq, seed=0)
    texts.run(seq, child, output=20)
    assert texts.texts[child].tokens == texts.texts[seq].tokens


def test_pages_that_were_rolled_back_are_summarised_again():
    """A text whose end was replaced goes on as one that never had another end."""
    texts = paged(Quest(budget=8, page=4, dense_layers=0))
    seq = texts.open(PROMPT)
    texts.run(seq, output=20)
    before = texts.texts[seq].tokens[:33]
    texts.cache.rollback(seq, 16)
    again = texts.open(PROMPT)
    for each in (seq, again):
        text = texts.texts[each]
        text.tokens[30:] = [*before[30:], *([60] * 9)]
        text.computed = each.position
        texts.run(each, output=24)
        text.tokens.append(1)
    assert texts.texts[seq].tokens == texts.texts[again].tokens
    texts.step({each: texts.texts[each].left for each in (seq, again)})
    torch.testing.assert_close(*texts.generator.seen)


def test_outputs_are_not_shared():
    """Blocks of a prompt are shared, and blocks of an output, which was read sparsely, not."""
    kept = {}
    for retention in (None, Quest(page=4)):
        cache = KVCache(20, 4, retention=retention)
        seq = cache.open(
            Request(
                id=0,
                prompt_tokens=8,
                output_tokens=8,
                keys=range(2),
                key_tokens=4,
                output_keys=(2, 3),
            )
        )
        cache.commit(seq, 8)
        cache.extend(seq, 8)
        cache.commit(seq, 8)
        cache.close(seq)
        cache.check_integrity()
        kept[retention is None] = cache.tree.cached_blocks
    assert kept == {True: 4, False: 2}


def test_traces_with_outputs_that_are_not_shared_are_consistent(tmp_path):
    """A trace in which outputs with keys are not shared passes its check; prompts hit."""
    texts = [
        text_request(
            index,
            [*range(12), index],
            output=20,
            block_size=4,
            arrival=10**9 * index,
            publish=True,
        )
        for index in range(4)
    ]
    policy = Quest(budget=12, page=4, dense_layers=1)
    run = compute(
        texts, retention=policy, generator=SERVED, backend="torch-cpu", dtype="fp64", blocks=40
    )
    assert run.result.cache.stats.hit_blocks == 3 * 3
    assert run.result.cache.tree.cached_blocks == 3
    path = tmp_path / "trace.jsonl"
    path.write_bytes(run.trace)
    assert check_trace(path).complete


# Errors.


def test_pages_of_part_of_a_block_are_refused():
    """A page that is no whole number of blocks is refused."""
    with pytest.raises(InputError, match="'quest' reads pages of 6 tokens, no whole blocks of"):
        paged(Quest(budget=32, page=6))


def test_a_backend_that_reads_all_heads_alike_is_refused():
    """A backend that cannot read other blocks in each head is refused, with what can."""
    with pytest.raises(InputError, match=r"which backend 'slots' cannot: take torch-cpu"):
        compute(requests(), retention=Quest(page=4), backend=Slots())


@pytest.mark.parametrize(
    ("method", "answer", "wrong"),
    [
        ("summarise", lambda _: torch.zeros(1, 1), r"summarise\(\) with \[1, 1\]: give"),
        ("score", lambda *_: [1], r"score\(\) with list where the pages are \[2, 7\]"),
        ("score", lambda *_: torch.full((2, 7), torch.nan), "NaN for 14 of 14 pages"),
        (
            "score",
            lambda *_: torch.ones(2, 7) > 0,
            r"score\(\) with torch\.bool: give integers",
        ),
        ("score", lambda *_: torch.ones(2, 7) * 1j, r"score\(\) with torch\.complex64: give"),
    ],
)
def test_invalid_answers_are_reported_with_the_plugin(method, answer, wrong, monkeypatch):
    """A wrong answer of a policy raises PolicyError with its name and what it returned."""
    monkeypatch.setattr(Quest, method, staticmethod(answer))
    with pytest.raises(PolicyError, match=rf"retention plugin 'quest' .*{wrong}"):
        written(paged(Quest(budget=8, page=4, dense_layers=0)))


def test_summaries_of_several_sizes_are_reported_with_the_plugin(monkeypatch):
    """Summaries of another size than those of earlier pages raise PolicyError."""

    def summarise(keys):
        return torch.zeros(*keys.shape[:2], keys.shape[1])

    monkeypatch.setattr(Quest, "summarise", staticmethod(summarise))
    monkeypatch.setattr(Quest, "score", lambda _, summaries, __: summaries.sum(-1))
    wrong = r"summarise\(\) with \[2, 1, 1\], and before with \[2, 7, 7\]: give equal numbers"
    with pytest.raises(PolicyError, match=rf"retention plugin 'quest' .*{wrong}"):
        written(paged(Quest(budget=8, page=4, dense_layers=0)))


def test_selected_blocks_have_learned_sinks():
    """A token that reads all of its blocks as selected ones weighs learned sinks as it does."""
    backend, table = TorchCPU(), [2, 0, 1]
    shape = {"layers": 1, "kv_heads": 2, "head_dim": 4, "value_dim": 4}
    backend.allocate(TensorLayout(blocks=4, block_size=4, **shape))
    source = torch.Generator().manual_seed(0)
    keys, values, queries = (
        torch.randn(rows, heads, 4, generator=source)
        for rows, heads in ((10, 2), (10, 2), (1, 4))
    )
    backend.store(0, backend.plan(RaggedBatch([table], [0], [10])), keys, values)
    plan = backend.plan(RaggedBatch([table], [9], [1]))
    sinks = {"sink_logits": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    selected = [BlockSelection(0, torch.tensor([table, table]), 10)]
    found = backend.attend_selected(0, plan, queries, [0], selected, **sinks)
    assert found.allclose(backend.attend(0, plan, queries, **sinks), atol=1e-6)
    assert not found.allclose(backend.attend(0, plan, queries), atol=1e-2)
