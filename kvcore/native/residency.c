/* The twin of kvcore/histogram.py and kvcore/cache/residency.py.
 *
 * Events are counted as they come, where Python stores some thousand and counts them together.
 */
#include "core.h"

static i64 *borders, border_count;

/* Use the borders of buckets of `kvcore.histogram`. */
int histogram_borders(PyObject *list)
{
    i64 count = PyList_GET_SIZE(list), *values = PyMem_New(i64, count);
    if (!values) {
        PyErr_NoMemory();
        return -1;
    }
    for (i64 n = 0; n < count; n++) {
        int overflow;
        values[n] = PyLong_AsLongLongAndOverflow(PyList_GET_ITEM(list, n), &overflow);
        if (overflow)
            values[n] = INT64_MAX;
    }
    PyMem_Free(borders);
    borders = values;
    border_count = count;
    return PyErr_Occurred() ? -1 : 0;
}

int histogram_init(Histogram *histogram)
{
    histogram->weights = PyMem_Calloc(border_count, sizeof(i64));
    if (histogram->weights)
        return 0;
    PyErr_NoMemory();
    return -1;
}

/* Add `first`, `first + slope`, ... (`count` values), each `weight` times. */
void histogram_add(Histogram *h, i128 first, i128 slope, i64 count, i64 weight)
{
    i128 last = first + slope * (count - 1);
    i64 low = 0, high = border_count - 1, done = 0;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (borders[middle] < first)
            low = middle + 1;
        else
            high = middle;
    }
    h->weight += (i128)count * weight;
    h->total += (first + last) * count / 2 * weight;
    if (last > h->high)
        h->high = last;
    for (;; low++) {
        /* The number of values up to the border of this bucket. */
        i64 upto = count;
        if (slope && low < border_count - 1) {
            if (borders[low] < first + slope * done)
                continue;
            i128 inside = (borders[low] - first) / slope + 1;
            upto = inside < count ? (i64)inside : count;
        }
        h->weights[low] += (upto - done) * weight;
        done = upto;
        if (done == count)
            return;
    }
}

/* Add the samples to a histogram of Python. */
int histogram_store(Histogram *h, PyObject *object, const char *name)
{
    PyObject *histogram = get(object, name), *done = NULL;
    PyObject *weights = PyBytes_FromStringAndSize((char *)h->weights, 8 * border_count);
    if (histogram && weights)
        done = PyObject_CallMethod(histogram, "add_weights", "ONNN", weights, big_int(h->weight),
                                   big_int(h->total), big_int(h->high));
    Py_XDECREF(histogram), Py_XDECREF(weights), Py_XDECREF(done);
    return done ? 0 : -1;
}

int residency_init(Residency *r, PyObject *object)
{
    r->object = Py_NewRef(object);
    r->refaults = get(object, "refaults");
    r->young = r->refaults ? get(r->refaults, "_young") : NULL;
    r->old = r->young ? get(r->refaults, "_old") : NULL;
    PyObject *window = r->old ? get(r->refaults, "_window") : NULL;
    r->window = r->turn = window ? PyLong_AsLongLong(window) : -1;
    Py_XDECREF(window);
    return PyErr_Occurred() || histogram_init(&r->age_at_hit) < 0
        || histogram_init(&r->age_at_eviction) < 0 || histogram_init(&r->lifetime) < 0
        || histogram_init(&r->hits_at_eviction) < 0 ? -1 : 0;
}

int residency_store(Residency *r)
{
    PyObject *evicted = get(r->object, "evicted_blocks");
    PyObject *count = PyLong_FromLongLong(r->evicted);
    int failed = !evicted || !count || PyDict_SetItemString(evicted, "capacity", count) < 0
        || set_int(r->object, "stored_blocks", r->stored) < 0
        || histogram_store(&r->age_at_hit, r->object, "age_at_hit") < 0
        || histogram_store(&r->age_at_eviction, r->object, "age_at_eviction") < 0
        || histogram_store(&r->lifetime, r->object, "lifetime") < 0
        || histogram_store(&r->hits_at_eviction, r->object, "hits_at_eviction") < 0
        || set_int(r->refaults, "blocks", r->refaulted) < 0
        || set_int(r->refaults, "_clock", r->clock) < 0
        || set_int(r->refaults, "_turn", r->turn) < 0
        || PyObject_SetAttrString(r->refaults, "_young", r->young) < 0
        || PyObject_SetAttrString(r->refaults, "_old", r->old) < 0;
    Py_XDECREF(evicted), Py_XDECREF(count);
    return failed ? -1 : 0;
}

void residency_clear(Residency *r)
{
    Py_CLEAR(r->object);
    Py_CLEAR(r->refaults);
    Py_CLEAR(r->young);
    Py_CLEAR(r->old);
    PyMem_Free(r->age_at_hit.weights), PyMem_Free(r->age_at_eviction.weights);
    PyMem_Free(r->lifetime.weights), PyMem_Free(r->hits_at_eviction.weights);
}

/* Blocks that are stored again: `Refaults`. A run is (start, end, keys, clock). */

/* Return the name of the block at `place` of a path: its key, and its place in it. */
static PyObject *name_of(PyObject *keys, i64 place, i64 ratio)
{
    PyObject *key = key_at(keys, place / ratio);
    return key ? Py_BuildValue("(NL)", key, place % ratio) : NULL;
}

/* Remove the run that begins in the block `name`, and return it; NULL: there is none. */
static PyObject *take_run(Residency *r, PyObject *name)
{
    for (int n = 0; n < 2; n++) {
        PyObject *runs = n ? r->old : r->young;
        PyObject *run = PyDict_GetItemWithError(runs, name);
        if (!run && PyErr_Occurred())
            return NULL;
        if (!run)
            continue;
        Py_INCREF(run);
        if (PyDict_DelItem(runs, name) < 0)
            Py_CLEAR(run);
        return run;
    }
    return NULL;
}

static int remember(Residency *r, PyObject *keys, i64 start, i64 end, i64 clock, i64 ratio)
{
    PyObject *name = name_of(keys, start, ratio), *run = NULL;
    if (name) {
        Py_XDECREF(take_run(r, name));
        run = PyErr_Occurred() ? NULL : Py_BuildValue("(LLOL)", start, end, keys, clock);
    }
    int failed = run ? PyDict_SetItem(r->young, name, run) : -1;
    Py_XDECREF(name), Py_XDECREF(run);
    return failed;
}

int residency_stored(Residency *r, PyObject *keys, i64 start, i64 end, i64 ratio)
{
    i64 oldest = r->clock - r->window;
    r->stored += end - start;
    while (start < end) {
        PyObject *name = name_of(keys, start, ratio), *run = name ? take_run(r, name) : NULL;
        Py_XDECREF(name);
        if (!run)
            return PyErr_Occurred() ? -1 : 0;
        i64 first, last, clock;
        PyObject *path;
        int failed = !PyArg_ParseTuple(run, "LLOL", &first, &last, &path, &clock);
        i64 stop = failed ? -1
            : common_prefix(path, keys, start, last < end ? last : end, ratio);
        failed = stop < 0;
        if (!failed && clock >= oldest) {
            i64 fresh = clock - oldest + 1;
            r->refaulted += stop - start < fresh ? stop - start : fresh;
        }
        if (!failed && stop < last)
            failed = remember(r, path, stop, last, clock - (stop - start), ratio);
        Py_DECREF(run);
        if (failed)
            return -1;
        start = stop;
    }
    return 0;
}

/* Blocks at the end of `span` leave, at `now`, or each at its own of `times` (ns). */
int residency_evicted(Residency *r, PyObject *span, i64 count, i64 now, PyObject *times, i64 ratio)
{
    i64 end = SPAN_INT(span, end), created = SPAN_INT(span, created);
    i64 used = SPAN_INT(span, last_access);
    r->evicted += count;
    histogram_add(&r->hits_at_eviction, SPAN_INT(span, hit_count), 0, 1, count);
    for (i64 n = 0; n < (times ? count : 1); n++) {
        if (times)
            now = PyLong_AsLongLong(PyList_GET_ITEM(times, n));
        histogram_add(&r->age_at_eviction, now - used, 0, 1, times ? 1 : count);
        histogram_add(&r->lifetime, now - created, 0, 1, times ? 1 : count);
    }
    r->clock += count;
    if (r->clock > r->turn) {
        Py_SETREF(r->old, r->young);
        r->young = PyDict_New();
        r->turn = r->clock + r->window;
        if (!r->young)
            return -1;
    }
    return remember(r, SPAN(span, path_keys), end - count, end, r->clock, ratio);
}
