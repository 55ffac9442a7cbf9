// Rows in eight bits, ready for tiles of rows. Each group of 32 inputs has its scale s = max|x| / 127, and the inputs are
// round(x / s), ties to even. `fine` inputs have fifteen bits, s = max|x| / 16319, in two parts: q = 128 * high + low.
//
// Rows lie tile by tile: [groups][rows of the tile][32], so that a tile reads them one after the other, and so do their
// scales, sums and starts.

#pragma once

#include <algorithm>

#include "block_types.h"
#include "layer_parts.h"

namespace {

constexpr int64_t kHeights[] = {1, 2, 3, 4, 6, 8, 12, 16};

// The least height of a tile for so many rows; those beyond are computed and left out.
inline int64_t height_for(int64_t rows) {
    for (const int64_t height : kHeights)
        if (height >= rows) return height;
    return kTallest;
}

inline int64_t height_of(int64_t rows, int64_t tile) { return height_for(std::min(kTallest, rows - tile * kTallest)); }

inline int64_t tiles_of(int64_t rows) { return (rows + kTallest - 1) / kTallest; }

// Rows that there is memory for.
inline int64_t padded_rows(int64_t rows) {
    const int64_t whole = rows / kTallest * kTallest;
    return rows == whole ? rows : whole + height_for(rows - whole);
}

// What the sums of a group begin with, by offset: minus the offset times the sum of the inputs. For kSixteens there are two.
constexpr int kStartKinds = 4;
constexpr int kStartBits[kStartKinds] = {3, 4, 7, 5};
constexpr int start_kind(int bits) { return bits == 3 ? 0 : bits == 4 ? 1 : bits == 7 ? 2 : 3; }

// Inputs of one tile from its first group on.
struct TileInputs {
    const int8_t *values, *high;  // high: null unless fine
    const float *scales, *sums;
    const int32_t* starts[kStartKinds];
};

inline TileInputs tile_inputs(const BlockInputs& memory, const BlockWeight& weight, int64_t rows, int64_t tile) {
    const int64_t groups = weight.depth / kGroup, begin = tile * kTallest * groups, all = padded_rows(rows) * groups;
    const int8_t* const values = memory.values.data() + begin * kGroup;
    TileInputs inputs{values, weight.fine ? values + all * kGroup : nullptr, memory.scales.data() + begin,
                      memory.scales.data() + all + begin, {}};
    for (int kind = 0; kind < kStartKinds; ++kind)
        inputs.starts[kind] = memory.starts.data() + kind * all + (kind == kStartKinds - 1 ? 2 : 1) * begin;
    return inputs;
}

// A group of 32 numbers as whole numbers up to `top`; their scale.
inline float whole_numbers(const float* x, float top, int32_t* to) {
    int32_t most = 0;  // bits of floats without a sign are ordered as the floats are, and NaN is above all
    for (int i = 0; i < kGroup; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float scale;
    std::memcpy(&scale, &most, sizeof scale);
    scale /= top;
    const float by = scale > 0.0f ? scale : 1.0f;
    for (int i = 0; i < kGroup; i += kLanes) {
        const Floats shifted = load(x + i) / by + 12582912.0f;  // adding it rounds to a whole number in the low bits
        Ints bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        bits -= 0x4b400000;
        std::memcpy(to + i, &bits, sizeof bits);
    }
    return scale;
}

// Row `row` of `rows`; memory fits them.
inline void take_row(BlockInputs& memory, const Inputs& x, const BlockWeight& weight, int64_t row) {
    static thread_local Memory<float> normed{"normed row"};
    normed.grow(weight.depth);
    const float* const from = ready_row(x, row, weight.depth, normed.data());
    const int64_t groups = weight.depth / kGroup, tile = row / kTallest, all = padded_rows(x.rows) * groups;
    const int64_t height = height_of(x.rows, tile);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t at = tile * kTallest * groups + g * height + row % kTallest;
        alignas(64) int32_t whole[kGroup];
        const float scale = whole_numbers(from + g * kGroup, weight.fine ? 16319.0f : 127.0f, whole);
        int32_t sums[2] = {};
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < kGroup / 2; ++i) sums[half] += whole[half * kGroup / 2 + i];
        int8_t* const values = memory.values.data() + at * kGroup;
        if (weight.fine) {
            int8_t* const high = values + all * kGroup;
            for (int i = 0; i < kGroup; ++i) {
                const int32_t above = (whole[i] + 64) >> 7;
                high[i] = static_cast<int8_t>(above);
                values[i] = static_cast<int8_t>(whole[i] - 128 * above);
            }
        } else {
            for (int i = 0; i < kGroup; ++i) values[i] = static_cast<int8_t>(whole[i]);
        }
        memory.scales[at] = scale;
        memory.scales[all + at] = scale * static_cast<float>(sums[0] + sums[1]);
        for (int kind = 0; kind < kStartKinds - 1; ++kind) {
            if (!(weight.starts >> kind & 1)) continue;
            const int32_t start = kPairs && kStartBits[kind] == 7 ? 0 : (sums[0] + sums[1]) * (1 << kStartBits[kind]);
            memory.starts[kind * all + at] = -start;
        }
        if (weight.starts >> (kStartKinds - 1) & 1) {
            for (int half = 0; half < 2; ++half)
                memory.starts[(kStartKinds - 1) * all + 2 * at + half] = -sums[half] * (1 << kStartBits[kStartKinds - 1]);
        }
    }
}

}  // namespace
