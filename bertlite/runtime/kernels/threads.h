// A team of threads that works through phases of one forward together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif
#include <pthread.h>
#include <sched.h>

#include "vectors.h"

namespace bertlite {

// The threads that work through a list of phases.  Each takes the phases in the same order, and pieces of a phase as
// long as there are any; it goes on when all pieces are done, not when all threads have arrived. A thread that the
// system has suspended delays the rest by its current piece at most.
class Team {
   public:
    Team(Long phases, Long threads)
        : threads_(threads),
          stride_((threads + 8) / 8 * 8),  // whole cache lines
          counters_(std::make_unique<std::atomic<Long>[]>(phases * stride_)) {}

    // The view of one thread.
    class Member {
       public:
        const Long thread;  // its number

        Member(Team& team, Long thread) : thread(thread), team_(team) {}

        // Call work(piece) for pieces 0 up to `pieces` together with the other threads, and return when all are done.
        // Each thread has a range of them, which it takes first: what lies together is read by one.
        template <class Work>
        void parallel_for(Long pieces, Work work) {
            const Long threads = team_.threads_;
            std::atomic<Long>* taken = team_.counters_.get() + at_++ * team_.stride_;  // of each range
            std::atomic<Long>& done = taken[threads];
            for (Long i = 0; i < threads; i++) {
                const Long range = (thread + i) % threads, first = pieces * range / threads;
                const Long count = pieces * (range + 1) / threads - first;
                while (taken[range].load(std::memory_order_relaxed) < count) {
                    const Long piece = taken[range].fetch_add(1, std::memory_order_relaxed);
                    if (piece >= count) break;
                    work(first + piece);
                    done.fetch_add(1, std::memory_order_release);
                }
            }

            // The work of a phase is the input of the next one, so all of it must be done.
            BERTLITE_PHASE("waiting");
            for (Long spins = 0; done.load(std::memory_order_acquire) < pieces; spins++) {
                if (team_.aborted_.load(std::memory_order_relaxed)) throw std::runtime_error("another thread failed");
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
                if (spins >= SPINS) sched_yield();  // there may be more threads than processors
            }
        }

       private:
        static constexpr Long SPINS = 5000;  // about a tenth of a millisecond

        Team& team_;
        Long at_ = 0;
    };

    // Stop all threads from waiting, as one has failed.
    void abort() { aborted_.store(true, std::memory_order_relaxed); }

   private:
    const Long threads_, stride_;
    std::unique_ptr<std::atomic<Long>[]> counters_;
    std::atomic<bool> aborted_{false};
};

// Threads of our own, for a process that has no OpenMP.  They sleep between batches.
class Pool {
   public:
    using Work = void (*)(void* data, Long thread);

    // Call work(data, thread) on at most `threads` threads, of which the caller is thread 0, and return when all calls
    // have.  A pool that works for another caller leaves all to this one: no caller waits, and no processor has two
    // threads.
    void run(Work work, void* data, Long threads) {
        if (pthread_mutex_trylock(&in_use_)) return work(data, 0);
        pthread_mutex_lock(&lock_);
        while (size_ < threads - 1 && start_thread()) size_++;
        work_ = work, data_ = data, next_ = 1, limit_ = threads;
        pthread_cond_broadcast(&wake_);
        pthread_mutex_unlock(&lock_);

        work(data, 0);
        pthread_mutex_lock(&lock_);
        limit_ = 0;  // whoever wakes now comes too late
        while (working_) pthread_cond_wait(&idle_, &lock_);
        pthread_mutex_unlock(&lock_);
        pthread_mutex_unlock(&in_use_);
    }

   private:
    bool start_thread() {
        pthread_t thread;
        const auto loop = [](void* self) -> void* { return static_cast<Pool*>(self)->work_for_ever(); };
        return !pthread_create(&thread, nullptr, loop, this) && !pthread_detach(thread);
    }

    void* work_for_ever() {
        pthread_mutex_lock(&lock_);
        for (;;) {
            while (next_ >= limit_) pthread_cond_wait(&wake_, &lock_);
            const Long thread = next_++;
            working_++;
            pthread_mutex_unlock(&lock_);
            work_(data_, thread);
            pthread_mutex_lock(&lock_);
            if (!--working_) pthread_cond_signal(&idle_);
        }
    }

    pthread_mutex_t in_use_ = PTHREAD_MUTEX_INITIALIZER, lock_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER, idle_ = PTHREAD_COND_INITIALIZER;
    Work work_ = nullptr;
    void* data_ = nullptr;
    Long size_ = 0, next_ = 0, limit_ = 0, working_ = 0;
};

inline Pool pool;

// The OpenMP library that torch has loaded, called as GCC calls it for `#pragma omp parallel`.  torch's own operators
// use its threads too: in a second pool idle threads would spin where these want to work.
struct OpenMP {
    void (*parallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    int (*thread)() = nullptr;

    // Return the library, looked for until a process has one; on Windows none.
    static const OpenMP* find() {
#if defined(_WIN32)
        return nullptr;
#else
        static std::atomic<const OpenMP*> found{nullptr};
        static OpenMP library;
        if (!found.load(std::memory_order_acquire)) {
            void* const parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
            void* const thread = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
            if (!parallel || !thread) return nullptr;
            library.parallel = reinterpret_cast<decltype(library.parallel)>(parallel);  // by each caller the same
            library.thread = reinterpret_cast<decltype(library.thread)>(thread);
            found.store(&library, std::memory_order_release);
        }
        return found.load(std::memory_order_acquire);
#endif
    }
};

// A fork copies no threads: a pool of our own starts again, and one of OpenMP's is never asked again.
inline std::atomic<bool> is_forked{false};
#if !defined(_WIN32)
inline const int fork_handler = pthread_atfork(nullptr, nullptr, [] {
    is_forked.store(true);
    new (&pool) Pool();
});
#endif

// Thrown by float32 on the tiles of AMX if weights are no sums of three bfloat16: float32's own products are needed.
struct BeyondParts : std::exception {};

// Run work(member) on at most `threads` threads, torch's own if it is loaded, through so many phases.
// The first exception of any thread is thrown again here, as BeyondParts, bad_alloc or else runtime_error.
// std::exception_ptr would need a newer libstdc++ than wheels may ask for.
template <class Work>
void run_team(Long threads, Long phases, Work work) {
    Team team(phases, std::max(threads, Long(1)));
    std::atomic<bool> failed{false};
    bool out_of_memory = false, beyond_parts = false;
    char message[256] = {};
    auto run = [&](Long thread) {
        try {
            Team::Member member(team, thread);
            work(member);
        } catch (const std::exception& error) {
            if (!failed.exchange(true)) {
                out_of_memory = dynamic_cast<const std::bad_alloc*>(&error);
                beyond_parts = dynamic_cast<const BeyondParts*>(&error);
                std::strncpy(message, error.what(), sizeof message - 1);
            }
            team.abort();
        }
    };

    // torch's threads if it is loaded, else our own.  After a fork torch's are gone, and the caller works alone.
    using Run = decltype(run);
    const OpenMP* const openmp = OpenMP::find();
    if (threads <= 1 || (openmp && is_forked.load())) {
        run(0);
    } else if (openmp) {
        const auto one = [](void* data) { (*static_cast<Run*>(data))(OpenMP::find()->thread()); };
        openmp->parallel(one, &run, unsigned(threads), 0);  // perhaps fewer threads than are asked for
    } else {
        pool.run([](void* data, Long thread) { (*static_cast<Run*>(data))(thread); }, &run, threads);
    }

    if (beyond_parts) throw BeyondParts();
    if (out_of_memory) throw std::bad_alloc();
    if (failed.load()) throw std::runtime_error(message);
}

}  // namespace bertlite
