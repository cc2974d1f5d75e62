/* Positions of two answers laid side by side, one column each: memory, arithmetic, and reading into it.

   Every loop `for t` runs over columns, so that compilers make vectors of it. The same bits on every machine:
   only + − · / and square roots, in the order written; logarithms and exponentials are built of these. So
   this must be compiled with -ffp-contract=off, and without -ffast-math. */

#ifndef KLAXON_COLUMNS_H
#define KLAXON_COLUMNS_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWS 24     /* Longest list: 20 alternatives are the most engines give, and the emitted token. */
#define CHUNK 64    /* Positions at a time: what they need stays in the nearest cache. */
#define COLUMNS 72  /* CHUNK, and a line: rows a power of two apart would share their places in the cache. */
#define LANES 8     /* Columns are filled up to a multiple of the widest vector. */
#define INLINE static inline __attribute__((always_inline))

/* As in lists.py, measures.py, completion.py, schemas/columns.py and schemas/validity.py. */
#define LEAST (-660.0)
#define PAD (-700.0)
#define TINY 1e-305
#define LOG_TINY (-702.2884533631018)
#define LOG_FLOOR (-20.72326583694641)
#define LOWEST (LOG_FLOOR + 0.01)
#define LOG_2 0.6931471805599453
#define ROUNDING 1e-14
#define LOG_HALF (-0.6931471805599453)
#define LOGPROB_SLACK 1e-3
#define MASS_SLACK 1e-3
#define NOT_LISTED (-1)
#define NOT_LISTED_LOGPROB (-9999.0)

typedef double column[COLUMNS];

typedef struct {
    int64_t id[ROWS][COLUMNS];
    column log[ROWS], p[ROWS]; /* Log-probabilities, PAD where an entry is none, and their exponentials. */
    column only[ROWS];         /* p where the other arm lacks the token, else 0. */
    column lacks, total, largest;
    column log_cap, cap;       /* The most an unlisted token can hold. */
    column rest, plus, after;  /* Mass not listed; the same when all of the other's own are at the cap. */
    column floor;              /* Logarithm of what `kl_floor` gives a token that is not listed. */
    column ratio;              /* Of the other arm's rest to what fills it: s for P's own, t for Q's. */
} arm;

typedef struct {
    arm p, q;
    column q_of[ROWS], log_ratio[ROWS]; /* Along P's list: Q's probability, and log q − log p. */
    column squares_p, squares_q, common, own, on_p, on_q, mean, apart, lifted, agree;
    int64_t bad[COLUMNS];
    column valid, measured[6];
    int alike[COLUMNS], others[COLUMNS];
} room;

/* One arm's answer: where its first position's entries and tokens stand. They may not be aligned. */
typedef struct {
    const char *ids, *logs, *tokens;
    int wide_ids, wide_logs, wide_tokens, k;
    int64_t length;
    double eta;
    int definition, kind, identity, source, ended;
} half;

/* ---- Arithmetic ---- */

INLINE double larger(double a, double b) { return a > b ? a : b; }
INLINE double smaller(double a, double b) { return a < b ? a : b; }

INLINE uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE double of_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* For −708 ≤ x ≤ 709, to 1 unit in the last place. x = n·log 2 + r; adding `shift` rounds to a whole n and
   leaves it in the last bits. The polynomial is interpolated at Chebyshev points, to 2e-17; terms are paired
   so that one need not wait for the other. */
INLINE double exp_of(double x) {
    const double shift = 0x1.8p52;
    double shifted = x * 0x1.71547652b82fep+0 + shift, n = shifted - shift;
    double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
    double square = r * r, fourth = square * square;
    double low = 0x1.0000000000001p-1 + r * 0x1.5555555555556p-3;
    double next = 0x1.5555555553d37p-5 + r * 0x1.11111111109a6p-7;
    double high = 0x1.6c16c1789d1d7p-10 + r * 0x1.a01a01a7cebcdp-13;
    double higher = 0x1.a019b8ca26fcfp-16 + r * 0x1.71de0d85293b8p-19;
    double highest = 0x1.2891d4ffbb0f9p-22 + r * 0x1.af390ba7e6f47p-26;
    high = (high + square * higher) + fourth * highest;
    double y = ((low + square * next) + fourth * high) * square + r + 1.0;
    return y * of_bits((bits_of(shifted) << 52) + 0x3ff0000000000000u);
}

/* For x ≥ DBL_MIN, to 1 unit in the last place; exactly 0 of 1. As in fdlibm: x = 2^k·(1 + f), 1 + f around 1,
   s = f / (2 + f), log(1 + f) = f − s·(f − series in s²). */
INLINE double log_of(double x) {
    uint64_t bits = bits_of(x) + (0x3ff0000000000000u - 0x3fe6a09e00000000u);
    double k = of_bits((bits >> 52) | 0x4330000000000000u) - (0x1p52 + 1023.0);
    double f = of_bits((bits & 0x000fffffffffffffu) + 0x3fe6a09e00000000u) - 1.0;
    double s = f / (2.0 + f), z = s * s, half_square = 0.5 * f * f;
    double square = z * z;
    double odd = 0x1.7466496cb03dep-3 + square * 0x1.2f112df3e5244p-3;
    double even = 0x1.c71c51d8e78afp-3 + square * 0x1.39a09d078c69fp-3;
    odd = 0x1.5555555555593p-1 + square * (0x1.2492494229359p-2 + square * odd);
    even = 0x1.999999997fa04p-2 + square * even;
    double y = odd + z * even;
    y = s * (half_square + y * z) + k * 0x1.a39ef35793c76p-33;
    return k * 0x1.62e42fee00000p-1 - ((half_square - y) - f);
}

/* ---- Laying positions side by side ---- */

#define READER(name, type)                               \
    INLINE type name(const char *from, ptrdiff_t at) {   \
        type value;                                      \
        memcpy(&value, from + at * (ptrdiff_t)sizeof value, sizeof value); \
        return value;                                    \
    }
READER(read_i4, int32_t)
READER(read_i8, int64_t)
READER(read_f4, float)
READER(read_f8, double)

/* Entries of the positions `order`, k each, into k rows. */
#define LAYER(name, read, type)                                                                  \
    INLINE void name(type (*rows)[COLUMNS], const char *from, int k, const int *order, int n) {  \
        for (int i = 0; i < k; i++)                                                              \
            for (int t = 0; t < n; t++) rows[i][t] = read(from, order[t] * k + i);               \
    }
LAYER(lay_i4, read_i4, int64_t)
LAYER(lay_i8, read_i8, int64_t)
LAYER(lay_f4, read_f4, double)
LAYER(lay_f8, read_f8, double)

INLINE void lay_ids(arm *to, const half *of, const int *order, int n) {
    if (of->wide_ids) lay_i8(to->id, of->ids, of->k, order, n);
    else lay_i4(to->id, of->ids, of->k, order, n);
}

INLINE void lay_logs(arm *to, const half *of, const int *order, int n) {
    if (of->wide_logs) lay_f8(to->log, of->logs, of->k, order, n);
    else lay_f4(to->log, of->logs, of->k, order, n);
}

INLINE void pad(arm *to, int first, int k, int n) {
    for (int i = first; i < k; i++)
        for (int t = 0; t < n; t++) to->id[i][t] = NOT_LISTED, to->log[i][t] = PAD;
}

/* Some entry of these positions is none, or no log-probability that can be used as it is; some are below what
   `kl_floor` raises. Both flags are sums over all entries, for these are cheaper than an early end. */
#define SCANNER(name, read_log, read_id)                                                       \
    INLINE void name(const half *of, ptrdiff_t entries, int *odd, int *low) {                  \
        for (ptrdiff_t at = 0; at < entries; at++) {                                           \
            double value = read_log(of->logs, at);                                             \
            *odd |= !(value >= LEAST) | !(value <= LOGPROB_SLACK);                             \
            *low |= value < LOWEST;                                                            \
        }                                                                                      \
        for (ptrdiff_t at = 0; at < entries; at++) *odd |= read_id(of->ids, at) == NOT_LISTED; \
    }
SCANNER(scan_f4_i4, read_f4, read_i4)
SCANNER(scan_f4_i8, read_f4, read_i8)
SCANNER(scan_f8_i4, read_f8, read_i4)
SCANNER(scan_f8_i8, read_f8, read_i8)

INLINE void scan(const half *of, ptrdiff_t entries, int *odd, int *low) {
    int is_odd = 0, is_low = 0;
    if (of->wide_logs && of->wide_ids) scan_f8_i8(of, entries, &is_odd, &is_low);
    else if (of->wide_logs) scan_f8_i4(of, entries, &is_odd, &is_low);
    else if (of->wide_ids) scan_f4_i8(of, entries, &is_odd, &is_low);
    else scan_f4_i4(of, entries, &is_odd, &is_low);
    *odd |= is_odd, *low |= is_low;
}

INLINE int64_t read_id(const half *of, ptrdiff_t at) {
    return of->wide_ids ? read_i8(of->ids, at) : read_i4(of->ids, at);
}

INLINE int64_t read_token(const half *of, ptrdiff_t at) {
    return of->wide_tokens ? read_i8(of->tokens, at) : read_i4(of->tokens, at);
}

/* Which of n positions list the same tokens rank by rank (`alike`; returns how many), and which do not. */
INLINE int split(room *restrict w, const half *p, const half *q, int n, int *low) {
    int k = p->k, odd = p->k != q->k || k < 2, alike = 0, others = 0;
    *low = 0;
    if (!odd) scan(p, (ptrdiff_t)n * k, &odd, low), scan(q, (ptrdiff_t)n * k, &odd, low);
    int narrow = !p->wide_ids && !q->wide_ids;
    for (int t = 0; t < n; t++) {
        int64_t differs = odd;
        ptrdiff_t first = (ptrdiff_t)t * k;
        if (narrow && !odd)
            for (int i = 0; i < k; i++) differs |= read_i4(p->ids, first + i) ^ read_i4(q->ids, first + i);
        else if (!odd)
            for (int i = 0; i < k; i++) differs |= read_id(p, first + i) ^ read_id(q, first + i);
        w->alike[alike] = w->others[others] = t;
        alike += differs == 0;
        others += differs != 0;
    }
    return alike;
}

/* Fill up to whole vectors with the first position once more: it counts for nothing. Returns how many. */
INLINE int fill_up(int *order, int n) {
    int columns = (n + LANES - 1) & -LANES;
    for (int t = n; t < columns; t++) order[t] = order[0];
    return columns;
}

#endif
