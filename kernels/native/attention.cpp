// Attention of single query tokens over a paged KV cache, float32.
//
// One work item is one query token and one KV head: the heads of its group read every key and value once. Softmax is
// computed online over tiles of up to 16 keys. Only keys in [begin, end) are read, so what else lies in a block, NaN
// included, has no influence.

#include "simd.h"

namespace {

constexpr int kMaxChunks = 16;  // head_dim up to 256

// What happens to scores: times `scale`, then `softcap` * tanh(score / softcap) where it is above 0; `sinks`, one per
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

struct Cache {
    const float* key;    // [blocks, kv_heads, block_size, head_dim]
    const float* value;  // the same
    int64_t kv_heads, block_size, head_dim;
};

// `heads` consecutive query heads that share one KV head. Template: accumulators stay in registers.
template <int heads>
void attend(const float* query, const Cache& cache, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
            const Scores& rule, int64_t head, float* out) {
    const int64_t size = cache.head_dim;
    const int chunks = static_cast<int>(size / kLanes);
    Floats q[kMaxChunks][heads], total[heads][kMaxChunks];
    float best[heads], weight[heads];
    for (int g = 0; g < heads; ++g) {
        best[g] = rule.sinks ? rule.sinks[head + g] : -std::numeric_limits<float>::infinity();
        weight[g] = rule.sinks ? 1.0f : 0.0f;
        for (int c = 0; c < chunks; ++c) {
            q[c][g] = load(query + g * size + c * kLanes) * rule.scale;
            total[g][c] = Floats{};
        }
    }
    alignas(64) float scores[heads][kLanes];
    Floats parts[heads][kLanes] = {};
    for (int64_t position = begin; position < end;) {
        const int64_t place = position % cache.block_size;
        const int64_t left = end - position < cache.block_size - place ? end - position : cache.block_size - place;
        const int count = static_cast<int>(left < kLanes ? left : kLanes);
        const int64_t block = table[position / cache.block_size];
        const int64_t offset = ((block * cache.kv_heads + kv_head) * cache.block_size + place) * size;
        const float* key = cache.key + offset;
        const float* value = cache.value + offset;
        // The next keys lie in some other block, where the processor does not look by itself.
        const int64_t next = position + count < end ? position + count : position;
        const int64_t next_block = table[next / cache.block_size];
        const int64_t ahead =
            ((next_block * cache.kv_heads + kv_head) * cache.block_size + next % cache.block_size) * size;
        for (int t = 0; t < count; ++t) {
            for (int64_t at = ahead + t * size; at < ahead + (t + 1) * size; at += kLanes) {
                __builtin_prefetch(cache.key + at, 0, 2);
                __builtin_prefetch(cache.value + at, 0, 2);
            }
            Floats part[heads] = {};
            for (int c = 0; c < chunks; ++c) {
                const Floats k = load(key + t * size + c * kLanes);
                for (int g = 0; g < heads; ++g) part[g] += q[c][g] * k;
            }
            for (int g = 0; g < heads; ++g) parts[g][t] = part[g];
        }
        for (int g = 0; g < heads; ++g) {
            const Floats sum_of = sums(parts[g]);
            store(scores[g], rule.softcap > 0.0f ? cap(sum_of, rule.softcap) : sum_of);
        }
        for (int g = 0; g < heads; ++g) {
            for (int t = count; t < kLanes; ++t) scores[g][t] = -std::numeric_limits<float>::infinity();
            float top = best[g];
            for (int t = 0; t < count; ++t) top = scores[g][t] > top ? scores[g][t] : top;
            if (top > best[g]) {
                const float shrink = std::exp(best[g] - top);
                weight[g] *= shrink;
                for (int c = 0; c < chunks; ++c) total[g][c] *= shrink;
                best[g] = top;
            }
            store(scores[g], exp_negative(load(scores[g]) - best[g]));
            for (int t = count; t < kLanes; ++t) scores[g][t] = 0.0f;
            weight[g] += sum(load(scores[g]));
        }
        for (int c = 0; c < chunks; ++c) {
            Floats part[heads];
            for (int g = 0; g < heads; ++g) part[g] = total[g][c];
            for (int t = 0; t < count; ++t) {
                const Floats v = load(value + t * size + c * kLanes);
                for (int g = 0; g < heads; ++g) part[g] += scores[g][t] * v;
            }
            for (int g = 0; g < heads; ++g) total[g][c] = part[g];
        }
        position += count;
    }
    for (int g = 0; g < heads; ++g)
        for (int c = 0; c < chunks; ++c) store(out + g * size + c * kLanes, total[g][c] / weight[g]);
}

typedef void (*Attend)(const float*, const Cache&, int64_t, const int32_t*, int64_t, int64_t, const Scores&, int64_t,
                       float*);
const Attend kAttend[] = {attend<1>, attend<2>, attend<3>, attend<4>, attend<5>, attend<6>, attend<7>, attend<8>};

}  // namespace

// query [tokens, heads, head_dim] and out likewise, with the given strides between tokens; tables [rows, table_width];
// items [num_items, 4]: token, row, begin, end; sinks [heads] or null; softcap 0 is none.
extern "C" void paged_attention(const float* query, int64_t query_stride, const float* key_cache,
                                const float* value_cache, const int32_t* tables, int64_t table_width,
                                const int32_t* items, int64_t num_items, int64_t heads, int64_t kv_heads,
                                int64_t block_size, int64_t head_dim, double scale, double softcap, const float* sinks,
                                float* out, int64_t out_stride, int64_t threads) {
    const Cache cache{key_cache, value_cache, kv_heads, block_size, head_dim};
    const Scores rule{static_cast<float>(scale), static_cast<float>(softcap), sinks};
    const int64_t group = heads / kv_heads;
    const int64_t work = num_items * kv_heads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(static_cast<int>(threads)) if (threads > 1)
    for (int64_t index = 0; index < work; ++index) {
        const int32_t* item = items + 4 * (index / kv_heads);
        const int64_t kv_head = index % kv_heads;
        for (int64_t first = 0; first < group; first += 8) {
            const int64_t width = group - first < 8 ? group - first : 8;
            const int64_t head = kv_head * group + first;
            kAttend[width - 1](query + item[0] * query_stride + head * head_dim, cache, kv_head,
                               tables + item[1] * table_width, item[2], item[3], rule, head,
                               out + item[0] * out_stride + head * head_dim);
        }
    }
}
