// Matmuls, a tile at a time: up to 6 rows of activations times a block of a weight.
//
// A weight lies in blocks of as many outputs as a tile takes: 64 with AVX-512, 16 with AMX, AVX2 and NEON, 8 with
// SSE2.  A word has 1 float, 2 bfloat16 or 4 8-bit integers. For each word of its inputs a block holds this word of
// all its outputs, so that a tile reads it from front to back.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "vectors.h"

namespace bertlite {

constexpr Long TILE_ROWS = 6;
// With 6 rows 24 sums, which leaves 8 of 32 registers, or 12, which leaves 4 of 16.
constexpr int VECTORS_AT_ONCE = REGISTERS / 8;
constexpr Long BLOCK = VECTORS_AT_ONCE * LANES;  // outputs in a block of a weight
constexpr Long GROUP = 64;  // outputs that a thread takes at a time; a weight is padded to a multiple of it
constexpr bool NARROW = BLOCK < GROUP;  // whether a block, or a part of it, stays in the first cache

// scripts/measure/native_steps.py compares these figures, and some of encoder.h, with others.
constexpr Long TILES_AHEAD = NARROW ? 4 : 2;  // rows of tiles that prefetch the next weights; a power of two
constexpr bool FETCHES_TARGETS = true;        // whether a tile's target is prefetched

constexpr Long divide_up(Long n, Long by) { return (n + by - 1) / by; }
constexpr Long round_up(Long n, Long to) { return divide_up(n, to) * to; }
// The size of parts that are as even as can be and no larger than `limit`.
inline Long even_part(Long total, Long limit) { return divide_up(total, std::max(Long(1), divide_up(total, limit))); }

// The dtypes of a matmul: of a row, of a weight and of their sums, and how many numbers make a word of a weight.
// `read` gives the part of a weight's words that is multiplied by one word of a row: all of it, or one of two halves.
struct Float32 {
    using Value = float;
    using Weight = float;
    using Sums = Vector;
    using Sum = float;
    static constexpr Long per_word = 1;
    static Words read(const uint32_t* from, int) { return load_as<Words>(from); }
    static Sums add(Sums sums, Words a, Words b) { return add_float32(sums, a, b); }
};

struct Float32Parts : Float32 {};  // the same numbers, multiplied as sums of three bfloat16 on the tiles of AMX
template <class Kind>
constexpr bool IS_FLOAT32 = std::is_base_of_v<Float32, Kind>;

template <class InRow>
struct BFloat16Weights {
    using Value = InRow;
    using Weight = BFloat16;
    using Sums = Vector;
    using Sum = float;
    static constexpr Long per_word = 2;
    static constexpr bool widened = sizeof(Value) > sizeof(Weight);
    static Words read(const uint32_t* from, int odd) {
        const Words b = load_as<Words>(from);
        return !widened ? b : (odd ? opaque(b >> 16) : b) << 16;
    }
    static Sums add(Sums sums, Words a, Words b) {
        return widened ? add_float32(sums, a, b) : add_bfloat16(sums, a, b);
    }
};
using BFloat16s = BFloat16Weights<BFloat16InRow>;

struct Int8 {  // rows hold unsigned integers, weights signed ones
    using Value = ByteInRow;
    using Weight = int8_t;
    using Sums = Integers;
    using Sum = int32_t;
    static constexpr Long per_word = 4;
    static constexpr bool widened = sizeof(Value) > sizeof(Weight);
    // If they are widened, the first two numbers of so many words lie together, and behind them the last two.
    static constexpr Long pairs = widened ? LANES : 1;
    static Words read(const uint32_t* from, int half) {
        return widened ? (Words)load_signed_bytes(from + half * LANES / 2) : load_as<Words>(from);
    }
    static Sums add(Sums sums, Words a, Words b) {
        return widened ? add_shorts(sums, (Shorts)a, (Shorts)b) : add_int8(sums, a, b);
    }
};

#if defined(BERTLITE_AMX)
constexpr bool HAS_AMX = true;
#else
constexpr bool HAS_AMX = false;
#endif
template <class Kind>  // whether matmuls are on the tiles of AMX: of rows that are as narrow as their weights
constexpr bool BY_AMX = HAS_AMX && (sizeof(typename Kind::Value) < 4 || std::is_same_v<Kind, Float32Parts>);
template <class Kind>  // outputs in a block of such weights
constexpr Long BLOCK_OF = HAS_AMX && sizeof(typename Kind::Weight) < 4 ? 16 : BLOCK;
template <class Kind>  // words of keys, to a multiple of which attention pads them
constexpr Long WORDS_TOGETHER = BY_AMX<Kind> ? 16 : 1;

// So many words of a row are summed before the rest is added. In one sum of 3072 floats each product is rounded to the
// step of all before, and the error is two to six times torch's.  Sums of integers are exact.
template <class Kind>
constexpr Long WORDS_SUMMED = std::is_same_v<typename Kind::Sum, float> ? 192 : LONG_MAX;

// Weights that are needed next, or null: a tile prefetches some lines of them with every so many of its words, a power
// of two.
class Ahead {
   public:
    // The share of one row of tiles in so many words at `next`.
    Ahead(const uint32_t* next, Long words, Long tile, Long tiles) {
        Long share = TILES_AHEAD;
        while (share > tiles) share /= 2;
        every_ = std::max(Long(1), share * BYTES_AT_ONCE / (BLOCK * 4));
        if (next && tile < share)
            at_ = reinterpret_cast<const char*>(next) + tile * divide_up(words, every_) * BYTES_AT_ONCE;
    }

    bool has_any() const { return at_; }

    void prefetch_with(Long word) {
        if (word & (every_ - 1)) return;
        for (Long line = 0; line < BYTES_AT_ONCE; line += 64) prefetch(at_ + line);
        at_ += BYTES_AT_ONCE;
    }

   private:
    static constexpr Long BYTES_AT_ONCE = divide_up(BLOCK * 4, std::max(Long(1), TILES_AHEAD) * 64) * 64;
    const char* at_ = nullptr;
    Long every_;
};

// One tile: sums[row * sums_stride + column] = start[column] + ROWS rows times VECTORS x LANES columns, plus the old
// sums if it `adds`.
//
// rows: the first one; stride: bytes from row to row.  weight: its first word, of so many.  AHEAD: whether it
// prefetches `ahead`.  All loops over sums are unrolled, or GCC keeps them in memory.
template <class Kind, bool AHEAD, int ROWS, int VECTORS>
void multiply_tile(Ahead ahead, const char* rows, Long stride, const uint32_t* weight, Long words,
                   const typename Kind::Sum* start, typename Kind::Sum* sums, Long sums_stride, bool adds) {
    constexpr int parts = Kind::per_word * sizeof(typename Kind::Value) / 4;
    typename Kind::Sums sum[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
            sum[i][j] = typename Kind::Sums{};
            if (!std::is_same_v<Kind, Int8>) sum[i][j] = load_as<typename Kind::Sums>(start + j * LANES);
        }

    // Some words at a time, so that no sum grows so large that it swallows the digits of a product.
    for (Long first = 0, word = 0;; first = word, adds = true) {
        for (const Long last = std::min(words - first, WORDS_SUMMED<Kind>) + first; word < last; word++) {
            if (AHEAD) ahead.prefetch_with(word);
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++) {
                Words b[VECTORS];
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++) b[j] = Kind::read(weight + word * BLOCK_OF<Kind> + j * LANES, part);
#pragma GCC unroll 6
                for (int i = 0; i < ROWS; i++) {
                    const Words a = Words{} + load_as<uint32_t>(rows + i * stride + (word * parts + part) * 4);
#pragma GCC unroll 4
                    for (int j = 0; j < VECTORS; j++) sum[i][j] = Kind::add(sum[i][j], a, b[j]);
                }
                if (parts > 1) asm volatile("" ::: "memory");  // or GCC reads both parts at once, and spills sums
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) {
                typename Kind::Sums before{};
                if (adds) std::memcpy(&before, sums + i * sums_stride + j * LANES, WIDTH);
                sum[i][j] = adds ? sum[i][j] + before : sum[i][j];
                std::memcpy(sums + i * sums_stride + j * LANES, &sum[i][j], WIDTH);
                sum[i][j] = typename Kind::Sums{};
            }
        if (word >= words) return;
    }
}

// Multiply `count` rows by so many vectors of columns: find the tile of just this size, from the largest one down.
template <class Kind, int ROWS = TILE_ROWS, int VECTORS = VECTORS_AT_ONCE, class... Rest>
void choose_tile(Long count, Long vectors, const Ahead& ahead, Rest... rest) {
    if constexpr (ROWS > 1)
        if (count < ROWS) return choose_tile<Kind, ROWS - 1, VECTORS>(count, vectors, ahead, rest...);
    if constexpr (VECTORS > 1)
        if (vectors < VECTORS) return choose_tile<Kind, ROWS, VECTORS - 1>(count, vectors, ahead, rest...);
    if (ahead.has_any())
        multiply_tile<Kind, true, ROWS, VECTORS>(ahead, rest...);
    else
        multiply_tile<Kind, false, ROWS, VECTORS>(ahead, rest...);
}

// A weight in blocks, or keys or values packed alike.
struct Blocks {
    const uint32_t* words;
    Long inputs;           // in words
    bool goes_on = false;  // whether what lies behind the last block that is multiplied will be needed soon
    Long stride = inputs;  // words of each output, if only some inputs are multiplied
    template <class Kind>
    const uint32_t* at(Long output, Long word) const {
        constexpr Long block = BLOCK_OF<Kind>;
        return words + output / block * block * stride + word * block + output % block;
    }
};

// Rows of memory that a matmul writes to, `stride` numbers apart.
template <class T>
struct Target {
    T* first;
    Long stride;
    T* at(Long row, Long column) const { return first + row * stride + column; }
};

// The same with the columns of each head apart, (heads, tokens, H). Rows of all heads together would lie so far apart
// that one head's rows share a few sets of the first cache.
template <class T>
struct HeadsTarget {
    T* first;
    Long tokens, head_size;
    T* at(Long row, Long column) const {
        return first + (column / head_size * tokens + row) * head_size + column % head_size;
    }
};

// Prefetch a tile's part of a target: a write that misses the cache stalls the matmul that follows.
template <class To>
void prefetch_tile(const To& to, Long row, Long rows, Long column, Long columns) {
    for (Long i = row; FETCHES_TARGETS && i < row + rows; i++)
        for (Long j = column; j < column + columns; j += 64 / Long(sizeof *to.at(i, j))) prefetch(to.at(i, j));
}

struct InPlace {
    void operator()(Long, Long, Long, Long, const void*) const {}
};
constexpr InPlace in_place;

// So many words of a narrow block, a multiple of WORDS_SUMMED, stay in the first cache until all rows have been
// multiplied by them.  A longer block is multiplied in parts, and the sums of so many rows wait meanwhile.
constexpr Long WORDS_AT_ONCE = 384, ROWS_AT_ONCE = 128;

// Multiply `count` rows by the outputs first up to last of a weight, both multiples of LANES. Add `start`, one number
// for each output, unless it is null.  After each tile `finish(row, rows, column, columns, sums)` is called with the
// sums, (rows, BLOCK), of which `columns` are valid. Its part of `to` has been prefetched.  With `in_place` for
// `finish` the sums are left in `to`.
template <class Kind, class To, class Finish>
void matmul(const typename Kind::Value* rows, Long stride, Long count, const Blocks& weight,
            const typename Kind::Sum* start, Long first, Long last, const To& to, Finish finish) {
    if constexpr (BY_AMX<Kind>)  // by amx.h or amx_parts.h
        if (weight.inputs) return matmul_by_amx(Kind{}, rows, stride, count, weight, start, first, last, to, finish);

    // Sums stay in registers for one tile; if a weight is taken in parts, the sums of all rows wait in memory.
    alignas(64) static const typename Kind::Sum no_start[BLOCK] = {};
    constexpr bool stays = std::is_same_v<Finish, InPlace>;
    constexpr Long word_bytes = Kind::per_word * sizeof(typename Kind::Value);
    alignas(64) typename Kind::Sum tile_sums[stays ? 1 : NARROW ? ROWS_AT_ONCE * GROUP : TILE_ROWS * BLOCK];
    const Long inputs = weight.inputs;
    Long sums_stride = BLOCK;
    if constexpr (stays) sums_stride = to.stride;

    const bool splits = !stays && NARROW && inputs > WORDS_AT_ONCE;
    const Long rows_at_once = splits ? ROWS_AT_ONCE : count, part = splits ? WORDS_AT_ONCE : inputs;

    for (Long from = first, end; from < last; from = end) {
        end = std::min(last, round_up(from + 1, GROUP));
        for (Long row = 0; row < count; row += rows_at_once) {
            const Long row_end = std::min(count, row + rows_at_once);
            Long word = 0;
            do {
                const Long words = std::min(part, inputs - word);
                const bool done = word + words == inputs;
                for (Long column = from, columns; column < end; column += columns) {
                    columns = std::min(BLOCK_OF<Kind> - column % BLOCK_OF<Kind>, end - column);
                    const Long tiles = divide_up(row_end - row, TILE_ROWS);

                    // Fetched meanwhile: weights of the next block, the next part, or the next group.
                    const uint32_t* next = nullptr;
                    if (column + columns < end)
                        next = weight.template at<Kind>(column + columns, word);
                    else if (!done)
                        next = weight.template at<Kind>(from, word + words);
                    else if (end < last || weight.goes_on)
                        next = weight.template at<Kind>(end, 0);

                    for (Long tile = 0, at = row; tile < tiles; tile++) {
                        const Long size = divide_up(row_end - at, tiles - tile);  // as even as can be
                        auto* sums = tile_sums;
                        if constexpr (stays)
                            sums = to.at(at, column);
                        else if (splits)
                            sums += (column % GROUP / BLOCK * ROWS_AT_ONCE + at - row) * BLOCK;

                        if (!stays && done) prefetch_tile(to, at, size, column, columns);
                        choose_tile<Kind>(size, columns / LANES, {next, words, tile, tiles},
                                          reinterpret_cast<const char*>(rows + at * stride) + word * word_bytes,
                                          stride * sizeof(typename Kind::Value),
                                          weight.template at<Kind>(column, word), words,
                                          start && !word ? start + column : no_start, sums, sums_stride, word > 0);
                        if (done) {
                            BERTLITE_PHASE("finish");
                            finish(at, size, column, columns, sums);
                        }
                        at += size;
                    }
                }
                word += words;
            } while (word < inputs);
        }
    }
}

// Pack a weight, (outputs, inputs), in blocks, padded with zeros to so many outputs, a multiple of a block's.
template <class Kind>
void pack_blocks(const typename Kind::Weight* weight, Long outputs, Long inputs, uint32_t* to, Long padded) {
    constexpr Long per = Kind::per_word, size = BLOCK_OF<Kind>;
    const Long words = divide_up(inputs, per);
    uint32_t staged[LANES][LANES];
    for (Long block = 0; block < padded / size; block++)
        for (Long group = 0; group < size; group += LANES)
            for (Long word = 0; word < words; word += LANES) {
                // Rows of a weight become columns of a block; missing rows and words are zeros.
                const Long columns = std::min(LANES, words - word);
                std::memset(staged, 0, sizeof staged);
                const void* from[LANES];
                for (Long i = 0; i < LANES; i++) {
                    const Long output = block * size + group + i;
                    from[i] = staged[i];
                    if (output >= outputs) continue;
                    const auto* row = weight + output * inputs + word * per;
                    if (inputs - word * per >= LANES * per)
                        from[i] = row;
                    else
                        std::memcpy(staged[i], row, (inputs - word * per) * sizeof *row);
                }

                uint32_t* start = to + (block * words + word) * size + group;
                if (columns == LANES) {
                    transpose_words(from, start, size);
                } else {
                    for (Long column = 0; column < columns; column++)
                        for (Long i = 0; i < LANES; i++) start[column * size + i] = staged[i][column];
                }
                if constexpr (std::is_same_v<Kind, Int8> && Int8::widened)
                    for (Long column = 0; column < columns; column++)
                        store_apart(start + column * size, load_as<Words>(start + column * size));
            }
}

}  // namespace bertlite

#if defined(BERTLITE_AMX)
#include "amx.h"
#include "amx_parts.h"
#endif
