// The time of each phase and thread; phases.py includes it before the kernels.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

namespace bertlite {

constexpr int MOST_PHASES = 64, MOST_THREADS = 64;
inline const char* phase_names[MOST_PHASES] = {"outside"};
inline std::atomic<int> phase_count{1}, thread_count{0};

// One thread's times, in nanoseconds or, on x86, in cycles of the processor's clock.
struct Times {
    uint64_t spent[MOST_PHASES][MOST_PHASES];  // [outer][phase]: in a phase itself, not in those within it
    uint64_t since;
    int outer, now;

    void enter(int new_outer, int phase) {
#if defined(__x86_64__)
        const uint64_t clock = __builtin_ia32_rdtsc();
#else
        const uint64_t clock = std::chrono::steady_clock::now().time_since_epoch().count();
#endif
        spent[outer][now] += clock - since;
        since = clock, outer = new_outer, now = phase;
    }
};
inline Times all_times[MOST_THREADS];
inline thread_local Times& times = all_times[thread_count++ % MOST_THREADS];

struct Timed {
    const int outer = times.outer, before = times.now;
    explicit Timed(int phase) { times.enter(before, phase); }
    ~Timed() { times.enter(outer, before); }
};

inline int phase_number(const char* name) {
    const int number = phase_count++;
    phase_names[number] = name;
    return number;
}

extern "C" {
__attribute__((visibility("default"), used)) inline const char* bertlite_phase(int64_t number) {
    return phase_names[number];
}

// Return the time of a thread in a phase, and forget it.
__attribute__((visibility("default"), used)) inline uint64_t bertlite_time(int64_t thread, int64_t outer,
                                                                           int64_t phase) {
    return std::exchange(all_times[thread].spent[outer][phase], 0);
}
}

}  // namespace bertlite

// Count the rest of this block as a phase of this name.
#define BERTLITE_PHASE(name)                                \
    static const int phase_ = bertlite::phase_number(name); \
    const bertlite::Timed timed_(phase_)
