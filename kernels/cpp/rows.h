// The rows that products of quantized weights begin with.

#pragma once

#include "memory.h"
#include "simd.h"

namespace troupe {

// `rows` rows of `depth` numbers; with `norm` [depth] they go through a root-mean-square norm before.
struct Inputs {
    const float* data;
    int64_t stride, rows;
    const float* norm;
    double eps;
};

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
