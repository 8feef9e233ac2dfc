// The layers of BERT, one after the other, on packed tokens: sequences one after another, without padding.
//
// Two phases a layer, between which all threads wait for each other.  In the first, pairs of sequence and head attend.
// In the second a thread takes some tokens through all that stands between two attentions: output projection, residual,
// LayerNorm, both halves of the feed-forward network, residual, LayerNorm, and the next layer's queries, keys and
// values.  Weights stream through the cache and activations stay in it.  Where there are few tokens for each thread,
// the threads share out the outputs of each product instead, and wait for each other in between.
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
    const float* bias;      // (outputs,)
    const float* scales;    // (outputs,), of an 8-bit weight: what its 1 stands for
    const int32_t* starts;  // (outputs,), of an 8-bit weight: less its products with rows of 128, which stand for 0
    long outputs, inputs;
};

struct Layer {
    Matrix heads;  // queries, keys and values: (3 N H, D)
    Matrix output;  // (D, N H)
    Matrix up, down;
    const float *attention_gain, *attention_shift, *gain, *shift;  // of the two LayerNorms
    long head_count;
};

struct Model {
    const Layer* layers;
    long layer_count, hidden_size, head_size, activation;
    double epsilon;
};

struct Batch {
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
    const float* const* gates;  // for each layer what heads are multiplied by, (T, N) or (N,); or null
    long gates_each_token;      // which of the two
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

// The part of some work that falls to a thread: in one case everything, in the other one share of several.
struct Everything {
    void wait() const {}
    std::pair<long, long> part(long total, long) const { return {0, total}; }
};

struct Share {
    long thread, threads;
    Barrier& barrier;
    void wait() const { barrier.wait(); }
    // of `total` things, in pieces of `step`
    std::pair<long, long> part(long total, long step) const {
        const long pieces = divide_up(total, step);
        return {std::min(total, pieces * thread / threads * step), std::min(total, pieces * (thread + 1) / threads * step)};
    }
};

struct Team {
    Barrier barrier;
    explicit Team(long threads) : barrier(threads), threads(threads) {}
    const long threads;
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
constexpr long OUTPUTS_SHARED = 32;           // in pieces of so many

template <class Kind>
class Encoder {
    using Value = typename Kind::Value;
    using Attending = AttentionOf<Kind>;
    using HeadValue = typename Attending::Value;
    static constexpr bool rounds = std::is_same_v<Kind, Int8>;  // rows are rounded with a scale of their own

    // Activations of some tokens on their way through the second phase.
    struct Rows {
        float* sum;      // (rows, D): residual plus product, then normalised
        Value* input;    // (rows, widest of D and N H): rounded, what the next product takes
        float* scale;    // (rows,)
        float* neurons;  // (rows, I), of 8-bit integers alone: not yet rounded
        Value* wide;     // (rows, I)
        float* wide_scale;
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
        counters_ = std::make_unique<std::atomic<long>[]>(2 * (model.layer_count + 1));

        Arena counting;
        lay_out_memory(counting);
        memory_.reset(static_cast<char*>(std::aligned_alloc(64, round_up(counting.used(), 64))));
        if (!memory_) throw std::bad_alloc();
        Arena arena(memory_.get());
        lay_out_memory(arena);
    }

    void run() {
        run_team<Team>(threads_, [this](long thread, Team& team) {
            work(thread, team);
            release_tiles();
        });
    }

   private:
    void lay_out_memory(Arena& arena) {
        const long tokens = batch_.tokens, D = model_.hidden_size;
        residual_ = arena.take<float>(tokens * D);
        heads_ = arena.take<HeadValue>(tokens * 3 * widest_heads_);
        context_ = arena.take<HeadValue>(tokens * widest_heads_);
        rows_.clear();
        spaces_.clear();
        for (long i = 0; i < (shares_ ? 1 : threads_); i++) rows_.push_back(take_rows(arena, rows_at_once_));
        for (long i = 0; i < threads_; i++) spaces_.emplace_back(arena, longest_, model_.head_size);
    }

    Rows take_rows(Arena& arena, long count) {
        Rows rows;
        rows.sum = arena.take<float>(count * model_.hidden_size);
        rows.input = arena.take<Value>(count * input_stride());
        rows.scale = arena.take<float>(count);
        rows.neurons = rounds ? arena.take<float>(count * widest_neurons_) : nullptr;
        rows.wide = arena.take<Value>(count * widest_neurons_);
        rows.wide_scale = arena.take<float>(count);
        rows.count = count;
        return rows;
    }

    long input_stride() const { return std::max(model_.hidden_size, widest_heads_); }
    long length(long sequence) const { return batch_.starts[sequence + 1] - batch_.starts[sequence]; }
    bool is_last(long layer) const { return layer + 1 == model_.layer_count; }
    bool firsts_alone(long layer) const { return batch_.first_only && is_last(layer); }

    void work(long thread, Team& team) {
        if (!model_.layer_count) return;
        const Share share{thread, team.threads, team.barrier};
        run_rows(-1, batch_.tokens, share, [&](Rows& rows, const auto& part) { begin(rows, part); });
        for (long layer = 0; layer < model_.layer_count; layer++) {
            team.barrier.wait();
            attend_all(layer, thread, team.threads);
            team.barrier.wait();
            const long tokens = firsts_alone(layer) ? batch_.sequences : batch_.tokens;
            run_rows(layer, tokens, share, [&](Rows& rows, const auto& part) { after_attention(layer, rows, part); });
        }
    }

    // Take tokens through the second phase: a share of the outputs of all, or all outputs of some.
    template <class Phase>
    void run_rows(long layer, long tokens, const Share& share, Phase phase) {
        if (shares_) {
            Rows rows = rows_[0];
            rows.count = tokens;
            phase(rows, share);
            return;
        }
        Rows rows = rows_[share.thread];
        auto& next = counters_[2 * (layer + 1)];
        for (;;) {
            rows.first = next.fetch_add(1, std::memory_order_relaxed) * rows_at_once_;
            if (rows.first >= tokens) return;
            rows.count = std::min(rows_at_once_, tokens - rows.first);
            phase(rows, Everything{});
        }
    }

    // Tokens as they come from the embeddings, and the first layer's queries, keys and values.
    template <class Part>
    void begin(Rows& rows, const Part& part) {
        const long D = model_.hidden_size;
        const auto [from, to] = part.part(rows.count, 1);
        for (long row = from; row < to; row++) {
            float* residual = residual_ + (rows.first + row) * D;
            read_row(batch_.hidden, rows.first + row, residual);
            write_state(0, rows.first + row, residual);
            round_row<Kind>(residual, D, D, rows.input + row * input_stride(), rows.scale + row);
        }
        part.wait();
        project_heads(model_.layers[0], rows, part);
    }

    template <class Part>
    void after_attention(long index, Rows& rows, const Part& part) {
        const Layer& layer = model_.layers[index];
        const long D = model_.hidden_size;
        const auto [from, to] = part.part(rows.count, 1);

        const HeadValue* context = context_ + rows.first * widest_heads_;
        if constexpr (rounds) {
            const long width = layer.output.inputs;
            for (long row = from; row < to; row++)
                round_row<Kind>(context + row * widest_heads_, width, width, rows.input + row * input_stride(), rows.scale + row);
            part.wait();
            project_output(index, rows, rows.input, input_stride(), part);
        } else {
            project_output(index, rows, context, widest_heads_, part);
        }
        part.wait();
        for (long row = from; row < to; row++) {
            float* sum = rows.sum + row * D;
            layer_norm(sum, D, layer.attention_gain, layer.attention_shift, float(model_.epsilon));
            round_row<Kind>(sum, D, D, rows.input + row * input_stride(), rows.scale + row);
        }
        part.wait();
        widen(layer, rows, part);
        part.wait();
        if constexpr (rounds) {
            const long width = round_up(layer.up.outputs, LANES);
            for (long row = from; row < to; row++)
                round_row<Kind>(rows.neurons + row * widest_neurons_, width, width, rows.wide + row * widest_neurons_,
                                rows.wide_scale + row);
            part.wait();
        }
        narrow(layer, rows, part);
        part.wait();
        for (long row = from; row < to; row++) {
            float* sum = rows.sum + row * D;
            layer_norm(sum, D, layer.gain, layer.shift, float(model_.epsilon));
            if (is_last(index)) {
                write_row(batch_.output, rows.first + row, sum);
                continue;
            }
            std::memcpy(residual_ + (rows.first + row) * D, sum, D * sizeof(float));
            write_state(index + 1, rows.first + row, sum);
            round_row<Kind>(sum, D, D, rows.input + row * input_stride(), rows.scale + row);
        }
        if (is_last(index)) return;
        part.wait();
        project_heads(model_.layers[index + 1], rows, part);
    }

    // Multiply rows with a weight; `finish(row, column, y)` is given 16 outputs with their bias.
    template <class Part, class Finish>
    void project(const Value* input, long stride, const float* scales, long count, const Matrix& matrix, const Part& part,
                 Finish finish) {
        const Blocks blocks{matrix.words, divide_up(matrix.inputs, Kind::per_word)};
        const auto [first, last] = part.part(round_up(matrix.outputs, LANES), OUTPUTS_SHARED);
        const typename Kind::Sum* start;
        if constexpr (rounds)
            start = matrix.starts;
        else
            start = matrix.bias;
        multiply<Kind>(input, stride, count, blocks, start, first, last,
                       [&](long row, long rows, long column, long columns, const typename Kind::Sum* sums) {
                           for (long i = 0; i < rows; i++)
                               for (long j = 0; j < columns; j += LANES) {
                                   Vector y = load(sums + i * BLOCK + j);
                                   if constexpr (rounds)
                                       y = multiply_add(y, load(matrix.scales + column + j) * all(scales[row + i]),
                                                        load(matrix.bias + column + j));
                                   finish(row + i, column + j, y);
                               }
                       });
    }

    template <class Part>
    void project_heads(const Layer& layer, const Rows& rows, const Part& part) {
        HeadValue* heads = heads_ + rows.first * 3 * widest_heads_;
        project(rows.input, input_stride(), rows.scale, rows.count, layer.heads, part,
                [&](long row, long column, Vector y) { store(heads + row * 3 * widest_heads_ + column, y); });
    }

    template <class Part>
    void project_output(long index, const Rows& rows, const Value* context, long stride, const Part& part) {
        const long D = model_.hidden_size;
        const bool firsts = firsts_alone(index);
        project(context, stride, rows.scale, rows.count, model_.layers[index].output, part,
                [&](long row, long column, Vector y) {
                    const long token = firsts ? batch_.starts[rows.first + row] : rows.first + row;
                    store(rows.sum + row * D + column, y + load(residual_ + token * D + column));
                });
    }

    template <class Part>
    void widen(const Layer& layer, const Rows& rows, const Part& part) {
        const auto activation = static_cast<Activation>(model_.activation);
        project(rows.input, input_stride(), rows.scale, rows.count, layer.up, part, [&](long row, long column, Vector y) {
            y = apply(activation, y);
            if constexpr (rounds)
                store(rows.neurons + row * widest_neurons_ + column, y);
            else
                store(rows.wide + row * widest_neurons_ + column, y);
        });
    }

    template <class Part>
    void narrow(const Layer& layer, const Rows& rows, const Part& part) {
        const long D = model_.hidden_size;
        project(rows.wide, widest_neurons_, rows.wide_scale, rows.count, layer.down, part, [&](long row, long column, Vector y) {
            float* sum = rows.sum + row * D + column;
            store(sum, load(sum) + y);
        });
    }

    // Deal out pairs of sequence and head, those of the longest sequence first, in parts where there are few.
    void attend_all(long index, long thread, long threads) {
        const long heads = model_.layers[index].head_count;
        const long pairs = batch_.sequences * heads;
        const bool firsts = firsts_alone(index);
        const long parts = firsts || !pairs ? 1 : std::min(divide_up(2 * threads, pairs), divide_up(longest_, QUERIES));
        auto& next = counters_[2 * index + 1];
        for (;;) {
            const long item = next.fetch_add(1, std::memory_order_relaxed);
            if (item >= pairs * parts) return;
            const long pair = item / parts, part = item % parts;
            const long sequence = order_[pair / heads], head = pair % heads;
            const long queries = firsts ? 1 : length(sequence);
            const long first = queries * part / parts, last = queries * (part + 1) / parts;
            if (first < last) attend_pair(index, sequence, head, queries, first, last, spaces_[thread]);
        }
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
            head.probabilities = batch_.probabilities[index] + (sequence * layer.head_count + n) * queries * head.key_count;
        lay_out<Attending>(head.keys, head.key_count, H, head.stride, space.keys, 0, divide_up(head.key_count, BLOCK));
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
    std::unique_ptr<std::atomic<long>[]> counters_;  // of each phase: how many parts have been taken
    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory_;
    float* residual_;     // (T, D)
    HeadValue* heads_;    // (T, 3 N H): queries, keys, values
    HeadValue* context_;  // (T, N H)
    std::vector<Rows> rows_;
    std::vector<AttentionSpace<Attending>> spaces_;
};

}  // namespace bertlite
