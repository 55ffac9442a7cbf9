// The rows that products of quantized weights begin with.

#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include "simd.h"

namespace troupe {

// `rows` rows of `depth` numbers; with `norm` [depth] they go through a root-mean-square norm before.
struct Inputs {
    const float* data;
    int64_t stride, rows;
    const float* norm;
    double eps;
};

// Gives memory that begins with a cache line: each vector of 64 bytes that lies across two of them is read twice.
template <typename Number>
struct OnLines {
    typedef Number value_type;
    static constexpr std::align_val_t line{64};

    OnLines() = default;
    template <typename Other>
    OnLines(const OnLines<Other>&) {}
    Number* allocate(std::size_t count) { return static_cast<Number*>(::operator new(count * sizeof(Number), line)); }
    void deallocate(Number* memory, std::size_t) { ::operator delete(memory, line); }
    bool operator==(const OnLines&) const { return true; }
    bool operator!=(const OnLines&) const { return false; }
};

template <typename Number>
using Memory = std::vector<Number, OnLines<Number>>;

template <typename Number>
void grow(Memory<Number>& memory, int64_t size) {
    if (memory.size() < static_cast<size_t>(size)) memory.resize(static_cast<size_t>(size));
}

// One row, normed into `to` where there is a norm.
inline const float* ready_row(const Inputs& x, int64_t row, int64_t depth, float* to) {
    const float* from = x.data + row * x.stride;
    if (x.norm == nullptr) return from;
    Floats squares[4] = {};
    const int64_t whole = depth / kLanes * kLanes;
    int64_t k = 0;
    for (; k + 4 * kLanes <= whole; k += 4 * kLanes)
        for (int64_t i = 0; i < 4; ++i) squares[i] += load(from + k + i * kLanes) * load(from + k + i * kLanes);
    for (; k < whole; k += kLanes) squares[0] += load(from + k) * load(from + k);
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (int64_t i = whole; i < depth; ++i) total += from[i] * from[i];
    const float scale = 1.0f / std::sqrt(total / static_cast<float>(depth) + static_cast<float>(x.eps));
    for (int64_t i = 0; i < whole; i += kLanes) store(to + i, load(from + i) * scale * load(x.norm + i));
    for (int64_t i = whole; i < depth; ++i) to[i] = from[i] * scale * x.norm[i];
    return to;
}

}  // namespace troupe
