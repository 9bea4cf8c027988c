/* The twin of kvcore/workloads/arrivals.py, and of how kvcore/serving/loop.py takes a request.
 *
 * From the first request of a session on, Python says which request arrives next. Where a request
 * needs what the core lacks, such as a hint, `leaves` is set: Python goes on before the next plan.
 */
#include "core.h"

PyObject *no_hints;

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

/* Give the arrivals back to Python, with the request read last; at -1 it is not counted. */
int give_back_arrivals(Core *c, PyObject *request, i64 at)
{
    PyObject *given = PyObject_CallMethod(c->arrivals, "resume", "OLLLLL",
        request ? request : Py_None, at, c->came, c->last, c->first_number, c->next_number);
    Py_XDECREF(given);
    c->in_python = 1;
    Py_CLEAR(c->next_request);
    return given ? 0 : -1;
}

/* The next time of arrival, from Python. */
int ask_next(Core *c)
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
int read_next(Core *c)
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

/* Schedule the requests that come after one that has ended. */
int schedule_followers(Core *c, Job *job, i64 now)
{
    if (!c->in_python)
        return 0;
    PyObject *done = PyObject_CallMethod(c->arrivals, "ended", "OL", job->request, now);
    Py_XDECREF(done);
    return done ? ask_next(c) : -1;
}

static int reject(Core *c, Job *job, PyObject *why, i64 now)
{
    PyObject *reasons = get(c->log, "reasons");
    PyObject *row = PyLong_FromLongLong(c->rows.all);
    int failed = !reasons || !row || PyObject_SetItem(reasons, row, why) < 0
        || log_ended(c, job, -1) < 0;
    Py_XDECREF(reasons), Py_XDECREF(row);
    failed = failed || schedule_followers(c, job, now) < 0;
    free_job(job);
    return failed ? -1 : 0;
}

/* Queue a request that arrives at `now`, or reject it. */
static int arrive(Core *c, PyObject *request, i64 now)
{
    Job *job = PyMem_Calloc(1, sizeof *job);
    if (!job)
        return no_memory();
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
        && (!job->prompt || bounded || length > (i128)c->tree.pool * c->tree.size
            || (c->in_one >= 0 && length > c->in_one)))
        why = PyObject_CallMethod(c->loop, "unfit", "(O)", request);
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
    if (c->has_lag || c->frontend) {
        job->visible = now + c->frontend;
        LIST_ADD(&c->unseen, job, running);
    } else if (queue(c, job, now, 0) < 0) {
        free_job(job);
        return -1;
    }
    return 0;
}

/* Queue the jobs that could be planned at the time at which this step was planned. */
int queue_seen(Core *c, i64 now)
{
    i64 seen = c->has_lag && c->stepped ? (i64)(c->began / 1000) : now;
    for (Job *job; (job = c->unseen.first) && job->visible <= seen;) {
        LIST_REMOVE(&c->unseen, job, running);
        if (queue(c, job, now, 0) < 0) {
            free_job(job);
            return -1;
        }
    }
    return 0;
}

int take_arrivals(Core *c, i64 now)
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
