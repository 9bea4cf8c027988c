/* The twin of kvcore/serving/stats.py: the rows of the log, and the use of the pool over time. */
#include "core.h"

/* Rows of the log. */

int flush_rows(Core *c)
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
    PyObject *done = failed ? NULL : PyObject_CallMethod(c->log, "extend", "(O)", columns);
    Py_XDECREF(columns), Py_XDECREF(done);
    rows->count = 0;
    return done && put(&rows->ids, PyList_New(0)) == 0 && put(&rows->tenants, PyList_New(0)) == 0
        ? 0 : -1;
}

enum { TTFT, TPOT, DEADLINE, TARGETS };

/* Return the time (ns) of an SLO; -1: it has none. The names are made once. */
static i64 target_of(PyObject *slo, int which)
{
    static const char *const TEXTS[TARGETS] = {"ttft_ns", "tpot_ns", "deadline_ns"};
    static PyObject *names[TARGETS];
    if (!names[which])
        names[which] = PyUnicode_InternFromString(TEXTS[which]);
    PyObject *value = names[which] && !PyErr_Occurred() ? PyObject_GetAttr(slo, names[which]) : NULL;
    i64 time = value && value != Py_None ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return time;
}

/* `_verdict` of stats.py: 1, it met its SLO; 0, it missed it; -1, none is possible. */
static int verdict_of(const Job *job, i64 now)
{
    if (!job->verdict)
        return -1;
    i64 ttft = target_of(job->verdict, TTFT), tpot = target_of(job->verdict, TPOT);
    i64 deadline = target_of(job->verdict, DEADLINE), first = job->first_token;
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
int log_ended(Core *c, Job *job, i64 now)
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

void record_plan(Core *c, i64 now)
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
int store_timeline(Core *c)
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
