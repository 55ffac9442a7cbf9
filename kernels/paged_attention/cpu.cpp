// Attention of single query tokens over a paged KV cache, float32.
//
// One work item is one query token and one KV head: the heads of its group read every key and value once. Softmax is
// computed online over tiles of up to 16 keys. Only keys in [begin, end) are read, so what else lies in a block, NaN
// included, has no influence. Vector types of the compiler keep this independent of the instruction set.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

constexpr int kLanes = 16;
constexpr int kMaxChunks = 16;  // head_dim up to 256
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
inline Floats fold(Floats a, Floats b, Ints first, Ints second) {
    return __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, second);
}

// The sums of 16 vectors, in order.
inline Floats sums(const Floats* v) {
    const Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    const Ints odd = even + 1;
    Floats eight[8], four[4];
    for (int i = 0; i < 8; ++i) eight[i] = fold(v[2 * i], v[2 * i + 1], even, odd);
    for (int i = 0; i < 4; ++i) four[i] = fold(eight[2 * i], eight[2 * i + 1], even, odd);
    return fold(fold(four[0], four[1], even, odd), fold(four[2], four[3], even, odd), even, odd);
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

// e^x for x <= 0 with a relative error near 1e-7; NaN stays NaN.
inline Floats exp_negative(Floats x) {
    const Floats floor = Floats{} - 87.0f;
    const Floats clamped = x < floor ? floor : x;
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
    Ints bits, exponent, base;
    std::memcpy(&bits, &p, sizeof bits);
    std::memcpy(&exponent, &shifted, sizeof exponent);
    std::memcpy(&base, &magic, sizeof base);
    bits += (exponent - base) << 23;
    std::memcpy(&p, &bits, sizeof p);
    return x == x ? p : x;
}

struct Cache {
    const float* key;    // [blocks, kv_heads, block_size, head_dim]
    const float* value;  // the same
    int64_t kv_heads, block_size, head_dim;
};

// `heads` consecutive query heads that share one KV head. Template: accumulators stay in registers.
template <int heads>
void attend(const float* query, const Cache& cache, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
            float scale, float* out) {
    const int64_t size = cache.head_dim;
    const int chunks = static_cast<int>(size / kLanes);
    Floats q[kMaxChunks][heads], total[heads][kMaxChunks];
    float best[heads], weight[heads];
    for (int g = 0; g < heads; ++g) {
        best[g] = -std::numeric_limits<float>::infinity();
        weight[g] = 0.0f;
        for (int c = 0; c < chunks; ++c) {
            q[c][g] = load(query + g * size + c * kLanes) * scale;
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
        for (int g = 0; g < heads; ++g) store(scores[g], sums(parts[g]));
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

typedef void (*Attend)(const float*, const Cache&, int64_t, const int32_t*, int64_t, int64_t, float, float*);
const Attend kAttend[] = {attend<1>, attend<2>, attend<3>, attend<4>, attend<5>, attend<6>, attend<7>, attend<8>};

}  // namespace

// query [tokens, heads, head_dim] and out likewise, with the given strides between tokens; tables [rows, table_width];
// items [num_items, 4]: token, row, begin, end.
extern "C" void paged_attention(const float* query, int64_t query_stride, const float* key_cache,
                                const float* value_cache, const int32_t* tables, int64_t table_width,
                                const int32_t* items, int64_t num_items, int64_t heads, int64_t kv_heads,
                                int64_t block_size, int64_t head_dim, float scale, float* out, int64_t out_stride,
                                int64_t threads) {
    const Cache cache{key_cache, value_cache, kv_heads, block_size, head_dim};
    const int64_t group = heads / kv_heads;
    const int64_t work = num_items * kv_heads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(static_cast<int>(threads)) if (threads > 1)
    for (int64_t index = 0; index < work; ++index) {
        const int32_t* item = items + 4 * (index / kv_heads);
        const int64_t kv_head = index % kv_heads;
        for (int64_t first = 0; first < group; first += 8) {
            const int64_t width = group - first < 8 ? group - first : 8;
            const int64_t at = (kv_head * group + first) * head_dim;
            kAttend[width - 1](query + item[0] * query_stride + at, cache, kv_head, tables + item[1] * table_width,
                               item[2], item[3], scale, out + item[0] * out_stride + at);
        }
    }
}
