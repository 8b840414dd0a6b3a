/* Causal attention over pages, with an online softmax over blocks of 64 keys (Milakov & Gimelshein 2018;
 * Dao et al. 2022).
 *
 * A task is one kv head and a run of a slice's tokens; its rows are (token, head of the group). Blocks
 * start at multiples of 64 positions and a masked block changes nothing, so a token's result does not
 * depend on how its row was cut into slices, nor on the rest of the batch.
 *
 * A slice with a base is no chain but, say, a tree: its tokens see the keys before the base, and those
 * from there on that their bits name. Each is a task of its own whose keys are put in a row, so it gives
 * bit for bit what it would give at the end of a chain. */
#include "native.h"

#include <math.h>
#include <stdlib.h>

enum { BLOCK = 64, TASK_ROWS = 48, MAX_TILE = 6 };

typedef struct {
    const bf16 *q, *k, *v;
    bf16 *out;
    const int32_t *pages; /* the slice's row of the page table */
    int64_t page_size, heads, kv_heads, dim, window;
    float scale; /* times log2 e: the softmax is taken in powers of two */
    int64_t head, token, start, count; /* kv head; first token, its place in the row, number of tokens */
    int64_t end;                       /* past the last key that any of its tokens sees */
    int64_t base, reach;               /* -1: causal; else the first key it sees of those before the base */
    uint64_t bits;
} Task;

/* Where key `place` of a task lies in the row: past the base only the named ones count. */
INLINE int64_t key_at(const Task *t, int64_t place) {
    if (t->base < 0 || place < t->base) return place;
    uint64_t bits = t->bits;
    for (int64_t i = t->base; i < place; i++) bits &= bits - 1;
    return t->base + __builtin_ctzll(bits);
}

INLINE int64_t slot_of(const Task *t, int64_t place) {
    int64_t at = key_at(t, place);
    return (int64_t)t->pages[at / t->page_size] * t->page_size + at % t->page_size;
}

/* The first key that token i sees. */
INLINE int64_t first_visible(const Task *t, int64_t i) {
    return t->base < 0 ? max64(0, t->start + i - t->window + 1) : t->reach;
}

/* Bit s: token i sees the key at first + s; 64 keys. */
INLINE uint64_t see_block(const Task *t, int64_t i, int64_t first) {
    int64_t low = first_visible(t, i) - first, high = t->start + i + 1 - first;
    uint64_t visible = high >= BLOCK ? ~0ull : high <= 0 ? 0 : (1ull << high) - 1;
    if (low > 0) visible = low >= BLOCK ? 0 : visible & (~0ull << low);
    return visible;
}

/* Plain C, any head size: one row at a time, key by key. */
static void attend_plain(const Task *t) {
    int64_t group = t->heads / t->kv_heads, kv_width = t->kv_heads * t->dim;
    for (int64_t i = 0; i < t->count; i++)
        for (int64_t g = 0; g < group; g++) {
            int64_t at = ((t->token + i) * t->heads + t->head * group + g) * t->dim;
            float sums[t->dim], peak = -INFINITY, total = 0;
            uint64_t visible = 0;
            memset(sums, 0, sizeof sums);
            for (int64_t first = first_visible(t, 0), s = first; s < t->end; s++) {
                if (s == first || s % BLOCK == 0) visible = see_block(t, i, s / BLOCK * BLOCK);
                if (!(visible >> s % BLOCK & 1)) continue;
                int64_t kv = slot_of(t, s) * kv_width + t->head * t->dim;
                float score = 0;
#pragma omp simd reduction(+ : score)
                for (int64_t c = 0; c < t->dim; c++) score += widen(t->q[at + c]) * widen(t->k[kv + c]);
                score *= t->scale;
                float higher = score > peak ? score : peak;
                float keep = exp2_plain(peak - higher), p = exp2_plain(score - higher);
                peak = higher;
                total = total * keep + p;
#pragma omp simd
                for (int64_t c = 0; c < t->dim; c++) sums[c] = sums[c] * keep + p * widen(t->v[kv + c]);
            }
            for (int64_t c = 0; c < t->dim; c++) t->out[at + c] = narrow(sums[c] / total);
        }
}

#if HAS_BF16_DOT
/* 16 rows of 16 words, transposed in place. */
INLINE void transpose16(__m512i r[16]) {
    __m512i t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Where the up to 64 keys from `first` lie, in values from the plane's start; past `end`: -1. */
INLINE void find_block(const Task *t, int64_t first, int64_t end, int64_t at[BLOCK]) {
    int64_t kv_width = t->kv_heads * t->dim, count = min64(BLOCK, end - first), s = 0;
    int64_t chain = t->base < 0 ? count : min64(count, max64(0, t->base - first));
    int64_t page = first / t->page_size, offset = first % t->page_size;
    for (; s < chain; page++, offset = 0) {
        int64_t slot = t->pages[page] * t->page_size + offset, stop = min64(chain, s + t->page_size - offset);
        for (; s < stop; s++, slot++) at[s] = slot * kv_width + t->head * t->dim;
    }
    for (; s < count; s++) at[s] = slot_of(t, first + s) * kv_width + t->head * t->dim;
    for (; s < BLOCK; s++) at[s] = -1;
}

/* keys: [dim/2 in whole 16][64] pairs along dim; values: [32][dim] pairs along keys. Past the end both
 * are `zeros`, for a slot nobody wrote may hold a NaN. Each load asks for its like in the block `ahead`:
 * spread out like this the requests overlap with the work; in one burst they would only stall it. */
static void pack_block(const Task *t, const int64_t at[BLOCK], const int64_t ahead[BLOCK], const bf16 *zeros,
                       uint32_t *keys, uint32_t *values) {
    int64_t words = t->dim / 2;
    for (int64_t c = 0; c < words; c += 16) {
        __mmask16 lanes = (__mmask16)((1u << min64(16, words - c)) - 1);
        for (int64_t s = 0; s < BLOCK; s += 16) {
            __m512i r[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const bf16 *row = at[s + i] < 0 ? zeros : t->k + at[s + i];
                r[i] = _mm512_maskz_loadu_epi32(lanes, row + 2 * c);
                _mm_prefetch((const char *)(t->k + ahead[s + i] + 2 * c), _MM_HINT_T1);
            }
            transpose16(r);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) _mm512_store_si512(keys + (c + i) * BLOCK + s, r[i]);
        }
    }
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                         38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t s = 0; s < BLOCK; s += 2) {
        const bf16 *even = at[s] < 0 ? zeros : t->v + at[s], *odd = at[s + 1] < 0 ? zeros : t->v + at[s + 1];
        uint32_t *to = values + s / 2 * t->dim;
        for (int64_t c = 0; c < t->dim; c += 32) {
            __mmask32 lanes = c + 32 <= t->dim ? ~0u : 0xffff;
            _mm_prefetch((const char *)(t->v + ahead[s] + c), _MM_HINT_T1);
            _mm_prefetch((const char *)(t->v + ahead[s + 1] + c), _MM_HINT_T1);
            __m512i a = _mm512_maskz_loadu_epi16(lanes, even + c), b = _mm512_maskz_loadu_epi16(lanes, odd + c);
            _mm512_store_si512(to + c, _mm512_permutex2var_epi16(a, low, b));
            if (c + 32 <= t->dim) _mm512_store_si512(to + c + 16, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

/* c = keep * c + a b, or a b without `keep`. a: [rows][steps] pairs; b: [steps][16 vectors] pairs. */
INLINE void tile(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t steps, float *c,
                 int64_t ldc, const float *keep, const int rows, const int vectors) {
    __m512 sums[MAX_TILE][4];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            sums[m][n] = keep ? _mm512_mul_ps(_mm512_set1_ps(keep[m]), _mm512_load_ps(c + m * ldc + 16 * n))
                              : _mm512_setzero_ps();
    for (int64_t k = 0; k < steps; k++) {
        __m512bh right[4];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) right[n] = (__m512bh)_mm512_load_si512(b + k * ldb + 16 * n);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            __m512bh left = (__m512bh)_mm512_set1_epi32((int32_t)a[m * lda + k]);
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++) sums[m][n] = _mm512_dpbf16_ps(sums[m][n], left, right[n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) _mm512_store_ps(c + m * ldc + 16 * n, sums[m][n]);
}

#define TILE_CASE(rows, vectors) \
    case rows: tile(a, lda, b, ldb, steps, c, ldc, keep, rows, vectors); break;
#define DEFINE_TILES(name, vectors)                                                                    \
    static void name(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t steps,    \
                     float *c, int64_t ldc, const float *keep, int count) {                            \
        switch (count) {                                                                               \
            TILE_CASE(1, vectors) TILE_CASE(2, vectors) TILE_CASE(3, vectors) TILE_CASE(4, vectors)    \
            TILE_CASE(5, vectors) TILE_CASE(6, vectors)                                                \
        }                                                                                              \
    }
DEFINE_TILES(tiles_64, 4)
DEFINE_TILES(tiles_16, 1)

/* Scores to weights, for the block's visible keys; returns what the sums so far keep. */
INLINE float soften(float *scores, bf16 *weights, float scale, uint64_t visible, float *peak, float *total) {
    __m512 x[4], most = _mm512_set1_ps(-INFINITY), all = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        x[n] = _mm512_mul_ps(_mm512_load_ps(scores + 16 * n), _mm512_set1_ps(scale));
        x[n] = _mm512_mask_blend_ps((__mmask16)(visible >> 16 * n), _mm512_set1_ps(-INFINITY), x[n]);
        most = _mm512_max_ps(most, x[n]);
    }
    float higher = __builtin_fmaxf(*peak, _mm512_reduce_max_ps(most));
    float from = higher == -INFINITY ? 0.0f : higher; /* nothing visible yet */
    float keep = exp2_plain(*peak - from);
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        __m512 p = exp2_16(_mm512_sub_ps(x[n], _mm512_set1_ps(from)));
        all = _mm512_add_ps(all, p);
        store16(weights + 16 * n, p);
    }
    *peak = higher;
    *total = *total * keep + _mm512_reduce_add_ps(all);
    return keep;
}

/* Where the first block lies that `t` reads. */
INLINE int64_t first_block(const Task *t) { return first_visible(t, 0) / BLOCK * BLOCK; }

/* Head sizes that are multiples of 16. `next` is the task that this thread is likely to do next. */
static void attend_blocked(const Task *t, const Task *next) {
    int64_t group = t->heads / t->kv_heads, rows = t->count * group, dim = t->dim, words = dim / 2;
    _Alignas(64) uint32_t keys[(words + 15) / 16 * 16 * BLOCK], values[BLOCK / 2 * dim], q[rows * words];
    _Alignas(64) float scores[rows * BLOCK], sums[rows * dim];
    _Alignas(64) bf16 weights[rows * BLOCK];
    float peaks[rows], totals[rows], keeps[rows];
    bf16 zeros[dim];
    int64_t at[BLOCK], ahead[BLOCK], end = t->end;
    int64_t first = first_block(t);
    find_block(t, first, end, ahead);
    for (int64_t r = 0; r < rows; r++) {
        int64_t from = ((t->token + r / group) * t->heads + t->head * group + r % group) * dim;
        memcpy(q + r * words, t->q + from, dim * sizeof(bf16));
        peaks[r] = -INFINITY;
        totals[r] = 0;
    }
    memset(sums, 0, sizeof sums);
    memset(zeros, 0, sizeof zeros);
    for (; first < end; first += BLOCK) {
        memcpy(at, ahead, sizeof at);
        if (first + BLOCK < end)
            find_block(t, first + BLOCK, end, ahead);
        else
            find_block(next, first_block(next), next->end, ahead);
        pack_block(t, at, ahead, zeros, keys, values);
        for (int64_t r = 0; r < rows; r += MAX_TILE) {
            int count = (int)min64(MAX_TILE, rows - r);
            tiles_64(q + r * words, words, keys, BLOCK, words, scores + r * BLOCK, BLOCK, 0, count);
        }
        for (int64_t i = 0, r = 0; i < t->count; i++) {
            uint64_t visible = see_block(t, i, first);
            for (int64_t g = 0; g < group; g++, r++)
                keeps[r] = soften(scores + r * BLOCK, weights + r * BLOCK, t->scale, visible, peaks + r,
                                  totals + r);
        }
        int64_t steps = min64(BLOCK, end - first + 1) / 2; /* weights past the last key are zero */
        for (int64_t r = 0; r < rows; r += MAX_TILE) {
            int count = (int)min64(MAX_TILE, rows - r);
            const uint32_t *left = (const uint32_t *)(weights + r * BLOCK);
            int64_t c = 0;
            for (; c + 64 <= dim; c += 64)
                tiles_64(left, BLOCK / 2, values + c, dim, steps, sums + r * dim + c, dim, keeps + r, count);
            for (; c < dim; c += 16)
                tiles_16(left, BLOCK / 2, values + c, dim, steps, sums + r * dim + c, dim, keeps + r, count);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t to = ((t->token + r / group) * t->heads + t->head * group + r % group) * dim;
        __m512 inverse = _mm512_set1_ps(1.0f / totals[r]);
        for (int64_t c = 0; c < dim; c += 16)
            store16(t->out + to + c, _mm512_mul_ps(_mm512_load_ps(sums + r * dim + c), inverse));
    }
}
#endif

static void attend(const Task *t, const Task *next) {
#if HAS_BF16_DOT
    if (t->dim % 16 == 0) {
        attend_blocked(t, next);
        return;
    }
#endif
    (void)next;
    attend_plain(t);
}

typedef struct {
    const Task *tasks;
    int64_t count, share;
} Tasks;

/* Long prefixes come last in the list: start with them. */
static void attend_share(const void *job, int64_t chunk) {
    const Tasks *j = job;
    int64_t first = j->count - 1 - chunk * j->share, end = max64(0, first + 1 - j->share);
    for (int64_t i = first; i >= end; i--) attend(j->tasks + i, j->tasks + max64(i - 1, 0));
}

/* window: at least 1; larger than any position for none. bases, bits, positions: null if every slice is
 * causal; positions also if there is no window. */
void paged_attention(Pool *pool, const bf16 *q, const bf16 *k_plane, const bf16 *v_plane,
                     const int32_t *page_table, int64_t table_stride, const int32_t *rows,
                     const int32_t *starts, const int32_t *lengths, int64_t slices, int64_t page_size,
                     float scale, int64_t window, const int32_t *bases, const int64_t *bits,
                     const int64_t *positions, int64_t heads, int64_t kv_heads, int64_t dim, bf16 *out) {
    int64_t threads = pool_threads(pool);
    int64_t run = max64(1, TASK_ROWS / (heads / kv_heads)), tasks = 0, tokens = 0;
    for (int64_t i = 0; i < slices; i++)
        tasks += (bases && bases[i] >= 0 ? lengths[i] : (lengths[i] + run - 1) / run) * kv_heads;
    if (!tasks) return;
    Task *list = malloc(tasks * sizeof(Task));
    if (!list) abort();
    int64_t n = 0;
    for (int64_t i = 0; i < slices; tokens += lengths[i++]) {
        int64_t base = bases ? bases[i] : -1, together = base < 0 ? run : 1;
        for (int64_t at = 0; at < lengths[i]; at += together) {
            int64_t token = tokens + at, start = starts[i] + at, count = min64(together, lengths[i] - at);
            Task task = {q, k_plane, v_plane, out, page_table + rows[i] * table_stride, page_size, heads,
                         kv_heads, dim, window, scale * 1.44269504f, 0, token, start, count,
                         start + count, base, 0, 0};
            if (base >= 0) {
                task.bits = (uint64_t)bits[token];
                task.end = base + __builtin_popcountll(task.bits);
                task.start = task.end - 1;
                if (positions) task.reach = min64(base, max64(0, positions[token] - window + 1));
            }
            for (int64_t head = 0; head < kv_heads; head++) {
                task.head = head;
                list[n++] = task;
            }
        }
    }
    /* Heads of one token run lie side by side in memory: few threads should share them. */
    int64_t share = tasks / (8 * threads) / kv_heads * kv_heads;
    if (share == 0) share = tasks >= 4 * threads * kv_heads ? kv_heads : 1;
    Tasks job = {list, tasks, share};
    pool_run(pool, attend_share, &job, (tasks + share - 1) / share);
    free(list);
}
