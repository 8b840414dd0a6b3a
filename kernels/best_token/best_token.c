/* The largest value of each row and the first place it stands in. */
#include "native.h"

#include <math.h>

typedef struct {
    const float *logits;
    int64_t stride, size;
    float *values;
    int64_t *tokens;
} Rows;

static void scan_plain(const float *row, int64_t from, int64_t end, float *best, int64_t *place, int *is_nan) {
    for (int64_t i = from; i < end; i++) {
        *is_nan |= row[i] != row[i];
        if (row[i] > *best) {
            *best = row[i];
            *place = i;
        }
    }
}

static void best_of_row(const void *job, int64_t r) {
    const Rows *j = job;
    const float *row = j->logits + r * j->stride;
    float best = -INFINITY;
    int64_t place = 0, done = 0;
    int is_nan = 0;
#if HAS_AVX512
    enum { LANES = 16, STREAMS = 4 };
    __m512 peaks[STREAMS];
    __m512i places[STREAMS];
    __mmask16 odd = 0;
    for (int n = 0; n < STREAMS; n++) {
        peaks[n] = _mm512_set1_ps(-INFINITY);
        places[n] = _mm512_setzero_si512();
    }
    for (; done + LANES * STREAMS <= j->size; done += LANES * STREAMS) {
        __m512i here = _mm512_set1_epi32((int32_t)done);
#pragma GCC unroll 4
        for (int n = 0; n < STREAMS; n++) {
            __m512 x = _mm512_loadu_ps(row + done + n * LANES);
            __mmask16 higher = _mm512_cmp_ps_mask(x, peaks[n], _CMP_GT_OQ);
            odd |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
            peaks[n] = _mm512_mask_mov_ps(peaks[n], higher, x);
            places[n] = _mm512_mask_mov_epi32(places[n], higher, here);
        }
    }
    is_nan = odd != 0;
    for (int n = 0; n < STREAMS && done; n++) {
        float values[LANES];
        int32_t bases[LANES];
        _mm512_storeu_ps(values, peaks[n]);
        _mm512_storeu_si512(bases, places[n]);
        for (int lane = 0; lane < LANES; lane++) {
            int64_t at = bases[lane] + n * LANES + lane;
            if (values[lane] > best || (values[lane] == best && at < place)) {
                best = values[lane];
                place = at;
            }
        }
    }
#endif
    scan_plain(row, done, j->size, &best, &place, &is_nan);
    j->values[r] = is_nan ? NAN : best;
    j->tokens[r] = place;
}

void best_token(Pool *pool, const float *logits, int64_t rows, int64_t stride, int64_t size, float *values,
                int64_t *tokens) {
    Rows job = {logits, stride, size, values, tokens};
    pool_run(pool, best_of_row, &job, rows);
}
