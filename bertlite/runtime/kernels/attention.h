// Attention of one head of one sequence: context = softmax(q k' / sqrt(H) + bias) v.
#pragma once

#include "functions.h"
#include "memory.h"

namespace bertlite {

constexpr Long QUERIES = 64;  // queries whose scores are computed at a time

// Memory that one thread needs for attention over up to so many keys.
template <class Kind>
struct AttentionWorkspace {
    using Value = typename Kind::Value;
    uint32_t *keys, *values;  // in blocks
    float* scores;            // (QUERIES, keys)
    float* relative;          // (QUERIES, relative_stride): products with the vectors of distances, or null
    Value* weights;           // (QUERIES, keys), not yet divided by their sum
    Long key_capacity, relative_stride;

    AttentionWorkspace(Arena& arena, Long keys_, Long head_size, Long distances)
        : key_capacity(round_up(keys_, BLOCK)), relative_stride(round_up(distances, BLOCK) + 2 * BLOCK) {
        keys = arena.take<uint32_t>(key_capacity * head_size / Kind::per_word);
        values = arena.take<uint32_t>(key_capacity / Kind::per_word * round_up(head_size, BLOCK));
        scores = arena.take<float>(QUERIES * key_capacity);
        relative = distances ? arena.take<float>(QUERIES * relative_stride) : nullptr;
        weights = arena.take<Value>(QUERIES * key_capacity);
    }
};

// The attention of one head of one sequence: its inputs and outputs.
template <class Kind>
struct Head {
    using Value = typename Kind::Value;
    const Value *queries, *keys, *values;  // (tokens, H)
    Value* context;                        // (queries, H), rows `context_stride` apart
    Long context_stride;
    Long key_count, head_size;
    float scale;                      // of the scores
    Long window;                      // how far away keys may be; key_count for all
    Blocks distances, key_distances;  // vectors by which queries and keys are multiplied, or without words
    const int32_t* rows;              // for query i and key j their vectors are rows[j - i]; or null
    Long exact_distances;             // up to which rows follow each other
    const float* distance_bias;       // added to the score of query i and key j: distance_bias[j - i]; or null
    const float* bias;                // added to the scores of query i at bias + i * bias_stride, or null
    Long bias_stride;
    const uint8_t* has_keys;  // 0 for a query that may attend to no key, or null; has_keys_stride apart
    Long has_keys_stride;
    const float* gate;  // factors of the context, gate_stride apart, or null
    Long gate_stride;
    float* probabilities;  // (queries, keys), or null
};

template <class Kind>
constexpr Long words_of_keys(Long keys) {
    return round_up(divide_up(keys, Kind::per_word), WORDS_TOGETHER<Kind>);
}

// Pack values in blocks, as a matmul reads a weight: its inputs are the keys, its outputs the H numbers of a value.
template <class Kind>
void pack_values(const Head<Kind>& head, uint32_t* to) {
    constexpr Long block = BLOCK_OF<Kind>;
    const Long words = words_of_keys<Kind>(head.key_count);
    alignas(64) static const typename Kind::Value zero_value[LANES] = {};
    for (Long word = 0; word < words; word++)
        for (Long column = 0; column < head.head_size; column += LANES) {
            uint32_t* at = to + (column / block * words + word) * block + column % block;
            const auto* first = head.values + word * Kind::per_word * head.head_size + column;
            if (word * Kind::per_word >= head.key_count) first = zero_value;
            if constexpr (Kind::per_word == 1) {
                std::memcpy(at, first, LANES * 4);
            } else {
                const bool last = word * 2 + 1 >= head.key_count;
                interleave(first, last ? zero_value : first + head.head_size, at);
            }
        }
}

// Write the softmax numerators of one query's scores, 2^(factor x (score - largest)), to `weights`; return 1 / their
// sum.
template <class Value>
float softmax(float* scores, Long keys, Long padded, float factor, Value* weights, bool keep) {
    constexpr bool rounded = std::is_same_v<Value, BFloat16>;
    for (Long key = keys; key < padded; key++) scores[key] = -INFINITY;

    Vector maxima[4];  // which do not wait for each other
    for (auto& each : maxima) each = broadcast(-INFINITY);
    for (Long key = 0; key < padded; key += 4 * LANES)
#pragma GCC unroll 4
        for (Long i = 0; i < 4; i++)
            if (key + i * LANES < padded) maxima[i] = max(maxima[i], load(scores + key + i * LANES));
    float largest = reduce_max(max(max(maxima[0], maxima[1]), max(maxima[2], maxima[3])));
    if (largest == -INFINITY) largest = 0;  // all keys are masked

    // Each weight is computed once: added to the total as it is, and stored in the dtype of the matmul that follows.
    Vector totals[PER_SUM] = {};
    const auto weigh = [&](Long key, Vector& total) {
        const Vector weight = exp2<rounded>((load(scores + key) - broadcast(largest)) * broadcast(factor));
        total = total + weight;
        if (keep) store(scores + key, weight);
        return weight;
    };

    constexpr Long AT_ONCE = std::max(PER_SUM, Long(2));
    for (Long from = 0; from < padded; from += AT_ONCE * LANES)
#pragma GCC unroll 2
        for (Long j = 0; j < AT_ONCE; j += 2) {
            const Long key = from + j * LANES;
            if (key >= padded) break;
            const Vector first = weigh(key, totals[j % PER_SUM]);
            if (key + LANES < padded)
                store(weights + key, first, weigh(key + LANES, totals[(j + 1) % PER_SUM]));
            else
                store(weights + key, first);
        }
    return 1 / reduce_sum(totals);
}

// Add relative positions to the scores of `count` queries from `query` on.  These are scale x the products of queries
// and the vectors of their distances to keys, and of keys and the vectors of their distances from queries.
template <class Distances, class Kind>
void add_distances(const Head<Kind>& head, Long query, Long count, const AttentionWorkspace<Kind>& workspace) {
    const Long stride = workspace.relative_stride, capacity = workspace.key_capacity;
    // Multiply rows by the vectors of all distances between the queries and some keys; return where row 0's begins.
    const auto multiply = [&](const Blocks& vectors, const typename Kind::Value* rows, Long number, Long key,
                              Long keys) {
        const Long first = head.rows[key - (query + count - 1)] / LANES * LANES;
        const Long last = round_up(head.rows[key + keys - 1 - query] + 1, LANES);
        const Target<float> to{workspace.relative - first, stride};
        matmul<Distances>(rows, head.head_size, number, vectors, nullptr, first, last, to, in_place);
        return workspace.relative - first;
    };

    // Queries by distances.  If all keys are near enough, their rows follow each other and are added by vectors.
    if (head.distances.words) {
        const float* all = multiply(head.distances, head.queries + query * head.head_size, count, 0, head.key_count);
        for (Long i = 0; i < count; i++) {
            float* scores = workspace.scores + i * capacity;
            const float* products = all + i * stride;
            const int32_t* rows = head.rows - query - i;
            if (std::max(query + i, head.key_count - 1 - query - i) <= head.exact_distances) {
                for (Long j = 0; j < head.key_count; j += LANES)
                    store(scores + j,
                          multiply_add(load(products + rows[0] + j), broadcast(head.scale), load(scores + j)));
            } else {
                for (Long j = 0; j < head.key_count; j++)
                    scores[j] = multiply_add(products[rows[j]], head.scale, scores[j]);
            }
        }
    }

    // Keys by distances: for each query another product of each key, so they are added one by one.
    for (Long key = 0; head.key_distances.words && key < head.key_count; key += QUERIES) {
        const Long keys = std::min(QUERIES, head.key_count - key);
        const float* products = multiply(head.key_distances, head.keys + key * head.head_size, keys, key, keys);
        for (Long i = 0; i < count; i++) {
            float* scores = workspace.scores + i * capacity + key;
            const int32_t* rows = head.rows - query - i + key;
            for (Long j = 0; j < keys; j++)
                scores[j] = multiply_add(products[j * stride + rows[j]], head.scale, scores[j]);
        }
    }
}

// Compute the context of queries first up to last.  Keys and values must have been packed in `workspace`.
template <class Distances, class Kind>
void attend(const Head<Kind>& head, Long first, Long last, const AttentionWorkspace<Kind>& workspace) {
    using Value = typename Kind::Value;
    constexpr Long together = std::max(LANES, WORDS_TOGETHER<Kind> * Kind::per_word);
    const Long keys = head.key_count, words = head.head_size / Kind::per_word;
    const bool adds = head.rows || head.distance_bias || head.bias;  // to the scores, which are then scaled first
    const float factor = (adds ? 1 : head.scale) * LOG2_E;
    const bool windowed = head.window < keys;

    const Blocks key_blocks{workspace.keys, words};
    float inverse[QUERIES];
    const Long part = even_part(last - first, QUERIES);
    for (Long query = first, count; query < last; query += count) {
        count = std::min(windowed ? QUERIES - query % QUERIES : part, last - query);

        // The keys that some of these queries may attend to.  They begin with a whole 64, of keys and of queries, so
        // that a query has the same sums whichever others are computed with it.
        const Long from = std::max(Long(0), query / QUERIES * QUERIES - head.window) / QUERIES * QUERIES;
        const Long end = std::min(keys, query + count + head.window), padded = round_up(end, together);
        const Blocks value_blocks{workspace.values + from / Kind::per_word * BLOCK_OF<Kind>,
                                  words_of_keys<Kind>(end) - from / Kind::per_word, false, words_of_keys<Kind>(keys)};

        // The scores of these keys, with everything that is added to them.
        const Target<float> scores_at{workspace.scores, workspace.key_capacity};
        matmul<Kind>(head.queries + query * head.head_size, head.head_size, count, key_blocks, nullptr, from,
                     padded, scores_at, in_place);
        for (Long i = 0; adds && i < count; i++)
            for (Long key = from; key < padded; key += LANES)
                store(scores_at.at(i, key), load(scores_at.at(i, key)) * broadcast(head.scale));
        if (head.rows) add_distances<Distances>(head, query, count, workspace);

        // The softmax of each query; its division by the sum waits until there are only H numbers to divide.
        BERTLITE_PHASE("softmax and context");
        for (Long i = 0; i < count; i++) {
            float* scores = workspace.scores + i * workspace.key_capacity;
            const auto add = [=](const float* bias) {
                for (Long key = from; key < end; key++) scores[key] += bias[key];
            };
            if (head.distance_bias) add(head.distance_bias - query - i);
            if (head.bias) add(head.bias + (query + i) * head.bias_stride);
            std::fill(scores + from, scores + std::max(from, query + i - head.window), -INFINITY);
            std::fill(scores + std::min(end, query + i + head.window + 1), scores + end, -INFINITY);
            inverse[i] = softmax(scores + from, end - from, padded - from, factor,
                                 workspace.weights + i * workspace.key_capacity + from,
                                 head.probabilities != nullptr);
            const bool masked = head.has_keys && !head.has_keys[(query + i) * head.has_keys_stride];
            if (masked || std::isinf(inverse[i])) inverse[i] = 0;  // no key within the window
            const float gate = head.gate ? head.gate[(query + i) * head.gate_stride] : 1;
            if (head.probabilities)
                for (Long key = 0; key < keys; key++)
                    head.probabilities[(query + i) * keys + key] =
                        key < from || key >= end ? 0 : scores[key] * inverse[i] * gate;
            inverse[i] *= gate;
        }

        const Target<Value> context{head.context + query * head.context_stride, head.context_stride};
        matmul<Kind>(workspace.weights + from, workspace.key_capacity, count, value_blocks, nullptr, 0, head.head_size,
                     context, [=, &inverse](Long row, Long rows, Long column, Long columns, const float* sums) {
                         for (Long i = 0; i < rows; i++)
                             for (Long j = 0; j < columns; j += LANES)
                                 store(context.at(row + i, column + j),
                                       load(sums + i * BLOCK + j) * broadcast(inverse[row + i]));
                     });
    }
}

}  // namespace bertlite
