// Types of blocks as products read them. Sixteen outputs are a unit, and 32 inputs a group. A unit has the codes of all
// its groups one after the other, in lines (block_lines.h); its scales lie apart, in one piece for each block of one group
// or eight. The codes have no sign: a type's offset is subtracted from them.
//
//     Q4_0, Q4_1, Q4_K, I4  four lines: in the low halves of bytes the inputs of one line, in the high ones of the next
//     IQ4_NL, IQ4_XS        the same with places in a table
//     Q5_0, Q5_1, Q5_K      the same, and a fifth line with the fifth bits of all eight: bit l is that of line l
//     Q6_K                  the same, and two lines with the upper two bits of four lines each
//     Q8_0                  eight lines
//
// Scales of a block [..][16], floats of 16 bits and bytes:
//
//     Q4_0, Q5_0, Q8_0, IQ4_NL     d
//     Q4_1, Q5_1                   d, m
//     Q4_K, Q5_K                   d, dmin, eight scales, eight minima
//     Q6_K                         d, sixteen scales with a sign
//     IQ4_XS                       d, eight scales with a sign
//     I4                           floats of 32 bits: a scale and a minimum
//
// A weight is (code - offset) * scale + minimum, in that order; the types and their arithmetic are ggml's, but for I4, in
// which GPTQ, AWQ and int4 on load are: a block is of one group, or of four.

#pragma once

#include "block_lines.h"

namespace {

enum BlockType : int64_t {
    kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kIQ4_NL, kQ4_K, kQ5_K, kQ6_K, kIQ4_XS, kI4_32, kI4_128, kBlockTypes
};

// How the sums of a group become floats. kOffset: by one scale, with sums that begin at the offset's part. kLarge: the
// same, with codes of eight bits. kMinimum: no offset, a minimum is added. kSixteens: each half has its scale.
enum Form { kOffset, kLarge, kMinimum, kSixteens, kForms };

struct Scales {
    Values scale, other;  // other: the minimum, or the scale of the second half
};

// The numbers of IQ4_NL and IQ4_XS, plus 128.
constexpr uint8_t kTable[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// Each has the bytes of a group's codes; `lines` for a register's outputs, from where these begin in the first line; and
// `lane`, the codes of one output.

struct FourBits {
    static constexpr int kBytes = 4 * kLineBytes;
    [[gnu::always_inline]] static void lines(const uint8_t* from, Line* to) {
        for (int i = 0; i < 4; ++i) {
            const Line both = line_at(from + i * kLineBytes);
            to[2 * i] = both & 15;
            to[2 * i + 1] = down<4>(both) & 15;
        }
    }
    static void lane(const uint8_t* from, int64_t lane, uint8_t* to) {
        for (int k = 0; k < kGroup; ++k)
            to[k] = from[k / 8 * kLineBytes + lane * 4 + k % 4] >> (k / 4 % 2 * 4) & 15;
    }
};

struct Looked : FourBits {
    [[gnu::always_inline]] static void lines(const uint8_t* from, Line* to) {
        FourBits::lines(from, to);
        for (int l = 0; l < kLines; ++l) to[l] = looked_up_line(bytes_at(kTable), to[l]);
    }
    static void lane(const uint8_t* from, int64_t lane, uint8_t* to) {
        FourBits::lane(from, lane, to);
        for (int k = 0; k < kGroup; ++k) to[k] = kTable[to[k]];
    }
};

struct FiveBits {
    static constexpr int kBytes = 5 * kLineBytes;
    [[gnu::always_inline]] static void lines(const uint8_t* from, Line* to) {
        FourBits::lines(from, to);
        const Line fifth = line_at(from + 4 * kLineBytes), mask = Line{} + 16;
        to[0] = joined(up<4>(fifth), mask, to[0]);
        to[1] = joined(up<3>(fifth), mask, to[1]);
        to[2] = joined(up<2>(fifth), mask, to[2]);
        to[3] = joined(up<1>(fifth), mask, to[3]);
        to[4] = joined(fifth, mask, to[4]);
        to[5] = joined(down<1>(fifth), mask, to[5]);
        to[6] = joined(down<2>(fifth), mask, to[6]);
        to[7] = joined(down<3>(fifth), mask, to[7]);
    }
    static void lane(const uint8_t* from, int64_t lane, uint8_t* to) {
        FourBits::lane(from, lane, to);
        for (int k = 0; k < kGroup; ++k) to[k] |= (from[4 * kLineBytes + lane * 4 + k % 4] >> k / 4 & 1) << 4;
    }
};

struct SixBits {
    static constexpr int kBytes = 6 * kLineBytes;
    [[gnu::always_inline]] static void lines(const uint8_t* from, Line* to) {
        FourBits::lines(from, to);
        const Line mask = Line{} + 48;
        for (int i = 0; i < 2; ++i) {
            const Line upper = line_at(from + (4 + i) * kLineBytes);
            to[4 * i] = joined(up<4>(upper), mask, to[4 * i]);
            to[4 * i + 1] = joined(up<2>(upper), mask, to[4 * i + 1]);
            to[4 * i + 2] = joined(upper, mask, to[4 * i + 2]);
            to[4 * i + 3] = joined(down<2>(upper), mask, to[4 * i + 3]);
        }
    }
    static void lane(const uint8_t* from, int64_t lane, uint8_t* to) {
        FourBits::lane(from, lane, to);
        for (int k = 0; k < kGroup; ++k)
            to[k] |= (from[(4 + k / 16) * kLineBytes + lane * 4 + k % 4] >> (k / 4 % 4 * 2) & 3) << 4;
    }
};

struct EightBits {
    static constexpr int kBytes = 8 * kLineBytes;
    [[gnu::always_inline]] static void lines(const uint8_t* from, Line* to) {
        for (int l = 0; l < kLines; ++l) to[l] = line_at(from + l * kLineBytes);
    }
    static void lane(const uint8_t* from, int64_t lane, uint8_t* to) {
        for (int k = 0; k < kGroup; ++k) to[k] = from[k / 4 * kLineBytes + lane * 4 + k % 4];
    }
};

// Each has the groups, the floats and all bytes of a block, and is read for kWide outputs from `lane` on.

struct HalfScale {
    static constexpr int kGroups = 1, kNumbers = 1, kNumberBytes = 2, kBytes = 32;
    HalfScale(const uint8_t* from, int lane) : d(values_of_halves(from + 2 * lane)) {}
    Scales at(int) const { return {d, Values{}}; }
    Values d;
};

struct HalfMinimum {
    static constexpr int kGroups = 1, kNumbers = 2, kNumberBytes = 2, kBytes = 64;
    HalfMinimum(const uint8_t* from, int lane)
        : d(values_of_halves(from + 2 * lane)), m(values_of_halves(from + 32 + 2 * lane)) {}
    Scales at(int) const { return {d, m}; }
    Values d, m;
};

struct WholeMinima {
    static constexpr int kGroups = 8, kNumbers = 2, kNumberBytes = 2, kBytes = 32 + 32 + 128 + 128;
    WholeMinima(const uint8_t* from, int lane)
        : bytes(from + 64 + lane), d(values_of_halves(from + 2 * lane)), m(-values_of_halves(from + 32 + 2 * lane)) {}
    Scales at(int group) const {
        return {d * values_of_bytes<uint8_t>(bytes + 16 * group), m * values_of_bytes<uint8_t>(bytes + 128 + 16 * group)};
    }
    const uint8_t* bytes;
    Values d, m;
};

struct WholeSixteens {
    static constexpr int kGroups = 8, kNumbers = 1, kNumberBytes = 2, kBytes = 32 + 256;
    WholeSixteens(const uint8_t* from, int lane) : bytes(from + 32 + lane), d(values_of_halves(from + 2 * lane)) {}
    Scales at(int group) const {
        return {d * values_of_bytes<int8_t>(bytes + 32 * group), d * values_of_bytes<int8_t>(bytes + 32 * group + 16)};
    }
    const uint8_t* bytes;
    Values d;
};

struct WholeScale {
    static constexpr int kGroups = 8, kNumbers = 1, kNumberBytes = 2, kBytes = 32 + 128;
    WholeScale(const uint8_t* from, int lane) : bytes(from + 32 + lane), d(values_of_halves(from + 2 * lane)) {}
    Scales at(int group) const { return {d * values_of_bytes<int8_t>(bytes + 16 * group), Values{}}; }
    const uint8_t* bytes;
    Values d;
};

template <int groups>
struct FloatMinimum {
    static constexpr int kGroups = groups, kNumbers = 2, kNumberBytes = 4, kBytes = 128;
    FloatMinimum(const uint8_t* from, int lane)
        : d(values_at(from + 4 * lane)), m(values_at(from + 64 + 4 * lane)) {}
    Scales at(int) const { return {d, m}; }
    Values d, m;
};

template <int64_t type, typename Codes_, typename Scale_, Form form, int offset>
struct TypeOf {
    static constexpr int64_t kType = type;
    typedef Codes_ Codes;
    typedef Scale_ Scale;
    static constexpr Form kForm = form;
    static constexpr int kBits = offset;  // the offset is 1 << kBits, or none where this is 0

    static int64_t unit_codes(int64_t depth) { return depth / kGroup * Codes::kBytes; }
    static int64_t unit_scales(int64_t depth) { return depth / kGroup / Scale::kGroups * Scale::kBytes; }
};

template <int64_t type>
struct Typed;
template <>
struct Typed<kQ4_0> : TypeOf<kQ4_0, FourBits, HalfScale, kOffset, 3> {};
template <>
struct Typed<kQ4_1> : TypeOf<kQ4_1, FourBits, HalfMinimum, kMinimum, 0> {};
template <>
struct Typed<kQ5_0> : TypeOf<kQ5_0, FiveBits, HalfScale, kOffset, 4> {};
template <>
struct Typed<kQ5_1> : TypeOf<kQ5_1, FiveBits, HalfMinimum, kMinimum, 0> {};
template <>
struct Typed<kQ8_0> : TypeOf<kQ8_0, EightBits, HalfScale, kLarge, 7> {};
template <>
struct Typed<kIQ4_NL> : TypeOf<kIQ4_NL, Looked, HalfScale, kLarge, 7> {};
template <>
struct Typed<kQ4_K> : TypeOf<kQ4_K, FourBits, WholeMinima, kMinimum, 0> {};
template <>
struct Typed<kQ5_K> : TypeOf<kQ5_K, FiveBits, WholeMinima, kMinimum, 0> {};
template <>
struct Typed<kQ6_K> : TypeOf<kQ6_K, SixBits, WholeSixteens, kSixteens, 5> {};
template <>
struct Typed<kIQ4_XS> : TypeOf<kIQ4_XS, Looked, WholeScale, kLarge, 7> {};
template <>
struct Typed<kI4_32> : TypeOf<kI4_32, FourBits, FloatMinimum<1>, kMinimum, 0> {};
template <>
struct Typed<kI4_128> : TypeOf<kI4_128, FourBits, FloatMinimum<4>, kMinimum, 0> {};

// use(Typed<type>()) for a type that is known when it runs; one that does not exist is left out.
template <typename Use>
inline void with_type(int64_t type, Use use) {
    switch (type) {
        case kQ4_0: return use(Typed<kQ4_0>());
        case kQ4_1: return use(Typed<kQ4_1>());
        case kQ5_0: return use(Typed<kQ5_0>());
        case kQ5_1: return use(Typed<kQ5_1>());
        case kQ8_0: return use(Typed<kQ8_0>());
        case kIQ4_NL: return use(Typed<kIQ4_NL>());
        case kQ4_K: return use(Typed<kQ4_K>());
        case kQ5_K: return use(Typed<kQ5_K>());
        case kQ6_K: return use(Typed<kQ6_K>());
        case kIQ4_XS: return use(Typed<kIQ4_XS>());
        case kI4_32: return use(Typed<kI4_32>());
        case kI4_128: return use(Typed<kI4_128>());
    }
}

}  // namespace
