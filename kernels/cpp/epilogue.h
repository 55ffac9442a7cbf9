// First and last operations of float32 products: rows behind a norm, and the use of sums.

#pragma once

#include <algorithm>

#include "layer_parts.h"

namespace {

struct Rows {
    const float* data;
    int64_t stride, count;
};

// The rows behind their norm, in memory of this thread.
inline Rows ready_rows(const Inputs& x, int64_t depth) {
    if (x.norm == nullptr) return {x.data, x.stride, x.rows};
    thread_local Memory<float> memory{"normed rows"};
    memory.grow(x.rows * depth);
    const int64_t whole = depth / kLanes * kLanes;
    for (int64_t r = 0; r < x.rows; ++r) {
        const float* from = x.data + r * x.stride;
        float* to = memory.data() + r * depth;
        Floats squares = {};
        for (int64_t k = 0; k < whole; k += kLanes) squares += load(from + k) * load(from + k);
        float total = sum(squares);
        for (int64_t k = whole; k < depth; ++k) total += from[k] * from[k];
        const float scale = 1.0f / std::sqrt(total / static_cast<float>(depth) + static_cast<float>(x.eps));
        for (int64_t k = 0; k < whole; k += kLanes) store(to + k, load(from + k) * scale * load(x.norm + k));
        for (int64_t k = whole; k < depth; ++k) to[k] = from[k] * scale * x.norm[k];
    }
    return {memory.data(), depth, x.rows};
}

inline float biased(const FloatWeight& weight, float value, int64_t out) {
    return weight.bias ? value + weight.bias[out] : value;
}

inline Floats biased(const FloatWeight& weight, Floats value, int64_t out) {
    return weight.bias ? value + load(weight.bias + out) : value;
}

// out [rows, outs] at these units, from sums [rows, 64].
inline void finish(const FloatWeight& weight, const float* sums, int64_t rows, int64_t unit, int64_t width, bool adds,
            float factor, float* out, int64_t out_stride) {
    const int64_t begin = unit * kLanes;
    const int64_t end = begin + width * kLanes < weight.outs ? begin + width * kLanes : weight.outs;
    for (int64_t r = 0; r < rows; ++r) {
        float* to = out + r * out_stride;
        const float* from = sums + r * 64 - begin;
        int64_t o = begin;
        for (; o + kLanes <= end; o += kLanes) {
            const Floats value = biased(weight, load(from + o), o);
            store(to + o, adds ? load(to + o) + factor * value : value);
        }
        for (; o < end; ++o) {
            const float value = biased(weight, from[o], o);
            to[o] = adds ? to[o] + factor * value : value;
        }
    }
}

// out [rows, outs / 2] at these units: activation(gates) * ups.
inline void finish_gated(const FloatWeight& weight, const float* gates, const float* ups, int64_t rows, int64_t unit,
                  int64_t width, int64_t activation, float* out, int64_t out_stride) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < width * kLanes; c += kLanes) {
            const int64_t at = unit * kLanes + c;
            const Floats gate = biased(weight, load(gates + r * 64 + c), at);
            const Floats up = biased(weight, load(ups + r * 64 + c), weight.outs / 2 + at);
            store(out + r * out_stride + at, activated(gate, activation) * up);
        }
}

}  // namespace
