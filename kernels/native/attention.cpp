// Attention over a paged KV cache, float32, where the keys and values lie; with what comes before it in a layer: norm and
// rotation of queries and keys, and the writing of keys and values.
//
// A job is some consecutive query tokens of one row; it is computed for every KV head, whose query heads share what is
// read. One token reads keys and values straight from their blocks (attend.h); several go through tiles of 64 keys that
// are copied once for all of them (`attend_block`; attend_amx.h where the processor multiplies matrices). Softmax is
// computed online, in the order of the keys. What else lies in a block than keys that a query may see, NaN included, has
// no influence: tiles give values that only others see a weight of 0, and are not used where one of these is no number.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attend.h"
#include "attend_amx.h"
#include "tile.h"

namespace {

constexpr int kKeys = 64;  // of a tile
constexpr int64_t kRows = 3 * kLanes;  // whose scores are worked out at once: they stay in the first cache meanwhile

// to [columns, kKeys] = the transpose of `rows` rows [rows, columns]; columns is a multiple of 4. Rows behind are 0.
void transpose(const float* const* from, int64_t rows, int64_t columns, float* to) {
    const Quarter zero = {};
    for (int64_t r = 0; r < kKeys; r += 4)
        for (int64_t c = 0; c < columns; c += 4) {
            Quarter q[4];
            for (int i = 0; i < 4; ++i) {
                q[i] = zero;
                if (r + i < rows) std::memcpy(&q[i], from[r + i] + c, sizeof zero);
            }
            typedef int32_t Four __attribute__((vector_size(16)));
            const Four low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
            const Quarter a = __builtin_shuffle(q[0], q[1], low), b = __builtin_shuffle(q[2], q[3], low);
            const Quarter d = __builtin_shuffle(q[0], q[1], high), e = __builtin_shuffle(q[2], q[3], high);
            const Quarter out[4] = {__builtin_shuffle(a, b, first), __builtin_shuffle(a, b, second),
                                    __builtin_shuffle(d, e, first), __builtin_shuffle(d, e, second)};
            for (int i = 0; i < 4; ++i) std::memcpy(to + (c + i) * kKeys + r, &out[i], sizeof zero);
        }
}

// sums [rows, 64] += x [rows, depth] times weight [depth, columns]; columns is a multiple of 16, up to 64.
void multiply(const float* x, int64_t x_stride, int64_t rows, const float* weight, int64_t stride, int64_t depth,
              int64_t columns, float* sums) {
    for (int64_t r = 0; r < rows; r += kTileRows) {
        const int64_t count = std::min<int64_t>(kTileRows, rows - r), most = columns_for(count);
        for (int64_t c = 0; c < columns / kWideLanes; c += most) {
            const int64_t width = std::min(most, columns / kWideLanes - c);
            kTiles[count - 1][width - 1](x + r * x_stride, x_stride, weight + c * kWideLanes, stride, depth,
                                         {weight, 0, 0}, sums + r * 64 + c * kWideLanes);
        }
    }
}

// What a thread needs for a block of queries: `rows` is tokens times heads of the group.
struct Workspace {
    Memory<float> memory;
    float *query, *scores, *total, *keys, *values, *decoded, *best, *weight;

    void prepare(int64_t rows, int64_t size) {
        const int64_t strips = (size + 63) / 64;
        const int64_t needed = rows * (size + 64 * strips + 2) + kKeys * (3 * size + kRows) + 2 * kLanes;
        grow(memory, needed);
        keys = memory.data();
        values = keys + kKeys * size;
        decoded = values + kKeys * size;
        scores = decoded + kKeys * size;
        total = scores + kRows * kKeys;
        query = total + rows * 64 * strips;
        best = query + rows * size;
        weight = best + rows + kLanes;  // looked at 16 at a time
    }
};

// Which of the keys of a tile a row sees: from `first` on before `end`.
struct Seen {
    int64_t first, end;
};

// Scores of up to 16 rows from `row` on become weights relative to the best score of each so far; what was summed before
// is made to fit. What has to be known of a whole row is worked out for all of them at once, a lane each.
template <typename SeenBy>
void weigh(float* scores, int64_t row, int64_t count, SeenBy seen_by, int64_t rows, int64_t strips, Workspace& work,
           const Scores& rule) {
    Floats each[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) each[i] = Floats{} + kNone;
    for (int64_t i = 0; i < count; ++i) {
        float* const of_row = scores + i * kKeys;
        const Seen seen = seen_by(row + i);
        const bool all = seen.first <= 0 && seen.end >= kKeys;
        for (int c = 0; c < kKeys; c += kLanes) {
            Floats s = load(of_row + c);
            if (rule.softcap > 0.0f) s = cap(s, rule.softcap);
            const Ints place = lanes() + c;
            if (!all)
                s = (place >= static_cast<int32_t>(seen.first)) & (place < static_cast<int32_t>(seen.end))
                        ? s
                        : Floats{} + kNone;
            if (!all || rule.softcap > 0.0f) store(of_row + c, s);
            each[i] = s > each[i] ? s : each[i];
        }
    }
    const Floats before = load(work.best + row), top = largest_of_each(each), best = top > before ? top : before;
    const Floats shrink = best > before ? exp_negative(before - best) : Floats{} + 1.0f;
    for (int64_t i = 0; i < count; ++i) {
        if (shrink[i] != 1.0f)
            for (int64_t s = 0; s < strips; ++s) {
                float* total = work.total + (s * rows + row + i) * 64;
                for (int c = 0; c < 64; c += kLanes) store(total + c, load(total + c) * shrink[i]);
            }
        each[i] = Floats{};
        for (int c = 0; c < kKeys; c += kLanes) {
            const Floats s = load(scores + i * kKeys + c), e = s == kNone ? Floats{} : exp_negative(s - best[i]);
            store(scores + i * kKeys + c, e);
            each[i] += e;
        }
    }
    store(work.best + row, best);
    store(work.weight + row, load(work.weight + row) * shrink + sums(each));
}

// A row as floats: where it lies, if that is what it is, or decoded into `memory`.
template <typename Cell>
inline const float* plain_row(const typename Cell::Number* row, float* memory, int64_t size) {
    if constexpr (std::is_same<Cell, PlainCell>::value) return row;
    read_cell<Cell>(memory, row, size);
    return memory;
}

// `count` consecutive tokens, the first one at `position`, times the `group` query heads of one KV head.
template <typename Cell>
void attend_block(const float* query, int64_t query_stride, const Cache<Cell>& cache, int64_t kv_head, const int32_t* table,
                  int64_t position, int64_t count, int64_t window, int64_t group, const Scores& rule, float* out,
                  int64_t out_stride) {
    thread_local Workspace work;
    const int64_t size = cache.head_dim, rows = count * group, strips = (size + 63) / 64;
    work.prepare(rows, size);
    std::memset(work.total, 0, sizeof(float) * rows * 64 * strips);
    for (int64_t r = 0; r < rows; ++r) {
        const float* from = query + r / group * query_stride + r % group * size;
        for (int64_t c = 0; c < size; c += kLanes) store(work.query + r * size + c, load(from + c) * rule.scale);
        work.best[r] = rule.sinks ? rule.sinks[kv_head * group + r % group] : kNone;
        work.weight[r] = rule.sinks ? 1.0f : 0.0f;
    }
    const int64_t begin = window ? std::max<int64_t>(0, position + 1 - window) : 0, end = position + count;
    for (int64_t key = begin; key < end; key += kKeys) {
        const int64_t keys = std::min<int64_t>(kKeys, end - key);
        const float* from[kKeys];
        for (int64_t k = 0; k < keys; ++k) {
            const int64_t at = cache.at(table, kv_head, key + k);
            from[k] = plain_row<Cell>(cache.key + at, work.decoded + k * size, size);
            read_cell<Cell>(work.values + k * size, cache.value + at, size);
        }
        transpose(from, keys, size, work.keys);
        const int64_t first_row = std::max<int64_t>(0, key - position) * group;  // earlier tokens see none of these
        const auto seen_by = [=](int64_t r) {
            const int64_t last = position + r / group;
            return Seen{window ? last + 1 - window - key : 0, last + 1 - key};
        };
        for (int64_t row = first_row; row < rows; row += kRows) {
            if (seen_by(row).first >= kKeys) break;  // nor do the tokens behind it see any of these
            const int64_t some = std::min<int64_t>(kRows, rows - row);
            std::memset(work.scores, 0, sizeof(float) * some * kKeys);
            multiply(work.query + row * size, size, some, work.keys, kKeys, size, kKeys, work.scores);
            for (int64_t r = 0; r < some; r += kLanes)
                weigh(work.scores + r * kKeys, row + r, std::min<int64_t>(kLanes, some - r), seen_by, rows, strips, work,
                      rule);
            for (int64_t s = 0; s < strips; ++s)
                multiply(work.scores, kKeys, some, work.values + s * 64, size, keys,
                         std::min<int64_t>(64, size - s * 64), work.total + (s * rows + row) * 64);
        }
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < size; c += kLanes)
            store(out + r / group * out_stride + r % group * size + c,
                  load(work.total + (c / 64 * rows + r) * 64 + c % 64) / work.weight[r]);
}

// What a head's values go through before they are used: a root-mean-square norm where `norm` is given, then a rotation
// of the first 2 * `half` of them, the first half with the second one.
struct Turn {
    float eps;
    const float *cosines, *sines;  // [tokens, half]
    int64_t half;

    void apply(float* values, int64_t size, const float* norm, int64_t token) const {
        if (norm) {
            Floats squares = {};
            for (int64_t c = 0; c < size; c += kLanes) squares += load(values + c) * load(values + c);
            const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
            for (int64_t c = 0; c < size; c += kLanes) store(values + c, load(values + c) * scale * load(norm + c));
        }
        const float *cosine = cosines + token * half, *sine = sines + token * half;
        for (int64_t i = 0; i < half; ++i) {
            const float left = values[i], right = values[half + i];
            values[i] = left * cosine[i] - right * sine[i];
            values[half + i] = right * cosine[i] + left * sine[i];
        }
    }
};

// Whether the values of keys from `first` on before `last` are all finite: 0 times another one is no 0.
template <typename Cell>
bool finite(const Cache<Cell>& cache, int64_t kv_head, const int32_t* table, int64_t first, int64_t last) {
    thread_local Memory<float> memory;
    grow(memory, cache.head_dim);
    Floats found = {};
    for (int64_t key = std::max<int64_t>(0, first); key < last; ++key) {
        const float* value = plain_row<Cell>(cache.value + cache.at(table, kv_head, key), memory.data(), cache.head_dim);
        for (int64_t c = 0; c < cache.head_dim; c += kLanes) found += load(value + c) * 0.0f;
    }
    return sum(found) == 0.0f;
}

// As `attention_part`, of a cache of this kind.
template <typename Cell>
void run(const Attention& given) {
    typedef typename Cell::Number Number;
    const Heads& layer = *given.layer;
    const Plan& plan = *given.plan;
    const int64_t heads = layer.heads, kv_heads = layer.kv_heads, size = layer.head_dim, group = heads / kv_heads;
    const Cache<Cell> cache{static_cast<Number*>(given.key_cache), static_cast<Number*>(given.value_cache), kv_heads,
                            plan.block_size, size, Cell::width(size)};
    const Scores rule{static_cast<float>(layer.scale), static_cast<float>(layer.softcap), layer.sinks};
    const Turn turn{static_cast<float>(layer.eps), given.cosines, given.sines, layer.half};
    const int64_t window = plan.window, num_work = plan.num_jobs * kv_heads, threads = omp_get_num_threads();
    const auto write = [&](int64_t token, int64_t kv_head) {
        float* q = given.query + token * given.query_stride;
        float *k = q + (heads + kv_head) * size, *v = k + kv_heads * size;
        const int64_t angle = given.positions ? given.positions[token] : token;
        for (int64_t g = 0; g < group; ++g) turn.apply(q + (kv_head * group + g) * size, size, layer.query_norm, angle);
        turn.apply(k, size, layer.key_norm, angle);
        const int64_t to = given.rows[token * kv_heads + kv_head] * cache.width;
        Cell::write(cache.key + to, k, size);
        Cell::write(cache.value + to, v, size);
    };
    if (given.rows && !plan.alone) {
#pragma omp for schedule(static)
        for (int64_t index = 0; index < given.tokens * kv_heads; ++index) write(index / kv_heads, index % kv_heads);
    }
    // The heads of a row lie beside each other: one thread takes them all, unless there would be too few parts.
    const int64_t part = plan.num_jobs >= 4 * threads ? kv_heads : 1;
#pragma omp for schedule(dynamic, part) nowait
    for (int64_t index = 0; index < num_work; ++index) {
        const Job& job = plan.jobs[index / kv_heads];
        const int64_t kv_head = index % kv_heads, end = job.position + 1;
        const int32_t* table = plan.tables + job.row * plan.width;
        if (given.rows && plan.alone) write(job.token, kv_head);
        const float* q = given.query + job.token * given.query_stride + kv_head * group * size;
        float* to = given.out + job.token * given.out_stride + kv_head * group * size;
        const auto attend_one = [&](int64_t token, const Tree* tree) {
            const int64_t last = end + token;
            const int64_t begin = tree ? tree->first : window ? std::max<int64_t>(0, last - window) : 0;
            for (int64_t g = 0; g < group; g += 8)
                kAttend<Cell>[std::min<int64_t>(8, group - g) - 1](
                    q + token * given.query_stride + g * size, cache, kv_head, table, begin, last, tree, rule,
                    kv_head * group + g, to + token * given.out_stride + g * size);
        };
        if (job.count == 1) {
            attend_one(0, plan.trees ? plan.trees + index / kv_heads : nullptr);
            continue;
        }
        const int64_t behind = job.count - 1;  // so many keys only some of the tokens see, and of a window's first ones
        if (finite(cache, kv_head, table, end, end + behind) &&
            (!window || finite(cache, kv_head, table, end - window, end + behind - window))) {
            const auto chosen = takes_tiles<Cell>(job.count * group) ? attend_tiled<Cell> : attend_block<Cell>;
            chosen(q, given.query_stride, cache, kv_head, table, job.position, job.count, window, group, rule, to,
                   given.out_stride);
        } else {
            for (int64_t token = 0; token < job.count; ++token) attend_one(token, nullptr);
        }
    }
}

}  // namespace

void troupe::attention_part(const Attention& given) {
    const auto chosen = given.cells == 0 ? run<PlainCell> : given.cells == 1 ? run<Int8Cell> : run<Fp8Cell>;
    chosen(given);
}

// Attention of all jobs. query [tokens, heads + 2 * kv_heads, head_dim] holds the queries, then keys, then values of each
// token, tokens `query_stride` apart. With `rows` int64 [tokens, kv_heads], the places of keys and values in the cache
// seen as [.., width], they are written before, and queries and keys are turned in place by cosines and sines
// [tokens, half]. Without it only the queries are read, as they are. The caches' cells: 0 plain, 1 int8, 2 fp8.
extern "C" void paged_attention(const Heads* layer, const Plan* plan, float* query, int64_t query_stride,
                                int64_t tokens, void* key_cache, void* value_cache, int64_t cells,
                                const int64_t* rows, const float* cosines, const float* sines, float* out,
                                int64_t out_stride, int64_t threads) {
    const Attention given{layer, plan,    query,   query_stride, tokens, key_cache, value_cache, cells,
                          rows,  nullptr, cosines, sines,        out,    out_stride};
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    attention_part(given);
}
