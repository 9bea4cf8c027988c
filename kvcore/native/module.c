/* The module `_core`, and the way of a run from Python into the core and back.
 *
 * `serve` runs a `ServingLoop` that has not begun, if kvcore/serving/native.py has found that the
 * core knows all its parts. Where it stops early, between two turns, it returns all jobs as they
 * are; the loop in Python goes on from there.
 */
#include "core.h"

/* A list with the `value` of each `job` of a list, in its order. */
#define LISTED(name, list, link, value)                                                           \
    PyObject *name = PyList_New(0);                                                               \
    for (Job *job = c->list.first; name && job; job = job->link.after) {                          \
        PyObject *item = value;                                                                   \
        if (!item || PyList_Append(name, item) < 0)                                               \
            Py_CLEAR(name);                                                                       \
        Py_XDECREF(item);                                                                         \
    }

/* Return the state of a run that Python continues. */
static PyObject *handover(Core *c)
{
    if (!c->in_python && give_back_arrivals(c, c->next_request, c->next_at) < 0)
        return NULL;
    LISTED(waiting, waiting, running, job_state(job))
    LISTED(running, running, running, job_state(job))
    LISTED(unseen, unseen, running, job_state(job))
    LISTED(prefilling, prefilling, prefilling, PyLong_FromLongLong(job->serial))
    LISTED(batch, batch.jobs, batch, PyLong_FromLongLong(job->serial))
    PyObject *filled = PyList_New(0);
    for (i64 n = 0; filled && n < c->filled_count; n++) {
        PyObject *entry = Py_BuildValue("(LL)", c->filled[n].job->serial, c->filled[n].length);
        if (!entry || PyList_Append(filled, entry) < 0)
            Py_CLEAR(filled);
        Py_XDECREF(entry);
    }
    /* If one of them is NULL this is too, and frees the others. */
    return Py_BuildValue("{sN sN sN sN sN sN sL sN sL sL sL si si sN}",
        "waiting", waiting, "running", running, "unseen", unseen, "filled", filled,
        "prefilling", prefilling, "batch", batch, "context", c->batch.context,
        "last_step_ps", big_int(c->batch.last_step_ps), "allocated_until",
        c->batch.allocated_until, "blocked", c->blocked ? c->blocked->serial : 0,
        "without_progress", c->without_progress, "changed", c->changed,
        "stepped", c->stepped, "began_ps", big_int(c->began));
}

static int store_back(Core *c)
{
    PyObject *steps = get(c->loop, "steps"), *itl = get(c->log, "itl");
    int failed = !steps || !itl || flush_rows(c) < 0
        || store_timeline(c) < 0 || histogram_store(&c->batch.gaps, itl, "_histogram") < 0
        || tree_store_back(&c->tree, c->cache) < 0
        || set_int(steps, "count", c->batch.steps) < 0
        || set_int(c->loop, "_serial", c->serial) < 0
        || set_int(c->log, "steps", c->steps) < 0
        || set_int(c->log, "own_slos", c->own_slos) < 0
        || set_int(c->loop, "clock_ps", c->clock) < 0 || set_int(c->log, "busy_ps", c->busy) < 0;
    Py_XDECREF(steps), Py_XDECREF(itl);
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
    if (!time->known)
        return no_memory();
    for (i64 n = 0; n < time->known_count; n++)
        time->known[n] = -1;
    return 0;
}

static int init(Core *c, PyObject *limits, PyObject *terms, int known)
{
    i64 above, below;
    static char *names[] = {
        "max_tokens", "max_seqs", "reserve", "max_model_len", "max_chunk", "in_one", "frontend",
        "mixed", "admit_after_preemption", "last_of_ties", "chunked", "alone", "by_chunk",
        "fits_prompt", "publishes", "keeps", "names_output", "lag",
        "scale_above", "scale_below", NULL,
    };
    PyObject *nothing = PyTuple_New(0);
    int sound = nothing && PyArg_ParseTupleAndKeywords(
        nothing, limits, "LLLLLLLpppppppppppLL", names, &c->max_tokens, &c->max_seqs, &c->reserve,
        &c->longest, &c->max_chunk, &c->in_one, &c->frontend, &c->mixed, &c->after_preemption,
        &c->last_of_ties, &c->chunked, &c->alone, &c->by_chunk, &c->fits_prompt, &c->publishes,
        &c->keeps, &c->batch.commits, &c->has_lag, &above, &below);
    Py_XDECREF(nothing);
    if (!sound)
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
    if (tree_init(&c->tree, c->cache, known) < 0 || batch_init(&c->batch, &c->tree) < 0
        || init_time(c, terms) < 0)
        return -1;
    c->batch.ahead = !c->has_lag;
    if (c->batch.commits && c->has_lag) {
        c->batch.grown = publish_filled;
        c->batch.core = c;
    }
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
    /* Those that have not left are in a list. */
    for (i64 n = 0; n < c->late_count; n++)
        if (c->late[n]->has_left)
            free_job(c->late[n]);
    free_jobs(&c->waiting);
    free_jobs(&c->running);
    free_jobs(&c->unseen);
    tree_clear(&c->tree);
    batch_clear(&c->batch);
    Py_XDECREF(c->log), Py_XDECREF(c->cache), Py_XDECREF(c->arrivals), Py_XDECREF(c->slo);
    Py_XDECREF(c->next_request);
    Py_XDECREF(c->rows.ids), Py_XDECREF(c->rows.tenants), Py_XDECREF(c->time.by_tokens);
    PyMem_Free(c->time.known), PyMem_Free(c->lines), PyMem_Free(c->heap);
    PyMem_Free(c->chunks), PyMem_Free(c->done), PyMem_Free(c->ongoing), PyMem_Free(c->late);
    PyMem_Free(c->unpublished), PyMem_Free(c->filled);
#define COLUMN(type, name) PyMem_Free(c->rows.name);
    COLUMNS(COLUMN)
#undef COLUMN
}

PyDoc_STRVAR(serve_doc,
"serve(loop, requests, limits, priority, lines, duration, work, terms, known, turns)\n"
"--\n\n"
"Run a serving loop; return None, or the state of a run that Python continues.");

static PyObject *serve(PyObject *module, PyObject *arguments)
{
    PyObject *limits, *terms, *result = NULL;
    int known;
    i64 turns;
    Core core = {0}, *c = &core;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOO!OOOOOiL", &c->loop, &c->iterator, &PyDict_Type,
                          &limits, &c->priority, &c->lines_of, &c->time.duration,
                          &c->time.work_type, &terms, &known, &turns))
        return NULL;
    if (c->priority == Py_None)
        c->priority = NULL;
    int status = init(c, limits, terms, known);
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
"replay(cache, requests, known, keeps)\n--\n\n"
"Open, commit and close requests in a new cache; return the hits of each as bytes of integers, if\n"
"they are kept, and the first request that is left to Python, or None.");

PyDoc_STRVAR(like_doc,
"request_like(pattern, id, arrival, keys)\n--\n\n"
"Return the request `pattern` with another id, time of arrival and keys, which are not checked.");

PyDoc_STRVAR(json_doc,
"json_request(names, pattern, factor, line, id)\n--\n\n"
"Return the request of a line with these four fields alone, else as `pattern`: its time in units of\n"
"`factor` ns, the lengths of prompt and output, and its keys. None: the line is not plain.");

PyDoc_STRVAR(csv_doc,
"csv_request(order, pattern, line, id)\n--\n\n"
"Return the request of a row, else as `pattern`: `order` has the places of its time and of the\n"
"lengths of prompt and output. None: the row is not plain.");

PyDoc_STRVAR(runs_doc,
"render_runs(ids)\n--\n\n"
"Return the runs of an array of block ids as JSON.");

static PyMethodDef methods[] = {
    {"serve", serve, METH_VARARGS, serve_doc},
    {"replay", untimed_replay, METH_VARARGS, replay_doc},
    {"request_like", (PyCFunction)(void (*)(void))request_like, METH_FASTCALL, like_doc},
    {"json_request", json_request, METH_VARARGS, json_doc},
    {"csv_request", csv_request, METH_VARARGS, csv_doc},
    {"render_runs", render_runs, METH_O, runs_doc},
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
    if (module && PyModule_AddType(module, &named_blocks_type) < 0)
        Py_CLEAR(module);
    return module;
}
