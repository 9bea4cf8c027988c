"""The batch of decoding jobs, counted by residue class, against a model that counts each."""

from collections import Counter
from itertools import count

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Job, KVCache, Request
from kvcore.cache import Sequence
from kvcore.serving import DecodeSteps
from kvcore.serving.decode_batch import DecodeBatch
from kvcore.serving.stats import TokenGaps

WINDOWS = (None, 1, 7)
EMPTY = KVCache(1, 1)

some = st.integers(0, 99)
actions = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(1, 20),
        st.integers(2, 30),
        st.booleans(),
        *[st.integers(0, 1)] * 2,
    ),
    st.tuples(st.just("run"), st.integers(1, 9), *[st.integers(0, 2)] * 3),
    st.tuples(st.just("remove"), some),
    st.tuples(st.just("forget"), some, st.integers(0, 3), st.booleans()),
    st.tuples(st.just("gain"), some, st.integers(1, 3)),
    st.tuples(st.just("end"), some),
)
histories = st.lists(actions, max_size=25) | st.lists(actions, min_size=12, max_size=25)


@attrs.define
class Model:
    """A model of the batch that holds each job with its length and its newest token's time."""

    size: int
    ahead: int
    steps: DecodeSteps = attrs.field(factory=DecodeSteps)
    lengths: dict = attrs.field(factory=dict)
    newest: dict = attrs.field(factory=dict)
    gaps: Counter = attrs.field(factory=Counter)
    clock: int = 0
    removed: bool = False

    def context(self, after=0):
        """Return the tokens that the next step, or one `after` steps later, attends to."""
        return [
            sum(
                min(length - job.seq.dropped_tokens + after + 1, window or 10**9)
                for job, length in self.lengths.items()
            )
            for window in WINDOWS
        ]

    def rise(self, after=0):
        """Return the growth of the context at that step."""
        now, then = self.context(after), self.context(after + 1)
        return [b - a for a, b in zip(now, then, strict=True)]

    def growing(self, step):
        """Return the jobs whose last block is full at `step`, in order of admission."""
        ahead = step - self.steps.count
        tables = {job: n - job.seq.compacted for job, n in self.lengths.items()}
        full = [job for job, n in tables.items() if (n + ahead) % self.size == 0]
        return sorted(full, key=lambda job: job.seq.admission)

    def committers(self, after=0):
        """Return the jobs with keys for their output that fill a block `ahead` steps later."""
        full = self.growing(self.steps.count + after + self.ahead)
        return [job for job in full if job.request.output_keys]

    def until_change(self):
        """Return the steps until a job is done, a window is full or a keyed block is full."""
        return next(
            steps
            for steps in count(1)
            if min(job.output_left for job in self.lengths) <= steps
            or self.rise(steps) != self.rise(steps - 1)
            or self.committers(steps)
        )

    def run(self, segments):
        """Give each job a token in each step of segments (ps of the first, more, steps)."""
        for first, slope, steps in segments:
            for step in range(steps):
                self.clock += first + slope * step
                for job in self.lengths:
                    self.lengths[job] += 1
                    self.gaps[self.clock - self.newest[job]] += 1
                    self.newest[job] = self.clock


@pytest.mark.parametrize("size", range(1, 6))
@given(histories, st.integers(0, 1))
def test_the_decode_batch_equals_the_model(size, history, ahead):
    """Sizes, contexts, growing jobs and times between tokens equal those of the model."""
    model, gaps = Model(size, ahead), TokenGaps()
    batch = DecodeBatch(model.steps, size, WINDOWS, gaps, ahead=ahead)
    changes = {"remove": _remove, "forget": _forget, "gain": _gain, "end": _end}
    for index, (action, *arguments) in enumerate(history):
        if action == "add":
            _add(model, batch, index, *arguments)
        elif model.lengths and action == "run":
            _run(model, batch, *arguments)
        elif model.lengths:
            job = list(model.lengths)[arguments[0] % len(model.lengths)]
            changes[action](model, batch, job, *arguments[1:])
        _check(model, batch)
        recorded = Counter()
        for first, slope, steps, jobs in gaps.pending:
            for step in range(steps):
                recorded[first + slope * step] += jobs
        assert recorded == model.gaps


def _add(model, batch, number, prompt, output, keyed, paused, compacted):
    keys = (1,) if keyed else ()
    request = Request(
        id=number, prompt_tokens=prompt, output_tokens=output, key_tokens=1, output_keys=keys
    )
    job = Job(request, number, 0, model.steps, prompt)
    job.computed = job.target
    # Sequences may join in an order that is not that of their admission.
    job.seq = Sequence(
        number,
        number * 7 % 25,
        request,
        keys,
        0,
        0,
        0,
        prompt,
        prompt,
        0,
        prompt,
        EMPTY.tree.root,
    )
    # It may have been compacted, and its newest token come long before, if it was paused.
    job.seq.compacted = job.seq.dropped_tokens = compacted
    job.seq.tokens -= compacted
    job.last_token_ps = model.newest[job] = model.clock - 100 * paused
    batch.add(job, 1)
    model.lengths[job] = prompt


def _run(model, batch, most, slope, waited, cut):
    steps = min(most, batch.until_change())
    model.clock += 1000 * waited
    second = steps * cut // 3
    segments = [(10, slope, steps - second), (30, 0, second)][: 2 if second else 1]
    began = model.clock
    model.run(segments)
    assert batch.advance(began, segments) == (steps, model.clock - began)
    assert batch.last_step_ps == model.clock
    assert batch.committers() == model.committers()
    done = [job for job in model.lengths if not job.output_left]
    assert sorted(batch.pop_finished(), key=id) == sorted(done, key=id)
    for job in done:
        del model.lengths[job]
        model.removed = True


def _remove(model, batch, job):
    batch.remove(job)
    assert job.last_token_ps == model.newest[job]
    del model.lengths[job]
    model.removed = True


def _forget(model, batch, job, most, compacts):
    """Drop whole blocks, or compact to fewer tokens of any number."""
    seq, left = job.seq, model.lengths[job] - job.seq.dropped_tokens
    tokens = min(left, most) if compacts else min(left // model.size, most) * model.size
    seq.dropped_tokens += tokens
    if compacts:
        seq.compacted = seq.dropped_tokens
    seq.tokens = model.lengths[job] - seq.compacted
    batch.forgot(job, tokens)
    model.removed = True


def _gain(model, batch, job, most):
    """Accept drafts, as many as leave a token to generate."""
    tokens = min(most, job.output_left - 1)
    batch.gain(job, tokens)
    model.lengths[job] += tokens
    model.removed = True


def _end(model, batch, job):
    """End the text of a job with the next token."""
    job.output_tokens = model.lengths[job] - job.request.prompt_tokens + 2
    batch.end(job)
    assert batch.until_change() == 1


def _check(model, batch):
    now, size = model.steps.count, model.size
    assert batch.size == len(model.lengths)
    assert list(batch) == list(model.lengths)
    assert {job: job.length for job in batch} == model.lengths
    assert batch.context == model.context()
    assert batch.growth == model.rise()
    for step in range(now, now + 2 * size):
        assert (batch.growing(step) or []) == model.growing(step)
    for end in (now + 1, now + 2, now + size + 1, now + 40):
        steps = [step for step in range(now, end) if model.growing(step)]
        growing = [(step, model.growing(step)) for step in steps]
        assert list(batch.growing_between(now, end)) == growing
        blocks = sum(len(model.growing(step)) for step in steps)
        assert batch.growth_between(now, end) == blocks
    if model.lengths:
        # The window of a job that was removed may still cut a jump short.
        assert 1 <= batch.until_change() <= model.until_change()
        assert model.removed or batch.until_change() == model.until_change()
