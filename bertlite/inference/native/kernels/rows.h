// Functions of one token's activations: LayerNorm, and conversion to the dtype of a matmul.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace bertlite {

// Apply LayerNorm to (width,) in place.  Where the variance overflows, the result is nan.  Behind x there are zeros,
// to a whole vector, and behind weight and bias.
inline void layer_norm(float* x, long width, const float* weight, const float* bias, float epsilon) {
    Vector total = zeros();
    for (long i = 0; i < width; i += LANES) total = total + load(x + i);
    const float average = reduce_sum(total) / width;
    const Vector mean = broadcast(average);
    Vector squares = zeros();
    for (long i = 0; i + LANES <= width; i += LANES) {
        Vector centred = load(x + i) - mean;
        squares = multiply_add(centred, centred, squares);
    }
    float rest = 0;
    for (long i = width / LANES * LANES; i < width; i++) rest += (x[i] - average) * (x[i] - average);
    const float variance = (reduce_sum(squares) + rest) / width;
    const Vector scale = broadcast(1 / std::sqrt(variance + epsilon) + variance * 0);  // 0 * infinity is nan
    for (long i = 0; i < width; i += LANES)
        store(x + i, multiply_add((load(x + i) - mean) * scale, load(weight + i), load(bias + i)));
}

// An 8-bit integer stands for integer * scale + offset.
struct Quantization {
    float scale, offset;
};

// Convert (width,) to the dtype of a matmul.  8-bit integers are asymmetric: 0 is the smallest number and 255 the
// largest, the range being widened to include 0, which is exact.
template <class Kind, class From>
inline void convert(const From* from, long width, typename Kind::Value* to, Quantization* quantization) {
    if constexpr (std::is_same_v<Kind, Int8>) {
        Vector largest = zeros(), smallest = zeros(), fault = zeros();
        for (long i = 0; i < width; i += LANES) {
            Vector x = load(from + i);
            largest = max(x, largest);
            smallest = min(x, smallest);
            fault = multiply_add(x, zeros(), fault);  // 0, or nan if x is infinite or nan
        }
        const float low = -reduce_max(zeros() - smallest), step = (reduce_max(largest) - low) / 255;
        const float scale = step > 0 ? step : 1, nan_or_0 = reduce_sum(fault);
        const float zero_point = nan_or_0 == 0 ? std::nearbyint(-low / scale) : 0;
        const Vector inverse = broadcast(1 / scale);
        for (long i = 0; i < width; i += LANES)
            store_rounded(to + i, multiply_add(load(from + i), inverse, broadcast(zero_point)));
        *quantization = {scale + nan_or_0, -(zero_point + LEAST) * scale};  // integers cannot be nan, so the scale is
    } else {
        for (long i = 0; i < width; i += LANES) store(to + i, load(from + i));
    }
}

}  // namespace bertlite
