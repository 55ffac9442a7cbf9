// Sampling: masks of guides, and the exponential race of `kernels/sampling/noise.py`.

#include <algorithm>
#include <cstdint>

#include "layer_parts.h"

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

// One row's race; -inf is never drawn.
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

// A row of logits, without what a mask of 32 tokens per word forbids.
struct Row {
    const float* logits;
    const int32_t* allowed;  // may be null
    int64_t vocab;

    Floats at(int64_t place) const {
        Floats values = Floats{} - kInfinity;
        if (place + kLanes <= vocab) values = load(logits + place);
        else std::memcpy(&values, logits + place, sizeof(float) * (vocab - place));
        if (allowed == nullptr) return values;
        const Ints kept = ((allowed[place / 32] >> (place % 32)) >> lanes()) & 1;
        return kept != 0 ? values : Floats{} - kInfinity;
    }
};

Words codes_at(const int32_t* codes, int64_t place, int64_t vocab) {
    Words some{};
    const int64_t count = vocab - place < kLanes ? vocab - place : kLanes;
    std::memcpy(&some, codes + place, sizeof(int32_t) * count);
    return some;
}

// The largest number; NaN where there is one.
float peak_of(const Row& row) {
    Floats most = Floats{} - kInfinity;
    Ints broken{};
    for (int64_t at = 0; at < row.vocab; at += kLanes) {
        const Floats values = row.at(at);
        most = values > most ? values : most;
        broken |= values != values;
    }
    return any(broken) ? std::numeric_limits<float>::quiet_NaN() : largest(most, -kInfinity);
}

// The first token with this logit.
int64_t find(const Row& row, float logit) {
    for (int64_t at = 0; at < row.vocab; at += kLanes) {
        const Ints equal = row.at(at) == logit;
        if (!any(equal)) continue;
        for (int lane = 0; lane < kLanes; ++lane)
            if (equal[lane]) return at + lane;
    }
    return 0;
}

// The key of a draw: SplitMix64's finaliser.
uint64_t key_of(int64_t stream, int64_t position) {
    uint64_t key = static_cast<uint64_t>(stream ^ position) + 0x9E3779B97F4A7C15u;
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
    key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
    return key ^ (key >> 31);
}

int64_t team_for(int64_t logits, int64_t threads) {
    const int64_t worth = logits / kLogitsPerThread + 1;
    return worth < threads ? worth : threads;
}

// Null where masks of so many words have a bit for every token, and are of rows of `rows`.
const Refusal* check_masks(const int64_t* masked, int64_t count, int64_t rows, int64_t words, int64_t vocab) {
    if (count == 0) return nullptr;
    if (const Refusal* refusal = any_outside("row of a mask", masked, count, rows)) return refusal;
    return outside("number of words of a mask", 0, words, (vocab + 31) / 32, std::numeric_limits<int64_t>::max());
}

}  // namespace

// One token of each row from softmax(logits).
//
// logits [rows, vocab]; keys [rows, 2]; codes [vocab]; tokens [rows] are written: 0 where nothing can be drawn.
extern "C" const Refusal* draw_tokens(
    const float* logits, int64_t stride, int64_t rows, int64_t vocab, const int32_t* keys, const int32_t* codes,
    int64_t* tokens, int64_t threads) {
    const int64_t team = team_for(rows * vocab, threads);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t i = 0; i < rows; ++i) {
        const Row row{logits + i * stride, nullptr, vocab};
        Race race{static_cast<uint32_t>(keys[2 * i]), static_cast<uint32_t>(keys[2 * i + 1])};
        for (int64_t at = 0; at < vocab; at += kLanes) race.run(row.at(at), codes_at(codes, at, vocab), at);
        tokens[i] = race.winner;
    }
    return nullptr;
}

void troupe::choose_part(const Choosing& given, const Team& team) {
    team.each(given.rows, [&](int64_t i) {
        Row row{given.logits + i * given.stride, nullptr, given.vocab};
        float peak = given.peaks[i] = peak_of(row);
        given.tokens[i] = -1;
        if (!std::isfinite(peak)) return;
        const int64_t* const guided_end = given.guided + given.num_guided;
        const int64_t* const mask = std::lower_bound(given.guided, guided_end, i);
        if (mask != guided_end && *mask == i) {
            row.allowed = given.bits + (mask - given.guided) * given.words;
            peak = peak_of(row);
            if (!std::isfinite(peak)) return;
        }
        const int64_t slot = given.slots[i];
        const float scale = given.scales[slot], floor = given.floors[slot];
        if (scale == 0.0f) {
            given.tokens[i] = find(row, peak);
            return;
        }
        const uint64_t key = key_of(given.streams[slot], given.positions[i]);
        Race race{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
        for (int64_t at = 0; at < given.vocab; at += kLanes) {
            const Floats scores = (row.at(at) - peak) * scale;
            race.run(scores < floor ? Floats{} - kInfinity : scores, codes_at(given.codes, at, given.vocab), at);
        }
        given.tokens[i] = race.winner;
    });
}

// Each row's next token: the likeliest where its scale is 0, else one from softmax((logits - largest) * scale), where
// that is no less than its floor.
//
// logits [rows, vocab]; slots [rows], where each row's options lie in streams, scales and floors [num_slots]; positions
// [rows]; codes [vocab]. Row guided[i], of `num_guided` that rise, has mask i of bits [num_guided, words]. tokens and peaks
// [rows] are written: -1 where logits, or those that a mask leaves, have no finite largest one, and the largest logit.
extern "C" const Refusal* choose_tokens(
    const float* logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t* slots, int64_t num_slots,
    const int64_t* streams, const float* scales, const float* floors, const int64_t* positions, const int32_t* codes, const int64_t* guided,
    int64_t num_guided, const int32_t* bits, int64_t words, int64_t* tokens, float* peaks, int64_t threads) {
    const Refusal* refusal = any_outside("slot of options", slots, rows, num_slots);
    if (!refusal) refusal = check_masks(guided, num_guided, rows, words, vocab);
    for (int64_t i = 1; !refusal && i < num_guided; ++i)
        refusal = outside("row of a mask", i, guided[i], guided[i - 1] + 1, rows);
    if (refusal) return refusal;
    const Team team(team_for(rows * vocab, threads));
    const Choosing given{logits, stride, rows, vocab, slots, streams, scales, floors, positions, codes,
                         guided, num_guided, bits, words, tokens, peaks};
#pragma omp parallel num_threads(static_cast<int>(team.threads())) if (team.threads() > 1)
    choose_part(given, team);
    return nullptr;
}

// Masks what is not allowed: of row places[i] of `logits` [rows, vocab] every token whose bit in row i of `bits` is not set.
extern "C" const Refusal* keep_bits(
    float* logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t* places, int64_t count,
    const int32_t* bits, int64_t words, int64_t threads) {
    if (const Refusal* refusal = check_masks(places, count, rows, words, vocab)) return refusal;
    const int64_t team = team_for(count * vocab, threads);
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t i = 0; i < count; ++i) {
        float* to = logits + places[i] * stride;
        const Row row{to, bits + i * words, vocab};
        int64_t at = 0;
        for (; at + kLanes <= vocab; at += kLanes) store(to + at, row.at(at));
        if (at == vocab) continue;
        const Floats last = row.at(at);
        std::memcpy(to + at, &last, sizeof(float) * (vocab - at));
    }
    return nullptr;
}
