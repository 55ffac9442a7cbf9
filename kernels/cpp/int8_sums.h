// Turns sums of products of eight-bit numbers into floats; all paths share it.

#pragma once

#include "layer_parts.h"

namespace {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int kOffset = 128;  // the instruction wants inputs without a sign: 128 is added to them
#else
constexpr int kOffset = 0;
#endif

// Keeps the compiler from rounding once instead of twice.
inline void keep_rounded(Floats& value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#else
    asm("" : "+m"(value));
#endif
}

// Sums of 16 outputs as numbers: ((sum * scale) * row scale) + bias, one rounding each.
class Meaning {
public:
    Meaning() = default;
    Meaning(const Int8Weight& weight, int64_t column) : scale_(load(weight.scale + column)), biased_(weight.bias) {
        std::memcpy(&offset_, weight.sums + column, sizeof offset_);
        offset_ *= kOffset;
        if (biased_) bias_ = load(weight.bias + column);
    }

    Floats operator()(const int32_t* sums, float row_scale) const {
        Ints whole;
        std::memcpy(&whole, sums, sizeof whole);
        Floats value = __builtin_convertvector(whole - offset_, Floats) * scale_;
        value *= row_scale;
        if (biased_) {
            keep_rounded(value);
            value += bias_;
        }
        return value;
    }

private:
    Ints offset_;
    Floats scale_, bias_;
    bool biased_;
};

}  // namespace
