// Sixteen floats in vectors as wide as the processor's registers. Compilers keep wider vectors in memory: a loop over
// them spends most of its time with loads and stores.

#pragma once

#include "quantized_codes.h"

namespace {

#if defined(__AVX512F__)
typedef Floats Register;
#else
typedef Half Register;
#endif
constexpr int kRegisterLanes = sizeof(Register) / sizeof(float);
constexpr int kRegisters = kLanes / kRegisterLanes;  // of sixteen floats

inline Register load_register(const float* from) {
    Register value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store_register(float* to, Register value) { std::memcpy(to, &value, sizeof value); }

// a * b + c, rounded once where the processor can. Said by hand: compilers choose between one and two roundings by what
// is around.
inline Register multiply_add(Register a, Register b, Register c) {
#if defined(__AVX512F__)
    return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// The first `count` lanes; zeros behind them.
inline Register load_lanes(const float* from, int64_t count) {
    Register value{};
    std::memcpy(&value, from, static_cast<size_t>(count) * sizeof(float));
    return value;
}

inline void store_lanes(float* to, Register value, int64_t count) {
    std::memcpy(to, &value, static_cast<size_t>(count) * sizeof(float));
}

// The sum of a register's lanes, each with the one half of them behind it.
inline float sum_register(Register value) {
    float lanes[kRegisterLanes];
    store_register(lanes, value);
    for (int half = kRegisterLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
}

#if defined(__AVX512F__)
inline void registers_of(Chars chars, Register* to) { to[0] = floats_of(chars); }
inline void registers_of_fp8(Bytes bytes, Register* to) { to[0] = floats_of_fp8(bytes); }
#elif defined(__AVX2__)
inline void registers_of(Chars chars, Register* to) {
    const __m128i all = (__m128i)chars;
    to[0] = (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all));
    to[1] = (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)));
}

// As `floats_of_fp8` without AVX-512.
inline Register register_of_fp8(__m128i bytes) {
    const __m256i codes = _mm256_cvtepu8_epi32(bytes);
    const __m256i size = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x7f)), 20);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x80)), 24);
    return (Register)_mm256_castsi256_ps(_mm256_or_si256(size, sign)) * 1.329227995784916e36f;
}
inline void registers_of_fp8(Bytes bytes, Register* to) {
    to[0] = register_of_fp8((__m128i)bytes);
    to[1] = register_of_fp8(_mm_srli_si128((__m128i)bytes, 8));
}
#else
inline void registers_of(Chars chars, Register* to) {
    const Floats value = floats_of(chars);
    std::memcpy(to, &value, sizeof value);
}
inline void registers_of_fp8(Bytes bytes, Register* to) {
    const Floats value = floats_of_fp8(bytes);
    std::memcpy(to, &value, sizeof value);
}
#endif

}  // namespace
