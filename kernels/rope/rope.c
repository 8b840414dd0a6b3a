/* Per-head RMS norm (optional) and rotation of q and k; k and v go to their slots in the planes. */
#include "native.h"

enum { PARALLEL_VALUES = 65536 };

INLINE void rotate_head(const bf16 *x, const float *cos_sin, const bf16 *weight, float eps, int64_t dim,
                        bf16 *out) {
    int64_t half = dim / 2;
    const float *cosines = cos_sin, *sines = cos_sin + half;
    float scale = 1.0f;
    if (weight) {
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < dim; i++) squares += widen(x[i]) * widen(x[i]);
        scale = 1.0f / __builtin_sqrtf(squares / (float)dim + eps);
    }
    int64_t i = 0;
#if HAS_AVX512
    for (; i + 16 <= half; i += 16) {
        __m512 first = load16(x + i), second = load16(x + half + i);
        if (weight) {
            __m512 by = _mm512_set1_ps(scale);
            first = _mm512_mul_ps(first, _mm512_mul_ps(by, load16(weight + i)));
            second = _mm512_mul_ps(second, _mm512_mul_ps(by, load16(weight + half + i)));
        }
        __m512 cosine = _mm512_loadu_ps(cosines + i), sine = _mm512_loadu_ps(sines + i);
        store16(out + i, _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine)));
        store16(out + half + i, _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine)));
    }
#endif
    for (; i < half; i++) {
        float first = widen(x[i]), second = widen(x[half + i]);
        if (weight) {
            first *= scale * widen(weight[i]);
            second *= scale * widen(weight[half + i]);
        }
        out[i] = narrow(first * cosines[i] - second * sines[i]);
        out[half + i] = narrow(second * cosines[i] + first * sines[i]);
    }
}

typedef struct {
    const bf16 *qkv;
    const int64_t *positions;
    const float *cos_sin;
    const int64_t *slots;
    bf16 *k_plane, *v_plane;
    const bf16 *q_norm, *k_norm;
    float eps;
    int64_t tokens, heads, kv_heads, dim, chunks;
    bf16 *q_out;
} Tokens;

static void rope_tokens(const void *job, int64_t chunk) {
    const Tokens *j = job;
    int64_t heads = j->heads, kv_heads = j->kv_heads, dim = j->dim;
    int64_t width = (heads + 2 * kv_heads) * dim, kv_width = kv_heads * dim;
    int64_t end = j->tokens * (chunk + 1) / j->chunks;
    for (int64_t t = j->tokens * chunk / j->chunks; t < end; t++) {
        const bf16 *q = j->qkv + t * width, *k = q + heads * dim, *v = k + kv_width;
        const float *angles = j->cos_sin + j->positions[t] * dim;
        bf16 *k_out = j->k_plane + j->slots[t] * kv_width;
        for (int64_t h = 0; h < heads; h++)
            rotate_head(q + h * dim, angles, j->q_norm, j->eps, dim, j->q_out + (t * heads + h) * dim);
        for (int64_t h = 0; h < kv_heads; h++)
            rotate_head(k + h * dim, angles, j->k_norm, j->eps, dim, k_out + h * dim);
        memcpy(j->v_plane + j->slots[t] * kv_width, v, kv_width * sizeof(bf16));
    }
}

void rope_write_kv(Pool *pool, const bf16 *qkv, const int64_t *positions, const float *cos_sin,
                   const int64_t *slots, bf16 *k_plane, bf16 *v_plane, const bf16 *q_norm,
                   const bf16 *k_norm, float eps, int64_t tokens, int64_t heads, int64_t kv_heads,
                   int64_t dim, bf16 *q_out) {
    int64_t chunks = chunks_of(pool, tokens, tokens * (heads + 2 * kv_heads) * dim > PARALLEL_VALUES);
    Tokens job = {qkv, positions, cos_sin, slots, k_plane, v_plane, q_norm, k_norm,
                  eps, tokens,    heads,   kv_heads, dim,   chunks,  q_out};
    pool_run(pool, rope_tokens, &job, chunks);
}
