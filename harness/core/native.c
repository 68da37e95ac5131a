/* The inner loops of gradient matching that torch's operations cannot express well: convolutions whose weights differ
   from instance to instance, and the directions of L-BFGS. `harness.learn.convolution` and `attacks._search.lbfgs`
   describe the arguments. Compiled when the package is installed; without a compiler, torch's operations do the work.

   The file includes itself twice, for `float` and for `double`: arrays of the type REAL, with contiguous rows.
   Distances are counted in entries. */

#ifndef REAL

#include <math.h>
#include <stdint.h>

typedef int64_t integer;

enum { BYTES = 32, TILE = 4, WIDTH = 8, AT_ONCE = 4 };

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_PROCESSOR
#endif

/* Calls CALL(a, b) with constants a = min(x, TILE) and b = min(y, TILE), so that the tile's sums stay in registers. */
#define OF_TWO(CALL, a, y) \
    switch (y) { \
    case 1: CALL(a, 1); break; \
    case 2: CALL(a, 2); break; \
    case 3: CALL(a, 3); break; \
    default: CALL(a, TILE); \
    }
#define OF_TILE(CALL, x, y) \
    switch (x) { \
    case 1: OF_TWO(CALL, 1, y) break; \
    case 2: OF_TWO(CALL, 2, y) break; \
    case 3: OF_TWO(CALL, 3, y) break; \
    default: OF_TWO(CALL, TILE, y) \
    }

/* A plan lists, as `harness.learn.convolution` writes it:
   spread: rows; step; phases; entries of a map, of its row, of a larger map; for each phase its first column, its place
     and its number of columns; for each row its place.
   correlate: outs; ins; distances of the weights of two outs and of two ins, of the inputs of two channels and of two
     instances, of the outputs of two channels, of two instances and of two neighbors; phases; for each phase: taps;
     places; (weight, input) of each tap; (input, output, number of neighbors) of each place.
   weights: outs; ins; distances of weights and inputs as above, of the slopes of two channels and of two instances;
     taps; places; (weight, input) of each tap; (input, slope) of each place. */

/* Raised with each change of a function's arguments. */
int leakgauge_version(void) { return 4; }

/* Pairs of L-BFGS, in the 16 bits of bfloat16, because reading them takes most of the time. */
typedef uint16_t half;

INLINE float unrounded(half from) {
    const union { uint32_t bits; float value; } both = {(uint32_t)from << 16};
    return both.value;
}

/* To the nearest, with ties to even. */
INLINE half rounded(float from) {
    const union { float value; uint32_t bits; } both = {from};
    return (half)((both.bits + 0x7fff + (both.bits >> 16 & 1)) >> 16);
}

#define JOINED(a, b) a##b
#define NAMED(a, b) JOINED(a, b)
#define NAME(name) NAMED(name, REAL)

#define REAL float
#include "native.c"
#undef REAL
#define REAL double
#include "native.c"

#else /* once for each type */

typedef REAL NAME(vector_) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
#define vector NAME(vector_)
#define LANES ((integer)(BYTES / sizeof(REAL)))

INLINE REAL NAME(sum_of_)(vector v) {
    for (integer half = LANES / 2; half; half /= 2)
        for (integer lane = 0; lane < half; lane++) v[lane] += v[lane + half];
    return v[0];
}

/* Copies maps into larger ones. A row is split into phases: its columns first, first + step, ... lie side by side. */
EACH_PROCESSOR void NAME(leakgauge_spread_)(const integer *plan, integer maps, const REAL *in, REAL *out) {
    const integer rows = plan[0], step = plan[1], phases = plan[2], map = plan[3], row = plan[4], out_map = plan[5];
    const integer *phase = plan + 6, *to = phase + 3 * phases;
    for (; maps > 0; maps--, in += map, out += out_map)
        for (integer r = 0; r < rows; r++)
            for (integer p = 0; p < phases; p++) {
                const integer count = phase[3 * p + 2];
                const REAL *from = in + r * row + phase[3 * p];
                REAL *into = out + to[r] + phase[3 * p + 1];
                if (step == 1)
                    for (integer i = 0; i < count; i++) into[i] = from[i];
                else if (step == 2)
                    for (integer i = 0; i < count; i++) into[i] = from[2 * i];
                else
                    for (integer i = 0; i < count; i++) into[i] = from[step * i];
            }
}

/* A tile of `outs` channels and `places` vectors of the output: for each pair of maps and weights, the sum over all
   input channels and taps. */
INLINE void NAME(correlate_)(const int outs, const int places, const integer *plan, integer taps, const integer *tap,
                             const integer *place, const REAL *const *maps, const REAL *const *weights,
                             const REAL *bias, REAL *out) {
    const integer ins = plan[1], w_out = plan[2], w_in = plan[3], channel = plan[4], out_channel = plan[6];
    const integer step = plan[8];
    vector sum[TILE][TILE];
    UNROLLED for (int o = 0; o < outs; o++)
        UNROLLED for (int k = 0; k < places; k++) sum[o][k] = (vector){0} + (bias ? bias[o] : 0);
    for (int pair = 0; pair < 2 && maps[pair]; pair++)
        for (integer i = 0; i < ins; i++)
            for (integer t = 0; t < taps; t++) {
                const REAL *w = weights[pair] + i * w_in + tap[2 * t];
                const REAL *at = maps[pair] + i * channel + tap[2 * t + 1];
                vector x[TILE];
                UNROLLED for (int k = 0; k < places; k++) x[k] = *(const vector *)(at + place[3 * k]);
                UNROLLED for (int o = 0; o < outs; o++)
                    UNROLLED for (int k = 0; k < places; k++) sum[o][k] += x[k] * w[o * w_out];
            }
    UNROLLED for (int o = 0; o < outs; o++)
        UNROLLED for (int k = 0; k < places; k++) {
            REAL *to = out + o * out_channel + place[3 * k + 1];
            const integer lanes = place[3 * k + 2];
            if (lanes == LANES && step == 1)
                *(vector *)to = sum[o][k];
            else
                for (integer lane = 0; lane < LANES && lane < lanes; lane++) to[lane * step] = sum[o][k][lane];
        }
}

/* Convolutions of m instances, forward or backward: out = in * weight + in_too * weight_too + bias. `by` is the
   distance between instances, 0 for weights that all share; in_too and bias may be NULL. */
EACH_PROCESSOR void NAME(leakgauge_correlate_)(const integer *plan, integer m, const REAL *in, const REAL *weight,
                                               integer by, const REAL *in_too, const REAL *weight_too, integer by_too,
                                               const REAL *bias, integer bias_by, REAL *out) {
    const integer outs = plan[0], w_out = plan[2], in_by = plan[5], out_channel = plan[6], out_by = plan[7];
    for (integer i = 0; i < m; i++) {
        const REAL *const maps[] = {in + i * in_by, in_too ? in_too + i * in_by : 0};
        const integer *phase = plan + 10;
        for (integer p = 0; p < plan[9]; p++) {
            const integer taps = phase[0], places = phase[1];
            const integer *tap = phase + 2, *place = tap + 2 * taps;
            phase = place + 3 * places;
            for (integer o = 0; o < outs; o += TILE) {
                const REAL *const weights[] = {weight + i * by + o * w_out, weight_too + i * by_too + o * w_out};
                const REAL *b = bias ? bias + i * bias_by + o : 0;
                REAL *to = out + i * out_by + o * out_channel;
                for (integer k = 0; k < places; k += TILE) {
                    const integer *at = place + 3 * k;
#define CALL(a, c) NAME(correlate_)(a, c, plan, taps, tap, at, maps, weights, b, to)
                    OF_TILE(CALL, outs - o, places - k)
#undef CALL
                }
            }
        }
    }
}

/* A tile of the weights' gradient: `outs` channels and `taps` taps of one input channel. */
INLINE void NAME(multiply_)(const int outs, const int taps, const integer *plan, const integer *tap,
                            const integer *place, const REAL *in, const REAL *slopes, REAL *out) {
    const integer w_out = plan[2], slope_channel = plan[6];
    vector sum[TILE][TILE];
    UNROLLED for (int o = 0; o < outs; o++)
        UNROLLED for (int t = 0; t < taps; t++) sum[o][t] = (vector){0};
    for (integer k = 0; k < plan[9]; k++) {
        vector x[TILE];
        UNROLLED for (int t = 0; t < taps; t++) x[t] = *(const vector *)(in + place[2 * k] + tap[2 * t + 1]);
        UNROLLED for (int o = 0; o < outs; o++) {
            const vector slope = *(const vector *)(slopes + o * slope_channel + place[2 * k + 1]);
            UNROLLED for (int t = 0; t < taps; t++) sum[o][t] += x[t] * slope;
        }
    }
    UNROLLED for (int o = 0; o < outs; o++)
        UNROLLED for (int t = 0; t < taps; t++) out[o * w_out + tap[2 * t]] = NAME(sum_of_)(sum[o][t]);
}

/* The gradients of m instances in their weights; `by` is the distance between the results. */
EACH_PROCESSOR void NAME(leakgauge_weights_)(const integer *plan, integer m, const REAL *in, const REAL *slopes,
                                             REAL *out, integer by) {
    const integer outs = plan[0], ins = plan[1], taps = plan[8];
    const integer *taps_of = plan + 10, *place = taps_of + 2 * taps;
    for (integer i = 0; i < m; i++)
        for (integer c = 0; c < ins; c++)
            for (integer t = 0; t < taps; t += TILE)
                for (integer o = 0; o < outs; o += TILE) {
                    const integer *tap = taps_of + 2 * t;
                    const REAL *x = in + i * plan[5] + c * plan[4], *d = slopes + i * plan[7] + o * plan[6];
                    REAL *to = out + i * by + o * plan[2] + c * plan[3];
#define CALL(a, b) NAME(multiply_)(a, b, plan, tap, place, x, d, to)
                    OF_TILE(CALL, outs - o, taps - t)
#undef CALL
                }
}

/* found -= sought in `width` numbers, or found = factor * input - sought if there is an input; the squared length. */
INLINE double NAME(subtracted_)(integer width, REAL *found, const REAL *sought, REAL factor, const REAL *input) {
    enum { BLOCK = 1024 }; /* sums of blocks are added in double precision */
    double squares = 0;
    for (integer from = 0; from < width; from += BLOCK) {
        const integer end = from + BLOCK < width ? from + BLOCK : width;
        vector sum[TILE];
        integer k = from;
        UNROLLED for (int j = 0; j < TILE; j++) sum[j] = (vector){0};
        for (; k + TILE * LANES <= end; k += TILE * LANES)
            UNROLLED for (int j = 0; j < TILE; j++) {
                vector *at = (vector *)(found + k + j * LANES);
                if (input) *at = factor * *(const vector *)(input + k + j * LANES);
                *at -= *(const vector *)(sought + k + j * LANES);
                sum[j] += *at * *at;
            }
        REAL rest = NAME(sum_of_)((sum[0] + sum[1]) + (sum[2] + sum[3]));
        for (; k < end; k++) {
            found[k] = (input ? factor * input[k] : found[k]) - sought[k];
            rest += found[k] * found[k];
        }
        squares += rest;
    }
    return squares;
}

/* found -= sought in m rows of `width` numbers, and the squared lengths of the rows. The numbers of a row from `first`
   on are first set to the products of `outs` slopes and `ins` inputs, of which each row has its own. */
EACH_PROCESSOR void NAME(leakgauge_subtract_)(integer m, integer width, REAL *found, const REAL *sought,
                                              double *squares, integer first, integer outs, integer ins,
                                              const REAL *slopes, const REAL *inputs) {
    const integer after = first + outs * ins;
    for (; m > 0; m--, found += width, sought += width, slopes += outs, inputs += ins, squares++) {
        *squares = NAME(subtracted_)(first, found, sought, 0, 0);
        for (integer o = 0, at = first; o < outs; o++, at += ins)
            *squares += NAME(subtracted_)(ins, found + at, sought + at, slopes[o], inputs);
        *squares += NAME(subtracted_)(width - after, found + after, sought + after, 0, 0);
    }
}

typedef half NAME(halves_) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t NAME(bits_) __attribute__((vector_size(4 * LANES)));
typedef float NAME(singles_) __attribute__((vector_size(4 * LANES)));

#define UNPACKED(from) \
    __builtin_convertvector((NAME(singles_))(__builtin_convertvector(*(const NAME(halves_) *)(from), NAME(bits_)) << 16), \
                            vector)

/* q += factor * row, then the product of q and `next`; fetches what the next two calls read, at these distances. */
INLINE REAL NAME(move_)(REAL *q, REAL factor, const half *row, const half *next, integer width, integer one, integer two) {
    vector sum[AT_ONCE];
    integer k = 0;
    UNROLLED for (int j = 0; j < AT_ONCE; j++) sum[j] = (vector){0};
    for (; k + AT_ONCE * LANES <= width; k += AT_ONCE * LANES) {
        __builtin_prefetch(next + one + k);
        __builtin_prefetch(next + two + k);
        UNROLLED for (int j = 0; j < AT_ONCE; j++) {
            const integer i = k + j * LANES;
            const vector moved = *(vector *)(q + i) + UNPACKED(row + i) * factor;
            *(vector *)(q + i) = moved;
            sum[j] += moved * UNPACKED(next + i);
        }
    }
    REAL all = NAME(sum_of_)((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; k < width; k++) q[k] += factor * unrounded(row[k]), all += q[k] * unrounded(next[k]);
    return all;
}

/* The pair (step, change) becomes the newest of at most `slots` pairs [slots, 2, width] if it has enough curvature. */
INLINE void NAME(store_)(integer slots, integer width, half *pairs, double *curvature, integer *count, double *scale,
                  const REAL *step, const REAL *change, double least) {
    half *to = pairs + 2 * width * (*count % slots);
    double b[WIDTH] = {0}, s[WIDTH] = {0}, c[WIDTH] = {0}; /* in single precision, products of small numbers vanish */
    for (integer k = 0; k < width; k += WIDTH)
        for (integer lane = 0; lane < WIDTH && k + lane < width; lane++) {
            const double x = unrounded(rounded(step[k + lane])), y = unrounded(rounded(change[k + lane]));
            b[lane] += x * y, s[lane] += x * x, c[lane] += y * y;
        }
    double both = 0, steps = 0, changes = 0;
    for (integer lane = 0; lane < WIDTH; lane++) both += b[lane], steps += s[lane], changes += c[lane];
    if (!(both > least * sqrt(steps) * sqrt(changes))) return;
    for (integer k = 0; k < width; k++) to[k] = rounded(step[k]), to[width + k] = rounded(change[k]);
    curvature[*count % slots] = both;
    *scale = both / changes;
    ++*count;
}

/* Directions -H g of n problems [n, width] by the two-loop recursion (Nocedal & Wright 2006, Algorithm 7.4), after
   storing the pairs of accepted steps; NaN without pairs. `weights` has room for `slots` numbers. */
EACH_PROCESSOR void NAME(leakgauge_directions_)(integer n, integer slots, integer width, double least, half *pairs,
                                         double *curvature, integer *count, double *scale, const uint8_t *accepted,
                                         const REAL *step, const REAL *change, const REAL *gradient, double *weights,
                                         REAL *out) {
    for (integer i = 0; i < n; i++, step += width, change += width, gradient += width, out += width) {
        half *own = pairs + i * 2 * slots * width;
        double *of_own = curvature + i * slots;
        if (accepted[i]) NAME(store_)(slots, width, own, of_own, count + i, scale + i, step, change, least);
        const integer have = count[i] < slots ? count[i] : slots, last = count[i] - 1, first = count[i] - have;
        for (integer k = 0; k < width; k++) out[k] = have ? -gradient[k] : NAN;
        if (!have) continue;
#define STEP(j) (own + 2 * width * ((j) % slots))
#define CHANGE(j) (STEP(j) + width)
        REAL product = NAME(move_)(out, 0, STEP(last), STEP(last), width, width, -2 * width);
        for (integer j = last; j >= first; j--) {
            weights[j % slots] = product / of_own[j % slots];
            const half *next = STEP(j > first ? j - 1 : j);
            product = NAME(move_)(out, -(REAL)weights[j % slots], CHANGE(j), next, width, width, -2 * width);
        }
        for (integer k = 0; k < width; k++) out[k] *= (REAL)scale[i];
        product = NAME(move_)(out, 0, STEP(first), CHANGE(first), width, -width, 2 * width);
        for (integer j = first; j <= last; j++) {
            const double weight = weights[j % slots] - product / of_own[j % slots];
            const half *next = CHANGE(j < last ? j + 1 : j);
            product = NAME(move_)(out, (REAL)weight, STEP(j), next, width, -width, 2 * width);
        }
#undef STEP
#undef CHANGE
    }
}

#undef UNPACKED
#undef vector
#undef LANES
#endif
