/* Shared by the kernels: bfloat16 rows, 32-bit floats inside, one pool of threads (pool.h).
 *
 * Every kernel has a plain C path; the AVX-512 paths are compiled when the CPU of the build has them. */
#pragma once

#include "pool.h"

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define HAS_AVX512 1
#else
#define HAS_AVX512 0
#endif
#if HAS_AVX512 && defined(__AVX512BF16__)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif
#if HAS_AVX512 && defined(__AVX512VNNI__)
#define HAS_INT8_DOT 1
#else
#define HAS_INT8_DOT 0
#endif

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

INLINE float widen(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

/* Round to nearest, halves to even. A NaN stays a (quiet) NaN. */
INLINE bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40;
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

/* 2^x for x <= 127, in plain arithmetic so that loops over it vectorise; relative error below 2e-7.
 * 2^x = 2^n 2^f with n = round(x), f in [-1/2, 1/2]; 2^f by its Taylor series. 0 below 2^-126. */
INLINE float exp2_plain(float x) {
    float bounded = x < -127.0f ? -127.0f : x, n = __builtin_rintf(bounded), f = bounded - n;
    float p = 1.5403530393e-4f;
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291076e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    p = p * f + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23; /* n = -127 gives the bits of 0 */
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Into how many chunks a job of `items` goes: a few for each thread, or one if all of it is small. */
INLINE int64_t chunks_of(const Pool *pool, int64_t items, int64_t is_large) {
    return is_large ? min64(items, 4 * pool_threads(pool)) : min64(items, 1);
}

#if HAS_AVX512
INLINE __m512 widen16(__m256i values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

INLINE __m512 load16(const bf16 *from) { return widen16(_mm256_loadu_si256((const void *)from)); }

INLINE __m256i narrow16(__m512 values) {
#if HAS_BF16_DOT
    return (__m256i)_mm512_cvtneps_pbh(values);
#else
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    sum = _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
#endif
}

/* The same for 16 values; -inf gives 0. */
INLINE __m512 exp2_16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-127.0f));
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, n), p = _mm512_set1_ps(1.5403530393e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3333558146e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291076e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504108665e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022650696e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718056e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(p, _mm512_castsi512_ps(bits));
}

INLINE void store16(bf16 *to, __m512 values) { _mm256_storeu_si256((void *)to, narrow16(values)); }
#endif
