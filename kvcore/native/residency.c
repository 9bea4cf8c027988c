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
    if (!values)
        return no_memory();
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
    return histogram->weights ? 0 : no_memory();
}

/* Return the bucket of a value: most often that of the value before. */
static i64 bucket_of(Histogram *h, i128 value)
{
    i64 low = h->bucket, high = border_count - 1;
    if (value <= borders[low] && (!low || borders[low - 1] < value))
        return low;
    for (low = 0; low < high;) {
        i64 middle = (low + high) / 2;
        if (borders[middle] < value)
            low = middle + 1;
        else
            high = middle;
    }
    return h->bucket = low;
}

/* Add `first`, `first + slope`, ... (`count` values), each `weight` times. */
void histogram_add(Histogram *h, i128 first, i128 slope, i64 count, i64 weight)
{
    i128 last = first + slope * (count - 1);
    i64 low = bucket_of(h, first), done = 0;
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

/* Blocks that are stored again: `Refaults`. A run is (start, end, keys, clock). */

/* Return the name of the block at `place` of a path: its key, and its place in it. */
static PyObject *name_of(PyObject *keys, i64 place, i64 ratio)
{
    PyObject *key = key_at(keys, place / ratio), *offset = PyLong_FromLongLong(place % ratio);
    PyObject *name = key && offset ? PyTuple_Pack(2, key, offset) : NULL;
    Py_XDECREF(key), Py_XDECREF(offset);
    return name;
}

/* `Py_BuildValue` of "(LLOL)", in a fifth of its time. */
static PyObject *run_of(i64 start, i64 end, PyObject *keys, i64 clock)
{
    PyObject *from = PyLong_FromLongLong(start), *to = PyLong_FromLongLong(end);
    PyObject *left = PyLong_FromLongLong(clock);
    PyObject *run = from && to && left ? PyTuple_Pack(4, from, to, keys, left) : NULL;
    Py_XDECREF(from), Py_XDECREF(to), Py_XDECREF(left);
    return run;
}

/* Remove a value from a dictionary, and return it; NULL: there is none. */
static PyObject *pop(PyObject *dict, PyObject *key)
{
    PyObject *value = Py_XNewRef(PyDict_GetItemWithError(dict, key));
    if (value && PyDict_DelItem(dict, key) < 0)
        Py_CLEAR(value);
    return value;
}

/* Remove the run that begins in the block `name`, and return it; NULL: there is none. */
static PyObject *take_run(Residency *r, PyObject *name)
{
    PyObject *run = pop(r->young, name);
    return run || PyErr_Occurred() ? run : pop(r->old, name);
}

static int remember(Residency *r, PyObject *keys, i64 start, i64 end, i64 clock, i64 ratio)
{
    PyObject *name = name_of(keys, start, ratio), *run = NULL;
    if (name) {
        Py_XDECREF(take_run(r, name));
        run = PyErr_Occurred() ? NULL : run_of(start, end, keys, clock);
    }
    int failed = run ? PyDict_SetItem(r->young, name, run) : -1;
    Py_XDECREF(name), Py_XDECREF(run);
    return failed;
}

/* Remember the blocks that left last: one run, though a path often leaves block by block. */
static int run_left(Residency *r)
{
    if (!r->path)
        return 0;
    if (r->clock > r->turn) {
        PyObject *young = PyDict_New();
        if (!young)
            return -1;
        Py_SETREF(r->old, r->young);
        r->young = young;
        r->turn = r->clock + r->window;
    }
    int failed = remember(r, r->path, r->start, r->end, r->clock, r->ratio);
    Py_CLEAR(r->path);
    return failed;
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
    int failed = !evicted || !count || run_left(r) < 0
        || PyDict_SetItemString(evicted, "capacity", count) < 0
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
    Py_CLEAR(r->path);
    PyMem_Free(r->age_at_hit.weights), PyMem_Free(r->age_at_eviction.weights);
    PyMem_Free(r->lifetime.weights), PyMem_Free(r->hits_at_eviction.weights);
}

int residency_stored(Residency *r, PyObject *keys, i64 start, i64 end, i64 ratio)
{
    i64 oldest = r->clock - r->window;
    if (run_left(r) < 0)
        return -1;
    r->stored += end - start;
    while (start < end) {
        PyObject *name = name_of(keys, start, ratio), *run = name ? take_run(r, name) : NULL;
        Py_XDECREF(name);
        if (!run)
            return PyErr_Occurred() ? -1 : 0;
        i64 first, last, clock, stop = -1;
        PyObject *path;
        /* Unlike `run_of` this is slow, for it checks: a run may be one that Python stored. */
        if (PyArg_ParseTuple(run, "LLOL", &first, &last, &path, &clock))
            stop = common_prefix(path, keys, start, last < end ? last : end, ratio);
        int failed = stop < 0;
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
int residency_evicted(Residency *r, PyObject *span, i64 count, i64 now, const i64 *times, i64 ratio)
{
    i64 end = SPAN_INT(span, end), created = SPAN_INT(span, created);
    i64 used = SPAN_INT(span, last_access);
    PyObject *keys = SPAN(span, path_keys);
    r->evicted += count;
    histogram_add(&r->hits_at_eviction, SPAN_INT(span, hit_count), 0, 1, count);
    for (i64 n = 0, next; n < count; n = next) {
        i64 left = times ? times[n] : now;
        for (next = times ? n + 1 : count; next < count && times[next] == left;)
            next++;
        histogram_add(&r->age_at_eviction, left - used, 0, 1, next - n);
        histogram_add(&r->lifetime, left - created, 0, 1, next - n);
    }
    if (keys != r->path || end != r->start) {
        if (run_left(r) < 0)
            return -1;
        r->path = Py_XNewRef(keys);
        r->end = end;
        r->ratio = ratio;
    }
    r->start = end - count;
    r->clock += count;
    return 0;
}
