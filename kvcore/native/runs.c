/* The runs of block ids as JSON: `encode_runs` of kvcore/trace/fields.py. */
#include "core.h"

/* Bytes of the longest run: `[2147483647,-2147483647],`. */
#define LONGEST 25

static char *add_digits(char *at, unsigned value)
{
    char digits[10];
    int count = 0;
    do
        digits[count++] = '0' + value % 10;
    while (value /= 10);
    while (count)
        *at++ = digits[--count];
    return at;
}

/* Return the runs of an array of ints, each as long as it can be, from left to right. */
PyObject *render_runs(PyObject *module, PyObject *array)
{
    Py_buffer view;
    (void)module;
    if (PyObject_GetBuffer(array, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const int *ids = view.buf;
    i64 count = view.len / (i64)sizeof(int);
    PyObject *text = PyBytes_FromStringAndSize(NULL, LONGEST * count + 2);
    if (text) {
        char *begin = PyBytes_AS_STRING(text), *at = begin;
        *at++ = '[';
        for (i64 first = 0, end; first < count; first = end) {
            i64 step = 0;
            for (end = first + 1; end < count; end++) {
                i64 delta = (i64)ids[end] - ids[end - 1];
                if (end == first + 1 && (delta == 1 || delta == -1))
                    step = delta;
                else if (!step || delta != step)
                    break;
            }
            if (first)
                *at++ = ',';
            *at++ = '[';
            at = add_digits(at, ids[first]);
            *at++ = ',';
            if (step < 0)
                *at++ = '-';
            at = add_digits(at, end - first);
            *at++ = ']';
        }
        *at++ = ']';
        _PyBytes_Resize(&text, at - begin);
    }
    PyBuffer_Release(&view);
    return text;
}
