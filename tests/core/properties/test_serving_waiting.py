"""The waiting queue in scheduler order against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from kvcore import Job, Request
from kvcore.cache.eviction import _GARBAGE
from kvcore.serving import DecodeSteps
from kvcore.serving.job import PAUSED
from kvcore.serving.waiting import CheckedScheduler, WaitingQueue
from kvcore_plugins.eviction import LRU
from kvcore_plugins.scheduler import FCFS

STEPS = DecodeSteps()
JOBS = 8

pushes = st.tuples(
    st.just("push"), st.integers(0, JOBS - 1), st.integers(0, 3), st.booleans(), st.booleans()
)
histories = st.lists(pushes | st.tuples(st.just("remove"), st.integers(0, JOBS)), max_size=80)


def jobs():
    """Return new jobs."""
    requests = (Request(id=index, prompt_tokens=1, key_tokens=1) for index in range(JOBS))
    return [Job(request, index, 0, STEPS, 1) for index, request in enumerate(requests)]


@given(histories)
def test_the_head_is_the_job_of_lowest_rank(history):
    """The head is the job of lowest rank, paused ones first, then by order of arrival."""
    everybody, waiting, queue = jobs(), WaitingQueue(CheckedScheduler(FCFS()), LRU()), []
    for action, which, *how in history:
        if action == "push":
            job = everybody[which]
            rank, paused, front = how
            job.rank, job.stage = rank, PAUSED if paused else "waiting"
            waiting.enter(job, 0, front=front)
            if front:
                queue = [job, *(other for other in queue if other is not job)]
            elif job not in queue:
                queue.append(job)
        elif queue:
            # Remove the head, or the job of this number.
            job = min(queue, key=_order) if which == JOBS else queue[which % len(queue)]
            waiting.remove(job, 0)
            queue.remove(job)
        assert list(waiting) == queue
        assert len(waiting) == len(queue)
        assert [job in waiting for job in everybody] == [job in queue for job in everybody]
        assert waiting.head() is (min(queue, key=_order) if queue else None)


def _order(job):
    return job.rank, job.stage != PAUSED, job.serial


def test_ranking_a_job_again_leaves_few_entries():
    """A job that is ranked a thousand times leaves few entries in the heap."""
    waiting = WaitingQueue(CheckedScheduler(FCFS()), LRU())
    first, second, *_ = jobs()
    for turn in range(1000):
        for job in (first, second):
            job.rank = turn
            waiting.enter(job, 0)
        assert len(waiting._heap) <= _GARBAGE * (len(waiting) + _GARBAGE) + 1
