// Functions of one token's activations: LayerNorm, and conversion to the dtype of a matmul.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace bertlite {

// An 8-bit integer stands for integer * scale + offset.
struct Quantization {
    float scale, offset;
};

// The largest and the smallest of a row's numbers and 0, from their bits. The largest number has the largest bits as
// signed integers, and the smallest has them as unsigned ones.  An infinity or nan is beyond all others.
class Range {
   public:
    void add(Vector x) {
        largest_ = max_integers(largest_, (Integers)x);
        smallest_ = max_words(smallest_, (Words)x);
    }

    float largest() const { return reduce_max((Vector)largest_); }
    float smallest() const { return -reduce_max(max(zeros() - (Vector)smallest_, zeros())); }
    float nan_or_0() const { return reduce_sum((Vector)largest_ * zeros() + (Vector)smallest_ * zeros()); }

   private:
    Integers largest_{};
    Words smallest_{};
};

// In each pair of lanes so far apart, their sum and difference.
template <int distance, int... lane>
inline Vector sums_and_differences(Vector x, std::integer_sequence<int, lane...>) {
    const Vector signs = {(lane & distance ? -1.0f : 1.0f)...};
    return multiply_add(x, signs, shuffle(x, x, exchanged<distance>(LaneNumbers{})));
}

constexpr Long ROTATED = 64;  // numbers that `rotate` mixes

// Multiply each whole 64 of a row's (count,) by Hadamard's matrix of 1/8 and -1/8, and copy the rest of (width,).  A
// large number is spread over all 64, and one scale then fits them.  Products of two rotated rows have the sum that
// they had, since the matrix is orthogonal.
// factors: if `scaled`, the row is multiplied by these, (width,), and Hadamard's matrix is of 1 and -1.
template <bool scaled, class From>
inline void rotate(const From* from, Long count, Long width, float* to, const float* factors) {
    constexpr Long VECTORS = ROTATED / LANES;
    const auto factor = [=](Long i) { return scaled ? load(factors + i) : broadcast(0.125f); };
    Long at = 0;
    for (; at + ROTATED <= count; at += ROTATED) {
        Vector x[VECTORS];
#pragma GCC unroll 16
        for (Long i = 0; i < VECTORS; i++) {
            const Long j = at + i * LANES;
            x[i] = sums_and_differences<1>(load(from + j) * factor(j), LaneNumbers{});
            x[i] = sums_and_differences<2>(x[i], LaneNumbers{});
            if constexpr (LANES > 4) x[i] = sums_and_differences<4>(x[i], LaneNumbers{});
            if constexpr (LANES > 8) x[i] = sums_and_differences<8>(x[i], LaneNumbers{});
        }
#pragma GCC unroll 4
        for (Long distance = 1; distance < VECTORS; distance *= 2)
#pragma GCC unroll 16
            for (Long i = 0; i < VECTORS; i++)
                if (!(i & distance)) {
                    const Vector first = x[i], second = x[i + distance];
                    x[i] = first + second;
                    x[i + distance] = first - second;
                }
#pragma GCC unroll 16
        for (Long i = 0; i < VECTORS; i++) store(to + at + i * LANES, x[i]);
    }
    for (; at < width; at++) to[at] = to_float(from[at]) * (scaled ? factors[at] : 1);
}

// Convert (width,) to the dtype of a matmul.  8-bit integers are asymmetric: 0 is the smallest number and 255 the
// largest, the range being widened to include 0, which is exact.
template <class Kind, class From>
inline void convert(const From* from, Long width, typename Kind::Value* to, Quantization* quantization) {
    if constexpr (std::is_same_v<Kind, Int8>) {
        Range range;
        for (Long i = 0; i < width; i += LANES) range.add(load(from + i));

        // The scale and the integer that stands for 0; a scale of almost 0 would divide by nothing.
        const float low = range.smallest(), step = (range.largest() - low) * (1.0f / 255);
        const float scale = step >= 0x1p-126f ? step : 1, inverse = 1 / scale, nan_or_0 = range.nan_or_0();
        const float zero_point = nan_or_0 == 0 ? std::nearbyint(-low * inverse) : 0;

        const auto at = [=](Long i) {
            return multiply_add(load(from + i), broadcast(inverse), broadcast(zero_point));
        };
        Long i = 0;
#if defined(__AVX512BW__)
        for (; i + 4 * LANES <= width; i += 4 * LANES)
            store_rounded(to + i, at(i), at(i + LANES), at(i + 2 * LANES), at(i + 3 * LANES));
#endif
        for (; i < width; i += LANES) store_rounded(to + i, at(i));
        *quantization = {scale + nan_or_0, -zero_point * scale};  // integers cannot be nan, so the scale is
    } else {
        for (Long i = 0; i < width; i += LANES) store(to + i, load(from + i));
    }
}

// Rotate each pair of numbers of a head, (size,), half a head apart, by an angle.  The first half of `angles` are the
// cosines of all pairs, the second one the sines.
template <class T>
inline void rotate_head(T* x, Long size, const float* angles) {
    const Long half = size / 2;
    for (Long i = 0; i < half; i += LANES) {
        const auto read = [=](const auto* from) { return load_some(from + i, half - i); };
        const Vector first = read(x), second = read(x + half), cosine = read(angles), sine = read(angles + half);
        store_some(x + i, half - i, multiply_add(first, cosine, zeros() - second * sine));
        store_some(x + half + i, half - i, multiply_add(second, cosine, first * sine));
    }
}

// The sum over (width,) of what add(sum, i) adds for each vector, in four times SUMMED sums, which do not wait for
// each other.
template <class Add>
inline float sum_of(Long width, Add add) {
    constexpr Long AT_ONCE = 4 * PER_SUM;
    Vector sums[AT_ONCE] = {};
    Long i = 0;
    for (; i + AT_ONCE * LANES <= width; i += AT_ONCE * LANES)
#pragma GCC unroll 16
        for (Long j = 0; j < AT_ONCE; j++) sums[j] = add(sums[j], i + j * LANES);
    for (; i < width; i += SUMMED)
#pragma GCC unroll 4
        for (Long j = 0; j < PER_SUM; j++)
            if (i + j * LANES < width) sums[j] = add(sums[j], i + j * LANES);

    // All processors add up these sums in one order, so that results are the same.
    Vector joined[PER_SUM];
#pragma GCC unroll 4
    for (Long j = 0; j < PER_SUM; j++)
        joined[j] = (sums[j] + sums[PER_SUM + j]) + (sums[2 * PER_SUM + j] + sums[3 * PER_SUM + j]);
    return reduce_sum(joined);
}

// Apply LayerNorm to x, (width,).  If the variance overflows, the result is nan.  Behind x there are zeros, to a whole
// vector, and behind weight and bias.  `to` may be x.
template <class To>
inline void layer_norm(const float* x, Long width, const float* weight, const float* bias, float epsilon, To* to) {
    const float average = sum_of(width, [=](Vector sum, Long i) { return sum + load(x + i); }) / width;
    const Vector mean = broadcast(average);

    // Zeros behind x would count as differences from the mean, so the squares end with x.
    const Long whole = width / SUMMED * SUMMED;
    float squares = sum_of(whole, [=](Vector sum, Long i) {
        const Vector centred = load(x + i) - mean;
        return multiply_add(centred, centred, sum);
    });
    for (Long i = whole; i < width; i++) squares = multiply_add(x[i] - average, x[i] - average, squares);

    const float variance = squares / width;
    const Vector scale = broadcast(1 / std::sqrt(variance + epsilon) + variance * 0);  // 0 * infinity is nan
    for (Long i = 0; i < width; i += LANES)
        store(to + i, multiply_add((load(x + i) - mean) * scale, load(weight + i), load(bias + i)));
}

}  // namespace bertlite
