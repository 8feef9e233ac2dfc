// Attention of one head of one sequence: context = softmax(q k' / sqrt(H) + bias) v.
#pragma once

#include "functions.h"
#include "tiles.h"

namespace bertlite {

constexpr long QUERIES = 64;  // queries whose scores are computed at a time

// The size of parts that are as even as can be and no larger than `most`.
inline long even_part(long total, long most) { return divide_up(total, std::max(1l, divide_up(total, most))); }

// Memory that one thread needs for attention over up to so many keys.
template <class Kind>
struct AttentionSpace {
    using Value = typename Kind::Value;
    uint32_t *keys, *values;  // in blocks
    float* scores;            // (QUERIES, keys)
    Value* weights;           // (QUERIES, keys), not yet divided by their sum
    long most;

    template <class Arena>
    AttentionSpace(Arena& arena, long keys_, long head_size) : most(round_up(keys_, BLOCK)) {
        keys = arena.template take<uint32_t>(most * head_size / Kind::per_word);
        values = arena.template take<uint32_t>(most / Kind::per_word * round_up(head_size, BLOCK));
        scores = arena.template take<float>(QUERIES * most);
        weights = arena.template take<Value>(QUERIES * most);
    }
};

// What one head of one sequence attends with.
template <class Kind>
struct Head {
    using Value = typename Kind::Value;
    const Value *queries, *keys, *values;  // (tokens, H), rows `stride` apart
    long stride;
    Value* context;  // (queries, H), rows `context_stride` apart
    long context_stride;
    long key_count, head_size;
    const float* bias;  // added to the scores of query i at bias + i * bias_stride, or null
    long bias_stride;
    const uint8_t* has_keys;  // 0 for a query that may look at nothing, or null; has_keys_stride apart
    long has_keys_stride;
    const float* gate;  // what the context is multiplied by, gate_stride apart, or null
    long gate_stride;
    float* probabilities;  // (queries, keys), or null
};

// Values in blocks as a product takes a weight: its inputs are the keys, its outputs the H numbers of a value.
template <class Kind>
void lay_out_values(const Head<Kind>& head, uint32_t* to) {
    const long words = divide_up(head.key_count, Kind::per_word);
    alignas(64) static const typename Kind::Value nothing[LANES] = {};
    for (long word = 0; word < words; word++)
        for (long column = 0; column < head.head_size; column += LANES) {
            uint32_t* at = to + (column / BLOCK * words + word) * BLOCK + column % BLOCK;
            const auto* first = head.values + word * Kind::per_word * head.stride + column;
            if constexpr (Kind::per_word == 1) {
                std::memcpy(at, first, LANES * 4);
            } else {
                const bool last = word * 2 + 1 == head.key_count;
                interleave(first, last ? nothing : first + head.stride, at);
            }
        }
}

// Scores of one query to weights: e^(score - the largest), and 1 / their sum.
template <class Value>
float soften(float* scores, long keys, long padded, Value* weights, bool keep) {
    const float none = -INFINITY;
    for (long key = keys; key < padded; key++) scores[key] = none;
    Vector most = all(none);
    for (long key = 0; key < padded; key += LANES) most = larger(most, load(scores + key));
    float top = largest(most);
    if (top == none) top = 0;  // all are forbidden
    Vector total = zeros();
    for (long key = 0; key < padded; key += LANES) {
        Vector below = load(scores + key) - all(top);
        Vector weight = where_positive(all(-87.0f) - below, zeros(), exponential(below));  // a nan stays one
        total = total + weight;
        store(weights + key, weight);
        if (keep) store(scores + key, weight);
    }
    return 1 / sum(total);
}

// Attend with queries first up to last.  Keys and values must have been laid out in `space`.
template <class Kind>
void attend(const Head<Kind>& head, long first, long last, const AttentionSpace<Kind>& space) {
    using Value = typename Kind::Value;
    const long keys = head.key_count, padded = round_up(keys, LANES);
    const long words = head.head_size / Kind::per_word;
    const Vector scale = all(1 / std::sqrt(float(head.head_size)));
    const Blocks key_blocks{space.keys, words};
    const Blocks value_blocks{space.values, divide_up(keys, Kind::per_word)};
    float inverse[QUERIES];
    const long part = even_part(last - first, QUERIES);
    for (long query = first; query < last; query += part) {
        const long count = std::min(part, last - query);
        const Target<float> scores_at{space.scores, space.most};
        multiply<Kind>(head.queries + query * head.stride, head.stride, count, key_blocks, nullptr, 0, padded,
                       scores_at, [=](long row, long rows, long column, long columns, const float* sums) {
                           for (long i = 0; i < rows; i++)
                               for (long j = 0; j < columns; j += LANES)
                                   store(scores_at.at(row + i, column + j), load(sums + i * BLOCK + j) * scale);
                       });
        for (long i = 0; i < count; i++) {
            float* scores = space.scores + i * space.most;
            if (head.bias) {
                const float* bias = head.bias + (query + i) * head.bias_stride;
                for (long key = 0; key < keys; key++) scores[key] += bias[key];
            }
            inverse[i] = soften(scores, keys, padded, space.weights + i * space.most, head.probabilities != nullptr);
            if (head.has_keys && !head.has_keys[(query + i) * head.has_keys_stride]) inverse[i] = 0;
            const float gate = head.gate ? head.gate[(query + i) * head.gate_stride] : 1;
            if (head.probabilities)
                for (long key = 0; key < keys; key++)
                    head.probabilities[(query + i) * keys + key] = scores[key] * inverse[i] * gate;
            inverse[i] *= gate;
        }
        const Target<Value> context{head.context + query * head.context_stride, head.context_stride};
        multiply<Kind>(space.weights, space.most, count, value_blocks, nullptr, 0, head.head_size, context,
                       [=, &inverse](long row, long rows, long column, long columns, const float* sums) {
                           for (long i = 0; i < rows; i++)
                               for (long j = 0; j < columns; j += LANES)
                                   store(context.at(row + i, column + j),
                                         load(sums + i * BLOCK + j) * all(inverse[row + i]));
                       });
    }
}

}  // namespace bertlite
