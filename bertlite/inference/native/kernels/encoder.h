// The layers of BERT, one after the other, on packed tokens: sequences one after another, without padding.
//
// Two phases a layer, between which all threads wait for each other.  In the first, pairs of sequence and head attend.
// In the second a thread takes some tokens through all that stands between two attentions: output projection,
// residual, LayerNorm, both halves of the feed-forward network, residual, LayerNorm, and the next layer's queries,
// keys and values.  Weights stream through the cache and activations stay in it.  Where there are few tokens for each
// thread, the threads share out the outputs of each product instead, and wait for each other in between.
//
// Letters:  T tokens, D hidden size, N heads, H head size, I neurons of the feed-forward network
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "attention.h"
#include "rows.h"
#include "threads.h"

namespace bertlite {

extern "C" {

// A weight in blocks, and what its products are finished with.
struct Matrix {
    const uint32_t* words;
    const float* bias;    // (outputs,)
    const float* scales;  // (outputs,), of an 8-bit weight: what its integer 1 stands for
    const float* sums;    // (outputs,), of an 8-bit weight: its products with a row of ones
    long outputs, inputs;
};

// What follows begins with its size, by which a caller that lays it out in another way is noticed.
struct Layer {
    long size;
    Matrix heads;   // queries, keys and values: (3 N H, D)
    Matrix output;  // (D, N H)
    Matrix up, down;
    const float *attention_gain, *attention_shift, *gain, *shift;  // of the two LayerNorms
    long head_count;
};

struct Model {
    long size;
    const Layer* layers;
    long layer_count, hidden_size, head_size, activation;
    double epsilon;
};

struct Batch {
    long size;
    long tokens, sequences;
    const long* starts;  // (sequences + 1,): where each begins, none of them empty, and where the last one ends
    const void* hidden;  // (T, D)
    void* output;        // (T, D), or with first_only (sequences, D)
    void* states;        // (layers, T, D), what each layer is given, or null
    long is_bfloat16;    // whether those three are; else they are floats
    const float* bias;   // added to scores, or null: (sequences, N, queries, keys), with strides of the first three
    long bias_strides[3];
    const uint8_t* has_keys;  // 0 for a query that may look at nothing, or null: (sequences, N, queries)
    long has_keys_strides[3];
    const float* const* gates;    // for each layer what heads are multiplied by, (T, N) or (N,); or null
    long gates_each_token;        // which of the two
    float* const* probabilities;  // for each layer (sequences, N, S, S), all sequences being as long; or null
    long first_only;              // whether the last layer computes the first token of each sequence alone
};
}

// Memory that is handed out piece by piece.  Run once without memory, it counts what is needed.
class Arena {
   public:
    explicit Arena(char* start = nullptr) : start_(start) {}

    template <class T>
    T* take(long count) {
        char* at = start_ + used_;
        used_ += round_up(count * long(sizeof(T)), 64) + 64;  // 64 more: vectors may read beyond the last row's end
        return start_ ? reinterpret_cast<T*>(at) : nullptr;
    }

    long used() const { return used_; }

   private:
    char* start_;
    long used_ = 0;
};

// Who does some work: one thread everything, or the team together.
struct Alone {
    template <class Work>
    void ranges(long total, long, Work work) const {
        work(0, total);
    }
};

struct Together {
    Team::Member& member;
    // work(from, to) on pieces of `step` of `total` things
    template <class Work>
    void ranges(long total, long step, Work work) const {
        member.each(divide_up(total, step),
                    [&](long piece) { work(piece * step, std::min(total, (piece + 1) * step)); });
    }
};

// The attention of a kind of products: that of 8-bit integers is in bfloat16.
template <class Kind>
using AttentionOf = std::conditional_t<std::is_same_v<Kind, Int8>, BFloat16s, Kind>;

// scripts/measure/native_steps.py compares these figures with others; its record is scripts/results/native_steps.json.
#if !defined(BERTLITE_ROWS)
#define BERTLITE_ROWS 128
#define BERTLITE_FEW_ROWS 48
#endif
constexpr long ROWS = BERTLITE_ROWS;          // tokens that a thread takes through the second phase at a time
constexpr long FEW_ROWS = BERTLITE_FEW_ROWS;  // with fewer for each thread, outputs are shared out
constexpr long ROWS_SHARED = 4;  // rows that a thread normalises or rounds at a time, where they are shared out
constexpr long PHASES = 10;      // of a layer, at most

template <class Kind>
class Encoder {
    using Value = typename Kind::Value;
    using Attending = AttentionOf<Kind>;
    using HeadValue = typename Attending::Value;
    static constexpr bool rounds = std::is_same_v<Kind, Int8>;  // rows are rounded with a scale of their own

    // Activations of some tokens on their way through the second phase.
    struct Rows {
        Value* input;        // (rows, widest of D and N H): rounded, what the next product takes
        Rounding* rounding;  // (rows,), of the inputs
        float* neurons;      // (rows, I), of 8-bit integers alone: not yet rounded
        Value* wide;         // (rows, I)
        Rounding* wide_rounding;
        long first = 0, count = 0;  // which tokens they are
    };

   public:
    Encoder(const Model& model, const Batch& batch, long threads) : model_(model), batch_(batch), threads_(threads) {
        for (long layer = 0; layer < model.layer_count; layer++) {
            widest_heads_ = std::max(widest_heads_, model.layers[layer].output.inputs);
            widest_neurons_ = std::max(widest_neurons_, round_up(model.layers[layer].up.outputs, LANES));
        }
        order_.resize(batch.sequences);
        std::iota(order_.begin(), order_.end(), 0l);
        std::stable_sort(order_.begin(), order_.end(), [&](long a, long b) { return length(a) > length(b); });
        longest_ = batch.sequences ? length(order_[0]) : 0;
        shares_ = batch.tokens < FEW_ROWS * threads;
        rows_at_once_ = shares_ ? batch.tokens : even_part(divide_up(batch.tokens, threads), ROWS);

        Arena counting;
        lay_out_memory(counting);
        memory_.reset(static_cast<char*>(std::aligned_alloc(64, round_up(counting.used(), 64))));
        if (!memory_) throw std::bad_alloc();
        Arena arena(memory_.get());
        lay_out_memory(arena);
    }

    void run() {
        run_team(threads_, PHASES * (model_.layer_count + 1), [this](long thread, Team::Member& member) {
            work(thread, member);
            release_tiles();
        });
    }

   private:
    void lay_out_memory(Arena& arena) {
        const long tokens = batch_.tokens, D = model_.hidden_size;
        hidden_ = arena.take<float>(tokens * D);
        firsts_ = batch_.first_only ? arena.take<float>(batch_.sequences * D) : nullptr;
        heads_ = arena.take<HeadValue>(tokens * 3 * widest_heads_);
        context_ = arena.take<HeadValue>(tokens * widest_heads_);
        rows_.clear();
        spaces_.clear();
        for (long i = 0; i < (shares_ ? 1 : threads_); i++) rows_.push_back(take_rows(arena, rows_at_once_));
        for (long i = 0; i < threads_; i++) spaces_.emplace_back(arena, longest_, model_.head_size);
    }

    Rows take_rows(Arena& arena, long count) {
        Rows rows;
        rows.input = arena.take<Value>(count * input_stride());
        rows.rounding = arena.take<Rounding>(count);
        rows.neurons = rounds ? arena.take<float>(count * widest_neurons_) : nullptr;
        rows.wide = arena.take<Value>(count * widest_neurons_);
        rows.wide_rounding = arena.take<Rounding>(count);
        rows.count = count;
        return rows;
    }

    long input_stride() const { return std::max(model_.hidden_size, widest_heads_); }
    long length(long sequence) const { return batch_.starts[sequence + 1] - batch_.starts[sequence]; }
    bool is_last(long layer) const { return layer + 1 == model_.layer_count; }
    bool firsts_alone(long layer) const { return batch_.first_only && is_last(layer); }

    void work(long thread, Team::Member& member) {
        if (!model_.layer_count) return;
        run_rows(batch_.tokens, thread, member, [&](Rows& rows, const auto& who) { begin(rows, who); });
        for (long layer = 0; layer < model_.layer_count; layer++) {
            attend_all(layer, thread, member);
            const long tokens = firsts_alone(layer) ? batch_.sequences : batch_.tokens;
            run_rows(tokens, thread, member, [&](Rows& rows, const auto& who) { after_attention(layer, rows, who); });
        }
    }

    // Take tokens through the second phase: the team together all of them, or each thread some at a time.
    template <class Phase>
    void run_rows(long tokens, long thread, Team::Member& member, Phase phase) {
        if (shares_) {
            Rows rows = rows_[0];
            rows.count = tokens;
            phase(rows, Together{member});
            return;
        }
        Rows rows = rows_[thread];
        member.each(divide_up(tokens, rows_at_once_), [&](long block) {
            rows.first = block * rows_at_once_;
            rows.count = std::min(rows_at_once_, tokens - rows.first);
            phase(rows, Alone{});
        });
    }

    // Call work(row) for each of some rows.
    template <class Who, class Work>
    static void each_row(const Rows& rows, const Who& who, Work work) {
        who.ranges(rows.count, ROWS_SHARED, [&](long from, long to) {
            for (long row = from; row < to; row++) work(row);
        });
    }

    // Tokens as they come from the embeddings, and the first layer's queries, keys and values.
    template <class Who>
    void begin(Rows& rows, const Who& who) {
        const long D = model_.hidden_size;
        each_row(rows, who, [&](long row) {
            float* hidden = hidden_ + (rows.first + row) * D;
            read_row(batch_.hidden, rows.first + row, hidden);
            write_state(0, rows.first + row, hidden);
            round_row<Kind>(hidden, D, rows.input + row * input_stride(), rows.rounding + row);
        });
        project_heads(model_.layers[0], rows, who);
    }

    template <class Who>
    void after_attention(long index, Rows& rows, const Who& who) {
        const Layer& layer = model_.layers[index];
        const long D = model_.hidden_size;
        const Target<float> hidden{(firsts_alone(index) ? firsts_ : hidden_) + rows.first * D, D};
        if (firsts_alone(index))
            each_row(rows, who, [&](long row) {
                std::memcpy(hidden.at(row, 0), hidden_ + batch_.starts[rows.first + row] * D, D * sizeof(float));
            });

        const HeadValue* context = context_ + rows.first * widest_heads_;
        if constexpr (rounds) {
            const long width = layer.output.inputs;
            each_row(rows, who, [&](long row) {
                round_row<Kind>(context + row * widest_heads_, width, rows.input + row * input_stride(),
                                rows.rounding + row);
            });
            add_product(rows.input, input_stride(), rows.rounding, layer.output, hidden, rows, who);
        } else {
            add_product(context, widest_heads_, rows.rounding, layer.output, hidden, rows, who);
        }
        each_row(rows, who, [&](long row) {
            layer_norm(hidden.at(row, 0), D, layer.attention_gain, layer.attention_shift, float(model_.epsilon));
            round_row<Kind>(hidden.at(row, 0), D, rows.input + row * input_stride(), rows.rounding + row);
        });
        widen(layer, rows, who);
        if constexpr (rounds) {
            const long width = round_up(layer.up.outputs, LANES);
            each_row(rows, who, [&](long row) {
                round_row<Kind>(rows.neurons + row * widest_neurons_, width, rows.wide + row * widest_neurons_,
                                rows.wide_rounding + row);
            });
        }
        add_product(rows.wide, widest_neurons_, rows.wide_rounding, layer.down, hidden, rows, who);
        each_row(rows, who, [&](long row) {
            layer_norm(hidden.at(row, 0), D, layer.gain, layer.shift, float(model_.epsilon));
            if (is_last(index)) {
                write_row(batch_.output, rows.first + row, hidden.at(row, 0));
                return;
            }
            write_state(index + 1, rows.first + row, hidden.at(row, 0));
            round_row<Kind>(hidden.at(row, 0), D, rows.input + row * input_stride(), rows.rounding + row);
        });
        if (!is_last(index)) project_heads(model_.layers[index + 1], rows, who);
    }

    // Multiply rows with a weight; `finish(at, y)` is given 16 outputs with their bias, and where in `to` they belong.
    template <class Who, class T, class Finish>
    void project(const Value* input, long stride, const Rounding* rounding, long count, const Matrix& matrix,
                 const Target<T>& to, const Who& who, Finish finish) {
        const Blocks blocks{matrix.words, divide_up(matrix.inputs, Kind::per_word)};
        const typename Kind::Sum* start = nullptr;
        if constexpr (!rounds) start = matrix.bias;
        // Copies: for all that the compiler knows, a store of a vector changes what is reached through `this`.
        const float *scales = matrix.scales, *weight_sums = matrix.sums, *bias = matrix.bias;
        const auto finish_tile = [=](long row, long rows, long column, long columns, const typename Kind::Sum* sums) {
            for (long j = 0; j < columns; j += LANES)
                for (long i = 0; i < rows; i++) {
                    Vector y = load(sums + i * BLOCK + j);
                    if constexpr (rounds)
                        y = multiply_add(y, load(scales + column + j) * all(rounding[row + i].scale),
                                         multiply_add(load(weight_sums + column + j), all(rounding[row + i].offset),
                                                      load(bias + column + j)));
                    finish(to.at(row + i, column + j), y);
                }
        };
        who.ranges(round_up(matrix.outputs, LANES), BLOCK, [&](long first, long last) {
            multiply<Kind>(input, stride, count, blocks, start, first, last, to, finish_tile);
        });
    }

    template <class Who>
    void project_heads(const Layer& layer, const Rows& rows, const Who& who) {
        const long stride = 3 * widest_heads_;
        const Target<HeadValue> heads{heads_ + rows.first * stride, stride};
        project(rows.input, input_stride(), rows.rounding, rows.count, layer.heads, heads, who,
                [](HeadValue* at, Vector y) { store(at, y); });
    }

    template <class Who>
    void add_product(const Value* input, long stride, const Rounding* rounding, const Matrix& matrix,
                     const Target<float>& hidden, const Rows& rows, const Who& who) {
        project(input, stride, rounding, rows.count, matrix, hidden, who,
                [](float* at, Vector y) { store(at, load(at) + y); });
    }

    template <class Who>
    void widen(const Layer& layer, const Rows& rows, const Who& who) {
        const auto activation = static_cast<Activation>(model_.activation);
        const auto into = [&](auto* neurons) {
            const Target<std::remove_pointer_t<decltype(neurons)>> to{neurons, widest_neurons_};
            project(rows.input, input_stride(), rows.rounding, rows.count, layer.up, to, who,
                    [=](auto* at, Vector y) { store(at, apply(activation, y)); });
        };
        if constexpr (rounds)
            into(rows.neurons);
        else
            into(rows.wide);
    }

    // Deal out pairs of sequence and head, those of the longest sequence first, in parts where there are few.
    void attend_all(long index, long thread, Team::Member& member) {
        const long heads = model_.layers[index].head_count;
        const long pairs = batch_.sequences * heads;
        const bool firsts = firsts_alone(index);
        const long parts =
            firsts || !pairs ? 1 : std::min(divide_up(2 * threads_, pairs), divide_up(longest_, QUERIES));
        member.each(pairs * parts, [&](long item) {
            const long pair = item / parts, part = item % parts;
            const long sequence = order_[pair / heads], head = pair % heads;
            const long queries = firsts ? 1 : length(sequence);
            const long first = queries * part / parts, last = queries * (part + 1) / parts;
            if (first < last) attend_pair(index, sequence, head, queries, first, last, spaces_[thread]);
        });
    }

    void attend_pair(long index, long sequence, long n, long queries, long first, long last,
                     const AttentionSpace<Attending>& space) {
        const Layer& layer = model_.layers[index];
        const long start = batch_.starts[sequence], H = model_.head_size, width = layer.output.inputs;
        Head<Attending> head{};
        head.stride = 3 * widest_heads_;
        head.queries = heads_ + start * head.stride + n * H;
        head.keys = head.queries + width;
        head.values = head.keys + width;
        head.context = context_ + (firsts_alone(index) ? sequence : start) * widest_heads_ + n * H;
        head.context_stride = widest_heads_;
        head.key_count = length(sequence);
        head.head_size = H;
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
        lay_out<Attending>(head.keys, head.key_count, H, head.stride, space.keys);
        lay_out_values(head, space.values);
        attend(head, first, last, space);
    }

    void read_row(const void* from, long row, float* to) const {
        const long D = model_.hidden_size;
        if (!batch_.is_bfloat16) {
            std::memcpy(to, static_cast<const float*>(from) + row * D, D * sizeof(float));
        } else {
            for (long i = 0; i < D; i += LANES) store(to + i, load(static_cast<const BFloat16*>(from) + row * D + i));
        }
    }

    void write_row(void* to, long row, const float* from) const {
        const long D = model_.hidden_size;
        if (!batch_.is_bfloat16) {
            std::memcpy(static_cast<float*>(to) + row * D, from, D * sizeof(float));
        } else {
            for (long i = 0; i < D; i += LANES) store(static_cast<BFloat16*>(to) + row * D + i, load(from + i));
        }
    }

    void write_state(long layer, long row, const float* from) const {
        if (batch_.states) write_row(batch_.states, layer * batch_.tokens + row, from);
    }

    const Model& model_;
    const Batch& batch_;
    const long threads_;
    long widest_heads_ = 0, widest_neurons_ = 0, longest_ = 0, rows_at_once_ = 0;
    bool shares_ = false;
    std::vector<long> order_;
    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory_;
    float* hidden_;       // (T, D): the stream of the residuals
    float* firsts_;       // (sequences, D): of it the first tokens, if the last layer computes these alone
    HeadValue* heads_;    // (T, 3 N H): queries, keys, values
    HeadValue* context_;  // (T, N H)
    std::vector<Rows> rows_;
    std::vector<AttentionSpace<Attending>> spaces_;
};

}  // namespace bertlite
