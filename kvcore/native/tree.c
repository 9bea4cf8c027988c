/* The twin of kvcore/cache/tree.py, and of `open`, `commit` and `close` of kvcache.py.
 *
 * It serves requests without hints, retention priorities or output keys, in a pool that counts,
 * with policies by which no span expires. Each function does what the method of its name does, in
 * the same order, so that plugins hear the same calls.
 */
#include "core.h"

SpanSlots span_slots;
RequestSlots request_slots;

PyObject *big_int(i128 value)
{
    if (value >= INT64_MIN && value <= INT64_MAX)
        return PyLong_FromLongLong((i64)value);
    PyObject *high = PyLong_FromLongLong((i64)(value >> 32)), *result = NULL;
    PyObject *shift = PyLong_FromLong(32), *low = PyLong_FromLongLong((i64)(value & 0xffffffff));
    PyObject *shifted = high && shift ? PyNumber_Lshift(high, shift) : NULL;
    if (shifted && low)
        result = PyNumber_Or(shifted, low);
    Py_XDECREF(high), Py_XDECREF(shift), Py_XDECREF(low), Py_XDECREF(shifted);
    return result;
}

/* Return an integer of Python; -1 with `overflow` set if it has more than 127 bits. */
i128 read_int(PyObject *number, int *overflow)
{
    i64 high = PyLong_AsLongLongAndOverflow(number, overflow);
    if (!*overflow)
        return high;
    PyObject *shifted = PyObject_CallMethod(number, "__rshift__", "i", 64);
    high = shifted ? PyLong_AsLongLongAndOverflow(shifted, overflow) : -1;
    Py_XDECREF(shifted);
    return *overflow ? -1 : (i128)high << 64 | PyLong_AsUnsignedLongLongMask(number);
}

int set_int(PyObject *object, const char *name, i128 value)
{
    PyObject *number = big_int(value);
    int failed = number ? PyObject_SetAttrString(object, name, number) : -1;
    Py_XDECREF(number);
    return failed;
}

int grow_items(void **items, i64 *room, size_t size)
{
    i64 more = *room ? 2 * *room : 64;
    void *moved = PyMem_Realloc(*items, (size_t)more * size);
    if (!moved)
        return no_memory();
    *items = moved;
    *room = more;
    return 0;
}

/* Return an attribute; NULL for None, or with an exception. */
static PyObject *attribute(PyObject *object, const char *name)
{
    PyObject *value = get(object, name);
    if (value == Py_None)
        Py_CLEAR(value);
    return value;
}

static i64 int_attribute(PyObject *object, const char *name)
{
    PyObject *value = get(object, name);
    i64 number = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

/* Plugins: their methods, and what becomes of their exceptions. */

enum { POLICY, INDEX, WATCHER };

static const struct { const char *name; int owner; const char *slot; } HOOK[HOOKS] = {
    {"on_insert", POLICY, "on_insert"}, {"on_access", POLICY, "on_access"},
    {"on_end", POLICY, "on_end"}, {"on_extend", POLICY, "on_extend"},
    {"on_split", POLICY, "on_split"}, {"on_pin", POLICY, "on_pin"},
    {"on_miss", POLICY, "on_miss"}, {"on_release", POLICY, "on_release"},
    {"on_leaf", POLICY, "on_leaf"}, {"on_trim", POLICY, "on_trim"},
    {"on_remove", POLICY, "on_remove"}, {"evictable_blocks", POLICY, "evictable_blocks"},
    {"insert", INDEX, "index_insert"}, {"split", INDEX, "index_split"},
    {"remove", INDEX, "index_remove"}, {"stored", WATCHER, NULL}, {"hit", WATCHER, NULL},
    {"leaving", WATCHER, NULL},
};

/* The exception of a plugin becomes a PolicyError, which ends the use of the cache. */
static int fail(Tree *t, PyObject *plugin, const char *method)
{
    PyObject *error = take_exception();
    PyObject *failure = PyObject_CallMethod(t->tree, "fail", "OsO", plugin, method, error);
    if (failure) {
        PyException_SetCause(failure, Py_NewRef(error));
        PyErr_SetObject((PyObject *)Py_TYPE(failure), failure);
    }
    Py_XDECREF(failure), Py_XDECREF(error);
    return -1;
}

/* A wrong answer of a plugin, likewise. */
static int refuse(Tree *t, PyObject *plugin, PyObject *question, PyObject *why)
{
    PyObject *failure = NULL;
    if (question && why)
        failure = PyObject_CallMethod(t->tree, "refuse", "OOO", plugin, question, why);
    if (failure)
        PyErr_SetObject((PyObject *)Py_TYPE(failure), failure);
    Py_XDECREF(question), Py_XDECREF(why), Py_XDECREF(failure);
    return -1;
}

/* Call a hook, if it is overridden, with one to three arguments. */
static int call(Tree *t, int which, PyObject *one, PyObject *two, PyObject *three)
{
    PyObject *hook = t->hooks[which];
    if (!hook)
        return 0;
    PyObject *arguments[4] = {NULL, one, two, three};
    size_t count = 1 + (two != NULL) + (three != NULL);
    PyObject *result = PyErr_Occurred() ? NULL
        : PyObject_Vectorcall(hook, arguments + 1, count | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    if (!result && HOOK[which].owner != WATCHER)
        return fail(t, HOOK[which].owner == INDEX ? t->index : t->policy, HOOK[which].name);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Tell the watcher of `count` blocks at the end of a span. */
static int watch(Tree *t, int which, PyObject *span, i64 count, PyObject *reason)
{
    PyObject *hook = t->hooks[which];
    PyObject *done = !hook ? NULL : reason
        ? PyObject_CallFunction(hook, "OLOO", span, count, t->now_object, reason)
        : PyObject_CallFunction(hook, "OLO", span, count, t->now_object);
    Py_XDECREF(done);
    return hook && !done ? -1 : 0;
}

static int call_int(Tree *t, int which, PyObject *one, i64 number)
{
    if (!t->hooks[which])
        return 0;
    PyObject *object = PyLong_FromLongLong(number);
    int failed = object ? call(t, which, one, object, NULL) : -1;
    Py_XDECREF(object);
    return failed;
}

int tree_at(Tree *t, i64 now)
{
    if (now == t->now && t->now_object)
        return 0;
    t->now = now;
    return put_int(&t->now_object, now);
}

/* Keys. */

PyObject *key_at(PyObject *keys, i64 place)
{
    if (!there(keys))
        return NULL;
    if (PyList_CheckExact(keys) && (size_t)place < (size_t)PyList_GET_SIZE(keys))
        return Py_NewRef(PyList_GET_ITEM(keys, place));
    return PySequence_GetItem(keys, place);
}

/* Return whether two paths have the same key at `place`; -1 with an exception. */
static int same_key(PyObject *one, PyObject *other, i64 place)
{
    PyObject *a = key_at(one, place), *b = a ? key_at(other, place) : NULL;
    int same = b ? PyObject_RichCompareBool(a, b, Py_EQ) : -1;
    Py_XDECREF(a), Py_XDECREF(b);
    return same;
}

/* `common_prefix` of kvcore/cache/layout.py. */
i64 common_prefix(PyObject *one, PyObject *other, i64 start, i64 end, i64 ratio)
{
    i64 low = start / ratio, high = (end - 1) / ratio;
    if (high <= low)
        return end;
    int same = same_key(one, other, high);
    if (same)
        return same < 0 ? -1 : end;
    while (high - low > 1) {
        i64 middle = (low + high) / 2;
        same = same_key(one, other, middle);
        if (same < 0)
            return -1;
        *(same ? &low : &high) = middle;
    }
    return high * ratio;
}

/* Return what the cache has put into a slot of a span, a new reference, which a plugin that is
 * called cannot free; NULL with an exception that names the slot, if it is not `right`. */
static PyObject *unchanged(Tree *t, PyObject *value, int right, const char *name)
{
    if (right)
        return Py_NewRef(value);
    refuse(t, t->policy, PyUnicode_FromString(name),
           PyUnicode_FromFormat("%R: the cache alone writes it", value ? value : Py_None));
    return NULL;
}

static PyObject *parent_of(Tree *t, PyObject *span)
{
    PyObject *parent = SPAN(span, parent);
    return unchanged(t, parent, parent && Py_TYPE(parent) == span_slots.type,
                     "`parent` of a span in the cache");
}

static PyObject *children_of(Tree *t, PyObject *span)
{
    PyObject *children = SPAN(span, children);
    return unchanged(t, children, children && PyDict_Check(children),
                     "`children` of a span with children");
}

/* Go up, from a reference to `span` to one to its parent. */
static PyObject *climb(Tree *t, PyObject *span)
{
    PyObject *parent = parent_of(t, span);
    Py_DECREF(span);
    return parent;
}

/* For each span from `bottom`, which is in the cache, to below the root. `span` is a reference,
 * for `left` after the loop, or on the way out of it: 0 at the root, -1 elsewhere. */
#define UPWARDS(t, span, bottom)                                                                  \
    for (span = Py_NewRef(bottom); span && span != (t)->root; span = climb(t, span))

static int left(const Tree *t, PyObject *span)
{
    int at_root = span == t->root;
    Py_XDECREF(span);
    return at_root ? 0 : -1;
}

/* Return the child of `span` at a key, borrowed; NULL without one, or with an exception. */
static PyObject *child_at(PyObject *span, PyObject *keys, i64 place)
{
    PyObject *children = SPAN(span, children);
    if (!children || !PyDict_Check(children) || !PyDict_GET_SIZE(children))
        return NULL;
    PyObject *key = key_at(keys, place);
    PyObject *child = key ? PyDict_GetItemWithError(children, key) : NULL;
    Py_XDECREF(key);
    if (child && Py_TYPE(child) != span_slots.type) {
        PyErr_SetString(PyExc_TypeError, "the children of a span are spans");
        return NULL;
    }
    return child;
}

/* Lookup. */

/* `match` of the radix index: return the deepest span that matches, and the position. */
static PyObject *walk(Tree *t, PyObject *keys, i64 limit, PyObject *after, i64 *blocks)
{
    PyObject *span = after;
    i64 position = SPAN_INT(after, end), ratio = t->ratio;
    while (position < limit) {
        PyObject *child = child_at(span, keys, position / ratio);
        if (!child) {
            if (PyErr_Occurred())
                return NULL;
            break;
        }
        i64 end = SPAN_INT(child, end);
        int same = end > limit ? 0 : same_key(keys, SPAN(child, path_keys), (end - 1) / ratio);
        if (same < 0)
            return NULL;
        if (!same) {
            PyObject *path = SPAN(child, path_keys);
            *blocks = common_prefix(path, keys, position, end < limit ? end : limit, ratio);
            return *blocks < 0 ? NULL : Py_NewRef(child);
        }
        span = child;
        position = end;
    }
    *blocks = position;
    return Py_NewRef(span);
}

static PyObject *match(Tree *t, PyObject *keys, i64 limit, PyObject *after, i64 *blocks)
{
    PyObject *span = NULL;
    if (t->walks) {
        span = walk(t, keys, limit, after, blocks);
    } else {
        PyObject *most = PyLong_FromLongLong(limit);
        PyObject *arguments[4] = {NULL, keys, most, after};
        PyObject *answer = most ? PyObject_Vectorcall(
            t->match, arguments + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL) : NULL;
        Py_XDECREF(most);
        if (answer && PyTuple_Check(answer) && PyTuple_GET_SIZE(answer) == 2
            && Py_TYPE(PyTuple_GET_ITEM(answer, 0)) == span_slots.type) {
            *blocks = int_of(PyTuple_GET_ITEM(answer, 1));
            if (!PyErr_Occurred())
                span = Py_NewRef(PyTuple_GET_ITEM(answer, 0));
        } else if (answer) {
            PyErr_Format(PyExc_TypeError, "give a span and a position, not %R", answer);
        }
        Py_XDECREF(answer);
    }
    if (!span)
        fail(t, t->index, "match");
    return span;
}

/* Spans: new ones, splits, pins. */

static PyObject *new_span(Tree *t, i64 start, i64 end, PyObject *parent, i64 pins,
                          PyObject *children, PyObject *path_keys)
{
    PyObject *span = span_slots.type->tp_alloc(span_slots.type, 0);
    if (!span)
        return NULL;
    SPAN(span, parent) = Py_NewRef(parent);
    SPAN(span, children) = Py_NewRef(children ? children : Py_None);
    SPAN(span, priority) = Py_NewRef(t->default_priority);
    SPAN(span, priority_until) = Py_NewRef(Py_None);
    SPAN(span, expires) = Py_NewRef(Py_None);
    SPAN(span, data) = Py_NewRef(Py_None);
    SPAN(span, ids) = Py_NewRef(Py_None);
    SPAN(span, creator) = Py_NewRef(Py_None);
    SPAN(span, geometry) = Py_NewRef(t->geometry);
    SPAN(span, path_keys) = Py_NewRef(path_keys);
    if (SPAN_PUT_INT(span, id, ++t->last_id) < 0 || SPAN_PUT_INT(span, start, start) < 0
        || SPAN_PUT_INT(span, end, end) < 0 || SPAN_PUT_INT(span, ref_count, pins) < 0)
        Py_CLEAR(span);
    return span;
}

static PyObject *split(Tree *t, PyObject *lower, i64 at)
{
    PyObject *keys = SPAN(lower, path_keys), *parent = parent_of(t, lower);
    PyObject *siblings = parent ? children_of(t, parent) : NULL;
    i64 start = SPAN_INT(lower, start), pins = SPAN_INT(lower, ref_count);
    PyObject *first = siblings ? key_at(keys, start / t->ratio) : NULL;
    PyObject *cut = first ? key_at(keys, at / t->ratio) : NULL;
    PyObject *children = PyDict_New(), *upper = NULL;
    if (!cut || !children || PyDict_SetItem(children, cut, lower) < 0)
        goto done;
    upper = new_span(t, start, at, parent, pins + 1, children, keys);
    if (!upper)
        goto done;
#define COPY(name) SPAN(upper, name) = Py_XNewRef(SPAN(lower, name));
    COPY(created) COPY(last_access) COPY(created_order) COPY(last_hit_order) COPY(last_request)
    COPY(released_order) COPY(hit_count) COPY(tenant) COPY(created_by)
#undef COPY
    if (PyDict_SetItem(siblings, first, upper) < 0
        || SPAN_PUT(lower, parent, Py_NewRef(upper)) < 0 || SPAN_PUT_INT(lower, start, at) < 0) {
        Py_CLEAR(upper);
        goto done;
    }
    if (!pins)
        t->unpinned -= at - start;
    if (call(t, INDEX_SPLIT, upper, lower, NULL) < 0 || call(t, ON_SPLIT, upper, lower, NULL) < 0)
        Py_CLEAR(upper);
done:
    Py_XDECREF(first), Py_XDECREF(cut), Py_XDECREF(children);
    Py_XDECREF(parent), Py_XDECREF(siblings);
    return upper;
}

static int pin(Tree *t, PyObject *span)
{
    i64 pins = SPAN_INT(span, ref_count);
    if (SPAN_PUT_INT(span, ref_count, pins + 1) < 0)
        return -1;
    if (pins)
        return 0;
    t->unpinned -= SPAN_INT(span, end) - SPAN_INT(span, start);
    return call(t, ON_PIN, span, NULL, NULL);
}

/* Eviction. */

static int remove_leaf(Tree *t, PyObject *span)
{
    PyObject *parent = parent_of(t, span), *children = parent ? children_of(t, parent) : NULL;
    i64 start = SPAN_INT(span, start), blocks = SPAN_INT(span, end) - start;
    PyObject *key = children ? key_at(SPAN(span, path_keys), start / t->ratio) : NULL;
    int failed = !key || call_int(t, INDEX_REMOVE, span, start) < 0
        || PyDict_DelItem(children, key) < 0;
    Py_XDECREF(key);
    t->cached -= blocks;
    t->unpinned -= blocks;
    failed = failed || call(t, ON_REMOVE, span, t->capacity, NULL) < 0
        || SPAN_PUT(span, parent, Py_NewRef(Py_None)) < 0
        || (!PyDict_GET_SIZE(children) && !SPAN_INT(parent, ref_count)
            && call(t, ON_LEAF, parent, NULL, NULL) < 0);
    Py_XDECREF(parent), Py_XDECREF(children);
    return failed ? -1 : 0;
}

static int trim(Tree *t, PyObject *span, i64 count)
{
    i64 end = SPAN_INT(span, end) - count;
    if (call_int(t, INDEX_REMOVE, span, end) < 0 || SPAN_PUT_INT(span, end, end) < 0)
        return -1;
    t->cached -= count;
    t->unpinned -= count;
    return call_int(t, ON_TRIM, span, count);
}

/* A policy whose victims are the spans released first (`by_release`) is not asked or told: the
 * releases are a queue, from which those that were in vain are dropped late. */

static int is_unused(const Released *entry)
{
    PyObject *span = entry->span;
    return !SPAN_INT(span, ref_count) && SPAN_INT(span, released_order) == entry->order
        && SPAN(span, parent) != Py_None;
}

/* Call `on_release`; or add the span to the queue, without those in vain if that is full. */
static int release(Tree *t, PyObject *span)
{
    if (!t->by_release)
        return call(t, ON_RELEASE, span, t->now_object, NULL);
    if (t->queue_end == t->queue_room) {
        i64 kept = 0;
        for (i64 n = t->queue_first; n < t->queue_end; n++)
            if (is_unused(&t->queue[n]))
                t->queue[kept++] = t->queue[n];
            else
                Py_DECREF(t->queue[n].span);
        t->queue_first = 0;
        t->queue_end = kept;
        if (2 * kept >= t->queue_room
            && grow_items((void **)&t->queue, &t->queue_room, sizeof *t->queue) < 0)
            return -1;
    }
    t->queue[t->queue_end++] = (Released){Py_NewRef(span), t->released};
    return 0;
}

/* Return the victim of the policy, and how many of its blocks may be evicted. */
static PyObject *next_victim(Tree *t, i64 *count)
{
    while (t->queue_first < t->queue_end && !is_unused(&t->queue[t->queue_first]))
        Py_DECREF(t->queue[t->queue_first++].span);
    PyObject *span = PyErr_Occurred() ? NULL
        : !t->by_release ? PyObject_CallOneArg(t->victim, t->now_object)
        : t->queue_first < t->queue_end ? Py_NewRef(t->queue[t->queue_first].span) : NULL;
    if (!span) {
        fail(t, t->policy, "victim");
        return NULL;
    }
    PyObject *children = NULL;
    int is_leaf = Py_TYPE(span) == span_slots.type && SPAN(span, parent) != Py_None
        && SPAN(span, geometry) == t->geometry && !SPAN_INT(span, ref_count);
    if (is_leaf) {
        children = SPAN(span, children);
        is_leaf = children == Py_None
            || (children && PyDict_Check(children) && !PyDict_GET_SIZE(children));
    }
    if (!is_leaf) {
        if (!PyErr_Occurred() && set_int(t->tree, "unpinned_blocks", t->unpinned) == 0)
            refuse(t, t->policy, PyUnicode_FromString("victim()"),
                   PyObject_CallMethod(t->tree, "_why_not", "(O)", span));
        Py_DECREF(span);
        return NULL;
    }
    i64 blocks = *count = SPAN_INT(span, end) - SPAN_INT(span, start);
    if (!t->hooks[EVICTABLE_BLOCKS])
        return span;
    PyObject *answer = PyObject_CallOneArg(t->hooks[EVICTABLE_BLOCKS], span);
    if (!answer) {
        fail(t, t->policy, "evictable_blocks");
        Py_CLEAR(span);
    } else {
        int overflow;
        *count = PyLong_CheckExact(answer) ? PyLong_AsLongLongAndOverflow(answer, &overflow) : 0;
        if (*count < 1 || *count > blocks) {
            refuse(t, t->policy, PyUnicode_FromFormat("evictable_blocks() of %R", span),
                   PyUnicode_FromFormat("%R: give 1 to %lld", answer, blocks));
            Py_CLEAR(span);
        }
    }
    Py_XDECREF(answer);
    return span;
}

/* Evict blocks, victim by victim, each from its tail; they belong to the caller. */
static int evict(Tree *t, i64 blocks, PyObject *requester, const i64 *times)
{
    if (!t->by_release && PyObject_SetAttr(t->policy, t->requester, requester) < 0)
        return -1;
    for (i64 missing = blocks; missing > 0;) {
        i64 count;
        PyObject *span = next_victim(t, &count);
        if (!span)
            return -1;
        if (count > missing)
            count = missing;
        int failed = watch(t, WATCH_LEAVING, span, count, t->capacity);
        t->evicted += count;
        if (!failed && t->residency.object)
            failed = residency_evicted(&t->residency, span, count, t->now,
                                       times ? times + blocks - missing : NULL, t->ratio) < 0;
        missing -= count;
        if (!failed)
            failed = count == SPAN_INT(span, end) - SPAN_INT(span, start) ? remove_leaf(t, span)
                                                                          : trim(t, span, count);
        Py_DECREF(span);
        if (failed)
            return -1;
    }
    return 0;
}

static int allocate(Tree *t, i64 need, PyObject *requester)
{
    i64 missing = need - t->free;
    if (missing <= 0) {
        t->free -= need;
        return 0;
    }
    if (evict(t, missing, requester, NULL) < 0)
        return -1;
    t->free = 0;
    return 0;
}

/* Allocate blocks for `job`, which grows; they are free or evictable. */
int tree_take(Tree *t, Job *job, i64 blocks, i64 now)
{
    PyObject *id = FIELD(job->request, id);
    int failed = !id || tree_at(t, now) < 0 || allocate(t, blocks, id) < 0;
    Py_XDECREF(id);
    return failed ? -1 : 0;
}

/* Evict `blocks` blocks, which become free. */
int tree_free_ahead(Tree *t, i64 blocks, PyObject *requester, i64 now, const i64 *times)
{
    i64 before = t->evicted;
    if (tree_at(t, now) < 0 || evict(t, blocks, requester, times) < 0)
        return -1;
    t->free += t->evicted - before;
    return 0;
}

/* From open to close. */

/* Use the size of keys of the first request. */
static int check_key_tokens(Tree *t, PyObject *request)
{
    PyObject *done = PyObject_CallMethod(t->geometry, "check_key_tokens", "(O)", request);
    Py_XDECREF(done);
    if (!done)
        return -1;
    t->ratio = int_attribute(t->geometry, "ratio");
    t->stride = int_attribute(t->geometry, "_stride");
    t->expected_key_tokens = int_attribute(t->geometry, "_expected");
    return PyErr_Occurred() ? -1 : 0;
}

/* Return the keys of the blocks of a request. */
static PyObject *block_keys(Tree *t, PyObject *request)
{
    PyObject *keys = FIELD(request, keys), *slice = NULL;
    if (keys && strcmp(Py_TYPE(keys)->tp_name, "KeyPrefix") == 0)
        Py_SETREF(keys, get(keys, "view"));
    if (!keys || t->stride == 1)
        return keys;
    PyObject *first = PyLong_FromLongLong(t->stride - 1);
    PyObject *step = PyLong_FromLongLong(t->stride);
    if (first && step)
        slice = PySlice_New(first, NULL, step);
    Py_XDECREF(first), Py_XDECREF(step);
    Py_SETREF(keys, slice ? PyObject_GetItem(keys, slice) : NULL);
    Py_XDECREF(slice);
    return keys;
}

/* Lay the prompt out in blocks, as `BlockLayout.lay_out` does. */
static int lay_out(Tree *t, Job *job)
{
    PyObject *request = job->request;
    i64 tokens = INT_FIELD(request, key_tokens);
    if (PyErr_Occurred() || (tokens != t->expected_key_tokens && check_key_tokens(t, request) < 0)
        || (!job->keys && !(job->keys = block_keys(t, request))))
        return -1;
    i64 keyed = PyObject_Size(job->keys), full = job->prompt / t->size;
    if (keyed < 0)
        return -1;
    keyed *= t->ratio;
    if (t->by_key)
        job->prompt = job->target = (full = keyed) * t->size;
    if (keyed < full)
        full = keyed;
    job->cacheable = job->lookup = full;
    job->limit = t->by_key ? keyed : (job->target - 1) / t->size;
    if (job->limit > full)
        job->limit = full;
    job->tokens = job->target;
    if (t->truncates && (i128)job->tokens > (i128)t->pool * t->size)
        job->tokens = t->pool * t->size;
    job->blocks = ceil_div(job->tokens, t->size);
    return 0;
}

static int record_hit(Tree *t, Job *job, PyObject *id, int resumed)
{
    PyObject *span;
    UPWARDS(t, span, job->span) {
        if (!resumed && t->residency.object)
            histogram_add(&t->residency.age_at_hit, t->now - SPAN_INT(span, last_access), 0, 1,
                          SPAN_INT(span, end) - SPAN_INT(span, start));
        if (SPAN_PUT(span, creator, Py_NewRef(Py_None)) < 0)
            return left(t, span);
        if (!resumed && (SPAN_PUT_INT(span, hit_count, SPAN_INT(span, hit_count) + 1) < 0
                         || SPAN_PUT(span, last_hit_order, Py_NewRef(job->token)) < 0
                         || SPAN_PUT(span, last_request, Py_NewRef(id)) < 0))
            return left(t, span);
        if (SPAN_PUT(span, last_access, Py_NewRef(t->now_object)) < 0)
            return left(t, span);
    }
    if (left(t, span) < 0)
        return -1;
    if (!resumed && t->hooks[ON_ACCESS]) {
        UPWARDS(t, span, job->span) {
            if (call(t, ON_ACCESS, span, t->now_object, NULL) < 0)
                break;
        }
        if (left(t, span) < 0)
            return -1;
    }
    return resumed ? 0 : call(t, WATCH_HIT, job->span, t->now_object, NULL);
}

static void count_admission(Tree *t, const Job *job, i64 hit, int resumed)
{
    if (resumed) {
        t->self_hit_blocks += hit;
        return;
    }
    t->requests++;
    t->lookup_tokens += job->prompt;
    if (!job->cacheable)
        return;
    t->looked_up++;
    t->lookup_blocks += job->cacheable;
    if (!hit)
        return;
    i64 hit_tokens = hit * t->size, rest = job->prompt - 1 - hit_tokens;
    t->hit_blocks += hit;
    t->hit_tokens += hit_tokens;
    t->ratio_sum += (double)hit / (double)job->cacheable;
    if (0 < rest && (i128)rest * hit < hit_tokens)
        t->lost_tokens += rest;
}

/* Return the keys of a job's blocks up to `end`, of which those from `first` on are generated. */
static PyObject *generated_keys(Tree *t, Job *job, i64 first, i64 end)
{
    return PyObject_CallMethod(t->geometry, "generated_keys", "OLL", job->request, first, end);
}

/* The cached prefix of a job that is about to be admitted. */
typedef struct {
    PyObject *span;   /* the last one; the root without a hit */
    PyObject *keys;   /* of its blocks, the generated ones that it has cached included */
    i64 blocks;
    i64 unpinned;     /* of these */
} Hit;

static void clear_hit(Hit *hit)
{
    Py_CLEAR(hit->span);
    Py_CLEAR(hit->keys);
}

/* Go on to the generated blocks that a preempted job has left, as `_match_generated` does. */
static int match_generated(Tree *t, Job *job, Hit *hit)
{
    i64 first = job->prompt / t->size, limit = (job->target - 1) / t->size;
    if (limit <= first || hit->blocks != first || SPAN_INT(hit->span, end) != first)
        return 0;
    PyObject *keys = generated_keys(t, job, first, limit);
    PyObject *child = keys ? child_at(hit->span, keys, first / t->ratio) : NULL;
    if (child) {
        PyObject *span = match(t, keys, limit, hit->span, &hit->blocks);
        if (span) {
            Py_SETREF(hit->span, span);
            Py_SETREF(hit->keys, Py_NewRef(keys));
            job->cacheable = job->limit = limit;
        }
    }
    Py_XDECREF(keys);
    return PyErr_Occurred() ? -1 : 0;
}

/* Find what a job would hit. Changes no block. */
static int find(Tree *t, Job *job, i64 now, Hit *hit)
{
    *hit = (Hit){0};
    if (lay_out(t, job) < 0 || tree_at(t, now) < 0)
        return -1;
    hit->keys = Py_NewRef(job->keys);
    hit->span = match(t, job->keys, job->limit, t->root, &hit->blocks);
    if (hit->span && !hit->blocks)
        Py_SETREF(hit->span, Py_NewRef(t->root));
    if (!hit->span || (job->admitted >= 0 && match_generated(t, job, hit) < 0)) {
        clear_hit(hit);
        return -1;
    }
    i64 end = hit->blocks;
    PyObject *node = Py_NewRef(hit->span);
    while (hit->blocks && node && !SPAN_INT(node, ref_count)) {
        i64 start = SPAN_INT(node, start);
        hit->unpinned += end - start;
        end = start;
        node = climb(t, node);
    }
    Py_XDECREF(node);
    if (!node)
        clear_hit(hit);
    return node ? 0 : -1;
}

/* Return how many blocks of a job would hit; -1 with an exception. */
i64 tree_probe(Tree *t, Job *job, i64 now)
{
    Hit hit;
    if (find(t, job, now, &hit) < 0)
        return -1;
    clear_hit(&hit);
    return hit.blocks;
}

/* Pin what `job` hits, and allocate `need` blocks more. */
static int enter(Tree *t, Job *job, const Hit *hit, i64 need)
{
    PyObject *node, *bottom;
    int resumed = job->admitted >= 0;
    job->admission = ++t->admissions;
    Py_SETREF(job->keys, Py_NewRef(hit->keys));
    if (put_int(&job->token, job->admission) < 0)
        return -1;
    if (hit->blocks < SPAN_INT(hit->span, end)) {
        job->span = split(t, hit->span, hit->blocks);
        if (!job->span)
            return -1;
        bottom = parent_of(t, job->span); /* the upper half is pinned by the split */
    } else {
        job->span = Py_NewRef(hit->span);
        bottom = Py_NewRef(hit->span);
    }
    if (!bottom)
        return -1;
    UPWARDS(t, node, bottom)
        if (pin(t, node) < 0)
            break;
    Py_DECREF(bottom);
    if (left(t, node) < 0)
        return -1;
    if (hit->blocks < job->limit && !resumed && t->hooks[ON_MISS]) {
        PyObject *hits = PyLong_FromLongLong(hit->blocks);
        int failed = hits ? call(t, ON_MISS, job->request, hits, t->now_object) : -1;
        Py_XDECREF(hits);
        if (failed)
            return -1;
    }
    PyObject *id = FIELD(job->request, id);
    int failed = !id || allocate(t, need, id) < 0
        || (job->span != t->root && record_hit(t, job, id, resumed) < 0);
    Py_XDECREF(id);
    if (failed)
        return -1;
    job->computed = job->committed = hit->blocks * t->size;
    job->hit_blocks = job->shared_end = hit->blocks;
    count_admission(t, job, hit->blocks, resumed);
    return 0;
}

/* Admit `job`: pin what it hits, and allocate blocks for its target. 1: there are none. */
int tree_open(Tree *t, Job *job, const Admission *admission, i64 now)
{
    Hit hit;
    if (find(t, job, now, &hit) < 0)
        return -1;
    i64 room = t->free + t->unpinned - hit.unpinned - admission->reserve;
    int full = job->blocks - hit.blocks > room;
    if (admission->most >= 0 && !(full && admission->fits_target)) {
        i64 most = job->target - hit.blocks * t->size;
        if (most > admission->most)
            most = admission->most;
        job->tokens = hit.blocks * t->size + most;
        job->blocks = ceil_div(job->tokens, t->size);
        full = job->blocks - hit.blocks > room;
    }
    int result = full ? 1 : enter(t, job, &hit, job->blocks - hit.blocks);
    clear_hit(&hit);
    return result;
}

/* Allocate private blocks for `tokens` more tokens; they are free or evictable. */
int tree_extend(Tree *t, Job *job, i64 tokens, i64 now)
{
    i64 blocks = ceil_div(job->tokens + tokens, t->size);
    int failed = tree_take(t, job, blocks - job->blocks, now);
    job->tokens += tokens;
    job->blocks = blocks;
    return failed;
}

/* Unpin the path of `job`, leaf to root, and free its private blocks. */
int tree_close(Tree *t, Job *job, i64 now, int ended)
{
    PyObject *span;
    if (tree_at(t, now) < 0)
        return -1;
    t->free += job->blocks - job->shared_end;
    if (ended && call(t, ON_END, job->request, t->now_object, NULL) < 0)
        return -1;
    if (SPAN_PUT(job->span, creator, Py_NewRef(Py_None)) < 0)
        return -1;
    UPWARDS(t, span, job->span) {
        i64 pins = SPAN_INT(span, ref_count) - 1;
        if (SPAN_PUT_INT(span, ref_count, pins) < 0)
            return left(t, span);
        if (pins)
            continue;
        t->unpinned += SPAN_INT(span, end) - SPAN_INT(span, start);
        if (SPAN_PUT_INT(span, released_order, ++t->released) < 0 || release(t, span) < 0)
            return left(t, span);
    }
    if (left(t, span) < 0)
        return -1;
    Py_CLEAR(job->span);
    if (!ended)
        Py_CLEAR(job->keys); /* of generated blocks too, perhaps */
    return PyErr_Occurred() ? -1 : 0;
}

/* Commit: private blocks become shared ones. */

static int note_stored(Tree *t, Job *job, i64 first, i64 end)
{
    return t->residency.object
        ? residency_stored(&t->residency, job->keys, first, end, t->ratio) : 0;
}

/* Move the private blocks of `job` up to `upto` into the tree: into a leaf, or as a child. */
static int store(Tree *t, Job *job, i64 upto)
{
    PyObject *parent = job->span, *span = NULL, *key = NULL, *id = NULL;
    i64 first = job->shared_end;
    if (t->by_block && upto - first > 1) {
        for (i64 end = first + 1; end <= upto; end++)
            if (store(t, job, end) < 0)
                return -1;
        return 0;
    }
    t->cached += upto - first;
    if (SPAN(parent, creator) == job->token && !t->by_block) {
        job->shared_end = upto;
        if (SPAN_PUT_INT(parent, end, upto) < 0
            || note_stored(t, job, first, upto) < 0
            || call_int(t, INDEX_INSERT, parent, first) < 0)
            return -1;
        return call_int(t, ON_EXTEND, parent, upto - first) < 0
            ? -1 : watch(t, WATCH_STORED, parent, upto - first, NULL);
    }
    int failed = -1;
    key = key_at(job->keys, first / t->ratio);
    id = FIELD(job->request, id);
    span = key && id ? new_span(t, first, upto, parent, 1, NULL, job->keys) : NULL;
    if (!span)
        goto done;
    SPAN(span, created) = Py_NewRef(t->now_object);
    SPAN(span, last_access) = Py_NewRef(t->now_object);
    SPAN(span, last_hit_order) = Py_NewRef(job->token);
    SPAN(span, last_request) = Py_NewRef(id);
    SPAN(span, created_by) = Py_NewRef(id);
    SPAN(span, tenant) = FIELD(job->request, tenant);
    if (!SPAN(span, tenant) || SPAN_PUT(span, creator, Py_NewRef(job->token)) < 0
        || SPAN_PUT_INT(span, created_order, ++t->created) < 0
        || SPAN_PUT_INT(span, released_order, 0) < 0 || SPAN_PUT_INT(span, hit_count, 0) < 0)
        goto done;
    PyObject *children = SPAN(parent, children);
    if (!children || !PyDict_Check(children)) {
        children = PyDict_New();
        if (SPAN_PUT(parent, children, children) < 0)
            goto done;
    }
    PyObject *known = PyDict_SetDefault(children, key, span);
    if (!known)
        goto done;
    if (known != span) {
        refuse(t, t->index, PyUnicode_FromString("match()"),
               PyUnicode_FromFormat("no more than %R, which %R continues", parent, known));
        goto done;
    }
    if (SPAN_PUT(parent, creator, Py_NewRef(Py_None)) < 0)
        goto done;
    job->shared_end = upto;
    Py_SETREF(job->span, Py_NewRef(span));
    failed = note_stored(t, job, first, upto) < 0
        || call_int(t, INDEX_INSERT, span, first) < 0
        || call(t, ON_INSERT, span, t->now_object, NULL) < 0
        || watch(t, WATCH_STORED, span, upto - first, NULL) < 0;
done:
    Py_XDECREF(span), Py_XDECREF(key), Py_XDECREF(id);
    return failed ? -1 : 0;
}

/* Pin `child` up to position `stop` for `job`, and free its private blocks there. */
static int switch_to(Tree *t, Job *job, PyObject *child, i64 stop)
{
    Py_INCREF(child);
    if (stop < SPAN_INT(child, end)) {
        Py_SETREF(child, split(t, child, stop));
        if (!child)
            return -1;
    } else if (SPAN_PUT(child, creator, Py_NewRef(Py_None)) < 0 || pin(t, child) < 0) {
        Py_DECREF(child);
        return -1;
    }
    i64 end = SPAN_INT(child, end);
    t->free += end - job->shared_end;
    job->shared_end = end;
    Py_SETREF(job->span, child);
    return 0;
}

/* Replace blocks that `job` has computed by cached ones of the same content. */
static int switch_to_cached(Tree *t, Job *job, i64 upto)
{
    i64 end, depth = 0;
    PyObject *top = Py_NewRef(job->span), *span = match(t, job->keys, upto, top, &end);
    PyObject *path = span ? PyList_New(0) : NULL, *node;
    int failed = path ? 0 : -1;
    for (node = Py_XNewRef(span); !failed && node && node != top; depth++) {
        failed = PyList_Append(path, node);
        node = climb(t, node);
    }
    failed = failed || !node ? -1 : 0;
    Py_XDECREF(node);
    while (!failed && depth--) {
        PyObject *child = PyList_GET_ITEM(path, depth);
        i64 stop = SPAN_INT(child, end);
        failed = switch_to(t, job, child, stop < end ? stop : end);
    }
    Py_XDECREF(span), Py_XDECREF(path), Py_DECREF(top);
    return failed;
}

/* Share the blocks of `job` before position `upto`. */
static int share(Tree *t, Job *job, i64 upto, i64 now)
{
    if (tree_at(t, now) < 0)
        return -1;
    if (upto <= job->shared_end || !t->shares)
        return 0;
    PyObject *cached = child_at(job->span, job->keys, job->shared_end / t->ratio);
    if (cached) {
        if (switch_to_cached(t, job, upto) < 0)
            return -1;
        if (job->shared_end >= upto)
            return 0;
    } else if (PyErr_Occurred()) {
        return -1;
    }
    return store(t, job, upto);
}

/* Count `tokens` more tokens as computed, and share the full blocks with keys. */
int tree_commit(Tree *t, Job *job, i64 tokens, i64 now)
{
    i64 upto = (job->committed += tokens) / t->size;
    return share(t, job, upto < job->cacheable ? upto : job->cacheable, now);
}

/* Share the full blocks that the next `tokens` tokens fill, unless the first is cached. */
int tree_publish(Tree *t, Job *job, i64 tokens, i64 now)
{
    i64 upto = (job->committed + tokens) / t->size;
    if (upto > job->cacheable)
        upto = job->cacheable;
    if (upto <= job->shared_end || child_at(job->span, job->keys, job->shared_end / t->ratio))
        return 0;
    return PyErr_Occurred() ? -1 : share(t, job, upto, now);
}

/* Cache the generated blocks that the first `tokens` tokens of `job` fill. */
int tree_keep_generated(Tree *t, Job *job, i64 tokens, i64 now)
{
    i64 first = job->prompt / t->size, upto = tokens / t->size;
    if (tree_at(t, now) < 0)
        return -1;
    if (first > job->shared_end || job->shared_end >= upto)
        return 0;
    if (PyList_Check(job->keys) && job->cacheable > first) {
        /* The spans of the job refer to this list. */
        PyObject *names = PyObject_CallMethod(t->geometry, "generated_names", "OnL", job->request,
                                              PyList_GET_SIZE(job->keys), upto);
        PyObject *more = names ? PySequence_InPlaceConcat(job->keys, names) : NULL;
        Py_XDECREF(names);
        if (!more)
            return -1;
        Py_DECREF(more);
    } else {
        PyObject *keys = generated_keys(t, job, first, upto);
        if (!keys || SPAN_PUT(job->span, creator, Py_NewRef(Py_None)) < 0) {
            Py_XDECREF(keys);
            return -1;
        }
        Py_SETREF(job->keys, keys);
    }
    job->cacheable = upto;
    return share(t, job, upto, now);
}

/* The state of the cache, before and after. */

int tree_init(Tree *t, PyObject *cache, int known)
{
    t->tree = get(cache, "tree");
    PyObject *pool = get(cache, "pool");
    t->pool = int_attribute(pool, "blocks");
    t->free = int_attribute(pool, "free_blocks");
    Py_XDECREF(pool);
    t->root = attribute(t->tree, "root");
    t->geometry = attribute(t->tree, "geometry");
    t->policy = attribute(t->tree, "eviction");
    t->index = attribute(t->tree, "index");
    PyObject *residency = attribute(t->tree, "residency");
    int failed = residency ? residency_init(&t->residency, residency) : 0;
    Py_XDECREF(residency);
    t->match = attribute(t->tree, "_match");
    t->victim = t->policy ? attribute(t->policy, "victim") : NULL;
    PyObject *watcher = attribute(t->tree, "watcher");
    PyObject *callbacks = attribute(t->tree, "_callbacks");
    for (int which = 0; which < HOOKS && !PyErr_Occurred(); which++)
        if (HOOK[which].slot)
            t->hooks[which] = attribute(callbacks, HOOK[which].slot);
        else if (watcher)
            t->hooks[which] = attribute(watcher, HOOK[which].name);
    /* A watcher hears of each eviction at its time, so that none comes ahead of it. */
    t->fixed_order = !watcher && int_attribute(t->tree, "fixed_order");
    Py_XDECREF(watcher), Py_XDECREF(callbacks);
    if (failed || PyErr_Occurred())
        return -1;
    t->shares = (int)int_attribute(t->tree, "_shares");
    t->by_block = (int)int_attribute(t->tree, "_block_spans");
    t->walks = known & WALKS;
    t->by_release = known & BY_RELEASE;
    if (t->by_release) {
        Py_CLEAR(t->hooks[ON_PIN]);
        Py_CLEAR(t->hooks[ON_REMOVE]);
    }
    t->unpinned = int_attribute(t->tree, "unpinned_blocks");
    t->cached = int_attribute(t->tree, "cached_blocks");
    t->size = int_attribute(t->geometry, "block_size");
    t->by_key = (int)int_attribute(t->geometry, "_counts_keys");
    t->ratio = int_attribute(t->geometry, "ratio");
    t->stride = int_attribute(t->geometry, "_stride");
    PyObject *expected = attribute(t->geometry, "_expected");
    t->expected_key_tokens = expected ? PyLong_AsLongLong(expected) : -1;
    Py_XDECREF(expected);
    t->capacity = PyUnicode_InternFromString("capacity");
    t->requester = PyUnicode_InternFromString("requester");
    t->default_priority = Py_XNewRef(SPAN(t->root, priority));
    return PyErr_Occurred() ? -1 : tree_at(t, int_attribute(cache, "now"));
}

/* Write the counts of the run into the objects of Python, and tell the policy its order. */
int tree_store_back(Tree *t, PyObject *cache)
{
    t->by_release = 0;
    for (i64 n = t->queue_first; n < t->queue_end; n++)
        if (is_unused(&t->queue[n]) && release(t, t->queue[n].span) < 0)
            return -1;
    PyObject *pool = get(cache, "pool");
    PyObject *stats = pool ? get(cache, "stats") : NULL;
    PyObject *sum = stats ? PyFloat_FromDouble(t->ratio_sum) : NULL;
    int failed = !sum || set_int(pool, "free_blocks", t->free) < 0
        || set_int(t->tree, "unpinned_blocks", t->unpinned) < 0
        || set_int(t->tree, "cached_blocks", t->cached) < 0
        || set_int(t->tree, "evicted_blocks", t->evicted) < 0
        || set_int(t->tree, "_last_id", t->last_id) < 0
        || set_int(t->tree, "_created", t->created) < 0
        || set_int(t->tree, "_released", t->released) < 0
        || set_int(t->tree, "_now", t->now) < 0
        || set_int(cache, "now", t->now) < 0
        || set_int(cache, "_last_id", t->admissions) < 0
        || set_int(cache, "_admissions", t->admissions) < 0
#define STORE(name) || set_int(stats, #name, t->name) < 0
        COUNTS(STORE)
#undef STORE
        || PyObject_SetAttrString(stats, "ratio_sum", sum) < 0
        || (t->residency.object && residency_store(&t->residency) < 0);
    Py_XDECREF(pool), Py_XDECREF(stats), Py_XDECREF(sum);
    return failed ? -1 : 0;
}

void tree_clear(Tree *t)
{
    residency_clear(&t->residency);
    while (t->queue_first < t->queue_end)
        Py_DECREF(t->queue[t->queue_first++].span);
    PyMem_Free(t->queue);
    for (int which = 0; which < HOOKS; which++)
        Py_CLEAR(t->hooks[which]);
    PyObject **objects[] = {
        &t->tree, &t->root, &t->geometry, &t->policy, &t->index, &t->match, &t->victim,
        &t->now_object, &t->capacity, &t->requester, &t->default_priority,
    };
    for (size_t n = 0; n < sizeof objects / sizeof *objects; n++)
        Py_CLEAR(*objects[n]);
}
