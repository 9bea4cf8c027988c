/* The twin of kvcore/serving/batcher.py and waiting.py: which jobs run, wait and are preempted.
 *
 * The rules of engines are read as options; rules that override a decision are left to Python.
 */
#include "core.h"

enum { PATIENCE = 100 };

void free_job(Job *job)
{
    Py_XDECREF(job->request), Py_XDECREF(job->keys), Py_XDECREF(job->python);
    Py_XDECREF(job->rank), Py_XDECREF(job->verdict), Py_XDECREF(job->span), Py_XDECREF(job->token);
    PyMem_Free(job);
}

/* The queue: `WaitingQueue`, for jobs that leave it at the head. */

/* 1: `one` goes before `other`; -1 with an exception. */
static int goes_before(Job *one, Job *other)
{
    if (one->rank && other->rank) {
        int same = PyObject_RichCompareBool(one->rank, other->rank, Py_EQ);
        if (same <= 0)
            return same < 0 ? -1 : PyObject_RichCompareBool(one->rank, other->rank, Py_LT);
    }
    return one->serial < other->serial;
}

static int priority_failed(Core *c)
{
    PyObject *error = take_exception();
    PyObject *batcher = get(c->loop, "batcher");
    PyObject *done = batcher ? PyObject_CallMethod(batcher, "refuse_order", "(O)", error) : NULL;
    Py_XDECREF(batcher), Py_XDECREF(done), Py_XDECREF(error);
    return -1;
}

static int heap_push(Core *c, Job *job)
{
    i64 at = c->waiting.count; /* its number before */
    if (GROW(c->heap, at, c->heap_room) < 0)
        return -1;
    for (; at; at = (at - 1) / 2) {
        int before = goes_before(job, c->heap[(at - 1) / 2]);
        if (before < 0)
            return priority_failed(c);
        if (!before)
            break;
        c->heap[at] = c->heap[(at - 1) / 2];
    }
    c->heap[at] = job;
    return 0;
}

static int heap_pop(Core *c)
{
    i64 count = c->waiting.count - 1, at = 0, below;
    Job *last = c->heap[count];
    while ((below = 2 * at + 1) < count) {
        int before = below + 1 < count ? goes_before(c->heap[below + 1], c->heap[below]) : 0;
        if (before > 0)
            below++;
        int stays = before < 0 ? -1 : goes_before(last, c->heap[below]);
        if (stays < 0)
            return priority_failed(c);
        if (stays)
            break;
        c->heap[at] = c->heap[below];
        at = below;
    }
    c->heap[at] = last;
    return 0;
}

/* The fields of a job from which Python makes one of its own. */
#define JOB_OBJECTS(X)                                                                            \
    X("request", request) X("job", python) X("rank", rank) X("slo", verdict) X("keys", keys)      \
    X("span", span) X("token", token)

#define JOB_NUMBERS(X)                                                                            \
    X("serial", serial) X("arrival", arrival) X("visible", visible) X("stage", stage)             \
    X("output_tokens", output) X("target", target) X("computed", computed) X("hit", hit)          \
    X("admitted", admitted) X("first_token", first_token) X("last_token_ps", last_token_ps)       \
    X("generated_before", generated_before) X("joined", joined) X("recomputes", recomputes)       \
    X("is_fresh", is_fresh) X("end", end) X("residue", residue) X("admission", admission)         \
    X("cacheable", cacheable) X("lookup_blocks", lookup) X("hit_blocks", hit_blocks)              \
    X("tokens", tokens) X("committed", committed) X("blocks", blocks)

static int put_item(PyObject *state, const char *name, PyObject *value)
{
    int failed = !value || PyDict_SetItemString(state, name, value) < 0;
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

PyObject *job_state(Job *job)
{
    PyObject *state = PyDict_New();
    int failed = !state;
#define OBJECT(name, field) \
    failed = failed || put_item(state, name, Py_NewRef(job->field ? job->field : Py_None)) < 0;
#define NUMBER(name, field) failed = failed || put_item(state, name, big_int(job->field)) < 0;
    JOB_OBJECTS(OBJECT)
    JOB_NUMBERS(NUMBER)
#undef OBJECT
#undef NUMBER
    if (failed)
        Py_CLEAR(state);
    return state;
}

/* Return the priority of `job`, by a scheduler that computes one from the `Job` of Python. */
static PyObject *priority_of(Core *c, Job *job, i64 now)
{
    PyObject *steps = get(c->loop, "steps"), *state = steps ? job_state(job) : NULL;
    PyObject *rank = NULL, *answer = NULL;
    if (state && set_int(steps, "count", c->batch.steps) == 0)
        answer = PyObject_CallFunction(c->priority, "OL", state, now);
    if (answer && PyTuple_Check(answer) && PyTuple_GET_SIZE(answer) == 2) {
        put(&job->python, Py_NewRef(PyTuple_GET_ITEM(answer, 0)));
        rank = Py_NewRef(PyTuple_GET_ITEM(answer, 1));
    }
    Py_XDECREF(steps), Py_XDECREF(state), Py_XDECREF(answer);
    return rank;
}

int queue(Core *c, Job *job, i64 now, int front)
{
    if (c->priority && put(&job->rank, priority_of(c, job, now)) < 0)
        return -1;
    if (heap_push(c, job) < 0)
        return -1;
    LIST_ADD(&c->waiting, job, running); /* it runs, or it waits */
    if (front && c->waiting.first != job) {
        LIST_REMOVE(&c->waiting, job, running);
        job->running = (Link){NULL, c->waiting.first};
        c->waiting.first->running.before = job;
        c->waiting.first = job;
        c->waiting.count++;
    }
    c->changed = 1;
    return 0;
}

/* The plan: `Batcher`. */

/* Return the running job that is last in order, and loses its blocks; NULL with an exception. */
static Job *choose_victim(Core *c, i64 now)
{
    Job *victim = NULL;
    PyObject *highest = NULL;
    for (Job *job = c->running.first; job; job = job->running.after) {
        if (!c->priority) {
            if (!victim || job->serial > victim->serial)
                victim = job;
            continue;
        }
        PyObject *priority = priority_of(c, job, now), *order = NULL;
        if (priority)
            order = Py_BuildValue("(NL)", priority, c->last_of_ties ? job->admission
                                                                    : job->arrival);
        int later = !order ? -1 : highest ? PyObject_RichCompareBool(order, highest, Py_GT) : 1;
        if (later < 0) {
            Py_XDECREF(order), Py_XDECREF(highest);
            if (priority)
                priority_failed(c);
            return NULL;
        }
        if (later) {
            victim = job;
            Py_XSETREF(highest, Py_NewRef(order));
        }
        Py_DECREF(order);
    }
    Py_XDECREF(highest);
    return victim;
}

/* Keep the blocks that `job` has generated; not the newest token, if it is not `complete`. */
static int keep_generated(Core *c, Job *job, i64 now, int complete)
{
    if (!c->keeps)
        return 0;
    i64 tokens = job->computed, length = length_of(&c->batch, job);
    if (job->target == job->computed && length > tokens)
        tokens = length - !complete;
    return tree_keep_generated(&c->tree, job, tokens, now);
}

/* FINISH: free the slot and the blocks of `job`. */
int finish_job(Core *c, Job *job, i64 now, int complete)
{
    if (job->stage == DECODE)
        settle(&c->batch, job, job->prompt + job->output - 1);
    job->stage = DONE;
    if (keep_generated(c, job, now, complete) < 0)
        return -1;
    LIST_REMOVE(&c->running, job, running);
    job->has_left = 1;
    c->blocked = NULL;
    c->changed = 1;
    return tree_close(&c->tree, job, now, 1);
}

static int livelock(Core *c, Job *last, i64 now, i64 jobs)
{
    PyObject *batcher = get(c->loop, "batcher");
    PyObject *id = FIELD(last->request, id), *error = NULL;
    if (batcher && id)
        error = PyObject_CallMethod(batcher, "livelock", "LLOLL", now, c->without_progress, id,
                                    jobs, c->tree.free);
    Py_XDECREF(batcher), Py_XDECREF(id);
    if (error)
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return -1;
}

/* Remove the chunks of `job`; return their tokens. */
static i64 without(Chunk *chunks, i64 *count, const Job *job)
{
    i64 kept = 0, tokens = 0;
    for (i64 n = 0; n < *count; n++)
        if (chunks[n].job == job)
            tokens += chunks[n].tokens;
        else
            chunks[kept++] = chunks[n];
    *count = kept;
    return tokens;
}

/* Stop the prefill or the decoding of `job`; its tokens of the step go to jobs after it. */
static void leave_batch(Core *c, Job *job)
{
    if (job->stage == DECODE) {
        c->budget += c->mixed;
        batch_remove(&c->batch, job);
        batch_settle(&c->batch, job);
    } else {
        c->budget += without(c->chunks, &c->chunk_count, job);
        LIST_REMOVE(&c->prefilling, job, prefilling);
    }
    without(c->unpublished, &c->unpublished_count, job);
    LIST_REMOVE(&c->running, job, running);
}

/* Free all blocks of a running job, which will compute them again; or end it, if it is done. */
static int take_blocks(Core *c, Job *job, i64 now)
{
    c->victims++;
    job->is_victim = 1;
    if (job->stage == DONE)
        return finish_job(c, job, now, 0);
    leave_batch(c, job);
    i64 jobs = c->running.count + c->waiting.count;
    i64 most = (PATIENCE + 10 * jobs) * (c->by_chunk ? c->tree.pool : 1);
    /* Under a lag, its newest token is known once the slot of the next is allocated. */
    int complete = !c->has_lag || job->tokens > length_of(&c->batch, job), failed;
    failed = keep_generated(c, job, now, complete);
    if (!failed && ++c->without_progress > most)
        failed = livelock(c, job, now, jobs);
    job->recomputes++;
    if (failed || tree_close(&c->tree, job, now, 0) < 0) {
        free_job(job);
        return -1;
    }
    job->stage = WAITING;
    job->target = job->prompt + generated_of(&c->batch, job);
    job->computed = 0;
    if (queue(c, job, now, 1) < 0) {
        free_job(job);
        return -1;
    }
    c->blocked = NULL;
    return 0;
}

/* Free the blocks of the running job that is last in order. */
static int preempt(Core *c, i64 now, Job **victim)
{
    *victim = choose_victim(c, now);
    if (*victim)
        return take_blocks(c, *victim, now);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "no running job has blocks");
    return -1;
}

/* Allocate for the next decode step; preempt until there is room. */
static int next_step(Core *c, i64 now)
{
    int full;
    Job *victim;
    while ((full = batch_next_step(&c->batch, now)) == 1)
        if ((c->by_chunk && batch_serve_first(&c->batch, now) < 0) || preempt(c, now, &victim) < 0)
            return -1;
    return full;
}

/* Return how many tokens of a prompt the step that is planned may compute. */
static i64 most_tokens(const Core *c)
{
    int capped = c->max_chunk >= 0 && c->running.count + c->waiting.count > 1;
    return capped && c->max_chunk < c->budget ? c->max_chunk : c->budget;
}

/* Preempt until `job` has the blocks of its first `tokens` tokens. 1: it has lost its own. */
static int get_blocks(Core *c, Job *job, i64 tokens, i64 now)
{
    tokens -= job->tokens;
    if (tokens <= 0)
        return 0;
    while (ceil_div(job->tokens + tokens, c->tree.size) - job->blocks
           > c->tree.free + c->tree.unpinned) {
        Job *victim;
        if (preempt(c, now, &victim) < 0)
            return -1;
        if (victim == job)
            return 1;
    }
    return tree_extend(&c->tree, job, tokens, now);
}

static int publish_later(Core *c, Job *job, i64 tokens)
{
    if (GROW(c->unpublished, c->unpublished_count, c->unpublished_room) < 0)
        return -1;
    c->unpublished[c->unpublished_count++] = (Chunk){job, tokens};
    return 0;
}

/* Add the chunk of `job` in the planned step, and allocate its blocks. */
static int allot(Core *c, Job *job, i64 now)
{
    i64 tokens = job->target - job->computed, most = most_tokens(c);
    if (tokens > most)
        tokens = c->chunked ? most : c->chunk_count ? 0 : tokens;
    if (!tokens) {
        c->budget = 0;
        return 0;
    }
    int lost = c->by_chunk ? get_blocks(c, job, job->computed + tokens, now) : 0;
    if (lost)
        return lost < 0 ? -1 : 0;
    if (GROW(c->chunks, c->chunk_count, c->chunk_room) < 0)
        return -1;
    c->chunks[c->chunk_count++] = (Chunk){job, tokens};
    c->budget -= tokens;
    return c->publishes ? publish_later(c, job, tokens) : 0;
}

/* Share the blocks that the next `tokens` tokens of `job` fill. */
static int share(Core *c, Job *job, i64 tokens, i64 now)
{
    if (tree_publish(&c->tree, job, tokens, now) < 0)
        return -1;
    return c->batch.commits ? tree_keep_generated(&c->tree, job, job->committed + tokens, now) : 0;
}

/* Share the blocks that the planned step will fill: no job loses its blocks any more. */
static int publish(Core *c, i64 now)
{
    for (i64 n = 0; n < c->unpublished_count; n++)
        if (share(c, c->unpublished[n].job, c->unpublished[n].tokens, now) < 0)
            return -1;
    c->unpublished_count = 0;
    return 0;
}

/* Share the blocks that the decoding `job` has filled, in the running step too. */
int publish_filled(void *core, Job *job, i64 now)
{
    Core *c = core;
    i64 length = length_of(&c->batch, job);
    settle(&c->batch, job, job->tokens > length ? job->tokens : length);
    return share(c, job, length - job->committed, now);
}

void computed(Core *c)
{
    c->blocked = NULL; /* it may hit more now */
    c->changed = 1;
}

/* Note the generated blocks that the planned step fills; under a lag, share those of the last. */
static int fill_output(Core *c, i64 now)
{
    i64 count;
    Job **jobs = batch_committers(&c->batch, &count);
    for (i64 n = 0; n < count; n++) {
        Job *job = jobs[n];
        i64 length = length_of(&c->batch, job);
        if (c->has_lag) {
            if (publish_filled(c, job, now) < 0)
                return -1;
        } else {
            settle(&c->batch, job, length + 1);
            if (tree_commit(&c->tree, job, length - job->committed, now) < 0
                || publish_later(c, job, 1) < 0)
                return -1;
        }
        computed(c);
    }
    return 0;
}

/* 1: this step may compute a chunk of a waiting job, or all that it has to. */
static int has_chunk(Core *c, Job *job, i64 now)
{
    if (c->chunked || (c->alone && !c->chunk_count))
        return 1;
    i64 hit = tree_probe(&c->tree, job, now);
    return hit < 0 ? -1 : job->target - hit * c->tree.size <= c->budget;
}

/* Admit the first job that waits, if there is a slot and room. 1: it does not run. */
static int admit_head(Core *c, i64 now)
{
    if (!c->waiting.count || (!c->after_preemption && c->victims))
        return 1;
    Job *job = c->heap[0];
    if (job == c->blocked || job->is_victim)
        return 1;
    int fits = has_chunk(c, job, now);
    if (fits < 1)
        return fits < 0 ? -1 : 1;
    if (c->running.count >= c->max_seqs)
        return 1;
    Admission admission = {.most = -1};
    if (c->by_chunk)
        admission.most = most_tokens(c);
    if (c->running.count) {
        admission.reserve = c->reserve;
        admission.fits_target = c->fits_prompt;
    }
    int full = tree_open(&c->tree, job, &admission, now);
    if (full < 0)
        return -1;
    if (full) {
        c->blocked = job;
        return 1;
    }
    if (job->admitted < 0) {
        job->admitted = now;
        job->hit = job->computed;
    }
    job->stage = PREFILL;
    LIST_ADD(&c->prefilling, job, prefilling);
    if (heap_pop(c) < 0)
        return -1;
    LIST_REMOVE(&c->waiting, job, running);
    LIST_ADD(&c->running, job, running);
    return 0;
}

/* Divide the tokens of the next step among prompts: those that are computed, then waiting ones. */
static int admit(Core *c, i64 now)
{
    i64 count = 0;
    c->budget = c->max_tokens - (c->mixed ? c->batch.jobs.count : 0);
    for (Job *job = c->prefilling.first; job; job = job->prefilling.after) {
        if (GROW(c->ongoing, count, c->ongoing_room) < 0)
            return -1;
        c->ongoing[count++] = job;
    }
    for (i64 n = 0; n < count && c->budget > 0; n++)
        if (c->ongoing[n]->stage == PREFILL && allot(c, c->ongoing[n], now) < 0)
            return -1;
    while (c->budget > 0) {
        int stays = publish(c, now) < 0 ? -1 : admit_head(c, now);
        if (stays < 0)
            return -1;
        if (stays)
            break;
        if (allot(c, c->prefilling.last, now) < 0)
            return -1;
    }
    return publish(c, now);
}

static int divide(Core *c, i64 now)
{
    if ((c->mixed && next_step(c, now) < 0) || fill_output(c, now) < 0)
        return -1;
    int admits = c->changed && (c->prefilling.count || c->waiting.count);
    if ((admits ? admit(c, now) : publish(c, now)) < 0)
        return -1;
    return !c->mixed && !c->chunk_count ? next_step(c, now) : 0;
}

static void forget_victims(Core *c)
{
    for (Job *job = c->waiting.first; job && c->victims; job = job->running.after)
        if (job->is_victim) {
            job->is_victim = 0;
            c->victims--;
        }
    c->victims = 0;
}

/* Allocate blocks for the next step, and fill `chunks`. 1: something but growth has happened. */
int plan(Core *c, i64 now)
{
    int retry = 0;
    c->chunk_count = 0;
    if (divide(c, now) < 0)
        return -1;
    if (c->victims) {
        retry = !c->after_preemption;
        forget_victims(c);
        if (!c->running.count) {
            c->batch.allocated_until = c->batch.steps;
            c->changed = 1;
            if (divide(c, now) < 0)
                return -1;
            forget_victims(c);
        }
    }
    int changed = c->changed;
    c->changed = retry;
    if (!c->batch.jobs.count)
        c->batch.allocated_until = c->batch.steps;
    return changed;
}
