"""Speculative decoding on tensors: unchanged outputs, and complete traces."""

from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import orjson
import pytest
from helpers.drafters import NoisyOracle
from helpers.engine import ENDS, Exact, compute, decided
from helpers.serving import Bent, ask, serve
from hypothesis import given
from hypothesis import strategies as st

from kvcore import InputError, Plugins, PolicyError
from kvcore.request import text_request
from kvcore_engine import speculation
from kvcore_engine.drafter.draft_model import DraftModel
from kvcore_engine.drafter.prompt_lookup import PromptLookup
from kvcore_engine.drafter.token_drafter import Draft, TokenDrafter
from kvcore_engine.speculation import SpeculativeTensorExecutor
from kvcore_engine.tokens import TokenStream
from kvcore_plugins.drafter import Acceptance
from kvcore_replay.check.trace import check_trace

PLUGINS = Plugins()
SIZE = "layers=2,hidden=32,heads=4,kv_heads=2,head_dim=8,vocab_size=31"


def requests(count=10):
    """Return texts with common beginnings, several of which run at a time."""
    return [
        text_request(
            index,
            [*range(3 + index % 4), *(7 * index % 31 for _ in range(index % 9))],
            output=5 + 7 * index % 23,
            block_size=4,
            arrival=index * 400,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("blocks", [1000, 14])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("steps", ["mixed", "prefill-first"])
@pytest.mark.parametrize("right", [0, 70, 100])
def test_output_is_that_without_drafts(blocks, block_size, steps, right):
    """Drafts do not change outputs, for any block size, with preemption and prefix hits."""
    options = {"blocks": blocks * 16 // block_size // 4, "block_size": block_size}
    asked = [
        ask(n, 300 * n, 5 + 3 * n % 11, 6 + 5 * n % 19, keys=[n % 2], key_tokens=16)
        for n in range(9)
    ]
    options |= {"key_tokens": 16, "steps": steps, "max_seqs": 4}
    plain = compute(asked, **options).result
    drafted = compute(asked, drafter=NoisyOracle(right=right), **options).result
    assert drafted.outputs == plain.outputs
    assert all(map(len, plain.outputs.values()))
    assert (drafted.log.drafts.accepted > 0) == (right > 0)


@pytest.mark.parametrize("right", [0, 80])
def test_published_blocks_hold_accepted_tokens_only(right):
    """Published blocks have the same keys with and without drafts."""
    asked = [
        text_request(name, range(10), output=21, block_size=4, publish=True, arrival=at)
        for name, at in (("a", 0), ("b", 10**6))
    ]
    plain = compute(asked)
    run = compute(asked, drafter=NoisyOracle(right=right))
    assert run.result.outputs == plain.result.outputs
    named = [
        [key for line in each.lines if line["event"] == "KEYS" for key in line["keys"]]
        for each in (plain, run)
    ]
    assert named[0] == named[1] != []
    assert run.result.cache.stats.hit_blocks == plain.result.cache.stats.hit_blocks > 0


def test_published_blocks_of_an_unfinished_output_are_hit():
    """A request hits the published blocks of an unfinished output, and its tokens are right."""
    text = text_request("a", range(10), output=40, block_size=4, publish=True)
    known = compute([text]).result.outputs["a"]
    later = text_request(
        "b", [*range(10), *known[:20]], output=9, block_size=4, arrival=150_000
    )
    run = compute([text, later], drafter=NoisyOracle(right=80)).result
    assert run.cache.stats.hit_blocks > 2
    assert run.outputs["b"] == known[20:29]


@pytest.mark.parametrize("ending", [5, 40])
def test_an_end_token_among_drafts_ends_the_text(ending):
    """An end token among accepted drafts ends the text, and later drafts are dropped."""
    asked = [ask(n, 0, 5 + n, 30) for n in range(8)]
    options = {"generator": Exact(ending), "clock": "wall", "stop_at_eos": True}
    plain = compute(asked, **options).result
    options["generator"] = Exact(ending)
    drafted = compute(asked, drafter=NoisyOracle(right=90), **options).result
    assert drafted.outputs == plain.outputs
    assert any(output[-1] in ENDS for output in plain.outputs.values())
    assert drafted.log.drafts.accepted > 0


def test_trace_is_checked_and_repeated(tmp_path):
    """A trace with drafts and rollbacks passes the check, and is the same in a second run."""
    asked = [ask(n, 0, 9, 30) for n in range(4)]
    first, again = (
        compute(asked, block_size=2, key_tokens=4, drafter=NoisyOracle(right=50)).trace
        for _ in range(2)
    )
    assert first == again
    lines = [orjson.loads(line) for line in first.splitlines()]
    assert any(line.get("reason") == "rollback" for line in lines)
    assert lines[0]["plugins"]["drafter"]["name"] == "knowing"
    path = tmp_path / "run.jsonl"
    path.write_bytes(first)
    assert check_trace(path).complete


@given(
    st.integers(0, 100),
    st.integers(1, 6),
    st.sampled_from([10**6, 40, 14]),
    st.sampled_from([1, 3, 4]),
    st.sampled_from(["mixed", "prefill-first"]),
)
def test_a_simulation_of_a_run_makes_the_same_decisions(
    tmp_path_factory, right, tokens, blocks, block_size, steps
):
    """A simulation with the acceptance recorded in a run makes the same decisions."""
    asked = [
        ask(n, 900 * n, 5 + 3 * n % 11, 1 + 5 * n % 19, keys=[n % 2], key_tokens=12)
        for n in range(7)
    ]
    options = {"block_size": block_size, "key_tokens": 12, "steps": steps, "max_seqs": 4}
    options |= {"blocks": min(blocks * 4 // block_size, 2000), "max_tokens": 16}
    run = compute(asked, drafter=NoisyOracle(tokens=tokens, right=right), **options)
    path = tmp_path_factory.getbasetemp() / "acceptance.jsonl"
    run.result.write_acceptance(path)
    twin = serve(asked, latency=Bent(), drafter=Acceptance(tokens=tokens, file=path), **options)
    assert decided(twin.trace) == decided(run.trace)
    assert twin.result.log.drafts == run.result.log.drafts


def test_wall_clock_counts_drafts_as_they_were_computed():
    """Step times for `calibrate` count drafts as prefill tokens."""
    run = compute(
        [ask(0, 0, 5, 20)], clock="wall", drafter=NoisyOracle(right=100, silent=0)
    ).result
    assert sum(step.prefill for step in run.steps) == 5 + run.log.drafts.drafted
    assert sum(step.decode for step in run.steps) == run.log.drafts.steps


class Wrong(TokenDrafter):
    """A drafter that returns the drafts given to its constructor."""

    name = "wrong"

    def __init__(self, drafts):
        self.drafts_ = drafts

    def options(self):
        """Return no options."""
        return {}

    def draft(self, tokens, most):
        """Return the given drafts, or raise if there are none."""
        if self.drafts_ is None:
            return 1 / 0
        return self.drafts_


@pytest.mark.parametrize(
    ("drafts", "message"),
    [([1] * 9, "give at most 4"), ([-1], r"\[-1\]"), ([0.5], r"0\.5"), (None, "ZeroDivision")],
)
def test_wrong_drafts_raise_an_error_that_names_the_drafter(drafts, message):
    """Too many drafts, invalid tokens or an exception raise PolicyError with the plugin."""
    with pytest.raises(PolicyError, match=message) as caught:
        compute([ask(0, 0, 5, 20)], drafter=Wrong(drafts))
    assert "wrong" in str(caught.value)


class WrongAnswer(Wrong):
    """A drafter whose `drafts` returns what was given to its constructor."""

    def drafts(self, sequences):
        """Return the given answer."""
        return self.drafts_


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "with None: give a Draft for each of 1 sequences"),
        ([], r"with \[\]: give a Draft for each of 1 sequences"),
        ([Draft(), Draft()], "give a Draft for each of 1 sequences"),
        ([None], "with None: give a Draft with a sequence of token ids"),
        ([Draft(3)], "give a Draft with a sequence of token ids"),
        ([Draft([10**9])], r"with tokens \[1000000000\]: .* each an id from 0 to \d+$"),
        ([Draft([1], [0.5])], r"probabilities of shape \[\]: give \[1, "),
        ([Draft([1], SimpleNamespace(shape=(1, 2)))], r"of shape \[1, 2\]: give \[1, "),
    ],
)
def test_a_wrong_answer_of_the_full_tier_names_the_drafter(answer, message):
    """An answer without a draft for each sequence, and a row for each token, is an error."""
    with pytest.raises(PolicyError, match=message) as caught:
        compute([ask(0, 0, 5, 20)], drafter=WrongAnswer(answer))
    assert "wrong" in str(caught.value)


def test_a_token_of_probability_0_is_never_drawn():
    """A draft is replaced by a token that the model has, also where rounding leaves no rest."""
    p, q = [0.0, 0.49999997, 0.49999997], [0.0, 0.5, 0.5]
    assert speculation.judged(p, q, 1, 0.99999999, 0.3) == 1
    assert speculation.judged(p, q, 1, 0.99999999, 0.7) == 2


def test_drafters_in_the_wrong_kind_of_run_are_refused():
    """Drafters with a retention policy, or in the wrong kind of run, raise InputError."""
    asked = [ask(0, 0, 5, 20)]
    with pytest.raises(InputError, match="cannot be rolled back"):
        compute(asked, drafter=NoisyOracle(), retention=PLUGINS.build("retention", "window"))
    with pytest.raises(InputError, match="it is for simulations"):
        compute(asked, drafter="acceptance")
    with pytest.raises(InputError, match="a simulation has none"):
        serve(asked, drafter="prompt-lookup")
    with pytest.raises(InputError, match="no drafts were verified"):
        compute(asked).result.write_acceptance("nowhere")


# Rejection sampling is tested exactly: all levels of a fine enough grid are enumerated.


def shares(weights):
    """Return weights as fractions of their sum."""
    return [Fraction(weight, sum(weights)) for weight in weights]


GRIDS = {"accept": 6, "residual": 2, "draw": 4}
"""Number of levels of each draw; every threshold of the test lies between two levels."""


def test_drafts_of_several_tokens_keep_the_distribution():
    """Each token of a step has the model's distribution given the tokens before it.

    All pairs of two drafts, and all levels of each draw, are enumerated through the code that
    appends tokens to a text.
    """
    model = {(): (1, 3, 0)} | {(t,): w for t, w in enumerate([(2, 1, 1), (0, 2, 2), (4, 0, 0)])}
    model |= dict.fromkeys(product(range(3), repeat=2), (1, 2, 1))
    draft = [(2, 1, 1), (1, 0, 3)]
    found = {}
    for pair in product(range(3), repeat=2):
        chance = shares(draft[0])[pair[0]] * shares(draft[1])[pair[1]]
        outcomes = [[x / 4 for x in model[pair[:n]]] for n in range(3)]
        open_paths = [((), chance)] if chance else []
        while open_paths:
            levels, weight = open_paths.pop()
            text = verified(pair, outcomes, [[x / 4 for x in q] for q in draft], levels)
            if isinstance(text, str):
                grid = GRIDS[text]
                steps = [(2 * step + 1) / (2 * grid) for step in range(grid)]
                open_paths += [((*levels, level), weight / grid) for level in steps]
                continue
            for end in range(1, len(text) + 1):
                found[text[:end]] = found.get(text[:end], 0) + weight
    assert sum(found[text] for text in found if len(text) == 1) == 1
    for known in {text[:-1] for text in found}:
        after = [found.get((*known, token), Fraction(0)) for token in range(3)]
        assert [x / sum(after) for x in after] == shares(model[known])


def verified(drafts, outcomes, weights, levels):
    """Return the tokens that a step appends with `levels`, or the name of a missing draw."""
    executor = object.__new__(SpeculativeTensorExecutor)
    executor._eos_token_ids = frozenset()
    asked = text_request(0, [1], output=9, block_size=4)
    executor.streams = {0: TokenStream(asked, 3, 0)}
    job = SimpleNamespace(request=asked, generated=1, output_tokens=9)
    rows = SimpleNamespace(tolist=lambda: weights)
    left = list(levels)

    def level(what, _seed, _index):
        if not left:
            raise LookupError(what)
        return left.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "uniform", level)
        try:
            executor._verify(job, Draft(drafts, rows), outcomes, [], [])
        except LookupError as error:
            return error.args[0]
    return tuple(executor.streams[0].output)


# Models and drafters on torch.


def torch_run(drafter, generator="transformer:" + SIZE, dtype="fp32", **options):
    """Return the outputs and the draft statistics of a run on torch."""
    asked = requests(options.pop("count", 8))
    result = torch_result(asked, drafter, generator, dtype, **options)
    return result.outputs, result.log.drafts


def torch_result(asked, drafter, generator="transformer:" + SIZE, dtype="fp64", **options):
    """Return the result of a run on torch."""
    pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
    run = compute(
        asked,
        generator=generator,
        backend="torch-cpu",
        latency=PLUGINS.build("latency", "roofline"),
        dtype=dtype,
        drafter=drafter,
        **options,
    )
    return run.result


DRAFTERS = [
    "prompt-lookup",
    "prompt-lookup:tokens=7,longest=1",
    "draft-model:" + SIZE.replace("layers=2", "layers=1"),
    "draft-model:tokens=2," + SIZE,
    "medusa:texts=9,length=20",
]


@pytest.fixture(scope="module", params=[0, 1])
def sampled(request):
    """Return the generator of a temperature, and its output without drafts."""
    generator = f"transformer:{SIZE},temperature={request.param}"
    return generator, torch_run(None, generator, dtype="fp64")[0]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("blocks", [500, 20])
def test_no_drafter_changes_the_output(sampled, drafter, blocks):
    """No drafter changes the output, greedy or sampled, and some drafts are accepted."""
    generator, plain = sampled
    drafted, stats = torch_run(drafter, generator, dtype="fp64", blocks=blocks)
    assert drafted == plain
    assert stats.accepted > 0


class WithinBlock(PromptLookup):
    """A prompt lookup whose drafts do not fill a block of 4 tokens."""

    def draft(self, tokens, most):
        """Return drafts up to the last token but one of a block."""
        newest = len(tokens) - 1
        return super().draft(tokens, min(most, (4 - 2 - newest) % 4))


@pytest.mark.parametrize("codec", ["kivi", "int4:keys=channel"])
def test_drafts_change_no_output_of_codecs_of_blocks_unless_they_fill_one(codec):
    """With a codec that stores whole blocks, drafts within a block do not change outputs.

    Such a codec keeps tokens in full precision until their block is full. Drafts that fill
    the block have it coded in the step that verifies them, and a rollback does not restore the
    precision of the tokens that remain. So texts may differ after such a step: most do with
    `kivi`, whose 2 bits are coarse.
    """
    options = {"codec": codec, "count": 12}
    plain, _ = torch_run(None, **options)
    drafted, stats = torch_run(WithinBlock(), **options)
    assert drafted == plain
    assert 0 < stats.accepted < stats.drafted


SINCOS = "layers=2,heads=4,kv_heads=2,head_dim=8"


@pytest.mark.parametrize(
    ("generator", "drafter"),
    [
        (f"sincos:{SINCOS}", f"draft-model:generator=sincos,{SINCOS}"),
        ("induction", "prompt-lookup"),
    ],
)
def test_drafts_change_no_output_of_other_generators(generator, drafter):
    """With other generators, accepted and rejected drafts do not change outputs."""
    plain, _ = torch_run(None, generator, dtype="fp64")
    drafted, stats = torch_run(drafter, generator, dtype="fp64")
    assert drafted == plain
    assert stats.accepted > 0
    drafted, stats = torch_run(Wrong([1]), generator, dtype="fp64")
    assert drafted == plain
    assert stats.drafted > 0 == stats.accepted


def test_all_drafts_of_an_equal_draft_model_are_accepted():
    """All drafts of a draft model equal to the served model are accepted."""
    _, stats = torch_run(DRAFTERS[3], dtype="fp64")
    assert stats.accepted == stats.drafted > 20


TIER = "host:memory=1MiB,load=always"


def test_a_draft_model_computes_what_a_swap_has_moved():
    """All drafts of an equal draft model are accepted also after sequences were swapped."""
    asked = [ask(n, n, 12, 40) for n in range(6)]
    result = torch_result(asked, DRAFTERS[3], blocks=40, tiers=[TIER])
    assert sum(level.stats.parked for level in result.cache.tiers.levels) > 0
    stats = result.log.drafts
    assert stats.accepted == stats.drafted > 20


def test_a_draft_model_computes_what_a_tier_has_loaded():
    """All drafts of an equal draft model are accepted also after prefixes were loaded.

    Two requests hit the loaded prefix at different times, and one of them on the device.
    """
    shared = [3 * n % 31 for n in range(32)]
    texts = [shared, [7 * n % 31 for n in range(60)], [*shared, 5], [*shared, 6, 6]]
    asked = [
        text_request(n, text, output=12, block_size=4, arrival=10**9 * n - 10**8 * (n == 3))
        for n, text in enumerate(texts)
    ]
    result = torch_result(asked, DRAFTERS[3], blocks=20, tiers=[TIER])
    assert sum(level.stats.loaded for level in result.cache.tiers.levels) > 0
    stats = result.log.drafts
    assert stats.accepted == stats.drafted > 20


class Forgetful(DraftModel):
    """A draft model that computes each text again at each step."""

    def drafts(self, sequences):
        """Forget what is computed, and draft."""
        self._known.clear()
        return super().drafts(sequences)


def test_a_draft_model_computes_what_steps_without_drafts_have_added():
    """Rejected drafts are not taken for the tokens of later steps that had room for none."""
    sizes = {name: int(value) for name, value in (s.split("=") for s in SIZE.split(","))}
    asked = [ask(0, 0, 8, 60), *(ask(n, 30_000 * n, 60, 2) for n in range(1, 9))]
    runs = [
        torch_result(asked, drafter(**sizes | {"layers": 1}), max_tokens=100, max_seqs=4)
        for drafter in (DraftModel, Forgetful)
    ]
    assert runs[0].drafted == runs[1].drafted


@pytest.mark.parametrize("name", [DRAFTERS[3], DRAFTERS[4]])
def test_drafters_forget_requests_that_have_ended(name):
    """After a run, a drafter keeps nothing of the requests."""
    drafter = PLUGINS.build("drafter", name)
    torch_result(requests(8), drafter)
    assert not getattr(drafter, "_states", None)
    assert not getattr(drafter, "_known", None)


def test_drawn_drafts_of_the_model_itself_are_accepted():
    """Drafts sampled from the distribution of the served model are all accepted."""
    drafter = f"{DRAFTERS[3]},temperature=0.7"
    _, stats = torch_run(drafter, f"transformer:{SIZE},temperature=0.7", dtype="fp64")
    assert stats.accepted == stats.drafted > 20


def test_drawn_drafts_need_probabilities():
    """A draft model without probabilities is refused at a temperature above 0."""
    drafter = "draft-model:generator=sincos,layers=2,heads=4,kv_heads=2,temperature=1"
    with pytest.raises(InputError, match="temperature"):
        torch_run(drafter, "sincos:layers=2,heads=4,kv_heads=2,head_dim=8")


def test_incompatible_drafters_are_refused():
    """Other token ids, missing hidden states or too small a pool raise InputError."""
    with pytest.raises(InputError, match="has 512 token ids, the served model 31"):
        torch_run("draft-model")
    with pytest.raises(InputError, match="does not tell its hidden states"):
        torch_run("medusa:texts=2,length=9", "induction")
    with pytest.raises(InputError, match="give more, or a smaller length"):
        torch_run("medusa", blocks=9)


def test_a_draft_model_with_fewer_positions_than_a_text_is_refused(monkeypatch):
    """A text beyond the draft model's positions is an error that tells what to do."""
    monkeypatch.setattr(PLUGINS.get("generator", "sincos"), "positions", 16)
    drafter = f"draft-model:generator=sincos,vocab_size=31,{SINCOS}"
    with pytest.raises(InputError, match=r"sincos has 16 positions.*max_model_len=16"):
        torch_run(drafter)
    assert torch_run(drafter, max_model_len=16)[1].drafted


def test_a_draft_model_accepts_the_options_that_are_given():
    """A draft model without a seed option is built, and a size of 0 raises InputError."""
    sizes = "layers=2,heads=4,kv_heads=2,head_dim=8"
    drafter = PLUGINS.build("drafter", f"draft-model:generator=sincos,vocab_size=31,{sizes}")
    assert drafter._drafting.vocabulary == 31
    with pytest.raises(InputError, match="layers"):
        PLUGINS.build("drafter", "draft-model:layers=0")


@pytest.mark.parametrize("option", ["layers", "seed"])
def test_a_generator_that_is_built_takes_no_options(option):
    """Options of a generator beside one that is built raise InputError."""
    with pytest.raises(InputError, match=f"draft-model: {option} beside a generator"):
        DraftModel(generator=Exact(), **{option: 3})


def test_impossible_lengths_of_n_grams_are_refused():
    """A shortest n-gram above the longest raises InputError."""
    with pytest.raises(InputError, match="shortest=4 is above longest=3"):
        PLUGINS.build("drafter", "prompt-lookup:shortest=4")


def test_medusa_keeps_the_state_of_a_sequence_only():
    """`medusa` keeps the state of a sequence without those of the rest of its step."""
    torch = pytest.importorskip("torch", reason="needs torch: pip install 'kvcore[torch]'")
    drafter = PLUGINS.build("drafter", "medusa")
    drafter._generator = SimpleNamespace(states=torch.arange(32.0).view(8, 4))
    drafter.on_drawn(["a"], [5])
    kept = drafter._states["a"]
    assert kept.tolist() == [20, 21, 22, 23]
    assert kept.untyped_storage().nbytes() == kept.nbytes


def test_a_drafter_that_is_refused_leaves_tiers_closed(tmp_path):
    """After a drafter is refused, the directory of a tier can be used by the next run."""
    tiers = [f"disk:memory=1MiB,path={tmp_path}"]
    with pytest.raises(InputError, match="token ids"):
        torch_run("draft-model", tiers=tiers)
    torch_run("prompt-lookup", tiers=tiers)


def followed(tokens, longest, shortest, most):
    """Return the drafts of `PromptLookup`, found by trying every position."""
    count = len(tokens)
    for length in range(min(longest, count - 1), shortest - 1, -1):
        tail = tokens[count - length :]
        ends = [e for e in range(length, count) if tokens[e - length : e] == tail]
        roomy = [end for end in ends if end + most <= count]
        if ends:
            end = max(roomy or ends)
            return tokens[end : end + most]
    return []


@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 256, 257, 1 << 40]), max_size=30),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
    most=st.integers(1, 8),
)
def test_lookups_find_the_latest_match(tokens, shortest, more, most):
    """A lookup finds the latest match of the longest n-gram.

    Matches with enough tokens after them come first.
    """
    drafter = PromptLookup(longest=shortest + more, shortest=shortest)
    found = drafter.draft(tokens, most)
    assert [*found] == followed(tokens, shortest + more, shortest, most)
