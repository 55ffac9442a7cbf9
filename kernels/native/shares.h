// How the outputs of a product are dealt out to threads.

#pragma once

#include <atomic>
#include <cstdint>

#include <omp.h>

namespace troupe {

constexpr int64_t kShareBytes = 256 * 1024, kMostShares = 8, kPanelsPerThread = 4;

// Equal shares: one for each thread, which is always the same one, so that a small weight stays in the cache of a core.
// A large weight has more, and who is done with one takes the next: a thread whose core does something else for a while,
// such as the interpreter's other threads, does not hold up the rest.
class Shares {
public:
    // `whole`: parts of a panel are slow, so that shares are of whole ones where there are enough of them.
    Shares(int64_t units, int64_t per_panel, int64_t bytes, int64_t threads, bool whole = false)
        : units_(units), per_panel_(per_panel), count_(threads) {
        const int64_t each = bytes / kShareBytes / threads, panels = units / per_panel;
        if (threads > 1 && each > 1) count_ *= each < kMostShares ? each : kMostShares;
        whole_ = whole && panels >= kPanelsPerThread * threads;
        if (whole_ && count_ > panels) count_ = panels;
    }
    // All of this thread's: for (share = first(); has(share); share = next()).
    int64_t first() const { return omp_get_thread_num(); }
    bool has(int64_t share) const { return share < count_; }
    int64_t next() { return omp_get_num_threads() + taken_.fetch_add(1, std::memory_order_relaxed); }

    // Where a share begins and, with one more, ends.
    int64_t at(int64_t share) const {
        if (!whole_ && units_ < 8 * per_panel_ * count_) return units_ * share / count_;
        return share == count_ ? units_ : units_ / per_panel_ * share / count_ * per_panel_;
    }

private:
    int64_t units_, per_panel_, count_;
    bool whole_;
    std::atomic<int64_t> taken_{0};
};

}  // namespace troupe
