// A team of threads that works through phases of one forward together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include <pthread.h>
#include <sched.h>

#include "profile.h"

#if defined(BERTLITE_STD_THREADS)
#include <thread>
#include <vector>
#else
// The OpenMP library that torch has loaded, called as GCC calls it for `#pragma omp parallel`.  Its threads are those
// that torch's own operators use: a second pool beside it would have its idle threads spin where these want to work.
extern "C" void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
extern "C" int omp_get_thread_num();
#endif

namespace bertlite {

// The threads that work through a list of phases.  Each takes the phases in the same order, and pieces of a phase as
// long as there are any; it goes on when all pieces are done, not when all threads have arrived: one that the system
// has suspended delays the others by its current piece at most.
class Team {
   public:
    Team(long phases, long threads)
        : threads_(threads),
          stride_((threads + 8) / 8 * 8),  // whole cache lines
          counters_(std::make_unique<std::atomic<long>[]>(phases * stride_)) {}

    // The view of one thread.
    class Member {
       public:
        Member(Team& team, long thread) : team_(team), thread_(thread) {}

        // Call work(piece) for pieces 0 up to `pieces` together with the others, and return when all are done.  Each
        // thread has a range of them, which it takes first: what lies together is read by one.
        template <class Work>
        void parallel_for(long pieces, Work work) {
            const long threads = team_.threads_;
            std::atomic<long>* taken = team_.counters_.get() + at_++ * team_.stride_;  // of each range
            std::atomic<long>& done = taken[threads];
            for (long i = 0; i < threads; i++) {
                const long range = (thread_ + i) % threads, first = pieces * range / threads;
                const long count = pieces * (range + 1) / threads - first;
                while (taken[range].load(std::memory_order_relaxed) < count) {
                    const long piece = taken[range].fetch_add(1, std::memory_order_relaxed);
                    if (piece >= count) break;
                    work(first + piece);
                    done.fetch_add(1, std::memory_order_release);
                }
            }
            BERTLITE_PHASE("waiting");
            for (long spins = 0; done.load(std::memory_order_acquire) < pieces; spins++) {
                if (team_.aborted_.load(std::memory_order_relaxed)) throw std::runtime_error("another thread failed");
                if (spins < SPINS)
                    pause();
                else
                    sched_yield();  // there may be more threads than processors
            }
        }

       private:
        static constexpr long SPINS = 5000;  // about a tenth of a millisecond

        static void pause() {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }

        Team& team_;
        const long thread_;
        long at_ = 0;
    };

    // Stop all threads from waiting, as one has failed.
    void abort() { aborted_.store(true, std::memory_order_relaxed); }

   private:
    const long threads_, stride_;
    std::unique_ptr<std::atomic<long>[]> counters_;
    std::atomic<bool> aborted_{false};
};

// True in a process forked from one that had loaded this library: a fork does not copy threads.
inline std::atomic<bool> is_forked{false};
inline const int fork_handler = pthread_atfork(nullptr, nullptr, [] { is_forked.store(true); });

// Run work(thread, member) on at most `threads` threads of torch's own pool, through so many phases.
// The first exception of any thread is thrown again here, as bad_alloc or else as runtime_error: std::exception_ptr
// would need a newer libstdc++ than wheels may ask for.
template <class Work>
class TeamRun {
   public:
    TeamRun(long threads, long phases, Work work) : work_(work), team_(phases, std::max(threads, 1l)) {
        if (threads <= 1 || is_forked.load()) {
            run(0);
        } else {
#if defined(BERTLITE_STD_THREADS)  // sanitizers do not know OpenMP's
            std::vector<std::thread> others;
            for (long thread = 1; thread < threads; thread++) others.emplace_back([this, thread] { run(thread); });
            run(0);
            for (auto& other : others) other.join();
#else
            const auto one = [](void* self) { static_cast<TeamRun*>(self)->run(omp_get_thread_num()); };
            GOMP_parallel(one, this, unsigned(threads), 0);  // perhaps fewer threads than are asked for
#endif
        }
        if (out_of_memory_) throw std::bad_alloc();
        if (failed_.load()) throw std::runtime_error(message_);
    }

   private:
    void run(long thread) {
        try {
            Team::Member member(team_, thread);
            work_(thread, member);
        } catch (const std::exception& error) {
            if (!failed_.exchange(true)) {
                out_of_memory_ = dynamic_cast<const std::bad_alloc*>(&error);
                std::strncpy(message_, error.what(), sizeof message_ - 1);
            }
            team_.abort();
        }
    }

    Work work_;
    Team team_;
    std::atomic<bool> failed_{false};
    bool out_of_memory_ = false;
    char message_[256] = {};
};

template <class Work>
void run_team(long threads, long phases, Work work) {
    TeamRun<Work>(threads, phases, work);
}

}  // namespace bertlite
