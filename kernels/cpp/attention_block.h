// Attention of a block of queries: keys are gathered tile by tile, and scores and totals are products of matrices.

#pragma once

#include <type_traits>

#include "attention.h"
#include "float_tile.h"

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

// A thread's memory for a block of queries: `rows` is tokens times heads of the group.
struct Workspace {
    Memory<float> query{"queries"}, scores{"scores"}, total{"totals"}, keys{"keys"}, values{"values"};
    Memory<float> decoded{"decoded keys"}, best{"best scores"}, weight{"sums of weights"};

    void prepare(int64_t rows, int64_t size) {
        query.grow(rows * size);
        scores.grow(kRows * kKeys);
        total.grow(rows * 64 * ((size + 63) / 64));
        for (Memory<float>* of_keys : {&keys, &values, &decoded}) of_keys->grow(kKeys * size);
        for (Memory<float>* of_row : {&best, &weight}) of_row->grow(rows + kLanes);  // looked at 16 at a time
    }
};

// Which of the keys of a tile a row sees: from `first` on before `end`.
struct Seen {
    int64_t first, end;
};

// Turns scores of up to 16 rows from `row` on into weights relative to each row's best score so far, and rescales
// earlier sums. Values per row are computed for all 16 rows at once, one lane each.
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

// Places of the nodes of a tree that one of its tokens sees, itself being at `position`.
struct Nodes {
    int64_t base, places[64], count = 0;

    Nodes(const Tree& tree, int64_t position) : base(tree.base) {
        for (uint64_t rest = tree.seen; rest; rest &= rest - 1) {
            const int64_t place = base + __builtin_ctzll(rest);
            if (place <= position) places[count++] = place;
        }
    }
    int64_t place(int64_t key) const { return key < base ? key : places[key - base]; }
};

// `count` consecutive tokens, the first one at `position`, times the `group` query heads of one KV head. nodes: of the
// tree of a single token, whose keys `first` to `base` stand before them; or null.
template <typename Cell>
void attend_some(const float* query, int64_t query_stride, const Cache<Cell>& cache, int64_t kv_head, const int32_t* table,
                 int64_t position, int64_t count, int64_t window, int64_t group, const Scores& rule, float* out,
                 int64_t out_stride, int64_t first, const Nodes* nodes) {
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
    const int64_t begin = nodes ? std::min(first, nodes->base) : window ? std::max<int64_t>(0, position + 1 - window) : 0;
    const int64_t end = nodes ? nodes->base + nodes->count : position + count;
    for (int64_t key = begin; key < end; key += kKeys) {
        const int64_t keys = std::min<int64_t>(kKeys, end - key);
        const float* from[kKeys];
        for (int64_t k = 0; k < keys; ++k) {
            const int64_t at = cache.at(table, kv_head, nodes ? nodes->place(key + k) : key + k);
            from[k] = plain_row<Cell>(cache.key + at, work.decoded + k * size, size);
            read_cell<Cell>(work.values + k * size, cache.value + at, size);
        }
        transpose(from, keys, size, work.keys);
        const int64_t first_row = std::max<int64_t>(0, key - position) * group;  // earlier tokens see none of these
        const auto seen_by = [=](int64_t r) {
            if (nodes) return Seen{0, end - key};
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

// As `attend_some`, without trees.
template <typename Cell>
void attend_block(const float* query, int64_t query_stride, const Cache<Cell>& cache, int64_t kv_head, const int32_t* table,
                  int64_t position, int64_t count, int64_t window, int64_t group, const Scores& rule, float* out,
                  int64_t out_stride) {
    attend_some(query, query_stride, cache, kv_head, table, position, count, window, group, rule, out, out_stride, 0,
                nullptr);
}

}  // namespace
