// Memory for the activations of a batch.
#pragma once

#include <memory>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "tiles.h"

namespace bertlite {

// Memory that is allocated piece by piece.  Without memory, it counts the bytes needed.
class Arena {
   public:
    explicit Arena(char* start = nullptr) : start_(start) {}

    template <class T>
    T* take(Long count) {
        char* at = start_ + used_;
        used_ += round_up(count * Long(sizeof(T)), 64) + 64;  // 64 more: vectors may read beyond the last row's end
        return start_ ? reinterpret_cast<T*>(at) : nullptr;
    }

    Long used() const { return used_; }

   private:
    char* start_;
    Long used_ = 0;
};

constexpr Long HUGE_PAGE = Long(2) << 20, MOST_KEPT = Long(64) << 20;  // bytes

// Memory that begins with a huge page, if Linux has some.
struct Memory {
    std::unique_ptr<char[]> all;
    Long bytes = 0;  // from `start` on

    Memory() = default;
    explicit Memory(Long bytes) : all(new char[bytes + HUGE_PAGE]), bytes(bytes) {
#if defined(__linux__)
        madvise(start(), bytes, MADV_HUGEPAGE);
#endif
    }

    // Have at least so many bytes; the first ones stay as they are.
    void reserve(Long wanted, Long staying) {
        if (all && bytes >= wanted) return;
        Memory larger(wanted);
        if (staying) std::memcpy(larger.start(), start(), staying);
        *this = std::move(larger);
    }

    char* start() const { return all.get() + (-reinterpret_cast<uintptr_t>(all.get()) & (HUGE_PAGE - 1)); }
};

// The memory that a thread keeps from one batch to the next, as Linux clears new memory page by page: MOST_KEPT bytes
// at most.
inline thread_local Memory kept_memory;

}  // namespace bertlite
