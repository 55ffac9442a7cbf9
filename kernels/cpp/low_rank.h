// Products of low rank that are added to rows of a product's result, as adapters (LoRA) of many requests need them.
//
// One thread computes all of a row, so a row's result does not depend on its neighbours, to the bit.

#pragma once

#include <algorithm>

#include "refusal.h"
#include "rows.h"

namespace troupe {

constexpr int64_t kMostLowRankParts = 3;

// Outputs [begin, begin + width) of a product. up [groups, rank, width].
struct LowRankPart {
    const float* up;
    int64_t begin, width;
};

// The weights of all groups for one product, in fields of 8 bytes each. down [groups, parts * rank, depth]; ranks
// [groups], of which only so many are not zero, 0 for a group that adds nothing; bias [groups, outs] or null.
struct LowRank {
    const float* down;
    const int64_t* ranks;
    const float* bias;
    int64_t groups, rank, depth, outs, parts;
    LowRankPart part[kMostLowRankParts];
};

// Rows with a group each, none twice.
struct LowRankRows {
    const int64_t *rows, *groups;
    int64_t count;
};

// to [ranks] = down [ranks, depth] times x.
inline void to_low_rank(const float* down, int64_t ranks, int64_t depth, const float* x, float* to) {
    constexpr int64_t kAtOnce = 4;
    const int64_t whole = depth / kLanes * kLanes;
    for (int64_t first = 0; first < ranks; first += kAtOnce) {
        const int64_t count = std::min(kAtOnce, ranks - first);
        const float* const from = down + first * depth;
        Floats totals[kAtOnce] = {};
        if (count == kAtOnce) {
            for (int64_t k = 0; k < whole; k += kLanes) {
                const Floats given = load(x + k);
                for (int64_t i = 0; i < kAtOnce; ++i) totals[i] += given * load(from + i * depth + k);
            }
        } else {
            for (int64_t k = 0; k < whole; k += kLanes)
                for (int64_t i = 0; i < count; ++i) totals[i] += load(x + k) * load(from + i * depth + k);
        }
        for (int64_t i = 0; i < count; ++i) {
            float total = sum(totals[i]);
            for (int64_t k = whole; k < depth; ++k) total += x[k] * from[i * depth + k];
            to[first + i] = total;
        }
    }
}

// out [width] += factor * (x [ranks] times up [ranks, width] + bias [width] or nothing).
inline void from_low_rank(const float* up, int64_t ranks, int64_t width, const float* x, const float* bias, float factor,
                          float* out) {
    const int64_t whole = width / kLanes * kLanes;
    for (int64_t o = 0; o < whole; o += kLanes) {
        Floats total = bias ? load(bias + o) : Floats{};
        for (int64_t r = 0; r < ranks; ++r) total += x[r] * load(up + r * width + o);
        store(out + o, load(out + o) + factor * total);
    }
    for (int64_t o = whole; o < width; ++o) {
        float total = bias ? bias[o] : 0.0f;
        for (int64_t r = 0; r < ranks; ++r) total += x[r] * up[r * width + o];
        out[o] += factor * total;
    }
}

// out [outs] += factor * the product of a group with one row x [depth].
inline void add_low_rank_row(const LowRank& weight, int64_t group, const float* x, float factor, float* out) {
    const int64_t ranks = weight.ranks[group];
    if (ranks == 0) return;
    static thread_local Memory<float> inner{"row of low rank"};
    inner.grow(ranks);
    for (int64_t number = 0; number < weight.parts; ++number) {
        const LowRankPart& part = weight.part[number];
        const int64_t first = (group * weight.parts + number) * weight.rank;
        to_low_rank(weight.down + first * weight.depth, ranks, weight.depth, x, inner.data());
        const float* const bias = weight.bias ? weight.bias + group * weight.outs + part.begin : nullptr;
        from_low_rank(part.up + group * weight.rank * part.width, ranks, part.width, inner.data(), bias, factor,
                      out + part.begin);
    }
}

// The same of row number i of `rows`, of inputs that may have a norm before.
inline void add_low_rank(const LowRank& weight, const LowRankRows& rows, int64_t i, const Inputs& x, float factor,
                         float* out, int64_t out_stride) {
    static thread_local Memory<float> normed{"normed row"};
    normed.grow(weight.depth);
    const float* const from = ready_row(x, rows.rows[i], weight.depth, normed.data());
    add_low_rank_row(weight, rows.groups[i], from, factor, out + rows.rows[i] * out_stride);
}

// That rows and groups are those of `count` rows and of the weights.
inline const Refusal* check_low_rank(const LowRankRows& rows, int64_t count, int64_t groups) {
    const Refusal* refusal = any_outside("row with a group", rows.rows, rows.count, count);
    return refusal ? refusal : any_outside("group", rows.groups, rows.count, groups);
}

}  // namespace troupe
