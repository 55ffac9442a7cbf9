// Turns sums of products of eight-bit numbers into floats; all paths share it.
//
// Of each group of inputs, the sum of an output is a whole number below 2^24, so a float holds it. Times the scale of the
// group it is added to the output's total, in the order of the groups, with one rounding: a row's result depends neither
// on its neighbours nor on the path, to the bit.

#pragma once

#include "layer_parts.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// One side of the instruction has no sign: the weight, which 128 is added to. What that adds to a sum depends on the
// inputs alone, so sums begin with that much less.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int kWeightZero = 128;
#else
constexpr int kWeightZero = 0;
#endif

// total + sum * scale, rounded once.
inline Floats with_group(Floats total, Ints sum, float scale) {
    const Floats whole = __builtin_convertvector(sum, Floats);
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)whole, _mm512_set1_ps(scale), (__m512)total);
#else
    for (int lane = 0; lane < kLanes; ++lane) total[lane] = std::fma(whole[lane], scale, total[lane]);
    return total;
#endif
}

// Keeps the compiler from rounding once instead of twice.
inline void keep_rounded(Floats& value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#else
    asm("" : "+m"(value));
#endif
}

// Totals of 16 outputs as numbers: total * scale + bias, one rounding each.
class Meaning {
public:
    Meaning() = default;
    Meaning(const Int8Weight& weight, int64_t column) : scale_(load(weight.scale + column)), biased_(weight.bias) {
        if (biased_) bias_ = load(weight.bias + column);
    }

    Floats operator()(const float* totals) const {
        Floats value = load(totals) * scale_;
        if (biased_) {
            keep_rounded(value);
            value += bias_;
        }
        return value;
    }

private:
    Floats scale_, bias_;
    bool biased_;
};

}  // namespace
