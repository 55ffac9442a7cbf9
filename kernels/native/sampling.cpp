// Sampling: masks of guides, and the exponential race of `kernels/sampling/noise.py`.

#include <cstdint>

#include "simd.h"

namespace {

typedef uint32_t Words __attribute__((vector_size(64)));

constexpr uint32_t kMultiply1 = 0xED5AD4BBu, kMultiply2 = 0xAC4C1B51u, kMultiply3 = 0x31848BABu;
constexpr float kUnit = 4.656612595521636e-10f;  // 2^-31 (1 - 2^-24)
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kLogitsPerThread = 1 << 14;  // fewer are not worth another one

// 31 random bits of each token.
inline Ints noise(Words codes, uint32_t first, uint32_t second) {
    Words word = codes ^ first;
    word = (word ^ (word >> 17)) * kMultiply1;
    word = ((word ^ (word >> 11)) + second) * kMultiply2;
    word = (word ^ (word >> 15)) * kMultiply3;
    return reinterpret_cast<Ints>((word ^ (word >> 14)) & 0x7FFFFFFFu);
}

inline bool any(Ints lanes) {
    uint64_t words[8], all = 0;
    std::memcpy(words, &lanes, sizeof words);
    for (uint64_t word : words) all |= word;
    return all != 0;
}

// One row's race. `Score` makes a logit what its distribution is the softmax of, -inf for what must not be drawn.
struct Race {
    uint32_t first, second;
    float best = -kInfinity;
    int64_t winner = 0;

    // Tokens `at` and after it. A token's time E = -log(1 - u) is no less than u, and it wins if E < exp(score - best):
    // logarithms are taken only where u says that it may.
    void run(Floats scores, Words codes, int64_t at) {
        const Ints bits = noise(codes, first, second);
        const Floats uniform = (__builtin_convertvector(bits, Floats) + 0.5f) * kUnit;
        const Floats ahead = scores - best;
        const Floats most = exp_negative(ahead < 0.0f ? ahead : Floats{}) * 1.0001f;
        const Ints may = (uniform < most) & (scores > -kInfinity);
        if (!any(may)) return;
        for (int lane = 0; lane < kLanes; ++lane) {
            if (!may[lane]) continue;
            const float score = scores[lane] - std::log(-std::log1p(-uniform[lane]));
            if (score > best) best = score, winner = at + lane;
        }
    }
};

}  // namespace

// One token of each row from softmax((logits - peak) * scale), where that is no less than `floor`.
//
// logits [rows, vocab]; peaks, scales, floors [rows], each of the latter may be null: 0, 1 and -inf; keys [rows, 2];
// codes [vocab]; tokens [rows] are written: 0 where nothing can be drawn.
extern "C" void draw_tokens(
    const float* logits, int64_t stride, int64_t rows, int64_t vocab, const float* peaks, const float* scales,
    const float* floors, const int32_t* keys, const int32_t* codes, int64_t* tokens, int64_t threads) {
    const int64_t worth = rows * vocab / kLogitsPerThread + 1;
    const int64_t team = worth < threads ? worth : threads;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t row = 0; row < rows; ++row) {
        const float* from = logits + row * stride;
        const float peak = peaks ? peaks[row] : 0.0f, scale = scales ? scales[row] : 1.0f;
        const float floor = floors ? floors[row] : -kInfinity;
        Race race{static_cast<uint32_t>(keys[2 * row]), static_cast<uint32_t>(keys[2 * row + 1])};
        const auto scored = [&](Floats values) {
            const Floats scores = (values - peak) * scale;
            return scores < floor ? Floats{} - kInfinity : scores;
        };
        int64_t at = 0;
        for (; at + kLanes <= vocab; at += kLanes) {
            Words some;
            std::memcpy(&some, codes + at, sizeof some);
            race.run(scored(load(from + at)), some, at);
        }
        if (at < vocab) {
            Floats last = Floats{} - kInfinity;
            Words some{};
            std::memcpy(&last, from + at, sizeof(float) * (vocab - at));
            std::memcpy(&some, codes + at, sizeof(int32_t) * (vocab - at));
            race.run(scored(last), some, at);
        }
        tokens[row] = race.winner;
    }
}

// Masks what is not allowed: of row places[i] of `logits` every token whose bit in row i of `bits` is not set.
extern "C" void keep_bits(
    float* logits, int64_t stride, int64_t vocab, const int64_t* places, int64_t count, const int32_t* bits,
    int64_t words, int64_t threads) {
    const int64_t worth = count * vocab / kLogitsPerThread + 1;
    const int64_t team = worth < threads ? worth : threads;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t i = 0; i < count; ++i) {
        float* row = logits + places[i] * stride;
        const int32_t* allowed = bits + i * words;
        int64_t at = 0;
        for (; at + kLanes <= vocab; at += kLanes) {
            const Ints kept = ((allowed[at / 32] >> (at % 32)) >> lanes()) & 1;
            store(row + at, kept != 0 ? load(row + at) : Floats{} - kInfinity);
        }
        for (; at < vocab; ++at)
            if (!((allowed[at / 32] >> (at % 32)) & 1)) row[at] = -kInfinity;
    }
}
