// Matmuls of float32 on the tiles of AMX, which multiply bfloat16.
//
// A float32 has 24 bits and a bfloat16 8, so a float32 is the sum of three bfloat16 numbers: the nearest, the nearest
// to the rest, and the remainder.  Two such sums have nine products.  The six largest are added, the smallest first;
// three are below the last bit of a float32.  Tiles multiply bfloat16 sixteen times as fast as AVX-512 multiplies
// float32, so six products take less time.  Their sums are also nearer to the truth than float32's own.  GPUs'
// libraries do the same (oneMKL's float_to_bf16x3, cuBLAS's emulation of float32).
//
// Weights stay float32 in memory.  They are split a panel ahead, amid the products of the panel before.
#pragma once

#include <memory>
#include <new>

#include "threads.h"

namespace bertlite {

constexpr int PARTS = 3, PRODUCTS = 6;
constexpr int PART_OF_ROW[PRODUCTS] = {2, 0, 1, 1, 0, 0}, PART_OF_WEIGHT[PRODUCTS] = {0, 2, 1, 0, 1, 0};
constexpr Long STEP = 2 * TILE_WORDS;  // numbers that a tile multiplies
constexpr Long PARTS_PANEL = 128;      // numbers that are summed on their own; their weights stay in the first cache
constexpr Long PARTS_ROWS = 128;       // rows that are split at a time
constexpr Long PARTS_INPUTS = 1024;    // numbers of them, which stay in the second cache
constexpr Long PARTS_OUTPUTS = 1024;   // outputs whose sums wait for the next inputs
constexpr Long PARTS_STRIDE = PARTS_INPUTS + STEP;  // of a part of a row; an odd number of cache lines
constexpr Long TOTALS_STRIDE = PARTS_OUTPUTS + 16;  // likewise of waiting sums
// Beyond these a part is infinite, or a product of parts is less than a tile can hold.
constexpr float PARTS_MOST = 1e38f, PARTS_LEAST = 1e-28f;

// The memory of a thread, kept until it ends: 1.4 MB.
struct PartsMemory {
    alignas(64) BFloat16 rows[PARTS][PARTS_ROWS * PARTS_STRIDE];
    alignas(64) float totals[PARTS_ROWS * TOTALS_STRIDE];
    alignas(64) uint32_t weights[2][PARTS][2][PARTS_PANEL / STEP][TILE_BYTES / 4];  // two panels of two blocks
};
inline PartsMemory& parts_memory() {
    static thread_local const std::unique_ptr<PartsMemory> memory(new PartsMemory);
    return *memory;
}

// The parts of each number, as floats whose lower halves are zero.
inline void split(Vector x, Words (&parts)[PARTS]) {
    const auto nearest = [](Vector y) { return ((Words)y + 0x8000u) & 0xffff0000u; };
    parts[0] = nearest(x);
    const Vector rest = x - (Vector)parts[0];
    parts[1] = nearest(rest);
    parts[2] = (Words)(rest - (Vector)parts[1]);
}

inline Words magnitudes(Vector x) { return (Words)x & 0x7fffffffu; }
// Whether numbers can be split, given the largest bits of their magnitudes.  A nan has the largest of all.
inline bool can_split(Words largest_bits) {
    const float largest =
        reduce((Vector)largest_bits, [](Vector a, Vector b) { return (Vector)max_words((Words)a, (Words)b); });
    return largest == 0 || (largest >= PARTS_LEAST && largest <= PARTS_MOST);
}

inline bool can_split_row(const float* row, Long count) {
    Words largest{};
    for (Long i = 0; i < count; i += LANES) largest = max_words(largest, magnitudes(load_some(row + i, count - i)));
    return can_split(largest);
}

// Split `count` numbers of a row, with zeros behind them to `width`.
inline void split_row(const float* from, Long count, Long width, BFloat16* to) {
    for (Long i = 0; i < width; i += LANES) {
        Words parts[PARTS];
        split(load_some(from + i, count - i), parts);
        for (Long part = 0; part < PARTS; part++) {
            const Halves upper = __builtin_convertvector(parts[part] >> 16, Halves);
            std::memcpy(to + part * PARTS_ROWS * PARTS_STRIDE + i, &upper, sizeof upper);
        }
    }
}

// The weights of a panel: a part of the inputs of one or two blocks of 16 outputs.
struct PartsPanel {
    using Tile = uint32_t[TILE_BYTES / 4];
    using Parts = Tile[PARTS][2][PARTS_PANEL / STEP];  // (part, block, step)

    const float* from = nullptr;  // the first number of the first output
    Parts* to = nullptr;
    Long numbers = 0, blocks = 0, left = 0;  // numbers that are left to split: pairs of them, of each block
    Words largest{};                         // bits of their magnitudes

    void split_some(Long count) {
        for (; count > 0 && left; count--) {
            left--;
            const Long pair = left / blocks, block = left % blocks;
            const float* const at = from + 2 * pair * BLOCK + block * 16;
            const Vector even = 2 * pair < numbers ? load(at) : zeros();
            const Vector odd = 2 * pair + 1 < numbers ? load(at + BLOCK) : zeros();
            largest = max_words(largest, max_words(magnitudes(even), magnitudes(odd)));
            Words evens[PARTS], odds[PARTS];
            split(even, evens), split(odd, odds);
            for (int part = 0; part < PARTS; part++) {
                const Words words = evens[part] >> 16 | odds[part];
                std::memcpy((*to)[part][block][pair / 16] + pair % 16 * 16, &words, sizeof words);
            }
        }
    }

    void split_rest() {
        split_some(left);
        if (!can_split(largest)) throw BeyondParts();
    }
};

// A block of sums of one panel.  The sums of the panels before are added to them in memory.
struct PanelSums : SumBlock<float> {
    using SumBlock<float>::SumBlock;
    bool is_first = false, is_last = false;  // whether its panel is
    float* totals = nullptr;                 // (rows, totals_stride), of its columns
    Long totals_stride = 0;
};

// Multiply ROWS x COLUMNS tiles by the panel, and leave the sums in tiles.  Meanwhile store and finish the sums
// before, and split some of the next panel.
template <int ROWS, int COLUMNS, class Finish>
void multiply_panel(const BFloat16* const (&rows)[2], const PartsPanel& panel, PartsPanel& next, Long next_each,
                    PanelSums& before, const Finish& finish) {
    const Long steps = divide_up(panel.numbers, STEP), each = divide_up(before.left, PRODUCTS * steps - 1);
    for (int product = 0; product < PRODUCTS; product++) {
        const Long part = PART_OF_ROW[product] * PARTS_ROWS * PARTS_STRIDE;
        const auto& weights = (*panel.to)[PART_OF_WEIGHT[product]];
        const Factors factors{
            {reinterpret_cast<const char*>(rows[0] + part), reinterpret_cast<const char*>(rows[1] + part)},
            {reinterpret_cast<const char*>(weights[0]), reinterpret_cast<const char*>(weights[1])},
            PARTS_STRIDE * Long(sizeof(BFloat16))};
        for (Long step = 0; step < steps; step++) {
            load_factors<BFloat16s, ROWS, COLUMNS>(factors, step * TILE_WORDS);
            if (product || step) {
                add_products<BFloat16s, ROWS, COLUMNS>();
                before.finish_some(each, finish);
            } else {
                before.store([](auto tile) {
                    if constexpr (tile / 2 < ROWS && tile % 2 < COLUMNS) begin_tile<BFloat16s, tile>(nullptr, 0);
                });
            }
            next.split_some(next_each);
        }
    }
    before.finish_some(before.left, finish);
}

// Multiply up to PARTS_ROWS rows, but those that are `apart`; as `matmul` of tiles.h.
template <class Finish>
void multiply_rows(const float* rows, Long stride, Long count, const bool* apart, const Blocks& weight,
                   const float* start, Long first, Long last, const Finish& finish) {
    constexpr Long COLUMNS = AMX_COLUMNS;
    PartsMemory& memory = parts_memory();
    SumsInTurn<float> done;
    const Long inputs = weight.inputs, tile_rows = std::min(Long(16), count);
    const Long part = round_up(even_part(inputs, PARTS_INPUTS), STEP);
    const Long size = round_up(even_part(part, PARTS_PANEL), STEP);
    const bool in_parts = part < inputs;
    const Long group_size = in_parts ? PARTS_OUTPUTS : last - first,
               totals_stride = in_parts ? TOTALS_STRIDE : COLUMNS;
    configure_tiles(tile_rows);

    PanelSums before;

    // A panel is a part of the inputs: its sums are added to the totals, and the last one is finished.
    const auto finish_panel = [&](Long row, Long some, Long column, Long columns, float* sums) {
        for (Long i = 0; i < some; i++)
            for (Long j = 0; j < columns; j += LANES) {
                float *const sum = sums + i * BLOCK + j, *const total = before.totals + (row + i) * totals_stride + j;
                const Vector so_far = !before.is_first ? load(total) : start ? load(start + column + j) : zeros();
                store(before.is_last ? sum : total, load(sum) + so_far);
            }
        for (Long i = 0, together; before.is_last && i < some; i += together) {
            together = 1;
            while (!apart[row + i] && i + together < some && !apart[row + i + together]) together++;
            if (!apart[row + i]) finish(row + i, together, column, columns, sums + i * BLOCK);
        }
    };

    Long turn = 0;
    for (Long group = first; group < last; group += group_size) {
        const Long group_end = std::min(last, group + group_size);
        const auto blocks_at = [&](Long column) {
            return std::min(COLUMNS - column % COLUMNS, group_end - column) / 16;
        };
        for (Long from = 0; from < inputs; from += part) {
            const Long end = std::min(inputs, from + part);
            for (Long row = 0; row < count; row++)
                split_row(rows + row * stride + from, apart[row] ? 0 : end - from, round_up(end - from, STEP),
                          memory.rows[0] + row * PARTS_STRIDE);

            // Two panels take turns: one is multiplied while the other is split.
            const auto panel_at = [&](Long column, Long word) {
                if (word >= end) word = from, column += 16 * blocks_at(column);
                if (column >= group_end) return PartsPanel();
                turn = 1 - turn;
                const Long numbers = std::min(size, end - word), blocks = blocks_at(column);
                return PartsPanel{reinterpret_cast<const float*>(weight.at<Float32>(column, word)),
                                  &memory.weights[turn], numbers, blocks, round_up(numbers, STEP) / 2 * blocks};
            };
            PartsPanel panel = panel_at(group, from);
            panel.split_rest();
            for (Long column = group; column < group_end; column += 16 * blocks_at(column))
                for (Long word = from; word < end; word += size) {
                    PartsPanel next = panel_at(column, word + size);
                    const Long steps = divide_up(count, 32) * PRODUCTS * divide_up(panel.numbers, STEP);
                    const Long next_each = divide_up(next.left, steps);
                    for (Long row = 0; row < count; row += 32) {
                        PanelSums block(row, count, column, 16 * panel.blocks);
                        block.is_first = word == 0, block.is_last = word + panel.numbers == inputs;
                        block.totals = memory.totals + (in_parts ? column - group : 0);
                        float* const sums = done.next();
                        block.store_at(sums, sums + 16 * BLOCK, BLOCK, true);

                        const BFloat16* const base = memory.rows[0] + word - from;
                        const BFloat16* const starts[2] = {base + tile_start(row, count) * PARTS_STRIDE,
                                                           base + tile_start(row + 16, count) * PARTS_STRIDE};
                        block.with_tiles([&](auto row_tiles, auto column_tiles) {
                            multiply_panel<row_tiles, column_tiles>(starts, panel, next, next_each, before,
                                                                    finish_panel);
                        });
                        before = block;
                    }
                    if (next.to) next.split_rest();
                    panel = next;
                }
        }
    }

    before.store([](auto) {});
    before.finish_some(before.left, finish_panel);
}

// As `matmul` of tiles.h.  A row that cannot be split has float32's own products, whatever the other rows are.
template <class To, class Finish>
void matmul_by_amx(Float32Parts, const float* rows, Long stride, Long count, const Blocks& weight, const float* start,
                   Long first, Long last, const To& to, const Finish& finish) {
    const Long part = round_up(even_part(count, PARTS_ROWS), 32);
    for (Long from = 0; from < count; from += part) {
        const float* const begin = rows + from * stride;
        const Long some = std::min(part, count - from);
        bool apart[PARTS_ROWS];
        for (Long i = 0; i < some; i++) apart[i] = !can_split_row(begin + i * stride, weight.inputs);
        multiply_rows(begin, stride, some, apart, weight, start, first, last,
                      [&](Long row, auto... rest) { finish(from + row, rest...); });
        for (Long i = 0; i < some; i++)
            if (apart[i])
                matmul<Float32>(begin + i * stride, stride, 1, weight, start, first, last, to,
                                [&](Long, auto... rest) { finish(from + i, rest...); });
    }
}

}  // namespace bertlite
