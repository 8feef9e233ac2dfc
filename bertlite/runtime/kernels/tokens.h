// The places of the tokens of a batch, and their embeddings: word + segment + position, then LayerNorm.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "rows.h"

namespace bertlite {

extern "C" {

// Token ids, their segments and positions, and the tables of embeddings.  All pointers but `ids` and `words` may be
// null.
struct Ids {
    Long size;
    const int64_t *ids, *segments, *positions;  // (rows, length)
    const int64_t* mask;                        // (rows, length): 1 for a token, 0 for padding, which is left out
    const int32_t*
        ends;  // (rows + 1,), of packed sequences: where each begins, and the end.  The others are (length,)
    Long rows, length;
    Long takes_padding;           // whether a mask may have 0
    Long skips_padding, padding;  // whether positions are counted over the ids that are not `padding`
    Long keeps_order;             // whether padding is only behind the tokens, as positions are relative
    const void *words, *segment_table, *position_table, *norm_weight, *norm_bias;  // in the dtype of the batch
    Long word_count, segment_count, position_count;
    Long padding_has_position;  // whether padding's is behind those that are counted
    const float* word_scales;   // (word_count,): rows of words are 8-bit integers, to be multiplied by these; or null
};
}

// Thrown for inputs that are wrong or rare: Python takes them in its own way, or names the fault.
struct LeftToPython {};

// The places of the tokens: computed token i lies at `at(i)` of the arrays.
class TokenPlaces {
   public:
    std::vector<Long> starts;  // of each sequence, and the end

    TokenPlaces() = default;

    explicit TokenPlaces(const Ids& ids) : ids_(&ids) {
        require(ids.rows > 0 && ids.length > 0);
        if (ids.ends)
            read_ends();
        else
            read_mask();
        const Long count = ids.ends ? ids.length : ids.rows * ids.length;
        if (!ids.positions && (ids.ends || ids.skips_padding)) count_positions();
        check(ids.ids, count, ids.word_count);
        if (ids.segments) check(ids.segments, count, ids.segment_count);
        if (ids.positions) check(ids.positions, count, ids.position_count, ids.skips_padding ? -1 : 0);
    }

    Long tokens() const { return starts.back(); }
    Long at(Long token) const { return places_.empty() ? token : places_[token]; }
    Long position(Long token) const {  // -1: padding's
        const Long index = at(token);
        return ids_->positions      ? ids_->positions[index]
               : positions_.empty() ? index % ids_->length
                                    : positions_[index];
    }

   private:
    static void require(bool holds) {
        if (!holds) throw LeftToPython();
    }

    static void check(const int64_t* ids, Long count, Long limit, Long lowest = 0) {
        const auto fits = [=](int64_t id) { return uint64_t(id - lowest) < uint64_t(limit - lowest); };
        require(std::all_of(ids, ids + count, fits));
    }

    bool fits_positions(Long length) const {
        return (ids_->positions && !ids_->keeps_order) || length <= ids_->position_count;
    }

    void read_ends() {
        starts.assign(ids_->ends, ids_->ends + ids_->rows + 1);
        require(starts[0] == 0 && tokens() == ids_->length);
        for (Long i = 0; i < ids_->rows; i++) {
            const Long length = starts[i + 1] - starts[i];
            require(length > 0 && fits_positions(length));
        }
    }

    void count_positions() {
        for (Long row = 0; row < ids_->rows; row++) {
            const Long first = ids_->ends ? starts[row] : row * ids_->length;
            const Long last = ids_->ends ? starts[row + 1] : first + ids_->length;
            for (Long i = first, count = 0; i < last; i++) {
                const bool counts = !ids_->skips_padding || ids_->ids[i] != ids_->padding;
                count += counts;
                positions_.push_back(counts ? count - 1 : -1);
            }
        }
    }

    void read_mask() {
        const Long length = ids_->length;
        require(fits_positions(length));
        starts.push_back(0);
        for (Long i = 0; i < ids_->rows; i++) {
            Long count = length;
            if (ids_->mask) {
                const int64_t *mask = ids_->mask + i * length, *const end = mask + length;
                require(mask[0] == 1 && std::all_of(mask, end, [](int64_t x) { return x == 0 || x == 1; }));
                require(!ids_->keeps_order || std::is_sorted(mask, end, std::greater<>()));
                count = std::count(mask, end, 1);
            }
            starts.push_back(tokens() + count);
        }

        // Padding is left out, so the places of tokens are no longer their indices.
        if (tokens() == ids_->rows * length) return;
        require(ids_->takes_padding);
        for (Long i = 0; i < ids_->rows * length; i++)
            if (ids_->mask[i]) places_.push_back(i);
    }

    const Ids* ids_ = nullptr;
    std::vector<Long> places_;     // empty if there is no padding
    std::vector<Long> positions_;  // of all ids, unless they are those in the rows
};

// to = from, or to + from; `to` has room for whole vectors.
template <class T>
void read_row(const T* from, Long width, float* to, bool add = false) {
    Long i = 0;
    for (; i + LANES <= width; i += LANES) store(to + i, add ? load(to + i) + load(from + i) : load(from + i));
    for (; i < width; i++) to[i] = (add ? to[i] : 0) + to_float(from[i]);
}

template <class T>
void write_row(const float* from, Long width, T* to) {
    for (Long i = 0; i < width; i += LANES) store_some(to + i, width - i, load(from + i));
}

// Compute the embedding of a token.  norm: weight and bias of the LayerNorm, each padded to whole vectors; or null.
template <class T>
void embed(const Ids& ids, const TokenPlaces& places, Long token, Long width, const float* norm, float epsilon,
           float* to) {
    const auto row = [=](const void* table, Long index) { return static_cast<const T*>(table) + index * width; };
    const Long at = places.at(token), word = ids.ids[at];
    if (ids.word_scales) {
        const auto* from = static_cast<const int8_t*>(ids.words) + word * width;
        for (Long i = 0; i < width; i++) to[i] = from[i] * ids.word_scales[word];  // exact: see `int8_rows`
    } else {
        read_row(row(ids.words, word), width, to);
    }

    read_row(row(ids.segment_table, ids.segments ? ids.segments[at] : 0), width, to, true);
    const Long position = places.position(token), place = position < 0 ? ids.position_count : position;
    if (ids.position_table && place < ids.position_count + ids.padding_has_position)
        read_row(row(ids.position_table, place), width, to, true);

    if (norm) layer_norm(to, width, norm, norm + round_up(width, LANES), epsilon, to);
    if constexpr (std::is_same_v<T, BFloat16>)  // as the embeddings are where they are computed alone
        for (Long i = 0; i < width; i += LANES) {
            T rounded[LANES];
            store(rounded, load(to + i));
            store(to + i, load(rounded));
        }
}

}  // namespace bertlite
