// Vectors of 16 floats, for three kinds of processor: AVX-512 (one register), AVX2 (two) and any other (an array).
//
// Everything else is written once, in terms of what stands here.  A word is 32 bits of a row of a matrix: one float,
// two bfloat16 or four 8-bit integers.  A matmul takes one word of a row and 16 words of a weight at a time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(BERTLITE_AVX512) || defined(BERTLITE_AVX2)
#include <immintrin.h>
#endif

namespace bertlite {

using BFloat16 = uint16_t;  // the upper half of a float
constexpr long LANES = 16;  // floats in a vector, on every processor

inline float to_float(BFloat16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float to_float(float x) { return x; }

#if defined(BERTLITE_AVX512)

struct Vector {
    __m512 x;
};

inline Vector zeros() { return {_mm512_setzero_ps()}; }
inline Vector broadcast(float value) { return {_mm512_set1_ps(value)}; }
inline Vector load(const float* from) { return {_mm512_loadu_ps(from)}; }
inline void store(float* to, Vector v) { _mm512_storeu_ps(to, v.x); }
inline Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.x, b.x)}; }
inline Vector multiply_add(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }  // a * b + c
inline Vector max(Vector a, Vector b) { return {_mm512_max_ps(a.x, b.x)}; }
inline Vector min(Vector a, Vector b) { return {_mm512_min_ps(a.x, b.x)}; }
inline Vector abs(Vector a) { return {_mm512_abs_ps(a.x)}; }
inline float reduce_sum(Vector a) { return _mm512_reduce_add_ps(a.x); }
inline float reduce_max(Vector a) { return _mm512_reduce_max_ps(a.x); }

// a where x > 0, else b
inline Vector where_positive(Vector x, Vector a, Vector b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.x, _mm512_setzero_ps(), _CMP_GT_OQ), b.x, a.x)};
}

inline Vector nearest_integer(Vector a) {
    return {_mm512_roundscale_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// x * 2^n for integers n
inline Vector ldexp(Vector x, Vector n) { return {_mm512_scalef_ps(x.x, n.x)}; }

inline Vector load(const BFloat16* from) {  // a bfloat16 is the upper half of a float
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

inline void store(BFloat16* to, Vector v) {
#if defined(__AVX512BF16__)
    __m256bh narrow = _mm512_cvtneps_pbh(v.x);  // rounds to nearest, ties to even
    std::memcpy(to, &narrow, 32);
#else
    __m512i bits = _mm512_castps_si512(v.x);
    // add half of what is cut off, less one where the last kept bit is 0: to nearest, ties to even
    __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(v.x, v.x, _CMP_UNORD_Q);  // a nan stays one
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

// integers of 0 to 255: v rounded to nearest
inline void store_rounded(uint8_t* to, Vector v) {
    __m512i integers = _mm512_max_epi32(_mm512_cvtps_epi32(v.x), _mm512_setzero_si512());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(integers));  // too large becomes 255
}

// 16 words of 16 rows, which may begin anywhere, transposed: to[column * stride + row] = from row, column
inline void transpose_words(const void* const (&from)[16], uint32_t* to, long stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from[i]);
    for (int i = 0; i < 16; i += 2) {  // pairs of words of two rows
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // four words of four rows
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {  // quarters of a register, from eight rows
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {  // from all sixteen
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * stride, r[i]);
}

// two rows of 16 bfloat16, interleaved
inline void interleave(const BFloat16* even, const BFloat16* odd, uint32_t* to) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

inline Vector load(const int32_t* from) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(from))}; }  // as floats

using Words = __m512i;
inline Words load_words(const uint32_t* from) { return _mm512_loadu_si512(from); }
inline Words broadcast_word(const void* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return _mm512_set1_epi32(word);
}
inline void prefetch(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1);
}  // into the second cache

struct FloatSums {
    __m512 x = _mm512_setzero_ps();
    void load(const float* from) { x = _mm512_loadu_ps(from); }
    void store(float* to) const { _mm512_storeu_ps(to, x); }
};

struct IntegerSums {
    __m512i x = _mm512_setzero_si512();
    void load(const int32_t* from) { x = _mm512_loadu_si512(from); }
    void store(int32_t* to) const { _mm512_storeu_si512(to, x); }
};

inline void accumulate_float32(FloatSums& sums, Words a, Words b) {
    sums.x = _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sums.x);
}

inline void accumulate_bfloat16(FloatSums& sums, Words a, Words b) {
#if defined(__AVX512BF16__)
    sums.x = _mm512_dpbf16_ps(sums.x, (__m512bh)a, (__m512bh)b);  // both products of each word
#else
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
    __m512 a_even = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
           b_even = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
    __m512 a_odd = _mm512_castsi512_ps(_mm512_and_si512(a, upper)),
           b_odd = _mm512_castsi512_ps(_mm512_and_si512(b, upper));
    sums.x = _mm512_fmadd_ps(a_odd, b_odd, _mm512_fmadd_ps(a_even, b_even, sums.x));
#endif
}

inline void accumulate_int8(IntegerSums& sums, Words a, Words b) {  // a unsigned, b signed
#if defined(__AVX512VNNI__)
    // All four products of each word.  Written as assembly because GCC 12 spills the sums of the intrinsic to memory;
    // a copy of the sum, because it would keep what assembly works on in memory as well.
    __m512i sum = sums.x;
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    sums.x = sum;
#else
    const __m512i bytes = _mm512_set1_epi16(0xff);
    __m512i a_even = _mm512_and_si512(a, bytes), a_odd = _mm512_srli_epi16(a, 8);
    __m512i b_even = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8), b_odd = _mm512_srai_epi16(b, 8);
    // pairs of 16-bit products, added in 32 bits
    sums.x = _mm512_add_epi32(sums.x, _mm512_madd_epi16(a_even, b_even));
    sums.x = _mm512_add_epi32(sums.x, _mm512_madd_epi16(a_odd, b_odd));
#endif
}

#elif defined(BERTLITE_AVX2)

struct Vector {
    __m256 x, y;
};

inline Vector zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vector broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Vector load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Vector v) {
    _mm256_storeu_ps(to, v.x);
    _mm256_storeu_ps(to + 8, v.y);
}
inline Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.x, b.x), _mm256_add_ps(a.y, b.y)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.x, b.x), _mm256_sub_ps(a.y, b.y)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.x, b.x), _mm256_mul_ps(a.y, b.y)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.x, b.x), _mm256_div_ps(a.y, b.y)}; }
inline Vector multiply_add(Vector a, Vector b, Vector c) {  // a * b + c
    return {_mm256_fmadd_ps(a.x, b.x, c.x), _mm256_fmadd_ps(a.y, b.y, c.y)};
}
inline Vector max(Vector a, Vector b) { return {_mm256_max_ps(a.x, b.x), _mm256_max_ps(a.y, b.y)}; }
inline Vector min(Vector a, Vector b) { return {_mm256_min_ps(a.x, b.x), _mm256_min_ps(a.y, b.y)}; }
inline Vector abs(Vector a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.x), _mm256_andnot_ps(sign, a.y)};
}

inline float reduce_sum(Vector a) {
    __m256 both = _mm256_add_ps(a.x, a.y);
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float reduce_max(Vector a) {
    __m256 both = _mm256_max_ps(a.x, a.y);
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// a where x > 0, else b
inline Vector where_positive(Vector x, Vector a, Vector b) {
    const __m256 zero = _mm256_setzero_ps();
    return {_mm256_blendv_ps(b.x, a.x, _mm256_cmp_ps(x.x, zero, _CMP_GT_OQ)),
            _mm256_blendv_ps(b.y, a.y, _mm256_cmp_ps(x.y, zero, _CMP_GT_OQ))};
}

inline Vector nearest_integer(Vector a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.x, mode), _mm256_round_ps(a.y, mode)};
}

// x * 2^n for an integer n of -126 to 127, by building the float 2^n from its exponent bits
inline __m256 ldexp(__m256 x, __m256 n) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Vector ldexp(Vector x, Vector n) { return {ldexp(x.x, n.x), ldexp(x.y, n.y)}; }

inline __m256 project_up(__m128i halves) {  // a bfloat16 is the upper half of a float
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vector load(const BFloat16* from) {
    auto halves = reinterpret_cast<const __m128i*>(from);
    return {project_up(_mm_loadu_si128(halves)), project_up(_mm_loadu_si128(halves + 1))};
}

inline __m256i upper_halves(__m256 v) {
    __m256i bits = _mm256_castps_si256(v);
    // add half of what is cut off, less one where the last kept bit is 0: to nearest, ties to even
    __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));  // a nan stays one
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
}
inline void store(BFloat16* to, Vector v) {
    __m256i narrow = _mm256_packus_epi32(upper_halves(v.x), upper_halves(v.y));  // in each half x, then y
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(narrow, 0xd8));  // all x, then all y
}

// integers of 0 to 255: v rounded to nearest
inline void store_rounded(uint8_t* to, Vector v) {
    __m256i halves = _mm256_packus_epi32(_mm256_cvtps_epi32(v.x), _mm256_cvtps_epi32(v.y));  // in each half x, then y
    halves = _mm256_permute4x64_epi64(halves, 0xd8);                                         // all x, then all y
    __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

inline Vector load(const int32_t* from) {  // as floats
    auto integers = reinterpret_cast<const __m256i*>(from);
    return {_mm256_cvtepi32_ps(_mm256_loadu_si256(integers)), _mm256_cvtepi32_ps(_mm256_loadu_si256(integers + 1))};
}

struct Words {
    __m256i x, y;
};
inline Words load_words(const uint32_t* from) {
    auto words = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
}
inline Words broadcast_word(const void* from) {
    int32_t word;
    std::memcpy(&word, from, 4);
    return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)};
}
inline void prefetch(const void* at) {
    _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T1);
}  // into the second cache

struct FloatSums {
    __m256 x = _mm256_setzero_ps(), y = _mm256_setzero_ps();
    void load(const float* from) {
        x = _mm256_loadu_ps(from);
        y = _mm256_loadu_ps(from + 8);
    }
    void store(float* to) const {
        _mm256_storeu_ps(to, x);
        _mm256_storeu_ps(to + 8, y);
    }
};

struct IntegerSums {
    __m256i x = _mm256_setzero_si256(), y = _mm256_setzero_si256();
    void load(const int32_t* from) {
        x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1);
    }
    void store(int32_t* to) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, y);
    }
};

inline __m256 accumulate_float32(__m256 sums, __m256i a, __m256i b) {
    return _mm256_fmadd_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), sums);
}
inline void accumulate_float32(FloatSums& sums, Words a, Words b) {
    sums.x = accumulate_float32(sums.x, a.x, b.x);
    sums.y = accumulate_float32(sums.y, a.y, b.y);
}

inline __m256 accumulate_bfloat16(__m256 sums, __m256i a, __m256i b) {  // the lower halves, then the upper
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
    sums = accumulate_float32(sums, _mm256_slli_epi32(a, 16), _mm256_slli_epi32(b, 16));
    return accumulate_float32(sums, _mm256_and_si256(a, upper), _mm256_and_si256(b, upper));
}
inline void accumulate_bfloat16(FloatSums& sums, Words a, Words b) {
    sums.x = accumulate_bfloat16(sums.x, a.x, b.x);
    sums.y = accumulate_bfloat16(sums.y, a.y, b.y);
}

inline __m256i accumulate_int8(__m256i sums, __m256i a, __m256i b) {  // a unsigned, b signed
    const __m256i bytes = _mm256_set1_epi16(0xff);
    __m256i a_even = _mm256_and_si256(a, bytes), a_odd = _mm256_srli_epi16(a, 8);
    __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), b_odd = _mm256_srai_epi16(b, 8);
    // pairs of 16-bit products, added in 32 bits
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a_even, b_even));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a_odd, b_odd));
}
inline void accumulate_int8(IntegerSums& sums, Words a, Words b) {
    sums.x = accumulate_int8(sums.x, a.x, b.x);
    sums.y = accumulate_int8(sums.y, a.y, b.y);
}

#else  // any processor

struct Vector {
    float x[16];
};

template <class Function>
inline Vector each(Function function) {
    Vector v;
    for (int i = 0; i < 16; i++) v.x[i] = function(i);
    return v;
}

inline Vector broadcast(float value) {
    return each([&](int) { return value; });
}
inline Vector zeros() { return broadcast(0); }
inline Vector load(const float* from) {
    return each([&](int i) { return from[i]; });
}
inline Vector load(const BFloat16* from) {
    return each([&](int i) { return to_float(from[i]); });
}
inline void store(float* to, Vector v) { std::memcpy(to, v.x, sizeof v.x); }
inline Vector operator+(Vector a, Vector b) {
    return each([&](int i) { return a.x[i] + b.x[i]; });
}
inline Vector operator-(Vector a, Vector b) {
    return each([&](int i) { return a.x[i] - b.x[i]; });
}
inline Vector operator*(Vector a, Vector b) {
    return each([&](int i) { return a.x[i] * b.x[i]; });
}
inline Vector operator/(Vector a, Vector b) {
    return each([&](int i) { return a.x[i] / b.x[i]; });
}
inline Vector multiply_add(Vector a, Vector b, Vector c) {
    return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
}
// like the instructions of x86: b where either is nan
inline Vector max(Vector a, Vector b) {
    return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
inline Vector min(Vector a, Vector b) {
    return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}
inline Vector abs(Vector a) {
    return each([&](int i) { return std::fabs(a.x[i]); });
}
inline Vector where_positive(Vector x, Vector a, Vector b) {
    return each([&](int i) { return x.x[i] > 0 ? a.x[i] : b.x[i]; });
}
inline Vector nearest_integer(Vector a) {
    return each([&](int i) { return std::nearbyint(a.x[i]); });
}
inline Vector ldexp(Vector x, Vector n) {
    return each([&](int i) { return std::ldexp(x.x[i], int(n.x[i])); });
}

inline float reduce_sum(Vector a) {
    float total = 0;
    for (float x : a.x) total += x;
    return total;
}

inline float reduce_max(Vector a) {
    float largest = a.x[0];
    for (float x : a.x) largest = x > largest ? x : largest;
    return largest;
}

inline void store(BFloat16* to, Vector v) {
    for (int i = 0; i < 16; i++) {
        uint32_t bits;
        std::memcpy(&bits, &v.x[i], 4);
        // add half of what is cut off, less one where the last kept bit is 0: to nearest, ties to even; a nan stays
        // one
        to[i] = v.x[i] != v.x[i] ? 0x7fc0 : BFloat16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

// integers of 0 to 255: v rounded to nearest
inline void store_rounded(uint8_t* to, Vector v) {
    for (int i = 0; i < 16; i++) {
        float integer = std::nearbyint(v.x[i]);
        to[i] = uint8_t(integer > 255 ? 255 : integer > 0 ? integer : 0);
    }
}

inline Vector load(const int32_t* from) {
    return each([&](int i) { return float(from[i]); });
}

struct Words {
    uint32_t x[16];
};
inline Words load_words(const uint32_t* from) {
    Words words;
    std::memcpy(words.x, from, sizeof words.x);
    return words;
}
inline Words broadcast_word(const void* from) {
    uint32_t word;
    std::memcpy(&word, from, 4);
    Words words;
    for (auto& each : words.x) each = word;
    return words;
}
inline void prefetch(const void*) {}

struct FloatSums {
    float x[16] = {};
    void load(const float* from) { std::memcpy(x, from, sizeof x); }
    void store(float* to) const { std::memcpy(to, x, sizeof x); }
};

struct IntegerSums {
    int32_t x[16] = {};
    void load(const int32_t* from) { std::memcpy(x, from, sizeof x); }
    void store(int32_t* to) const { std::memcpy(to, x, sizeof x); }
};

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void accumulate_float32(FloatSums& sums, const Words& a, const Words& b) {
    for (int i = 0; i < 16; i++) sums.x[i] += as_float(a.x[i]) * as_float(b.x[i]);
}
inline void accumulate_bfloat16(FloatSums& sums, const Words& a,
                                const Words& b) {  // the lower halves, then the upper
    for (int i = 0; i < 16; i++) {
        sums.x[i] += as_float(a.x[i] << 16) * as_float(b.x[i] << 16);
        sums.x[i] += as_float(a.x[i] & 0xffff0000u) * as_float(b.x[i] & 0xffff0000u);
    }
}
inline void accumulate_int8(IntegerSums& sums, const Words& a, const Words& b) {  // a unsigned, b signed
    for (int i = 0; i < 16; i++)
        for (int byte = 0; byte < 32; byte += 8)
            sums.x[i] += int32_t(uint8_t(a.x[i] >> byte)) * int8_t(b.x[i] >> byte);
}

#endif

#if !defined(BERTLITE_AVX512)

// 16 words of 16 rows, which may begin anywhere, transposed: to[column * stride + row] = from row, column
inline void transpose_words(const void* const (&from)[16], uint32_t* to, long stride) {
    uint32_t words[16];
    for (int row = 0; row < 16; row++) {
        std::memcpy(words, from[row], sizeof words);
        for (int column = 0; column < 16; column++) to[column * stride + row] = words[column];
    }
}

// two rows of 16 bfloat16, interleaved
inline void interleave(const BFloat16* even, const BFloat16* odd, uint32_t* to) {
    for (int i = 0; i < 16; i++) to[i] = even[i] | uint32_t(odd[i]) << 16;
}

#endif

}  // namespace bertlite
