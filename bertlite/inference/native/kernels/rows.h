// Work on rows of activations: LayerNorm, and rounding to the numbers that products take.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace bertlite {

// Normalise (width,) in place, then scale and shift.
inline void layer_norm(float* row, long width, const float* gain, const float* shift, float epsilon) {
    Vector total = zeros();
    for (long i = 0; i < width; i += LANES) total = total + load(row + i);
    const Vector mean = all(sum(total) / width);
    Vector squares = zeros();
    for (long i = 0; i < width; i += LANES) {
        Vector centred = load(row + i) - mean;
        squares = multiply_add(centred, centred, squares);
    }
    const Vector scale = all(1 / std::sqrt(sum(squares) / width + epsilon));
    for (long i = 0; i < width; i += LANES)
        store(row + i, multiply_add((load(row + i) - mean) * scale, load(gain + i), load(shift + i)));
}

// Round (width,) to what a product of this kind takes; zeros up to `padded`.  Integers, which stand for
// (integer - 128) * scale, write their scale to *scale; the others have none.
template <class Kind, class From>
inline void round_row(const From* from, long width, long padded, typename Kind::Value* to, float* scale) {
    if constexpr (std::is_same_v<Kind, Int8>) {
        Vector most = zeros(), nothing = zeros();
        for (long i = 0; i < width; i += LANES) {
            Vector x = load(from + i);
            most = larger(magnitude(x), most);
            nothing = multiply_add(x, zeros(), nothing);  // 0, or nan if x is infinite or nan
        }
        const float top = largest(most), step = top > 0 ? top / 127 : 1;
        for (long i = 0; i < width; i += LANES) store_with_offset(to + i, load(from + i) * all(1 / step));
        *scale = step + sum(nothing);  // integers cannot say nan, so the scale does
        std::memset(to + width, 128, padded - width);
    } else {
        for (long i = 0; i < width; i += LANES) store(to + i, load(from + i));
        std::memset(to + width, 0, (padded - width) * sizeof *to);
    }
}

}  // namespace bertlite
