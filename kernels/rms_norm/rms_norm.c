/* RMS norm of rows, and the same after adding a residual. */
#include "native.h"

enum { PARALLEL_VALUES = 65536 }; /* fewer are done before a second thread has woken up */

INLINE void scale_row(const bf16 *x, const bf16 *weight, int64_t size, float eps, bf16 *out) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; i++) squares += widen(x[i]) * widen(x[i]);
    float scale = 1.0f / __builtin_sqrtf(squares / (float)size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) out[i] = narrow(widen(x[i]) * scale * widen(weight[i]));
}

void rms_norm(const bf16 *x, const bf16 *weight, float eps, int64_t tokens, int64_t size, bf16 *out,
              int64_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens * size > PARALLEL_VALUES)
    for (int64_t t = 0; t < tokens; t++) scale_row(x + t * size, weight, size, eps, out + t * size);
}

/* residual += x, rounded; out = its norm. */
void add_rms_norm(const bf16 *x, bf16 *residual, const bf16 *weight, float eps, int64_t tokens, int64_t size,
                  bf16 *out, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (tokens * size > PARALLEL_VALUES)
    for (int64_t t = 0; t < tokens; t++) {
        bf16 *sum = residual + t * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) sum[i] = narrow(widen(x[t * size + i]) + widen(sum[i]));
        scale_row(sum, weight, size, eps, out + t * size);
    }
}
