// Attention of a block of queries with the processor's tiles: as `attend_block` of attention.cpp, in less time.
//
// All is computed the other way round, so that a lane is a query from the scores to the end: keys times queries are
// scores [keys, 16 queries], and values times weights are totals [head_dim, 16 queries]. A property of 16 queries is
// then a vector, and no vector needs a horizontal sum.
//
// Of a cache in eight bits each code is a bfloat16 number, and its scale is applied to scores and weights. Queries and
// weights are rounded to bfloat16: an error of 2^-9, below that of the codes. Of a cache in float32 everything is in
// three parts, and float32 is what comes out.
//
// Keys are taken in chunks that begin at multiples of kChunk, and a finite key that a query does not see adds exactly nothing:
// the query's result is the same for any other queries in the block.

#pragma once

#include "amx_softmax.h"

#if defined(TROUPE_AMX)

namespace {

constexpr int64_t kChunk = 64;  // keys

// A thread's memory for a block, `columns` of 16 queries each.
struct TileMemory {
    Memory<uint16_t> query{"queries"}, keys{"keys"}, values{"values"}, weights{"weights"};
    Memory<float> scores{"scores"}, total{"totals"}, best{"best scores"}, weight{"sums of weights"};
    Memory<int32_t> position{"positions"};

    void prepare(int64_t columns, int64_t size, int64_t parts) {
        const int64_t depth = (size + kTileDepth - 1) / kTileDepth * kTileDepth, queries = columns * kLanes;
        query.grow(parts * queries * depth);
        keys.grow(parts * kChunk * depth);
        values.grow(parts * kChunk * size);
        weights.grow(parts * kChunk * 2 * kLanes);
        scores.grow(2 * kLanes * kChunk);
        total.grow(queries * size);
        best.grow(queries);
        weight.grow(queries);
        position.grow(queries);
    }
};

template <typename Cell>
class TiledBlock {
public:
    // Tokens times heads of the group are the queries.
    TiledBlock(const Cache<Cell>& cache, int64_t kv_head, const Scores& rule, int64_t position, int64_t count,
               int64_t window, int64_t group)
        : cache_(cache), kv_head_(kv_head), rule_(rule), position_(position), queries_(count * group), window_(window),
          group_(group), size_(cache.head_dim), steps_((size_ + kTileDepth - 1) / kTileDepth),
          columns_((queries_ + kLanes - 1) / kLanes), work_(memory()) {
        work_.prepare(columns_, size_, parts);
    }

    void run(const float* query, int64_t query_stride, const int32_t* table, float* out, int64_t out_stride) {
        take(query, query_stride);
        const int64_t begin = window_ ? std::max<int64_t>(0, position_ + 1 - window_) : 0;
        const int64_t end = position_ + queries_ / group_;
        const troupe::AmxScope tiles;
        for (key_ = begin / kChunk * kChunk; key_ < end; key_ += kChunk) {
            read(table, begin, end);
            for (int64_t column = 0; column < columns_; column += 2) {
                const int64_t last = std::min<int64_t>((column + 2) * kLanes, queries_) - 1;
                const int64_t seen = std::min<int64_t>(work_.position[last] + 1 - key_, kChunk);
                if (seen <= 0) continue;
                if (window_ && work_.position[column * kLanes] - window_ >= key_ + kChunk - 1) break;
                if (column + 1 < columns_)
                    step<2>(column, (seen + kTileDepth - 1) / kTileDepth);
                else
                    step<1>(column, (seen + kTileDepth - 1) / kTileDepth);
            }
        }
        give(out, out_stride);
    }

private:
    static constexpr int parts = Cell::exact_in_half ? 1 : 3;

    static TileMemory& memory() {
        static thread_local TileMemory memory;
        return memory;
    }

    // Queries, scaled: tiles of 16 columns.
    void take(const float* query, int64_t stride) {
        const float factor = rule_.softcap > 0.0f ? rule_.scale : rule_.scale * kLog2;
        const int64_t part = columns_ * steps_ * kTileSize;
        std::memset(work_.total, 0, sizeof(float) * columns_ * kLanes * size_);
        for (int64_t column = 0; column < columns_; ++column)
            for (int64_t s = 0; s < steps_; ++s) {
                Ints words[parts][kLanes] = {};
                for (int64_t i = 0; i < kLanes && column * kLanes + i < queries_; ++i) {
                    const int64_t r = column * kLanes + i;
                    const float* from = query + r / group_ * stride + r % group_ * size_ + s * kTileDepth;
                    const bool both = s * kTileDepth + kLanes < size_;
                    Ints pairs[parts];
                    pair<parts>(load(from) * factor, both ? load(from + kLanes) * factor : Floats{}, pairs);
                    for (int p = 0; p < parts; ++p) words[p][i] = pairs[p];
                }
                for (int p = 0; p < parts; ++p)
                    transpose(words[p], work_.query + p * part + (column * steps_ + s) * kTileSize);
            }
        for (int64_t r = 0; r < columns_ * kLanes; ++r) {
            work_.position[r] = static_cast<int32_t>(position_ + std::min(r, queries_ - 1) / group_);
            work_.best[r] = rule_.sinks ? rule_.sinks[kv_head_ * group_ + r % group_] * kLog2 : kNone;
            work_.weight[r] = rule_.sinks ? 1.0f : 0.0f;
        }
    }

    // Keys and values of the chunk; those beside [begin, end) are not looked at: they count as 0.
    void read(const int32_t* table, int64_t begin, int64_t end) {
        alignas(64) static const typename Cell::Number none[kMaxChunks * kLanes + 4] = {};
        const typename Cell::Number *key[kChunk], *value[kChunk];
        const int64_t keys = end - key_ > kTileDepth ? kChunk : kTileDepth;
        for (int64_t k = 0; k < keys; ++k) {
            key[k] = value[k] = none;
            if (key_ + k < begin || key_ + k >= end) continue;
            const int64_t at = cache_.at(table, kv_head_, key_ + k);
            key[k] = cache_.key + at, value[k] = cache_.value + at;
        }
        const int64_t part = steps_ * kTileSize * kChunk / kLanes, value_part = kChunk * size_;
        for (int64_t k = 0; k < keys; ++k) {
            scales_.key[k] = Cell::scale(key[k], size_);
            scales_.value[k] = Cell::scale(value[k], size_);
            for (int64_t s = 0; s < steps_; ++s) {
                const typename Cell::Number* from = key[k] + s * kTileDepth;
                Ints words[parts];
                cut(Cell::load(from), s * kTileDepth + kLanes < size_ ? Cell::load(from + kLanes) : Floats{}, words);
                for (int p = 0; p < parts; ++p)
                    std::memcpy(work_.keys + p * part + (k / kLanes * steps_ + s) * kTileSize + k % kLanes * kTileDepth,
                                &words[p], sizeof words[p]);
            }
        }
        for (int64_t c = 0; c < size_; c += kLanes)
            for (int64_t s = 0; s < keys / kTileDepth; ++s) {
                Ints words[parts][kLanes];
                for (int64_t i = 0; i < kLanes; ++i) {
                    const int64_t k = s * kTileDepth + i;
                    Ints pairs[parts];
                    cut(Cell::load(value[k] + c), Cell::load(value[k + kLanes] + c), pairs);
                    for (int p = 0; p < parts; ++p) words[p][i] = pairs[p];
                }
                for (int p = 0; p < parts; ++p)
                    transpose(words[p], work_.values + p * value_part + c * kChunk + s * kTileSize);
            }
    }

    // As `pair`; codes of eight bits need no rounding.
    static void cut(Floats first, Floats second, Ints* words) {
        if constexpr (parts == 1)
            words[0] = paired(bits_of(first), bits_of(second));
        else
            pair<parts>(first, second, words);
    }

    // The first 32 * steps keys of the chunk and `wide` columns.
    template <int wide>
    void step(int64_t column, int64_t steps) {
        const int64_t query_part = columns_ * steps_ * kTileSize, key_part = steps_ * kTileSize * kChunk / kLanes;
        const Operand query{work_.query + column * steps_ * kTileSize, steps_ * kTileSize, query_part};
        for (int64_t s = 0; s < 2 * steps; s += 2)
            multiply<parts, 2, wide>({work_.keys + s * steps_ * kTileSize, steps_ * kTileSize, key_part}, query, steps_,
                                     false, work_.scores + s * kLanes * kLanes, kChunk * kLanes);
        for (int c = 0; c < wide; ++c) weigh(column + c, c, steps * kTileDepth);
        const Operand weights{work_.weights, kChunk * kLanes, 2 * kChunk * kLanes};
        float* const total = work_.total + column * kLanes * size_;
        int64_t c = 0;
        for (; c + kLanes < size_; c += 2 * kLanes)
            multiply<parts, 2, wide>({work_.values + c * kChunk, kChunk * kLanes, kChunk * size_}, weights, steps, true,
                                     total + c * kLanes, kLanes * size_);
        if (c < size_)
            multiply<parts, 1, wide>({work_.values + c * kChunk, kChunk * kLanes, kChunk * size_}, weights, steps, true,
                                     total + c * kLanes, kLanes * size_);
    }

    // Scores of `keys` keys and a column, the first or second of two, become weights.
    void weigh(int64_t column, int64_t side, int64_t keys) {
        float* const scores = work_.scores + side * kChunk * kLanes;
        const int32_t* const position = work_.position + column * kLanes;
        Visible visible;
        std::memcpy(&visible.last, position, sizeof visible.last);
        visible.last -= static_cast<int32_t>(key_);
        visible.behind = window_ ? visible.last - static_cast<int32_t>(window_) : Ints{} - 1;
        const bool all = position[0] >= key_ + keys - 1 && (!window_ || position[kLanes - 1] - window_ < key_);
        const bool finished = !all || rule_.softcap > 0.0f;
        if (finished) finish(scores, keys, Cell::scaled ? scales_.key : nullptr, visible, rule_.softcap);
        const Column known{work_.best + column * kLanes, work_.weight + column * kLanes,
                           work_.total + column * kLanes * size_, size_};
        const auto weights = Cell::scaled && !finished ? exponents<parts, Cell::scaled, Cell::scaled>
                                                       : exponents<parts, false, Cell::scaled>;
        weights(scores, keys, scales_, known, work_.weights + side * kChunk * kLanes, 2 * kChunk * kLanes);
    }

    void give(float* out, int64_t stride) {
        for (int64_t column = 0; column < columns_; ++column) {
            const Floats part = 1.0f / load(work_.weight + column * kLanes);
            for (int64_t c = 0; c < size_; c += kLanes) {
                Floats totals[kLanes], results[kLanes];
                const float* from = work_.total + (column * size_ + c) * kLanes;
                for (int i = 0; i < kLanes; ++i) totals[i] = load(from + i * kLanes) * part;
                transpose(totals, results);
                for (int64_t i = 0; i < kLanes && column * kLanes + i < queries_; ++i) {
                    const int64_t r = column * kLanes + i;
                    store(out + r / group_ * stride + r % group_ * size_ + c, results[i]);
                }
            }
        }
    }

    const Cache<Cell>& cache_;
    const int64_t kv_head_;
    const Scores& rule_;
    const int64_t position_, queries_, window_, group_, size_, steps_, columns_;
    TileMemory& work_;
    int64_t key_ = 0;
    ChunkScales scales_;
};

// Whether so many queries are worth the tiles: with three parts more is done to keys and values before.
template <typename Cell>
bool takes_tiles(int64_t queries) {
    return queries >= (Cell::exact_in_half ? kLanes : 4 * kLanes) && troupe::amx_allowed();
}

// As `attend_block`.
template <typename Cell>
void attend_tiled(const float* query, int64_t query_stride, const Cache<Cell>& cache, int64_t kv_head,
                  const int32_t* table, int64_t position, int64_t count, int64_t window, int64_t group,
                  const Scores& rule, float* out, int64_t out_stride) {
    TiledBlock<Cell> block(cache, kv_head, rule, position, count, window, group);
    block.run(query, query_stride, table, out, out_stride);
}

}  // namespace

#else

namespace {
template <typename Cell>
constexpr bool takes_tiles(int64_t) {
    return false;
}
template <typename Cell>
constexpr auto attend_tiled = nullptr;
}  // namespace

#endif
