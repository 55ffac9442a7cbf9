// Products of low rank that are added to rows of a product's result, as adapters (LoRA) of many requests need them.
//
// One thread computes all of a row, in the same order beside any others, so a row does not depend on its neighbours, to
// the bit. Rows of a group that lie side by side are computed together: its weights are read once for them.

#pragma once

#include <algorithm>

#include "refusal.h"
#include "registers.h"
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

constexpr int64_t kLowRankRows = 4;  // computed together, at most

// Registers that hold sums at a time: as many as hide the time of an addition, and few enough that none goes to memory.
constexpr int64_t kLowRankSums = 8;

// All lanes go through the same instructions, those of a last part of a register too: a row must not depend on how many
// are computed together.

// kRows times kAtOnce sums: to [kAtOnce] of each row = from [kAtOnce, depth] times x [depth].
template <int64_t kRows, int64_t kAtOnce>
inline void low_rank_sums(const float* from, int64_t depth, const float* const* x, float* const* to) {
    const int64_t whole = depth / kRegisterLanes * kRegisterLanes;
    Register totals[kRows][kAtOnce] = {};
    for (int64_t k = 0; k < whole; k += kRegisterLanes) {
        Register weights[kAtOnce];
        for (int64_t i = 0; i < kAtOnce; ++i) weights[i] = load_register(from + i * depth + k);
        for (int64_t row = 0; row < kRows; ++row) {
            const Register given = load_register(x[row] + k);
            for (int64_t i = 0; i < kAtOnce; ++i) totals[row][i] = multiply_add(given, weights[i], totals[row][i]);
        }
    }
    if (const int64_t rest = depth - whole) {
        for (int64_t i = 0; i < kAtOnce; ++i) {
            const Register weights = load_lanes(from + i * depth + whole, rest);
            for (int64_t row = 0; row < kRows; ++row)
                totals[row][i] = multiply_add(load_lanes(x[row] + whole, rest), weights, totals[row][i]);
        }
    }
    for (int64_t row = 0; row < kRows; ++row)
        for (int64_t i = 0; i < kAtOnce; ++i) to[row][i] = sum_register(totals[row][i]);
}

// For each row: to [ranks] = down [ranks, depth] times x [depth].
template <int64_t kRows>
inline void to_low_rank(const float* down, int64_t ranks, int64_t depth, const float* const* x, float* const* to) {
    constexpr int64_t kAtOnce = std::max<int64_t>(1, kLowRankSums / kRows);
    float* part[kRows];
    int64_t first = 0;
    for (; first + kAtOnce <= ranks; first += kAtOnce) {
        for (int64_t row = 0; row < kRows; ++row) part[row] = to[row] + first;
        low_rank_sums<kRows, kAtOnce>(down + first * depth, depth, x, part);
    }
    for (; first < ranks; ++first) {
        for (int64_t row = 0; row < kRows; ++row) part[row] = to[row] + first;
        low_rank_sums<kRows, 1>(down + first * depth, depth, x, part);
    }
}

// kWide registers of each row, which begin `o` numbers behind the pointers: see `from_low_rank`.
template <int64_t kRows, int64_t kWide>
inline void add_from_low_rank(const float* up, int64_t ranks, int64_t width, int64_t o, const float* const* x,
                              const float* bias, float factor, float* const* out) {
    Register totals[kRows][kWide];
    for (int64_t i = 0; i < kWide; ++i) {
        const Register start = bias ? load_register(bias + o + i * kRegisterLanes) : Register{};
        for (int64_t row = 0; row < kRows; ++row) totals[row][i] = start;
    }
    for (int64_t r = 0; r < ranks; ++r) {
        Register weights[kWide];
        for (int64_t i = 0; i < kWide; ++i) weights[i] = load_register(up + r * width + o + i * kRegisterLanes);
        for (int64_t row = 0; row < kRows; ++row) {
            const Register given = Register{} + x[row][r];
            for (int64_t i = 0; i < kWide; ++i) totals[row][i] = multiply_add(given, weights[i], totals[row][i]);
        }
    }
    for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t i = 0; i < kWide; ++i) {
            float* const at = out[row] + o + i * kRegisterLanes;
            store_register(at, multiply_add(Register{} + factor, totals[row][i], load_register(at)));
        }
    }
}

// For each row: out [width] += factor * (x [ranks] times up [ranks, width] + bias [width] or nothing).
template <int64_t kRows>
inline void from_low_rank(const float* up, int64_t ranks, int64_t width, const float* const* x, const float* bias,
                          float factor, float* const* out) {
    constexpr int64_t kWide = std::max<int64_t>(1, kLowRankSums / kRows);
    const int64_t whole = width / kRegisterLanes * kRegisterLanes;
    int64_t o = 0;
    for (; o + kWide * kRegisterLanes <= whole; o += kWide * kRegisterLanes)
        add_from_low_rank<kRows, kWide>(up, ranks, width, o, x, bias, factor, out);
    for (; o < whole; o += kRegisterLanes)
        add_from_low_rank<kRows, 1>(up, ranks, width, o, x, bias, factor, out);
    if (const int64_t rest = width - whole) {
        for (int64_t row = 0; row < kRows; ++row) {
            Register total = bias ? load_lanes(bias + whole, rest) : Register{};
            for (int64_t r = 0; r < ranks; ++r)
                total = multiply_add(Register{} + x[row][r], load_lanes(up + r * width + whole, rest), total);
            float* const at = out[row] + whole;
            store_lanes(at, multiply_add(Register{} + factor, total, load_lanes(at, rest)), rest);
        }
    }
}

// Of each row: out [outs] += factor * the product of a group with x [depth].
template <int64_t kRows>
inline void add_low_rank_rows(const LowRank& weight, int64_t group, const float* const* x, float factor,
                              float* const* out) {
    const int64_t ranks = weight.ranks[group];
    if (ranks == 0) return;
    static thread_local Memory<float> inner{"rows of low rank"};
    inner.grow(kRows * ranks);
    float *between[kRows], *to[kRows];
    for (int64_t row = 0; row < kRows; ++row) between[row] = inner.data() + row * ranks;
    for (int64_t number = 0; number < weight.parts; ++number) {
        const LowRankPart& part = weight.part[number];
        const int64_t first = (group * weight.parts + number) * weight.rank;
        to_low_rank<kRows>(weight.down + first * weight.depth, ranks, weight.depth, x, between);
        const float* const bias = weight.bias ? weight.bias + group * weight.outs + part.begin : nullptr;
        for (int64_t row = 0; row < kRows; ++row) to[row] = out[row] + part.begin;
        from_low_rank<kRows>(part.up + group * weight.rank * part.width, ranks, part.width, between, bias, factor, to);
    }
}

// The same of the rows `begin` to `end` of `rows`, of inputs that may have a norm before. At most kLowRankRows of them.
inline void add_low_rank(const LowRank& weight, const LowRankRows& rows, int64_t begin, int64_t end, const Inputs& x,
                         float factor, float* out, int64_t out_stride) {
    static thread_local Memory<float> normed{"normed rows"};
    normed.grow(kLowRankRows * weight.depth);
    while (begin < end) {
        const int64_t group = rows.groups[begin];
        const float* from[kLowRankRows];
        float* to[kLowRankRows];
        int64_t count = 0;
        for (; begin < end && rows.groups[begin] == group; ++begin, ++count) {
            from[count] = ready_row(x, rows.rows[begin], weight.depth, normed.data() + count * weight.depth);
            to[count] = out + rows.rows[begin] * out_stride;
        }
        switch (count) {
            case 1: add_low_rank_rows<1>(weight, group, from, factor, to); break;
            case 2: add_low_rank_rows<2>(weight, group, from, factor, to); break;
            case 3: add_low_rank_rows<3>(weight, group, from, factor, to); break;
            default: add_low_rank_rows<kLowRankRows>(weight, group, from, factor, to);
        }
    }
}

// How many rows a thread takes at a time, of `count` for so many threads.
inline int64_t low_rank_share(int64_t count, int64_t threads) {
    return std::min(kLowRankRows, std::max<int64_t>(1, count / threads));
}

// That rows and groups are those of `count` rows and of the weights.
inline const Refusal* check_low_rank(const LowRankRows& rows, int64_t count, int64_t groups) {
    const Refusal* refusal = any_outside("row with a group", rows.rows, rows.count, count);
    return refusal ? refusal : any_outside("group", rows.groups, rows.count, groups);
}

}  // namespace troupe
