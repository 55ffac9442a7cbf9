// From the blocks of GGUF files to the layout of products (block_types.h), and back to rows of floats. The order of bits
// in a file's blocks is ggml's.

#include "block_types.h"
#include "layer_parts.h"

namespace {

// A block of one output: codes without a sign, and what its scales are made of. numbers: d, and dmin or m, as they are
// stored; bytes: the scales and then the minima.
struct Unpacked {
    uint8_t codes[256];
    uint8_t numbers[2][4];
    uint8_t bytes[16];

    void take_half(const uint8_t* from) { std::memcpy(numbers[0], from, 2); }
    void take_halves(const uint8_t* from) { std::memcpy(numbers[0], from, 2), std::memcpy(numbers[1], from + 2, 2); }
};

uint16_t half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, sizeof half);
    return half;
}

// 16 bytes whose low halves come first.
void unpack_nibbles(const uint8_t* from, int64_t run, uint8_t* to) {
    for (int64_t i = 0; i < run; ++i) to[i] = from[i] & 15, to[run + i] = from[i] >> 4;
}

void unpack_fifth_bits(const uint8_t* from, uint8_t* to) {
    for (int k = 0; k < 32; ++k) to[k] |= (from[k / 8] >> k % 8 & 1) << 4;
}

// Six bits each of eight scales and eight minima, in 12 bytes.
void unpack_minima(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < 4; ++i) {
        to[i] = from[i] & 63, to[8 + i] = from[4 + i] & 63;
        to[4 + i] = (from[8 + i] & 15) | from[i] >> 6 << 4;
        to[12 + i] = from[8 + i] >> 4 | from[4 + i] >> 6 << 4;
    }
}

template <int64_t type>
struct Stored;  // kBytes of a block in the file

template <>
struct Stored<kQ4_0> {
    static constexpr int kBytes = 18;
    static void unpack(const uint8_t* from, Unpacked& to) {
        to.take_half(from);
        unpack_nibbles(from + 2, 16, to.codes);
    }
};
template <>
struct Stored<kIQ4_NL> : Stored<kQ4_0> {};
template <>
struct Stored<kQ4_1> {
    static constexpr int kBytes = 20;
    static void unpack(const uint8_t* from, Unpacked& to) {
        to.take_halves(from);
        unpack_nibbles(from + 4, 16, to.codes);
    }
};
template <>
struct Stored<kQ5_0> {
    static constexpr int kBytes = 22;
    static void unpack(const uint8_t* from, Unpacked& to) {
        to.take_half(from);
        unpack_nibbles(from + 6, 16, to.codes);
        unpack_fifth_bits(from + 2, to.codes);
    }
};
template <>
struct Stored<kQ5_1> {
    static constexpr int kBytes = 24;
    static void unpack(const uint8_t* from, Unpacked& to) {
        to.take_halves(from);
        unpack_nibbles(from + 8, 16, to.codes);
        unpack_fifth_bits(from + 4, to.codes);
    }
};
template <>
struct Stored<kQ8_0> {
    static constexpr int kBytes = 34;
    static void unpack(const uint8_t* from, Unpacked& to) {
        to.take_half(from);
        for (int k = 0; k < 32; ++k) to.codes[k] = from[2 + k] ^ 0x80;
    }
};
template <>
struct Stored<kQ4_K> {
    static constexpr int kBytes = 144;
    static void unpack(const uint8_t* from, Unpacked& to) {
        to.take_halves(from);
        unpack_minima(from + 4, to.bytes);
        for (int run = 0; run < 4; ++run) unpack_nibbles(from + 16 + 32 * run, 32, to.codes + 64 * run);
    }
};
template <>
struct Stored<kQ5_K> {
    static constexpr int kBytes = 176;
    static void unpack(const uint8_t* from, Unpacked& to) {
        to.take_halves(from);
        unpack_minima(from + 4, to.bytes);
        for (int run = 0; run < 4; ++run) unpack_nibbles(from + 48 + 32 * run, 32, to.codes + 64 * run);
        for (int k = 0; k < 256; ++k) to.codes[k] |= (from[16 + k % 32] >> k / 32 & 1) << 4;
    }
};
template <>
struct Stored<kQ6_K> {
    static constexpr int kBytes = 210;
    static void unpack(const uint8_t* from, Unpacked& to) {
        to.take_half(from + 208);
        std::memcpy(to.bytes, from + 192, 16);
        for (int run = 0; run < 2; ++run) unpack_nibbles(from + 64 * run, 64, to.codes + 128 * run);
        for (int k = 0; k < 256; ++k) to.codes[k] |= (from[128 + k / 128 * 32 + k % 32] >> k % 128 / 32 * 2 & 3) << 4;
    }
};
template <>
struct Stored<kIQ4_XS> {
    static constexpr int kBytes = 136;
    static void unpack(const uint8_t* from, Unpacked& to) {
        to.take_half(from);
        const uint16_t upper = half_at(from + 2);
        for (int i = 0; i < 8; ++i)
            to.bytes[i] = static_cast<uint8_t>(((from[4 + i / 2] >> i % 2 * 4 & 15) | (upper >> 2 * i & 3) << 4) - 32);
        for (int run = 0; run < 8; ++run) unpack_nibbles(from + 8 + 16 * run, 16, to.codes + 32 * run);
    }
};

// A scale and a minimum as floats of 32 bits, and codes whose even input has the low half of a byte.
template <int groups>
struct StoredInt4 {
    static constexpr int kBytes = 8 + 16 * groups;
    static void unpack(const uint8_t* from, Unpacked& to) {
        std::memcpy(to.numbers, from, 8);
        for (int k = 0; k < kGroup * groups; ++k) to.codes[k] = from[8 + k / 2] >> k % 2 * 4 & 15;
    }
};
template <>
struct Stored<kI4_32> : StoredInt4<1> {};
template <>
struct Stored<kI4_128> : StoredInt4<4> {};

// Adds an output's codes of a group to its lines; these were zeros.
void put_codes(FourBits, const uint8_t* codes, int64_t lane, uint8_t* to) {
    for (int k = 0; k < kGroup; ++k)
        to[k / 8 * kLineBytes + lane * 4 + k % 4] |= static_cast<uint8_t>((codes[k] & 15) << k / 4 % 2 * 4);
}
void put_codes(FiveBits, const uint8_t* codes, int64_t lane, uint8_t* to) {
    put_codes(FourBits(), codes, lane, to);
    for (int k = 0; k < kGroup; ++k)
        to[4 * kLineBytes + lane * 4 + k % 4] |= static_cast<uint8_t>((codes[k] >> 4) << k / 4);
}
void put_codes(SixBits, const uint8_t* codes, int64_t lane, uint8_t* to) {
    put_codes(FourBits(), codes, lane, to);
    for (int k = 0; k < kGroup; ++k)
        to[(4 + k / 16) * kLineBytes + lane * 4 + k % 4] |= static_cast<uint8_t>((codes[k] >> 4) << k / 4 % 4 * 2);
}
void put_codes(EightBits, const uint8_t* codes, int64_t lane, uint8_t* to) {
    for (int k = 0; k < kGroup; ++k) to[k / 4 * kLineBytes + lane * 4 + k % 4] = codes[k];
}

template <typename Type>
void pack_unit(const uint8_t* data, int64_t rows, int64_t depth, uint8_t* codes, uint8_t* scales) {
    typedef typename Type::Codes Codes;
    typedef typename Type::Scale Scale;
    typedef Stored<Type::kType> File;
    constexpr int64_t groups = Scale::kGroups, numbers = Scale::kNumbers, size = Scale::kNumberBytes;
    constexpr int64_t bytes = Scale::kBytes / kLanes - size * numbers;  // of each output
    const int64_t blocks = depth / kGroup / groups;
    std::memset(codes, 0, static_cast<size_t>(Type::unit_codes(depth)));
    std::memset(scales, 0, static_cast<size_t>(Type::unit_scales(depth)));
    Unpacked block;
    for (int64_t b = 0; b < blocks; ++b, scales += Scale::kBytes, codes += groups * Codes::kBytes) {
        for (int64_t lane = 0; lane < rows; ++lane) {
            File::unpack(data + (lane * blocks + b) * File::kBytes, block);
            for (int64_t g = 0; g < groups; ++g)
                put_codes(Codes(), block.codes + g * kGroup, lane, codes + g * Codes::kBytes);
            for (int64_t i = 0; i < numbers; ++i)
                std::memcpy(scales + size * (kLanes * i + lane), block.numbers[i], size);
            for (int64_t i = 0; i < bytes; ++i) scales[kLanes * (size * numbers + i) + lane] = block.bytes[i];
        }
    }
}

template <typename Type>
void pack_units(const uint8_t* data, int64_t outs, int64_t depth, uint8_t* codes, uint8_t* scales, int64_t threads) {
    const int64_t units = (outs + kLanes - 1) / kLanes;
    const int64_t row = depth / kGroup / Type::Scale::kGroups * Stored<Type::kType>::kBytes;
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (threads > 1)
    for (int64_t unit = 0; unit < units; ++unit)
        pack_unit<Type>(data + unit * kLanes * row, std::min<int64_t>(kLanes, outs - unit * kLanes), depth,
                        codes + unit * Type::unit_codes(depth), scales + unit * Type::unit_scales(depth));
}

template <typename Type>
void unpack_row(const uint8_t* codes, const uint8_t* scales, int64_t lane, int64_t depth, float* to) {
    typedef typename Type::Codes Codes;
    typedef typename Type::Scale Scale;
    constexpr int offset = Type::kBits ? 1 << Type::kBits : 0;
    const int from = static_cast<int>(lane / kWide * kWide), place = static_cast<int>(lane % kWide);
    for (int64_t group = 0; group < depth / kGroup; ++group, codes += Codes::kBytes, to += kGroup) {
        const Scale read(scales + group / Scale::kGroups * Scale::kBytes, from);
        const Scales found = read.at(static_cast<int>(group % Scale::kGroups));
        const float first = found.scale[place], other = found.other[place];
        uint8_t numbers[kGroup];
        Codes::lane(codes, lane, numbers);
        for (int k = 0; k < kGroup; ++k) {
            const float scale = Type::kForm == kSixteens && k >= kGroup / 2 ? other : first;
            to[k] = static_cast<float>(numbers[k] - offset) * scale;
        }
        if (Type::kForm == kMinimum)
            for (int k = 0; k < kGroup; ++k) to[k] += other;
    }
}

}  // namespace

void troupe::unpack_block_row(const BlockWeight& weight, int64_t row, float* to) {
    const int64_t unit = row / kLanes, depth = weight.depth;
    int64_t number = 0;
    while (unit >= weight.parts[number].first + weight.parts[number].units) ++number;
    const BlockPart& part = weight.parts[number];
    with_type(part.type, [&](auto type) {
        typedef decltype(type) Type;
        unpack_row<Type>(part.codes + (unit - part.first) * Type::unit_codes(depth),
                         part.scales + (unit - part.first) * Type::unit_scales(depth), row % kLanes, depth, to);
    });
}

// out [count, depth] = the rows of these numbers.
extern "C" const Refusal* block_rows(const BlockWeight* weight, const int64_t* rows, int64_t count, float* out,
                                     int64_t threads) {
    if (const Refusal* refusal = any_outside("row", rows, count, weight->outs)) return refusal;
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (threads > 1 && count > 1)
    for (int64_t i = 0; i < count; ++i) unpack_block_row(*weight, rows[i], out + i * weight->depth);
    return nullptr;
}

// data: the blocks of `outs` rows of `depth` weights, one after the other; codes and scales have whole units.
extern "C" const Refusal* block_pack(int64_t type, const uint8_t* data, int64_t outs, int64_t depth, uint8_t* codes,
                                     uint8_t* scales, int64_t threads) {
    if (const Refusal* refusal = outside("type", 0, type, 0, kBlockTypes)) return refusal;
    with_type(type, [&](auto found) { pack_units<decltype(found)>(data, outs, depth, codes, scales, threads); });
    return nullptr;
}
