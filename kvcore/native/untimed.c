/* The twin of plugins/kvcore_replay/untimed.py: open, commit and close, one request at a time. */
#include "core.h"

/* Replay one request. 1: it is left to Python. */
static int replay_one(Tree *t, PyObject *request, i64 *hit)
{
    Job job = {.request = request, .admitted = -1};
    i64 now = is_plain(request, 0) ? int_of(*slot(request, request_slots.arrival)) : -1;
    if (now < t->now) {
        PyErr_Clear();
        return 1;
    }
    job.prompt = job.target = int_of(*slot(request, request_slots.prompt_tokens));
    int status = tree_open(t, &job, &(Admission){.most = -1}, now);
    if (!status) {
        *hit = job.shared_end;
        i64 rest = job.tokens - job.committed;
        status = tree_commit(t, &job, rest, now) < 0 || tree_close(t, &job, now, 1) < 0 ? -1 : 0;
    }
    Py_XDECREF(job.keys), Py_XDECREF(job.span), Py_XDECREF(job.token);
    return status;
}

PyObject *untimed_replay(PyObject *module, PyObject *arguments)
{
    PyObject *cache, *requests, *request = NULL, *result = NULL;
    int known, keeps, status;
    i64 *hits = NULL, count = 0, room = 0;
    Tree tree = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OOii", &cache, &requests, &known, &keeps))
        return NULL;
    status = tree_init(&tree, cache, known);
    tree.truncates = 1;
    while (!status && (request = PyIter_Next(requests))) {
        i64 hit = 0;
        status = replay_one(&tree, request, &hit);
        if (status == 1)
            break;
        Py_CLEAR(request);
        if (!status && keeps)
            status = GROW(hits, count, room);
        if (keeps && !status)
            hits[count] = hit;
        if (++count % 256 == 0 && !status)
            status = PyErr_CheckSignals();
    }
    if (status >= 0 && !PyErr_Occurred() && tree_store_back(&tree, cache) == 0)
        result = Py_BuildValue("(y#O)", hits ? (char *)hits : "", keeps ? 8 * count : 0,
                               request ? request : Py_None);
    Py_XDECREF(request);
    PyMem_Free(hits);
    tree_clear(&tree);
    return result;
}
