// How the outputs of a product are dealt out to threads.

#pragma once

#include <atomic>
#include <cstdint>

#include "team.h"

namespace troupe {

constexpr int64_t kShareBytes = 256 * 1024, kMostShares = 8, kPanelsPerThread = 4, kMostRounds = 32;
static_assert(kMostShares <= 2 * kPanelsPerThread,
              "a share is half a panel at least: else rounding would take its begin behind the end");

// Equal shares: one for each thread, which is always the same one, so that a small weight stays in the cache of a core.
// A large weight has more, and who is done with one takes the next: a thread whose core does something else for a while,
// such as the interpreter's other threads, does not hold up the rest.
class Shares {
public:
    // All of it is dealt out `rounds` times, one round after the other. A share has `least` bytes or so.
    Shares(const Team& team, int64_t units, int64_t per_panel, int64_t bytes, int64_t rounds,
           int64_t least = kShareBytes)
        : team_(team),
          units_(units),
          per_panel_(per_panel),
          count_(team.threads()),
          rounds_(rounds),
          whole_(units >= kPanelsPerThread * team.threads() * per_panel) {
        const int64_t each = bytes / least / team.threads(), most = (kMostShares + rounds - 1) / rounds;
        if (team.threads() > 1 && each > 1) count_ *= each < most ? each : most;
    }
    // A share for each panel or so, in each of up to kMostRounds rounds, which are of rows of their own: every thread begins
    // with its own, so that rows stay in the cache of a core, and then helps with those of others.
    Shares(const Team& team, int64_t units, int64_t per_panel, int64_t rounds)
        : team_(team),
          units_(units),
          per_panel_(per_panel),
          count_((units + per_panel - 1) / per_panel),
          rounds_(rounds),
          whole_(true),
          apart_(true) {}
    // All of this thread's: for (share = first(); has(share); share = next(share)). Or the next one is taken early, so that
    // what it reads can be fetched: for (share = first(); has(share); share = settled(share, following)), where
    // `following` is early(share): none but of the same round, for another round's last share may be its own thread's.
    int64_t first() { return apart_ ? next_from(own_round()) : team_.number(); }
    bool has(int64_t share) const { return share >= 0 && share < count_ * rounds_; }
    int64_t next(int64_t share) { return apart_ ? next_from(round(share)) : next(); }
    int64_t early(int64_t share) {
        if (!apart_) return next();
        const int64_t following = taken_[round(share)].fetch_add(1, std::memory_order_relaxed);
        return following < count_ ? round(share) * count_ + following : kLater;
    }
    int64_t settled(int64_t share, int64_t following) { return following == kLater ? next_from(round(share)) : following; }
    int64_t next() { return team_.size() + taken_[0].fetch_add(1, std::memory_order_relaxed); }

    int64_t rounds() const { return rounds_; }
    int64_t round(int64_t share) const { return share / count_; }
    int64_t of_round(int64_t share) const { return share % count_; }

    // Where a share of a round begins and, with one more, ends: between two panels where there are enough of them, since
    // a part of one takes nearly as long as all of it. A share may be empty.
    int64_t at(int64_t share) const {
        const int64_t unit = units_ * share / count_;
        return whole_ && share < count_ ? (unit + per_panel_ / 2) / per_panel_ * per_panel_ : unit;
    }

private:
    static constexpr int64_t kLater = -1;

    int64_t own_round() const { return rounds_ * team_.number() / team_.size(); }
    int64_t next_from(int64_t round) {
        const int64_t own = own_round();
        do {
            const int64_t share = taken_[round].fetch_add(1, std::memory_order_relaxed);
            if (share < count_) return round * count_ + share;
            round = (round + 1) % rounds_;
        } while (round != own);
        return count_ * rounds_;
    }

    const Team& team_;
    int64_t units_, per_panel_, count_, rounds_;
    bool whole_, apart_ = false;
    std::atomic<int64_t> taken_[kMostRounds]{};
};

}  // namespace troupe
