// The threads of one parallel region, which meet between its operations.
//
// Where another program needs a core, a thread of the team stands still for a time slice, and the others wait for it,
// at one meeting after the other. Where one thread would have been faster than the team so far, the team goes on with
// its first thread alone: the other threads leave. A number is computed in the same way whatever the size of the team,
// so the results stay the same to the bit.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include <omp.h>
#if defined(__linux__)
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#if __has_include(<linux/futex.h>)
#include <linux/futex.h>
#else  // a C library whose package lacks the kernel's headers
#define FUTEX_WAIT_PRIVATE 128
#define FUTEX_WAKE_PRIVATE 129
#endif
#endif

namespace troupe {

// A thread spins for so long before it looks whether those that it waits for compute, and then between two looks; after
// the last look it sleeps. A time slice takes some milliseconds, which is up to the system and not to the processor.
constexpr std::chrono::microseconds kShortWait{50}, kLook{500};
constexpr int kLooks = 4;
constexpr int kPauses = 32;  // between two looks at the clock
constexpr int64_t kMostWatched = 64;  // threads of a team

class Team {
public:
    // threads: that the work is cut for; the region may have fewer.
    explicit Team(int64_t threads) : threads_(threads) {
        for (int64_t i = 0; i < threads && i < kMostWatched; ++i) members_[i].reset();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Every thread of the region calls it first, if the team meets there.
    void enter() {
        if (number() < kMostWatched && threads_ > 1) members_[number()].enter();
    }

    int64_t threads() const { return threads_; }
    // How many threads of the region have not left it; the same until the team meets.
    int64_t size() const { return alone_ ? 1 : omp_get_num_threads(); }
    int64_t number() const { return omp_get_thread_num(); }

    // Returns when all threads are there, and all that they wrote can be read. False: the calling thread is to leave.
    bool meet() {
        const int64_t others = size() - 1;
        if (others > 0 && number() > 0) return follow();
        if (others > 0)
            lead(static_cast<uint32_t>(others));
        else
            taken_.store(0, std::memory_order_relaxed);
        return true;
    }

    // The first thread calls `wait`, in which it may sleep for another process; before the team meets again.
    template <typename Wait>
    void away(Wait wait) {
        if (number() != 0) return;
        first_sleeps_.store(true);
        wait();
        first_sleeps_.store(false);
    }

    // Calls use(index) for this thread's part of 0 .. count - 1.
    template <typename Use>
    void each(int64_t count, Use use) const {
        const int64_t end = count * (number() + 1) / size();
        for (int64_t index = count * number() / size(); index < end; ++index) use(index);
    }

    // The same where some take longer than others: a thread that is done takes the next `some`. Once between two meetings.
    template <typename Use>
    void each_in_turn(int64_t count, int64_t some, Use use) {
        for (int64_t first; (first = taken_.fetch_add(some, std::memory_order_relaxed)) < count;)
            for (int64_t index = first; index < first + some && index < count; ++index) use(index);
    }

private:
    typedef std::chrono::steady_clock Clock;
    static constexpr int64_t kUnknown = -1;

    // A thread, and which meeting it has come to.
    struct alignas(64) Member {
        std::atomic<uint32_t> came;
        std::atomic<bool> entered;
        bool has_clock;  // written before `entered`
#if defined(__linux__)
        clockid_t clock;
#endif

        void reset() {
            came.store(0, std::memory_order_relaxed);
            entered.store(false, std::memory_order_relaxed);
        }
        void enter() {
#if defined(__linux__)
            has_clock = pthread_getcpuclockid(pthread_self(), &clock) == 0;
            entered.store(true, std::memory_order_release);
#endif
        }
        // Nanoseconds of processor time; 0 of a thread that has not begun, kUnknown without a clock.
        int64_t computed() const {
#if defined(__linux__)
            if (!entered.load(std::memory_order_acquire)) return 0;
            if (has_clock) return read(clock);
#endif
            return kUnknown;
        }
        // The same of the calling thread.
        static int64_t own() {
#if defined(__linux__)
            return read(CLOCK_THREAD_CPUTIME_ID);
#else
            return kUnknown;
#endif
        }
#if defined(__linux__)
        static int64_t read(clockid_t clock) {
            timespec time;
            return clock_gettime(clock, &time) == 0 ? int64_t{time.tv_sec} * 1000000000 + time.tv_nsec : kUnknown;
        }
#endif
    };

    // Processor time of the calling thread and of one that it waits for, and whether the first thread sleeps.
    struct Look {
        int64_t own, absent;
        bool first_sleeps;
    };
    Look look_at(const Member& member) const { return {Member::own(), member.computed(), first_sleeps_.load()}; }

    // The absent thread got no processor while the caller did. False where that is not known: a clock is missing or
    // goes by larger steps than a look, the whole process stood still, or the first thread sleeps, on purpose.
    static bool stood_still(const Look& before, const Look& after) {
        if (before.first_sleeps || after.first_sleeps) return false;
        if (before.own == kUnknown || after.own == kUnknown) return false;
        if (before.absent == kUnknown || after.absent == kUnknown) return false;
        const int64_t look = std::chrono::nanoseconds(kLook).count(), own = after.own - before.own;
        return own >= look / 2 && own < 2 * look && after.absent - before.absent < look / 2;
    }

    void lead(uint32_t others) {
        const uint32_t meeting = meetings_.load(std::memory_order_relaxed) + 1;
        const auto missing = [&] { return arrived_.load(std::memory_order_acquire) != others; };
        const auto absent = [&] {  // the first of those, which may have come meanwhile
            for (int64_t i = 1; i < omp_get_num_threads() && i < kMostWatched; ++i)
                if (members_[i].came.load(std::memory_order_relaxed) != meeting) return i;
            return int64_t{0};
        };
        if (missing()) {
            const Clock::time_point begin = Clock::now();
            if (!wait(missing, absent)) {
                first_sleeps_.store(true);
                for (uint32_t seen; (seen = arrived_.load()) != others;) sleep(arrived_, seen);
                first_sleeps_.store(false);
            }
            waited_ += Clock::now() - begin;
        }
        if (slow_.load(std::memory_order_relaxed)) {  // one thread takes others + 1 times what the first one computed
            const int64_t threads = int64_t{others} + 1;
            alone_ = waited_ * threads > (Clock::now() - made_) * (threads - 1);
            slow_.store(false, std::memory_order_relaxed);
        }
        arrived_.store(0, std::memory_order_relaxed);
        taken_.store(0, std::memory_order_relaxed);
        meetings_.store(meeting);
        if (sleeping_.load() > 0) wake(meetings_);
    }

    bool follow() {
        const uint32_t before = meetings_.load(std::memory_order_relaxed);
        if (number() < kMostWatched) members_[number()].came.store(before + 1, std::memory_order_relaxed);
        arrived_.fetch_add(1);
        if (first_sleeps_.load()) wake(arrived_);
        const auto missing = [&] { return meetings_.load(std::memory_order_acquire) == before; };
        if (missing() && !wait(missing, [] { return int64_t{0}; })) {
            sleeping_.fetch_add(1);
            while (meetings_.load() == before) sleep(meetings_, before);
            sleeping_.fetch_sub(1);
        }
        return !alone_;
    }

    // Spins while `missing`; false: too long. The meeting is slow where the absent thread stands still meanwhile.
    template <typename Missing, typename Absent>
    bool wait(Missing missing, Absent absent) {
        if (spin(missing, Clock::now() + kShortWait)) return true;
        for (int look = 0; look < kLooks && !slow_.load(std::memory_order_relaxed); ++look) {
            const Member& member = members_[absent()];
            const Look before = look_at(member);
            if (spin(missing, Clock::now() + kLook)) return true;
            if (&member == &members_[absent()] && stood_still(before, look_at(member)))
                slow_.store(true, std::memory_order_relaxed);
        }
        return false;
    }

    template <typename Missing>
    static bool spin(Missing missing, Clock::time_point until) {
        do {
            for (int i = 0; i < kPauses; ++i) {
                if (!missing()) return true;
                pause();
            }
        } while (Clock::now() < until);
        return false;
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    // Until `word` is woken, if it still is `seen`; or for no reason.
    static void sleep(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
        std::this_thread::yield();
#endif
    }

    static void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
        syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
    }

    const int64_t threads_;
    const Clock::time_point made_ = Clock::now();
    Clock::duration waited_{0};  // by the first thread, for the others
    bool alone_ = false;  // written by the first thread while all others wait
    alignas(64) std::atomic<uint32_t> meetings_{0};
    std::atomic<uint32_t> sleeping_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    std::atomic<bool> first_sleeps_{false}, slow_{false};
    alignas(64) std::atomic<int64_t> taken_{0};
    Member members_[kMostWatched];
};

}  // namespace troupe
