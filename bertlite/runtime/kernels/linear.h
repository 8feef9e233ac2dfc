// A linear layer on its own: the pooler's, or a head's.
#pragma once

#include "functions.h"
#include "threads.h"
#include "tiles.h"

namespace bertlite {

extern "C" {

// A weight in blocks, its bias, and how to dequantize its matmuls.
struct Matrix {
    const uint32_t* words;
    const float* bias;    // (outputs,)
    const float* scales;  // (outputs,), of an 8-bit weight
    const float* sums;    // (outputs,), of an 8-bit weight: of each row, dequantized
    Long outputs, inputs;
    const float* factors;  // (inputs,) rounded up to vectors, of an 8-bit weight: as `rotate` takes them; or null
};

struct Linear {
    Long size;
    Matrix matrix;
    Long activation;
};
}

// As `run_team`, with the tiles of AMX; return false if weights are beyond the parts of float32.
template <class Work>
bool run_team_unless_beyond(Long threads, Long phases, Work work) {
    try {
        run_team(threads, phases, [&](Team::Member& member) {
#if defined(BERTLITE_AMX)
            const Tiles tiles;
#endif
            work(member);
        });
        return true;
    } catch (const BeyondParts&) {
        return false;
    }
}

// to = activation(rows weight' + bias), (count, outputs), in pieces that the team shares.
template <class Kind>
void run_linear(const Linear& linear, const typename Kind::Value* rows, Long stride, Long count,
                typename Kind::Weight* to, Long threads, Team::Member& member) {
    using Value = typename Kind::Weight;
    constexpr Long FEWEST_ROWS = 32;  // of a piece, if groups of outputs are fewer than threads
    const Matrix& matrix = linear.matrix;
    const auto activation = static_cast<Activation>(linear.activation);
    constexpr Long OUTPUTS = std::is_same_v<Kind, Float32Parts> ? 8 * GROUP : GROUP;  // for which rows are split once

    // Pieces are groups of outputs; if these are fewer than threads, rows are shared as well.
    const Long groups = divide_up(matrix.outputs, OUTPUTS);
    const Long parts = std::min(divide_up(count, FEWEST_ROWS), divide_up(2 * threads, groups));
    member.parallel_for(groups * parts, [&](Long piece) {
        const Long column = piece / parts * OUTPUTS, part = piece % parts;
        const Long first = count * part / parts, last = count * (part + 1) / parts;

        const Target<Value> target{to + first * matrix.outputs, matrix.outputs};
        matmul<Kind>(rows + first * stride, stride, last - first,
                     Blocks{matrix.words, divide_up(matrix.inputs, Kind::per_word)}, matrix.bias, column,
                     std::min(column + OUTPUTS, round_up(matrix.outputs, LANES)), target,
                     [&](Long row, Long rows, Long column, Long columns, const float* sums) {
                         with_activation(activation, [&](auto activate) {
                             for (Long i = 0; i < rows; i++)
                                 for (Long j = 0; j < columns; j += LANES) {
                                     const Vector y = activate(load(sums + i * BLOCK + j));
                                     store_some(target.at(row + i, column + j), matrix.outputs - column - j, y);
                                 }
                         });
                     });
    });
}

}  // namespace bertlite
