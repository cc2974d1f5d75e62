/* What is measured of positions side by side, as reading.py, measures.py and completion.py say it: the
   definitions and their reasons stand there, and those are what this is tested against.

   Positions that list the same tokens rank by rank, most of a healthy canary's, take the short way
   (`measure_alike`), all others the long one (`measure_apart`). A position's result depends on its own lists
   alone. */

#ifndef KLAXON_POSITIONS_H
#define KLAXON_POSITIONS_H

#include "columns.h"

/* ---- Measures of both kinds of positions ---- */

INLINE void clear(room *restrict w, int n) {
    for (int t = 0; t < n; t++) {
        w->p.total[t] = w->q.total[t] = w->squares_p[t] = w->squares_q[t] = w->common[t] = 0.0;
        w->own[t] = w->on_p[t] = w->on_q[t] = w->mean[t] = w->apart[t] = w->lifted[t] = w->agree[t] = 0.0;
        w->p.largest[t] = w->q.largest[t] = PAD;
        w->p.log_cap[t] = w->q.log_cap[t] = LOGPROB_SLACK;
        w->bad[t] = 0;
    }
}

INLINE void find_twice(room *restrict w, const arm *of, int k, int n) {
    for (int i = 1; i < k; i++)
        for (int j = 0; j < i; j++)
            for (int t = 0; t < n; t++) w->bad[t] |= of->id[i][t] == of->id[j][t];
}

/* Positions that cannot be read, and those after the n that are there, are not valid. */
INLINE void judge(room *restrict w, int n, int columns) {
    for (int t = 0; t < columns; t++) {
        double most = larger(w->p.total[t], w->q.total[t]);
        w->bad[t] |= most > 1 + MASS_SLACK;
        w->valid[t] = w->bad[t] ? 0.0 : 1.0;
    }
    for (int t = n; t < columns; t++) w->valid[t] = 0.0;
}

INLINE void find_rests(room *restrict w, double eta, int n) {
    for (int t = 0; t < n; t++) {
        w->p.rest[t] = larger(1.0 - w->p.total[t], 0.0);
        w->q.rest[t] = larger(1.0 - w->q.total[t], 0.0) + eta;
    }
}

INLINE void find_floors(room *restrict w, int n) {
    for (int t = 0; t < n; t++) {
        w->p.floor[t] = log_of(w->p.total[t]) + LOG_FLOOR;
        w->q.floor[t] = log_of(w->q.total[t]) + LOG_FLOOR;
    }
}

/* What the floor adds to Σ p·log(p/q) for tokens on both lists of which one is below it. */
INLINE void lift_row(room *restrict w, const double *logs, const double *log_ratio, const double *only,
                     int n) {
    for (int t = 0; t < n; t++) {
        double log = logs[t], ratio = log_ratio[t], low = smaller(log, log + ratio);
        double raised_p = larger(log, w->p.floor[t]), raised_q = larger(ratio + log, w->q.floor[t]);
        double lifted = (raised_p + ratio - raised_q) * exp_of(log);
        double counts = log > PAD ? (only[t] > 0.0 ? 0.0 : lifted) : 0.0;
        w->lifted[t] += low < LOWEST ? counts : 0.0;
    }
}

/* From sums over both lists to the measures; 0 where not valid. */
INLINE void finish(room *restrict w, double eta, int n) {
    for (int t = 0; t < n; t++) {
        double p = larger(w->p.rest[t], TINY), q = larger(w->q.rest[t], TINY), mean = (p + q) * 0.5;
        double log_p = log_of(p), log_q = log_of(q);
        double own = (w->own[t] + (p * log_p + q * log_q)) * 0.5;
        double kl = -(p * (log_q - log_p) + w->on_p[t] + w->on_q[t]);
        double js = own - (w->mean[t] + mean * log_of(mean)) - (eta * (LOG_2 / 2) + ROUNDING);
        double tv = (w->apart[t] + fabs(p - q)) * 0.5 - (eta * 0.5 + ROUNDING);
        double floor = (w->lifted[t] - w->on_p[t]) / w->p.total[t] + log_of(w->q.total[t] / w->p.total[t]);
        double cosine = w->common[t] / sqrt(larger(w->squares_p[t] * w->squares_q[t], TINY));
        int valid = w->valid[t] > 0.0;
        w->measured[0][t] = valid ? larger(kl, 0.0) : 0.0;
        w->measured[1][t] = valid ? smaller(larger(js, 0.0), LOG_2) : 0.0;
        w->measured[2][t] = valid ? smaller(larger(tv, 0.0), 1.0) : 0.0;
        w->measured[3][t] = valid ? larger(floor, 0.0) : 0.0;
        w->measured[4][t] = valid ? smaller(cosine, 1.0) : 0.0;
        w->measured[5][t] = valid ? w->agree[t] : 0.0;
    }
}

/* ---- Positions that list the same tokens rank by rank, all of them usable as they are ---- */

INLINE void add_row(room *restrict w, int i, int n) {
    for (int t = 0; t < n; t++) {
        double log_p = w->p.log[i][t], log_q = w->q.log[i][t], p = exp_of(log_p), q = exp_of(log_q);
        double mean = (p + q) * 0.5;
        w->p.total[t] += p;
        w->q.total[t] += q;
        w->squares_p[t] += p * p;
        w->squares_q[t] += q * q;
        w->common[t] += p * q;
        w->own[t] += p * log_p + q * log_q;
        w->on_p[t] += p * (log_q - log_p);
        w->mean[t] += mean * log_of(mean);
        w->apart[t] += fabs(p - q);
        w->p.largest[t] = larger(log_p, w->p.largest[t]);
        w->q.largest[t] = larger(log_q, w->q.largest[t]);
    }
}

INLINE void measure_alike(room *restrict w, int k, int n, int columns, double eta, int low) {
    clear(w, columns);
    for (int i = 0; i < k; i++) add_row(w, i, columns);
    for (int i = 0; i < k; i++)
        for (int t = 0; t < columns; t++) {
            double first_of_q = w->q.log[i][t] == w->q.largest[t] ? 1.0 : w->agree[t];
            w->agree[t] = w->p.log[i][t] == w->p.largest[t] ? first_of_q : w->agree[t];
        }
    find_twice(w, &w->p, k, columns);
    judge(w, n, columns);
    find_rests(w, eta, columns);
    if (low) find_floors(w, columns);
    for (int i = 0; i < k && low; i++) {
        column none = {0};
        for (int t = 0; t < columns; t++) w->log_ratio[i][t] = w->q.log[i][t] - w->p.log[i][t];
        lift_row(w, w->p.log[i], w->log_ratio[i], none, columns);
    }
    finish(w, eta, columns);
}

/* ---- All others ---- */

/* Entries that are none get a token of their own, from `nobody` on, so that it is on no other row or list. */
INLINE void read_list(room *restrict w, arm *restrict of, int64_t nobody, int k, int n) {
    for (int i = 0; i < k; i++)
        for (int t = 0; t < n; t++) {
            double log = of->log[i][t], used = smaller(larger(log, LEAST), 1.0);
            int none = (log <= NOT_LISTED_LOGPROB) | (of->id[i][t] == NOT_LISTED);
            w->bad[t] |= !none & !(log <= LOGPROB_SLACK); /* Of NaN, too. */
            of->id[i][t] = none ? nobody + i : of->id[i][t];
            of->log[i][t] = log = none ? PAD : used;
            of->p[i][t] = exp_of(log);
            of->total[t] += of->p[i][t];
            of->largest[t] = larger(log, of->largest[t]);
            of->log_cap[t] = none ? of->log_cap[t] : smaller(log, of->log_cap[t]);
        }
    for (int t = 0; t < n; t++) w->bad[t] |= !(of->largest[t] > PAD);
    find_twice(w, of, k, n);
}

/* Where the emitted token is all that is listed, and below one half, it may be out of rank: it says nothing of
   the others, and nothing else does. */
INLINE void find_lone(room *w, const arm *of, const half *by, int k, int n) {
    for (int t = 0; t < n; t++) {
        int listed = 0, at = 0;
        if (!(of->largest[t] < LOG_HALF)) continue;
        for (int i = 0; i < k; i++)
            if (of->log[i][t] > PAD) listed++, at = i;
        w->bad[t] |= listed == 1 && of->id[at][t] == read_token(by, w->others[t]);
    }
}

/* An emitted token that stands first though it is the smallest, the others falling, sets no cap; it is
   dropped if the other arm lacks it. */
INLINE void mend_stray(arm *of, const arm *other, int64_t emitted, int64_t nobody, int k, int t) {
    double smallest = LOGPROB_SLACK;
    int on_other = 0;
    for (int i = 1; i < k; i++) {
        if (i > 1 && !(of->log[i - 1][t] >= of->log[i][t])) return;
        if (of->log[i][t] > PAD) smallest = smaller(of->log[i][t], smallest);
    }
    if (!(of->log[0][t] > PAD && of->id[0][t] == emitted && of->log[0][t] < smallest)) return;
    of->log_cap[t] = smallest;
    for (int i = 0; i < k; i++) on_other |= other->id[i][t] == emitted;
    if (on_other) return;
    of->id[0][t] = nobody;
    of->log[0][t] = PAD;
    of->p[0][t] = exp_of(PAD);
    of->total[t] = 0.0;
    for (int i = 0; i < k; i++) of->total[t] += of->p[i][t];
}

INLINE void mend_strays(room *w, arm *of, const arm *other, const half *by, int64_t nobody, int k, int n) {
    int64_t rises = 0;
    if (k < 2) return;
    for (int t = 0; t < n; t++) rises |= of->log[0][t] < of->log[1][t];
    for (int t = 0; t < n && rises; t++) {
        int64_t emitted = read_token(by, w->others[t]);
        if (of->log[0][t] < of->log[1][t]) mend_stray(of, other, emitted, nobody, k, t);
    }
}

/* Row i of P's list has Q's row j beside it where the tokens are the same. */
INLINE void join_rows(room *restrict w, int i, int j, int n) {
#pragma GCC ivdep /* Rows i and j are of different lists: too many to find that out. */
    for (int t = 0; t < n; t++) {
        double log_p = w->p.log[i][t], log_q = w->q.log[j][t], q = w->q.p[j][t];
        double first_of_q = log_q == w->q.largest[t] ? 1.0 : w->agree[t];
        double first = log_p == w->p.largest[t] ? first_of_q : w->agree[t];
        int64_t same = w->p.id[i][t] == w->q.id[j][t];
        w->q_of[i][t] = same ? q : w->q_of[i][t];
        w->log_ratio[i][t] = same ? log_q - log_p : w->log_ratio[i][t];
        w->p.only[i][t] = same ? 0.0 : w->p.only[i][t];
        w->q.only[j][t] = same ? 0.0 : w->q.only[j][t];
        w->agree[t] = same ? first : w->agree[t];
    }
}

INLINE void join(room *restrict w, int k, int n) {
    for (int i = 0; i < k; i++)
        for (int t = 0; t < n; t++) {
            double p = w->p.p[i][t], q = w->q.p[i][t];
            w->squares_p[t] += p * p;
            w->squares_q[t] += q * q;
            w->own[t] += p * w->p.log[i][t] + q * w->q.log[i][t];
            w->q_of[i][t] = w->log_ratio[i][t] = 0.0;
            w->p.only[i][t] = w->p.log[i][t] > PAD ? p : 0.0;
            w->q.only[i][t] = w->q.log[i][t] > PAD ? q : 0.0;
        }
    for (int i = 0; i < k; i++)
        for (int j = 0; j < k; j++) {
            int64_t any = 0;
            for (int t = 0; t < n; t++) any |= w->p.id[i][t] == w->q.id[j][t];
            if (any) join_rows(w, i, j, n);
        }
    for (int i = 0; i < k; i++)
        for (int t = 0; t < n; t++) w->common[t] += w->p.p[i][t] * w->q_of[i][t];
}

/* How many entries of each position the other arm lacks, and the rows in which there are any. */
INLINE int find_own(arm *restrict of, int *rows, int k, int n) {
    int found = 0;
    for (int t = 0; t < n; t++) of->lacks[t] = 0.0;
    for (int i = 0; i < k; i++) {
        int64_t any = 0;
        for (int t = 0; t < n; t++) {
            any |= of->only[i][t] > 0.0;
            of->lacks[t] += of->only[i][t] > 0.0 ? 1.0 : 0.0;
        }
        if (any) rows[found++] = i;
    }
    return found;
}

INLINE void find_room(arm *restrict of, const arm *restrict other, int n) {
    for (int t = 0; t < n; t++) {
        of->cap[t] = exp_of(of->log_cap[t]);
        of->after[t] = of->rest[t] - other->lacks[t] * of->cap[t];
        of->plus[t] = larger(of->after[t], 0.0);
    }
}

/* 0 of what is not positive, the largest finite number for infinity: times 0 it stays 0. */
INLINE double finite_ratio(double above, double below) {
    double ratio = smaller(above / below, DBL_MAX);
    return above > 0.0 ? ratio : 0.0;
}

/* max over j of (rest − j·cap) / (plus + sum of the smallest own values but j): with each own value in turn
   as the largest that is not at its cap, no value has to be sorted. `to` is filled by the other's rest. */
INLINE void find_ratio(arm *restrict to, const arm *restrict from, const int *rows, int count, int n) {
    for (int t = 0; t < n; t++) to->ratio[t] = finite_ratio(from->after[t], to->plus[t]);
    for (int a = 0; a < count; a++) {
        column sum, at_cap;
        memcpy(sum, to->plus, sizeof sum);
        memset(at_cap, 0, sizeof at_cap);
        for (int b = 0; b < count; b++)
            for (int t = 0; t < n; t++) {
                double value = to->only[rows[b]][t], largest = to->only[rows[a]][t];
                sum[t] += value > largest ? 0.0 : value;
                at_cap[t] += value > largest ? 1.0 : 0.0;
            }
        for (int t = 0; t < n; t++) {
            double ratio = finite_ratio(from->rest[t] - at_cap[t] * from->cap[t], sum[t]);
            to->ratio[t] = larger(ratio, to->ratio[t]);
        }
    }
}

/* Mass outside the lists, as the completion shares it out: either all of N sits at its cap, and the rest
   keeps P's mass, or all of M does and it keeps Q's. */
INLINE void share_rests(room *restrict w, int n) {
    for (int t = 0; t < n; t++) {
        double plus_p = w->p.plus[t], plus_q = w->q.plus[t];
        double kept = w->q.after[t] * w->p.cap[t], could = w->p.after[t] * w->q.cap[t];
        double rest_p = kept <= could ? plus_p : w->q.ratio[t] * plus_q;
        double rest_q = kept <= could ? w->p.ratio[t] * plus_p : plus_q;
        rest_p = plus_p > 0.0 ? rest_p : w->q.ratio[t] * plus_q;
        rest_q = plus_p > 0.0 ? rest_q : plus_q;
        double lacks = w->p.lacks[t] + w->q.lacks[t];
        w->p.rest[t] = lacks > 0.0 ? rest_p : w->p.rest[t];
        w->q.rest[t] = lacks > 0.0 ? rest_q : w->q.rest[t];
    }
}

/* What `by` fills in for own entry i of `of`, and the logarithm of that over what is listed. */
INLINE void fill_row(room *restrict w, const arm *of, const arm *by, int i, double *restrict filled,
                     double *restrict ratio, int n) {
    for (int t = 0; t < n; t++) {
        double value = of->only[i][t], log = of->log[i][t];
        double log_ratio = log_of(larger(of->ratio[t], TINY));
        filled[t] = larger(smaller(of->ratio[t] * value, by->cap[t]), TINY);
        ratio[t] = larger(smaller(by->log_cap[t] - log, log_ratio), LOG_TINY - log);
        double own = filled[t] * (log + ratio[t]);
        w->own[t] += value > 0.0 ? own : 0.0;
    }
}

INLINE void fill_in_p(room *restrict w, int i, int n) {
    column filled, ratio;
    fill_row(w, &w->p, &w->q, i, filled, ratio, n);
    for (int t = 0; t < n; t++) {
        double p = w->p.only[i][t], log_p = w->p.log[i][t];
        double lifted = (larger(log_p, w->p.floor[t]) + ratio[t] - w->q.floor[t]) * p;
        w->q_of[i][t] = p > 0.0 ? filled[t] : w->q_of[i][t];
        w->log_ratio[i][t] = p > 0.0 ? ratio[t] : w->log_ratio[i][t];
        w->lifted[t] += p > 0.0 ? lifted : 0.0;
    }
}

INLINE void fill_in_q(room *restrict w, int i, int n) {
    column filled, ratio;
    fill_row(w, &w->q, &w->p, i, filled, ratio, n);
    for (int t = 0; t < n; t++) {
        double q = w->q.only[i][t], mean = (filled[t] + q) * 0.5;
        double mean_log = mean * log_of(larger(mean, TINY)), log_q_over_p = filled[t] * ratio[t];
        w->mean[t] += q > 0.0 ? mean_log : 0.0;
        w->on_q[t] -= q > 0.0 ? log_q_over_p : 0.0;
        w->apart[t] += q > 0.0 ? fabs(filled[t] - q) : 0.0;
    }
}

INLINE void complete(room *restrict w, int k, int n) {
    int rows_p[ROWS], rows_q[ROWS];
    int own_p = find_own(&w->p, rows_p, k, n), own_q = find_own(&w->q, rows_q, k, n);
    if (own_p + own_q == 0) return;
    find_room(&w->p, &w->q, n);
    find_room(&w->q, &w->p, n);
    find_ratio(&w->p, &w->q, rows_p, own_p, n);
    find_ratio(&w->q, &w->p, rows_q, own_q, n);
    share_rests(w, n);
    find_floors(w, n);
    for (int a = 0; a < own_p; a++) fill_in_p(w, rows_p[a], n);
    for (int a = 0; a < own_q; a++) fill_in_q(w, rows_q[a], n);
}

/* Along P's list, all of which has something of Q's beside it now. */
INLINE void sum_up(room *restrict w, int k, int n) {
    int64_t low = 0;
    for (int i = 0; i < k; i++)
        for (int t = 0; t < n; t++) {
            double p = w->p.p[i][t], q = w->q_of[i][t], mean = (p + q) * 0.5;
            double log = w->p.log[i][t], ratio = w->log_ratio[i][t], lower = smaller(log, log + ratio);
            w->on_p[t] += p * ratio;
            w->mean[t] += mean * log_of(mean);
            w->apart[t] += fabs(p - q);
            low |= (lower < LOWEST) & (log > PAD);
        }
    if (low) find_floors(w, n);
    for (int i = 0; i < k && low; i++) lift_row(w, w->p.log[i], w->log_ratio[i], w->p.only[i], n);
}

INLINE void measure_apart(room *restrict w, const half *p, const half *q, int k, int n, int columns,
                          double eta) {
    int64_t nobody_p = INT64_MIN, nobody_q = INT64_MIN + ROWS;
    clear(w, columns);
    read_list(w, &w->p, nobody_p, k, columns);
    read_list(w, &w->q, nobody_q, k, columns);
    find_lone(w, &w->p, p, k, n);
    find_lone(w, &w->q, q, k, n);
    judge(w, n, columns);
    mend_strays(w, &w->p, &w->q, p, nobody_p, k, n);
    mend_strays(w, &w->q, &w->p, q, nobody_q, k, n);
    join(w, k, columns);
    find_rests(w, eta, columns);
    complete(w, k, columns);
    sum_up(w, k, columns);
    finish(w, eta, columns);
}

#endif
