/* The twin of kvcore/serving/decode_batch.py, and of the step times of latency.py.
 *
 * Many decode steps are one jump, in closed form; the times between its tokens go into a histogram
 * as arithmetic progressions.
 */
#include "core.h"
#include <math.h>

/* Step times: the maximum of a few lines in the number of the step. */

static i128 sum_of(i128 first, i128 slope, i64 count)
{
    return count * first + slope * ((i128)count * (count - 1) / 2);
}

/* Return the line that is highest at `step`; `*until`: the step at which another one rises. */
static const Line *highest(const Times *times, i64 step, i64 steps, i64 *until)
{
    const Line *top = &times->lines[0];
    for (int n = 1; n < times->count; n++) {
        const Line *line = &times->lines[n];
        i128 here = line->first + line->slope * step, there = top->first + top->slope * step;
        if (here > there || (here == there && line->slope > top->slope))
            top = line;
    }
    *until = steps;
    for (int n = 0; n < times->count; n++) {
        const Line *line = &times->lines[n];
        if (line->slope > top->slope) {
            i128 cross = (top->first - line->first) / (line->slope - top->slope) + 1;
            if (cross < *until)
                *until = (i64)cross;
        }
    }
    return top;
}

static i128 total_of(const Times *times, i64 steps)
{
    i128 total = 0;
    for (i64 step = 0, until; step < steps; step = until) {
        const Line *line = highest(times, step, steps, &until);
        total += sum_of(line->first + line->slope * step, line->slope, until - step);
    }
    return total;
}

/* Return the fewest of `count` steps whose sum is at least `time`; all of them suffice. */
static i64 steps_for(i128 first, i128 slope, i64 count, i128 time)
{
    if (time <= 0)
        return 0;
    long double twice = 2 * (long double)first - (long double)slope;
    long double estimate = slope
        ? (sqrtl(twice * twice + 8 * (long double)slope * (long double)time) - twice)
            / (2 * (long double)slope)
        : (long double)time / (long double)first;
    i64 steps = estimate >= (long double)count ? count : estimate > 0 ? (i64)estimate : 0;
    while (steps > 0 && sum_of(first, slope, steps - 1) >= time)
        steps--;
    while (sum_of(first, slope, steps) < time)
        steps++;
    return steps;
}

/* Return the number of steps, at least 1, until `time` has passed, or `most`. */
static i64 reach(const Times *times, i128 time, i64 most)
{
    for (i64 step = 0, until; step < most; step = until) {
        const Line *line = highest(times, step, most, &until);
        i128 first = line->first + line->slope * step;
        i128 whole = sum_of(first, line->slope, until - step);
        if (whole >= time) {
            i64 steps = step + steps_for(first, line->slope, until - step, time);
            return steps > 1 ? steps : 1;
        }
        time -= whole;
    }
    return most;
}

/* The batch. */

int batch_init(Batch *b, Tree *tree)
{
    b->tree = tree;
    b->block_size = tree->size;
    return histogram_init(&b->gaps);
}

void batch_clear(Batch *b)
{
    PyMem_Free(b->growing), PyMem_Free(b->fresh), PyMem_Free(b->ends);
    PyMem_Free(b->gaps.weights);
}

static i64 modulo(i64 value, i64 by)
{
    i64 rest = value % by;
    return rest < 0 ? rest + by : rest;
}

/* Return the place among those that grow of the first at or behind (residue, admission). */
static i64 growing_at(const Batch *b, i64 residue, i64 admission)
{
    i64 low = 0, high = b->jobs.count;
    while (low < high) {
        i64 middle = (low + high) / 2;
        const Job *job = b->growing[middle];
        if (job->residue < residue || (job->residue == residue && job->admission < admission))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Return the jobs that need a block at `step`, as they were admitted. */
static Job **growing_jobs(const Batch *b, i64 step, i64 *count)
{
    i64 residue = step % b->block_size, place = growing_at(b, residue, 0);
    *count = growing_at(b, residue + 1, 0) - place;
    return b->growing + place;
}

/* Return the jobs that commit a block before the next step. */
Job **batch_committers(const Batch *b, i64 *count)
{
    *count = 0;
    return b->commits ? growing_jobs(b, b->steps + b->ahead, count) : NULL;
}

/* Return after how many steps the next job commits a block. */
static i64 until_commit(const Batch *b)
{
    i64 next = b->steps + 1 + b->ahead, place = growing_at(b, next % b->block_size, 0);
    return 1 + modulo(b->growing[place % b->jobs.count]->residue - next, b->block_size);
}

static int is_before(End one, End other)
{
    return one.end < other.end || (one.end == other.end && one.admission < other.admission);
}

static int push_end(Batch *b, End entry)
{
    if (GROW(b->ends, b->ends_count, b->ends_room) < 0)
        return -1;
    i64 at = b->ends_count++;
    for (; at && is_before(entry, b->ends[(at - 1) / 2]); at = (at - 1) / 2)
        b->ends[at] = b->ends[(at - 1) / 2];
    b->ends[at] = entry;
    return 0;
}

/* Remove the entry at `at` of the heap. */
static void remove_end(Batch *b, i64 at)
{
    End entry = b->ends[--b->ends_count];
    i64 below, up;
    while ((below = 2 * at + 1) < b->ends_count) {
        if (below + 1 < b->ends_count && is_before(b->ends[below + 1], b->ends[below]))
            below++;
        if (is_before(entry, b->ends[below]))
            break;
        b->ends[at] = b->ends[below];
        at = below;
    }
    for (; at && is_before(entry, b->ends[up = (at - 1) / 2]); at = up)
        b->ends[at] = b->ends[up];
    b->ends[at] = entry;
}

int batch_add(Batch *b, Job *job, i64 generated)
{
    i64 length = job->prompt + generated - 1, count = b->jobs.count;
    if (GROW(b->growing, count, b->growing_room) < 0
        || GROW(b->fresh, b->fresh_count, b->fresh_room) < 0)
        return -1;
    job->generated_before = generated;
    job->joined = b->steps;
    job->residue = modulo(b->steps - length, b->block_size);
    job->end = b->steps + job->output - generated;
    if (push_end(b, (End){job->end, job->admission, job}) < 0)
        return -1;
    i64 place = growing_at(b, job->residue, job->admission);
    memmove(b->growing + place + 1, b->growing + place, sizeof(Job *) * (count - place));
    b->growing[place] = job;
    b->fresh[b->fresh_count++] = job;
    job->is_fresh = 1;
    LIST_ADD(&b->jobs, job, batch);
    b->context += length + 1;
    return 0;
}

/* Take `job`, which is in the heap no more, out of the batch. */
static void leave(Batch *b, Job *job)
{
    if (job->is_fresh) {
        i64 at = 0;
        while (b->fresh[at] != job)
            at++;
        memmove(b->fresh + at, b->fresh + at + 1, sizeof(Job *) * (--b->fresh_count - at));
        job->is_fresh = 0;
    } else {
        job->last_token_ps = b->last_step_ps;
    }
    job->generated_before += b->steps - job->joined;
    job->joined = -1;
    i64 place = growing_at(b, job->residue, job->admission);
    LIST_REMOVE(&b->jobs, job, batch);
    memmove(b->growing + place, b->growing + place + 1,
            sizeof(Job *) * (b->jobs.count - place));
    b->context -= job->prompt + job->generated_before;
}

void batch_remove(Batch *b, Job *job)
{
    i64 at = 0;
    while (b->ends[at].job != job)
        at++;
    remove_end(b, at);
    leave(b, job);
}

/* Run one segment of steps from `start` on, and record its gaps; return the time it took. */
i128 batch_run(Batch *b, i128 start, i128 first, i128 slope, i64 steps)
{
    i64 size = b->jobs.count;
    /* Whether all newest tokens are from the moment at which the first step begins. */
    int even = start == b->last_step_ps || (b->fresh_count && b->fresh_count == size);
    for (i64 n = 0; even && n < b->fresh_count; n++)
        even = b->fresh[n]->last_token_ps == start;
    if (even) {
        histogram_add(&b->gaps, first, slope, steps, size);
    } else {
        for (i64 n = 0; n < b->fresh_count; n++)
            histogram_add(&b->gaps, start + first - b->fresh[n]->last_token_ps, 0, 1, 1);
        if (b->fresh_count < size)
            histogram_add(&b->gaps, start + first - b->last_step_ps, 0, 1, size - b->fresh_count);
        if (steps > 1)
            histogram_add(&b->gaps, first + slope, slope, steps - 1, size);
    }
    for (i64 n = 0; n < b->fresh_count; n++)
        b->fresh[n]->is_fresh = 0;
    b->fresh_count = 0;
    i128 took = sum_of(first, slope, steps);
    b->steps += steps;
    b->last_step_ps = start + took;
    b->context += size * steps;
    return took;
}

/* Remove and return a job that has generated all its tokens; NULL: there is none. */
Job *batch_pop_finished(Batch *b)
{
    if (!b->ends_count || b->ends[0].end > b->steps)
        return NULL;
    Job *job = b->ends[0].job;
    remove_end(b, 0);
    leave(b, job);
    return job;
}

/* The blocks that the batch grows into: `DecodeAllocator`. */

/* Return how many jobs have a residue in `[low, high)`. */
static i64 between(const Batch *b, i64 low, i64 high)
{
    return growing_at(b, high, 0) - growing_at(b, low, 0);
}

static i64 growth_between(const Batch *b, i64 first, i64 end)
{
    i64 size = b->block_size, turns = (end - first) / size, rest = (end - first) % size;
    i64 low = first % size, high = low + rest, count = between(b, low, high);
    if (high > size)
        count += between(b, 0, high - size);
    return turns * b->jobs.count + count;
}

/* Allocate a block for `job`, which grows at the next step. */
static int grow_one(Batch *b, Job *job, i64 now)
{
    if (tree_take(b->tree, job, 1, now) < 0)
        return -1;
    return b->grown ? b->grown(b->core, job, now) : 0;
}

/* Allocate for the next step, unless that is done. 1: there is no room. */
int batch_next_step(Batch *b, i64 now)
{
    if (b->allocated_until > b->steps)
        return 0;
    i64 count;
    Job **jobs = growing_jobs(b, b->steps, &count);
    i64 need = count - b->served; /* the served ones are among them */
    if (need > b->tree->free + b->tree->unpinned)
        return 1;
    if (need <= b->tree->free && !b->grown)
        b->tree->free -= need;
    else
        for (i64 n = 0; n < count; n++)
            if (!jobs[n]->is_served && grow_one(b, jobs[n], now) < 0)
                return -1;
    for (i64 n = 0; b->served && n < count; n++)
        jobs[n]->is_served = 0;
    b->served = 0;
    b->allocated_until = b->steps + 1;
    return 0;
}

/* Allocate for as many jobs of the next step, from the first on, as there is room for. */
int batch_serve_first(Batch *b, i64 now)
{
    i64 count, room = b->tree->free + b->tree->unpinned;
    Job **jobs = growing_jobs(b, b->steps, &count);
    for (i64 n = 0; n < count && room > 0; n++) {
        if (jobs[n]->is_served)
            continue;
        if (grow_one(b, jobs[n], now) < 0)
            return -1;
        jobs[n]->is_served = 1;
        b->served++;
        room--;
    }
    return 0;
}

/* Set the length of the text of a job. */
void settle(const Batch *b, Job *job, i64 tokens)
{
    job->tokens = tokens;
    job->blocks = ceil_div(tokens, b->block_size);
}

/* Set the length of a job that has left the batch and keeps its blocks. */
void batch_settle(Batch *b, Job *job)
{
    settle(b, job, length_of(b, job) + (b->allocated_until > b->steps || job->is_served));
    b->served -= job->is_served;
    job->is_served = 0;
}

/* The steps at which jobs grow, one after the other: those of a residue come together. */
typedef struct { i64 turn, place, count, offset; int started; } Growth;

/* Go to the next step before `end` at which jobs grow; return it, or -1: there is none. */
static i64 next_growth(const Batch *b, Growth *g, i64 first, i64 end)
{
    i64 size = b->block_size, jobs = b->jobs.count;
    if (!jobs)
        return -1;
    if (!g->started) {
        g->started = 1;
        g->turn = first;
        g->place = growing_at(b, first % size, 0) % jobs;
    } else {
        i64 next = g->place + g->count == jobs ? 0 : g->place + g->count;
        i64 offset = modulo(b->growing[next]->residue - first, size);
        if (offset <= g->offset)
            g->turn += size;
        g->place = next;
    }
    i64 residue = b->growing[g->place]->residue;
    g->offset = modulo(residue - first, size);
    g->count = growing_at(b, residue + 1, 0) - g->place;
    return g->turn + g->offset < end ? g->turn + g->offset : -1;
}

/* Evict the last `missing` of the `need` blocks of `steps` steps, in a fixed order. */
static int evict_ahead(Batch *b, i64 missing, i64 need, i64 steps, i128 clock, const Times *times)
{
    i64 *moments = NULL; /* when each of them leaves */
    if (b->tree->residency.object) {
        moments = PyMem_New(i64, missing);
        if (!moments)
            return no_memory();
        Growth growth = {0};
        i64 step, done = missing - need; /* below 0: for blocks that are free */
        while ((step = next_growth(b, &growth, b->steps + 1, b->steps + steps)) >= 0) {
            i64 now = (i64)((clock + total_of(times, step - b->steps)) / 1000);
            for (i64 n = 0; n < growth.count; n++, done++)
                if (done >= 0)
                    moments[done] = now;
        }
    }
    PyObject *id = FIELD(b->jobs.first->request, id);
    int failed = id ? tree_free_ahead(b->tree, missing, id, (i64)(clock / 1000), moments) : -1;
    Py_XDECREF(id);
    PyMem_Free(moments);
    return failed;
}

/* Allocate for up to `*steps` steps, and reduce these to those for which there is room. */
static int allocate_ahead(Batch *b, i64 *steps, i128 clock, const Times *times)
{
    Tree *t = b->tree;
    i64 first = b->steps + 1, end = b->steps + *steps, step;
    i64 need = growth_between(b, first, end), missing = need - t->free;
    if (missing > 0 && t->fixed_order && missing <= t->unpinned) {
        if (evict_ahead(b, missing, need, *steps, clock, times) < 0)
            return -1;
        missing = 0;
    }
    if (missing <= 0) {
        t->free -= need;
        b->allocated_until = end;
        return 0;
    }
    Growth growth = {0};
    while ((step = next_growth(b, &growth, first, end)) >= 0) {
        if (growth.count > t->free + t->unpinned) {
            end = step;
            break;
        }
        i64 now = (i64)((clock + total_of(times, step - b->steps)) / 1000);
        for (i64 n = 0; n < growth.count; n++)
            if (tree_take(t, b->growing[growth.place + n], 1, now) < 0)
                return -1;
    }
    b->allocated_until = end;
    *steps = end - b->steps;
    return 0;
}

/* Run decode steps as long as nothing changes but lengths, up to `event` (ns). */
int batch_jump(Batch *b, const Times *lines, i128 clock, i64 event, i64 *steps, i128 *took)
{
    i64 size = b->jobs.count, until;
    Times times = *lines; /* in the number of the step, of lines in the context */
    for (int n = 0; n < times.count; n++) {
        times.lines[n].first += times.lines[n].slope * b->context;
        times.lines[n].slope *= size;
    }
    *steps = b->ends[0].end - b->steps;
    if (b->commits && until_commit(b) < *steps)
        *steps = until_commit(b);
    if (*steps > 1 && event < INT64_MAX)
        *steps = reach(&times, (i128)event * 1000 - clock, *steps);
    if (*steps > 1 && allocate_ahead(b, steps, clock, &times) < 0)
        return -1;
    *took = 0;
    for (i64 step = 0, count = *steps; step < count; step = until) {
        const Line *line = highest(&times, step, count, &until);
        i128 first = line->first + line->slope * step;
        *took += batch_run(b, clock + *took, first, line->slope, until - step);
    }
    return 0;
}
