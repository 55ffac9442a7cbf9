// Softmax weights of scores that lie as the processor's tiles leave them: [keys, 16 queries], a lane is a query. They
// are computed as powers of two, online: relative to what is near the best score so far.

#pragma once

#include "amx_tiles.h"
#include "attention.h"

#if defined(TROUPE_AMX)

namespace {

constexpr float kLog2 = 1.44269504088896341f;

// 2^x, to 1e-4 or, if `exact`, near 1e-7; without error for whole numbers. NaN stays NaN.
template <bool exact>
inline Floats power_of_two(Floats x) {
    const Floats r = (Floats)_mm512_reduce_ps((__m512)x, 0x09);  // x less the whole number below it
    Floats p;
    if constexpr (exact) {
        p = r * 2.1702255e-4f + 1.2439687e-3f;
        p = p * r + 9.6788406e-3f;
        p = p * r + 5.5483341e-2f;
        p = p * r + 2.4022983e-1f;
        p = p * r + 6.9314700e-1f;
    } else {
        p = r * 7.8267969e-2f + 2.2630768e-1f;
        p = p * r + 6.9542432e-1f;
    }
    return (Floats)_mm512_scalef_ps((__m512)(p * r + 1.0f), (__m512)x);
}

// The state of 16 queries: best score, sum of weights, and totals [size, 16] of weights times values.
struct Column {
    float *best, *weight, *total;
    int64_t size;
};

// Which of some keys each query of a column sees: those in front of `last`, itself included, but not up to `behind`.
struct Visible {
    Ints last, behind;
};

// Scales of the keys and values of a chunk.
struct ChunkScales {
    alignas(64) float key[64], value[64];
};

// Scores [keys, 16] as they are before the softmax, where that is not a mere scale.
inline void finish(float* scores, int64_t keys, const float* scales, const Visible& visible, float softcap) {
    for (int64_t k = 0; k < keys; ++k) {
        Floats s = load(scores + k * kLanes);
        if (scales) s *= scales[k];
        if (softcap > 0.0f) s = cap(s, softcap) * kLog2;
        const Ints place = Ints{} + static_cast<int32_t>(k);
        store(scores + k * kLanes, (place <= visible.last) & (place > visible.behind) ? s : Floats{} + kNone);
    }
}

// Returns the score that weights are relative to from now on. While the best score rises by less than 2^8, it stays as
// it is; otherwise earlier sums are rescaled.
inline Floats fit(const Column& column, Floats top) {
    const float slack = 8.0f, least = -1e30f;  // of a query that has seen nothing yet
    const Floats before = load(column.best), best = top > before + slack ? top : before;
    const Floats used = best > least ? best : Floats{} + least;
    if (!_mm512_cmp_ps_mask((__m512)best, (__m512)before, _CMP_GT_OQ)) return used;
    const Floats shrink = best > before ? power_of_two<true>(before - used) : Floats{} + 1.0f;
    store(column.best, best);
    store(column.weight, load(column.weight) * shrink);
    for (float* at = column.total; at < column.total + column.size * kLanes; at += kLanes) store(at, load(at) * shrink);
    return used;
}

// Scores [keys, 16], times their scales if `scaled`, become weights: `parts` right sides of a product, `part` numbers
// apart, times the scales of the values where those are given.
template <int parts, bool scaled, bool scales_values>
void exponents(const float* scores, int64_t keys, const ChunkScales& scales, const Column& column, uint16_t* to,
               int64_t part) {
    constexpr int chains = 4;  // under way at once
    const auto score = [&](int64_t k) {
        const Floats s = load(scores + k * kLanes);
        return scaled ? s * scales.key[k] : s;
    };
    Floats top[chains];
    for (Floats& t : top) t = Floats{} + kNone;
    for (int64_t k = 0; k < keys; k += chains)
        for (int i = 0; i < chains; ++i) {
            const Floats s = score(k + i);
            top[i] = s > top[i] ? s : top[i];
        }
    for (int i = 1; i < chains; ++i) top[0] = top[i] > top[0] ? top[i] : top[0];
    const Floats best = fit(column, top[0]);
    Floats sums[chains] = {};
    for (int64_t tile = 0; tile < keys; tile += kTileDepth, to += kTileSize)
        for (int64_t k = 0; k < kLanes; k += 2)
            for (int i = 0; i < 2; ++i) {
                const int64_t first = tile + k + i, second = first + kLanes;
                Floats a = power_of_two<(parts > 1)>(score(first) - best);
                Floats b = power_of_two<(parts > 1)>(score(second) - best);
                sums[2 * i] += a;
                sums[2 * i + 1] += b;
                if (scales_values) a *= scales.value[first], b *= scales.value[second];
                Ints words[parts];
                pair<parts>(a, b, words);
                for (int p = 0; p < parts; ++p)
                    std::memcpy(to + p * part + (k + i) * kTileDepth, &words[p], sizeof words[p]);
            }
    store(column.weight, load(column.weight) + ((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

}  // namespace

#endif
