// Products of many rows by the processor's tiles (AMX), which multiply bfloat16 numbers and add up in float32, as exact
// as products in float32: a float32 is the sum of three bfloat16 numbers. Parts are multiplied with each other where
// their product matters; what is left out is below 2^-21 of a product, and 2^-24 in the mean.
// The idea is that of G. Henry, P. T. P. Tang, A. Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for
// higher-precision computations", ARITH 2019.
//
// Infinite numbers become NaN. Every sum is of its own row alone: which rows are computed beside it does not matter.

#pragma once

#include <algorithm>

#include "amx.h"
#include "layer_parts.h"

namespace {

#if defined(TROUPE_AMX)
constexpr int64_t kSplitRows = 17;  // with fewer, splitting the weight takes longer than to multiply it as it is
#else
constexpr int64_t kSplitRows = std::numeric_limits<int64_t>::max();
#endif

constexpr int64_t kDepthOfTile = 32, kRowsOfTiles = 32;  // rows are taken in pairs of tiles
constexpr int64_t kBlockRows = 256;  // that are split at once
constexpr int kPanels = 4;  // that share what is read of the rows

inline bool splits(const FloatWeight& weight, int64_t rows) {
    return rows >= kSplitRows && weight.splits && amx_allowed();
}

inline int64_t whole_tiles(int64_t rows) { return (rows + kRowsOfTiles - 1) / kRowsOfTiles * kRowsOfTiles; }

inline int64_t blocks_of(int64_t rows) { return (whole_tiles(rows) + kBlockRows - 1) / kBlockRows; }

#if defined(TROUPE_AMX)

constexpr int64_t kParts = 3, kSteps = 4;  // tiles' depths of a piece: what 32 rows and 32 outputs have of it fits in the first cache
constexpr int64_t kWords = 16 * 16;  // of a tile: pairs of numbers, 16 of them in each of 16 rows

// Pairs of `low` and `high`, part by part: each 16 words, a tile apart.
inline void split(__m512 low, __m512 high, uint32_t* to) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
    for (int part = 0; part < kParts; ++part) {
        const __m512i a = _mm512_castps_si512(low), b = _mm512_castps_si512(high);
        const __m512i first = _mm512_and_si512(a, upper), second = _mm512_and_si512(b, upper);
        _mm512_store_si512(to + part * kWords, _mm512_or_si512(_mm512_srli_epi32(a, 16), second));
        low = _mm512_sub_ps(low, _mm512_castsi512_ps(first));
        high = _mm512_sub_ps(high, _mm512_castsi512_ps(second));
    }
}

// The tiles 0 to 3 += 32 rows times 16 * tiles outputs, of a depth of 32. Rows are given as [parts] tiles for each 16
// rows, `apart` words from the next 16, and outputs as [tiles, parts]. between(0) to between(5) are called while the
// tiles compute, so that their time is used for other work.
template <int tiles, typename Between>
inline void multiply_step(const uint32_t* rows, int64_t apart, const uint32_t* outs, Between between) {
    asm volatile("" ::: "memory");  // the compiler does not know that tiles are loaded from memory
    const auto take_rows = [=](int64_t part) {
        _tile_loadd(4, rows + part * kWords, 64);
        _tile_loadd(5, rows + apart + part * kWords, 64);
    };
    const auto take_outs = [=](int64_t part) {
        _tile_loadd(6, outs + part * kWords, 64);
        if constexpr (tiles > 1) _tile_loadd(7, outs + (kParts + part) * kWords, 64);
    };
    const auto multiply = [] {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (tiles > 1) {
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    };
    take_rows(0);
    take_outs(2);
    multiply();
    between(0);
    take_outs(1);
    multiply();
    between(1);
    take_outs(0);
    multiply();
    between(2);
    take_rows(2);
    multiply();
    between(3);
    take_rows(1);
    multiply();
    between(4);
    take_outs(1);
    multiply();
    between(5);
}

// Sums of 32 rows and 16 * tiles outputs, rows 64 apart.
template <int tiles>
inline void start_sums(const float* sums, bool adds) {
    constexpr int64_t line = 64 * sizeof(float);
    if (adds) {
        _tile_loadd(0, sums, line);
        _tile_loadd(2, sums + 16 * 64, line);
        if constexpr (tiles > 1) {
            _tile_loadd(1, sums + 16, line);
            _tile_loadd(3, sums + 16 * 64 + 16, line);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
}

template <int tiles>
inline void store_sums(float* sums) {
    constexpr int64_t line = 64 * sizeof(float);
    _tile_stored(0, sums, line);
    _tile_stored(2, sums + 16 * 64, line);
    if constexpr (tiles > 1) {
        _tile_stored(1, sums + 16, line);
        _tile_stored(3, sums + 16 * 64 + 16, line);
    }
}

// Numbers of a weight to be fetched, a little with every call, while those before them are used.
struct Fetch {
    const float* from;
    int64_t lines, calls, left;

    void begin(int64_t all, int64_t times) { lines = from ? all : 0, calls = times, left = 0; }
    void some() {
        for (left += lines; left >= calls; left -= calls, from += kLanes) __builtin_prefetch(from, 0, 2);
    }
};

// Units of one panel, what follows them, and their sums [rows in whole tiles, 64].
struct Segment {
    int64_t unit, width;
    float* sums;
    Fetch fetch;
};

// A weight's part for 16 * tiles outputs from `from` on.
struct Columns {
    const float* from;
    int64_t panel, depth;

    // Pairs of inputs [begin, end) of a depth of 32, of which there are 16, in parts.
    template <int tiles>
    void split(int64_t step, int64_t begin, int64_t end, uint32_t* to) const {
        const __m512 none = _mm512_setzero_ps();
        for (int64_t i = begin, k = step * kDepthOfTile + 2 * begin; i < end; ++i, k += 2)
            for (int tile = 0; tile < tiles; ++tile) {
                const float* const at = from + k * panel + tile * kLanes;
                ::split(k < depth ? _mm512_loadu_ps(at) : none, k + 1 < depth ? _mm512_loadu_ps(at + panel) : none,
                        to + tile * kParts * kWords + i * 16);
            }
    }
};

// sums, = or, if `adds`, += 32 rows times outputs of `steps` tiles' depths.
template <int tiles>
void multiply_piece(const uint32_t* rows, int64_t apart, const uint32_t* outs, int64_t steps, bool adds, Fetch& fetch,
                    float* sums) {
    start_sums<tiles>(sums, adds);
    for (int64_t step = 0; step < steps; ++step) {
        multiply_step<tiles>(rows, apart, outs, [&](int64_t) { fetch.some(); });
        rows += kParts * kWords, outs += tiles * kParts * kWords;
    }
    store_sums<tiles>(sums);
}

// The same, of steps of a weight from `begin` on: each is split, to the next of `places` in outs, while that before it is
// multiplied.
template <int tiles>
void split_piece(const uint32_t* rows, int64_t apart, const Columns& columns, int64_t begin, int64_t steps,
                 int64_t places, uint32_t* outs, Fetch& fetch, float* sums) {
    const auto place = [=](int64_t step) { return outs + step % places * tiles * kParts * kWords; };
    start_sums<tiles>(sums, begin > 0);
    columns.split<tiles>(begin, 0, 16, outs);
    for (int64_t step = 0; step < steps; ++step, rows += kParts * kWords)
        multiply_step<tiles>(rows, apart, place(step), [&](int64_t turn) {
            fetch.some();
            if (step + 1 < steps)
                columns.split<tiles>(begin + step + 1, 16 * turn / 6, 16 * (turn + 1) / 6, place(step + 1));
        });
    store_sums<tiles>(sums);
}

// A block of rows in parts, in memory of one thread.
class SplitRows {
public:
    // rows [count, depth], `stride` apart.
    void take(const float* rows, int64_t stride, int64_t count, int64_t depth) {
        depth_ = depth, steps_ = (depth + kDepthOfTile - 1) / kDepthOfTile;
        tiles_ = whole_tiles(count) / 16;
        const int64_t pieces = tiles_ > 2 ? (steps_ + kSteps - 1) / kSteps : 1;  // a pair of tiles takes all in one
        length_ = (steps_ + pieces - 1) / pieces;
        memory_.grow(tiles_ * steps_ * kParts * kWords);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        for (int64_t tile = 0; tile < tiles_; ++tile)
            for (int64_t step = 0; step < steps_; ++step) {
                uint32_t* const into = memory_.data() + place(tile, step);
                const __mmask16 low = first(depth - step * kDepthOfTile);
                const __mmask16 high = first(depth - step * kDepthOfTile - 16);
                for (int64_t i = 0; i < 16; ++i) {
                    const bool there = tile * 16 + i < count;
                    const float* from = rows + (tile * 16 + i) * stride + step * kDepthOfTile;
                    const __m512 a = _mm512_maskz_loadu_ps(there ? low : 0, from);
                    const __m512 b = _mm512_maskz_loadu_ps(there ? high : 0, from + 16);
                    split(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b), into + i * 16);
                }
            }
    }

    // The sums of all segments. Each piece of the rows serves all of them before the next is read.
    void times(const FloatWeight& weight, Segment* segments, int count) const {
        for (int i = 0; i < count; ++i)
            segments[i].fetch.begin(segments[i].width * depth_, 6 * steps_ * (tiles_ / 2) * ((segments[i].width + 1) / 2));
        for (int64_t begin = 0; begin < steps_; begin += length_)
            for (int i = 0; i < count; ++i) {
                Segment& segment = segments[i];
                for (int64_t u = 0; u < segment.width; u += 2) {
                    const Columns columns{weight.at(segment.unit + u), weight.panel, depth_};
                    const auto multiply = segment.width - u > 1 ? &SplitRows::piece<2> : &SplitRows::piece<1>;
                    (this->*multiply)(columns, begin, segment.fetch, segment.sums + u * kLanes);
                }
            }
    }

private:
    static __mmask16 first(int64_t count) {
        return static_cast<__mmask16>(count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
    }

    // They lie as they are used: [pieces][tiles][steps of the piece][parts].
    int64_t place(int64_t tile, int64_t step) const {
        const int64_t begin = step / length_ * length_;
        return (begin * tiles_ + tile * std::min(length_, steps_ - begin) + step - begin) * kParts * kWords;
    }

    template <int tiles>
    void piece(const Columns& columns, int64_t begin, Fetch& fetch, float* sums) const {
        alignas(64) uint32_t outs[kSteps * tiles * kParts * kWords];
        const uint32_t* const rows = memory_.data() + place(0, begin);
        const int64_t apart = place(1, begin) - place(0, begin), steps = std::min(length_, steps_ - begin);
        split_piece<tiles>(rows, apart, columns, begin, steps, tiles_ > 2 ? kSteps : 2, outs, fetch, sums);
        for (int64_t tile = 2; tile < tiles_; tile += 2)
            multiply_piece<tiles>(rows + tile * apart, apart, outs, steps, begin > 0, fetch, sums + tile * 16 * 64);
    }

    int64_t depth_ = 0, steps_ = 0, length_ = 0, tiles_ = 0;
    Memory<uint32_t> memory_{"rows in parts"};
};

#endif

}  // namespace
