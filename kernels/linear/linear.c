/* y = x W^T + b. See linear/native.py for the layout of the packed weight and reference.py for int8.
 *
 * Both forms share one scheme. The weight lies in panels of 32 output channels; inside a panel each
 * step along K holds, for every channel, the bytes one dot instruction eats (2 bf16 or 4 int8): 128
 * bytes a step. A tile is 1..12 rows of x times one panel, its sums in registers for all of K, so a
 * small batch reads each weight byte from memory once and a large one from cache. Every sum runs
 * along K in the same order whatever the tile: a row's result does not depend on its neighbours. */
#include "native.h"

enum { PANEL = 32, STEP_BYTES = 128, MAX_TILE = 12, ROW_CHUNK = 192, PREFETCH = 6144, SHARES = 6 };
enum { PARALLEL_VALUES = 16384 };

typedef struct {
    const uint8_t *weight; /* panels */
    const float *bias;     /* padded to whole panels, or null */
    const float *scales;   /* int8: per channel, padded */
    const int32_t *shift;  /* int8: -128 * sum of the channel's weights, padded */
    int64_t channels, steps;
} Packed;

typedef struct {
    const uint8_t *rows; /* x, bf16 or shifted int8 */
    int64_t stride;      /* bytes between rows */
    const float *scales; /* int8: per row */
    void *out;
    int64_t out_is_float;
} Batch;

/* sums: [count][PANEL], the finished products of one tile without the bias. */
static void store_tile(const Packed *w, const Batch *b, int64_t row, int64_t panel, int count, float *sums) {
    int64_t first = panel * PANEL, width = min64(PANEL, w->channels - first);
    for (int m = 0; m < count; m++, sums += PANEL) {
        int64_t at = (row + m) * w->channels + first;
        if (w->bias)
            for (int c = 0; c < PANEL; c++) sums[c] += w->bias[first + c];
        if (b->out_is_float)
            memcpy((float *)b->out + at, sums, width * sizeof(float));
#if HAS_AVX512
        else if (width == PANEL) {
            store16((bf16 *)b->out + at, _mm512_load_ps(sums));
            store16((bf16 *)b->out + at + 16, _mm512_load_ps(sums + 16));
        }
#endif
        else
            for (int64_t c = 0; c < width; c++) ((bf16 *)b->out)[at + c] = narrow(sums[c]);
    }
}

INLINE int32_t load_step(const uint8_t *from) {
    int32_t bits;
    memcpy(&bits, from, 4);
    return bits;
}

/* `count` is a constant at every call, so the sums live in registers. */
INLINE void tile_bf16(const Packed *w, const Batch *b, int64_t row, int64_t panel, const int count) {
    const uint8_t *weight = w->weight + panel * w->steps * STEP_BYTES;
    const uint8_t *x = b->rows + row * b->stride;
    _Alignas(64) float sums[MAX_TILE][PANEL];
#if HAS_BF16_DOT
    __m512 lo[MAX_TILE], hi[MAX_TILE];
#pragma GCC unroll 16
    for (int m = 0; m < count; m++) lo[m] = hi[m] = _mm512_setzero_ps();
    for (int64_t k = 0; k < w->steps; k++, weight += STEP_BYTES) {
        __m512bh w_lo = (__m512bh)_mm512_loadu_si512(weight);
        __m512bh w_hi = (__m512bh)_mm512_loadu_si512(weight + 64);
        _mm_prefetch((const char *)weight + PREFETCH, _MM_HINT_T1);
        _mm_prefetch((const char *)weight + PREFETCH + 64, _MM_HINT_T1);
#pragma GCC unroll 16
        for (int m = 0; m < count; m++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32(load_step(x + m * b->stride + 4 * k));
            lo[m] = _mm512_dpbf16_ps(lo[m], w_lo, pair);
            hi[m] = _mm512_dpbf16_ps(hi[m], w_hi, pair);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < count; m++) {
        _mm512_store_ps(sums[m], lo[m]);
        _mm512_store_ps(sums[m] + 16, hi[m]);
    }
#else
    memset(sums, 0, sizeof sums);
    for (int m = 0; m < count; m++) {
        const bf16 *values = (const bf16 *)(x + m * b->stride);
        for (int64_t k = 0; k < w->steps; k++) {
            const bf16 *step = (const bf16 *)(weight + k * STEP_BYTES);
            float even = widen(values[2 * k]), odd = widen(values[2 * k + 1]);
            for (int c = 0; c < PANEL; c++)
                sums[m][c] += even * widen(step[2 * c]) + odd * widen(step[2 * c + 1]);
        }
    }
#endif
    store_tile(w, b, row, panel, count, sums[0]);
}

INLINE void tile_int8(const Packed *w, const Batch *b, int64_t row, int64_t panel, const int count) {
    const uint8_t *weight = w->weight + panel * w->steps * STEP_BYTES;
    const uint8_t *x = b->rows + row * b->stride;
    _Alignas(64) float sums[MAX_TILE][PANEL];
    const int32_t *shift = w->shift + panel * PANEL;
    const float *scales = w->scales + panel * PANEL;
#if HAS_INT8_DOT
    __m512i lo[MAX_TILE], hi[MAX_TILE];
#pragma GCC unroll 16
    for (int m = 0; m < count; m++) {
        lo[m] = _mm512_loadu_si512(shift);
        hi[m] = _mm512_loadu_si512(shift + 16);
    }
    for (int64_t k = 0; k < w->steps; k++, weight += STEP_BYTES) {
        __m512i w_lo = _mm512_loadu_si512(weight), w_hi = _mm512_loadu_si512(weight + 64);
        _mm_prefetch((const char *)weight + PREFETCH, _MM_HINT_T1);
        _mm_prefetch((const char *)weight + PREFETCH + 64, _MM_HINT_T1);
#pragma GCC unroll 16
        for (int m = 0; m < count; m++) {
            __m512i quad = _mm512_set1_epi32(load_step(x + m * b->stride + 4 * k));
            lo[m] = _mm512_dpbusd_epi32(lo[m], quad, w_lo);
            hi[m] = _mm512_dpbusd_epi32(hi[m], quad, w_hi);
        }
    }
    _Alignas(64) int32_t totals[MAX_TILE][PANEL];
#pragma GCC unroll 16
    for (int m = 0; m < count; m++) {
        _mm512_store_si512(totals[m], lo[m]);
        _mm512_store_si512(totals[m] + 16, hi[m]);
    }
#else
    int32_t totals[MAX_TILE][PANEL];
    for (int m = 0; m < count; m++) {
        const uint8_t *values = x + m * b->stride;
        memcpy(totals[m], shift, sizeof totals[m]);
        for (int64_t k = 0; k < w->steps; k++) {
            const int8_t *step = (const int8_t *)(weight + k * STEP_BYTES);
            for (int c = 0; c < PANEL; c++)
                for (int i = 0; i < 4; i++) totals[m][c] += values[4 * k + i] * step[4 * c + i];
        }
    }
#endif
    for (int m = 0; m < count; m++)
        for (int c = 0; c < PANEL; c++) sums[m][c] = (float)totals[m][c] * b->scales[row + m] * scales[c];
    store_tile(w, b, row, panel, count, sums[0]);
}

#define TILE_CASE(kind, n) case n: tile_##kind(w, b, row, panel, n); break;
#define DEFINE_ROWS(kind)                                                                         \
    static void rows_##kind(const Packed *w, const Batch *b, int64_t row, int64_t panel, int n) { \
        switch (n) {                                                                              \
            TILE_CASE(kind, 1) TILE_CASE(kind, 2) TILE_CASE(kind, 3) TILE_CASE(kind, 4)           \
            TILE_CASE(kind, 5) TILE_CASE(kind, 6) TILE_CASE(kind, 7) TILE_CASE(kind, 8)           \
            TILE_CASE(kind, 9) TILE_CASE(kind, 10) TILE_CASE(kind, 11) TILE_CASE(kind, 12)        \
        }                                                                                         \
    }
DEFINE_ROWS(bf16)
DEFINE_ROWS(int8)

typedef void (*Rows)(const Packed *, const Batch *, int64_t, int64_t, int);

/* Panels begin .. end - 1. A panel meets one chunk of rows after the other, in tiles of equal size. */
INLINE void multiply_panels(const Packed *w, const Batch *b, int64_t tokens, int64_t begin, int64_t end,
                            Rows rows) {
    for (int64_t chunk = 0; chunk < tokens; chunk += ROW_CHUNK) {
        int64_t count = min64(ROW_CHUNK, tokens - chunk), tiles = (count + MAX_TILE - 1) / MAX_TILE;
        for (int64_t panel = begin; panel < end; panel++)
            for (int64_t t = 0; t < tiles; t++) {
                int64_t first = count * t / tiles, last = count * (t + 1) / tiles;
                rows(w, b, chunk + first, panel, (int)(last - first));
            }
    }
}

typedef struct {
    const Packed *weight;
    const Batch *batch;
    int64_t tokens, panels, chunks;
} Product;

#define DEFINE_PANELS(kind)                                                                           \
    static void panels_##kind(const void *job, int64_t chunk) {                                       \
        const Product *j = job;                                                                       \
        multiply_panels(j->weight, j->batch, j->tokens, j->panels * chunk / j->chunks,                \
                        j->panels * (chunk + 1) / j->chunks, rows_##kind);                            \
    }
DEFINE_PANELS(bf16)
DEFINE_PANELS(int8)

static void multiply(Pool *pool, Job run, const Packed *w, const Batch *b, int64_t tokens) {
    int64_t panels = (w->channels + PANEL - 1) / PANEL, chunks = min64(panels, SHARES * pool_threads(pool));
    Product job = {w, b, tokens, panels, chunks};
    pool_run(pool, run, &job, chunks);
}

void linear_bf16(Pool *pool, const uint8_t *weight, const float *bias, int64_t channels, int64_t steps,
                 const bf16 *x, int64_t tokens, void *out, int64_t out_is_float) {
    Packed w = {weight, bias, 0, 0, channels, steps};
    Batch b = {(const uint8_t *)x, steps * 4, 0, out, out_is_float};
    multiply(pool, panels_bf16, &w, &b, tokens);
}

/* One row to int8, shifted by 128 so that the dot instruction may take it as unsigned. Returns the scale. */
static float quantize_row(const bf16 *x, int64_t size, int64_t padded, uint8_t *to) {
#if HAS_AVX512
    __m512 peaks = _mm512_setzero_ps();
    int64_t whole = size & ~15L;
    __mmask16 tail = (__mmask16)((1u << (size - whole)) - 1);
    for (int64_t k = 0; k < whole; k += 16) peaks = _mm512_max_ps(peaks, _mm512_abs_ps(load16(x + k)));
    peaks = _mm512_max_ps(peaks, _mm512_abs_ps(widen16(_mm256_maskz_loadu_epi16(tail, x + whole))));
    float peak = _mm512_reduce_max_ps(peaks);
    __m512 inverse = _mm512_set1_ps(peak > 0 ? 127.0f / peak : 0.0f);
    __m512i middle = _mm512_set1_epi32(128);
    for (int64_t k = 0; k < size; k += 16) {
        __mmask16 lanes = k < whole ? 0xffff : tail;
        __m512 values = widen16(_mm256_maskz_loadu_epi16(lanes, x + k));
        __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(values, inverse)), middle);
        _mm_mask_storeu_epi8(to + k, lanes, _mm512_cvtepi32_epi8(rounded));
    }
#else
    float peak = 0;
    for (int64_t k = 0; k < size; k++) peak = __builtin_fmaxf(peak, __builtin_fabsf(widen(x[k])));
    float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    for (int64_t k = 0; k < size; k++)
        to[k] = (uint8_t)((int)__builtin_rintf(widen(x[k]) * inverse) + 128);
#endif
    for (int64_t k = size; k < padded; k++) to[k] = 128;
    return peak / 127.0f;
}

typedef struct {
    const bf16 *x;
    int64_t size, padded, tokens, chunks;
    uint8_t *to;
    float *scales;
} Rounding;

static void quantize_rows(const void *job, int64_t chunk) {
    const Rounding *j = job;
    int64_t end = j->tokens * (chunk + 1) / j->chunks;
    for (int64_t t = j->tokens * chunk / j->chunks; t < end; t++)
        j->scales[t] = quantize_row(j->x + t * j->size, j->size, j->padded, j->to + t * j->padded);
}

/* scratch: tokens rows of 4 * steps bytes, then tokens floats. */
void linear_int8(Pool *pool, const uint8_t *weight, const float *bias, const float *scales,
                 const int32_t *shift, int64_t channels, int64_t steps, const bf16 *x, int64_t size,
                 int64_t tokens, uint8_t *scratch, void *out, int64_t out_is_float) {
    float *row_scales = (float *)(scratch + tokens * steps * 4);
    int64_t chunks = chunks_of(pool, tokens, tokens * size > PARALLEL_VALUES);
    Rounding rounding = {x, size, steps * 4, tokens, chunks, scratch, row_scales};
    pool_run(pool, quantize_rows, &rounding, chunks);
    Packed w = {weight, bias, scales, shift, channels, steps};
    Batch b = {scratch, steps * 4, row_scales, out, out_is_float};
    multiply(pool, panels_int8, &w, &b, tokens);
}
