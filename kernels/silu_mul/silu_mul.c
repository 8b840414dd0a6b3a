/* silu(gate) * up for rows [gate, up]. */
#include "native.h"

enum { PARALLEL_VALUES = 16384 };

typedef struct {
    const bf16 *gate_up;
    int64_t tokens, size, chunks;
    bf16 *out;
} Rows;

static void silu_mul_rows(const void *job, int64_t chunk) {
    const Rows *j = job;
    const float log2_e = 1.44269504f;
    int64_t size = j->size, end = j->tokens * (chunk + 1) / j->chunks;
    for (int64_t t = j->tokens * chunk / j->chunks; t < end; t++) {
        const bf16 *gate = j->gate_up + t * 2 * size, *up = gate + size;
        bf16 *out = j->out + t * size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float v = widen(gate[i]);
            /* Below -87 the power would overflow; there silu is 0 but for less than 1e-36. */
            float gated = v < -87.0f ? -0.0f : v / (1.0f + exp2_plain(-v * log2_e));
            out[i] = narrow(gated * widen(up[i]));
        }
    }
}

void silu_mul(Pool *pool, const bf16 *gate_up, int64_t tokens, int64_t size, bf16 *out) {
    int64_t chunks = chunks_of(pool, tokens, tokens * size > PARALLEL_VALUES);
    Rows job = {gate_up, tokens, size, chunks, out};
    pool_run(pool, silu_mul_rows, &job, chunks);
}
