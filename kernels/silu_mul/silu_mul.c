/* silu(gate) * up for rows [gate, up]. */
#include "native.h"

enum { PARALLEL_VALUES = 16384 };

void silu_mul(const bf16 *gate_up, int64_t tokens, int64_t size, bf16 *out, int64_t threads) {
    const float log2_e = 1.44269504f;
#pragma omp parallel for num_threads(threads) if (tokens * size > PARALLEL_VALUES)
    for (int64_t t = 0; t < tokens; t++) {
        const bf16 *gate = gate_up + t * 2 * size, *up = gate + size;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float v = widen(gate[i]);
            /* Below -87 the power would overflow; there silu is 0 but for less than 1e-36. */
            float gated = v < -87.0f ? -0.0f : v / (1.0f + exp2_plain(-v * log2_e));
            out[t * size + i] = narrow(gated * widen(up[i]));
        }
    }
}
