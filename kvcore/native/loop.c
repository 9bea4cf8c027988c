/* The twin of kvcore/serving/loop.py: the clock, and what a step brings about. */
#include "core.h"

enum { SHIFT = 32 };

/* Ask for the term of a number of tokens, unless it has too many digits for the core. */
static int ask_time(StepTime *time, i64 tokens)
{
    PyObject *fine = PyObject_CallFunction(time->by_tokens, "L", tokens);
    int overflow = 0;
    i128 term = fine ? read_int(fine, &overflow) : -1;
    Py_XDECREF(fine);
    if (PyErr_Occurred())
        return -1;
    if (overflow || term >> 120)
        Py_CLEAR(time->by_tokens);
    else
        time->known[tokens] = term;
    return 0;
}

/* Raise the error of steps that take `took`, an integer of Python, and end too late. */
static void refuse_time(Core *c, i64 steps, PyObject *took)
{
    PyObject *clock = big_int(c->clock), *done = NULL;
    PyObject *end = clock && took ? PyNumber_Add(clock, took) : NULL;
    if (end)
        done = PyObject_CallMethod(c->loop, "_refuse_time", "LOO", steps, took, end);
    Py_XDECREF(clock), Py_XDECREF(end), Py_XDECREF(done);
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
    i64 result = PyLong_AsLongLongAndOverflow(took, &overflow); /* -1 on overflow, too */
    if (overflow)
        refuse_time(c, 1, took);
    Py_DECREF(took);
    return result;
}

/* Return the lines of decode steps of the batch. NULL: an exception; or they have too many digits
 * for the core, and Python runs the step. */
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
    c->leaves |= count > MOST_LINES;
    for (i64 n = 0; n < count && !c->leaves && !PyErr_Occurred(); n++) {
        i64 first, slope;
        PyObject *line = PySequence_Fast_GET_ITEM(fast, n);
        if (PyArg_ParseTuple(line, "LL", &first, &slope)) {
            times->lines[n] = (Line){first, slope};
        } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            c->leaves = 1;
        }
    }
    Py_XDECREF(fast), Py_XDECREF(pieces);
    if (c->leaves || PyErr_Occurred())
        return NULL;
    times->count = (int)count;
    return times;
}

/* Advance the clock by steps that have run; queue what came. */
static int pass(Core *c, i64 steps, i128 took, i64 *now)
{
    c->stepped = 1;
    c->began = c->clock; /* of a jump: nothing has come before its last step */
    c->clock += took;
    c->steps += steps;
    c->busy += took;
    *now = (i64)(c->clock / 1000);
    if (took > NEVER || c->clock / 1000 > NEVER) {
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

/* End a job that has all its tokens; under a lag the plan of the next step does not see it. */
static int end_job(Core *c, Job *job, i64 now)
{
    if (!c->has_lag) {
        int failed = finish_job(c, job, now, 1) < 0 || log_ended(c, job, now) < 0
            || schedule_followers(c, job, now) < 0;
        if (job->has_left)
            free_job(job);
        return failed ? -1 : 0;
    }
    if (job->stage == DECODE)
        settle(&c->batch, job, job->prompt + job->output - 1);
    job->stage = DONE;
    if (GROW(c->late, c->late_count, c->late_room) < 0)
        return -1;
    c->late[c->late_count++] = job;
    return log_ended(c, job, now);
}

/* End the jobs that have all their tokens. */
static int finish(Core *c, i64 now)
{
    for (Job *job; c->batch.ends_count && (job = batch_pop_finished(&c->batch));)
        if (add_done(c, job) < 0)
            return -1;
    i64 count = c->done_count;
    c->done_count = 0;
    for (i64 n = 0; n < count; n++)
        if (end_job(c, c->done[n], now) < 0)
            return -1;
    return 0;
}

/* Finish the jobs that the last step has ended, after the plan of the next. 1: there was a step. */
static int catch_up(Core *c, i64 now)
{
    i64 count = c->late_count;
    int stepped = c->stepped;
    c->stepped = 0;
    for (i64 n = 0; n < c->filled_count; n++) {
        Filled filled = c->filled[n];
        Job *job = filled.job;
        if (!job->span || job->admission != filled.admission)
            continue;
        if (job->tokens < filled.length)
            settle(&c->batch, job, filled.length);
        if (tree_commit(&c->tree, job, filled.length - job->committed, now) < 0)
            return -1;
        computed(c);
    }
    c->filled_count = 0;
    for (i64 n = 0; n < count; n++) {
        Job *job = c->late[n];
        if ((!job->has_left && finish_job(c, job, now, 1) < 0)
            || schedule_followers(c, job, now) < 0)
            return -1;
    }
    for (i64 n = 0; n < count; n++)
        free_job(c->late[n]);
    c->late_count = 0;
    if (count)
        record_plan(c, now);
    return stepped || count;
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

/* Under a lag, note the blocks that the step has filled, to be committed after the next plan. */
static int note_filled(Core *c)
{
    i64 count;
    Job **jobs = c->has_lag ? batch_committers(&c->batch, &count) : NULL;
    for (i64 n = 0; jobs && n < count; n++) {
        if (GROW(c->filled, c->filled_count, c->filled_room) < 0)
            return -1;
        c->filled[c->filled_count++] = (Filled){
            jobs[n], jobs[n]->admission, length_of(&c->batch, jobs[n])};
    }
    return 0;
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
        if (tree_commit(&c->tree, job, c->chunks[n].tokens, now) < 0)
            return -1;
    }
    if (decoding && note_filled(c) < 0)
        return -1;
    computed(c);
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

/* Return when (ns) the next request comes, or can be planned; NEVER: there is none. */
static i64 next_event(Core *c)
{
    Job *job = c->unseen.first;
    return job && job->visible < c->next_at ? job->visible : c->next_at;
}

static int decode_steps(Core *c)
{
    const Times *lines = lines_of(c);
    i64 steps, now, event = c->changed ? 0 : next_event(c);
    i128 took;
    if (!lines)
        return PyErr_Occurred() ? -1 : 0;
    if (batch_jump(&c->batch, lines, c->clock, event, &steps, &took) < 0
        || pass(c, steps, took, &now) < 0)
        return -1;
    c->without_progress = 0;
    return note_filled(c) < 0 ? -1 : finish(c, now);
}

/* Run turn after turn. 1: Python goes on; 0: all requests have been served. */
int run(Core *c, i64 turns)
{
    for (;; turns--) {
        i64 now = (i64)(c->clock / 1000);
        if (PyErr_CheckSignals() < 0 || (c->next_at <= now && take_arrivals(c, now) < 0))
            return -1;
        if (c->leaves || !turns)
            return 1;
        int changed = queue_seen(c, now) < 0 ? -1 : plan(c, now);
        if (changed < 0)
            return -1;
        if (changed)
            record_plan(c, now);
        int caught = c->has_lag ? catch_up(c, now) : 0;
        if (caught < 0)
            return -1;
        i64 wake = next_event(c);
        if (c->chunk_count) {
            if (prefill_step(c) < 0)
                return -1;
        } else if (c->batch.jobs.count) {
            if (decode_steps(c) < 0)
                return -1;
        } else if (caught) {
            continue;
        } else if (wake < NEVER) {
            if ((i128)wake * 1000 > c->clock)
                c->clock = (i128)wake * 1000;
        } else {
            return c->waiting.count > 0;
        }
        if (PyErr_Occurred())
            return -1;
    }
}
