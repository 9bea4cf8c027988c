/* The twin of kvcore_plugins/cache_groups/named_blocks.py: the class `NamedBlocks`.
 *
 * Idle blocks are a list through the array of blocks, as in an `OrderedDict`. The names are
 * numbers, strings and tuples of them, which refer to no cache: the collector of garbage need not
 * visit them.
 */
#include "core.h"

enum { NO_BLOCK = -1, NOT_IDLE = -2 };

typedef struct {
    PyObject *name; /* NULL: the block is bare */
    int group, holders;
    int before, after; /* the neighbours of an idle block, in the order of eviction */
    int younger;       /* the next younger copy of its name */
} Block;

typedef struct {
    PyObject_HEAD
    PyObject *cached; /* by group, a dictionary from names to the oldest block */
    Block *blocks;
    i64 count, room, idle;
    int first, last; /* idle blocks: the one that is evicted next, and the newest */
} NamedBlocks;

/* Return the id of a block that is known; -1 with an exception if `number` is none. */
static int known(NamedBlocks *self, PyObject *number)
{
    i64 block = PyLong_AsLongLong(number);
    if (block >= 0 && block < self->count)
        return (int)block;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "there is no block %lld", block);
    return -1;
}

static int is_list(PyObject *object)
{
    if (PyList_Check(object))
        return 1;
    PyErr_Format(PyExc_TypeError, "a list of blocks is needed, no %s", Py_TYPE(object)->tp_name);
    return 0;
}

static void become_idle(NamedBlocks *self, int id)
{
    Block *block = &self->blocks[id];
    if (block->before != NOT_IDLE)
        return;
    block->before = self->last;
    block->after = NO_BLOCK;
    *(self->last < 0 ? &self->first : &self->blocks[self->last].after) = id;
    self->last = id;
    self->idle++;
}

static int leave_idle(NamedBlocks *self, int id)
{
    Block *block = &self->blocks[id];
    if (block->before == NOT_IDLE) {
        PyErr_Format(PyExc_KeyError, "block %d is not idle", id);
        return -1;
    }
    *(block->before < 0 ? &self->first : &self->blocks[block->before].after) = block->after;
    *(block->after < 0 ? &self->last : &self->blocks[block->after].before) = block->before;
    block->before = block->after = NOT_IDLE;
    self->idle--;
    return 0;
}

static PyObject *grow(NamedBlocks *self, PyObject *number)
{
    i64 count = PyLong_AsLongLong(number);
    if (count == -1 && PyErr_Occurred())
        return NULL;
    if (count > self->room) {
        i64 room = count > 2 * self->room ? count : 2 * self->room;
        Block *blocks = self->blocks;
        if (!PyMem_Resize(blocks, Block, room))
            return PyErr_NoMemory();
        self->blocks = blocks;
        self->room = room;
    }
    for (; self->count < count; self->count++)
        self->blocks[self->count] = (Block){NULL, 0, 0, NOT_IDLE, NOT_IDLE, NO_BLOCK};
    Py_RETURN_NONE;
}

static PyObject *name(NamedBlocks *self, PyObject *arguments)
{
    PyObject *blocks, *names;
    Py_ssize_t group;
    if (!PyArg_ParseTuple(arguments, "O!O!n", &PyList_Type, &blocks, &PyList_Type, &names, &group))
        return NULL;
    PyObject *cached = PyList_GetItem(self->cached, group), *oldest = NULL;
    if (cached && PyList_GET_SIZE(blocks) != PyList_GET_SIZE(names))
        PyErr_SetString(PyExc_ValueError, "as many names as blocks are needed");
    else if (cached)
        oldest = PyList_GetSlice(blocks, 0, PyList_GET_SIZE(blocks));
    for (Py_ssize_t n = 0; oldest && n < PyList_GET_SIZE(oldest); n++) {
        PyObject *own = PyList_GET_ITEM(oldest, n), *given = PyList_GET_ITEM(names, n);
        int id = known(self, own);
        PyObject *first = id < 0 ? NULL : PyDict_SetDefault(cached, given, own);
        int copy = first ? known(self, first) : -1;
        if (copy < 0) {
            Py_DECREF(oldest);
            return NULL;
        }
        Block *block = &self->blocks[id];
        Py_XSETREF(block->name, Py_NewRef(given));
        block->group = (int)group;
        block->holders = 1;
        if (copy == id)
            continue;
        PyList_SetItem(oldest, n, Py_NewRef(first));
        while (self->blocks[copy].younger >= 0)
            copy = self->blocks[copy].younger;
        self->blocks[copy].younger = id;
    }
    return oldest;
}

static PyObject *hold(NamedBlocks *self, PyObject *list)
{
    if (!is_list(list))
        return NULL;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(list); n++) {
        int id = known(self, PyList_GET_ITEM(list, n));
        if (id < 0)
            return NULL;
        if (!self->blocks[id].holders && leave_idle(self, id) < 0)
            return NULL;
        self->blocks[id].holders++;
    }
    Py_RETURN_NONE;
}

static PyObject *release(NamedBlocks *self, PyObject *list)
{
    if (!is_list(list))
        return NULL;
    PyObject *bare = PyList_New(0);
    for (Py_ssize_t n = 0; bare && n < PyList_GET_SIZE(list); n++) {
        PyObject *number = PyList_GET_ITEM(list, n);
        if (PyLong_AsLongLong(number) == NO_BLOCK && !PyErr_Occurred())
            continue;
        int id = known(self, number);
        Block *block = &self->blocks[id < 0 ? 0 : id];
        if (id < 0 || (!block->name && PyList_Append(bare, number) < 0))
            Py_CLEAR(bare);
        else if (block->name && !--block->holders)
            become_idle(self, id);
    }
    return bare;
}

static PyObject *count_idle(NamedBlocks *self, PyObject *list)
{
    if (!is_list(list))
        return NULL;
    i64 count = 0;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(list); n++) {
        int id = known(self, PyList_GET_ITEM(list, n));
        if (id < 0)
            return NULL;
        count += !self->blocks[id].holders;
    }
    return PyLong_FromLongLong(count);
}

static PyObject *pop(NamedBlocks *self, PyObject *number)
{
    i64 count = PyLong_AsLongLong(number);
    if (count > self->idle)
        PyErr_SetString(PyExc_KeyError, "fewer blocks are idle");
    PyObject *victims = PyErr_Occurred() ? NULL : PyList_New(count < 0 ? 0 : count);
    int next = self->first;
    for (i64 n = 0; victims && n < count; n++, next = self->blocks[next].after) {
        PyObject *victim = PyLong_FromLong(next);
        if (victim)
            PyList_SET_ITEM(victims, n, victim);
        else
            Py_CLEAR(victims);
    }
    for (i64 n = 0; victims && n < count; n++)
        leave_idle(self, self->first);
    return victims;
}

/* Called for a block that is to leave before its turn. (`remove` is a function of C.) */
static PyObject *remove_idle(NamedBlocks *self, PyObject *number)
{
    int id = known(self, number);
    return id < 0 || leave_idle(self, id) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *forget(NamedBlocks *self, PyObject *list)
{
    if (!is_list(list))
        return NULL;
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(list); n++) {
        int id = known(self, PyList_GET_ITEM(list, n));
        if (id < 0)
            return NULL;
        Block *block = &self->blocks[id];
        PyObject *cached = PyList_GetItem(self->cached, block->group);
        PyObject *first = block->name ? PyDict_GetItemWithError(cached, block->name) : NULL;
        if (!first && !PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, PyList_GET_ITEM(list, n));
        int older = first ? known(self, first) : -1;
        if (older < 0)
            return NULL;
        if (older != id) {
            while (older >= 0 && self->blocks[older].younger != id)
                older = self->blocks[older].younger;
            if (older < 0)
                return PyErr_Format(PyExc_KeyError, "block %d is no copy of its name", id);
            self->blocks[older].younger = block->younger;
        } else if (block->younger >= 0) {
            PyObject *next = PyLong_FromLong(block->younger);
            int failed = !next || PyDict_SetItem(cached, block->name, next) < 0;
            Py_XDECREF(next);
            if (failed)
                return NULL;
        } else if (PyDict_DelItem(cached, block->name) < 0) {
            return NULL;
        }
        block->younger = NO_BLOCK;
        Py_CLEAR(block->name);
    }
    Py_RETURN_NONE;
}

static PyObject *place(NamedBlocks *self, PyObject *number)
{
    int id = known(self, number);
    if (id < 0)
        return NULL;
    PyObject *own = self->blocks[id].name;
    return Py_BuildValue("(iO)", self->blocks[id].group, own ? own : Py_None);
}

static PyObject *holders(NamedBlocks *self, PyObject *number)
{
    int id = known(self, number);
    return id < 0 ? NULL : PyLong_FromLong(self->blocks[id].holders);
}

static PyObject *iterate(NamedBlocks *self)
{
    PyObject *all = PyList_New(0), *given, *oldest;
    for (Py_ssize_t group = 0; all && group < PyList_GET_SIZE(self->cached); group++) {
        Py_ssize_t next = 0;
        while (all && PyDict_Next(PyList_GET_ITEM(self->cached, group), &next, &given, &oldest))
            for (int id = known(self, oldest); all && id >= 0; id = self->blocks[id].younger) {
                PyObject *entry = Py_BuildValue("(i(nO))", id, group, given);
                if (!entry || PyList_Append(all, entry) < 0)
                    Py_CLEAR(all);
                Py_XDECREF(entry);
            }
    }
    PyObject *iterator = all && !PyErr_Occurred() ? PyObject_GetIter(all) : NULL;
    Py_XDECREF(all);
    return iterator;
}

static PyObject *create(PyTypeObject *type, PyObject *arguments, PyObject *options)
{
    Py_ssize_t groups;
    static char *names[] = {"groups", NULL};
    if (!PyArg_ParseTupleAndKeywords(arguments, options, "n", names, &groups))
        return NULL;
    NamedBlocks *self = (NamedBlocks *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->first = self->last = NO_BLOCK;
    self->cached = PyList_New(0);
    for (Py_ssize_t n = 0; self->cached && n < groups; n++) {
        PyObject *cached = PyDict_New();
        if (!cached || PyList_Append(self->cached, cached) < 0)
            Py_CLEAR(self->cached);
        Py_XDECREF(cached);
    }
    if (self->cached)
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void destroy(NamedBlocks *self)
{
    for (i64 n = 0; n < self->count; n++)
        Py_XDECREF(self->blocks[n].name);
    PyMem_Free(self->blocks);
    Py_XDECREF(self->cached);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *get_idle(NamedBlocks *self, void *closure)
{
    (void)closure;
    return PyLong_FromLongLong(self->idle);
}

static PyMethodDef methods[] = {
#define METHOD(name, function, flags) {name, (PyCFunction)(void (*)(void))function, flags, NULL}
    METHOD("grow", grow, METH_O),
    METHOD("name", name, METH_VARARGS),
    METHOD("hold", hold, METH_O),
    METHOD("release", release, METH_O),
    METHOD("count_idle", count_idle, METH_O),
    METHOD("pop", pop, METH_O),
    METHOD("remove", remove_idle, METH_O),
    METHOD("forget", forget, METH_O),
    METHOD("place", place, METH_O),
    METHOD("holders", holders, METH_O),
#undef METHOD
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"cached", T_OBJECT_EX, offsetof(NamedBlocks, cached), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"idle", (getter)get_idle, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject named_blocks_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "kvcore.native._core.NamedBlocks",
    .tp_doc = "As `kvcore_plugins.cache_groups.named_blocks.NamedBlocks`.",
    .tp_basicsize = sizeof(NamedBlocks),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = create,
    .tp_dealloc = (destructor)destroy,
    .tp_iter = (getiterfunc)iterate,
    .tp_methods = methods,
    .tp_members = members,
    .tp_getset = properties,
};
