// The most that one thread of this processor can do: its multiply instructions as the kernels have them, and copying.
#include <chrono>
#include <vector>

#include "tiles.h"

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

#pragma GCC visibility push(default)
extern "C" {
double multiply_float32() { return multiply<Float32>(); }
double multiply_bfloat16() { return multiply<BFloat16s>(); }
double multiply_int8() { return multiply<Int8>(); }

// Bytes a second that are read and written, of a copy that no cache holds.
double copy(long bytes) {
    std::vector<char> from(bytes, 1), to(bytes, 2);
    const double taken = seconds([&] { std::memcpy(to.data(), from.data(), bytes); });
    asm volatile("" ::"r"(to.data()) : "memory");
    return 2.0 * bytes / taken;
}
}
