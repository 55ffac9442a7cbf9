// Rows in eight bits, ready for tiles of rows. Each group of 32 inputs has its scale s = max|x| / 127, and the inputs
// are round(x / s), ties to even. `fine` inputs have fifteen bits, s = max|x| / 16319, in two parts: 128 * high + low.
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

// What the sums of a group begin with, by offset: minus the offset times the sum of the inputs. kSixteens has two of them.
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

// The largest of a group without signs, as bits: those of floats are ordered as the floats are, and NaN is above all.
inline int32_t largest_of_group(const float* x) {
#if defined(__AVX512F__)
    const __m512i sizes = _mm512_set1_epi32(0x7fffffff);
    const __m512i first = _mm512_and_si512(sizes, _mm512_loadu_si512(x));
    return _mm512_reduce_max_epi32(_mm512_max_epi32(first, _mm512_and_si512(sizes, _mm512_loadu_si512(x + kLanes))));
#else
    int32_t most = 0;
    for (int i = 0; i < kGroup; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
#endif
}

// x / by for 16 numbers, rounded to the nearest whole ones, ties to even.
inline Ints divided_group(const float* x, float by) {
#if defined(__AVX512F__)
    if (by > 1e-30f && by < 1e30f) {  // as `divided` of quantized_codes.h
        const __m512 number = _mm512_loadu_ps(x), divisor = _mm512_set1_ps(by), inverse = _mm512_set1_ps(1.0f / by);
        const __m512 near = _mm512_mul_ps(number, inverse);
        return (Ints)_mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_fnmadd_ps(near, divisor, number), inverse, near));
    }
#endif
    const Floats shifted = load(x) / by + 12582912.0f;  // adding it rounds to a whole number in the low bits
    Ints bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    return bits - 0x4b400000;
}

inline void store_bytes(int8_t* to, Ints whole) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)whole));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(whole[i]);
#endif
}

inline int32_t sum_of(Ints whole) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)whole);
#else
    int32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += whole[i];
    return total;
#endif
}

// Row `row` of x; memory fits all. A group with a number that is not finite becomes zeros, with a scale that is not.
inline void take_row(BlockInputs& memory, const Inputs& x, const BlockWeight& weight, int64_t row) {
    static thread_local Memory<float> normed{"normed row"};
    normed.grow(weight.depth);
    const float* const from = ready_row(x, row, weight.depth, normed.data());
    const int64_t groups = weight.depth / kGroup, tile = row / kTallest, all = padded_rows(x.rows) * groups;
    const int64_t height = height_of(x.rows, tile);
    const float top = weight.fine ? 16319.0f : 127.0f;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t at = tile * kTallest * groups + g * height + row % kTallest;
        const int32_t most = largest_of_group(from + g * kGroup);
        float scale;
        std::memcpy(&scale, &most, sizeof scale);
        scale /= top;
        const bool finite = scale <= std::numeric_limits<float>::max();
        int8_t* const values = memory.values.data() + at * kGroup;
        int32_t sums[2];
        for (int half = 0; half < 2; ++half) {
            const float by = scale > 0.0f ? scale : 1.0f;
            const Ints whole = finite ? divided_group(from + g * kGroup + half * kLanes, by) : Ints{};
            const Ints above = weight.fine ? (whole + 64) >> 7 : Ints{};
            sums[half] = sum_of(whole);
            store_bytes(values + half * kLanes, whole - (above << 7));
            if (weight.fine) store_bytes(values + all * kGroup + half * kLanes, above);
        }
        memory.scales[at] = scale;
        memory.scales[all + at] = scale * static_cast<float>(sums[0] + sums[1]);
        for (int kind = 0; kind < kStartKinds - 1; ++kind) {
            if (!(weight.starts >> kind & 1)) continue;
            const int32_t start = kPairs && kStartBits[kind] == 7 ? 0 : (sums[0] + sums[1]) * (1 << kStartBits[kind]);
            memory.starts[kind * all + at] = -start;
        }
        constexpr int last = kStartKinds - 1;
        for (int half = 0; half < 2 && weight.starts >> last & 1; ++half)
            memory.starts[last * all + 2 * at + half] = -sums[half] * (1 << kStartBits[last]);
    }
}

}  // namespace
