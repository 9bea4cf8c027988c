/* What the files of the core share: Python objects by their slots, the tree, the jobs.
 *
 * The core runs the serving loop of `kvcore/serving/loop.py` on the same objects: spans, the
 * dictionaries of their children, policies and indexes are those of Python, whose `__slots__` it
 * reads and writes in place. Jobs and the decode batch are its own while it runs.
 *
 *     tree.c           kvcore/cache/tree.py, and `open`, `commit` and `close` of kvcache.py
 *     residency.c      kvcore/cache/residency.py and kvcore/histogram.py
 *     decode_batch.c   kvcore/serving/decode_batch.py, and the step times of latency.py
 *     untimed.c        kvcore_replay/untimed.py
 *     named_blocks.c   kvcore_plugins/cache_groups/named_blocks.py
 *     rows.c           plain rows of kvcore_plugins/workload
 *     stats.c          kvcore/serving/stats.py
 *     batcher.c        kvcore/serving/batcher.py, waiting.py
 *     arrivals.c       `Arrivals` of kvcore/serving/loop.py
 *     loop.c           kvcore/serving/loop.py
 *     runs.c           the runs of block ids in kvcore/trace/fields.py
 *     module.c         the module `_core`: from Python, and back
 *
 * Functions that return int return 0, or -1 with a Python exception set.
 */
#ifndef KVCORE_CORE_H
#define KVCORE_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <stdint.h>

typedef long long i64;
typedef __int128 i128; /* picoseconds: their sums pass 2^63 after 106 days */

/* Slots of Python objects. */

#define SPAN_SLOTS(X)                                                                             \
    X(id) X(start) X(end) X(parent) X(ref_count) X(children) X(created) X(last_access)            \
    X(created_order) X(last_hit_order) X(last_request) X(released_order) X(hit_count) X(priority) \
    X(priority_until) X(expires) X(tenant) X(data) X(geometry) X(path_keys) X(ids) X(creator)     \
    X(created_by)

#define REQUEST_SLOTS(X)                                                                          \
    X(id) X(arrival) X(prompt_tokens) X(output_tokens) X(keys) X(key_tokens) X(tenant) X(slo)     \
    X(retention) X(hints) X(session) X(after) X(output_keys)

#define OFFSET(name) Py_ssize_t name;
typedef struct { PyTypeObject *type; SPAN_SLOTS(OFFSET) } SpanSlots;
typedef struct { PyTypeObject *type; REQUEST_SLOTS(OFFSET) } RequestSlots;
#undef OFFSET

extern SpanSlots span_slots;
extern RequestSlots request_slots;

static inline PyObject **slot(PyObject *object, Py_ssize_t offset)
{
    return (PyObject **)((char *)object + offset);
}

#define SPAN(span, name) (*slot(span, span_slots.name))

/* A plugin may put anything into a slot of a span, or delete it: the value, or NULL with an
 * exception. */
static inline PyObject *there(PyObject *value)
{
    if (!value)
        PyErr_SetString(PyExc_AttributeError, "an attribute of a span was deleted");
    return value;
}

/* Return the integer of a slot; -1 with an exception if something else is there. */
static inline i64 int_of(PyObject *value)
{
    return there(value) ? PyLong_AsLongLong(value) : -1;
}

#define SPAN_INT(span, name) int_of(SPAN(span, name))

/* Put `value`, a new reference, into a slot. */
static inline int put(PyObject **at, PyObject *value)
{
    PyObject *before = *at;
    if (!value)
        return -1;
    *at = value;
    Py_XDECREF(before);
    return 0;
}

static inline int put_int(PyObject **at, i64 value) { return put(at, PyLong_FromLongLong(value)); }

#define SPAN_PUT(span, name, value) put(&SPAN(span, name), value)
#define SPAN_PUT_INT(span, name, value) put_int(&SPAN(span, name), value)

/* Return an attribute; NULL with an exception, also if there was one before. */
static inline PyObject *get(PyObject *object, const char *name)
{
    return object && !PyErr_Occurred() ? PyObject_GetAttrString(object, name) : NULL;
}

/* Take the exception that is set; it has its traceback. */
static inline PyObject *take_exception(void)
{
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type), Py_XDECREF(traceback);
    return error;
#endif
}

PyObject *big_int(i128 value);
i128 read_int(PyObject *number, int *overflow);
int set_int(PyObject *object, const char *name, i128 value);

static inline int no_memory(void)
{
    PyErr_NoMemory();
    return -1;
}

/* Room for one more item. */
#define GROW(items, count, room)                                                                  \
    ((count) < (room) ? 0 : grow_items((void **)&(items), &(room), sizeof *(items)))

int grow_items(void **items, i64 *room, size_t size);

/* Return a field of a request: by its slot, or as any other attribute. */
static inline PyObject *field(PyObject *request, Py_ssize_t offset, const char *name)
{
    if (Py_TYPE(request) == request_slots.type && *slot(request, offset))
        return Py_NewRef(*slot(request, offset));
    return get(request, name);
}

#define FIELD(request, name) field(request, request_slots.name, #name)

static inline i64 int_field(PyObject *request, Py_ssize_t offset, const char *name)
{
    PyObject *value = field(request, offset, name);
    i64 number = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

#define INT_FIELD(request, name) int_field(request, request_slots.name, #name)

/* Jobs. */

typedef struct Job Job;
typedef struct { Job *before, *after; } Link;

enum { WAITING, PREFILL, DECODE, DONE };

/* A job, and its sequence while it has one (`span`). Times are ns, lengths tokens; -1: none. */
struct Job {
    PyObject *request;
    PyObject *keys;      /* of its blocks; NULL until it is laid out */
    PyObject *python;    /* its `Job`, for a scheduler that asked for it; NULL: none did */
    PyObject *rank;      /* its priority; NULL: its order of arrival */
    PyObject *verdict;   /* its SLO, or NULL */
    i64 serial, arrival, prompt, output, target, computed, hit, admitted, first_token;
    i128 last_token_ps;
    i64 generated_before, joined, recomputes;
    int stage, is_victim, is_fresh, is_served, has_left;
    i64 visible;         /* from when on a plan sees it */
    /* Its sequence. */
    PyObject *span;
    PyObject *token;     /* stands for the sequence in `Span.creator`: its `admission` */
    i64 admission, cacheable, lookup, limit, blocks, tokens, hit_blocks, shared_end;
    i64 committed;       /* tokens that count as computed for the cache */
    /* Its places: among the running, the prefilling, and in the batch. */
    Link running, prefilling, batch;
    i64 end, residue;
};

typedef struct { Job *first, *last; i64 count; } List;

#define LIST_ADD(list, job, link)                                                                 \
    do {                                                                                          \
        (job)->link.before = (list)->last;                                                        \
        (job)->link.after = NULL;                                                                 \
        *((list)->last ? &(list)->last->link.after : &(list)->first) = (job);                     \
        (list)->last = (job);                                                                     \
        (list)->count++;                                                                          \
    } while (0)

#define LIST_REMOVE(list, job, link)                                                              \
    do {                                                                                          \
        Job *before_ = (job)->link.before, *after_ = (job)->link.after;                           \
        *(before_ ? &before_->link.after : &(list)->first) = after_;                              \
        *(after_ ? &after_->link.before : &(list)->last) = before_;                               \
        (list)->count--;                                                                          \
    } while (0)

static inline i64 ceil_div(i64 value, i64 by) { return (value + by - 1) / by; }

/* residency.c */

typedef struct { i64 *weights, bucket; i128 weight, total, high; } Histogram; /* the last bucket */

int histogram_borders(PyObject *list);
int histogram_init(Histogram *histogram);
void histogram_add(Histogram *histogram, i128 first, i128 slope, i64 count, i64 weight);
int histogram_store(Histogram *histogram, PyObject *object, const char *name);

typedef struct {
    PyObject *object, *refaults, *young, *old;
    Histogram age_at_hit, age_at_eviction, lifetime, hits_at_eviction;
    i64 window, turn, clock, refaulted, stored, evicted;
    PyObject *path; i64 start, end, ratio; /* the blocks that left last; NULL: none */
} Residency;

int residency_init(Residency *residency, PyObject *object);
int residency_store(Residency *residency);
void residency_clear(Residency *residency);
int residency_stored(Residency *residency, PyObject *keys, i64 start, i64 end, i64 ratio);
int residency_evicted(Residency *residency, PyObject *span, i64 count, i64 now, const i64 *times,
                      i64 ratio);

/* tree.c */

PyObject *key_at(PyObject *keys, i64 place);
i64 common_prefix(PyObject *one, PyObject *other, i64 start, i64 end, i64 ratio);

enum { ON_INSERT, ON_ACCESS, ON_END, ON_EXTEND, ON_SPLIT, ON_PIN, ON_MISS, ON_RELEASE, ON_LEAF,
       ON_TRIM, ON_REMOVE, EVICTABLE_BLOCKS, INDEX_INSERT, INDEX_SPLIT, INDEX_REMOVE,
       WATCH_STORED, WATCH_HIT, WATCH_LEAVING, HOOKS };

/* The whole numbers of `CacheStats`. */
#define COUNTS(X)                                                                                 \
    X(requests) X(lookup_blocks) X(hit_blocks) X(lookup_tokens) X(hit_tokens) X(self_hit_blocks)  \
    X(lost_tokens) X(looked_up)

typedef struct { PyObject *span; i64 order; } Released; /* its `released_order` then */

typedef struct {
    PyObject *tree, *root, *geometry, *policy, *index;
    PyObject *hooks[HOOKS];     /* NULL: not overridden */
    PyObject *match, *victim;   /* of the index, and of the policy */
    Residency residency;        /* without an object: nothing is counted */
    PyObject *now_object, *capacity, *requester, *default_priority;
    Released *queue; i64 queue_first, queue_end, queue_room;
    int walks, by_release, shares, by_block, fixed_order, by_key;
    int truncates;              /* whether a prompt may be longer than the pool */
    i64 size, ratio, stride, expected_key_tokens;
    i64 pool, free, unpinned, cached, evicted, last_id, created, released, admissions, now;
#define COUNT(name) i64 name;
    COUNTS(COUNT)
#undef COUNT
    double ratio_sum;
} Tree;

/* What an admission takes, and what it leaves. */
typedef struct {
    i64 reserve;     /* blocks that stay free or evictable */
    i64 most;        /* tokens after the hit that get blocks; -1: all */
    int fits_target; /* whether there must be room for all, even if fewer get blocks */
} Admission;

enum { WALKS = 1, BY_RELEASE = 2 }; /* what the core does for the index and for the policy */

int tree_init(Tree *tree, PyObject *cache, int known);
int tree_store_back(Tree *tree, PyObject *cache);
void tree_clear(Tree *tree);
int tree_at(Tree *tree, i64 now);
int tree_open(Tree *tree, Job *job, const Admission *admission, i64 now); /* 1: no blocks */
i64 tree_probe(Tree *tree, Job *job, i64 now);               /* blocks that would hit */
int tree_take(Tree *tree, Job *job, i64 blocks, i64 now);
int tree_extend(Tree *tree, Job *job, i64 tokens, i64 now);
int tree_commit(Tree *tree, Job *job, i64 tokens, i64 now);
int tree_publish(Tree *tree, Job *job, i64 tokens, i64 now);
int tree_keep_generated(Tree *tree, Job *job, i64 tokens, i64 now);
int tree_close(Tree *tree, Job *job, i64 now, int ended);
int tree_free_ahead(Tree *tree, i64 blocks, PyObject *requester, i64 now, const i64 *times);

/* decode_batch.c */

typedef struct { i128 first, slope; } Line;

#define MOST_LINES 8

typedef struct { int count; Line lines[MOST_LINES]; } Times;

typedef struct { i64 end, admission; Job *job; } End;

typedef struct {
    Tree *tree;
    List jobs;                                  /* in the order in which they joined */
    i64 steps, context, block_size;
    i128 last_step_ps;
    Job **growing; i64 growing_room;            /* by (residue, admission) */
    End *ends; i64 ends_count, ends_room;       /* a heap */
    Job **fresh; i64 fresh_count, fresh_room;
    i64 allocated_until;
    i64 served;                                 /* jobs with `is_served`: see DecodeAllocator */
    int commits;                                /* whether jobs commit each block they fill, */
    i64 ahead;                                  /* so many steps before the one that fills it */
    int (*grown)(void *core, Job *job, i64 now); /* called with each job that got a block */
    void *core;
    Histogram gaps;                             /* the times between tokens */
} Batch;

int batch_init(Batch *batch, Tree *tree);
void batch_clear(Batch *batch);
int batch_add(Batch *batch, Job *job, i64 generated);
void batch_remove(Batch *batch, Job *job);
i128 batch_run(Batch *batch, i128 start, i128 first, i128 slope, i64 steps);
int batch_jump(Batch *batch, const Times *lines, i128 clock, i64 event, i64 *steps, i128 *took);
int batch_next_step(Batch *batch, i64 now);     /* 1: there is no room */
Job **batch_committers(const Batch *batch, i64 *count); /* before the next step */
int batch_serve_first(Batch *batch, i64 now);
void batch_settle(Batch *batch, Job *job);
void settle(const Batch *batch, Job *job, i64 tokens);
Job *batch_pop_finished(Batch *batch);

static inline i64 generated_of(const Batch *batch, const Job *job)
{
    return job->generated_before + (job->joined < 0 ? 0 : batch->steps - job->joined);
}

static inline i64 length_of(const Batch *batch, const Job *job)
{
    i64 generated = generated_of(batch, job);
    return generated ? job->prompt + generated - 1 : job->computed;
}

/* The loop. */

enum { ROWS = 1 << 16, SAMPLES = 512 };

#define NEVER INT64_MAX

/* The columns of a `RunLog` with numbers, by their types. */
#define COLUMNS(X)                                                                                \
    X(i64, arrival) X(i64, admitted) X(i64, first_token) X(i64, finish) X(i64, prompt)            \
    X(i64, output) X(i64, hit) X(i64, loaded) X(int, swaps) X(int, pauses) X(int, recomputes)     \
    X(signed char, verdict)

typedef struct {
    PyObject *ids, *tenants;   /* lists */
    i64 count, all;            /* rows here, and in the whole run */
#define COLUMN(type, name) type *name;
    COLUMNS(COLUMN)
#undef COLUMN
} Rows;

typedef struct { Job *job; i64 tokens; } Chunk;

/* A job that has filled a block in the step that ran, its sequence by admission, its length. */
typedef struct { Job *job; i64 admission, length; } Filled;

typedef struct {
    i64 now, active, cached, due, interval, peak, count;
    i128 active_area, cached_area;
    i64 times[SAMPLES];
    int actives[SAMPLES], cacheds[SAMPLES];
} Timeline;

/* The time of steps with prefill: that of `Roofline.pieces`, or asked for step by step. */
typedef struct {
    PyObject *duration, *work_type;       /* of any latency model */
    PyObject *by_tokens;                  /* NULL: it has no such terms */
    i64 overhead, read, sequence, pair;
    i128 *known; i64 known_count;         /* by tokens; -1: not asked for yet */
} StepTime;

typedef struct {
    PyObject *loop, *cache, *log, *arrivals, *iterator, *priority, *lines_of;
    PyObject *slo;                        /* of requests without one; NULL: none */
    Tree tree;
    Batch batch;
    Rows rows;
    Timeline timeline;
    StepTime time;
    Times *lines; i64 lines_count;        /* of decode steps, by number of jobs; count 0: unknown */
    i64 max_tokens, max_seqs, reserve, longest;
    int mixed, after_preemption, last_of_ties;
    /* Rules of engines: see `Rules`. */
    i64 max_chunk, in_one;                /* -1: no limit */
    int chunked, alone, by_chunk, fits_prompt, publishes, keeps, has_lag;
    i64 frontend;
    i128 clock, busy;
    i64 steps, serial, own_slos;
    /* Arrivals. */
    PyObject *next_request;               /* NULL: none, or they are with Python again */
    i64 next_at, came, last, first_number, next_number;
    i128 scale_above, scale_below;
    int in_python, has_named;
    int leaves;                           /* a request or a time needs what the core lacks */
    /* Jobs. */
    Job **heap; i64 heap_room;            /* waiting ones by rank */
    List waiting, running, prefilling;    /* the waiting ones as they queued up */
    List unseen;                          /* have arrived, and cannot be planned yet */
    Chunk *chunks; i64 chunk_count, chunk_room;
    Chunk *unpublished; i64 unpublished_count, unpublished_room; /* shared once all are planned */
    Job **ongoing; i64 ongoing_room;
    Job *blocked, **done; i64 done_count, done_room, victims, without_progress;
    i64 budget;
    int changed;
    /* `Lag`: the last step or jump, and the jobs that it has finished. */
    i128 began;
    int stepped;
    Job **late; i64 late_count, late_room;
    Filled *filled; i64 filled_count, filled_room;
} Core;

/* stats.c */

int log_ended(Core *core, Job *job, i64 now);       /* at -1: it was rejected */
int flush_rows(Core *core);
void record_plan(Core *core, i64 now);
int store_timeline(Core *core);

/* batcher.c */

void free_job(Job *job);
PyObject *job_state(Job *job);
int queue(Core *core, Job *job, i64 now, int front);
int plan(Core *core, i64 now);                      /* 1: not only growth has happened */
void computed(Core *core);
int finish_job(Core *core, Job *job, i64 now, int complete);
int publish_filled(void *core, Job *job, i64 now);

/* arrivals.c */

extern PyObject *no_hints;

int is_plain(PyObject *request, int timed);
int read_next(Core *core);
int ask_next(Core *core);
int take_arrivals(Core *core, i64 now);
int queue_seen(Core *core, i64 now);
int schedule_followers(Core *core, Job *job, i64 now);
int give_back_arrivals(Core *core, PyObject *request, i64 at);

/* loop.c */

int run(Core *core, i64 turns);                     /* 1: Python goes on */

/* untimed.c */

PyObject *untimed_replay(PyObject *module, PyObject *arguments);

/* rows.c */

extern PyTypeObject named_blocks_type;

PyObject *render_runs(PyObject *module, PyObject *array);
PyObject *request_like(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *json_request(PyObject *module, PyObject *arguments);
PyObject *csv_request(PyObject *module, PyObject *arguments);

#endif
