// The inner loop of float32 products and of attention: a few rows times a few vectors of columns, all sums in
// registers.

#pragma once

#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int kWideLanes = 16;
constexpr int kAccumulators = 24;  // registers for sums; the others hold the operands
#else
constexpr int kWideLanes = 8;
constexpr int kAccumulators = 12;
#endif
constexpr int kMostColumns = 64 / kWideLanes;
constexpr int kTileRows = 6;

typedef float Wide __attribute__((vector_size(4 * kWideLanes)));

inline Wide load_wide(const float* from) {
    Wide value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store_wide(float* to, Wide value) { std::memcpy(to, &value, sizeof value); }

// How many vectors of columns a tile of so many rows takes: 1, 2, 4 or 8.
constexpr int columns_for(int64_t rows) {
    int columns = kMostColumns;
    while (columns > 1 && rows * columns > kAccumulators) columns /= 2;
    return columns;
}

// Cache lines to ask for while a tile is computed: `step` floats further with every input, two at a time if `second`.
struct Ahead {
    const float* from;
    int64_t step, second;
};

// sums [rows, 64] += x [rows, depth] times weight [depth, columns], whose rows are `stride` apart. Every sum is one
// chain of fused multiply-adds in the order of the depth, for any shape of the tile.
template <int rows, int columns>
void tile(const float* x, int64_t x_stride, const float* weight, int64_t stride, int64_t depth, Ahead ahead,
          float* sums) {
    Wide total[rows][columns];
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c) total[r][c] = load_wide(sums + r * 64 + c * kWideLanes);
    for (int64_t k = 0; k < depth; ++k) {
        __builtin_prefetch(ahead.from, 0, 3);
        __builtin_prefetch(ahead.from + ahead.second, 0, 3);
        ahead.from += ahead.step;
        Wide w[columns];
        for (int c = 0; c < columns; ++c) w[c] = load_wide(weight + k * stride + c * kWideLanes);
        for (int r = 0; r < rows; ++r) {
            const float value = x[r * x_stride + k];
            for (int c = 0; c < columns; ++c) total[r][c] += value * w[c];
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < columns; ++c) store_wide(sums + r * 64 + c * kWideLanes, total[r][c]);
}

typedef void (*Tile)(const float*, int64_t, const float*, int64_t, int64_t, Ahead, float*);

#if defined(__AVX512F__)
#define TROUPE_TILES(rows) {tile<rows, 1>, tile<rows, 2>, tile<rows, 3>, tile<rows, 4>}
#else
#define TROUPE_TILES(rows) \
    {tile<rows, 1>, tile<rows, 2>, tile<rows, 3>, tile<rows, 4>, tile<rows, 5>, tile<rows, 6>, tile<rows, 7>, tile<rows, 8>}
#endif
const Tile kTiles[kTileRows][kMostColumns] = {TROUPE_TILES(1), TROUPE_TILES(2), TROUPE_TILES(3),
                                              TROUPE_TILES(4), TROUPE_TILES(5), TROUPE_TILES(6)};

constexpr int kMostStreams = 4;

// sums [panels * 64] = a row x [depth] times panels of 64 columns, each `apart` floats behind the one before; they are
// read at once, so that more of what comes from memory is under way. The sums are those of `tile`, to the bit.
template <int panels>
void row_tile(const float* x, const float* weight, int64_t apart, int64_t depth, float* sums) {
    Wide total[panels][kMostColumns] = {};
    for (int64_t k = 0; k < depth; ++k)
        for (int p = 0; p < panels; ++p)
            for (int c = 0; c < kMostColumns; ++c)
                total[p][c] += x[k] * load_wide(weight + p * apart + k * 64 + c * kWideLanes);
    for (int p = 0; p < panels; ++p)
        for (int c = 0; c < kMostColumns; ++c) store_wide(sums + p * 64 + c * kWideLanes, total[p][c]);
}

typedef void (*RowTile)(const float*, const float*, int64_t, int64_t, float*);
const RowTile kRowTiles[kMostStreams] = {row_tile<1>, row_tile<2>, row_tile<3>, row_tile<4>};

}  // namespace
