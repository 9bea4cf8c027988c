"""The batch of decoding jobs, counted by residue class, against a model that counts each."""

from itertools import count

import attrs
from hypothesis import given
from hypothesis import strategies as st

from kvcore import Job, KVCache, Request
from kvcore.cache import Sequence
from kvcore.serving import DecodeSteps
from kvcore.serving.decode_batch import DecodeBatch
from kvcore.serving.stats import TokenGaps

WINDOWS = (None, 1, 7)
EMPTY = KVCache(1, 1)

actions = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 20), st.integers(2, 30), st.booleans()),
    st.tuples(st.just("run"), st.integers(1, 9)),
    st.tuples(st.just("remove"), st.integers(0, 99)),
    st.tuples(st.just("forget"), st.integers(0, 99), st.integers(0, 3)),
)
histories = st.lists(actions, max_size=25) | st.lists(actions, min_size=12, max_size=25)


@attrs.define
class Model:
    """A model of the batch that holds each job with its length."""

    size: int
    steps: DecodeSteps = attrs.field(factory=DecodeSteps)
    lengths: dict = attrs.field(factory=dict)
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
        full = [job for job, n in self.lengths.items() if (n + ahead) % self.size == 0]
        return sorted(full, key=lambda job: job.seq.admission)

    def committers(self):
        """Return the growing jobs of this step whose output has keys."""
        return [job for job in self.growing(self.steps.count) if job.request.output_keys]

    def until_change(self):
        """Return the steps until a job is done, a window is full or a keyed block is full."""
        keyed = [n for job, n in self.lengths.items() if job.request.output_keys]
        return next(
            steps
            for steps in count(1)
            if min(job.output_left for job in self.lengths) <= steps
            or self.rise(steps) != self.rise(steps - 1)
            or any((length + steps) % self.size == 0 for length in keyed)
        )


@given(histories, st.integers(1, 5))
def test_the_decode_batch_equals_the_model(history, size):
    """Sizes, contexts and growing jobs of the batch equal those of the model."""
    model = Model(size)
    batch = DecodeBatch(model.steps, size, WINDOWS, TokenGaps())
    for index, (action, *arguments) in enumerate(history):
        if action == "add":
            _add(model, batch, index, *arguments)
        elif model.lengths and action == "run":
            _run(model, batch, *arguments)
        elif model.lengths:
            job = list(model.lengths)[arguments[0] % len(model.lengths)]
            (_remove if action == "remove" else _forget)(model, batch, job, *arguments[1:])
        _check(model, batch)


def _add(model, batch, number, prompt, output, keyed):
    keys = (1,) if keyed else ()
    request = Request(
        id=number, prompt_tokens=prompt, output_tokens=output, key_tokens=1, output_keys=keys
    )
    job = Job(request, number, 0, model.steps, prompt)
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
    batch.add(job, 1)
    model.lengths[job] = prompt


def _run(model, batch, most):
    steps = min(most, batch.until_change())
    assert batch.advance(0, ((10, 0, steps),)) == (steps, 10 * steps)
    for job in model.lengths:
        model.lengths[job] += steps
    assert batch.committers() == model.committers()
    done = [job for job in model.lengths if not job.output_left]
    assert sorted(batch.pop_finished(), key=id) == sorted(done, key=id)
    for job in done:
        del model.lengths[job]
        model.removed = True


def _remove(model, batch, job):
    batch.remove(job)
    del model.lengths[job]
    model.removed = True


def _forget(model, batch, job, most):
    left = model.lengths[job] - job.seq.dropped_tokens
    tokens = min(left // model.size, most) * model.size
    job.seq.tokens = model.lengths[job]
    job.seq.dropped_tokens += tokens
    batch.forgot(job, tokens)
    model.removed = True


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
