/* Scores of pairs from the records' own memory: what pairs.py says in numpy, pair by pair.

   A pair's positions are laid out 64 at a time (positions.h), so nothing but the scores leaves the nearest
   cache. A pair's numbers depend on its own answers alone. What this does not take (logits without a
   normaliser, lists longer than ROWS) it says of the pair, and numpy does it. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "positions.h"

#define VERSION 2 /* Raised whenever a bit of what this says changes, here and in compiled.py. */

/* As in schemas/columns.py and pairs.py. */
enum { LOGITS = 1, FORCED = 1 };
enum { NOT_TAKEN = -1, SCORED, NO_POSITION, FORCED_MISMATCH, IDENTITY_MISMATCH, DEFINITION_MISMATCH };
enum { OUTCOME, POSITIONS, INVALID, AGREED, FIRST_DIFFERENCE, ENDED_TOGETHER, COUNTED };
enum { MEASURES = 6, LARGEST = MEASURES, MEASURED };

/* ---- One pair ---- */

/* Sums over positions, one for each place in a vector: `columns` adds whole vectors. */
typedef struct {
    double measured[MEASURED][LANES], valid[LANES];
} sums;

INLINE void add(sums *to, const room *w, int columns) {
    for (int t = 0; t < columns; t += LANES) {
        for (int m = 0; m < MEASURES; m++)
            for (int lane = 0; lane < LANES; lane++) to->measured[m][lane] += w->measured[m][t + lane];
        for (int lane = 0; lane < LANES; lane++) {
            to->measured[LARGEST][lane] = larger(w->measured[0][t + lane], to->measured[LARGEST][lane]);
            to->valid[lane] += w->valid[t + lane];
        }
    }
}

INLINE double summed(const double *lanes) {
    double sum = 0.0;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

INLINE void measure_chunk(room *w, const half *p, const half *q, int n, double eta, sums *to) {
    int low, alike = split(w, p, q, n, &low), others = n - alike;
    if (alike) {
        int columns = fill_up(w->alike, alike);
        lay_ids(&w->p, p, w->alike, columns);
        lay_logs(&w->p, p, w->alike, columns);
        lay_logs(&w->q, q, w->alike, columns);
        measure_alike(w, p->k, alike, columns, eta, low);
        add(to, w, columns);
    }
    if (others) {
        int columns = fill_up(w->others, others), k = p->k > q->k ? p->k : q->k;
        lay_ids(&w->p, p, w->others, columns);
        lay_ids(&w->q, q, w->others, columns);
        lay_logs(&w->p, p, w->others, columns);
        lay_logs(&w->q, q, w->others, columns);
        pad(&w->p, p->k, k, columns);
        pad(&w->q, q->k, k, columns);
        measure_apart(w, p, q, k, others, columns, eta);
        add(to, w, columns);
    }
}

/* The answer from `positions` further on. */
INLINE half from(const half *of, int64_t positions) {
    half rest = *of;
    rest.ids += positions * of->k * (of->wide_ids ? 8 : 4);
    rest.logs += positions * of->k * (of->wide_logs ? 8 : 4);
    rest.tokens += positions * (of->wide_tokens ? 8 : 4);
    return rest;
}

INLINE void measure_pair(room *w, const half *p, const half *q, int64_t stretch, int64_t *counted,
                         double *measured) {
    sums total;
    memset(&total, 0, sizeof total);
    for (int64_t first = 0; first < stretch; first += CHUNK) {
        int n = stretch - first < CHUNK ? (int)(stretch - first) : CHUNK;
        half chunk_p = from(p, first), chunk_q = from(q, first);
        measure_chunk(w, &chunk_p, &chunk_q, n, larger(p->eta, q->eta), &total);
    }
    int64_t valid = (int64_t)summed(total.valid);
    counted[POSITIONS] = valid;
    counted[INVALID] = stretch - valid;
    for (int m = 0; m < MEASURES; m++) measured[m] = valid ? summed(total.measured[m]) / (double)valid : 0.0;
    for (int lane = 0; lane < LANES; lane++)
        measured[LARGEST] = larger(total.measured[LARGEST][lane], measured[LARGEST]);
}

/* The same for every kind of vectors; which of them this processor has is found when the module is loaded. */
typedef void pair_measurer(room *, const half *, const half *, int64_t, int64_t *, double *);
#define MEASURER(name)                                                                     \
    static void name(room *w, const half *p, const half *q, int64_t stretch, int64_t *counted, \
                     double *measured) {                                                   \
        measure_pair(w, p, q, stretch, counted, measured);                                 \
    }
#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#define FOR(vectors) __attribute__((target(vectors)))
#ifdef __clang__ /* It knows no preference, and ignores all that stands beside what it does not know. */
FOR("avx512f,avx512dq,avx512bw,avx512vl") MEASURER(measure_avx512)
#else
FOR("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512") MEASURER(measure_avx512)
#endif
FOR("avx2") MEASURER(measure_avx2)
#endif
MEASURER(measure_baseline)

static struct {
    const char *name;
    pair_measurer *measure;
} kinds[3]; /* That this processor has, the best first. */

static void find_kinds(void) {
    int n = 0;
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        kinds[n].name = "avx512", kinds[n++].measure = measure_avx512;
    if (__builtin_cpu_supports("avx2")) kinds[n].name = "avx2", kinds[n++].measure = measure_avx2;
#endif
    kinds[n].name = "baseline", kinds[n].measure = measure_baseline;
}

/* How many tokens both answers begin with, of the first `length`. */
static int64_t agreed(const half *p, const half *q, int64_t length) {
    size_t bytes = (size_t)length * (p->wide_tokens ? 8 : 4);
    if (p->wide_tokens == q->wide_tokens && !memcmp(p->tokens, q->tokens, bytes)) return length;
    int64_t at = 0;
    while (at < length && read_token(p, at) == read_token(q, at)) at++;
    return at;
}

/* Fill in a pair's numbers; all are 0 before, but first difference and common end: −1. */
static void score_pair(room *w, pair_measurer *measure, const half *p, const half *q, int64_t *counted,
                       double *measured) {
    int like = p->definition == q->definition && p->kind == q->kind;
    counted[OUTCOME] = like ? IDENTITY_MISMATCH : DEFINITION_MISMATCH;
    if (!like || p->identity != q->identity) return;
    counted[OUTCOME] = NOT_TAKEN;
    if (p->kind == LOGITS || p->k > ROWS || q->k > ROWS) return;
    int64_t length = p->length < q->length ? p->length : q->length, same = agreed(p, q, length);
    int differs = same < length, forced = q->source == FORCED;
    int ended = p->ended < q->ended ? p->ended : q->ended;
    counted[AGREED] = same;
    counted[FIRST_DIFFERENCE] = differs ? same : -1;
    counted[ENDED_TOGETHER] = ended < 0 ? -1 : !differs && p->length == q->length && ended == 1;
    int64_t stretch = !differs ? length : forced ? 0 : same + 1;
    if (stretch) measure(w, p, q, stretch, counted, measured);
    counted[OUTCOME] = counted[POSITIONS] ? SCORED : differs && forced ? FORCED_MISMATCH : NO_POSITION;
}

/* ---- Records ---- */

enum { OFFSETS, ENTRY_OFFSETS, K, DEFINITION, KIND, IDENTITY, SOURCE, ENDED, ETA, TOKENS, IDS, LOGS, READ };

/* What is read of `LogitColumns`: `kinds` are letters of the struct module that the items may have. */
static const struct {
    const char *name, *kinds;
} columns_read[READ] = {
    {"offsets", "lq"}, {"entry_offsets", "lq"}, {"k", "B"},      {"definition", "B"},
    {"kind", "B"},     {"identity", "B"},       {"source", "B"}, {"ended", "b"},
    {"eta", "d"},      {"tokens", "ilq"},       {"top_ids", "ilq"}, {"top_logprobs", "fd"},
};

typedef struct {
    Py_buffer view[READ];
    int held; /* How many of them. */
} record;

static Py_ssize_t items(const Py_buffer *view) { return view->len / view->itemsize; }

static int hold(record *to, PyObject *columns) {
    for (; to->held < READ; to->held++) {
        Py_buffer *view = &to->view[to->held];
        const char *name = columns_read[to->held].name;
        PyObject *value = PyObject_GetAttrString(columns, name);
        if (!value) return 0;
        int got = PyObject_GetBuffer(value, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
        Py_DECREF(value);
        if (got < 0) return 0;
        const char *format = view->format + strspn(view->format, "@=<");
        if (strlen(format) != 1 || !strchr(columns_read[to->held].kinds, *format)) {
            PyErr_Format(PyExc_TypeError, "column %s holds items of kind %s", name, view->format);
            to->held++;
            return 0;
        }
    }
    Py_ssize_t n = items(&to->view[K]);
    int fits = items(&to->view[OFFSETS]) == n + 1 && items(&to->view[ENTRY_OFFSETS]) == n + 1 &&
               items(&to->view[IDS]) == items(&to->view[LOGS]);
    for (int at = DEFINITION; at <= ETA; at++) fits &= items(&to->view[at]) == n;
    if (!fits) PyErr_SetString(PyExc_ValueError, "a record's columns differ in length");
    return fits;
}

static int code(const record *of, int column, int64_t event) {
    return ((const uint8_t *)of->view[column].buf)[event];
}

/* One event of a record; 0 if what it says lies outside the record's columns. */
static int find_half(half *to, const record *of, int64_t event) {
    const Py_buffer *view = of->view;
    if (event < 0 || event >= items(&view[K])) return 0;
    int64_t start = read_i8(view[OFFSETS].buf, event), end = read_i8(view[OFFSETS].buf, event + 1);
    int64_t first = read_i8(view[ENTRY_OFFSETS].buf, event), entries = items(&view[IDS]);
    to->k = code(of, K, event);
    if (start < 0 || end < start || end > items(&view[TOKENS]) || first < 0 || first > entries) return 0;
    to->length = end - start;
    if (to->k && to->length > (entries - first) / to->k) return 0;
    to->wide_ids = view[IDS].itemsize == 8;
    to->wide_logs = view[LOGS].itemsize == 8;
    to->wide_tokens = view[TOKENS].itemsize == 8;
    to->ids = (const char *)view[IDS].buf + first * view[IDS].itemsize;
    to->logs = (const char *)view[LOGS].buf + first * view[LOGS].itemsize;
    to->tokens = (const char *)view[TOKENS].buf + start * view[TOKENS].itemsize;
    to->eta = read_f8(view[ETA].buf, event);
    to->definition = code(of, DEFINITION, event);
    to->kind = code(of, KIND, event);
    to->identity = code(of, IDENTITY, event);
    to->source = code(of, SOURCE, event);
    to->ended = ((const int8_t *)view[ENDED].buf)[event];
    return 1;
}

/* ---- The module ---- */

typedef struct {
    record *records;
    int64_t n_records, pairs;
    Py_buffer record, event, counted, measured; /* See `score` in kernel.pyi. */
    int held;
} task;

static int run(const task *of, pair_measurer *measure, room *w) {
    int64_t n = of->pairs;
    for (int64_t at = 0; at < n; at++) {
        half halves[2];
        for (int arm = 0; arm < 2; arm++) {
            int64_t in = read_i8(of->record.buf, arm * n + at), event = read_i8(of->event.buf, arm * n + at);
            if (in < 0 || in >= of->n_records || !find_half(&halves[arm], &of->records[in], event)) return 0;
        }
        int64_t counted[COUNTED] = {[FIRST_DIFFERENCE] = -1, [ENDED_TOGETHER] = -1};
        double measured[MEASURED] = {0};
        score_pair(w, measure, &halves[0], &halves[1], counted, measured);
        for (int i = 0; i < COUNTED; i++) ((int64_t *)of->counted.buf)[i * n + at] = counted[i];
        for (int i = 0; i < MEASURED; i++) ((double *)of->measured.buf)[i * n + at] = measured[i];
    }
    return 1;
}

static int hold_task(task *to, PyObject *records, Py_ssize_t size, PyObject *arrays[4]) {
    static const char *kinds_of[4] = {"lq", "lq", "lq", "d"};
    Py_buffer *views[4] = {&to->record, &to->event, &to->counted, &to->measured};
    for (; to->held < 4; to->held++) {
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (to->held < 2 ? 0 : PyBUF_WRITABLE);
        if (PyObject_GetBuffer(arrays[to->held], views[to->held], flags) < 0) return 0;
        if (!strchr(kinds_of[to->held], *views[to->held]->format) || views[to->held]->itemsize != 8) {
            to->held++;
            PyErr_SetString(PyExc_TypeError, "an array's items are of another kind");
            return 0;
        }
    }
    to->pairs = items(&to->counted) / COUNTED;
    if (items(&to->counted) != to->pairs * COUNTED || items(&to->measured) != to->pairs * MEASURED ||
        items(&to->record) != to->pairs * 2 || items(&to->event) != to->pairs * 2) {
        PyErr_SetString(PyExc_ValueError, "arrays differ in length");
        return 0;
    }
    while (to->n_records < size) { /* There is room for so many, whatever the sequence says now. */
        PyObject *columns = PySequence_GetItem(records, to->n_records);
        int held = columns && hold(&to->records[to->n_records++], columns);
        Py_XDECREF(columns);
        if (!held) return 0;
    }
    return 1;
}

static void let_go(task *of) {
    Py_buffer *views[4] = {&of->record, &of->event, &of->counted, &of->measured};
    for (int64_t at = 0; at < of->n_records; at++)
        while (of->records[at].held) PyBuffer_Release(&of->records[at].view[--of->records[at].held]);
    while (of->held) PyBuffer_Release(views[--of->held]);
    PyMem_Free(of->records);
}

/* Guarded by the interpreter's lock. Fresh memory for every call would cost as much as a few pairs. */
static room *spare;

static int run_unlocked(const task *of, pair_measurer *measure) {
    room *w = spare ? spare : malloc(sizeof(room));
    if (!w) return PyErr_NoMemory() != NULL;
    spare = NULL;
    int inside;
    Py_BEGIN_ALLOW_THREADS
    inside = run(of, measure, w);
    Py_END_ALLOW_THREADS
    if (spare) free(w);
    else spare = w;
    if (!inside) PyErr_SetString(PyExc_IndexError, "an event lies outside its record");
    return inside;
}

static PyObject *score(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *records, *arrays[4];
    int kind = 0;
    if (!PyArg_ParseTuple(args, "OOOOO|i", &records, &arrays[0], &arrays[1], &arrays[2], &arrays[3], &kind))
        return NULL;
    if (kind < 0 || kind >= 3 || !kinds[kind].measure)
        return PyErr_Format(PyExc_IndexError, "this processor has no such vectors");
    Py_ssize_t size = PySequence_Size(records);
    if (size < 0) return NULL;
    task of = {.records = PyMem_Calloc((size_t)size, sizeof(record))};
    if (!of.records) return PyErr_NoMemory();
    int done = hold_task(&of, records, size, arrays) && run_unlocked(&of, kinds[kind].measure);
    let_go(&of);
    return done ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef methods[] = {{"score", score, METH_VARARGS, "See kernel.pyi."}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "kernel", .m_size = -1, .m_methods = methods};

static PyObject *names_of_kinds(void) {
    PyObject *names = PyList_New(0);
    for (int kind = 0; names && kind < 3 && kinds[kind].name; kind++) {
        PyObject *name = PyUnicode_FromString(kinds[kind].name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    PyObject *fixed = names ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    return fixed;
}

PyMODINIT_FUNC PyInit_kernel(void) {
    find_kinds();
    PyObject *module = PyModule_Create(&definition), *names = names_of_kinds();
    if (!module || !names || PyModule_AddObjectRef(module, "VECTORS", names) < 0 ||
        PyModule_AddIntConstant(module, "VERSION", VERSION) < 0 ||
        PyModule_AddIntConstant(module, "ROWS", ROWS) < 0)
        Py_CLEAR(module);
    Py_XDECREF(names);
    return module;
}
