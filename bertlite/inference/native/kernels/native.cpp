// The functions that Python calls, through ctypes.  They return 0, or 2 where memory runs out, or 1 and a message.
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

}  // namespace

extern "C" {

// The number types of products, by which Python names them.
enum Numbers : long { float32 = 0, bfloat16 = 1, int8 = 2 };

__attribute__((visibility("default"))) long bertlite_run(long numbers, const Model* model, const Batch* batch,
                                                         long threads, char* message, long size) {
    return without_exceptions(message, size, [=] {
        if (numbers == float32) Encoder<Float32>(*model, *batch, threads).run();
        if (numbers == bfloat16) Encoder<BFloat16s>(*model, *batch, threads).run();
        if (numbers == int8) Encoder<Int8>(*model, *batch, threads).run();
    });
}

// Lay a weight, (outputs, inputs) of floats, out in blocks: `words` holds round_up(outputs, 64) x the words of inputs.
// For 8-bit integers scales and sums, (outputs,) rounded up to 64, are written as well.
__attribute__((visibility("default"))) long bertlite_pack(long numbers, const float* weight, long outputs, long inputs,
                                                          uint32_t* words, float* scales, float* sums, long threads,
                                                          char* message, long size) {
    return without_exceptions(message, size, [=] {
        if (numbers == float32) pack<Float32>(weight, outputs, inputs, words, scales, sums, threads);
        if (numbers == bfloat16) pack<BFloat16s>(weight, outputs, inputs, words, scales, sums, threads);
        if (numbers == int8) pack<Int8>(weight, outputs, inputs, words, scales, sums, threads);
    });
}
}
