/* The twin of kvcore/serving/loop.py, batcher.py and stats.py, and the module `_core`.
 *
 * `serve` runs a `ServingLoop` that has not begun, if kvcore/serving/native.py has found it to be
 * plain. From the first request of a session on, Python says which request arrives next. Where a
 * request needs what the core lacks, such as a hint, the core stops before the plan that would
 * admit it, and returns all jobs as they are; the loop in Python goes on from there.
 */
#include "core.h"

enum { ROWS = 1 << 16, SAMPLES = 512, PATIENCE = 100, SHIFT = 32 };

#define NEVER INT64_MAX

/* The columns of a `RunLog` with numbers, by their types. */
#define COLUMNS(X)                                                                                \
    X(i64, arrival) X(i64, admitted) X(i64, first_token) X(i64, finish) X(i64, prompt)            \
    X(i64, output) X(i64, hit) X(i64, loaded) X(int, swaps) X(int, pauses) X(int, recomputes)     \
    X(signed char, verdict)

typedef struct {
    PyObject *ids, *tenants;   /* lists */
    i64 count, all;            /* rows here, and in the whole run */
#define COLUMN(type, name) type *name;
    COLUMNS(COLUMN)
#undef COLUMN
} Rows;

typedef struct { Job *job; i64 tokens; } Chunk;

typedef struct {
    i64 now, active, cached, due, interval, peak, count;
    i128 active_area, cached_area;
    i64 times[SAMPLES];
    int actives[SAMPLES], cacheds[SAMPLES];
} Timeline;

/* The time of steps with prefill: that of `Roofline.pieces`, or asked for step by step. */
typedef struct {
    PyObject *duration, *work_type;       /* of any latency model */
    PyObject *by_tokens;                  /* NULL: it has no such terms */
    i64 overhead, read, sequence, pair;
    i128 *known; i64 known_count;         /* by tokens; -1: not asked for yet */
} StepTime;

typedef struct {
    PyObject *loop, *cache, *log, *arrivals, *iterator, *priority, *lines_of;
    PyObject *slo;                        /* of requests without one; NULL: none */
    Tree tree;
    Batch batch;
    Rows rows;
    Timeline timeline;
    StepTime time;
    Times *lines; i64 lines_count;        /* of decode steps, by number of jobs; count 0: unknown */
    i64 max_tokens, max_seqs, reserve, longest;
    int mixed, after_preemption, last_of_ties;
    i128 clock, busy;
    i64 steps, serial, own_slos;
    /* Arrivals. */
    PyObject *next_request;               /* NULL: none, or they are with Python again */
    i64 next_at, came, last, first_number, next_number;
    i128 scale_above, scale_below;
    int in_python, has_named;
    int leaves;                           /* a request that came needs what the core lacks */
    /* Jobs. */
    Job **heap; i64 heap_room;            /* waiting ones by rank */
    List waiting, running, prefilling;    /* the waiting ones as they queued up */
    Chunk *chunks; i64 chunk_count, chunk_room;
    Job *blocked, **done; i64 done_count, done_room, victims, without_progress;
    i64 budget;
    int changed;
} Core;

static void free_job(Job *job)
{
    Py_XDECREF(job->request), Py_XDECREF(job->keys), Py_XDECREF(job->python);
    Py_XDECREF(job->rank), Py_XDECREF(job->verdict), Py_XDECREF(job->span), Py_XDECREF(job->token);
    PyMem_Free(job);
}

/* Rows of the log. */

static int flush_rows(Core *c)
{
    Rows *rows = &c->rows;
    PyObject *columns = PyDict_New();
    int failed = !columns || PyDict_SetItemString(columns, "ids", rows->ids) < 0
        || PyDict_SetItemString(columns, "tenants", rows->tenants) < 0;
#define COLUMN(type, name)                                                                        \
    if (!failed) {                                                                                \
        PyObject *cells = PyBytes_FromStringAndSize((char *)rows->name,                           \
                                                    rows->count * (i64)sizeof(type));             \
        failed = !cells || PyDict_SetItemString(columns, #name, cells) < 0;                       \
        Py_XDECREF(cells);                                                                        \
    }
    COLUMNS(COLUMN)
#undef COLUMN
    PyObject *done = failed ? NULL : PyObject_CallMethod(c->log, "extend", "O", columns);
    Py_XDECREF(columns), Py_XDECREF(done);
    rows->count = 0;
    return done && put(&rows->ids, PyList_New(0)) == 0 && put(&rows->tenants, PyList_New(0)) == 0
        ? 0 : -1;
}

/* Return the time (ns) of an SLO; -1: it has none. */
static i64 target_of(PyObject *slo, const char *name)
{
    PyObject *value = get(slo, name);
    i64 time = value && value != Py_None ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return time;
}

/* `_verdict` of stats.py: 1, it met its SLO; 0, it missed it; -1, none is possible. */
static int verdict_of(const Job *job, i64 now)
{
    if (!job->verdict)
        return -1;
    i64 ttft = target_of(job->verdict, "ttft_ns"), tpot = target_of(job->verdict, "tpot_ns");
    i64 deadline = target_of(job->verdict, "deadline_ns"), first = job->first_token;
    if (now < 0)
        return ttft < 0 && tpot < 0 && deadline < 0 ? -1 : 0;
    int verdict = -1;
    if (deadline >= 0)
        verdict = now - job->arrival <= deadline;
    if (first >= 0 && verdict != 0) {
        if (ttft >= 0)
            verdict = first - job->arrival <= ttft;
        if (tpot >= 0 && job->output > 1 && verdict != 0)
            verdict = now - first <= (i128)tpot * (job->output - 1);
    }
    return verdict;
}

/* `RunLog.ended`: a request finished at `now`, or was rejected (-1). */
static int log_ended(Core *c, Job *job, i64 now)
{
    Rows *rows = &c->rows;
    i64 row = rows->count;
    PyObject *id = FIELD(job->request, id), *tenant = FIELD(job->request, tenant);
    PyObject *slo = FIELD(job->request, slo);
    int failed = !id || !tenant || !slo || PyList_Append(rows->ids, id) < 0
        || PyList_Append(rows->tenants, tenant) < 0;
    c->own_slos += slo != Py_None;
    Py_XDECREF(id), Py_XDECREF(tenant), Py_XDECREF(slo);
    if (failed)
        return -1;
    rows->arrival[row] = job->arrival;
    rows->admitted[row] = job->admitted;
    rows->first_token[row] = job->first_token;
    rows->finish[row] = now;
    rows->prompt[row] = job->prompt;
    rows->output[row] = job->output;
    rows->hit[row] = job->hit;
    rows->loaded[row] = rows->swaps[row] = rows->pauses[row] = 0;
    rows->recomputes[row] = (int)job->recomputes;
    rows->verdict[row] = (signed char)verdict_of(job, now);
    rows->count++;
    rows->all++;
    if (PyErr_Occurred())
        return -1;
    return rows->count == ROWS ? flush_rows(c) : 0;
}

/* The use of the pool over time: `PoolTimeline`. */

static void record_plan(Core *c, i64 now)
{
    Timeline *line = &c->timeline;
    i64 held = now - line->now;
    line->active_area += (i128)held * line->active;
    line->cached_area += (i128)held * line->cached;
    line->now = now;
    line->cached = c->tree.unpinned;
    line->active = c->tree.pool - c->tree.free - line->cached;
    if (line->active > line->peak)
        line->peak = line->active;
    if (now < line->due)
        return;
    i64 at = line->count++;
    line->times[at] = now;
    line->actives[at] = (int)line->active;
    line->cacheds[at] = (int)line->cached;
    if (line->count == SAMPLES) {
        /* Every second one is dropped. */
        for (i64 n = 0; 2 * n < SAMPLES; n++) {
            line->times[n] = line->times[2 * n];
            line->actives[n] = line->actives[2 * n];
            line->cacheds[n] = line->cacheds[2 * n];
        }
        line->count = SAMPLES / 2;
        i64 wide = (line->times[line->count - 1] - line->times[0]) / (SAMPLES / 2);
        line->interval = 2 * line->interval > wide ? 2 * line->interval : wide;
    }
    line->due = now + line->interval;
}

/* Write the use of the pool into the `PoolTimeline` of the log. */
static int store_timeline(Core *c)
{
    Timeline *line = &c->timeline;
    PyObject *timeline = get(c->log, "pool"), *done = NULL;
    if (timeline)
        done = PyObject_CallMethod(timeline, "restore", "(LLLLLL)NNy#y#y#",
            line->now, line->active, line->cached, line->due, line->interval, line->peak,
            big_int(line->active_area), big_int(line->cached_area),
            (char *)line->times, line->count * (i64)sizeof *line->times,
            (char *)line->actives, line->count * (i64)sizeof *line->actives,
            (char *)line->cacheds, line->count * (i64)sizeof *line->cacheds);
    Py_XDECREF(timeline), Py_XDECREF(done);
    return done ? 0 : -1;
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
    PyObject *done = batcher ? PyObject_CallMethod(batcher, "refuse_order", "O", error) : NULL;
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

/* Return the fields of a job, from which Python makes one of its own. */
static PyObject *job_state(Job *job)
{
    PyObject *none = Py_None;
    return Py_BuildValue(
        "{sO sO sO sO sO sO sO sL sL sL sL sL sL sL sL sL sN sL sL sL si si sL sL sL sL sL sL sL}",
        "request", job->request, "job", job->python ? job->python : none,
        "rank", job->rank ? job->rank : none, "slo", job->verdict ? job->verdict : none,
        "keys", job->keys ? job->keys : none, "span", job->span ? job->span : none,
        "token", job->token ? job->token : none,
        "serial", job->serial, "arrival", job->arrival, "output_tokens", job->output,
        "target", job->target, "computed", job->computed, "hit", job->hit,
        "hit_blocks", job->hit_blocks,
        "admitted", job->admitted, "first_token", job->first_token,
        "last_token_ps", big_int(job->last_token_ps), "generated_before", job->generated_before,
        "joined", job->joined, "recomputes", job->recomputes, "stage", job->stage,
        "is_fresh", job->is_fresh, "admission", job->admission, "cacheable", job->cacheable,
        "lookup_blocks", job->cacheable, "blocks", job->blocks, "tokens", job->tokens,
        "end", job->end, "residue", job->residue);
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

static int queue(Core *c, Job *job, i64 now, int front)
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

/* Arrivals. */

static PyObject *no_hints;

/* Whether the core serves a request; if it is `timed`, none of a session. */
int is_plain(PyObject *request, int timed)
{
    if (Py_TYPE(request) != request_slots.type)
        return 0;
#define IS(name, value) (*slot(request, request_slots.name) == (value))
    PyObject *retention = *slot(request, request_slots.retention);
    PyObject *output_keys = *slot(request, request_slots.output_keys);
    return (!timed || (IS(after, Py_None) && IS(session, Py_None))) && IS(hints, no_hints)
        && retention && PyTuple_CheckExact(retention) && !PyTuple_GET_SIZE(retention)
        && output_keys && PyTuple_CheckExact(output_keys) && !PyTuple_GET_SIZE(output_keys);
#undef IS
}

/* Give the arrivals back to Python, with the request that was read last; at -1 it is not counted. */
static int give_back_arrivals(Core *c, PyObject *request, i64 at)
{
    PyObject *given = PyObject_CallMethod(c->arrivals, "resume", "OLLLLL",
        request ? request : Py_None, at, c->came, c->last, c->first_number, c->next_number);
    Py_XDECREF(given);
    c->in_python = 1;
    Py_CLEAR(c->next_request);
    return given ? 0 : -1;
}

/* The next time of arrival, from Python. */
static int ask_next(Core *c)
{
    PyObject *next = get(c->arrivals, "next_at");
    int overflow = 0;
    c->next_at = next ? PyLong_AsLongLongAndOverflow(next, &overflow) : -1;
    if (overflow)
        c->next_at = NEVER;
    Py_XDECREF(next);
    return PyErr_Occurred() ? -1 : 0;
}

/* Read the next request, as `Arrivals._read` does; one that is not plain goes back to Python. */
static int read_next(Core *c)
{
    c->next_at = NEVER;
    Py_CLEAR(c->next_request);
    PyObject *request = PyIter_Next(c->iterator);
    if (!request)
        return PyErr_Occurred() ? -1 : 0;
    i64 at = -1;
    PyObject *id = NULL;
    int plain = is_plain(request, 1);
    if (plain) {
        at = INT_FIELD(request, arrival);
        id = FIELD(request, id);
        if (PyErr_Occurred())
            PyErr_Clear(); /* Python says what is wrong */
        plain = id && at >= c->last && at >= 0;
    }
    if (plain) {
        i128 scaled = at * c->scale_below / c->scale_above;
        i64 number = PyLong_CheckExact(id) ? PyLong_AsLongLong(id) : -1;
        PyErr_Clear();
        plain = scaled < NEVER && !c->has_named && number >= 0 && number < NEVER
            && (number == c->next_number || !c->came);
        if (plain) {
            if (!c->came)
                c->first_number = number;
            c->next_number = number + 1;
        } else if (scaled < NEVER && (c->came || !PyLong_Check(id))) {
            /* A name, or a number out of order. */
            PyObject *noted = PyObject_CallMethod(c->arrivals, "note", "OLL", id, c->first_number,
                                                  c->next_number);
            if (!noted) {
                Py_DECREF(id), Py_DECREF(request);
                return -1;
            }
            c->next_number = PyLong_AsLongLong(noted);
            c->has_named = 1;
            Py_DECREF(noted);
            plain = 1;
        }
        if (plain) {
            c->came++;
            c->last = at;
            c->next_at = (i64)scaled;
            c->next_request = Py_NewRef(request);
        }
    }
    Py_XDECREF(id);
    int failed = plain ? 0 : give_back_arrivals(c, request, -1) < 0 || ask_next(c) < 0;
    Py_DECREF(request);
    return failed ? -1 : 0;
}

static int reject(Core *c, Job *job, PyObject *why, i64 now)
{
    PyObject *reasons = get(c->log, "reasons");
    PyObject *row = PyLong_FromLongLong(c->rows.all);
    int failed = !reasons || !row || PyObject_SetItem(reasons, row, why) < 0
        || log_ended(c, job, -1) < 0;
    Py_XDECREF(reasons), Py_XDECREF(row);
    if (!failed && c->in_python) {
        PyObject *done = PyObject_CallMethod(c->arrivals, "ended", "OL", job->request, now);
        Py_XDECREF(done);
        failed = !done || ask_next(c) < 0;
    }
    free_job(job);
    return failed ? -1 : 0;
}

/* Queue a request that arrives at `now`, or reject it. */
static int arrive(Core *c, PyObject *request, i64 now)
{
    Job *job = PyMem_Calloc(1, sizeof *job);
    if (!job) {
        PyErr_NoMemory();
        return -1;
    }
    job->request = Py_NewRef(request);
    job->serial = ++c->serial;
    job->arrival = now;
    job->prompt = job->target = INT_FIELD(request, prompt_tokens);
    job->output = INT_FIELD(request, output_tokens);
    job->admitted = job->first_token = job->joined = -1;
    c->leaves |= !is_plain(request, 0);
    PyObject *slo = FIELD(request, slo), *why = NULL;
    if (slo && slo != Py_None)
        job->verdict = Py_NewRef(slo);
    else
        job->verdict = Py_XNewRef(c->slo);
    Py_XDECREF(slo);
    int bounded = c->longest >= 0 && job->output > c->longest - job->prompt;
    if (bounded)
        job->output = c->longest > job->prompt ? c->longest - job->prompt : 0;
    i128 length = (i128)job->prompt + (job->output > 1 ? job->output - 1 : 0);
    if (!PyErr_Occurred()
        && (!job->prompt || bounded || length > (i128)c->tree.pool * c->tree.size))
        why = PyObject_CallMethod(c->loop, "_unfit", "O", request);
    if (PyErr_Occurred()) {
        free_job(job);
        return -1;
    }
    if (why && PyUnicode_Check(why) && PyUnicode_GET_LENGTH(why)) {
        int failed = reject(c, job, why, now);
        Py_DECREF(why);
        return failed;
    }
    Py_XDECREF(why);
    if (queue(c, job, now, 0) < 0) {
        free_job(job);
        return -1;
    }
    return 0;
}

static int take_arrivals(Core *c, i64 now)
{
    while (c->next_at <= now) {
        PyObject *request = NULL;
        i64 at = c->next_at;
        if (c->in_python) {
            PyObject *taken = PyObject_CallMethod(c->arrivals, "take", NULL);
            int sound = taken && PyArg_ParseTuple(taken, "LO", &at, &request);
            Py_XINCREF(request);
            Py_XDECREF(taken);
            if (!sound || ask_next(c) < 0) {
                Py_XDECREF(request);
                return -1;
            }
        } else {
            request = Py_NewRef(c->next_request);
            if (read_next(c) < 0) {
                Py_DECREF(request);
                return -1;
            }
        }
        int failed = arrive(c, request, at);
        Py_DECREF(request);
        if (failed)
            return -1;
    }
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

/* Free all blocks of the running job that is last in order, which computes them again later. */
static int preempt(Core *c, i64 now)
{
    Job *job = choose_victim(c, now);
    if (!job) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "no running job has blocks");
        return -1;
    }
    Batch *batch = &c->batch;
    if (job->stage == DECODE) {
        c->budget += c->mixed;
        batch_remove(batch, job);
        i64 tokens = length_of(batch, job) + (batch->allocated_until > batch->steps);
        job->tokens = tokens;
        job->blocks = ceil_div(tokens, batch->block_size);
    } else {
        i64 kept = 0;
        for (i64 n = 0; n < c->chunk_count; n++) {
            if (c->chunks[n].job == job)
                c->budget += c->chunks[n].tokens;
            else
                c->chunks[kept++] = c->chunks[n];
        }
        c->chunk_count = kept;
        LIST_REMOVE(&c->prefilling, job, prefilling);
    }
    LIST_REMOVE(&c->running, job, running);
    i64 jobs = c->running.count + c->waiting.count;
    if (++c->without_progress > PATIENCE + 10 * jobs) {
        PyObject *batcher = get(c->loop, "batcher");
        PyObject *id = FIELD(job->request, id), *done = NULL;
        if (batcher && id)
            done = PyObject_CallMethod(batcher, "livelock", "LLOLL", now, c->without_progress, id,
                                       jobs, c->tree.free);
        Py_XDECREF(batcher), Py_XDECREF(id);
        if (done)
            PyErr_SetObject((PyObject *)Py_TYPE(done), done);
        Py_XDECREF(done);
        free_job(job);
        return -1;
    }
    job->recomputes++;
    if (tree_close(&c->tree, job, now, 0) < 0) {
        free_job(job);
        return -1;
    }
    job->stage = WAITING;
    job->target = job->prompt + generated_of(batch, job);
    job->computed = 0;
    if (queue(c, job, now, 1) < 0) {
        free_job(job);
        return -1;
    }
    c->blocked = NULL;
    job->is_victim = 1;
    c->victims++;
    return 0;
}

/* Allocate for the next decode step; preempt until there is room. */
static int next_step(Core *c, i64 now)
{
    int full;
    while ((full = batch_next_step(&c->batch, now)) == 1)
        if (preempt(c, now) < 0)
            return -1;
    return full;
}

static int add_chunk(Core *c, Job *job)
{
    i64 tokens = job->target - job->computed;
    if (GROW(c->chunks, c->chunk_count, c->chunk_room) < 0)
        return -1;
    if (tokens > c->budget)
        tokens = c->budget;
    c->chunks[c->chunk_count++] = (Chunk){job, tokens};
    c->budget -= tokens;
    return 0;
}

/* Admit the first job that waits, if there is a slot and room. 1: it does not run. */
static int admit_head(Core *c, i64 now)
{
    if (!c->waiting.count || (!c->after_preemption && c->victims))
        return 1;
    Job *job = c->heap[0];
    if (job == c->blocked || job->is_victim || c->running.count >= c->max_seqs)
        return 1;
    int full = tree_open(&c->tree, job, c->running.count ? c->reserve : 0, now);
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
    i64 ongoing = c->prefilling.count;
    c->budget = c->max_tokens - (c->mixed ? c->batch.jobs.count : 0);
    for (Job *job = c->prefilling.first; ongoing && c->budget > 0; ongoing--) {
        if (add_chunk(c, job) < 0)
            return -1;
        job = job->prefilling.after;
    }
    while (c->budget > 0) {
        int stays = admit_head(c, now);
        if (stays)
            return stays < 0 ? -1 : 0;
        if (add_chunk(c, c->prefilling.last) < 0)
            return -1;
    }
    return 0;
}

static int divide(Core *c, i64 now)
{
    if (c->mixed && next_step(c, now) < 0)
        return -1;
    if (c->changed && (c->prefilling.count || c->waiting.count) && admit(c, now) < 0)
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
static int plan(Core *c, i64 now)
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

/* The loop. */

/* Ask for the term of a number of tokens, unless it has too many digits for the core. */
static int ask_time(StepTime *time, i64 tokens)
{
    PyObject *fine = PyObject_CallFunction(time->by_tokens, "L", tokens);
    PyObject *high = fine ? PyObject_CallMethod(fine, "__rshift__", "i", 60) : NULL;
    PyObject *mask = PyLong_FromLongLong((1LL << 60) - 1);
    PyObject *low = high && mask ? PyNumber_And(fine, mask) : NULL;
    int overflow = 0;
    i64 above = low ? PyLong_AsLongLongAndOverflow(high, &overflow) : -1;
    if (overflow || above >= 1LL << 60)
        Py_CLEAR(time->by_tokens);
    else if (low)
        time->known[tokens] = ((i128)above << 60) | PyLong_AsLongLong(low);
    Py_XDECREF(fine), Py_XDECREF(high), Py_XDECREF(mask), Py_XDECREF(low);
    return PyErr_Occurred() ? -1 : 0;
}

/* Refuse steps that take `took`, an integer of Python, up to 2^63 ps or longer; return -1. */
static int refuse_time(Core *c, i64 steps, PyObject *took)
{
    PyObject *clock = big_int(c->clock), *thousand = PyLong_FromLong(1000), *done = NULL;
    PyObject *end = clock && took ? PyNumber_Add(clock, took) : NULL;
    if (end && thousand)
        Py_SETREF(end, PyNumber_FloorDivide(end, thousand));
    if (end)
        done = PyObject_CallMethod(c->loop, "_refuse_time", "LOO", steps, took, end);
    Py_XDECREF(clock), Py_XDECREF(thousand), Py_XDECREF(end), Py_XDECREF(done);
    return -1;
}

/* Return the picoseconds of the step that is planned; -1 with an exception. */
static i128 duration_of(Core *c)
{
    StepTime *time = &c->time;
    i64 tokens = 0, decode = c->mixed ? c->batch.jobs.count : 0;
    i64 context = decode ? c->batch.context : 0;
    i128 doubled = 0;
    for (i64 n = 0; n < c->chunk_count; n++) {
        Chunk chunk = c->chunks[n];
        tokens += chunk.tokens;
        /* n tokens after a context of c attend to c + 1, ..., c + n tokens. */
        doubled += (i128)chunk.tokens * (2 * chunk.job->computed + chunk.tokens + 1);
    }
    i64 all = tokens + decode;
    if (time->by_tokens && all < time->known_count && doubled / 2 < NEVER) {
        if (time->known[all] < 0 && ask_time(time, all) < 0)
            return -1;
        i128 fine = time->known[all] + (i128)time->sequence * decode + time->pair * (doubled / 2);
        if (time->by_tokens)
            return time->overhead + (fine >> SHIFT) + (i128)time->read * context;
    }
    PyObject *pairs = big_int(doubled / 2), *took = NULL;
    PyObject *work = pairs ? PyObject_CallFunction(time->work_type, "L(N)L(L)", tokens, pairs,
                                                   decode, context) : NULL;
    if (work)
        took = PyObject_CallOneArg(time->duration, work);
    Py_XDECREF(work);
    if (!took)
        return -1;
    int overflow;
    i64 result = PyLong_AsLongLongAndOverflow(took, &overflow);
    if (overflow)
        result = refuse_time(c, 1, took);
    Py_DECREF(took);
    return result;
}

/* Return the lines of decode steps of the batch; NULL with an exception. */
static const Times *lines_of(Core *c)
{
    i64 size = c->batch.jobs.count;
    while (size >= c->lines_count) {
        i64 before = c->lines_count;
        if (grow_items((void **)&c->lines, &c->lines_count, sizeof *c->lines) < 0)
            return NULL;
        memset(c->lines + before, 0, sizeof(Times) * (c->lines_count - before));
    }
    Times *times = &c->lines[size];
    if (times->count)
        return times;
    PyObject *pieces = PyObject_CallFunction(c->lines_of, "L", size);
    PyObject *fast = pieces ? PySequence_Fast(pieces, "lines are a sequence") : NULL;
    i64 count = fast ? PySequence_Fast_GET_SIZE(fast) : 0;
    if (fast && (count < 1 || count > MOST_LINES))
        PyErr_Format(PyExc_ValueError, "%lld lines of decode steps; the core takes 1 to %d", count,
                     MOST_LINES);
    for (i64 n = 0; n < count && !PyErr_Occurred(); n++) {
        i64 first, slope;
        PyObject *line = PySequence_Fast_GET_ITEM(fast, n);
        if (PyArg_ParseTuple(line, "LL", &first, &slope)) {
            times->lines[n] = (Line){first, slope};
        } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            refuse_time(c, 1, PyTuple_GET_ITEM(line, 0));
        }
    }
    Py_XDECREF(fast), Py_XDECREF(pieces);
    if (PyErr_Occurred())
        return NULL;
    times->count = (int)count;
    return times;
}

/* Advance the clock by steps that have run; requests that came meanwhile are queued. */
static int pass(Core *c, i64 steps, i128 took, i64 *now)
{
    c->clock += took;
    c->steps += steps;
    c->busy += took;
    *now = (i64)(c->clock / 1000);
    if (c->clock > NEVER && (took > NEVER || c->clock / 1000 > NEVER)) {
        PyObject *picoseconds = big_int(took);
        c->clock -= took;
        refuse_time(c, steps, picoseconds);
        Py_XDECREF(picoseconds);
        return -1;
    }
    return c->next_at <= *now ? take_arrivals(c, *now) : 0;
}

static int add_done(Core *c, Job *job)
{
    if (GROW(c->done, c->done_count, c->done_room) < 0)
        return -1;
    i64 at = c->done_count++; /* in order of admission */
    for (; at && c->done[at - 1]->admission > job->admission; at--)
        c->done[at] = c->done[at - 1];
    c->done[at] = job;
    return 0;
}

/* Finish the jobs that have all their tokens. */
static int finish(Core *c, i64 now)
{
    for (Job *job; c->batch.ends_count && (job = batch_pop_finished(&c->batch));)
        if (add_done(c, job) < 0)
            return -1;
    i64 count = c->done_count;
    c->done_count = 0;
    for (i64 n = 0; n < count; n++) {
        Job *job = c->done[n];
        if (job->stage == DECODE)
            job->blocks = ceil_div(job->prompt + job->output - 1, c->batch.block_size);
        LIST_REMOVE(&c->running, job, running);
        c->blocked = NULL;
        c->changed = 1;
        int failed = tree_close(&c->tree, job, now, 1) < 0 || log_ended(c, job, now) < 0;
        if (!failed && c->in_python) {
            PyObject *done = PyObject_CallMethod(c->arrivals, "ended", "OL", job->request, now);
            Py_XDECREF(done);
            failed = !done || ask_next(c) < 0;
        }
        free_job(job);
        if (failed)
            return -1;
    }
    return 0;
}

/* Record the next token of a job whose prompt is computed; add it to the batch, or to `done`. */
static int prefill_done(Core *c, Job *job, i64 now)
{
    if (!job->output)
        return add_done(c, job);
    if (job->first_token < 0)
        job->first_token = now;
    else
        histogram_add(&c->batch.gaps, c->clock - job->last_token_ps, 0, 1, 1);
    job->last_token_ps = c->clock;
    i64 generated = job->target - job->prompt + 1;
    if (generated == job->output) {
        job->generated_before = generated;
        return add_done(c, job);
    }
    job->stage = DECODE;
    return batch_add(&c->batch, job, generated);
}

static int prefill_step(Core *c)
{
    i64 now, decoding = c->mixed ? c->batch.jobs.count : 0;
    int progress = decoding > 0;
    i128 took = duration_of(c);
    if (took < 0)
        return -1;
    if (decoding)
        batch_run(&c->batch, c->clock, took, 0, 1);
    if (pass(c, 1, took, &now) < 0)
        return -1;
    for (i64 n = 0; n < c->chunk_count; n++) {
        Job *job = c->chunks[n].job;
        job->computed += c->chunks[n].tokens;
        if (tree_commit(&c->tree, job, now) < 0)
            return -1;
    }
    c->blocked = NULL;
    c->changed = 1;
    for (i64 n = 0; n < c->chunk_count; n++) {
        Job *job = c->chunks[n].job;
        if (job->computed < job->target)
            continue;
        progress = 1;
        LIST_REMOVE(&c->prefilling, job, prefilling);
        if (prefill_done(c, job, now) < 0)
            return -1;
    }
    if (progress)
        c->without_progress = 0;
    return finish(c, now);
}

static int decode_steps(Core *c)
{
    const Times *lines = lines_of(c);
    i64 steps, now;
    i128 took;
    if (!lines
        || batch_jump(&c->batch, lines, c->clock, c->changed ? 0 : c->next_at, &steps, &took) < 0
        || pass(c, steps, took, &now) < 0)
        return -1;
    c->without_progress = 0;
    return finish(c, now);
}

/* Run turn after turn. 1: Python goes on; 0: all requests have been served. */
static int run(Core *c, i64 turns)
{
    for (;; turns--) {
        i64 now = (i64)(c->clock / 1000);
        if (PyErr_CheckSignals() < 0 || (c->next_at <= now && take_arrivals(c, now) < 0))
            return -1;
        if (c->leaves || !turns)
            return 1;
        int changed = plan(c, now);
        if (changed < 0)
            return -1;
        if (changed)
            record_plan(c, now);
        if (c->chunk_count) {
            if (prefill_step(c) < 0)
                return -1;
        } else if (c->batch.jobs.count) {
            if (decode_steps(c) < 0)
                return -1;
        } else if (c->next_at < NEVER) {
            i128 wake = (i128)c->next_at * 1000;
            if (wake > c->clock)
                c->clock = wake;
        } else {
            return c->waiting.count > 0;
        }
        if (PyErr_Occurred())
            return -1;
    }
}

/* From Python, and back. */

#define STATES(list, link)                                                                        \
    PyObject *list = PyList_New(0);                                                               \
    for (Job *job = c->list.first; list && job; job = job->link.after) {                          \
        PyObject *state = job_state(job);                                                         \
        if (!state || PyList_Append(list, state) < 0)                                             \
            Py_CLEAR(list);                                                                       \
        Py_XDECREF(state);                                                                        \
    }

/* The serial numbers of the jobs of a list, in its order. */
#define SERIALS(name, list, link)                                                                 \
    PyObject *name = PyList_New(0);                                                               \
    for (Job *job = (list).first; name && job; job = job->link.after) {                           \
        PyObject *serial = PyLong_FromLongLong(job->serial);                                      \
        if (!serial || PyList_Append(name, serial) < 0)                                           \
            Py_CLEAR(name);                                                                       \
        Py_XDECREF(serial);                                                                       \
    }

/* Return the state of a run that Python continues. */
static PyObject *handover(Core *c)
{
    if (!c->in_python && give_back_arrivals(c, c->next_request, c->next_at) < 0)
        return NULL;
    STATES(waiting, running)
    STATES(running, running)
    SERIALS(prefilling, c->prefilling, prefilling)
    SERIALS(batch, c->batch.jobs, batch)
    if (waiting && running && prefilling && batch)
        return Py_BuildValue("{sN sN sN sN sL sN sL sL sL si}", "waiting", waiting, "running",
            running, "prefilling", prefilling, "batch", batch, "context", c->batch.context,
            "last_step_ps", big_int(c->batch.last_step_ps), "allocated_until",
            c->batch.allocated_until, "blocked", c->blocked ? c->blocked->serial : 0,
            "without_progress", c->without_progress, "changed", c->changed);
    Py_XDECREF(waiting), Py_XDECREF(running), Py_XDECREF(prefilling), Py_XDECREF(batch);
    return NULL;
}

static int store_back(Core *c)
{
    PyObject *steps = get(c->loop, "steps");
    PyObject *clock = big_int(c->clock), *busy = big_int(c->busy);
    PyObject *itl = get(c->log, "itl");
    int failed = !steps || !clock || !busy || !itl || flush_rows(c) < 0
        || store_timeline(c) < 0 || histogram_store(&c->batch.gaps, itl, "_histogram") < 0
        || tree_store_back(&c->tree, c->cache) < 0
        || set_int(steps, "count", c->batch.steps) < 0
        || set_int(c->loop, "_serial", c->serial) < 0
        || set_int(c->log, "steps", c->steps) < 0
        || set_int(c->log, "own_slos", c->own_slos) < 0
        || PyObject_SetAttrString(c->loop, "clock_ps", clock) < 0
        || PyObject_SetAttrString(c->log, "busy_ps", busy) < 0;
    Py_XDECREF(steps), Py_XDECREF(clock), Py_XDECREF(busy), Py_XDECREF(itl);
    return failed ? -1 : 0;
}

static int init_time(Core *c, PyObject *terms)
{
    StepTime *time = &c->time;
    if (terms == Py_None)
        return 0;
    if (!PyArg_ParseTuple(terms, "LOLLL", &time->overhead, &time->by_tokens, &time->sequence,
                          &time->pair, &time->read))
        return -1;
    Py_INCREF(time->by_tokens);
    time->known_count = 1 << 15;
    time->known = PyMem_New(i128, time->known_count);
    if (!time->known) {
        PyErr_NoMemory();
        return -1;
    }
    for (i64 n = 0; n < time->known_count; n++)
        time->known[n] = -1;
    return 0;
}

static int init(Core *c, PyObject *numbers, PyObject *terms, int walks)
{
    i64 above, below;
    if (!PyArg_ParseTuple(numbers, "LLLLiiiLL", &c->max_tokens, &c->max_seqs, &c->reserve,
                          &c->longest, &c->mixed, &c->after_preemption, &c->last_of_ties, &above,
                          &below))
        return -1;
    c->scale_above = above;
    c->scale_below = below;
    c->changed = 1;
    c->log = get(c->loop, "log");
    c->cache = get(c->loop, "_cache");
    c->arrivals = get(c->loop, "arrivals");
    c->slo = c->log ? get(c->log, "slo") : NULL;
    if (c->slo == Py_None)
        Py_CLEAR(c->slo);
    c->rows.ids = PyList_New(0);
    c->rows.tenants = PyList_New(0);
    int short_of_memory = 0;
#define COLUMN(type, name) short_of_memory |= !(c->rows.name = PyMem_New(type, ROWS));
    COLUMNS(COLUMN)
#undef COLUMN
    if (short_of_memory)
        PyErr_NoMemory();
    if (PyErr_Occurred())
        return -1;
    if (tree_init(&c->tree, c->cache, walks) < 0 || batch_init(&c->batch, &c->tree) < 0
        || init_time(c, terms) < 0)
        return -1;
    c->in_python = c->iterator == Py_None;
    return c->in_python ? ask_next(c) : read_next(c);
}

static void free_jobs(List *list)
{
    for (Job *job = list->first, *after; job; job = after) {
        after = job->running.after;
        free_job(job);
    }
}

static void clear(Core *c)
{
    free_jobs(&c->waiting);
    free_jobs(&c->running);
    tree_clear(&c->tree);
    batch_clear(&c->batch);
    Py_XDECREF(c->log), Py_XDECREF(c->cache), Py_XDECREF(c->arrivals), Py_XDECREF(c->slo);
    Py_XDECREF(c->next_request);
    Py_XDECREF(c->rows.ids), Py_XDECREF(c->rows.tenants), Py_XDECREF(c->time.by_tokens);
    PyMem_Free(c->time.known), PyMem_Free(c->lines), PyMem_Free(c->heap);
    PyMem_Free(c->chunks), PyMem_Free(c->done);
#define COLUMN(type, name) PyMem_Free(c->rows.name);
    COLUMNS(COLUMN)
#undef COLUMN
}

PyDoc_STRVAR(serve_doc,
"serve(loop, requests, numbers, priority, lines, duration, work, terms, walks, turns)\n"
"--\n\n"
"Run a serving loop; return None, or the state of a run that Python continues.");

static PyObject *serve(PyObject *module, PyObject *arguments)
{
    PyObject *numbers, *terms, *result = NULL;
    int walks;
    i64 turns;
    Core core = {0}, *c = &core;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOO!OOOOOiL", &c->loop, &c->iterator, &PyTuple_Type,
                          &numbers, &c->priority, &c->lines_of, &c->time.duration,
                          &c->time.work_type, &terms, &walks, &turns))
        return NULL;
    if (c->priority == Py_None)
        c->priority = NULL;
    int status = init(c, numbers, terms, walks);
    if (!status)
        status = run(c, turns);
    if (status >= 0 && store_back(c) == 0)
        result = status ? handover(c) : Py_NewRef(Py_None);
    clear(c);
    return result;
}

/* Find the slots of a class; they are members of it, whatever its version of Python. */
static int find_slot(PyTypeObject *type, const char *name, Py_ssize_t *offset)
{
    PyObject *member = get((PyObject *)type, name);
    if (!member)
        return -1;
    int found = Py_TYPE(member) == &PyMemberDescr_Type;
    if (found)
        *offset = ((PyMemberDescrObject *)member)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s.%s is no slot", type->tp_name, name);
    Py_DECREF(member);
    return found ? 0 : -1;
}

PyDoc_STRVAR(bind_doc,
"bind(span, request, hints, borders)\n--\n\n"
"Use these classes, whose slots are read and written in place, the hints of a request without any,\n"
"and the borders of buckets of a histogram.");


static PyObject *bind(PyObject *module, PyObject *arguments)
{
    PyObject *hints, *borders;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!O!OO!", &PyType_Type, &span_slots.type, &PyType_Type,
                          &request_slots.type, &hints, &PyList_Type, &borders)
        || histogram_borders(borders) < 0)
        return NULL;
    put(&no_hints, Py_NewRef(hints));
#define FIND(name) || find_slot(slots->type, #name, &slots->name) < 0
    {
        SpanSlots *slots = &span_slots;
        if (0 SPAN_SLOTS(FIND))
            return NULL;
    }
    {
        RequestSlots *slots = &request_slots;
        if (0 REQUEST_SLOTS(FIND))
            return NULL;
    }
    Py_INCREF(span_slots.type), Py_INCREF(request_slots.type);
    Py_RETURN_NONE;
}

#undef FIND

PyDoc_STRVAR(replay_doc,
"replay(cache, requests, walks, keeps)\n--\n\n"
"Open, commit and close requests in a new cache; return the hits of each as bytes of integers, if\n"
"they are kept, and the first request that is left to Python, or None.");

static PyMethodDef methods[] = {
    {"serve", serve, METH_VARARGS, serve_doc},
    {"replay", untimed_replay, METH_VARARGS, replay_doc},
    {"bind", bind, METH_VARARGS, bind_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_core",
    .m_doc = "The serving loop and the tree of spans, in C.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__core(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddStringConstant(module, "SOURCE", KVCORE_SOURCE) < 0)
        Py_CLEAR(module);
    return module;
}
