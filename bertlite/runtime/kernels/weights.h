// Weights as matmuls read them: converted and packed in blocks.
#pragma once

#include <vector>

#include "rows.h"
#include "threads.h"
#include "tiles.h"

namespace bertlite {

// Convert a row of a weight to its dtype.  8-bit integers are of the rotated row, since they are multiplied by rotated
// rows. They get a scale, by which the largest magnitude is 127, and the row's sum.
template <class Kind>
void convert_row(const float* from, Long count, typename Kind::Weight* to, float* scale, float* row_sum) {
    if constexpr (std::is_same_v<Kind, Int8>) {
        std::vector<float> rotated(count);
        rotate<false>(from, count, count, rotated.data(), nullptr);
        from = rotated.data();
        float largest = 0, nan_or_0 = 0;
        for (Long i = 0; i < count; i++) {
            largest = std::max(largest, std::fabs(from[i]));
            nan_or_0 += from[i] * 0;  // 0, or nan if the weight is infinite or nan
        }
        const float step = largest / 127 > 0 ? largest / 127 : 1;
        int32_t total = 0;
        for (Long i = 0; i < count; i++) {
            to[i] = nan_or_0 == 0 ? int8_t(std::nearbyint(from[i] / step)) : 0;
            total += to[i];
        }
        *scale = step + nan_or_0;  // integers cannot be nan, so the scale is
        *row_sum = float(total) * *scale;
    } else {
        for (Long i = 0; i < count; i += LANES) store_some(to + i, count - i, load_some(from + i, count - i));
    }
}

// Pack (outputs, inputs) of floats: round_up(outputs, GROUP) rows of words; `scales` and `sums` as many, for 8-bit
// integers.
template <class Kind>
void pack(const float* weight, Long outputs, Long inputs, uint32_t* words, float* scales, float* sums, Long threads) {
    const Long groups = divide_up(outputs, GROUP), per_group = divide_up(inputs, Kind::per_word) * GROUP;
    using Weight = typename Kind::Weight;
    constexpr bool converts = !std::is_same_v<Weight, float>;
    run_team(threads, 1, [&](Team::Member& member) {
        std::vector<Weight> converted(converts ? GROUP * inputs : 0);
        member.parallel_for(groups, [&](Long group) {
            const Long first = group * GROUP, rows = std::min(GROUP, outputs - first);
            const float* const from = weight + first * inputs;
            uint32_t* const to = words + group * per_group;
            if constexpr (converts) {
                for (Long row = 0; row < rows; row++)
                    convert_row<Kind>(from + row * inputs, inputs, converted.data() + row * inputs,
                                      scales ? scales + first + row : nullptr, sums ? sums + first + row : nullptr);
                for (Long row = rows; scales && row < GROUP; row++) scales[first + row] = sums[first + row] = 0;
                pack_blocks<Kind>(converted.data(), rows, inputs, to, GROUP);
            } else {
                pack_blocks<Kind>(from, rows, inputs, to, GROUP);
            }
        });
    });
}

}  // namespace bertlite
