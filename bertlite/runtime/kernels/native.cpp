// The functions that Python calls through ctypes.  They return 0, or 2 if memory runs out, or 3 for what Python must
// do itself, or 1 and a message.
#include <string>

#include "encoder.h"
#include "weights.h"

using namespace bertlite;

namespace {

template <class Work>
Long without_exceptions(char* message, Long size, Work work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    } catch (const LeftToPython&) {
        return 3;
    } catch (const std::exception& error) {
        std::strncpy(message, error.what(), size - 1);
        message[size - 1] = 0;
        return 1;
    }
}

// The dtypes of matmuls, as Python numbers them.
enum DType : Long { float32 = 0, bfloat16 = 1, int8 = 2 };

// Call work(kind) with the type for a dtype.
template <class Work>
void with_kind(Long dtype, Work work) {
    switch (dtype) {
        case float32: return work(Float32{});
        case bfloat16: return work(BFloat16s{});
        case int8: return work(Int8{});
    }
    throw std::invalid_argument("dtype " + std::to_string(dtype) + " is unknown");
}

template <class Struct>
bool fits(const Struct* given) {
    return !given || given->size == Long(sizeof(Struct));
}

// Raise for structs of another layout, and for an unknown activation.
void check(bool fits, Long activation) {
    if (!fits) throw std::invalid_argument("the library has structs of other sizes than its caller");
    if (activation < 0 || activation > Long(Activation::sigmoid))
        throw std::invalid_argument("activation " + std::to_string(activation) + " is unknown");
}

void check(const Model& model, const Batch& batch) {
    bool all = fits(&model) && fits(&batch) && fits(batch.ids) && fits(batch.pooler);
    for (Long i = 0; all && i < model.layer_count; i++) all = fits(model.layers + i);
    check(all, model.activation);
    if (batch.pooler) check(true, batch.pooler->activation);
}

// The type for the matmuls of a layer: on AMX float32 is in parts, unless results are to be reproducible.
template <class Kind, bool reproducible>
using Multiplied = std::conditional_t<HAS_AMX && !reproducible && std::is_same_v<Kind, Float32>, Float32Parts, Kind>;

// Run all layers; consecutive layers of one dtype run at once.  Return whether it is done, as `Encoder::run`.
template <bool reproducible>
bool run_layers(const Model& model, const Batch& batch, Long threads) {
    Memory memory = std::move(kept_memory);
    bool done = true;
    Long end = 0;
    do {
        // A layer that is kept in floats ends a run of integers; hidden states pass from run to run in memory.
        const Long first = end, dtype = model.layer_count ? model.layers[first].dtype : Long(float32);
        while (end < model.layer_count && model.layers[end].dtype == dtype) end++;
        with_kind(dtype, [&](auto kind) {
            using Kind = Multiplied<decltype(kind), reproducible>;
            done = Encoder<Kind, AttentionOf<Kind, reproducible>>(model, batch, threads, memory, first, end).run();
        });
    } while (done && end < model.layer_count);

    // Memory is kept for the next call, up to a limit.
    if (memory.bytes <= MOST_KEPT) kept_memory = std::move(memory);
    return done;
}

}  // namespace

extern "C" {

// reproducible: whether results with float32 and 8-bit integers are the same on every processor.
__attribute__((visibility("default"))) Long bertlite_run(Long reproducible, const Model* model, const Batch* batch,
                                                         Long threads, char* message, Long size) {
    return without_exceptions(message, size, [=] {
        check(*model, *batch);
        if (reproducible || !run_layers<false>(*model, *batch, threads)) run_layers<true>(*model, *batch, threads);
    });
}

// Apply a linear layer of a float dtype to (count, inputs); out: (count, outputs), in the same dtype.
__attribute__((visibility("default"))) Long bertlite_linear(Long dtype, Long reproducible, const Linear* linear,
                                                            const void* rows, Long count, void* to, Long threads,
                                                            char* message, Long size) {
    return without_exceptions(message, size, [=] {
        check(fits(linear), linear->activation);
        with_kind(dtype, [&](auto kind) {
            using Kind = decltype(kind);
            using Value = typename Kind::Value;
            if constexpr (std::is_same_v<Kind, Int8>) {
                throw std::invalid_argument("a linear layer is float32 or bfloat16");
            } else {
                using Stored = typename Kind::Weight;
                const Long inputs = linear->matrix.inputs, padded = round_up(inputs, LANES);
                const auto* from = static_cast<const Stored*>(rows);
                const bool as_they_are = std::is_same_v<Stored, Value> && inputs % Kind::per_word == 0;

                // Rows that do not end with a whole word, or are stored in another dtype, are copied.
                std::vector<Value> converted(as_they_are ? 0 : count * padded);
                std::vector<float> row(padded);
                for (Long i = 0; !as_they_are && i < count; i++) {
                    read_row(from + i * inputs, inputs, row.data());
                    convert<Kind>(row.data(), padded, converted.data() + i * padded, nullptr);
                }

                const auto* start = as_they_are ? static_cast<const Value*>(rows) : converted.data();
                const auto run = [&](auto chosen) {
                    return run_team_unless_beyond(threads, 1, [&](Team::Member& member) {
                        run_linear<decltype(chosen)>(*linear, start, as_they_are ? inputs : padded, count,
                                                     static_cast<Stored*>(to), threads, member);
                    });
                };

                // Tiles multiply float32 in parts, unless a weight is beyond them or bits must be the same.
                if constexpr (HAS_AMX && std::is_same_v<Kind, Float32>)
                    if (!reproducible && run(Float32Parts{})) return;
                run(kind);
            }
        });
    });
}

// How many outputs are in a block, and of how many the words of 8-bit integers lie in two halves.
__attribute__((visibility("default"))) Long bertlite_block(Long dtype) {
    return dtype == float32 ? BLOCK_OF<Float32> : BLOCK_OF<BFloat16s>;
}
__attribute__((visibility("default"))) Long bertlite_pairs() { return Int8::pairs; }

// Pack a weight, (outputs, inputs) of floats, in blocks: `words` holds round_up(outputs, GROUP) x the words of inputs.
// For 8-bit integers scales and sums, (outputs,) rounded up to GROUP, are written as well.
__attribute__((visibility("default"))) Long bertlite_pack(Long dtype, const float* weight, Long outputs, Long inputs,
                                                          uint32_t* words, float* scales, float* sums, Long threads,
                                                          char* message, Long size) {
    return without_exceptions(message, size, [=] {
        with_kind(dtype,
                  [&](auto kind) { pack<decltype(kind)>(weight, outputs, inputs, words, scales, sums, threads); });
    });
}
}
