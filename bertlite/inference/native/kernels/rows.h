// Work on rows of activations: LayerNorm, and rounding to the numbers that products take.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace bertlite {

// Normalise (width,) in place, then scale and shift.  Where the variance is larger than any float, all becomes nan.
inline void layer_norm(float* row, long width, const float* gain, const float* shift, float epsilon) {
    Vector total = zeros();
    for (long i = 0; i < width; i += LANES) total = total + load(row + i);
    const Vector mean = all(sum(total) / width);
    Vector squares = zeros();
    for (long i = 0; i < width; i += LANES) {
        Vector centred = load(row + i) - mean;
        squares = multiply_add(centred, centred, squares);
    }
    const float variance = sum(squares) / width;
    const Vector scale = all(1 / std::sqrt(variance + epsilon) + variance * 0);  // 0 * infinity is nan
    for (long i = 0; i < width; i += LANES)
        store(row + i, multiply_add((load(row + i) - mean) * scale, load(gain + i), load(shift + i)));
}

// What the integers of a row stand for: integer * scale + offset.
struct Rounding {
    float scale, offset;
};

// Round (width,) to what a product of this kind takes.  Integers are 0 at the least number and 255 at the
// largest, or where all have one sign, at 0, which is an integer in any case.
template <class Kind, class From>
inline void round_row(const From* from, long width, typename Kind::Value* to, Rounding* rounding) {
    if constexpr (std::is_same_v<Kind, Int8>) {
        Vector most = zeros(), least = zeros(), nothing = zeros();
        for (long i = 0; i < width; i += LANES) {
            Vector x = load(from + i);
            most = larger(x, most);
            least = smaller(x, least);
            nothing = multiply_add(x, zeros(), nothing);  // 0, or nan if x is infinite or nan
        }
        const float low = -largest(zeros() - least), step = (largest(most) - low) / 255, scale = step > 0 ? step : 1;
        const float fault = sum(nothing);
        const float zero = fault == 0 ? std::nearbyint(-low / scale) : 0;  // the integer that stands for 0
        const Vector inverse = all(1 / scale);
        for (long i = 0; i < width; i += LANES)
            store_rounded(to + i, multiply_add(load(from + i), inverse, all(zero)));
        *rounding = {scale + fault, -zero * scale};  // integers cannot say nan, so the scale does
    } else {
        for (long i = 0; i < width; i += LANES) store(to + i, load(from + i));
    }
}

}  // namespace bertlite
