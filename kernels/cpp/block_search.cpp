// Scale and minimum of each group of 32 weights, for codes of a few bits: the least weighted squared error among
// candidates (kernels/quantized_linear/gguf_search.py, which computes the same without compiled code).

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "refusal.h"

namespace {

constexpr int kGroup = 32;
constexpr int kCandidates = 21;
constexpr float kLeast = 1e-20f;

struct Fit {
    float scale, low;
};

// Codes 0 to `most` of a group, as floats.
inline void round_codes(const float* numbers, Fit fit, float most, float* codes) {
    const float inverse = fit.scale == 0.0f ? 0.0f : 1.0f / fit.scale;
#pragma omp simd
    for (int k = 0; k < kGroup; ++k)
        codes[k] = std::min(std::max(std::nearbyint((numbers[k] - fit.low) * inverse), 0.0f), most);
}

inline float error_of(const float* numbers, const float* weights, const float* codes, Fit fit) {
    float error = 0.0f;
#pragma omp simd reduction(+ : error)
    for (int k = 0; k < kGroup; ++k) {
        const float off = codes[k] * fit.scale + fit.low - numbers[k];
        error += weights[k] * off * off;
    }
    return error;
}

// Weighted least squares of the numbers over their codes; a minimum above zero is zero.
inline Fit fitted(const float* numbers, const float* weights, const float* codes, float total, float mean) {
    float first = 0.0f, second = 0.0f, cross = 0.0f;
#pragma omp simd reduction(+ : first, second, cross)
    for (int k = 0; k < kGroup; ++k) {
        const float weighted = weights[k] * codes[k];
        first += weighted, second += weighted * codes[k], cross += weighted * numbers[k];
    }
    const float determinant = std::max(total * second - first * first, kLeast);
    const float low = (second * mean - first * cross) / determinant;
    if (low > 0.0f) return {cross / std::max(second, kLeast), 0.0f};
    return {(total * cross - first * mean) / determinant, low};
}

Fit search(const float* numbers, float most) {
    alignas(64) float weights[kGroup], codes[kGroup];
    float squares = 0.0f, low = 0.0f, high = numbers[0], total = 0.0f, mean = 0.0f;
#pragma omp simd reduction(+ : squares) reduction(min : low) reduction(max : high)
    for (int k = 0; k < kGroup; ++k) {
        squares += numbers[k] * numbers[k];
        low = std::min(low, numbers[k]), high = std::max(high, numbers[k]);
    }
    const float size = std::sqrt(squares / kGroup), spread = std::max(high - low, kLeast);
#pragma omp simd reduction(+ : total, mean)
    for (int k = 0; k < kGroup; ++k) {
        weights[k] = size + std::fabs(numbers[k]);
        total += weights[k], mean += weights[k] * numbers[k];
    }
    Fit best{spread / most, low};
    round_codes(numbers, best, most, codes);
    float least = error_of(numbers, weights, codes, best);
    for (int number = 0; number < kCandidates; ++number) {
        round_codes(numbers, {spread / (most - 1.0f + 0.1f * number), low}, most, codes);
        const Fit fit = fitted(numbers, weights, codes, total, mean);
        const float error = error_of(numbers, weights, codes, fit);
        if (error < least) least = error, best = fit;
    }
    return best;
}

}  // namespace

// numbers float32 [groups, 32]; scales, lows float32 [groups]; codes are 0 to `most`, which is 1 to 255.
extern "C" const troupe::Refusal* search_blocks(
    const float* numbers, int64_t groups, int64_t most, float* scales, float* lows, int64_t threads) {
    if (const troupe::Refusal* refusal = troupe::outside("most", 0, most, 1, 256)) return refusal;
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (threads > 1 && groups > 4096)
    for (int64_t group = 0; group < groups; ++group) {
        const Fit fit = search(numbers + group * kGroup, static_cast<float>(most));
        scales[group] = fit.scale, lows[group] = fit.low;
    }
    return nullptr;
}
