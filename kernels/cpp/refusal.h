// Numbers of a step that say where to read and write: block ids, slots, positions, rows. They are checked before
// anything is computed, so that a wrong one ends in an error of the caller and never in memory of something else.

#pragma once

#include <cstdint>

namespace troupe {

// Why nothing was computed: `what` number `index` is `value`, not in [least, end).
struct Refusal {
    const char* what;
    int64_t index, value, least, end;
};

// Lies in memory of this thread until its next refusal.
inline const Refusal* refused(const char* what, int64_t index, int64_t value, int64_t least, int64_t end) {
    static thread_local Refusal refusal;
    refusal = {what, index, value, least, end};
    return &refusal;
}

// A refusal unless the number is in [least, end).
inline const Refusal* outside(const char* what, int64_t index, int64_t value, int64_t least, int64_t end) {
    return value >= least && value < end ? nullptr : refused(what, index, value, least, end);
}

// The same of all numbers of an array, in [0, end).
template <typename Number>
const Refusal* any_outside(const char* what, const Number* numbers, int64_t count, int64_t end) {
    int64_t wrong = 0;
#pragma omp simd reduction(| : wrong)
    for (int64_t i = 0; i < count; ++i) wrong |= numbers[i] < 0 || numbers[i] >= end;
    for (int64_t i = 0; wrong && i < count; ++i)
        if (const Refusal* refusal = outside(what, i, numbers[i], 0, end)) return refusal;
    return nullptr;
}

}  // namespace troupe
