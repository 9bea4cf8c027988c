"""The serving loop against a naive one without jumps and blocks, under FCFS."""

import attrs
from helpers.serving import Bent, ask, serve
from hypothesis import given
from hypothesis import strategies as st

from kvcore.models.cost import attended_pairs
from kvcore.serving import StepWork


@attrs.define
class Job:
    """A request in the naive loop."""

    request: object
    computed: int = 0
    generated: int = 0
    first_token: int = -1

    @property
    def left(self):
        """Tokens of the prompt still to be computed."""
        return self.request.prompt_tokens - self.computed


@attrs.define
class Loop:
    """A server with enough blocks. Times are picoseconds, except those of requests."""

    latency: object
    max_tokens: int
    max_seqs: int
    chunked: bool
    steps: str
    clock: int = 0
    waiting: list = attrs.field(factory=list)
    running: list = attrs.field(factory=list)
    times: dict = attrs.field(factory=dict)

    def run(self, requests):
        """Return (first token, finish) in ns by id, in the order in which requests end."""
        coming = list(requests)
        while coming or self.waiting or self.running:
            if not (self.waiting or self.running):
                self.clock = max(self.clock, coming[0].arrival * 1000)
            while coming and coming[0].arrival <= self.clock // 1000:
                self.waiting.append(Job(coming.pop(0)))
            self.step()
        return self.times

    def step(self):
        """Run a step of the batch."""
        decoding = [job for job in self.running if not job.left]
        mixed = self.steps == "mixed"
        chunks = self.share(self.max_tokens - len(decoding) * mixed)
        if chunks and not mixed:
            decoding = []
        self.clock += self.latency.duration(_batch(chunks, decoding, self.latency.windows))
        now = self.clock // 1000
        for job in decoding:
            job.generated += 1
        for job, tokens in chunks:
            job.computed += tokens
            if not job.left and job.request.output_tokens:
                job.generated, job.first_token = 1, now
        for job in list(self.running):
            if not job.left and job.generated == job.request.output_tokens:
                self.running.remove(job)
                self.times[job.request.id] = job.first_token, now

    def share(self, budget):
        """Return (job, tokens) of each job that prefills, admitting new ones."""
        chunks = []
        for job in [job for job in self.running if job.left] + self.waiting:
            tokens = min(job.left, budget) if self.chunked else job.left
            is_full = job not in self.running and len(self.running) == self.max_seqs
            if budget <= 0 or is_full or (tokens > budget and chunks):
                break
            if job in self.waiting:
                self.waiting.remove(job)
                self.running.append(job)
            chunks.append((job, tokens))
            budget -= tokens
        return chunks


def _batch(chunks, decoding, windows):
    pairs, context = [], []
    for window in windows:
        pairs.append(sum(attended_pairs(job.computed, n, window) for job, n in chunks))
        lengths = [job.request.prompt_tokens + job.generated for job in decoding]
        context.append(sum(min(length, window or length) for length in lengths))
    prefill = sum(tokens for _, tokens in chunks)
    return StepWork(prefill, tuple(pairs), len(decoding), tuple(context))


ROWS = st.tuples(
    st.integers(0, 60) | st.just(0), st.integers(1, 30), st.integers(0, 20) | st.integers(0, 2)
)
CAPS = {
    "max_tokens": st.sampled_from((4, 7, 16, 256)),
    "max_seqs": st.integers(1, 4),
    "chunked": st.booleans(),
    "steps": st.sampled_from(("mixed", "prefill-first")),
}


@given(
    rows=st.lists(ROWS, max_size=20) | st.lists(ROWS, min_size=10, max_size=20),
    caps=st.fixed_dictionaries(CAPS),
    windows=st.sampled_from(((None,), (6, None))),
)
def test_times_equal_those_of_the_naive_loop(rows, caps, windows):
    """Each request has its first and last token at the naive loop's time, to the ns."""
    now, requests = 0, []
    for number, (wait, prompt, output) in enumerate(rows):
        now += wait
        requests.append(ask(number, now, prompt, output))
    run = serve(requests, latency=Bent(reach=windows), **caps)
    times = {name: (row["first_token"], row["finish"]) for name, row in run.rows.items()}
    # Compared in order: requests that end together end in the order of their admission.
    assert list(times.items()) == list(Loop(Bent(reach=windows), **caps).run(requests).items())
