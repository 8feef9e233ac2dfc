// Matmuls of bfloat16 and 8-bit integers on the tiles of AMX, each of which holds 16 rows of 64 bytes.
//
// 32 rows times 32 outputs are summed at a time, in four tiles.  Weights of 32 outputs and some words stay in the
// first cache while rows stream from the second, by loads that displace nothing (TILELOADDT1).  Sums are stored amid
// the first products of the next block and finished amid its others, as the units of AVX-512 are idle then.
#pragma once

#include <stdexcept>

#include <sys/syscall.h>
#include <unistd.h>

namespace bertlite {

constexpr Long TILE_WORDS = 16, TILE_BYTES = 1024;
constexpr Long PANEL = 192;             // words whose weights stay in the first cache
constexpr Long AMX_ROWS = 256;          // rows whose sums wait for the next panel
constexpr Long AMX_COLUMNS = 32;        // outputs of a block of sums

// Assembly, because GCC's intrinsics do not tell it what memory they read and write.
#define TILE_LOAD(tile, at, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(at), "r"(Long(stride)) : "memory")
#define TILE_STREAM(tile, at, stride) \
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile::"r"(at), "r"(Long(stride)) : "memory")
#define TILE_STORE(tile, at, stride) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(at), "r"(Long(stride)) : "memory")
#define TILE_ADD(to, a, b)                                                   \
    do {                                                                     \
        if constexpr (Kind::per_word == 2)                                   \
            asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #to::); \
        else                                                                 \
            asm volatile("tdpbusd %%tmm" #b ", %%tmm" #a ", %%tmm" #to::);   \
    } while (false)

// Whether Linux lets this process use tiles: it must be asked once (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
inline const bool may_use_tiles = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

inline thread_local Long configured_rows = 0;  // of this thread's tiles; 0: they are not configured

// Sums are in tiles 0 to 3, rows in 4 and 5, weights in 6 and 7.  With fewer than 16 rows 0, 1 and 4 alone are used.
inline void configure_tiles(Long rows) {
    if (configured_rows == rows) return;
    struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) {
        config.bytes[tile] = 64;
        config.rows[tile] = tile == 0 || tile == 1 || tile == 4 ? uint8_t(rows) : 16;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
    configured_rows = rows;
}

// The tiles of one thread, as long as this lives.  Whatever it had configured before, torch may have changed.
class Tiles {
   public:
    Tiles() {
        if (!may_use_tiles) throw std::runtime_error("Linux does not let this process use the tiles of AMX");
        configured_rows = 0;
    }
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (configured_rows) asm volatile("tilerelease" ::: "memory");
        configured_rows = 0;
    }
};

// The row with which the tile of `row` begins: the last of `count` rows may be in the tile before as well.
inline Long tile_start(Long row, Long count) { return std::max(Long(0), std::min(row, count - 16)); }

// Sums of two blocks side by side: one is finished while the other is added up.
template <class Sum>
struct SumsInTurn {
    alignas(64) Sum sums[AMX_COLUMNS * BLOCK];
    Long turn = 0;
    Sum* next() { return sums + (turn = AMX_COLUMNS - turn); }
};

// A block of sums, which are first in tiles and then in memory until they are finished.
template <class Sum>
struct SumBlock {
    Sum* sums[2] = {};  // of each row of tiles
    Long stride = 0;    // of sums, in numbers
    int row_tiles = 0, column_tiles = 0;
    // Rows of the first tile are finished from `skipped` on, as it may overlap the tile before; then the second's.
    Long row = 0, column = 0, columns = 0, rows[2] = {}, skipped[2] = {};
    Long left = 0;  // rows to finish

    SumBlock() = default;
    // It has up to 32 of `count` rows, and up to 32 columns.
    SumBlock(Long row, Long count, Long column, Long columns)
        : row_tiles(row + 16 < count ? 2 : 1),
          column_tiles(columns > 16 ? 2 : 1),
          row(row),
          column(column),
          columns(columns) {
        for (Long tile = 0, at = row; tile < row_tiles; tile++, at += 16)
            rows[tile] = std::min(Long(16), count - at), skipped[tile] = at - tile_start(at, count);
    }

    // Say where the sums go; if they are `finished` there, finish_some has work.
    void store_at(Sum* first, Sum* second, Long apart, bool finished) {
        sums[0] = first, sums[1] = second, stride = apart;
        left = finished ? rows[0] + rows[1] : 0;
    }

    // Call work with the numbers of tiles, as constants.
    template <class Work>
    void with_tiles(Work work) const {
        using One = std::integral_constant<int, 1>;
        using Two = std::integral_constant<int, 2>;
        if (row_tiles > 1)
            column_tiles > 1 ? work(Two{}, Two{}) : work(Two{}, One{});
        else
            column_tiles > 1 ? work(One{}, Two{}) : work(One{}, One{});
    }

    template <class Finish>
    void finish_some(Long count, const Finish& finish) {
        while (left && count > 0) {
            const Long done = rows[0] + rows[1] - left, tile = done >= rows[0], within = done - (tile ? rows[0] : 0);
            const Long some = std::min(count, rows[tile] - within);
            finish(row + done, some, column, columns, sums[tile] + (skipped[tile] + within) * stride);
            left -= some, count -= some;
        }
    }

    // Store the tiles that hold it; between them, call next(tile).
    template <class Next>
    void store(Next next) const {
        const Long bytes = stride * sizeof(Sum);
        if (row_tiles > 0) TILE_STORE(0, sums[0], bytes);
        next(std::integral_constant<int, 0>{});
        if (column_tiles > 1) TILE_STORE(1, sums[0] + 16, bytes);
        next(std::integral_constant<int, 1>{});
        if (row_tiles > 1) TILE_STORE(2, sums[1], bytes);
        next(std::integral_constant<int, 2>{});
        if (row_tiles > 1 && column_tiles > 1) TILE_STORE(3, sums[1] + 16, bytes);
        next(std::integral_constant<int, 3>{});
    }
};

// Weights of the two blocks that are needed next, or none: with each step some lines of them are prefetched.
struct WeightsAhead {
    const char* at[2] = {};
    Long lines = 0;

    void prefetch_some() {
        for (Long i = 0; i < lines; i++)
            for (const char*& each : at) prefetch(each), each += 64;
    }
};

// The rows of two tiles and the weights of two blocks, which are multiplied.
struct Factors {
    const char *rows[2], *weights[2];
    Long stride;  // bytes from row to row
};

template <class Kind, int ROWS, int COLUMNS>
inline void load_factors(const Factors& from, Long word) {
    TILE_STREAM(4, from.rows[0] + word * 4, from.stride);
    TILE_LOAD(6, from.weights[0] + word * 64, 64);
    if constexpr (ROWS > 1) TILE_STREAM(5, from.rows[1] + word * 4, from.stride);
    if constexpr (COLUMNS > 1) TILE_LOAD(7, from.weights[1] + word * 64, 64);
}

template <class Kind, int ROWS, int COLUMNS>
inline void add_products() {
    TILE_ADD(0, 4, 6);
    if constexpr (COLUMNS > 1) TILE_ADD(1, 4, 7);
    if constexpr (ROWS > 1) TILE_ADD(2, 5, 6);
    if constexpr (ROWS > 1 && COLUMNS > 1) TILE_ADD(3, 5, 7);
}

// Begin the sums of one tile, at `start`, whose rows are so many bytes apart, or at zero, with the first products.
template <class Kind, int TILE>
inline void begin_tile(const typename Kind::Sum* start, Long bytes) {
#define BEGIN(tile, a, b)                           \
    if constexpr (TILE == tile) {                   \
        if (start)                                  \
            TILE_LOAD(tile, start, bytes);          \
        else                                        \
            asm volatile("tilezero %%tmm" #tile::); \
        TILE_ADD(tile, a, b);                       \
    }
    BEGIN(0, 4, 6) BEGIN(1, 4, 7) BEGIN(2, 5, 6) BEGIN(3, 5, 7)
#undef BEGIN
}

// Multiply ROWS x COLUMNS tiles by so many words and leave the sums in tiles; store and finish those before.
// start: the sums of each row of tiles so far, or what each output begins with, 0 bytes apart; or null.
template <class Kind, int ROWS, int COLUMNS, class Finish>
void multiply_block(const Factors& factors, Long row_count, Long words, const typename Kind::Sum* const (&start)[2],
                    Long start_bytes, SumBlock<typename Kind::Sum>& before, WeightsAhead& ahead,
                    const Finish& finish) {
    alignas(64) char rows[2][TILE_BYTES], weights[2][TILE_BYTES];
    const Long whole = words / TILE_WORDS * TILE_WORDS, left = words - whole;
    // The last words, fewer than a tile's, are copied, with zeros behind them.
    const Factors last{{rows[0], rows[1]}, {weights[0], weights[1]}, 64};
    if (left) {
        std::memset(rows, 0, sizeof rows), std::memset(weights, 0, sizeof weights);
        for (int tile = 0; tile < ROWS; tile++)
            for (Long i = 0; i < row_count; i++)
                std::memcpy(rows[tile] + i * 64, factors.rows[tile] + i * factors.stride + whole * 4, left * 4);
        for (int tile = 0; tile < COLUMNS; tile++)
            std::memcpy(weights[tile], factors.weights[tile] + whole * 64, left * 64);
    }

    // The first products begin this block, amid which the sums of the block before leave their tiles.
    load_factors<Kind, ROWS, COLUMNS>(whole ? factors : last, 0);
    before.store([&](auto tile) {
        if constexpr (tile / 2 < ROWS && tile % 2 < COLUMNS)
            begin_tile<Kind, tile>(start[tile / 2] ? start[tile / 2] + tile % 2 * 16 : nullptr, start_bytes);
    });

    // The rest is multiplied, while AVX-512 finishes the block before.
    const Long each = divide_up(before.left, std::max(Long(1), whole / TILE_WORDS - 1));
    for (Long word = TILE_WORDS; word < whole; word += TILE_WORDS) {
        load_factors<Kind, ROWS, COLUMNS>(factors, word);
        add_products<Kind, ROWS, COLUMNS>();
        ahead.prefetch_some();
        before.finish_some(each, finish);
    }

    if (whole && left) {
        load_factors<Kind, ROWS, COLUMNS>(last, 0);
        add_products<Kind, ROWS, COLUMNS>();
    }
    before.finish_some(before.left, finish);
}

// As `matmul` of tiles.h, but `finish` is called with a few rows at a time.
template <class Kind, class To, class Finish>
void matmul_by_amx(Kind, const typename Kind::Value* rows, Long stride, Long count, const Blocks& weight,
                   const typename Kind::Sum* start, Long first, Long last, const To& to, const Finish& finish) {
    using Sum = typename Kind::Sum;
    constexpr bool stays = std::is_same_v<Finish, InPlace>;
    constexpr Long apart = AMX_COLUMNS * AMX_COLUMNS + 80;  // not 4 KB, which would let loads wait for stores
    alignas(64) Sum waiting[AMX_ROWS / AMX_COLUMNS][apart];
    SumsInTurn<Sum> done;
    const Long words = weight.inputs, row_bytes = stride * Long(sizeof *rows), tile_rows = std::min(Long(16), count);
    configure_tiles(tile_rows);

    const Long panel = round_up(even_part(words, PANEL), TILE_WORDS), part = round_up(even_part(count, AMX_ROWS), 32);
    SumBlock<Sum> before;
    for (Long from = 0; from < count; from += part) {
        const Long end = std::min(count, from + part);
        for (Long column = first, columns; column < last; column += columns) {
            columns = std::min(AMX_COLUMNS - column % AMX_COLUMNS, last - column);
            const Sum* const of_outputs = start ? start + column : nullptr;
            for (Long word = 0; word < words; word += panel) {
                const Long some = std::min(panel, words - word);
                const bool is_last = word + some == words;

                // The weights of the next panel, or of the next outputs, come into the cache meanwhile.
                WeightsAhead ahead;
                if (!is_last || column + columns < last || weight.goes_on) {
                    const Long next = is_last ? column + columns : column, next_word = is_last ? 0 : word + some;
                    for (int i = 0; i < 2; i++)
                        ahead.at[i] = reinterpret_cast<const char*>(weight.at<Kind>(next + 16 * i, next_word));
                    ahead.lines =
                        divide_up(panel, std::max(Long(1), divide_up(end - from, 32) * (some / TILE_WORDS - 1)));
                }

                for (Long row = from; row < end; row += 32) {
                    const Long first_row = tile_start(row, count), second_row = tile_start(row + 16, count);
                    Sum *const waits = waiting[(row - from) / 32], *const next_waits = waits + 16 * AMX_COLUMNS;

                    // Sums wait for the next panel, stay in the target, or are finished from a block of their own.
                    SumBlock<Sum> block(row, count, column, columns);
                    if (!is_last) {
                        block.store_at(waits, next_waits, AMX_COLUMNS, false);
                    } else if constexpr (stays) {
                        block.store_at(to.at(first_row, column), to.at(second_row, column), to.stride, false);
                    } else {
                        Sum* const sums = done.next();
                        block.store_at(sums, sums + 16 * BLOCK, BLOCK, true);
                    }

                    const char* const base = reinterpret_cast<const char*>(rows) + word * 4;
                    const Factors factors{{base + first_row * row_bytes, base + second_row * row_bytes},
                                          {reinterpret_cast<const char*>(weight.at<Kind>(column, word)),
                                           reinterpret_cast<const char*>(weight.at<Kind>(column + 16, word))},
                                          row_bytes};

                    const Sum* const so_far[2] = {word ? waits : of_outputs, word ? next_waits : of_outputs};
                    const Long so_far_bytes = word ? AMX_COLUMNS * Long(sizeof(Sum)) : 0;
                    block.with_tiles([&](auto row_tiles, auto column_tiles) {
                        multiply_block<Kind, row_tiles, column_tiles>(factors, tile_rows, some, so_far, so_far_bytes,
                                                                      before, ahead, finish);
                    });
                    before = block;
                }
            }
        }
    }

    // The last block has none after it, amid which it could be finished.
    before.store([](auto) {});
    before.finish_some(before.left, finish);
}

}  // namespace bertlite
