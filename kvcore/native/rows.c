/* Requests of plain rows: the twin of what kvcore_plugins/workload makes of the rows of a file.
 *
 * A row is plain if it has nothing but what its format must have, in the usual form. Of any other
 * row, and of one with an error, these functions return None: Python reads it.
 */
#include "core.h"

enum { MOST_DIGITS = 18, MOST_KEYS = 1 << 20 };

static const i64 NS = 1000000000;

typedef struct { const char *at, *end; } Text;

static void skip_space(Text *text)
{
    while (text->at < text->end && (*text->at == ' ' || *text->at == '\t' || *text->at == '\r'
                                    || *text->at == '\n'))
        text->at++;
}

static int take(Text *text, char wanted)
{
    int is = text->at < text->end && *text->at == wanted;
    text->at += is;
    return is;
}

/* Read `least` to `most` digits; -1: there are others. */
static i64 digits(Text *text, int least, int most)
{
    i64 number = 0;
    int count = 0;
    for (; text->at < text->end && *text->at >= '0' && *text->at <= '9'; text->at++) {
        if (++count > most)
            return -1;
        number = 10 * number + (*text->at - '0');
    }
    return count < least ? -1 : number;
}

/* Read a whole number of JSON; -1: it is none, or a large one. */
static i64 json_number(Text *text)
{
    const char *first = text->at;
    i64 number = digits(text, 1, MOST_DIGITS);
    return *first == '0' && text->at - first > 1 ? -1 : number;
}

/* Read a list of whole numbers; NULL without an exception: it is none. */
static PyObject *json_numbers(Text *text)
{
    if (!take(text, '['))
        return NULL;
    i64 count = 1;
    const char *end = memchr(text->at, ']', (size_t)(text->end - text->at));
    for (const char *at = text->at; end && at < end; at++)
        count += *at == ',';
    if (!end || count > MOST_KEYS)
        return NULL;
    skip_space(text);
    if (take(text, ']'))
        return PyList_New(0);
    PyObject *list = PyList_New(count);
    for (i64 index = 0; list && index < count; index++) {
        skip_space(text);
        i64 number = text->at < end ? json_number(text) : -1;
        skip_space(text);
        PyObject *key = number >= 0 && take(text, index + 1 < count ? ',' : ']')
            ? PyLong_FromLongLong(number) : NULL;
        if (!key)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, index, key);
    }
    return list;
}

/* Return a copy of the request `pattern` with this id; `keys` is a new reference, or NULL. */
static PyObject *copy_request(PyObject *pattern, PyObject *id, PyObject *keys)
{
    PyTypeObject *type = request_slots.type;
    PyObject *request = Py_TYPE(pattern) == type ? type->tp_alloc(type, 0) : NULL;
    if (!request) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "the pattern of requests is no Request");
        Py_XDECREF(keys);
        return NULL;
    }
    for (Py_ssize_t offset = sizeof(PyObject); offset < type->tp_basicsize;
         offset += (Py_ssize_t)sizeof(PyObject *))
        if (offset != type->tp_weaklistoffset)
            *slot(request, offset) = Py_XNewRef(*slot(pattern, offset));
    put(slot(request, request_slots.id), Py_NewRef(id));
    if (keys)
        put(slot(request, request_slots.keys), keys);
    return request;
}

PyObject *request_like(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "give a pattern, an id, an arrival and keys");
    PyObject *request = copy_request(arguments[0], arguments[1], Py_NewRef(arguments[3]));
    if (request)
        put(slot(request, request_slots.arrival), Py_NewRef(arguments[2]));
    return request;
}

/* The same, with a time and lengths that were read. */
static PyObject *request_of(PyObject *pattern, PyObject *id, i64 arrival, i64 prompt, i64 output,
                            PyObject *keys)
{
    PyObject *request = copy_request(pattern, id, keys);
    if (request && (put_int(slot(request, request_slots.arrival), arrival) < 0
        || put_int(slot(request, request_slots.prompt_tokens), prompt) < 0
        || put_int(slot(request, request_slots.output_tokens), output) < 0))
        Py_CLEAR(request);
    return request;
}

/* Read one field of an object; 1: it is none of `names`, comes twice, or is not plain. */
static int json_field(Text *text, PyObject *names, i64 *numbers, PyObject **keys)
{
    skip_space(text);
    const char *name = text->at + 1;
    const char *end = take(text, '"') ? memchr(name, '"', (size_t)(text->end - name)) : NULL;
    if (!end)
        return 1;
    text->at = end + 1;
    skip_space(text);
    if (!take(text, ':'))
        return 1;
    skip_space(text);
    for (Py_ssize_t index = 0; index < 4; index++) {
        Py_ssize_t length;
        const char *wanted = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(names, index), &length);
        if (!wanted)
            return -1;
        if (length != end - name || memcmp(wanted, name, (size_t)length))
            continue;
        if (index < 3) {
            if (numbers[index] >= 0 || text->at == text->end)
                return 1;
            numbers[index] = json_number(text);
            return numbers[index] < 0;
        }
        if (*keys)
            return 1;
        *keys = json_numbers(text);
        return *keys ? 0 : PyErr_Occurred() ? -1 : 1;
    }
    return 1;
}

PyObject *json_request(PyObject *module, PyObject *arguments)
{
    PyObject *names, *pattern, *id, *keys = NULL;
    i64 factor, numbers[3] = {-1, -1, -1};
    Text text;
    Py_ssize_t length;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!OLy#O", &PyTuple_Type, &names, &pattern, &factor, &text.at,
                          &length, &id))
        return NULL;
    if (PyTuple_GET_SIZE(names) != 4)
        return PyErr_Format(PyExc_ValueError, "give four names");
    text.end = text.at + length;
    skip_space(&text);
    int other = !take(&text, '{');
    do {
        other = other ? other : json_field(&text, names, numbers, &keys);
        skip_space(&text);
    } while (!other && take(&text, ','));
    other = other ? other : !take(&text, '}');
    skip_space(&text);
    i64 key_tokens = !other && Py_TYPE(pattern) == request_slots.type
        ? INT_FIELD(pattern, key_tokens) : 0;
    if (!other && text.at == text.end && keys && numbers[0] >= 0 && numbers[1] > 0
        && numbers[2] >= 0 && factor > 0 && numbers[0] <= (INT64_MAX - 1) / factor
        && (i128)(PyList_GET_SIZE(keys) - 1) * key_tokens < numbers[1]) {
        return request_of(pattern, id, numbers[0] * factor, numbers[1], numbers[2], keys);
    }
    Py_XDECREF(keys);
    return other < 0 || PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Read `2023-11-16 18:15:46.6805900` as ns since 1970; -1: it is another text. */
static i64 moment(Text *text)
{
    static const int LENGTHS[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    static const char AFTER[] = "-- ::";
    i64 parts[6];
    const char *first = text->at;
    for (int index = 0; index < 6; index++) {
        parts[index] = digits(text, index ? 2 : 4, index ? 2 : 4);
        if (parts[index] < 0 || (index < 5 && !take(text, AFTER[index])))
            return -1;
    }
    i64 year = parts[0], month = parts[1], day = parts[2], fraction = 0;
    if (text->at - first != 19 || year < 1970 || year > 2199 || month < 1 || month > 12 || day < 1
        || parts[3] > 23 || parts[4] > 59 || parts[5] > 59)
        return -1;
    int leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    if (day > LENGTHS[month - 1] + (leap && month == 2))
        return -1;
    if (take(text, '.')) {
        const char *begin = text->at;
        fraction = digits(text, 1, 9);
        if (fraction < 0)
            return -1;
        for (i64 count = text->at - begin; count < 9; count++)
            fraction *= 10;
    }
    i64 before = year - 1;
    i64 days = 365 * (year - 1970) + before / 4 - before / 100 + before / 400 - 477 + day - 1;
    for (int index = 0; index < month - 1; index++)
        days += LENGTHS[index] + (leap && index == 1);
    return ((days * 24 + parts[3]) * 60 + parts[4]) * 60 * NS + parts[5] * NS + fraction;
}

PyObject *csv_request(PyObject *module, PyObject *arguments)
{
    PyObject *pattern, *id;
    i64 cells[3];
    int order[3];
    Text text;
    Py_ssize_t length;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "(iii)Oy#O", &order[0], &order[1], &order[2], &pattern,
                          &text.at, &length, &id))
        return NULL;
    text.end = text.at + length;
    int plain = 1;
    for (int index = 0; plain && index < 3; index++) {
        i64 cell = order[0] == index ? moment(&text) : digits(&text, 1, MOST_DIGITS);
        plain = cell >= 0 && (index == 2 || take(&text, ','));
        cells[index] = cell;
    }
    skip_space(&text);
    for (int index = 0; index < 3; index++)
        plain = plain && order[index] >= 0 && order[index] < 3;
    if (!plain || text.at != text.end || cells[order[1]] < 1)
        Py_RETURN_NONE;
    return request_of(pattern, id, cells[order[0]], cells[order[1]], cells[order[2]], NULL);
}
