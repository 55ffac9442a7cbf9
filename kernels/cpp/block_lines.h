// Lines of codes and their products with inputs in eight bits. A line is four inputs of each of 16 outputs, 64 bytes,
// and is read by as many outputs at a time as a register takes.

#pragma once

#include "quantized_codes.h"

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
typedef uint8_t Line __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(64)));
typedef Floats Values;
typedef Ints Sums;
#elif defined(__AVX2__)
typedef uint8_t Line __attribute__((vector_size(32)));
typedef uint16_t Words __attribute__((vector_size(32)));
typedef Half Values;
typedef int32_t Sums __attribute__((vector_size(32)));
#else
typedef uint8_t Line __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(64)));
typedef Floats Values;
typedef Ints Sums;
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int64_t kTallest = 16;  // rows of a tile, as many as there are registers for
#elif defined(__AVX2__)
constexpr int64_t kTallest = 8;
#else
constexpr int64_t kTallest = 1;
#endif
constexpr int kWide = sizeof(Values) / sizeof(float);  // outputs of a register
constexpr int kGroup = 32;                             // inputs that share a scale
constexpr int kLines = 8;                              // of a group
constexpr int kLineBytes = 64;

inline Line line_at(const uint8_t* from) {
    Line line;
    std::memcpy(&line, from, sizeof line);
    return line;
}

inline Values values_at(const void* from) {
    Values values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline void store_values(float* to, Values values) { std::memcpy(to, &values, sizeof values); }

// Shifts of bytes by a constant, whose bits beyond a mask come from the neighbour.
template <int bits>
inline Line up(Line line) { return (Line)((Words)line << bits); }
template <int bits>
inline Line down(Line line) { return (Line)((Words)line >> bits); }

// (bits & mask) | line.
inline Line joined(Line bits, Line mask, Line line) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Line)_mm512_ternarylogic_epi32((__m512i)bits, (__m512i)mask, (__m512i)line, 0xea);
#else
    return (bits & mask) | line;
#endif
}

// places: each below 16.
inline Line looked_up_line(Bytes table, Line places) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Line)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)places);
#elif defined(__AVX2__)
    return (Line)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), (__m256i)places);
#else
    for (size_t i = 0; i < sizeof places; ++i) places[i] = table[places[i]];
    return places;
#endif
}

inline Values fused(Values a, Values b, Values c) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Values)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Values)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline float float_of_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, size = half & 0x7fff;
    uint32_t bits = (size << 13) + (112u << 23);
    float value;
    if (size >= 0x7c00) bits += 112u << 23;  // infinite, or no number
    std::memcpy(&value, &bits, sizeof value);
    if (size < 0x0400) value = static_cast<float>(size) * 5.9604644775390625e-8f;  // multiples of 2^-24
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline Values values_of_halves(const uint8_t* from) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Values)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Values)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Values values;
    for (int i = 0; i < kWide; ++i) {
        uint16_t half;
        std::memcpy(&half, from + 2 * i, sizeof half);
        values[i] = float_of_half(half);
    }
    return values;
#endif
}

template <typename Byte>
inline Values values_of_bytes(const uint8_t* from) {
    typedef Byte Some __attribute__((vector_size(kWide)));
    Some some;
    std::memcpy(&some, from, sizeof some);
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    const __m128i bytes = (__m128i)some;
    return (Values)_mm512_cvtepi32_ps(Byte(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    __m128i bytes = _mm_setzero_si128();
    std::memcpy(&bytes, &some, sizeof some);
    return (Values)_mm256_cvtepi32_ps(Byte(-1) < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    Values values;
    for (int i = 0; i < kWide; ++i) values[i] = static_cast<float>(some[i]);
    return values;
#endif
}

#if defined(__AVX2__) && !(defined(__AVX512VNNI__) && defined(__AVX512BW__)) && !defined(__AVXVNNI__)
constexpr bool kPairs = true;  // products of two inputs are added in 16 bits, which codes of eight bits do not fit
#else
constexpr bool kPairs = false;
#endif

// sum + the line times four inputs. `large`: codes of eight bits around 128; with kPairs that is taken off here.
template <bool large>
[[gnu::always_inline]] inline Sums dot(Sums sum, Line line, const int8_t* x) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return (Sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)line, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    const __m256i inputs = _mm256_set1_epi32(four);
#if defined(__AVXVNNI__)
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)line, inputs);
#else
    __m256i pairs;
    if (large) {
        const __m256i codes = _mm256_xor_si256((__m256i)line, _mm256_set1_epi8(static_cast<char>(0x80)));
        pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
    } else {
        pairs = _mm256_maddubs_epi16((__m256i)line, inputs);
    }
    return (Sums)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
#else
    uint8_t codes[sizeof line];
    int32_t sums[kWide];
    std::memcpy(codes, &line, sizeof codes);
    std::memcpy(sums, &sum, sizeof sums);
    for (int lane = 0; lane < kWide; ++lane)
        for (int k = 0; k < 4; ++k) sums[lane] += codes[4 * lane + k] * x[k];
    std::memcpy(&sum, sums, sizeof sum);
    return sum;
#endif
}

}  // namespace
