// The most that one thread of this processor can do: its multiply instructions as the kernels have them, and memory.
#include <chrono>

#include "memory.h"

using namespace bertlite;

template <class Work>
static double seconds(Work work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Operations a second, a product and a sum being two: sums that do not wait for each other, in registers alone.
template <class Kind>
static double multiply() {
    constexpr int sums = REGISTERS / 2;
    constexpr long times = 1 << 22;
    typename Kind::Sums sum[sums] = {};
    Words a{}, b{};
    asm volatile("" : "+m"(a), "+m"(b));  // of which the compiler knows nothing
    const double taken = seconds([&] {
        for (long i = 0; i < times; i++) {
#pragma GCC unroll 16
            for (int j = 0; j < sums; j++) sum[j] = Kind::add(sum[j], a, b);
        }
    });
    for (auto& each : sum) asm volatile("" ::"m"(each));
    return 2.0 * times * sums * LANES * 4 / sizeof(typename Kind::Value) / taken;
}

// Memory on huge pages, as weights lie, that has been written once.
static Memory allocate(long bytes) {
    Memory memory(bytes);
    std::memset(memory.start(), 1, bytes);
    return memory;
}

#pragma GCC visibility push(default)
extern "C" {
double multiply_float32() { return multiply<Float32>(); }
double multiply_bfloat16() { return multiply<BFloat16s>(); }
double multiply_int8() { return multiply<Int8>(); }

// Bytes a second that are read, of so many, which no cache holds.
double read(long bytes) {
    const auto from = allocate(bytes);
    Words sums[4] = {};
    const double taken = seconds([&] {
        for (long i = 0; i < bytes; i += 4 * WIDTH)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sums[j] += load_as<Words>(from.start() + i + j * WIDTH);
    });
    for (auto& each : sums) asm volatile("" ::"m"(each));
    return bytes / taken;
}

// Bytes a second that are read and written, of a copy that no cache holds.
double copy(long bytes) {
    const auto from = allocate(bytes), to = allocate(bytes);
    const double taken = seconds([&] { std::memcpy(to.start(), from.start(), bytes); });
    asm volatile("" ::"r"(to.start()) : "memory");
    return 2.0 * bytes / taken;
}
}
