/* RMS norm of rows, and the same after adding a residual. */
#include "native.h"

enum { PARALLEL_VALUES = 65536 }; /* fewer are done sooner than shared */

INLINE void scale_row(const bf16 *x, const bf16 *weight, int64_t size, float eps, bf16 *out) {
    float squares = 0;
    int64_t i = 0;
#if HAS_AVX512
    __m512 sums = _mm512_setzero_ps();
    for (; i + 16 <= size; i += 16) {
        __m512 v = load16(x + i);
        sums = _mm512_fmadd_ps(v, v, sums);
    }
    squares = _mm512_reduce_add_ps(sums);
#endif
    for (; i < size; i++) squares += widen(x[i]) * widen(x[i]);
    float scale = 1.0f / __builtin_sqrtf(squares / (float)size + eps);
    i = 0;
#if HAS_AVX512
    for (; i + 16 <= size; i += 16)
        store16(out + i, _mm512_mul_ps(_mm512_mul_ps(load16(x + i), _mm512_set1_ps(scale)), load16(weight + i)));
#endif
    for (; i < size; i++) out[i] = narrow(widen(x[i]) * scale * widen(weight[i]));
}

/* to += x, rounded. */
INLINE void add_row(const bf16 *x, int64_t size, bf16 *to) {
    int64_t i = 0;
#if HAS_AVX512
    for (; i + 16 <= size; i += 16) store16(to + i, _mm512_add_ps(load16(x + i), load16(to + i)));
#endif
    for (; i < size; i++) to[i] = narrow(widen(x[i]) + widen(to[i]));
}

typedef struct {
    const bf16 *x, *weight;
    bf16 *residual;
    float eps;
    int64_t tokens, size, chunks;
    bf16 *out;
} Rows;

static void norm_rows(const void *job, int64_t chunk) {
    const Rows *j = job;
    int64_t size = j->size, end = j->tokens * (chunk + 1) / j->chunks;
    for (int64_t t = j->tokens * chunk / j->chunks; t < end; t++)
        scale_row(j->x + t * size, j->weight, size, j->eps, j->out + t * size);
}

static void add_norm_rows(const void *job, int64_t chunk) {
    const Rows *j = job;
    int64_t size = j->size, end = j->tokens * (chunk + 1) / j->chunks;
    for (int64_t t = j->tokens * chunk / j->chunks; t < end; t++) {
        bf16 *sum = j->residual + t * size;
        add_row(j->x + t * size, size, sum);
        scale_row(sum, j->weight, size, j->eps, j->out + t * size);
    }
}

void rms_norm(Pool *pool, const bf16 *x, const bf16 *weight, float eps, int64_t tokens, int64_t size,
              bf16 *out) {
    int64_t chunks = chunks_of(pool, tokens, tokens * size > PARALLEL_VALUES);
    Rows job = {x, weight, 0, eps, tokens, size, chunks, out};
    pool_run(pool, norm_rows, &job, chunks);
}

/* residual += x, rounded; out = its norm. */
void add_rms_norm(Pool *pool, const bf16 *x, bf16 *residual, const bf16 *weight, float eps, int64_t tokens,
                  int64_t size, bf16 *out) {
    int64_t chunks = chunks_of(pool, tokens, tokens * size > PARALLEL_VALUES);
    Rows job = {x, weight, residual, eps, tokens, size, chunks, out};
    pool_run(pool, add_norm_rows, &job, chunks);
}
