"""Loss of quality with bounded or quantised K/V: attention, next tokens, needles, by bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from random import Random
from typing import Any, TypedDict, Unpack

import attrs

from kvcore.cache import KVCache, RetentionPolicy
from kvcore.config.options import check_names
from kvcore.engine import (
    Backend,
    Generator,
    RaggedBatch,
    Tensor,
    TensorLayout,
    attend_through,
    row_positions,
)
from kvcore.errors import InputError
from kvcore.notebook import Shown, data_frame
from kvcore.plugins.base import options_of
from kvcore.plugins.manager import Plugins, resolve
from kvcore.plugins.options import Spec, parse
from kvcore.progress import Progress, Tick, silent, unseen
from kvcore.request import Request
from kvcore.untrusted import parse_digits
from kvcore_engine.compaction import Compactor
from kvcore_engine.executor import call, tensor_layout
from kvcore_engine.reads import waiting_bytes
from kvcore_engine.retention.page_selection import PageSelection
from kvcore_lab.comparison import types_of

__all__ = ["Quality", "QualityRow", "measure"]

FULL = "full"
"""The retention policy that keeps everything: the baseline of every codec."""

FULL_CODEC = "fp16"
"""The codec of full K/V, if none is given."""

CANNOT_COPY, COPIES = "transformer", "induction"
"""A generator with random weights, which finds no needle, and the one that replaces it."""

BLANK = 0
"""The token after an announced question: `induction` neither looks it up nor answers it."""

STEP_TOKENS = 2048
"""The most tokens of prompts that are computed in a step, over all texts."""


@attrs.frozen(kw_only=True)
class QualityRow:
    """Loss of one retention policy with one codec at one budget.

    Attributes:
        retention, codec: names with the options that were given.
        budget: the budget as a share of the full bytes; None: all tokens are kept, or the
            options of the policy set the budget.
        bytes_per_token: bytes per token of the context: those of the blocks held, with the
            scales of the codec, and of tokens that are not coded until their block is full. A
            mean over the steps.
        share: `bytes_per_token` as a share of the full bytes.
        read_bytes_per_token: bytes that attention of a generated token reads, per token of the
            context: K/V, and summaries of pages. A mean over the steps.
        read_share: the same as a share of what it reads if all tokens are kept.
        attention_error: relative error of attention's output: for each layer, the norm of the
            difference over all texts and steps, divided by the norm of the output; the mean
            over the layers.
        kl, kl_p95: Kullback-Leibler divergence of the next token's distribution from that of
            the full run, in nats: mean, and 95th percentile over texts and steps.
        top1: share of the steps with the same likeliest token.
        needle: share of the questions that are answered; None without questions.
        needle_by_depth: this share by depth of the answer in the haystack, 0 to 1.
    """

    retention: str
    codec: str
    budget: float | None
    bytes_per_token: float
    share: float
    read_bytes_per_token: float
    read_share: float
    attention_error: float
    kl: float
    kl_p95: float
    top1: float
    needle: float | None = None
    needle_by_depth: tuple[tuple[float, float], ...] = ()


@attrs.frozen(kw_only=True, repr=False)
class Quality(Shown):
    """The result of `measure`: most bytes first, rows of one budget by their divergence.

    Attributes:
        generator: name of the generator of the texts.
        needle_generator: name of the generator of the needles; None without needles.
        dtype: the dtype of the computation, and of the full run.
        block_size: tokens in a block.
        prompt_tokens, tokens: tokens of a prompt, and of the text after it.
        texts: number of texts, and of haystacks.
        needles: number of questions about each haystack.
        announced: whether the prompt ends with the questions.
        seed: seed of texts and haystacks.
        full_codec, full_bytes_per_token: the first codec, and its bytes per token if all tokens
            are kept: budgets are shares of them.
        rows: one for each combination of policy, codec and budget.
    """

    generator: str
    needle_generator: str | None
    dtype: str
    block_size: int
    prompt_tokens: int
    tokens: int
    texts: int
    needles: int
    announced: bool
    seed: int
    full_codec: str
    full_bytes_per_token: float
    rows: list[QualityRow]

    def to_frame(self) -> Any:
        """Return a polars DataFrame of the rows, without the depths.

        Raises:
            PluginError: polars is not installed.
        """
        left_out = attrs.filters.exclude("needle_by_depth")
        rows = [attrs.asdict(row, filter=left_out) for row in self.rows]
        return data_frame(rows, "`quality.rows`", types_of(QualityRow))


@attrs.frozen
class _Cell:
    """A retention policy, a codec, a budget, and the share of the tokens that fit into it."""

    retention: Spec
    codec: Spec
    budget: float | None = None
    tokens: float | None = None


class SampleOptions(TypedDict, total=False):
    """The texts and haystacks that `measure` computes: its keywords."""

    prompt_tokens: int
    """Tokens of a prompt, and of a haystack with its announced questions; 512 by default."""
    tokens: int
    """Tokens after a prompt, 1 or more; 64 by default."""
    texts: int
    """Number of texts, and of haystacks; 4 by default."""
    text: str | None
    """A text for the generator to encode, from which even parts are taken. None: random tokens,
    continued by the full run, which samples at temperature 1."""
    needles: int
    """Questions about each haystack, 12 by default; 0: no haystacks."""
    announced: bool
    """Whether the prompt ends with the questions, as by default."""
    seed: int
    """Seed of texts and haystacks, and of plugins that have an option `seed`; 0 by default."""


def measure(
    generator: Generator | str,
    *,
    retention: str = FULL,
    codec: str = FULL_CODEC,
    budgets: Iterable[float] = (0.1, 0.25, 0.5),
    backend: str = "torch-cpu",
    dtype: str = "fp32",
    block_size: int = 16,
    needle_generator: Generator | str | None = None,
    threads: int | None = None,
    plugins: Plugins | None = None,
    progress: Progress | None = None,
    **options: Unpack[SampleOptions],
) -> Quality:
    """Compare bounded and shrunk K/V with full K/V in `dtype`, at equal bytes.

    Every text is computed once with all of its K/V, and once for each combination of a
    policy, a codec and a budget: first the prompt, then the tokens of the full run one by one,
    even if the bounded run would have generated others. With a budget of 0.1 a policy keeps
    the tokens that take a tenth of the full bytes in the codec, so more tokens in a smaller
    codec. If all tokens take less than the budget, the row is left out: it equals `full`.

    The needles are pairs of tokens, a key and its value, at even depths among other tokens.
    The questions come after the prompt, when the policy has dropped its tokens: the token after
    a key must be its value. With `announced` the prompt ends with all keys, each before a
    blank, so that a policy can attend to the questions.

    Costs one run per row. Memory: the K/V of all texts, and the logits and attention's outputs
    of the full run for each of the `tokens`.

    Args:
        generator: an instance that is not in use, or a text such as
            `huggingface:model=DIR`. Needs `Generator.logits`.
        retention: policies, as `h2o,window:sinks=4`. Their option `budget` (`tokens` for
            `window`) is set, unless the text sets it. `full` is always measured.
        codec: codecs, as `fp16,int4`. The full bytes are those of all tokens in the first one.
        budgets: shares of the full bytes, above 0 and below 1.
        backend: the backend.
        dtype: dtype of the computation, one of `TENSOR_DTYPES`.
        block_size: tokens in a block.
        needle_generator: answers the questions. None: `induction` in place of `transformer`,
            whose random weights find no needle; otherwise `generator`.
        threads: number of threads of the host that compute; None: as for `kvcore.run`.
        plugins: the plugins by which names are resolved; None: those installed.
        progress: shows the number of steps that have been computed; None: no progress.
        options: those of `SampleOptions`.

    Raises:
        InputError: an unknown name or option, a size out of range, a text that is too
            short, or a generator without logits.
        PluginError: a plugin cannot be used here.
        PolicyError: a method of a plugin failed.
        StorageError: K/V does not fit into the device's memory.
    """
    plugins = plugins or Plugins()
    shares = sorted(set(budgets), reverse=True)
    check_names(options, SampleOptions.__annotations__)
    samples = _Samples(**options)
    _check(shares, block_size, samples)
    defaults = {"seed": samples.seed}
    built = _built(plugins, generator, defaults)
    if needle_generator is None:
        needle_generator = COPIES if built.name == CANNOT_COPY else built
    finder = _built(plugins, needle_generator, defaults) if samples.needles else built
    generators = [built] if finder is built else [built, finder]
    for model, after in (built, samples.tokens), (finder, 2 * samples.needles):
        if model.positions is not None and model.positions < samples.prompt_tokens + after:
            msg = (
                f"{samples.prompt_tokens} prompt tokens and {after} after them: generator "
                f"{model.name!r} has {model.positions} positions; give fewer tokens or needles"
            )
            raise InputError(msg)
    parts_of_text = samples.divided(built)
    haystacks = samples.haystacks(finder.vocabulary)
    codecs, policies = _specs(codec), [spec for spec in _specs(retention) if str(spec) != FULL]
    parts = _Parts(plugins, backend, dtype, block_size, samples.seed)
    for model in generators:
        model.bind()
        model.load(parts.backend(), dtype)
    cells = [_Cell(Spec(FULL), codec) for codec in codecs]
    for policy in policies:
        cells += parts.cells(built, policy, codecs, shares)
    # Errors in options are raised before anything is computed.
    for cell in cells:
        parts.policy(cell, samples.prompt_tokens)
        parts.layout(finder, cell.codec)
    steps = samples.tokens * (len(cells) + 1) + 2 * samples.needles * len(cells)
    with (
        parts.backend().limit_threads(threads, built.spec),
        (progress or silent)(f"measuring {built.name}", steps) as parts.tick,
    ):
        full = _Full.run(parts, built, samples, parts_of_text)
        rows: list[QualityRow] = []
        for cell in cells:
            row = full.compared(parts, built, cell, rows[0] if rows else None)
            if haystacks:
                row = _with_answers(parts, finder, cell, haystacks, row)
            rows.append(row)
    return Quality(
        generator=built.name,
        needle_generator=finder.name if samples.needles else None,
        dtype=dtype,
        block_size=block_size,
        full_codec=str(codecs[0]),
        full_bytes_per_token=rows[0].bytes_per_token,
        # By bytes, rows of one budget together.
        rows=sorted(rows, key=lambda row: (-(row.budget or row.share), row.kl)),
        **attrs.asdict(samples, filter=attrs.filters.exclude("text")),
    )


@attrs.frozen(kw_only=True)
class _Samples:
    """The texts and haystacks of a measurement, as `SampleOptions` describes them."""

    prompt_tokens: int = 512
    tokens: int = 64
    texts: int = 4
    text: str | None = None
    needles: int = 12
    announced: bool = True
    seed: int = 0

    def divided(self, generator: Generator) -> list[list[int]] | None:
        """Return even parts of the text, in tokens of a generator; None without a text."""
        if self.text is None:
            return None
        ids, texts = generator.encode(self.text), self.texts
        length = self.prompt_tokens + self.tokens
        if len(ids) < length * texts:
            msg = (
                f"the text has {len(ids):,} tokens, and {texts} texts of {length:,} tokens "
                f"need {length * texts:,}: give fewer or shorter texts, or a longer file"
            )
            raise InputError(msg)
        starts = [turn * (len(ids) - length) // max(1, texts - 1) for turn in range(texts)]
        return [ids[start : start + length] for start in starts]

    def haystacks(self, vocabulary: int) -> list[_Haystack]:
        """Return the prompts with needles, of the token ids of a vocabulary."""
        turns = range(self.texts if self.needles else 0)
        return [self._haystack(vocabulary, turn) for turn in turns]

    def _haystack(self, vocabulary: int, turn: int) -> _Haystack:
        """Return a prompt with needles at even depths.

        The other tokens are all different, as long as there are enough.
        """
        needles, length = self.needles, self.prompt_tokens
        hay = length - needles * (4 if self.announced else 2)
        if hay < needles or vocabulary < 3 * needles + 2:
            msg = (
                f"{needles} needles in {length} tokens of {vocabulary} token ids: give fewer, "
                "or longer prompts"
            )
            raise InputError(msg)
        random = Random(f"needles {self.seed} {turn}")  # noqa: S311
        ids = list(range(1, vocabulary))
        random.shuffle(ids)
        keys, values, others = ids[:needles], ids[needles : 2 * needles], ids[2 * needles :]
        prompt = list(islice(cycle(others), hay))
        questions = []
        for needle in reversed(range(needles)):
            depth = (needle + 0.5) / needles
            offset = int(depth * hay)
            prompt[offset:offset] = [keys[needle], values[needle]]
            questions.append((keys[needle], values[needle], depth))
        random.shuffle(questions)
        if self.announced:
            prompt += [token for key, _, _ in questions for token in (key, BLANK)]
        return _Haystack(prompt, questions)


DEFAULTS = _Samples()
"""The texts and haystacks of `measure` and of `kvcore quality` without options."""


def _check(shares: list[float], block_size: int, samples: _Samples) -> None:
    """Raise InputError for sizes below 1, needles below 0, and budgets outside (0, 1)."""
    for share in shares:
        if not 0 < share < 1:
            msg = f"budget {share:g}: give shares of the full bytes, above 0 and below 1"
            raise InputError(msg)
    if min(block_size, samples.prompt_tokens, samples.tokens, samples.texts) < 1:
        msg = "block_size, prompt_tokens, tokens and texts must be 1 or more"
        raise InputError(msg)
    if samples.needles < 0:
        msg = f"needles={samples.needles}: give 0 or more"
        raise InputError(msg)


def _specs(text: str) -> list[Spec]:
    """Return the plugins that a text names, without repetitions."""
    return list({str(spec): spec for spec in parse(text)}.values())


def _built(plugins: Plugins, generator: Generator | str, defaults: dict[str, Any]) -> Generator:
    if isinstance(generator, str):
        built: Generator = plugins.build("generator", generator, defaults)
        return built
    resolved: Generator = resolve("generator", generator)
    return resolved


@attrs.define
class _Parts:
    """Makes the parts of each run."""

    plugins: Plugins
    backend_name: str
    dtype: str
    block_size: int
    seed: int
    tick: Tick = unseen

    def backend(self) -> Backend:
        """Return a backend that is not in use."""
        backend: Backend = self.plugins.build("backend", self.backend_name)
        return backend

    def layout(self, generator: Generator, codec: Spec | None, blocks: int = 1) -> TensorLayout:
        """Return the layout of `blocks` blocks in a codec; None: in the dtype of a run."""
        built = None if codec is None else self.plugins.build("codec", codec)
        return tensor_layout(generator.spec, blocks, self.block_size, self.dtype, built)

    def cells(
        self, generator: Generator, policy: Spec, codecs: Sequence[Spec], shares: list[float]
    ) -> Iterator[_Cell]:
        """Yield the cells of one policy in which it does not keep all tokens."""
        cls = self.plugins.get("retention", policy.name)
        known = {option.name for option in options_of(cls)}
        budgets = known.intersection(("budget", "tokens"))
        full = self.layout(generator, codecs[0]).bytes_per_block
        plain = self.layout(generator, None).bytes_per_block
        selection = 0.0
        if issubclass(cls, PageSelection):
            selection = self.plugins.build("retention", policy).selection(generator.spec)
        for codec in codecs:
            if not budgets or policy.options.keys() & budgets:
                yield _Cell(policy, codec)
                continue
            taken = self.layout(generator, codec).bytes_per_block
            for share in shares:
                if share * full < taken:
                    # Summaries are not coded, and are read besides: a page is left for them.
                    tokens = max(share * full - selection * plain, 1) / taken
                    yield _Cell(policy, codec, share, tokens)

    def policy(self, cell: _Cell, prompt_tokens: int) -> RetentionPolicy | None:
        """Return the policy of a cell; None: everything is kept."""
        if str(cell.retention) == FULL:
            return None
        defaults: dict[str, Any] = {"seed": self.seed}
        if cell.tokens is not None:
            text = cell.retention.options.get("sinks", "0")
            sinks = parse_digits(text) or 0  # Other text is an error in `build`.
            kept = int(cell.tokens * prompt_tokens)
            defaults |= {"budget": cell.tokens, "tokens": max(1, kept - sinks)}
        policy: RetentionPolicy = self.plugins.build("retention", cell.retention, defaults)
        return policy


class _Run:
    """Texts of equal length in a pool of their own, computed together.

    Attributes:
        attended: attention's output of each layer in the last step,
            `[texts, query_heads, value_dim]`.
        bytes_per_token: for each step behind the prompts, the bytes held by tokens of the
            texts.
        read_per_token: for each such step, the bytes that attention read, by the same tokens.
    """

    def __init__(
        self,
        parts: _Parts,
        generator: Generator,
        cell: _Cell | None,
        prompts: list[list[int]],
        more: int,
    ) -> None:
        """Compute `prompts`; `more` tokens of each will follow. `cell` None: the full run."""
        size = parts.block_size
        blocks = len(prompts) * (-(-(len(prompts[0]) + more) // size) + 2)
        self._generator, self._tick = generator, parts.tick
        self._cache = KVCache(
            blocks,
            size,
            retention=None if cell is None else parts.policy(cell, len(prompts[0])),
            ids=True,
        )
        self._backend = parts.backend()
        self._backend.bind()
        self._backend.allocate(
            parts.layout(generator, None if cell is None else cell.codec, blocks)
        )
        self._compactor = Compactor.for_run(self._cache, self._backend, generator)
        self._seqs = [
            self._cache.open(Request(id=index, prompt_tokens=len(prompt), key_tokens=size))
            for index, prompt in enumerate(prompts)
        ]
        self._output = 0
        self.attended: list[Tensor] = []
        self.bytes_per_token: list[float] = []
        self.read_per_token: list[float] = []
        chunk = max(1, STEP_TOKENS // len(prompts))
        for start in range(0, len(prompts[0]), chunk):
            self.logits = self._compute([prompt[start : start + chunk] for prompt in prompts])

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append a token to each text; return the logits of the next, `[texts, vocabulary]`."""
        self._output += 1
        before = self._compactor.reads.bytes
        logits = self._compute([[token] for token in tokens])
        context = sum(seq.position for seq in self._seqs)
        self.bytes_per_token.append(self._held_bytes() / context)
        self.read_per_token.append((self._compactor.reads.bytes - before) / context)
        self._tick(1)
        return logits

    def _held_bytes(self) -> int:
        """Return the bytes of used blocks, summaries, and tokens that wait to be coded."""
        pool, layout = self._cache.pool, self._backend.layout
        held_bytes = (pool.blocks - pool.free_blocks) * layout.bytes_per_block
        held_bytes += self._compactor.summary_bytes(self._seqs)
        tokens = sum(seq.held % layout.block_size for seq in self._seqs)
        return held_bytes + tokens * waiting_bytes(layout) * layout.layers

    def _compute(self, tokens: list[list[int]]) -> Tensor:
        """Compute more tokens of each text; return the logits after the last of each."""
        seqs, backend = self._seqs, self._backend
        size = backend.layout.block_size
        for seq, new in zip(seqs, tokens, strict=True):
            self._cache.extend(seq, max(0, seq.computed + len(new) - seq.tokens))
        lengths = [len(new) for new in tokens]
        batch = RaggedBatch(
            block_tables=[
                self._cache.block_table(seq)[: -(-(seq.held + n) // size)]
                for seq, n in zip(seqs, lengths, strict=True)
            ],
            contexts=[seq.held for seq in seqs],
            lengths=lengths,
            token_ids=[token for new in tokens for token in new],
            positions=row_positions((seq.position for seq in seqs), lengths),
            output_indices=[self._output] * len(seqs),
            seeds=range(len(seqs)),
            held_positions=self._compactor.held_positions(seqs, [seq.held for seq in seqs]),
        )
        attend, self.attended = self._compactor.attend(seqs, batch), []

        def attended(*step: Any, **options: Any) -> Tensor:
            self.attended.append(attend(*step, **options))
            return self.attended[-1]

        through = attend_through(backend.plan(batch), backend.store_rotated, attended)
        logits: Tensor = call(self._generator, self._generator.logits, batch, through)
        for seq, n in zip(seqs, lengths, strict=True):
            self._cache.commit(seq, n)
        return logits


@attrs.frozen(eq=False)
class _Full:
    """Texts and results of the run with the full cache, to which other runs are compared.

    Attributes:
        prompts: token ids of each prompt.
        outputs: for each step, the token id of each text.
        logits: for each step, `[texts, vocabulary]`.
        attended: for each step, attention's output of each layer.
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    logits: list[Tensor]
    attended: list[list[Tensor]]

    @classmethod
    def run(
        cls,
        parts: _Parts,
        generator: Generator,
        samples: _Samples,
        texts: list[list[int]] | None,
    ) -> _Full:
        """Compute texts; None: sample them."""
        import torch  # noqa: PLC0415 - only runs need it

        source = torch.Generator().manual_seed(samples.seed)
        if texts is None:
            shape = samples.texts, samples.prompt_tokens
            prompts = torch.randint(generator.vocabulary, shape, generator=source).tolist()
        else:
            prompts = [ids[: samples.prompt_tokens] for ids in texts]
        run = _Run(parts, generator, None, prompts, samples.tokens)
        full = cls(prompts, [], [], [])
        logits = run.logits
        for step in range(samples.tokens):
            chances = logits.double().softmax(-1).cpu()
            if chances.isnan().any():
                msg = (
                    f"generator {generator.name!r} computes NaN in {parts.dtype}: take "
                    "another dtype"
                )
                raise InputError(msg)
            if texts is None:
                new = torch.multinomial(chances, 1, generator=source)[:, 0].tolist()
            else:
                new = [ids[samples.prompt_tokens + step] for ids in texts]
            logits = run.step(new)
            full.outputs.append(new)
            full.logits.append(logits)
            full.attended.append(run.attended)
        return full

    def compared(
        self, parts: _Parts, generator: Generator, cell: _Cell, first: QualityRow | None
    ) -> QualityRow:
        """Compute the texts with the policy and codec of `cell`; return the losses.

        Shares are those of the bytes in the row `first`; None: this is the first row.
        """
        import torch  # noqa: PLC0415 - see `run`

        run = _Run(parts, generator, cell, self.prompts, len(self.outputs))
        errors = torch.zeros(len(self.attended[0]), 2, dtype=torch.float64)
        divergences, agreed = [], []
        for new, wanted, attended in zip(self.outputs, self.logits, self.attended, strict=True):
            logits = run.step(new)
            for layer, (computed, right) in enumerate(zip(run.attended, attended, strict=True)):
                errors[layer, 0] += (computed.double() - right.double()).square().sum().cpu()
                errors[layer, 1] += right.double().square().sum().cpu()
            divergences.append(divergence(wanted, logits).cpu())
            agreed.append((wanted.argmax(-1) == logits.argmax(-1)).cpu())
        apart = torch.cat(divergences)
        # A layer whose output is 0 has an error of 0.
        relative = (errors[:, 0] / errors[:, 1].clamp_min(torch.finfo().tiny)).sqrt()
        held = sum(run.bytes_per_token) / len(run.bytes_per_token)
        read = sum(run.read_per_token) / len(run.read_per_token)
        return QualityRow(
            retention=str(cell.retention),
            codec=str(cell.codec),
            budget=cell.budget,
            bytes_per_token=held,
            share=held / (first.bytes_per_token if first else held),
            read_bytes_per_token=read,
            read_share=read / (first.read_bytes_per_token if first else read),
            attention_error=float(relative.mean()),
            kl=float(apart.mean()),
            kl_p95=float(apart.quantile(0.95)),
            top1=float(torch.cat(agreed).double().mean()),
        )


def divergence(full: Tensor, bounded: Tensor) -> Tensor:
    """Return KL(full || bounded) of the distributions of logits, `[rows]`, in nats.

    Computed in fp64; equal logits have exactly 0.
    """
    right, bounded_log = (logits.double().log_softmax(-1) for logits in (full, bounded))
    # Rounding can make a sum negative.
    return (right.exp() * (right - bounded_log)).sum(-1).clamp_min(0)


@attrs.frozen
class _Haystack:
    """A prompt with needles, and the questions: key, value and depth of each."""

    prompt: list[int]
    questions: list[tuple[int, int, float]]


def _with_answers(
    parts: _Parts, finder: Generator, cell: _Cell, hay: list[_Haystack], row: QualityRow
) -> QualityRow:
    """Return `row` with the share of the questions about `hay` that are answered."""
    questions_asked = list(zip(*(haystack.questions for haystack in hay), strict=True))
    run = _Run(
        parts, finder, cell, [haystack.prompt for haystack in hay], 2 * len(questions_asked)
    )
    by_depth_found: dict[float, list[bool]] = {}
    for questions in questions_asked:
        answers = run.step([key for key, _, _ in questions]).argmax(-1).tolist()
        for (_, value, depth), answer in zip(questions, answers, strict=True):
            by_depth_found.setdefault(depth, []).append(value == answer)
        run.step([value for _, value, _ in questions])
    by_depth = tuple(
        (depth, sum(answers) / len(answers))
        for depth, answers in sorted(by_depth_found.items())
    )
    accuracy = sum(share for _, share in by_depth) / len(by_depth)
    return attrs.evolve(row, needle=accuracy, needle_by_depth=by_depth)
