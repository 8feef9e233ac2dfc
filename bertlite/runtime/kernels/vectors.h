// Vectors as wide as a register of the processor: 16 floats with AVX-512, 8 with AVX2, 4 with SSE2 and NEON.
//
// They are the vector types of GCC and Clang, whose operators work on all lanes at once.  Intrinsics stand where no
// operator gives the instruction.  Everything else is written in terms of what stands here.  A word is 32 bits of a
// row of a matrix: one float, two bfloat16 or four 8-bit integers.  A matmul takes one word of a row and LANES words
// of a weight at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Names what the rest of a block does; scripts/measure/phases.h counts its time.
#if !defined(BERTLITE_PHASE)
#define BERTLITE_PHASE(name) static_cast<void>(0)
#endif

namespace bertlite {

using Long = int64_t;  // `long` has 32 bits on Windows

#if defined(__AVX512BW__)
constexpr int WIDTH = 64, REGISTERS = 32;  // bytes of a register, and how many there are
#elif defined(__AVX2__)
constexpr int WIDTH = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int WIDTH = 16, REGISTERS = 32;
#else
constexpr int WIDTH = 16, REGISTERS = 16;
#endif
constexpr Long LANES = WIDTH / 4;  // floats in a vector
constexpr Long SUMMED = 16;        // what is summed over a row has so many sums, whatever a vector's length
constexpr Long PER_SUM = SUMMED / LANES;

using BFloat16 = uint16_t;  // the upper half of a float

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool MULTIPLIES_BFLOAT16 = true;  // by one instruction
#else
constexpr bool MULTIPLIES_BFLOAT16 = false;
#endif
// How rows of a matmul hold bfloat16 and 8-bit integers.  If a processor has no products of them, rows are wider, so
// that only weights are widened as they are read. With AVX-512 rows are never wider.
using BFloat16InRow = std::conditional_t<MULTIPLIES_BFLOAT16 || WIDTH == 64, BFloat16, float>;
#if defined(__AVX512BW__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
using ByteInRow = uint8_t;
#else
using ByteInRow = uint16_t;
#endif
// The stored value of the least 8-bit integer of a row: if both factors of a product are signed, -128 for 0.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int LEAST = -128;
#else
constexpr int LEAST = 0;
#endif

typedef float Vector __attribute__((vector_size(WIDTH)));
typedef uint32_t Words __attribute__((vector_size(WIDTH)));
typedef int32_t Integers __attribute__((vector_size(WIDTH)));
typedef int16_t Shorts __attribute__((vector_size(WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH / 2)));
typedef int8_t SignedBytes __attribute__((vector_size(WIDTH / 2)));
typedef ByteInRow BytesInRow __attribute__((vector_size(LANES * sizeof(ByteInRow))));

// Load a value from an address of any alignment.
template <class T>
inline T load_as(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline float to_float(BFloat16 x) {
    const uint32_t bits = uint32_t(x) << 16;
    return load_as<float>(&bits);
}
inline float to_float(float x) { return x; }

inline Vector zeros() { return Vector{}; }
inline Vector broadcast(float value) { return value - Vector{}; }  // adding would lose the sign of -0

// a * b + c, rounded once.  The compiler joins no operators by itself, as it would choose others for each processor.
#if defined(__AVX512BW__)
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__FMA__)
inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
#elif defined(__aarch64__)
inline Vector multiply_add(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
#elif !defined(BERTLITE_ROUNDS_ONCE)
inline Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }  // SSE2 rounds twice
#else
// Without the instruction: float64 holds the product, and the sum is rounded to it so that its last bit is 1 unless it
// is exact ("to odd"). Rounding to float then gives the same as rounding once.
inline __m128d add_to_odd(__m128d a, __m128d b) {
    const __m128d sum = _mm_add_pd(a, b), part = _mm_sub_pd(sum, a);
    const __m128d rest = _mm_add_pd(_mm_sub_pd(a, _mm_sub_pd(sum, part)), _mm_sub_pd(b, part));
    const __m128d inexact = _mm_or_pd(_mm_cmplt_pd(rest, __m128d{}), _mm_cmpgt_pd(rest, __m128d{}));
    const __m128i bits = _mm_castpd_si128(sum), one = _mm_set1_epi64x(1);
    const __m128i even = _mm_sub_epi64(_mm_and_si128(bits, one), one);  // -1 where the last bit is 0
    const __m128i signs = _mm_shuffle_epi32(_mm_xor_si128(bits, _mm_castpd_si128(rest)), 0xf5);
    const __m128i step = _mm_or_si128(_mm_srai_epi32(signs, 31), one);  // toward the rest: -1 where signs differ
    return _mm_castsi128_pd(
        _mm_add_epi64(bits, _mm_and_si128(_mm_and_si128(even, _mm_castpd_si128(inexact)), step)));
}
inline Vector multiply_add(Vector a, Vector b, Vector c) {
    const auto half = [](Vector x, Vector y, Vector z) {
        return _mm_cvtpd_ps(add_to_odd(_mm_mul_pd(_mm_cvtps_pd(x), _mm_cvtps_pd(y)), _mm_cvtps_pd(z)));
    };
    return _mm_movelh_ps(half(a, b, c), half(_mm_movehl_ps(a, a), _mm_movehl_ps(b, b), _mm_movehl_ps(c, c)));
}
#endif
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return multiply_add(broadcast(a), broadcast(b), broadcast(c))[0];
#endif
}
// b where either is nan.  Intrinsics, because GCC 12 compares and blends.
#if defined(__AVX512BW__)
inline Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
inline Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
#elif defined(__AVX2__)
inline Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
inline Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
#else
inline Vector max(Vector a, Vector b) { return a > b ? a : b; }
inline Vector min(Vector a, Vector b) { return a < b ? a : b; }
#endif
inline Integers max_integers(Integers a, Integers b) { return a > b ? a : b; }
inline Words max_words(Words a, Words b) { return a > b ? a : b; }

inline Vector load(const float* from) { return load_as<Vector>(from); }
inline void store(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

inline Vector to_floats(Integers v) { return __builtin_convertvector(v, Vector); }
inline Vector load(const int32_t* from) { return to_floats(load_as<Integers>(from)); }
#if defined(__aarch64__)
inline Integers to_integers(Vector v) { return vcvtnq_s32_f32(v); }  // to nearest
#else
inline Integers to_integers(Vector v) { return __builtin_convertvector(v, Integers); }
#endif

inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }  // into the second cache

// The same words, of which the compiler knows nothing: two shifts would become one `and`, whose mask takes a register.
inline Words opaque(Words words) {
#if defined(__x86_64__)
    asm("" : "+v"(words));
#endif
    return words;
}

inline Words load_halves(const BFloat16* from) {
#if defined(__AVX512BW__)  // an intrinsic, because GCC 12 widens two halves and joins them
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    return __builtin_convertvector(load_as<Halves>(from), Words);
#endif
}
inline Vector load(const BFloat16* from) { return (Vector)(load_halves(from) << 16); }

inline Shorts load_signed_bytes(const void* from) {
#if defined(__AVX2__) && !defined(__AVX512BW__)  // intrinsics, because GCC 12 takes more instructions
    return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif defined(__x86_64__) && !defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(from));
    return (Shorts)_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
#else
    return __builtin_convertvector(load_as<SignedBytes>(from), Shorts);
#endif
}

// The lower halves of words, and behind them the upper ones.
inline void store_apart(uint32_t* to, Words words) {
    const Halves halves[] = {__builtin_convertvector(words, Halves), __builtin_convertvector(words >> 16, Halves)};
    std::memcpy(to, halves, sizeof halves);
}

inline void store(BFloat16* to, Vector v) {
#if defined(__AVX512BF16__)
    const __m256bh narrow = _mm512_cvtneps_pbh(v);  // rounds to nearest, ties to even
#else
    const Words bits = (Words)v;
    // add half of the cut bits, less one if the last kept bit is 0: to nearest, ties to even; a nan stays one
    const Words rounded = (v == v ? bits + 0x7fff + (bits >> 16 & 1) : Words{} + 0x7fc00000) >> 16;
    const Halves narrow = __builtin_convertvector(rounded, Halves);
#endif
    std::memcpy(to, &narrow, sizeof narrow);
}

// Two vectors that follow each other.
template <class T>
inline void store(T* to, Vector first, Vector second) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
        const __m512bh narrow = _mm512_cvtne2ps_pbh(second, first);
        std::memcpy(to, &narrow, sizeof narrow);
        return;
    }
#endif
    store(to, first);
    store(to + LANES, second);
}

// Load or store the first `count` numbers of a vector, which may have more lanes.  Loading fills these with zeros.
template <class T>
inline Vector load_some(const T* from, Long count) {
    if (count >= LANES) return load(from);
    T some[LANES] = {};
    std::copy(from, from + std::max(Long(0), count), some);
    return load(some);
}
template <class T>
inline void store_some(T* to, Long count, Vector v) {
    if (count >= LANES) return store(to, v);
    T all[LANES];
    store(all, v);
    std::copy(all, all + count, to);
}

// Adding it to a float of magnitude below 2^22 leaves no bits after the point; the lowest bits are then the integer.
constexpr float ROUNDS = 0x1.8p23f;

// 2^x = power(fraction) * 2^(x - fraction), with a fraction of 0 to 1; power(fraction) is less than 2, or near it.
template <class Power>
inline Vector exp2(Vector x, Power power) {
#if defined(__AVX512BW__)
    x = min(broadcast(127.9f), x);
    const Vector floor = _mm512_roundscale_ps(x - 0.5f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 normal = _mm512_cmp_ps_mask(floor, broadcast(-126), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(normal, power(x - floor), floor);  // as below, bit for bit
#else
    x = max(broadcast(-126.9f), min(broadcast(127.9f), x));  // nan stays one
    const Vector rounded = x - 0.5f + ROUNDS, floor = rounded - ROUNDS;
    return power(x - floor) * (Vector)(((Words)rounded << 23) + 0x3f800000u);  // exponent bits: 0 for -127
#endif
}

using LaneNumbers = std::make_integer_sequence<int, LANES>;

// Lanes of a, from 0, and of b, from LANES.
template <class V, int... from>
inline V shuffle(V a, V b, std::integer_sequence<int, from...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, from...);
#else
    return __builtin_shuffle(a, b, Words{uint32_t(from)...});
#endif
}

// The lanes of two vectors in turn, beginning with lane `first` of both.
template <int first, int... lane>
constexpr auto in_turn(std::integer_sequence<int, lane...>) {
    return std::integer_sequence<int, (first + lane / 2 + lane % 2 * int(LANES))...>{};
}

template <int distance, int... lane>
constexpr auto exchanged(std::integer_sequence<int, lane...>) {
    return std::integer_sequence<int, (lane ^ distance)...>{};
}

// All lanes joined: one half with the other, then one quarter with the other, and so on.
template <int distance = LANES / 2, class Join>
inline float reduce(Vector a, Join join) {
    if constexpr (distance == 0)
        return a[0];
    else
        return reduce<distance / 2>(join(a, shuffle(a, a, exchanged<distance>(LaneNumbers{}))), join);
}

inline float reduce_sum(Vector a) {
    return reduce(a, [](Vector x, Vector y) { return x + y; });
}
// The sum of SUMMED numbers, in vectors that follow each other.
inline float reduce_sum(Vector (&parts)[PER_SUM]) {
#pragma GCC unroll 2
    for (Long half = PER_SUM / 2; half; half /= 2)
#pragma GCC unroll 2
        for (Long j = 0; j < half; j++) parts[j] = parts[j] + parts[j + half];
    return reduce_sum(parts[0]);
}
inline float reduce_max(Vector a) { return reduce(a, max); }

// LANES words of LANES rows, which may begin anywhere, transposed: to[column * stride + row] = from row, column
inline void transpose_words(const void* const (&from)[LANES], uint32_t* to, Long stride) {
    constexpr int half = LANES / 2;
    Words rows[LANES], zipped[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = load_as<Words>(from[i]);
#pragma GCC unroll 4
    for (int left = LANES; left > 1; left /= 2) {  // the first bit of a row's number becomes the last of its lanes'
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) {
            zipped[2 * i] = shuffle(rows[i], rows[i + half], in_turn<0>(LaneNumbers{}));
            zipped[2 * i + 1] = shuffle(rows[i], rows[i + half], in_turn<half>(LaneNumbers{}));
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = zipped[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) std::memcpy(to + i * stride, &rows[i], WIDTH);
}

// two rows of LANES bfloat16, interleaved
inline void interleave(const BFloat16* even, const BFloat16* odd, uint32_t* to) {
    const Words words = load_halves(even) | load_halves(odd) << 16;
    std::memcpy(to, &words, sizeof words);
}

// Store integers of 0 to 255, rounded to nearest, as rows of a matmul hold them.
inline void store_rounded(ByteInRow* to, Vector v) {
    const Words words = (Words)(max(min(v, broadcast(255)), zeros()) + ROUNDS) & 0xff;
    const BytesInRow bytes = __builtin_convertvector(words + uint32_t(LEAST), BytesInRow);
    std::memcpy(to, &bytes, sizeof bytes);
}
#if defined(__AVX512BW__)
// Four vectors at a time, which saturate as they are packed.
inline void store_rounded(uint8_t* to, Vector a, Vector b, Vector c, Vector d) {
    const __m512i ab = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
    const __m512i cd = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(ab, cd));
    std::memcpy(to, &bytes, sizeof bytes);
}
#endif

// Products of words of rows, a, and of weights, b: sums + a * b.

inline Vector add_float32(Vector sums, Words a, Words b) { return multiply_add((Vector)a, (Vector)b, sums); }

inline Vector add_bfloat16(Vector sums, Words a, Words b) {  // both products of each word
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return vbfdotq_f32(sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    const Vector even = multiply_add((Vector)(a << 16), (Vector)(b << 16), sums);
    return multiply_add((Vector)(a & 0xffff0000u), (Vector)(b & 0xffff0000u), even);
#endif
}

inline Integers add_shorts(Integers sums, Shorts a, Shorts b) {  // both products of each word
#if defined(__AVX512BW__)
    return sums + (Integers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    // As assembly because GCC 12 computes the products of all sums before it adds, and spills them.
    Shorts products;
    asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(products) : "x"(a), "x"(b));
    return sums;
#elif defined(__x86_64__)
    return sums + (Integers)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    const Integers x = (Integers)a, y = (Integers)b;
    return sums + ((Integers)((Words)x << 16) >> 16) * ((Integers)((Words)y << 16) >> 16) + (x >> 16) * (y >> 16);
#endif
}

inline Integers add_int8(Integers sums, Words a, Words b) {  // all four; b is signed, and a where LEAST is -128
#if defined(__AVX512VNNI__)
    // As assembly because GCC 12 spills the sums of the intrinsic to memory.
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
#elif defined(__AVXVNNI__)
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
    return sums;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sums, (uint8x16_t)a, (int8x16_t)b);
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sums, (int8x16_t)a, (int8x16_t)b);
#else
    const Words bytes = Words{} + 0x00ff00ffu;
    sums = add_shorts(sums, (Shorts)(a & bytes), (Shorts)(b << 8) >> 8);
    return add_shorts(sums, (Shorts)(a >> 8 & bytes), (Shorts)b >> 8);
#endif
}

}  // namespace bertlite
