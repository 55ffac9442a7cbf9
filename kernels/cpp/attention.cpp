// Attention over a paged KV cache, float32, where the keys and values lie; with what comes before it in a layer: norm and
// rotation of queries and keys, and the writing of keys and values.
//
// A job is some consecutive query tokens of one row; it is computed for every KV head, whose query heads share what is
// read. A few tokens read keys and values straight from their blocks (attention.h); more go through tiles of 64 keys that
// are copied once for all of them (attention_block.h; attention_amx.h where the processor multiplies matrices). Softmax is
// computed online, in the order of the keys. Other content of a block, NaN included, has no influence on a query: tiles
// give values that only other queries see a weight of 0, and are not used if one of these values is NaN or infinite.

#include "attention_amx.h"
#include "attention_block.h"

namespace {

// Fewer are computed as each would be alone, but read what they all see once: PREFILL_TOKENS of paged_attention/plan.py.
constexpr int64_t kFewTokens = 16;
constexpr int64_t kLeastHeads = 8;  // of a token that are worth the reading of its keys

// Operations on a head's values before attention: a root-mean-square norm if `norm` is given, then a rotation of the
// first 2 * `half` of them, the first half with the second one.
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
    thread_local Memory<float> memory{"value of a key"};
    memory.grow(cache.head_dim);
    Floats found = {};
    for (int64_t key = std::max<int64_t>(0, first); key < last; ++key) {
        const float* value = plain_row<Cell>(cache.value + cache.at(table, kv_head, key), memory.data(), cache.head_dim);
        for (int64_t c = 0; c < cache.head_dim; c += kLanes) found += load(value + c) * 0.0f;
    }
    return sum(found) == 0.0f;
}

// Whether those values are finite that only some of a job's tokens see: its own, and the first ones of a window.
template <typename Cell>
bool all_finite(const Cache<Cell>& cache, int64_t kv_head, const int32_t* table, const Job& job, int64_t window) {
    const int64_t end = job.position + 1, behind = job.count - 1;
    return finite(cache, kv_head, table, end, end + behind) &&
           (!window || finite(cache, kv_head, table, end - window, end + behind - window));
}

// As `attention_part`, of heads that are too wide for the registers of a single token: latent vectors, one for all heads,
// which are in the cache. Where there are fewer jobs than threads, a job's heads are shared out.
template <typename Cell>
void run_wide(const Attention& given, const Cache<Cell>& cache, const Scores& rule, Team& team) {
    const Heads& layer = *given.layer;
    const Plan& plan = *given.plan;
    const int64_t size = layer.head_dim, group = layer.heads / layer.kv_heads, threads = team.size();
    const int64_t each = plan.num_jobs < threads ? (group * plan.num_jobs + threads - 1) / threads : group;
    const int64_t some = std::max(each, kLeastHeads), pieces = (group + some - 1) / some;
    team.each_in_turn(plan.num_jobs * layer.kv_heads * pieces, 1, [&](int64_t index) {
        const int64_t job_index = index / pieces / layer.kv_heads, kv_head = index / pieces % layer.kv_heads;
        const Job& job = plan.jobs[job_index];
        const int64_t head = kv_head * group + index % pieces * some, heads = std::min(some, (kv_head + 1) * group - head);
        const int32_t* table = plan.tables + job.row * plan.width;
        const Scores own{rule.scale, rule.softcap, rule.sinks ? rule.sinks + head - kv_head * heads : nullptr};
        const auto attend_tokens = [&](int64_t token, int64_t count, int64_t begin, const Nodes* nodes) {
            const int64_t row = job.token + token;
            attend_some<Cell>(given.query + row * given.query_stride + head * size, given.query_stride, cache, kv_head, table,
                              job.position + token, count, plan.window, heads, own,
                              given.out + row * given.out_stride + head * size, given.out_stride, begin, nodes);
        };
        if (plan.trees && job.count == 1) {
            const Tree& tree = plan.trees[job_index];
            const Nodes nodes(tree, job.position);
            attend_tokens(0, 1, tree.first, &nodes);
        } else if (all_finite(cache, kv_head, table, job, plan.window)) {
            attend_tokens(0, job.count, 0, nullptr);
        } else {
            for (int64_t token = 0; token < job.count; ++token) attend_tokens(token, 1, 0, nullptr);
        }
    });
}

// As `attention_part`, of a cache of this kind.
template <typename Cell>
bool run(const Attention& given, Team& team) {
    typedef typename Cell::Number Number;
    const Heads& layer = *given.layer;
    const Plan& plan = *given.plan;
    const int64_t heads = layer.heads, kv_heads = layer.kv_heads, size = layer.head_dim, group = heads / kv_heads;
    const Cache<Cell> cache{static_cast<Number*>(given.key_cache), static_cast<Number*>(given.value_cache), kv_heads,
                            plan.block_size, size, Cell::width(size)};
    const Scores rule{static_cast<float>(layer.scale), static_cast<float>(layer.softcap), layer.sinks};
    if (size > kLanes * kMaxChunks) {
        run_wide(given, cache, rule, team);
        return true;
    }
    const Turn turn{static_cast<float>(layer.eps), given.cosines, given.sines, layer.half};
    const int64_t window = plan.window, num_work = plan.num_jobs * kv_heads, threads = team.size();
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
        team.each(given.tokens * kv_heads, [&](int64_t index) { write(index / kv_heads, index % kv_heads); });
        if (!team.meet()) return false;
    }
    // The heads of a row lie beside each other: one thread takes them all, unless there would be too few parts.
    const int64_t part = plan.num_jobs >= 4 * threads ? kv_heads : 1;
    team.each_in_turn(num_work, part, [&](int64_t index) {
        const Job& job = plan.jobs[index / kv_heads];
        const int64_t kv_head = index % kv_heads, end = job.position + 1;
        const int32_t* table = plan.tables + job.row * plan.width;
        if (given.rows && plan.alone) write(job.token, kv_head);
        const float* q = given.query + job.token * given.query_stride + kv_head * group * size;
        float* to = given.out + job.token * given.out_stride + kv_head * group * size;
        // `count` tokens of the job, which see keys from `begin` on.
        const auto attend_few = [&](int64_t token, int64_t count, int64_t begin, const Tree* tree) {
            Queries queries;
            for (int64_t t = token; t < token + count; ++t)
                for (int64_t g = 0; g < group; ++g) {
                    queries.add(q + t * given.query_stride + g * size, to + t * given.out_stride + g * size, end + t,
                                kv_head * group + g);
                    if (queries.count < kMostHeads && (t + 1 < token + count || g + 1 < group)) continue;
                    kAttend<Cell>[queries.count - 1](queries, cache, kv_head, table, begin, tree, rule);
                    queries.count = 0;
                }
        };
        const auto attend_one = [&](int64_t token, const Tree* tree) {
            attend_few(token, 1, tree ? tree->first : window ? std::max<int64_t>(0, end + token - window) : 0, tree);
        };
        if (job.count == 1) {
            attend_one(0, plan.trees ? plan.trees + index / kv_heads : nullptr);
            return;
        }
        if (!all_finite(cache, kv_head, table, job, window)) {
            for (int64_t token = 0; token < job.count; ++token) attend_one(token, nullptr);
        } else if (job.count < kFewTokens && group <= kMostHeads && !window) {
            attend_few(0, job.count, 0, nullptr);
        } else {
            const auto chosen = takes_tiles<Cell>(job.count * group) ? attend_tiled<Cell> : attend_block<Cell>;
            chosen(q, given.query_stride, cache, kv_head, table, job.position, job.count, window, group, rule, to,
                   given.out_stride);
        }
    });
    return true;
}

// Whether a token of a tree at `position` sees a key in each run that `next_run` looks for, itself at the end.
const Refusal* check_tree(const Tree& tree, int64_t index, int64_t position) {
    const int64_t end = position + 1;
    if (const Refusal* refusal = outside("first key of a tree's token", index, tree.first, 0, end + 1)) return refusal;
    if (tree.base == end) return nullptr;
    const int64_t least = std::max<int64_t>(0, end - 64);
    if (const Refusal* refusal = outside("base of a tree", index, tree.base, least, end)) return refusal;
    const int64_t own = tree.seen >> (position - tree.base) & 1;
    return outside("a tree's token that sees itself", index, own, 1, 2);
}

const Refusal* check_job(const Plan& plan, int64_t index, int64_t tokens, int64_t blocks) {
    const Job& job = plan.jobs[index];
    const int64_t most = plan.width * plan.block_size, end = int64_t{job.position} + job.count;
    const Refusal* refusal = outside("row of a job", index, job.row, 0, plan.rows);
    if (!refusal) refusal = outside("number of tokens of a job", index, job.count, 1, tokens + 1);
    if (!refusal) refusal = outside("token of a job", index, job.token, 0, tokens - job.count + 1);
    if (!refusal) refusal = outside("position of a job", index, job.position, 0, most - job.count + 1);
    if (refusal) return refusal;
    int64_t first = plan.window ? std::max<int64_t>(0, job.position + 1 - plan.window) : 0;
    if (plan.trees && job.count == 1) {
        const Tree& tree = plan.trees[index];
        if ((refusal = check_tree(tree, index, job.position))) return refusal;
        first = std::min(tree.first, tree.base);
    }
    const int64_t begin = first / plan.block_size, last = (end - 1) / plan.block_size;
    return any_outside("block of a row", plan.tables + job.row * plan.width + begin, last + 1 - begin, blocks);
}

}  // namespace

const Refusal* troupe::check_attention(const Plan& plan, int64_t tokens, const int64_t* rows, const CacheSize& cache) {
    const Refusal* refusal = outside("size of a plan's blocks", 0, plan.block_size, cache.block_size, cache.block_size + 1);
    for (int64_t i = 0; !refusal && i < plan.num_jobs; ++i) refusal = check_job(plan, i, tokens, cache.blocks);
    if (refusal || !rows) return refusal;
    return any_outside("cache row", rows, tokens * cache.kv_heads, cache.blocks * cache.kv_heads * cache.block_size);
}

bool troupe::attention_part(const Attention& given, Team& team) {
    const auto chosen = given.cells == 0 ? run<PlainCell> : given.cells == 1 ? run<Int8Cell> : run<Fp8Cell>;
    return chosen(given, team);
}

// Attention of all jobs. query [tokens, heads + 2 * kv_heads, head_dim] holds the queries, then keys, then values of each
// token, tokens `query_stride` apart. With `rows` int64 [tokens, kv_heads], the places of keys and values in the cache
// seen as [.., width], they are written before, and queries and keys are turned in place by cosines and sines
// [tokens, half]. Without it only the queries are read, as they are. The caches' cells: 0 plain, 1 int8, 2 fp8; they
// have `num_blocks` blocks of `block_size` positions.
extern "C" const Refusal* paged_attention(const Heads* layer, const Plan* plan, float* query, int64_t query_stride,
                                          int64_t tokens, void* key_cache, void* value_cache, int64_t cells,
                                          int64_t num_blocks, int64_t block_size, const int64_t* rows,
                                          const float* cosines, const float* sines, float* out, int64_t out_stride,
                                          int64_t threads) {
    const CacheSize size{num_blocks, layer->kv_heads, block_size};
    if (const Refusal* refusal = check_attention(*plan, tokens, rows, size)) return refusal;
    const Attention given{layer, plan,    query,   query_stride, tokens, key_cache, value_cache, cells,
                          rows,  nullptr, cosines, sines,        out,    out_stride};
    Team team(threads);
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    {
        team.enter();
        attention_part(given, team);
    }
    return nullptr;
}
