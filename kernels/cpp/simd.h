// Vectors of 16 floats that the files of this folder share. Vector types of the compiler keep them independent of the
// instruction set: where registers are half as wide, it makes two instructions of one.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(64)));

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// Halves the lanes that each sum is spread over: lane i of the result adds two lanes of `a` or of `b`.
inline Floats fold(Floats a, Floats b) {
    return __builtin_shuffle(a, b, Ints{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}) +
           __builtin_shuffle(a, b, Ints{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
}

// The sums of 16 vectors, in order.
inline Floats sums(const Floats* v) {
    Floats eight[8], four[4];
    for (int i = 0; i < 8; ++i) eight[i] = fold(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < 4; ++i) four[i] = fold(eight[2 * i], eight[2 * i + 1]);
    return fold(fold(four[0], four[1]), fold(four[2], four[3]));
}

// The larger of neighbouring lanes of `a`, then of `b`: as `fold`. Where one of them is no number, the first of the two.
inline Floats fold_largest(Floats a, Floats b) {
    const Floats even = __builtin_shuffle(a, b, Ints{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30});
    const Floats odd = __builtin_shuffle(a, b, Ints{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
    return odd > even ? odd : even;
}

// The largest lane of each of 16 vectors, in order.
inline Floats largest_of_each(const Floats* v) {
    Floats eight[8], four[4];
    for (int i = 0; i < 8; ++i) eight[i] = fold_largest(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < 4; ++i) four[i] = fold_largest(eight[2 * i], eight[2 * i + 1]);
    return fold_largest(fold_largest(four[0], four[1]), fold_largest(four[2], four[3]));
}

inline float sum(Floats value) {
    Half low, high;
    std::memcpy(&low, &value, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
    low += high;
    Quarter a, b;
    std::memcpy(&a, &low, sizeof a);
    std::memcpy(&b, reinterpret_cast<const char*>(&low) + sizeof a, sizeof b);
    a += b;
    return (a[0] + a[2]) + (a[1] + a[3]);
}

inline Floats absolute(Floats x) { return x < 0.0f ? -x : x; }

// The largest of `start` and all lanes that are numbers.
inline float largest(Floats value, float start) {
    Half low, high;
    std::memcpy(&low, &value, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
    low = high > low ? high : low;
    Quarter a, b;
    std::memcpy(&a, &low, sizeof a);
    std::memcpy(&b, reinterpret_cast<const char*>(&low) + sizeof a, sizeof b);
    a = b > a ? b : a;
    for (int i = 0; i < 4; ++i) start = a[i] > start ? a[i] : start;
    return start;
}

// The numbers of the lanes.
inline Ints lanes() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// e^x for x <= 0 with a relative error near 1e-7; NaN stays NaN.
inline Floats exp_negative(Floats x) {
    const Floats floor = Floats{} - 87.0f;
#if defined(__AVX512F__)
    const Floats clamped = _mm512_max_ps(floor, x);  // of no number, the second
#else
    const Floats clamped = x < floor ? floor : x;
#endif
    const Floats magic = Floats{} + 12582912.0f;  // adding it rounds to a whole number in the low bits
    const Floats shifted = clamped * 1.44269504088896341f + magic;
    const Floats whole = shifted - magic;
    Floats r = clamped - whole * 0.693359375f;
    r = r + whole * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
    return _mm512_scalef_ps(p, whole);
#else
    Ints bits, exponent, base;
    std::memcpy(&bits, &p, sizeof bits);
    std::memcpy(&exponent, &shifted, sizeof exponent);
    std::memcpy(&base, &magic, sizeof base);
    bits += (exponent - base) << 23;
    std::memcpy(&p, &bits, sizeof p);
    return x == x ? p : x;
#endif
}

// 1 / (1 + e^-x).
inline Floats sigmoid(Floats x) {
    const Floats e = exp_negative(-absolute(x));
    return (x < 0.0f ? e : Floats{} + 1.0f) / (1.0f + e);
}

// kind 0 is SiLU, 1 is GELU by its tanh formula, where (1 + tanh(y)) / 2 is the sigmoid of 2y.
inline Floats activated(Floats x, int64_t kind) {
    return x * sigmoid(kind == 0 ? x : 1.5957691216057308f * (x + 0.044715f * x * x * x));
}

}  // namespace
