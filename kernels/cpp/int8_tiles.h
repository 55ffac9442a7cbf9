// Products of rows in eight bits by the processor's tiles (AMX). A tile of inputs is 16 rows of 64 bytes, one of the
// weight is 16 groups of four inputs of 16 outputs; a product of two of them adds 64 inputs to 16 * 16 sums.
//
// Rows are taken 32 at a time, in the layout that tiles load: [rows / 32][padded / 64][2][16][64]. The weight keeps its
// layout. The sums of a group of inputs are converted while the tiles compute those of the next one.

#pragma once

#include <algorithm>

#include "amx.h"
#include "int8_sums.h"

namespace {

constexpr int64_t kTileRows = 16, kPairRows = 2 * kTileRows, kLine = 64, kTileBytes = kTileRows * kLine;
constexpr int64_t kTileSums = kTileRows * kLanes;
constexpr int64_t kLeastTileRows = 6;  // fewer are as fast without tiles
constexpr int64_t kBlockBytes = 768 * 1024;  // of rows, which stay in a core's second cache while the weight goes by
constexpr int64_t kLeastBlockRows = 64;

inline bool takes_tiles(int64_t rows) { return rows >= kLeastTileRows && amx_allowed(); }

// Blocks that rows are cut into: those that fit in the cache, and equally many for all threads.
inline int64_t blocks_of(const Int8Weight& weight, int64_t rows, int64_t threads) {
    const int64_t fitting = (rows * weight.padded + kBlockBytes - 1) / kBlockBytes;
    const int64_t dealt = (fitting + threads - 1) / threads * threads;
    return std::max(int64_t{1}, std::min({dealt, rows / kLeastBlockRows, kMostRounds}));
}

#if defined(TROUPE_AMX)

static_assert(kWeightZero == 128, "the weights of tiles have no sign");
static_assert(kInputGroup % kLine == 0, "a group is whole tiles");

// Where 64 inputs of a row begin; the next ones are two tiles further on.
inline int64_t place_of(int64_t row, int64_t padded) {
    return row / kPairRows * kPairRows * padded + row % kPairRows * kLine;
}

inline void lay(const int8_t* row, int64_t padded, int8_t* to) {
    for (int64_t k = 0; k < padded; k += kLine, to += 2 * kTileBytes) std::memcpy(to, row + k, kLine);
}

// Up to four tiles of the weight, side by side in a product though not in memory. The following are fetched meanwhile.
struct TileColumns {
    const int8_t *from[4], *next[4];
    int64_t stride, turn, turns;  // of all turns in which the same columns are used
};

// The tiles 0 to 3 += 16 or 32 rows times the columns, over 64 inputs.
template <int row_tiles, int columns>
inline void multiply_step(const int8_t* x, const int8_t* const* weight, int64_t stride) {
    _tile_loadd(4, x, kLine);
    _tile_loadd(6, weight[0], stride);
    _tile_dpbsud(0, 4, 6);
    if constexpr (columns > 1) {
        _tile_loadd(7, weight[1], stride);
        _tile_dpbsud(1, 4, 7);
    }
    if constexpr (row_tiles > 1) {
        _tile_loadd(5, x + kTileBytes, kLine);
        _tile_dpbsud(2, 5, 6);
        if constexpr (columns > 1) _tile_dpbsud(3, 5, 7);
    } else {
        if constexpr (columns > 2) {
            _tile_loadd(5, weight[2], stride);
            _tile_dpbsud(2, 4, 5);
        }
        if constexpr (columns > 3) {
            _tile_loadd(6, weight[3], stride);
            _tile_dpbsud(3, 4, 6);
        }
    }
}

// sums [16 * row tiles, 16 * columns] of the inputs [64 * first, 64 * last). between() is called for every 64 inputs:
// tiles take their time.
template <int row_tiles, int columns, typename Between>
void multiply(const int8_t* x, const TileColumns& weight, int64_t first, int64_t last, int32_t* sums, Between between) {
    static_assert(row_tiles * columns <= 4, "there are no more tiles");
    const int8_t *from[columns], *next[columns];
    const int64_t step = kTileRows * weight.stride;
    const int64_t begin = kTileRows * weight.turn / weight.turns, end = kTileRows * (weight.turn + 1) / weight.turns;
    for (int c = 0; c < columns; ++c) {
        from[c] = weight.from[c] + first * step;
        next[c] = weight.next[c] + first * step + begin * weight.stride;
    }
    x += first * 2 * kTileBytes;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = first; k < last; ++k, x += 2 * kTileBytes) {
        multiply_step<row_tiles, columns>(x, from, weight.stride);
        for (int64_t group = 0; group < end - begin; ++group)
            for (int c = 0; c < columns; ++c) __builtin_prefetch(next[c] + group * weight.stride, 0, 2);
        for (int c = 0; c < columns; ++c) from[c] += step, next[c] += step;
        between();
    }
    constexpr int64_t line = columns * kLine;
    int32_t* const second = row_tiles > 1 ? sums + columns * kTileSums : sums + 2 * kLanes;
    _tile_stored(0, sums, line);
    if constexpr (columns > 1) _tile_stored(1, sums + kLanes, line);
    if constexpr (row_tiles > 1 || columns > 2) _tile_stored(2, second, line);
    if constexpr (row_tiles * columns == 4) _tile_stored(3, second + kLanes, line);
}

// Adds the sums of a group, of up to 32 rows and 4 * 16 outputs, to their totals while the next ones are computed. Behind
// the last group it calls write(row, column, value) as `product` does.
template <bool gated, typename Write>
class Finish {
public:
    Finish(const Int8Weight& weight, const Quantized& x, int64_t activation, const Write& write)
        : weight_(weight), x_(x), groups_(input_groups(weight.padded)), activation_(activation), write_(write) {}

    // Columns of all sums from here on: `width` of the result, which are twice as many of the weight if gated.
    void columns(int64_t unit, int64_t width) {
        all();
        column_ = unit * kLanes, width_ = width;
        for (int64_t c = 0; c < width; ++c) {
            meanings_[c] = {weight_, column_ + c * kLanes};
            if (gated) meanings_[width + c] = {weight_, weight_.outs / 2 + column_ + c * kLanes};
        }
    }
    // Where the next sums go; those before them are at hand.
    int32_t* sums() { return sums_[turn_]; }
    // The sums are those of a group of these rows.
    void rows(int64_t first, int64_t count, int64_t group) {
        all();
        from_ = sums_[turn_], turn_ = 1 - turn_, totals_ = memory_;
        row_ = first, end_ = first + count, left_ = 0, group_ = group;
    }
    void some() {
        for (left_ += kPairRows; left_ >= kSteps && row_ < end_; left_ -= kSteps) one();
    }
    void all() {
        while (row_ < end_) one();
    }

private:
    static constexpr int64_t kSteps = kInputGroup / kLine;

    void one() {
        const int64_t at = row_ * groups_ + group_, columns = (gated ? 2 : 1) * width_;
        const float scale = x_.scales.data()[at];
        const int32_t start = x_.starts.data()[at];
        for (int64_t c = 0; c < columns; ++c) {
            Ints sum;
            std::memcpy(&sum, from_ + c * kLanes, sizeof sum);
            const Floats total = group_ ? load(totals_ + c * kLanes) : Floats{};
            store(totals_ + c * kLanes, with_group(total, sum + start, scale));
        }
        if (group_ == groups_ - 1) written();
        from_ += columns * kLanes, totals_ += columns * kLanes;
        ++row_;
    }
    void written() {
        for (int64_t c = 0; c < width_; ++c) {
            Floats value = meanings_[c](totals_ + c * kLanes);
            if (gated) value = activated(value, activation_) * meanings_[width_ + c](totals_ + (width_ + c) * kLanes);
            write_(row_, column_ + c * kLanes, value);
        }
    }

    alignas(64) int32_t sums_[2][4 * kTileSums];
    alignas(64) float memory_[4 * kTileSums];
    Meaning meanings_[4];
    const Int8Weight& weight_;
    const Quantized& x_;
    const int64_t groups_, activation_;
    const Write& write_;
    const int32_t* from_ = nullptr;
    float* totals_ = nullptr;
    int64_t turn_ = 0, column_ = 0, width_ = 0, row_ = 0, end_ = 0, left_ = 0, group_ = 0;
};

// The rows [begin, end), where begin is a multiple of 32, times columns.
template <bool gated, typename Write>
void multiply_rows(const Quantized& x, int64_t padded, int64_t begin, int64_t end, int64_t count, TileColumns& columns,
                   Finish<gated, Write>& finish) {
    const auto between = [&] { finish.some(); };
    columns.turns = (end - begin + kPairRows - 1) / kPairRows, columns.turn = 0;
    for (int64_t row = begin; row < end; row += kPairRows, ++columns.turn) {
        const int8_t* const from = x.values.data() + place_of(row, padded);
        const int64_t rows = std::min(end - row, kPairRows);
        for (int64_t group = 0; group < input_groups(padded); ++group) {
            const int64_t first = group * kInputGroup / kLine;
            const int64_t last = std::min(padded, (group + 1) * kInputGroup) / kLine;
            int32_t* const sums = finish.sums();
            if (rows > kTileRows) {
                count > 1 ? multiply<2, 2>(from, columns, first, last, sums, between)
                          : multiply<2, 1>(from, columns, first, last, sums, between);
            } else {
                if (count == 1) multiply<1, 1>(from, columns, first, last, sums, between);
                if (count == 2) multiply<1, 2>(from, columns, first, last, sums, between);
                if (count == 3) multiply<1, 3>(from, columns, first, last, sums, between);
                if (count == 4) multiply<1, 4>(from, columns, first, last, sums, between);
            }
            finish.rows(row, rows, group);
        }
    }
}

// This thread's shares of all products. While columns are used, the next ones are fetched.
template <bool gated, typename Write>
void multiply_shares(const Int8Weight& weight, const Quantized& x, int64_t rows, int64_t activation, Shares& shares,
                     const Write& write) {
    const AmxScope scope;
    const int64_t units = ((gated ? weight.outs / 2 : weight.outs) + kLanes - 1) / kLanes;
    const int64_t most = (rows > kTileRows ? 2 : 4) / (gated ? 2 : 1), pairs = (rows + kPairRows - 1) / kPairRows;
    const auto width_at = [&](int64_t unit, int64_t end) {
        const int64_t width = std::min({most, end - unit, weight.beside(unit)});
        return gated ? std::min(width, weight.beside(units + unit)) : width;
    };
    const auto tiles_at = [&](int64_t unit, int64_t width, const int8_t** tiles) {
        for (int64_t c = 0; c < width; ++c) {
            tiles[c] = weight.at(unit + c);
            if (gated) tiles[width + c] = weight.at(units + unit + c);
        }
    };
    Finish<gated, Write> finish(weight, x, activation, write);
    for (int64_t share = shares.first(); shares.has(share); share = shares.next(share)) {
        const int64_t coming = shares.at(shares.of_round(share + 1));  // most likely
        const int64_t block = shares.round(share), end = shares.at(shares.of_round(share) + 1);
        const int64_t first = pairs * block / shares.rounds() * kPairRows;
        const int64_t last = std::min(rows, pairs * (block + 1) / shares.rounds() * kPairRows);
        for (int64_t unit = shares.at(shares.of_round(share)), width; unit < end; unit += width) {
            width = width_at(unit, end);
            TileColumns columns{{}, {}, weight.panel * 4, 0, 1};
            tiles_at(unit, width, columns.from);
            const int64_t next = unit + width < end ? unit + width : coming;
            tiles_at(next + width <= units ? next : unit, width, columns.next);
            finish.columns(unit, width);
            multiply_rows(x, weight.padded, first, last, gated ? 2 * width : width, columns, finish);
        }
    }
    finish.all();
}

#endif

}  // namespace
