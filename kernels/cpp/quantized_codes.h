// Numbers in eight bits, and their decoding.

#pragma once

#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

typedef int8_t Chars __attribute__((vector_size(16)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

inline Bytes bytes_at(const void* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

// Bytes as whole numbers, and places in a table of 16. By the processor's own instructions where there are some, since
// compilers take vectors of different widths apart number by number.
#if defined(__AVX512F__)
inline Ints wide(Chars chars) { return (Ints)_mm512_cvtepi8_epi32((__m128i)chars); }
inline Ints wide(Bytes bytes) { return (Ints)_mm512_cvtepu8_epi32((__m128i)bytes); }
#elif defined(__AVX2__)
inline Ints joined(__m256i low, __m256i high) {
    Ints both;
    std::memcpy(&both, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&both) + sizeof low, &high, sizeof high);
    return both;
}
inline Ints wide(Chars chars) {
    const __m128i all = (__m128i)chars;
    return joined(_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)));
}
inline Ints wide(Bytes bytes) {
    const __m128i all = (__m128i)bytes;
    return joined(_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)));
}
#else
inline Ints wide(Chars chars) { return __builtin_convertvector(chars, Ints); }
inline Ints wide(Bytes bytes) { return __builtin_convertvector(bytes, Ints); }
#endif

// places: each below 16.
inline Chars looked_up(Bytes table, Bytes places) {
#if defined(__AVX2__)
    return (Chars)_mm_shuffle_epi8((__m128i)table, (__m128i)places);
#else
    return (Chars)__builtin_shuffle(table, places);
#endif
}

inline Floats floats_of(Chars chars) { return __builtin_convertvector(wide(chars), Floats); }

#if defined(__AVX512F__)
// As float16, which has one more bit of exponent, e4m3 is the number times 2^-8. The processor's own conversion takes
// the smallest numbers as fast as others, where a product of floats that small would take a hundred times as long.
inline Floats floats_of_fp8(Bytes bytes) {
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16((__m128i)bytes), 7);
    return (Floats)_mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)))) * 256.0f;
}
#else
// e4m3 has four bits of exponent where a float has eight: moved into place it is the number times 2^-120.
inline Floats floats_of_fp8(Bytes bytes) {
    const Ints codes = wide(bytes);
    const Ints bits = ((codes & 0x7f) << 20) | ((codes & 0x80) << 24);
    Floats value;
    std::memcpy(&value, &bits, sizeof value);
    return value * 1.329227995784916e36f;
}
#endif

#if defined(__AVX512F__)
// As the loops of `quantize` below, to the bit, for as many numbers as are whole vectors: how many.
inline int64_t largest_bits(const float* x, int64_t size, int32_t* top) {
    const __m512i sizes = _mm512_set1_epi32(0x7fffffff);
    __m512i first = _mm512_setzero_si512(), second = first;
    const int64_t whole = size / (2 * kLanes) * (2 * kLanes);
    for (int64_t i = 0; i < whole; i += 2 * kLanes) {
        first = _mm512_max_epi32(first, _mm512_and_si512(sizes, _mm512_loadu_si512(x + i)));
        second = _mm512_max_epi32(second, _mm512_and_si512(sizes, _mm512_loadu_si512(x + i + kLanes)));
    }
    *top = _mm512_reduce_max_epi32(_mm512_max_epi32(first, second));
    return whole;
}

// Division is slow. A multiplication by the inverse plus a correction gives exactly the same whole numbers, unless a
// number is so small or so large that parts of it get lost.
inline int64_t divided(const float* x, int64_t size, float by, int offset, uint8_t* to) {
    if (!(by > 1e-30f && by < 1e30f)) return 0;
    const __m512 divisor = _mm512_set1_ps(by), inverse = _mm512_set1_ps(1.0f / by), magic = _mm512_set1_ps(12582912.0f);
    const __m512i added = _mm512_set1_epi32(offset);
    const int64_t whole = size / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
        const __m512 number = _mm512_loadu_ps(x + i), near = _mm512_mul_ps(number, inverse);
        const __m512 quotient = _mm512_fmadd_ps(_mm512_fnmadd_ps(near, divisor, number), inverse, near);
        const __m512i bits = _mm512_add_epi32(_mm512_castps_si512(_mm512_add_ps(quotient, magic)), added);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(bits));
    }
    return whole;
}
#else
inline int64_t largest_bits(const float*, int64_t, int32_t*) { return 0; }
inline int64_t divided(const float*, int64_t, float, int, uint8_t*) { return 0; }
#endif

// A row in eight bits: x / s rounded to the nearest, ties to even, with s = max|x| / 127, which is given back; what is
// behind it, up to `padded`, is 0. `offset` is added to all.
inline float quantize(const float* x, int64_t size, uint8_t* to, int64_t padded, int offset) {
    int32_t top = 0;  // bits of floats without a sign are ordered as the floats are, and NaN is above all
    for (int64_t i = largest_bits(x, size, &top); i < size; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float scale;
    std::memcpy(&scale, &top, sizeof scale);
    scale /= 127.0f;
    const float by = scale > 0.0f ? scale : 1.0f;
    for (int64_t i = divided(x, size, by, offset, to); i < size; ++i) {
        const float shifted = x[i] / by + 12582912.0f;  // adding it rounds to a whole number in the low bits
        int32_t bits;
        std::memcpy(&bits, &shifted, sizeof bits);
        to[i] = static_cast<uint8_t>(bits + offset);
    }
    std::memset(to + size, offset, static_cast<size_t>(padded - size));
    return scale;
}

// The nearest e4m3, ties to even; beyond 448 that. NaN stays NaN.
inline uint8_t fp8_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return 0x7f;
    float size;
    std::memcpy(&size, &bits, sizeof size);
    if (size >= 448.0f) return static_cast<uint8_t>(sign | 0x7e);
    if (size < 0.015625f) {  // below the smallest exponent: multiples of 2^-9
        const float shifted = size * 512.0f + 12582912.0f;
        std::memcpy(&bits, &shifted, sizeof bits);
        return static_cast<uint8_t>(sign | (bits & 0x0f));
    }
    bits += 0x7ffff + (bits >> 20 & 1);
    return static_cast<uint8_t>(sign | ((bits >> 20) - (120 << 3)));
}

// The cache's form of one token and KV head, as in kernels/kv_quant: `width` numbers for `size` of them, each read as
// load(..) * scale(row). `exact_in_half`: each result of load(..) is a bfloat16 number, too.

struct PlainCell {
    typedef float Number;
    static constexpr bool scaled = false, exact_in_half = false;
    static int64_t width(int64_t size) { return size; }
    static Floats load(const float* from) { return ::load(from); }
    static float scale(const float*, int64_t) { return 1.0f; }
    static void write(float* to, const float* from, int64_t size) { std::memcpy(to, from, sizeof(float) * size); }
};

struct Int8Cell {
    typedef uint8_t Number;
    static constexpr bool scaled = true, exact_in_half = true;
    static int64_t width(int64_t size) { return size + static_cast<int64_t>(sizeof(float)); }
    static Floats load(const uint8_t* from) { return floats_of((Chars)bytes_at(from)); }
    static float scale(const uint8_t* row, int64_t size) {
        float value;
        std::memcpy(&value, row + size, sizeof value);
        return value;
    }
    static void write(uint8_t* to, const float* from, int64_t size) {
        const float value = quantize(from, size, to, size, 0);
        std::memcpy(to + size, &value, sizeof value);
    }
};

struct Fp8Cell {
    typedef uint8_t Number;
    static constexpr bool scaled = false, exact_in_half = true;
    static int64_t width(int64_t size) { return size; }
    static Floats load(const uint8_t* from) {
        const Bytes bytes = bytes_at(from);
        const Floats none = Floats{} + std::numeric_limits<float>::quiet_NaN();
        return wide(bytes & 0x7f) == 0x7f ? none : floats_of_fp8(bytes);
    }
    static float scale(const uint8_t*, int64_t) { return 1.0f; }
    static void write(uint8_t* to, const float* from, int64_t size) {
        for (int64_t i = 0; i < size; ++i) to[i] = fp8_of(from[i]);
    }
};

// A row as floats.
template <typename Cell>
inline void read_cell(float* to, const typename Cell::Number* row, int64_t size) {
    const float scale = Cell::scale(row, size);
    for (int64_t c = 0; c < size; c += kLanes) store(to + c, Cell::load(row + c) * scale);
}

}  // namespace
