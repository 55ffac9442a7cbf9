// Ranks that meet in shared memory.

#include "meeting.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>

#include "refusal.h"

#if defined(__linux__)
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

using namespace troupe;

namespace {

typedef std::chrono::steady_clock Clock;
constexpr std::chrono::microseconds kSpin{20};
constexpr int kPauses = 16;  // between two looks at the clock
constexpr int64_t kSleepMs = 100;  // before a look whether the others still run
constexpr int kFutexWait = 0, kFutexWake = 1;
constexpr int64_t kMostRanks = 64;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

bool reached(const std::atomic<uint32_t>& word, uint32_t target) {
    return static_cast<int32_t>(word.load(std::memory_order_acquire) - target) >= 0;
}

// Until `word` is woken, if it still is `seen`; for kSleepMs at most.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
    const timespec most{kSleepMs / 1000, kSleepMs % 1000 * 1000000};
    syscall(SYS_futex, &word, kFutexWait, seen, &most, nullptr, 0);
#endif
}

void announce(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, uint32_t value) {
    word.store(value);
    if (sleepers.load() == 0) return;
#if defined(__linux__)
    syscall(SYS_futex, &word, kFutexWake, INT_MAX, nullptr, nullptr, 0);
#endif
}

// The first other rank whose process has ended; -1 for none.
int64_t ended(const Meeting& meeting) {
#if defined(__linux__)
    pollfd looked[kMostRanks];
    for (int64_t i = 0; i < meeting.ranks; ++i) looked[i] = {static_cast<int>(meeting.processes[i]), POLLIN, 0};
    if (poll(looked, static_cast<nfds_t>(meeting.ranks), 0) > 0)
        for (int64_t i = 0; i < meeting.ranks; ++i)
            if (i != meeting.rank && looked[i].revents) return i;
#endif
    return -1;
}

// Returns when the word has reached the target. False: a rank has ended, or the time is over. timeout_ms: 0 is none.
bool await(Meeting& meeting, int64_t rank, std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, uint32_t target,
           int64_t timeout_ms) {
    if (reached(word, target)) return true;
    const Clock::time_point begin = Clock::now();
    do {
        for (int i = 0; i < kPauses; ++i) {
            if (reached(word, target)) return true;
            relax();
        }
    } while (Clock::now() - begin < kSpin);
    while (true) {
        sleepers.fetch_add(1);
        const uint32_t seen = word.load();
        if (static_cast<int32_t>(seen - target) < 0) sleep_on(word, seen);
        sleepers.fetch_sub(1);
        if (reached(word, target)) return true;
        meeting.lost = ended(meeting);
        meeting.late = 0;
        if (meeting.lost >= 0) {
            if (!reached(word, target)) return false;  // it may have ended behind its last word
            meeting.lost = -1;
            return true;
        }
        if (timeout_ms && Clock::now() - begin >= std::chrono::milliseconds(timeout_ms)) {
            meeting.lost = rank;
            meeting.late = 1;
            return false;
        }
    }
}

bool await_given(Meeting& meeting, int64_t rank, uint32_t operation) {
    Seat& seat = meeting.seats[rank];
    return await(meeting, rank, seat.given, seat.sleep_for_given, operation, meeting.timeout_ms);
}

uint32_t next(const Meeting& meeting) { return static_cast<uint32_t>(meeting.operations + 1); }

float* buffer(const Meeting& meeting, int64_t rank, uint32_t operation) {
    return meeting.buffers + (2 * rank + operation % 2) * meeting.capacity;
}

// This rank's buffer for the next operation, once no other one reads what lies there; null: a rank is lost.
float* own_buffer(Meeting& meeting) {
    const uint32_t operation = next(meeting);
    for (int64_t other = 0; other < meeting.ranks; ++other) {
        Seat& seat = meeting.seats[other];
        if (other != meeting.rank &&
            !await(meeting, other, seat.taken, seat.sleep_for_taken, operation - 2, meeting.timeout_ms))
            return nullptr;
    }
    return buffer(meeting, meeting.rank, operation);
}

void give(Meeting& meeting) {
    Seat& seat = meeting.seats[meeting.rank];
    announce(seat.given, seat.sleep_for_given, next(meeting));
}

// Ends the operation.
void take(Meeting& meeting) {
    Seat& seat = meeting.seats[meeting.rank];
    announce(seat.taken, seat.sleep_for_taken, next(meeting));
    ++meeting.operations;
}

// Before the bytes that the leader tells.
struct Told {
    int64_t bytes;
};
constexpr int64_t kTold = sizeof(Told) / sizeof(float);

}  // namespace

namespace troupe {

bool meeting_sum(Meeting& meeting, float* data, int64_t count, float factor) {
    for (int64_t begin = 0; begin < count; begin += meeting.capacity) {
        const int64_t size = std::min(meeting.capacity, count - begin);
        float* const part = data + begin;
        float* const own = own_buffer(meeting);
        if (own == nullptr) return false;
        if (factor == 1.0f)
            std::memcpy(own, part, sizeof(float) * size);
        else
            for (int64_t i = 0; i < size; ++i) own[i] = factor * part[i];
        give(meeting);
        const uint32_t operation = next(meeting);
        for (int64_t rank = 0; rank < meeting.ranks; ++rank) {
            if (rank != meeting.rank && !await_given(meeting, rank, operation)) return false;
            const float* const given = buffer(meeting, rank, operation);
            if (rank == 0)
                std::memcpy(part, given, sizeof(float) * size);
            else
                for (int64_t i = 0; i < size; ++i) part[i] += given[i];
        }
        take(meeting);
    }
    return true;
}

}  // namespace troupe

// As of meeting.h; `lost` of the meeting is the rank that was lost, or -1.
extern "C" const Refusal* meeting_add(Meeting* meeting, float* data, int64_t count) {
    meeting->lost = -1;
    meeting_sum(*meeting, data, count, 1.0f);
    return nullptr;
}

// The leader tells the others some bytes.
extern "C" const Refusal* meeting_tell(Meeting* meeting, const char* bytes, int64_t count) {
    if (const Refusal* refusal = outside("rank", 0, meeting->rank, 0, 1)) return refusal;
    meeting->lost = -1;
    const int64_t most = (meeting->capacity - kTold) * static_cast<int64_t>(sizeof(float));
    int64_t begin = 0;
    do {
        const int64_t size = std::min(most, count - begin);
        float* const own = own_buffer(*meeting);
        if (own == nullptr) return nullptr;
        const Told told{count};
        std::memcpy(own, &told, sizeof told);
        std::memcpy(own + kTold, bytes + begin, static_cast<size_t>(size));
        give(*meeting);
        take(*meeting);
        begin += size;
    } while (begin < count);
    return nullptr;
}

// count[0] = the bytes that the leader tells next; -1 where it tells nothing for `wait_ms`, and where it is lost.
extern "C" const Refusal* meeting_listen(Meeting* meeting, int64_t wait_ms, int64_t* count) {
    if (const Refusal* refusal = outside("rank", 0, meeting->rank, 1, meeting->ranks)) return refusal;
    meeting->lost = -1;
    count[0] = -1;
    Seat& leader = meeting->seats[0];
    const uint32_t operation = next(*meeting);
    if (!await(*meeting, 0, leader.given, leader.sleep_for_given, operation, wait_ms)) {
        if (meeting->late) meeting->lost = -1;
        return nullptr;
    }
    Told told;
    std::memcpy(&told, buffer(*meeting, 0, operation), sizeof told);
    count[0] = told.bytes;
    return nullptr;
}

// bytes [count] = what the leader tells, of the size that `meeting_listen` has found.
extern "C" const Refusal* meeting_hear(Meeting* meeting, char* bytes, int64_t count) {
    if (const Refusal* refusal = outside("rank", 0, meeting->rank, 1, meeting->ranks)) return refusal;
    meeting->lost = -1;
    const int64_t most = (meeting->capacity - kTold) * static_cast<int64_t>(sizeof(float));
    int64_t begin = 0;
    do {
        const uint32_t operation = next(*meeting);
        if (!await_given(*meeting, 0, operation)) return nullptr;
        const float* const given = buffer(*meeting, 0, operation);
        Told told;
        std::memcpy(&told, given, sizeof told);
        if (const Refusal* refusal = outside("told bytes", 0, told.bytes, count, count + 1)) return refusal;
        const int64_t size = std::min(most, count - begin);
        std::memcpy(bytes + begin, given + kTold, static_cast<size_t>(size));
        take(*meeting);
        begin += size;
    } while (begin < count);
    return nullptr;
}

// Rows of all ranks beside each other: part [rows, widths[rank]] of each rank becomes out [rows, sum of widths] of the
// leader, in the order of ranks. Other ranks give null for `out`.
extern "C" const Refusal* meeting_gather(Meeting* meeting, const float* part, int64_t rows, const int64_t* widths,
                                         float* out) {
    meeting->lost = -1;
    int64_t width = 0, most = 0;
    for (int64_t rank = 0; rank < meeting->ranks; ++rank) {
        if (const Refusal* refusal = outside("width", rank, widths[rank], 0, INT_MAX)) return refusal;
        width += widths[rank];
        most = std::max(most, rows * widths[rank]);
    }
    if (const Refusal* refusal = outside("output of rank", meeting->rank, out != nullptr, meeting->rank == 0,
                                         meeting->rank == 0 ? 2 : 1))
        return refusal;
    const int64_t held = rows * widths[meeting->rank];
    for (int64_t begin = 0; begin < most; begin += meeting->capacity) {
        const int64_t end = begin + meeting->capacity;
        const uint32_t operation = next(*meeting);
        if (meeting->rank != 0) {
            float* const own = own_buffer(*meeting);
            if (own == nullptr) return nullptr;
            if (begin < held) std::memcpy(own, part + begin, sizeof(float) * (std::min(end, held) - begin));
            give(*meeting);
            take(*meeting);
            continue;
        }
        int64_t column = 0;
        for (int64_t rank = 0; rank < meeting->ranks; column += widths[rank++]) {
            if (rank != 0 && !await_given(*meeting, rank, operation)) return nullptr;
            const float* const from = rank == 0 ? part + begin : buffer(*meeting, rank, operation);
            const int64_t size = widths[rank], last = std::min(end, rows * size);
            for (int64_t place = begin; place < last;) {
                const int64_t row = place / size, left = std::min(last, (row + 1) * size) - place;
                std::memcpy(out + row * width + column + place % size, from + (place - begin), sizeof(float) * left);
                place += left;
            }
        }
        take(*meeting);
    }
    return nullptr;
}
