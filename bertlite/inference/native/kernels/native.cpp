// The functions that Python calls through ctypes.  They return 0, or 2 if memory runs out, or 1 and a message.
#include <string>

#include "encoder.h"
#include "weights.h"

using namespace bertlite;

namespace {

template <class Work>
long without_exceptions(char* message, long size, Work work) {
    try {
        work();
        return 0;
    } catch (const std::bad_alloc&) {
        return 2;
    } catch (const std::exception& error) {
        std::strncpy(message, error.what(), size - 1);
        message[size - 1] = 0;
        return 1;
    }
}

// The dtypes of matmuls, as Python numbers them.
enum DType : long { float32 = 0, bfloat16 = 1, int8 = 2 };

// Call work(kind) with the type for a dtype.
template <class Work>
void with_kind(long dtype, Work work) {
    switch (dtype) {
        case float32: return work(Float32{});
        case bfloat16: return work(BFloat16s{});
        case int8: return work(Int8{});
    }
    throw std::invalid_argument("dtype " + std::to_string(dtype) + " is unknown");
}

// Raise for structs of another layout, and for an unknown activation.
void check(const Model& model, const Batch& batch) {
    bool fits = model.size == long(sizeof(Model)) && batch.size == long(sizeof(Batch));
    for (long i = 0; fits && i < model.layer_count; i++) fits = model.layers[i].size == long(sizeof(Layer));
    if (!fits) throw std::invalid_argument("the library has structs of other sizes than its caller");
    if (model.activation < 0 || model.activation > long(Activation::sigmoid))
        throw std::invalid_argument("activation " + std::to_string(model.activation) + " is unknown");
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) long bertlite_run(long dtype, const Model* model, const Batch* batch,
                                                         long threads, char* message, long size) {
    return without_exceptions(message, size, [=] {
        check(*model, *batch);
        with_kind(dtype, [&](auto kind) { Encoder<decltype(kind)>(*model, *batch, threads).run(); });
    });
}

// Pack a weight, (outputs, inputs) of floats, in blocks: `words` holds round_up(outputs, 64) x the words of inputs.
// For 8-bit integers scales and sums, (outputs,) rounded up to 64, are written as well.
__attribute__((visibility("default"))) long bertlite_pack(long dtype, const float* weight, long outputs, long inputs,
                                                          uint32_t* words, float* scales, float* sums, long threads,
                                                          char* message, long size) {
    return without_exceptions(message, size, [=] {
        with_kind(dtype, [&](auto kind) {
            pack<decltype(kind)>(weight, outputs, inputs, words, scales, sums, threads);
        });
    });
}
}
