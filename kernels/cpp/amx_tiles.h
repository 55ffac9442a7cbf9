// Products of bfloat16 matrices with the processor's tiles, into float32. A number is one bfloat16, or, where float32
// should keep its 24 bits, the sum of three.
//
// A matrix is cut into tiles of 16 rows (left) or columns (right) times a depth of 32, each 1 KB in one piece. Words of
// a tile are two numbers of the depth: those 16 apart, so that two vectors of floats make one of words. Left and right
// do the same, so that what is multiplied are equals.

#pragma once

#include "amx.h"
#include "simd.h"

#if defined(TROUPE_AMX)

namespace {

constexpr int64_t kTileDepth = 32;
constexpr int64_t kTileSize = kLanes * kTileDepth;  // in numbers

inline Ints bits_of(Floats x) {
    Ints bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// The upper half of each number, which is a bfloat16.
inline Ints upper_half(Floats x) { return bits_of(x) & static_cast<int32_t>(0xffff0000); }

// The words of 16 pairs of bfloat16 numbers, each given as the upper half of a word.
inline Ints paired(Ints first, Ints second) {
    return (Ints)_mm512_srli_epi32((__m512i)first, 16) | (second & static_cast<int32_t>(0xffff0000));
}

// words [parts] = 16 pairs of numbers: one part is rounded to the nearest; three are cut off one by one, without error.
// NaN stays NaN (but for one with all bits set, which no arithmetic makes).
template <int parts>
inline void pair(Floats first, Floats second, Ints* words) {
    if constexpr (parts == 1) {
        words[0] = paired(bits_of(first) + 0x8000, bits_of(second) + 0x8000);
    } else {
        for (int p = 0; p < parts; ++p) {
            words[p] = paired(bits_of(first), bits_of(second));
            first -= (Floats)upper_half(first);
            second -= (Floats)upper_half(second);
        }
    }
}

// to [16, 16] = the transpose of 16 rows of 16 words, or of floats.
template <typename Vector>
inline void transpose(const Vector* rows, void* to) {
    const __m512i* const r = reinterpret_cast<const __m512i*>(rows);
    __m512i* const out = static_cast<__m512i*>(to);
    __m512i a[16], b[16];
    for (int i = 0; i < 8; ++i) {
        a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
        a[i + 4] = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
        a[i + 8] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
        a[i + 12] = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        out[i] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88);
        out[i + 8] = _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd);
    }
}

// One side of a product: 16 rows (or columns) are `apart` numbers from the next ones, a part is `part` numbers from the
// next one. Tiles of the depth follow each other.
struct Operand {
    const uint16_t* data;
    int64_t apart, part;
};

// out, tiles of [16 rows, 16 columns], = or, if `adds`, += left times right. Tiles below each other are in one piece,
// those beside each other `out_apart` floats behind.
template <int parts, int rows, int columns>
inline void multiply(Operand left, Operand right, int64_t steps, bool adds, float* out, int64_t out_apart) {
    constexpr int64_t line = 64;
    asm volatile("" : : : "memory");  // compilers do not know that tiles read it
    if (adds) {
        _tile_loadd(0, out, line);
        if constexpr (rows > 1) _tile_loadd(1, out + 256, line);
        if constexpr (columns > 1) _tile_loadd(2, out + out_apart, line);
        if constexpr (rows > 1 && columns > 1) _tile_loadd(3, out + out_apart + 256, line);
    } else {
        _tile_zero(0);
        if constexpr (rows > 1) _tile_zero(1);
        if constexpr (columns > 1) _tile_zero(2);
        if constexpr (rows > 1 && columns > 1) _tile_zero(3);
    }
    // The omitted products are below 24 bits. A part that is used again is not loaded again.
    constexpr int kLeft[] = {0, 0, 1, 1, 0, 2}, kRight[] = {2, 1, 1, 0, 0, 0}, products = parts == 1 ? 1 : 6;
    for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 6
        for (int i = 0; i < products; ++i) {
            const int l = parts == 1 ? 0 : kLeft[i], r = parts == 1 ? 0 : kRight[i];
            const uint16_t* a = left.data + l * left.part + step * kTileSize;
            const uint16_t* b = right.data + r * right.part + step * kTileSize;
            if (i == 0 || l != kLeft[i - 1]) {
                _tile_loadd(4, a, line);
                if constexpr (rows > 1) _tile_loadd(5, a + left.apart, line);
            }
            if (i == 0 || r != kRight[i - 1]) {
                _tile_loadd(6, b, line);
                if constexpr (columns > 1) _tile_loadd(7, b + right.apart, line);
            }
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (rows > 1) _tile_dpbf16ps(1, 5, 6);
            if constexpr (columns > 1) _tile_dpbf16ps(2, 4, 7);
            if constexpr (rows > 1 && columns > 1) _tile_dpbf16ps(3, 5, 7);
        }
    _tile_stored(0, out, line);
    if constexpr (rows > 1) _tile_stored(1, out + 256, line);
    if constexpr (columns > 1) _tile_stored(2, out + out_apart, line);
    if constexpr (rows > 1 && columns > 1) _tile_stored(3, out + out_apart + 256, line);
}

}  // namespace

#endif
