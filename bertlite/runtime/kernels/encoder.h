// The layers of BERT, one after the other, on packed sequences: no padding.
//
// Two phases a layer, between which all threads wait for each other.  In the first, pairs of sequence and head attend.
// In the second a thread takes a block of tokens through all steps between two attentions.  These are the output
// projection, residual and LayerNorm, both halves of the feed-forward network, residual and LayerNorm, and the next
// layer's queries, keys and values.  Weights stream through the cache and activations stay in it.
//
// If there are few tokens for each thread, the threads share the outputs of each matmul instead.  They wait for each
// other in between.  With AMX a thread takes whole sequences through a layer if it can: their queries, keys and values
// then stay in its cache as well.
//
// Letters:  T tokens, D hidden size, N heads, H head size, I neurons of the feed-forward network
#pragma once

#include <numeric>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "memory.h"
#include "tokens.h"

namespace bertlite {

extern "C" {

struct Norm {
    const float *weight, *bias;  // of a LayerNorm, (D,)
};

// The following structs begin with their size, which reveals a caller with another layout.
struct Layer {
    Long size;
    Matrix qkv;     // queries, keys and values: (3 N H, D)
    Matrix output;  // (D, N H)
    Matrix up, down;
    Norm attention_norm, output_norm;  // of the sums that attention and the feed-forward network make
    Long head_count;
    // Relative positions, by distance from query to key, the largest first: P - 1 down to 1 - P for P positions.
    Matrix distances;            // (2 P - 1, H), added to each key for a query; without words, none
    Matrix key_distances;        // likewise to each query for a key
    const float* distance_bias;  // (N, 2 P - 1): added to scores; or null
    // Or each head has a table, (N, R, H), and distances from `reach` down to -reach, and any beyond, share R rows.
    const float* distance_rows;  // (2 reach + 1,): the row of each; or null
    Long reach;
    Long dtype;  // of its matmuls, as native.cpp numbers them
    Matrix factor;        // its outputs multiply the activations of neurons; without words, none
    const float* angles;  // (angle_count, angle_size), by which queries and keys are rotated, see rotate_head; or null
    Long window;          // how many positions away a token attends to others; -1: anywhere
    Norm input_norm;      // before the first layer, if norms come first; or null
};

struct Model {
    Long size;
    const Layer* layers;
    Long layer_count, hidden_size, head_size, activation;
    double epsilon, score_scale;
    Long norms_first;  // whether only matmuls, and the output, take what a LayerNorm makes; sums go on without it
    Long angle_count, angle_size;  // of each table of angles: positions, and the size of a head without padding
    Long rotated;  // whether weights of 8-bit integers are those of rotated rows, as they are packed today
};

struct Batch {
    Long size;
    Long tokens, sequences;
    const Long* starts;  // (sequences + 1,): where each begins, none of them empty, and where the last one ends
    const void* hidden;  // (T, D)
    void* output;        // (T, D), or with first_only (sequences, D); with ids as these lie
    void* states;        // (layers, T, D), the inputs of the layers, or null
    Long is_bfloat16;    // whether those three are; else they are floats
    const float* bias;   // added to scores, or null: (sequences, N, queries, keys), with strides of the first three
    Long bias_strides[3];
    const uint8_t* has_keys;  // 0 for a query that may attend to no key, or null: (sequences, N, queries)
    Long has_keys_strides[3];
    const float* const* gates;    // for each layer the factors of its heads, (T, N) or (N,); or null
    Long gates_each_token;        // which of the two
    float* const* probabilities;  // for each layer (sequences, N, S, S), all lengths being equal; or null
    Long first_only;              // whether the last layer computes only the first token of each sequence
    const Ids* ids;               // from which `tokens`, `sequences`, `starts` and `hidden` are computed; or null
    const Linear* pooler;         // applied to the first token of each sequence, or null
    void* pooled;                 // (sequences, outputs of the pooler)
    const int64_t* places;        // (T,): positions, by which tokens are rotated; or null: counted from 0
};
}

// The rows of the vectors that belong to the distances between up to `keys` tokens, from the largest down.
struct DistanceRows {
    std::vector<int32_t> rows;
    Long exact = 0;  // a distance up to which they follow each other

    DistanceRows(const Layer& layer, Long keys) {
        if (!(layer.distances.words || layer.key_distances.words) || !keys) return;
        for (Long distance = keys - 1; distance > -keys; distance--) {
            const Long shared = layer.reach - std::clamp(distance, -layer.reach, layer.reach);
            rows.push_back(layer.distance_rows ? int32_t(layer.distance_rows[shared])
                                               : int32_t((layer.distances.outputs - 1) / 2 - distance));
        }
        const int32_t* zero = rows.data() + keys - 1;
        while (exact + 1 < keys && zero[exact + 1] == zero[exact] + 1 && zero[-exact - 1] == zero[-exact] - 1) exact++;
    }

    Long count() const { return rows.empty() ? 0 : rows.back() - rows.front() + 1; }
};

// The workers of a loop: one thread, or the team together.
struct OneThread {
    template <class Work>
    void parallel_for(Long total, Long, Work work) const {
        work(0, total);
    }
};

struct WholeTeam {
    Team::Member& member;
    // Call work(from, to) on ranges of at most `grain` of `total` items.
    template <class Work>
    void parallel_for(Long total, Long grain, Work work) const {
        member.parallel_for(divide_up(total, grain),
                            [&](Long piece) { work(piece * grain, std::min(total, (piece + 1) * grain)); });
    }
};

// The dtype of attention: bfloat16, unless matmuls are of floats, or bfloat16 is only stored.  If they are of 8-bit
// integers, it is float32 without instructions for bfloat16, and if results must be the same on every processor.
template <class Kind, bool reproducible>
constexpr bool IN_FLOATS =
    std::is_same_v<Kind, Int8> ? reproducible || !MULTIPLIES_BFLOAT16 : IS_FLOAT32<Kind> || BFloat16s::widened;
template <class Kind, bool reproducible>
using AttentionOf = std::conditional_t<IN_FLOATS<Kind, reproducible>, Float32, BFloat16s>;

// Tiles multiply bfloat16 so fast that the third cache is too slow for the weights of 128 tokens.  With 256, neurons
// leave the second cache unless some of them are taken at a time.
template <class Kind>
constexpr bool BFLOAT16_ON_TILES = BY_AMX<Kind> && std::is_same_v<Kind, BFloat16s>;

// scripts/measure/native_steps.py compares such figures with others; its record is scripts/results/native_steps.json.
constexpr bool WHOLE_SEQUENCES = HAS_AMX;  // whether threads may take whole sequences
constexpr Long TOKENS_SHARED = 4;  // tokens that a thread normalises or converts at a time, where threads share them
constexpr Long PHASES = 9;         // of a layer, at most, and three more for each part of its neurons

template <class Kind, class Attending>
class Encoder {
    using Value = typename Kind::Value;
    using HeadValue = typename Attending::Value;
    // As they are packed.
    using Distances = std::conditional_t<IS_FLOAT32<Kind>, Float32, BFloat16Weights<HeadValue>>;
    static constexpr bool quantized = std::is_same_v<Kind, Int8>;  // each token with a scale of its own
    // Tokens that a thread takes through the second phase at a time.
    static constexpr Long TOKENS = BFLOAT16_ON_TILES<Kind> ? 256 : 128;
    // With fewer tokens for each thread, threads share the outputs.
    static constexpr Long FEW_TOKENS = BY_AMX<Kind> && !quantized ? 80 : 48;
    static constexpr Long ALL = LONG_MAX / 128 * 64;
    static constexpr Long EMBEDDINGS = -1;  // the layer before the first: without layers, the last one
    static constexpr Long NEURONS = BFLOAT16_ON_TILES<Kind> ? 1536 : ALL;  // multiplied again at a time
    static_assert(NEURONS % GROUP == 0);
    // A pooler of float32 behind layers of another dtype is computed as a linear layer on its own is.
    static constexpr bool POOLS_IN_PARTS =
        std::is_same_v<Kind, Float32Parts> || (HAS_AMX && !std::is_same_v<Attending, Float32>);

    // How a forward goes.
    enum class Way {
        SHARED,     // threads share the outputs of each matmul
        TOKENS,     // threads take pairs of sequence and head, then blocks of tokens
        SEQUENCES,  // threads take groups of whole sequences
    };

    // Queries, keys and values, (3 N, tokens, H), of so many tokens from `begin` on.
    struct Heads {
        HeadValue* all;
        Long tokens, begin;
    };

    // Activations of some tokens on their way through the second phase.
    struct TokenBlock {
        Value* input;                // (tokens, widest of D and N H): converted for the next matmul
        Quantization* quantization;  // (tokens,), of the inputs
        float* neurons;              // (tokens, widest of D, N H and I), of 8-bit integers alone: not yet quantized
        Value* intermediate;         // (tokens, I), or some neurons of them
        Quantization* intermediate_quantization;
        Long first = 0, count = 0;  // which tokens they are
    };

    // Some outputs of a matrix, or some inputs; of 8-bit integers all.
    struct Part : Matrix {
        Long all_inputs;

        Part(const Matrix& all) : Matrix(all), all_inputs(all.inputs) {}
        static Part of_outputs(const Matrix& all, Long first, Long count) {
            Part part(all);
            part.words += first * divide_up(all.inputs, Kind::per_word);
            part.bias += first, part.outputs = count;
            return part;
        }
        static Part of_inputs(const Matrix& all, Long first, Long count) {
            Part part(all);
            part.words += first / Kind::per_word * BLOCK_OF<Kind>;
            part.bias = first ? nullptr : all.bias, part.inputs = count;
            return part;
        }
    };

   public:
    // Layers from `first` up to `end` will run.  The ones before have left hidden states at the start of the memory.
    Encoder(const Model& model, const Batch& batch, Long threads, Memory& memory, Long first, Long end)
        : model_(model), batch_(batch), threads_(threads), first_layer_(first), end_(end) {
        if (batch.ids) {
            places_ = TokenPlaces(*batch.ids);
            batch_.tokens = places_.tokens();
            batch_.sequences = batch.ids->rows;
            batch_.starts = places_.starts.data();
        }

        // Layers that were pruned differ in size; memory is for the widest of them.
        Long widest_neurons = 0;
        for (Long layer = 0; layer < model.layer_count; layer++) {
            widest_heads_ = std::max(widest_heads_, model.layers[layer].output.inputs);
            widest_neurons = std::max(widest_neurons, round_up(model.layers[layer].up.outputs, LANES));
        }
        phases_ = PHASES + 3 * divide_up(std::max(widest_neurons, Long(1)), NEURONS);
        widest_neurons = std::min(widest_neurons, NEURONS);
        if (quantized) widest_neurons = std::max({widest_neurons, width(), widest_heads_});
        neurons_stride_ = row_stride<Value>(widest_neurons);
        context_stride_ = row_stride<HeadValue>(widest_heads_);
        input_stride_ = row_stride<Value>(std::max(width(), widest_heads_));

        // Long sequences come first, so that no thread begins one when all others are done.
        order_.resize(batch_.sequences);
        std::iota(order_.begin(), order_.end(), Long(0));
        std::stable_sort(order_.begin(), order_.end(), [&](Long a, Long b) { return length(a) > length(b); });
        longest_ = batch_.sequences ? length(order_[0]) : 0;
        for (Long layer = 0; layer < model.layer_count; layer++)
            distance_rows_.emplace_back(model.layers[layer], longest_);
        place_tokens();

        tokens_at_once_ = even_part(divide_up(batch_.tokens, threads), TOKENS);
        way_ = choose_way();

        // The first pass counts the bytes, and the second one takes them.
        Arena counting;
        take_memory(counting);
        memory.reserve(counting.used(), first ? batch_.tokens * width() * Long(sizeof(float)) : 0);
        Arena arena(memory.start());
        take_memory(arena);
        if (norm_) read_norm();
    }

    // Return whether it is done; it is not if weights are beyond the parts of float32.
    bool run() {
        return run_team_unless_beyond(threads_, phases_ * (model_.layer_count + 1),
                                      [this](Team::Member& member) { work(member); });
    }

   private:
    Way choose_way() {
        const Long tokens = batch_.tokens;

        // With few tokens each thread would read all weights for a handful of rows; sharing them, it reads a part.
        if (tokens < FEW_TOKENS * threads_) return Way::SHARED;
        if (!WHOLE_SEQUENCES) return Way::TOKENS;

        // Whole sequences: consecutive ones in groups, each as large as a block of tokens.
        for (Long i = 0; i < batch_.sequences; i++) {
            if (groups_.empty() || batch_.starts[i + 1] - batch_.starts[groups_.back()] > tokens_at_once_)
                groups_.push_back(i);
            longest_group_ = std::max(longest_group_, batch_.starts[i + 1] - batch_.starts[groups_.back()]);
        }

        // A thread without a group would wait, so groups must fill all rounds, up to a sixteenth of the tokens.
        const Long rounds = divide_up(Long(groups_.size()), threads_);  // in which each thread takes a group
        groups_.push_back(batch_.sequences);
        const bool balanced = threads_ == 1 || longest_group_ * rounds * threads_ <= tokens + tokens / 16;
        return balanced ? Way::SEQUENCES : Way::TOKENS;
    }

    // Find the position by which each token is rotated, if layers rotate; the tables of angles must have it.
    void place_tokens() {
        const auto rotates = [](const Layer& layer) { return layer.angles != nullptr; };
        if (std::none_of(model_.layers, model_.layers + model_.layer_count, rotates)) return;
        for (Long i = 0; i < batch_.sequences; i++)
            for (Long at = 0; at < length(i); at++) {
                const Long place = batch_.places ? batch_.places[batch_.starts[i] + at] : at;
                if (place < 0 || place >= model_.angle_count)
                    throw std::invalid_argument("a token's position is beyond the tables of angles");
                rotated_places_.push_back(place);
            }
    }

    void take_memory(Arena& arena) {
        const Long tokens = batch_.tokens, D = width();
        hidden_ = arena.take<float>(tokens * D);  // first, so that the next object finds it
        firsts_ = batch_.first_only ? arena.take<float>(batch_.sequences * D) : nullptr;
        norm_ = batch_.ids && batch_.ids->norm_weight ? arena.take<float>(2 * D) : nullptr;
        pooler_input_ = batch_.pooler ? arena.take<float>(batch_.sequences * D) : nullptr;

        const bool whole = way_ == Way::SEQUENCES;
        qkv_ = arena.take<HeadValue>((whole ? threads_ * longest_group_ : tokens) * 3 * widest_heads_);
        context_ = arena.take<HeadValue>(tokens * context_stride_);

        // Blocks of activations: one for the team, or one for each thread.
        blocks_.clear();
        workspaces_.clear();
        inputs_ = arena.take<Value>(whole ? tokens * input_stride_ : 0);
        quantizations_ = arena.take<Quantization>(whole ? tokens : 0);
        if (way_ == Way::SHARED)
            blocks_.push_back(take_block(arena, tokens));
        else
            for (Long i = 0; i < threads_; i++) blocks_.push_back(take_block(arena, tokens_at_once_));

        Long distances = 0;
        for (const auto& each : distance_rows_) distances = std::max(distances, each.count());
        for (Long i = 0; i < threads_; i++) workspaces_.emplace_back(arena, longest_, model_.head_size, distances);
    }

    TokenBlock take_block(Arena& arena, Long count) {
        TokenBlock block;
        block.input = arena.take<Value>(count * input_stride_);
        block.quantization = arena.take<Quantization>(count);
        block.neurons = quantized ? arena.take<float>(count * neurons_stride_) : nullptr;
        block.intermediate = arena.take<Value>(count * neurons_stride_);
        block.intermediate_quantization = arena.take<Quantization>(count);
        return block;
    }

    Long width() const { return round_up(model_.hidden_size, LANES); }  // of a row of hidden states
    // How far rows of so many numbers lie apart.  It is an odd number of cache lines, as the rows of a tile would else
    // share few sets of a cache.
    template <class T>
    static Long row_stride(Long numbers) {
        return (divide_up(numbers * Long(sizeof(T)), 64) | 1) * 64 / Long(sizeof(T));
    }
    Long length(Long sequence) const { return batch_.starts[sequence + 1] - batch_.starts[sequence]; }
    bool is_last(Long layer) const { return layer + 1 == model_.layer_count; }
    bool first_tokens_only(Long layer) const { return batch_.first_only && is_last(layer); }

    void work(Team::Member& member) {
        BERTLITE_PHASE("layers");
        run_tokens(first_tokens_only(EMBEDDINGS) ? batch_.sequences : batch_.tokens, member,
                   [&](const TokenBlock& block, const auto& workers) { before_layers(block, workers); });

        // A layer is attention, and then all that is done token by token; with whole sequences it is one phase.
        for (Long layer = first_layer_; layer < end_; layer++) {
            if (way_ == Way::SEQUENCES) {
                member.parallel_for(groups_.size() - 1, [&](Long group) { take_group(layer, group, member.thread); });
                if (!first_tokens_only(layer)) continue;
            } else {
                attend_all(layer, member);
            }
            const Long tokens = first_tokens_only(layer) ? batch_.sequences : batch_.tokens;
            run_tokens(tokens, member,
                       [&](const TokenBlock& block, const auto& workers) { after_attention(layer, block, workers); });
        }

        // The pooler has the dtype of the outputs, whatever the layers are computed in.
        if (!batch_.pooler || end_ < model_.layer_count) return;
        if (batch_.is_bfloat16)
            pool<BFloat16s>(member);
        else
            pool<std::conditional_t<POOLS_IN_PARTS, Float32Parts, Float32>>(member);
    }

    template <class PoolerKind>
    void pool(Team::Member& member) {
        using PoolerValue = typename PoolerKind::Value;
        const Long D = width();
        auto* input = reinterpret_cast<PoolerValue*>(pooler_input_);
        WholeTeam{member}.parallel_for(batch_.sequences, TOKENS, [&](Long from, Long to) {
            for (Long i = from; i < to; i++) {
                const bool apart = batch_.first_only && model_.layer_count;  // the last layer has moved them
                const float* first = apart ? firsts_ + i * D : hidden_ + batch_.starts[i] * D;
                for (Long j = 0; j < D; j += LANES) {
                    typename PoolerKind::Weight rounded[LANES];  // as the hidden states are that a pooler is given
                    store(rounded, load(first + j));
                    store(input + i * D + j, load(rounded));
                }
            }
        });
        run_linear<PoolerKind>(*batch_.pooler, input, D, batch_.sequences,
                               static_cast<typename PoolerKind::Weight*>(batch_.pooled), threads_, member);
    }

    // Take tokens through the second phase: the team together all of them, or each thread some at a time.
    template <class Phase>
    void run_tokens(Long tokens, Team::Member& member, Phase phase) {
        if (way_ == Way::SHARED) return phase(block_at(0, tokens, 0), WholeTeam{member});
        member.parallel_for(divide_up(tokens, tokens_at_once_), [&](Long index) {
            const Long first = index * tokens_at_once_;
            phase(block_at(first, std::min(tokens_at_once_, tokens - first), member.thread), OneThread{});
        });
    }

    TokenBlock block_at(Long first, Long count, Long thread) const {
        TokenBlock block = blocks_[thread];
        block.first = first, block.count = count;
        if (way_ == Way::SEQUENCES)
            block.input = inputs_ + first * input_stride_, block.quantization = quantizations_ + first;
        return block;
    }

    // Take a group of sequences through a layer.
    void take_group(Long index, Long group, Long thread) {
        const Layer& layer = model_.layers[index];
        const Long begin = batch_.starts[groups_[group]], tokens = batch_.starts[groups_[group + 1]] - begin;

        const Heads heads{qkv_ + thread * longest_group_ * 3 * widest_heads_, tokens, begin};
        const Long part = even_part(tokens, tokens_at_once_);
        const auto for_each_block = [&](auto work) {
            for (Long first = 0; first < tokens; first += part)
                work(block_at(begin + first, std::min(part, tokens - first), thread));
        };

        // Queries, keys and values of the group stay in this thread's cache until its heads have attended.
        for_each_block([&](const TokenBlock& block) { project_qkv(layer, block, OneThread{}, heads); });
        for (Long sequence = groups_[group]; sequence < groups_[group + 1]; sequence++)
            for (Long head = 0; head < layer.head_count; head++) {
                const Long queries = first_tokens_only(index) ? 1 : length(sequence);
                attend_pair(index, sequence, head, queries, 0, queries, workspaces_[thread], heads);
            }

        if (first_tokens_only(index)) return;
        for_each_block([&](const TokenBlock& block) { after_attention(index, block, OneThread{}); });
    }

    Heads all_heads() const { return {qkv_, batch_.tokens, 0}; }

    // Call work(token) for each token of a block.
    template <class Workers, class Work>
    static void for_each_token(const TokenBlock& block, const Workers& workers, Work work) {
        workers.parallel_for(block.count, TOKENS_SHARED, [&](Long from, Long to) {
            BERTLITE_PHASE("token by token");
            for (Long token = from; token < to; token++) work(token);
        });
    }

    // Read or compute embeddings, if no layers ran before, and compute the first layer's queries, keys and values.
    // Without layers they are the output, of first tokens alone if only these are asked for.
    template <class Workers>
    void before_layers(const TokenBlock& block, const Workers& workers) {
        const Long D = width();
        for_each_token(block, workers, [&](Long token) {
            const Long index = block.first + token;
            const Long at = first_tokens_only(EMBEDDINGS) ? batch_.starts[index] : index;
            float* hidden = hidden_ + at * D;
            if (!first_layer_) {
                read_token(at, hidden);
                if (!model_.layer_count) return write_output(index, hidden);
                write_state(0, index, hidden);
            }
            const Layer& layer = model_.layers[first_layer_];
            const auto& norm = first_layer_ ? model_.layers[first_layer_ - 1].output_norm : layer.input_norm;
            if (model_.norms_first && norm.weight)
                normalise(block, token, hidden, norm, &layer.qkv);
            else
                convert_input(block, token, hidden, layer.qkv);
        });
        if (model_.layer_count && way_ != Way::SEQUENCES)
            project_qkv(model_.layers[first_layer_], block, workers, all_heads());
    }

    template <class Workers>
    void after_attention(Long index, const TokenBlock& block, const Workers& workers) {
        const Layer& layer = model_.layers[index];
        const Long D = width();
        const Target<float> hidden{(first_tokens_only(index) ? firsts_ : hidden_) + block.first * D, D};
        if (first_tokens_only(index))
            for_each_token(block, workers, [&](Long token) {
                std::memcpy(hidden.at(token, 0), hidden_ + batch_.starts[block.first + token] * D, D * sizeof(float));
            });

        // The output projection is added to the residual, which is then normalised.
        const HeadValue* context = context_ + block.first * context_stride_;
        if constexpr (quantized) {
            for_each_token(block, workers, [&](Long token) {
                convert_input(block, token, context + token * context_stride_, layer.output);
            });
            BERTLITE_PHASE("output");
            add_projection(block.input, input_stride_, block.quantization, layer.output, hidden, block, workers);
        } else {
            BERTLITE_PHASE("output");
            add_projection(context, context_stride_, block.quantization, layer.output, hidden, block, workers);
        }
        for_each_token(block, workers, [&](Long token) {
            normalise(block, token, hidden.at(token, 0), layer.attention_norm, &layer.up);
        });

        // The feed-forward network.  On tiles some neurons at a time, which stay in the cache between the two matmuls.
        const Long neurons = layer.up.outputs, at_once = round_up(even_part(neurons, NEURONS), GROUP);
        Long first = 0;
        do {
            const Long some = std::min(at_once, neurons - first);
            project_up(Part::of_outputs(layer.up, first, some), block, workers);
            if (layer.factor.words) multiply_neurons(Part::of_outputs(layer.factor, first, some), block, workers);
            if constexpr (quantized) {
                for_each_token(block, workers, [&](Long token) {
                    const Long at = token * neurons_stride_;
                    quantize_row(block, token, block.neurons + at, layer.down, block.intermediate + at,
                                 block.intermediate_quantization + token);
                });
            }
            BERTLITE_PHASE("down");
            add_projection(block.intermediate, neurons_stride_, block.intermediate_quantization,
                           Part::of_inputs(layer.down, first, some), hidden, block, workers);
            first += at_once;
        } while (first < neurons);

        // The second LayerNorm; from here tokens go to the next layer, or to the output.
        for_each_token(block, workers, [&](Long token) {
            normalise(block, token, hidden.at(token, 0), layer.output_norm,
                      index + 1 < end_ ? &model_.layers[index + 1].qkv : nullptr, is_last(index));
            if (is_last(index))
                write_output(block.first + token, hidden.at(token, 0));
            else
                write_state(index + 1, block.first + token, hidden.at(token, 0));
        });

        // While the tokens are in the cache, they are projected for the next layer.
        if (index + 1 < end_ && way_ != Way::SEQUENCES)
            project_qkv(model_.layers[index + 1], block, workers, all_heads());
    }

    // Convert a token's (inputs,) for a matmul by this matrix, which takes them from `block.input`.
    template <class From>
    void convert_input(const TokenBlock& block, Long token, const From* from, const Matrix& matrix) const {
        Value* to = block.input + token * input_stride_;
        if constexpr (quantized)
            quantize_row(block, token, from, matrix, to, block.quantization + token);
        else
            convert<Kind>(from, round_up(matrix.inputs, LANES), to, nullptr);
    }

    template <class From>
    void quantize_row(const TokenBlock& block, Long token, const From* from, const Matrix& matrix, Value* to,
                      Quantization* quantization) const {
        const Long width = round_up(matrix.inputs, LANES);
        if (!model_.rotated) return convert<Kind>(from, width, to, quantization);
        float* rotated = block.neurons + token * neurons_stride_;  // from where `from` may be
        if (matrix.factors)
            rotate<true>(from, matrix.inputs, width, rotated, matrix.factors);
        else
            rotate<false>(from, matrix.inputs, width, rotated, nullptr);
        convert<Kind>(rotated, width, to, quantization);
    }

    // Apply LayerNorm to a token's x, (D,), and convert it for the next matmul, if there is one.  If norms come first,
    // x itself stays as it is, unless it `is_output`.
    void normalise(const TokenBlock& block, Long token, float* x, const Norm& norm, const Matrix* next,
                   bool is_output = false) const {
        const auto write = [&](auto* to) {
            layer_norm(x, model_.hidden_size, norm.weight, norm.bias, float(model_.epsilon), to);
        };
        if (!model_.norms_first || is_output) {
            write(x);
            if (next) convert_input(block, token, x, *next);
        } else if (next) {
            if constexpr (quantized) {
                float* normed = block.neurons + token * neurons_stride_;
                write(normed);
                convert_input(block, token, normed, *next);
            } else {
                write(block.input + token * input_stride_);
            }
        }
    }

    // Multiply tokens by a weight.  For each tile of sums `finish(each)` is called: it chooses a function `write` and
    // calls each(write).  That calls write(at, y) for every vector y of outputs, which are dequantized and have their
    // bias; `at` is where in `to` they belong.
    template <class Workers, class To, class Finish>
    void project(const Value* input, Long stride, const Quantization* quantization, Long count, const Part& matrix,
                 const To& to, const Workers& workers, Finish finish) {
        // Behind the blocks of a call there are those that its thread takes next, or another matrix.
        const Blocks blocks{matrix.words, divide_up(matrix.inputs, Kind::per_word), true,
                            divide_up(matrix.all_inputs, Kind::per_word)};
        const typename Kind::Sum* start = nullptr;
        if constexpr (!quantized) start = matrix.bias;

        // Copies, because for the compiler a store of a vector may change what `this` points to.
        const float *scales = matrix.scales, *weight_sums = matrix.sums, *bias = matrix.bias;
        const auto finish_tile = [=](Long row, Long rows, Long column, Long columns, const typename Kind::Sum* sums) {
            finish([=](auto write) __attribute__((always_inline)) {
                for (Long j = 0; j < columns; j += LANES) {
                    // Read once, before the first store, which for the compiler may change them.
                    const auto read = [=](const float* from) { return quantized ? load(from + column + j) : zeros(); };
                    const Vector scale = read(scales), weight_sum = read(weight_sums), constant = read(bias);
                    const Integers moved = quantized && LEAST ? to_integers(weight_sum / scale) * -LEAST : Integers{};
                    for (Long i = 0; i < rows; i++) {
                        Vector y = load(sums + i * BLOCK + j);
                        if constexpr (quantized) {
                            if (LEAST) y = to_floats(load_as<Integers>(sums + i * BLOCK + j) + moved);
                            const Quantization of_row = quantization[row + i];
                            y = multiply_add(y, scale * broadcast(of_row.scale),
                                             multiply_add(weight_sum, broadcast(of_row.offset), constant));
                        }
                        write(to.at(row + i, column + j), y);
                    }
                }
            });
        };

        // On tiles ranges are few, as nothing is multiplied while the sums of a range's last block are finished.  A
        // thread splits rows of float32 once for all outputs that it takes.
        const Long ranges = std::is_same_v<Kind, Float32Parts> || threads_ == 1 ? threads_ : 4 * threads_;
        const Long range = std::max(GROUP, round_up(divide_up(matrix.outputs, ranges), GROUP));
        const Long grain = BY_AMX<Kind> ? range : GROUP;
        workers.parallel_for(round_up(matrix.outputs, LANES), grain, [&](Long first, Long last) {
            matmul<Kind>(input, stride, count, blocks, start, first, last, to, finish_tile);
        });
    }

    template <class Workers>
    void project_qkv(const Layer& layer, const TokenBlock& block, const Workers& workers, const Heads& heads) {
        BERTLITE_PHASE("queries, keys and values");
        const Long H = model_.head_size;
        const HeadsTarget<HeadValue> qkv{heads.all + (block.first - heads.begin) * H, heads.tokens, H};
        project(block.input, input_stride_, block.quantization, block.count, layer.qkv, qkv, workers,
                [](auto each) { each([](HeadValue* at, Vector y) { store(at, y); }); });
        if (!layer.angles) return;
        for_each_token(block, workers, [&](Long token) {
            const float* angles = layer.angles + rotated_places_[block.first + token] * model_.angle_size;
            for (Long head = 0; head < 2 * layer.head_count; head++)  // of queries, then of keys
                rotate_head(qkv.at(token, head * H), model_.angle_size, angles);
        });
    }

    // Multiply tokens by a matrix whose outputs are neurons; `finish` is as for `project`.
    template <class Workers, class Finish>
    void project_to_neurons(const Part& matrix, const TokenBlock& block, const Workers& workers, Finish finish) {
        BERTLITE_PHASE("up");
        const auto into = [&](auto* neurons) {
            const Target<std::remove_pointer_t<decltype(neurons)>> to{neurons, neurons_stride_};
            project(block.input, input_stride_, block.quantization, block.count, matrix, to, workers, finish);
        };
        if constexpr (quantized)
            into(block.neurons);
        else
            into(block.intermediate);
    }

    // Multiply the neurons of tokens by the outputs of a matrix.
    template <class Workers>
    void multiply_neurons(const Part& matrix, const TokenBlock& block, const Workers& workers) {
        project_to_neurons(matrix, block, workers,
                           [](auto each) { each([](auto* at, Vector y) { store(at, load(at) * y); }); });
    }

    template <class Workers>
    void add_projection(const Value* input, Long stride, const Quantization* quantization, const Part& matrix,
                        const Target<float>& hidden, const TokenBlock& block, const Workers& workers) {
        project(input, stride, quantization, block.count, matrix, hidden, workers,
                [](auto each) { each([](float* at, Vector y) { store(at, load(at) + y); }); });
    }

    template <class Workers>
    void project_up(const Part& matrix, const TokenBlock& block, const Workers& workers) {
        const auto activation = static_cast<Activation>(model_.activation);
        project_to_neurons(matrix, block, workers, [=](auto each) {
            with_activation<!IS_FLOAT32<Kind>>(activation, [=](auto activate) {
                each([=](auto* at, Vector y) { store(at, activate(y)); });
            });
        });
    }

    // Compute the attention of all pairs of sequence and head, the longest sequences first, in parts if pairs are few.
    void attend_all(Long index, Team::Member& member) {
        const Long heads = model_.layers[index].head_count;
        const Long pairs = batch_.sequences * heads;
        const bool firsts = first_tokens_only(index);

        // Fewer pairs than threads: the queries of each pair are shared as well.
        const Long parts =
            firsts || !pairs ? 1 : std::min(divide_up(2 * threads_, pairs), divide_up(longest_, QUERIES));

        member.parallel_for(pairs * parts, [&](Long item) {
            const Long pair = item / parts, part = item % parts;
            const Long sequence = order_[pair / heads], head = pair % heads;
            const Long queries = firsts ? 1 : length(sequence);
            const Long first = queries * part / parts, last = queries * (part + 1) / parts;
            if (first < last)
                attend_pair(index, sequence, head, queries, first, last, workspaces_[member.thread], all_heads());
        });
    }

    void attend_pair(Long index, Long sequence, Long n, Long queries, Long first, Long last,
                     const AttentionWorkspace<Attending>& workspace, const Heads& from) {
        const Layer& layer = model_.layers[index];
        const Long start = batch_.starts[sequence], H = model_.head_size;
        const Long heads = from.tokens * H, parts = layer.head_count * heads;  // from one to the next
        Head<Attending> head{};
        head.queries = from.all + n * heads + (start - from.begin) * H;
        head.keys = head.queries + parts;
        head.values = head.keys + parts;
        head.context = context_ + (first_tokens_only(index) ? sequence : start) * context_stride_ + n * H;
        head.context_stride = context_stride_;

        head.key_count = length(sequence);
        head.head_size = H;
        head.scale = float(model_.score_scale);
        head.window = layer.window < 0 ? head.key_count : layer.window;

        // Relative positions: vectors, or a bias, for each distance, which the tables must reach.
        const Long distances = layer.distances.outputs;
        const bool reaches = (!layer.distances.words && !layer.distance_bias) || layer.distance_rows;
        if (!reaches && head.key_count > (distances + 1) / 2)
            throw std::invalid_argument("a sequence is longer than relative positions reach");
        const auto table = [&](const Matrix& vectors) {
            const Long words = H / Distances::per_word;
            const Long before = layer.distance_rows ? n * (vectors.outputs / layer.head_count) * words : 0;
            return Blocks{vectors.words ? vectors.words + before : nullptr, words};
        };
        head.distances = table(layer.distances);
        head.key_distances = table(layer.key_distances);
        const DistanceRows& rows = distance_rows_[index];
        head.rows = rows.rows.empty() ? nullptr : rows.rows.data() + longest_ - 1;
        head.exact_distances = rows.exact;
        if (layer.distance_bias) head.distance_bias = layer.distance_bias + n * distances + (distances - 1) / 2;

        // The caller's bias, its queries without keys, its gates, and its memory for weights.
        if (batch_.bias) {
            head.bias = batch_.bias + sequence * batch_.bias_strides[0] + n * batch_.bias_strides[1];
            head.bias_stride = batch_.bias_strides[2];
        }
        if (batch_.has_keys) {
            head.has_keys = batch_.has_keys + sequence * batch_.has_keys_strides[0] + n * batch_.has_keys_strides[1];
            head.has_keys_stride = batch_.has_keys_strides[2];
        }
        if (batch_.gates) {
            head.gate_stride = batch_.gates_each_token ? layer.head_count : 0;
            head.gate = batch_.gates[index] + start * head.gate_stride + n;
        }
        if (batch_.probabilities)
            head.probabilities =
                batch_.probabilities[index] + (sequence * layer.head_count + n) * queries * head.key_count;

        BERTLITE_PHASE("attention");
        pack_blocks<Attending>(head.keys, head.key_count, H, workspace.keys, round_up(head.key_count, BLOCK));
        pack_values(head, workspace.values);
        attend<Distances>(head, first, last, workspace);
    }

    // Call work with a null pointer of the dtype of the hidden states that are read and written.
    template <class Work>
    void with_dtype(Work work) const {
        if (batch_.is_bfloat16)
            work(static_cast<BFloat16*>(nullptr));
        else
            work(static_cast<float*>(nullptr));
    }

    void read_token(Long token, float* to) const {
        const Long D = model_.hidden_size;
        std::fill(to + D, to + width(), 0.0f);
        with_dtype([&](auto* none) {
            using T = std::remove_pointer_t<decltype(none)>;
            if (batch_.ids)
                embed<T>(*batch_.ids, places_, token, D, norm_, float(model_.epsilon), to);
            else
                read_row(static_cast<const T*>(batch_.hidden) + token * D, D, to);
        });
    }

    void write_token(void* to, Long token, const float* from) const {
        const Long D = model_.hidden_size;
        with_dtype([&](auto* none) { write_row(from, D, static_cast<decltype(none)>(to) + token * D); });
    }

    // Write a token's output, and zeros for the padding behind it.
    void write_output(Long token, const float* from) const {
        if (!batch_.output) return;
        if (!batch_.ids || batch_.first_only) return write_token(batch_.output, token, from);
        const Long at = places_.at(token), next = at + 1;
        write_token(batch_.output, at, from);
        const Long end = token + 1 < batch_.tokens ? places_.at(token + 1) : batch_.ids->rows * batch_.ids->length;
        const Long bytes = model_.hidden_size * Long(batch_.is_bfloat16 ? sizeof(BFloat16) : sizeof(float));
        if (!batch_.ids->ends) std::memset(static_cast<char*>(batch_.output) + next * bytes, 0, (end - next) * bytes);
    }

    void write_state(Long layer, Long token, const float* from) const {
        if (batch_.states) write_token(batch_.states, layer * batch_.tokens + token, from);
    }

    void read_norm() {
        std::fill(norm_, norm_ + 2 * width(), 0.0f);
        with_dtype([&](auto* none) {
            using T = std::remove_pointer_t<decltype(none)>;
            read_row(static_cast<const T*>(batch_.ids->norm_weight), model_.hidden_size, norm_);
            read_row(static_cast<const T*>(batch_.ids->norm_bias), model_.hidden_size, norm_ + width());
        });
    }

    const Model& model_;
    Batch batch_;
    const Long threads_, first_layer_, end_;
    TokenPlaces places_;
    Long phases_, widest_heads_ = 0, longest_ = 0, tokens_at_once_ = 0;
    Long input_stride_, context_stride_, neurons_stride_;  // from row to row
    Way way_;
    std::vector<Long> groups_;  // the first sequence of each, and the end
    Long longest_group_ = 0;    // in tokens
    std::vector<Long> order_;
    std::vector<DistanceRows> distance_rows_;  // of each layer
    std::vector<Long> rotated_places_;         // (T,): positions, if layers rotate by their angles
    float* hidden_;        // (T, D): the residual stream
    float* firsts_;        // (sequences, D): of the first tokens, if the last layer computes only these
    float* norm_;          // (2, D): weight and bias of the embeddings' LayerNorm; or null
    float* pooler_input_;  // (sequences, D), in the dtype of the pooler
    HeadValue* qkv_;       // (3 N, T, H): queries, keys, values; of a thread's group if it takes whole sequences
    Value* inputs_;        // (T, widest of D and N H): of all blocks, if threads take whole sequences
    Quantization* quantizations_;  // (T,), of the inputs
    HeadValue* context_;   // (T, N H)
    std::vector<TokenBlock> blocks_;
    std::vector<AttentionWorkspace<Attending>> workspaces_;
};

}  // namespace bertlite
