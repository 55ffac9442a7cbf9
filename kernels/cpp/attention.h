// Attention of one query token or a few, straight from the blocks that their keys and values lie in.

#pragma once

#include <algorithm>

#include "quantized_codes.h"
#include "layer_parts.h"

namespace {

constexpr int kMaxChunks = 16;  // head_dim up to 256
const float kNone = -std::numeric_limits<float>::infinity();

// The rule for scores: times `scale`, then `softcap` * tanh(score / softcap) if softcap is above 0; `sinks`, one per
// head or none, are scores of keys without a value.
struct Scores {
    float scale, softcap;
    const float* sinks;
};

inline Floats cap(Floats x, float softcap) {
    const Floats e = exp_negative(-2.0f * absolute(x / softcap));
    const Floats t = softcap * ((1.0f - e) / (1.0f + e));
    return x < 0.0f ? -t : t;
}

template <typename Cell>
struct Cache {
    typename Cell::Number* key;    // [blocks, kv_heads, block_size, width]
    typename Cell::Number* value;  // the same
    int64_t kv_heads, block_size, head_dim, width;

    int64_t at(const int32_t* table, int64_t kv_head, int64_t position) const {
        const uint32_t block = static_cast<uint32_t>(position) / static_cast<uint32_t>(block_size);
        return ((table[block] * kv_heads + kv_head) * block_size + position - block * block_size) * width;
    }
};

// total [heads, 16 * columns] of vectors += scores [heads, kLanes] times `count` values, for `columns` vectors at once, so
// that there are enough sums under way to hide how long an addition takes.
template <typename Cell, int heads, int columns>
inline void add_values(const float (*scores)[kLanes], const typename Cell::Number* value, int64_t width, int count,
                       Floats (*total)[kMaxChunks], int first) {
    Floats part[heads][columns];
    for (int g = 0; g < heads; ++g)
        for (int c = 0; c < columns; ++c) part[g][c] = total[g][first + c];
    for (int t = 0; t < count; ++t) {
        const typename Cell::Number* from = value + t * width + first * kLanes;
        for (int c = 0; c < columns; ++c) {
            const Floats v = Cell::load(from + c * kLanes);
            for (int g = 0; g < heads; ++g) part[g][c] += scores[g][t] * v;
        }
    }
    for (int g = 0; g < heads; ++g)
        for (int c = 0; c < columns; ++c) total[g][first + c] = part[g][c];
}

// From `position`, at or behind the base of a tree and before the last key that is seen, to the next run of keys that are
// seen; returns where that ends.
inline int64_t next_run(const Tree& tree, int64_t& position) {
    uint64_t rest = tree.seen >> (position - tree.base);
    const int skipped = __builtin_ctzll(rest);
    position += skipped;
    rest = ~(rest >> skipped);
    return position + (rest ? __builtin_ctzll(rest) : 64);
}

constexpr int kMostHeads = 8;

// Query heads that share one KV head, of one token or of several: each sees the keys before its `end`.
struct Queries {
    const float* from[kMostHeads];
    float* to[kMostHeads];
    int64_t end[kMostHeads], head[kMostHeads];
    int count = 0;

    void add(const float* query, float* out, int64_t last, int64_t of_head) {
        from[count] = query;
        to[count] = out;
        end[count] = last;
        head[count++] = of_head;
    }
};

// `heads` queries, of which the last one sees the most. Template: accumulators stay in registers. tree: null is none. A
// query's result is, to the bit, what it is alone, if all values before the last `end` are finite.
template <typename Cell, int heads>
void attend(const Queries& queries, const Cache<Cell>& cache, int64_t kv_head, const int32_t* table, int64_t begin,
            const Tree* tree, const Scores& rule) {
    constexpr int columns = heads <= 2 ? 4 : heads <= 4 ? 2 : 1;
    constexpr int64_t line = 64 / sizeof(typename Cell::Number);
    const int64_t size = cache.head_dim, width = cache.width;
    const int chunks = static_cast<int>(size / kLanes);
    const int64_t end = queries.end[heads - 1];
    Floats q[kMaxChunks][heads], total[heads][kMaxChunks];
    float best[heads], weight[heads];
    for (int g = 0; g < heads; ++g) {
        best[g] = rule.sinks ? rule.sinks[queries.head[g]] : kNone;
        weight[g] = rule.sinks ? 1.0f : 0.0f;
        for (int c = 0; c < chunks; ++c) {
            q[c][g] = load(queries.from[g] + c * kLanes) * rule.scale;
            total[g][c] = Floats{};
        }
    }
    const Ints lane = lanes();
    alignas(64) float scores[heads][kLanes], key_scales[kLanes] = {}, value_scales[kLanes] = {};
    Floats parts[heads][kLanes] = {};
    int64_t stop = tree ? tree->base : end;
    for (int64_t position = begin; position < end;) {
        if (tree && position >= stop) stop = std::min(next_run(*tree, position), end);
        const int64_t place = position % cache.block_size;
        const int64_t left = std::min(stop - position, cache.block_size - place);
        const int count = static_cast<int>(std::min<int64_t>(left, kLanes));
        const typename Cell::Number* key = cache.key + cache.at(table, kv_head, position);
        const typename Cell::Number* value = cache.value + (key - cache.key);
        // The next keys lie in some other block, where the processor does not look by itself.
        const int64_t ahead = cache.at(table, kv_head, position + count < end ? position + count : position);
        for (int t = 0; t < count; ++t) {
            for (int64_t at = ahead + t * width; at < ahead + (t + 1) * width; at += line) {
                __builtin_prefetch(cache.key + at, 0, 3);
                __builtin_prefetch(cache.value + at, 0, 3);
            }
            Floats part[heads] = {};
            for (int c = 0; c < chunks; ++c) {
                const Floats k = Cell::load(key + t * width + c * kLanes);
                for (int g = 0; g < heads; ++g) part[g] += q[c][g] * k;
            }
            for (int g = 0; g < heads; ++g) parts[g][t] = part[g];
            if (Cell::scaled) {
                key_scales[t] = Cell::scale(key + t * width, size);
                value_scales[t] = Cell::scale(value + t * width, size);
            }
        }
        for (int g = 0; g < heads; ++g) {
            Floats s = sums(parts[g]);
            if (Cell::scaled) s *= load(key_scales);
            if (rule.softcap > 0.0f) s = cap(s, rule.softcap);
            s = lane < static_cast<int32_t>(std::min<int64_t>(count, queries.end[g] - position)) ? s : Floats{} + kNone;
            const float top = largest(s, best[g]);
            if (top > best[g]) {
                const float shrink = exp_negative(Floats{} + (best[g] - top))[0];
                weight[g] *= shrink;
                for (int c = 0; c < chunks; ++c) total[g][c] *= shrink;
                best[g] = top;
            }
            const Floats e = s == kNone ? Floats{} : exp_negative(s - best[g]);
            store(scores[g], Cell::scaled ? e * load(value_scales) : e);
            weight[g] += sum(e);
        }
        int c = 0;
        for (; c + columns <= chunks; c += columns)
            add_values<Cell, heads, columns>(scores, value, width, count, total, c);
        switch (chunks - c) {
            case 3: add_values<Cell, heads, columns < 4 ? columns : 3>(scores, value, width, count, total, c); break;
            case 2: add_values<Cell, heads, columns < 3 ? columns : 2>(scores, value, width, count, total, c); break;
            case 1: add_values<Cell, heads, 1>(scores, value, width, count, total, c); break;
            default: break;
        }
        position += count;
    }
    for (int g = 0; g < heads; ++g)
        for (int c = 0; c < chunks; ++c) store(queries.to[g] + c * kLanes, total[g][c] / weight[g]);
}

template <typename Cell>
using Attend = void (*)(const Queries&, const Cache<Cell>&, int64_t, const int32_t*, int64_t, const Tree*, const Scores&);
template <typename Cell>
constexpr Attend<Cell> kAttend[] = {attend<Cell, 1>, attend<Cell, 2>, attend<Cell, 3>, attend<Cell, 4>,
                                    attend<Cell, 5>, attend<Cell, 6>, attend<Cell, 7>, attend<Cell, 8>};

}  // namespace
