// The ranks of one model, which are processes on one machine, meet in shared memory: they add up partial sums, the first
// rank (the leader) tells the others what to compute, and the others give it their parts of the logits.
//
// Every rank has a seat, with the number of the last operation that it has written data for (`given`) and of the last
// one whose data it needs no longer (`taken`), and two buffers, used by turns. All ranks go through the same operations
// in the same order. A rank writes its next data into a buffer once all others have taken the data that lie there.
//
// A rank that waits spins for a time that is short beside a time slice, and then sleeps in the kernel (futex). Where
// ranks share cores, a longer spin takes the core from the very rank that is waited for.

#pragma once

#include <atomic>
#include <cstdint>

namespace troupe {

struct Seat {
    alignas(64) std::atomic<uint32_t> given;
    std::atomic<uint32_t> sleep_for_given;  // ranks that sleep until it rises
    alignas(64) std::atomic<uint32_t> taken;
    std::atomic<uint32_t> sleep_for_taken;
};

// One rank's view of the memory, in fields of 8 bytes each. seats [ranks], then buffers [ranks, 2, capacity] of floats.
struct Meeting {
    Seat* seats;
    float* buffers;
    int64_t rank, ranks, capacity;
    const int64_t* processes;  // [ranks] descriptors that are readable once a rank has ended; -1 for none
    int64_t timeout_ms;        // of one wait; 0 is none
    int64_t operations;        // that this rank has gone through
    int64_t lost, late;        // out: the rank that was waited for in vain, and whether it still runs
};

// data [count] becomes the sum of all ranks' data, each times its rank's factor, added in the order of ranks: so every
// rank has the same bits. False: a rank has ended or did not come in time.
bool meeting_sum(Meeting& meeting, float* data, int64_t count, float factor);

}  // namespace troupe
