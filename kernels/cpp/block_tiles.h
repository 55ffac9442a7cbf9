// Tiles of rows times a unit of 16 outputs. Sums of whole numbers are exact; each group's is then added to a float by
// one multiplication of the two scales and one fused addition (two with a minimum), group by group. Nothing else happens
// to a number: a row's result depends neither on its neighbours nor on the tile or the number of threads, to the bit.

#pragma once

#include "block_inputs.h"

namespace {

constexpr int kTogether = 4;     // rows of which the sums of a group are computed together
constexpr int64_t kAhead = 4096;  // bytes that are fetched before they are read

// sums [rows][2] += the lines of a group times rows, which lie one after the other: lines first, so that a row's sum is
// not waited for.
template <Form form, int rows>
[[gnu::always_inline]] inline void add_lines(const Line* lines, const int8_t* x, Sums (*sums)[2]) {
#pragma GCC unroll 8
    for (int l = 0; l < kLines; ++l) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            Sums& sum = sums[r][form == kSixteens ? l / 4 : 0];
            sum = dot<form == kLarge>(sum, lines[l], x + r * kGroup + 4 * l);
        }
    }
}

// Adds a group to the totals of some rows of a tile.
template <Form form, int rows>
[[gnu::always_inline]] inline void add_rows(const Line* lines, const Scales& scales, const TileInputs& x, int kind,
                                            int64_t at, Values* totals) {
    constexpr int halves = form == kSixteens ? 2 : 1;
    Sums sums[rows][2] = {};
    for (int r = 0; r < rows; ++r)
        for (int half = 0; half < halves && form != kMinimum; ++half)
            sums[r][half] += x.starts[kind][halves * (at + r) + half];
    add_lines<form, rows>(lines, x.values + at * kGroup, sums);
    if (x.high != nullptr) {
        Sums above[rows][2] = {};
        add_lines<form, rows>(lines, x.high + at * kGroup, above);
        for (int r = 0; r < rows; ++r)
            for (int half = 0; half < halves; ++half) sums[r][half] += above[r][half] << 7;
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
        const float scale = x.scales[at + r];
        totals[r] = fused(__builtin_convertvector(sums[r][0], Values), scales.scale * scale, totals[r]);
        if (halves == 2) totals[r] = fused(__builtin_convertvector(sums[r][1], Values), scales.other * scale, totals[r]);
        if (form == kMinimum) totals[r] = fused(Values{} + x.sums[at + r], scales.other, totals[r]);
    }
}

// The same of all of them, as many at a time as there are registers for.
template <Form form, int rows>
[[gnu::always_inline]] inline void add_group(const Line* lines, const Scales& scales, const TileInputs& x, int kind,
                                             int64_t group, Values* totals) {
    constexpr int some = form == kSixteens ? kTogether / 2 : kTogether, last = rows % some;
#pragma GCC unroll 16
    for (int r = 0; r + some <= rows; r += some)
        add_rows<form, some>(lines, scales, x, kind, group * rows + r, totals + r);
    if constexpr (last > 0)
        add_rows<form, last>(lines, scales, x, kind, group * rows + rows - last, totals + rows - last);
}

// out [rows, 16] = a tile of rows times a unit, which is decoded on the way: that is an eighth of a tall tile's work.
template <typename Type, int rows>
void tile(const uint8_t* codes, const uint8_t* scales, int64_t groups, const TileInputs& x, float* out) {
    typedef typename Type::Codes Codes;
    typedef typename Type::Scale Scale;
    for (int lane = 0; lane < kLanes; lane += kWide) {
        const uint8_t *from = codes + lane * 4, *scale = scales;
        Values totals[rows] = {};
        for (int64_t block = 0; block < groups; block += Scale::kGroups, scale += Scale::kBytes) {
            const Scale read(scale, lane);
            __builtin_prefetch(scale + kAhead / 8);
#pragma GCC unroll 1
            for (int g = 0; g < Scale::kGroups; ++g, from += Codes::kBytes) {
                Line lines[kLines];
                Codes::lines(from, lines);
                for (int i = 0; i < Codes::kBytes; i += kLineBytes) __builtin_prefetch(from + kAhead + i);
                add_group<Type::kForm, rows>(lines, read.at(g), x, start_kind(Type::kBits), block + g, totals);
            }
        }
        for (int r = 0; r < rows; ++r) store_values(out + r * kLanes + lane, totals[r]);
    }
}

typedef void (*Tile)(const uint8_t*, const uint8_t*, int64_t, const TileInputs&, float*);

template <typename Type>
inline Tile tile_of(int64_t height) {
    constexpr int most = kTallest;  // one that is taller is never asked for
    switch (height) {
        case 1: return tile<Type, 1>;
        case 2: return tile<Type, most < 2 ? 1 : 2>;
        case 3: return tile<Type, most < 3 ? 1 : 3>;
        case 4: return tile<Type, most < 4 ? 1 : 4>;
        case 6: return tile<Type, most < 6 ? 1 : 6>;
        case 8: return tile<Type, most < 8 ? 1 : 8>;
        case 12: return tile<Type, most < 12 ? 1 : 12>;
        default: return tile<Type, most < 16 ? 1 : 16>;
    }
}

}  // namespace
