// Operations as parts of a larger one. Every thread of a team calls the same function with the same arguments and does
// its part of the work. No thread waits at the end: before anything reads what was written, the team has to meet. Where an
// operation gives back false, the calling thread is to leave the region.

#pragma once

#include <algorithm>

#include "refusal.h"
#include "rows.h"
#include "thread_shares.h"

namespace troupe {

// A weight in float32 as linear.cpp reads it. bias [outs] or null; `splits`: products of many rows may be added up in
// another order than those of few.
struct FloatWeight {
    const float* data;
    int64_t panel, padded, depth, outs;
    const float* bias;
    int64_t splits;

    const float* at(int64_t unit) const {  // units are 16 outputs
        const int64_t out = unit * kLanes;
        return data + out / panel * panel * padded + out % panel;
    }
    // How many units from this one on lie in its panel, 4 at the most.
    int64_t beside(int64_t unit) const {
        const int64_t left = (panel - unit * kLanes % panel) / kLanes;
        return left < 4 ? left : 4;
    }
};

constexpr int64_t kInputGroup = 128;  // inputs of products in eight bits that share a scale
inline int64_t input_groups(int64_t padded) { return (padded + kInputGroup - 1) / kInputGroup; }

// A weight in eight bits as int8_linear.cpp reads it. `scale` and `bias` (or null) have whole panels.
struct Int8Weight {
    const int8_t* values;
    int64_t panel, padded, depth, outs;
    const float* scale;
    const float* bias;

    const int8_t* at(int64_t unit) const {  // units are 16 outputs
        const int64_t out = unit * kLanes, place = out % panel;
        return values + (out - place) * padded + place * 4;
    }
    // How many units from this one on lie in its panel.
    int64_t beside(int64_t unit) const { return (panel - unit * kLanes % panel) / kLanes; }
};

// Rows in eight bits. Each group of a row has a scale, and the number that the sums of its products begin with. There is
// room for 32 rows at a time, since tiles are read as a whole.
struct Quantized {
    Memory<int8_t> values{"rows in eight bits"};
    Memory<float> scales{"scales of groups"};   // [rows, groups]
    Memory<int32_t> starts{"starts of groups"};  // [rows, groups]

    // padded: numbers of a row, see `Int8Weight`.
    void fit(int64_t rows, int64_t padded) {
        values.grow((rows + 31) / 32 * 32 * padded);
        scales.grow(rows * input_groups(padded));
        starts.grow(rows * input_groups(padded));
    }
};

// A weight in the blocks of GGUF files: see block_types.h. One below the other, its parts have `units` units of 16
// outputs from `first` on, each of a type of its own.
struct BlockPart {
    const uint8_t *codes, *scales;
    int64_t type, first, units;
};

// `starts`: a bit for each of the offsets that some part has; `fine`: inputs have fifteen bits instead of eight. bias (or
// null) of whole units.
struct BlockWeight {
    const BlockPart* parts;
    int64_t num_parts, depth, outs, starts, fine;
    const float* bias;
};

// to [depth] = a row of the weight.
void unpack_block_row(const BlockWeight& weight, int64_t row, float* to);

// Rows as block_linear.cpp reads them: see block_inputs.h.
struct BlockInputs {
    Memory<int8_t> values{"rows in groups"};
    Memory<float> scales{"scales of groups"};
    Memory<int32_t> starts{"starts of groups"};

    void fit(int64_t rows, int64_t depth, int64_t fine);
};

// Where a product goes: written, or added `factor` times to what is there.
struct Output {
    float* data;
    int64_t stride;
    bool adds;
    float factor;

    // 16 outputs of a row, or those that are left of `outs`.
    void put(int64_t row, int64_t column, Floats value, int64_t outs) const {
        float* const to = data + row * stride + column;
        if (outs - column >= kLanes) {
            store(to, adds ? load(to) + factor * value : value);
        } else {
            for (int64_t i = 0; i < outs - column; ++i) to[i] = adds ? to[i] + factor * value[i] : value[i];
        }
    }
};

constexpr int64_t kFewRows = 64;  // up to here a product takes as long as the memory, beyond as long as the arithmetic
// Of many rows, that a thread goes through a weight with, or a few more where there are kMostRounds; with fewer than the
// least, reading it would take longer.
constexpr int64_t kRoundRows = 128, kLeastRoundRows = 32;

// How often all outputs are dealt out: many rows are cut into rounds, equally many for each thread where these are not too
// short or too many, so that it works on rows of its own and all have the same to do, however few panels there are.
// Several threads share a round where there are more of them.
inline int64_t rounds_of(int64_t rows, int64_t threads) {
    const int64_t each = (rows + kRoundRows * threads - 1) / (kRoundRows * threads);
    return rows > kFewRows ? std::min({each * threads, rows / kLeastRoundRows, kMostRounds}) : 1;
}

// How outputs of a weight are dealt out in one product.
Shares shares_of(const FloatWeight& weight, bool gated, int64_t rows, const Team& team);
Shares shares_of(const Int8Weight& weight, bool gated, int64_t rows, const Team& team);
Shares shares_of(const BlockWeight& weight, bool gated, int64_t rows, const Team& team);

// The shares are for this one product. `gated` is activation(first half) * second half.
void float_part(const FloatWeight& weight, const Inputs& x, const Output& out, Shares& shares);
void float_gated_part(const FloatWeight& weight, const Inputs& x, int64_t activation, const Output& out, Shares& shares);

// As these, of many rows: where `splits` of split_bf16.h says so.
void split_part(const FloatWeight& weight, const Inputs& x, const Output& out, Shares& shares);
void split_gated_part(const FloatWeight& weight, const Inputs& x, int64_t activation, const Output& out, Shares& shares);

// `memory` fits the weight; the threads use it together.
bool int8_part(const Int8Weight& weight, const Inputs& x, const Output& out, Quantized& memory, Shares& shares,
               Team& team);
bool int8_gated_part(const Int8Weight& weight, const Inputs& x, int64_t activation, const Output& out,
                     Quantized& memory, Shares& shares, Team& team);
bool block_part(const BlockWeight& weight, const Inputs& x, const Output& out, BlockInputs& memory, Shares& shares,
                Team& team);
bool block_gated_part(const BlockWeight& weight, const Inputs& x, int64_t activation, const Output& out,
                      BlockInputs& memory, Shares& shares, Team& team);

// The attention of a layer, in fields of 8 bytes each. sinks [heads], query_norm and key_norm [head_dim] or null.
struct Heads {
    int64_t heads, kv_heads, head_dim, half;
    double scale, softcap, eps;
    const float *sinks, *query_norm, *key_norm;
};

struct Job {
    int32_t token, count, row, position;
};

// The keys that a token of a tree of drafts sees: all keys from `first` on before `base`, and the one at `base` + j if
// bit j of `seen` is set. For a token without a tree, its first unseen key counts as `base`.
struct Tree {
    int64_t first, base;
    uint64_t seen;
};

// A step's plan, in fields of 8 bytes each. tables [rows, width]; window 0 is none; alone: no job reads keys that
// another one writes; trees [jobs], or null.
struct Plan {
    const int32_t* tables;
    int64_t rows, width;
    const Job* jobs;
    int64_t num_jobs, block_size, window, alone;
    const Tree* trees;
};

// All that `paged_attention` of attention.cpp is given. The angles of a token are row `positions[token]` of cosines and
// sines, or its own row where `positions` is null.
struct Attention {
    const Heads* layer;
    const Plan* plan;
    float* query;
    int64_t query_stride, tokens;
    void *key_cache, *value_cache;
    int64_t cells;
    const int64_t *rows, *positions;
    const float *cosines, *sines;
    float* out;
    int64_t out_stride;
};

bool attention_part(const Attention& given, Team& team);

// A cache of `blocks` blocks of `block_size` positions for each of `kv_heads` heads.
struct CacheSize {
    int64_t blocks, kv_heads, block_size;
};

// Null where jobs name tokens before `tokens`, rows and columns of the tables, and blocks of the cache; and where `rows`
// [tokens, kv_heads], unless null, are rows of a cache [blocks, kv_heads, block_size].
const Refusal* check_attention(const Plan& plan, int64_t tokens, const int64_t* rows, const CacheSize& cache);

// How rows choose their next tokens: all that `choose_tokens` of sampling.cpp is given.
struct Choosing {
    const float* logits;
    int64_t stride, rows, vocab;
    const int64_t* slots;
    const int64_t* streams;
    const float *scales, *floors;
    const int64_t* positions;
    const int32_t* codes;
    const int64_t* guided;
    int64_t num_guided;
    const int32_t* bits;
    int64_t words;
    int64_t* tokens;
    float* peaks;
};

void choose_part(const Choosing& given, const Team& team);

}  // namespace troupe

using namespace troupe;
