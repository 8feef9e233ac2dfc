// A team of threads that works through phases of one forward together.
#pragma once

#include <atomic>
#include <exception>
#include <optional>
#include <stdexcept>

#include <pthread.h>
#include <sched.h>

#if defined(BERTLITE_STD_THREADS)
#include <thread>
#include <vector>
#else
// The OpenMP library that torch has loaded, called as GCC calls it for `#pragma omp parallel`.  Its threads are those
// that torch's own operators use: a second pool beside it would have its idle threads spin where these want to work.
extern "C" void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();
#endif

namespace bertlite {

// Lets no thread go on before all have come.  Phases are short, so it spins; where there are more threads than
// processors it lets others run.
class Barrier {
   public:
    explicit Barrier(long threads) : threads_(threads) {}

    void wait() {
        if (threads_ == 1) return;
        const long phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (long spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
            if (broken_.load(std::memory_order_relaxed)) throw std::runtime_error("another thread failed");
            if (spins < SPINS) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            } else {
                sched_yield();
            }
        }
    }

    // No thread will wait again: one has failed.
    void break_up() { broken_.store(true, std::memory_order_relaxed); }

   private:
    static constexpr long SPINS = 20000;  // about a millisecond
    const long threads_;
    alignas(64) std::atomic<long> arrived_{0};
    alignas(64) std::atomic<long> phase_{0};
    std::atomic<bool> broken_{false};
};

// True in a process forked from one that had loaded this library: the threads of its team are not there.
inline std::atomic<bool> is_forked{false};
inline const int forks_are_watched = pthread_atfork(nullptr, nullptr, [] { is_forked.store(true); });

// Run work(thread, team) on up to so many threads, those of torch's own pool; `team` knows how many there are.
// The first exception of any is thrown again here.
template <class Team, class Work>
class TeamRun {
   public:
    TeamRun(long threads, Work work) : work_(work) {
        if (threads <= 1 || is_forked.load()) {
            team_.emplace(1);
            run(0);
        } else {
#if defined(BERTLITE_STD_THREADS)  // sanitizers do not know OpenMP's
            team_.emplace(threads);
            std::vector<std::thread> others;
            for (long thread = 1; thread < threads; thread++) others.emplace_back([this, thread] { run(thread); });
            run(0);
            for (auto& other : others) other.join();
#else
            GOMP_parallel([](void* self) { static_cast<TeamRun*>(self)->run_in_region(); }, this, unsigned(threads), 0);
#endif
        }
        if (failure_) std::rethrow_exception(failure_);
    }

   private:
#if !defined(BERTLITE_STD_THREADS)
    void run_in_region() {
        const long thread = omp_get_thread_num();
        if (thread == 0) {
            team_.emplace(omp_get_num_threads());  // perhaps fewer than were asked for
            ready_.store(true, std::memory_order_release);
        }
        while (!ready_.load(std::memory_order_acquire)) sched_yield();
        run(thread);
    }
#endif

    void run(long thread) {
        try {
            work_(thread, *team_);
        } catch (...) {
            if (!failed_.exchange(true)) failure_ = std::current_exception();
            team_->barrier.break_up();
        }
    }

    Work work_;
    std::optional<Team> team_;
    std::atomic<bool> ready_{false}, failed_{false};
    std::exception_ptr failure_;
};

template <class Team, class Work>
void run_team(long threads, Work work) {
    TeamRun<Team, Work>(threads, work);
}

}  // namespace bertlite
