// All layers of a decoder as a part of a larger operation: norm, queries with keys and values, attention, projection,
// norm, gated feed-forward. One team of threads goes through them; between two operations it meets, which takes a
// fraction of what it takes to come back to the interpreter and to set out again.
//
// The operations are those of the other files, to the bit.

#pragma once

#include <deque>
#include <vector>

#include "layer_parts.h"
#include "low_rank.h"
#include "meeting.h"

namespace {

// kind 0: weight is a FloatWeight, 1: an Int8Weight, 2: a BlockWeight.
struct Product {
    int64_t kind;
    const void* weight;

    const FloatWeight& floats() const { return *static_cast<const FloatWeight*>(weight); }
    const Int8Weight& int8() const { return *static_cast<const Int8Weight*>(weight); }
    const BlockWeight& blocks() const { return *static_cast<const BlockWeight*>(weight); }
    int64_t outs() const { return kind == 0 ? floats().outs : kind == 1 ? int8().outs : blocks().outs; }
};

// Rows of inputs in the form that products read.
struct RowMemory {
    Quantized quantized;
    BlockInputs blocks;

    // Room for the inputs of any of them.
    void fit(const Product* const* products, int64_t count, int64_t rows) {
        int64_t padded = 0, depth = 0, fine = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (products[i]->kind == 1) padded = std::max(padded, products[i]->int8().padded);
            if (products[i]->kind == 2) {
                depth = std::max(depth, products[i]->blocks().depth);
                fine |= products[i]->blocks().fine;
            }
        }
        if (padded) quantized.fit(rows, padded);
        if (depth) blocks.fit(rows, depth, fine);
    }
};

// A layer, in fields of 8 bytes each. The norms [hidden] or null; view and rotation are numbers of what a step is given;
// multiplier is of what is added to the residual.
struct Layer {
    Product qkv, out, gate_up, down;
    const float *attention_norm, *feed_forward_norm;
    const Heads* heads;
    int64_t view, rotation, activation;
    double eps, multiplier;
};

// Arguments of the layers of one view of the cache: see `paged_attention` of attention.cpp.
struct View {
    const Plan* plan;
    const int64_t* rows;
};

// By position, [positions, half].
struct Rotation {
    const float *cosines, *sines;
};

struct Cache {
    void *keys, *values;
};

// All layers of a model, in fields of 8 bytes each: layers, caches [count]; rotations as the layers name them, of
// `positions` positions; cells as in `paged_attention`; `size` of each cache. meeting: of the ranks that have a part of
// each layer; null where this process has all of it.
struct Layers {
    const Layer* layers;
    int64_t count, hidden;
    const Rotation* rotations;
    const Cache* caches;
    int64_t cells;
    CacheSize size;
    int64_t positions;
    Meeting* meeting;
};

// A product within a larger operation, with what its threads share: `memory` has room for its rows.
class Part {
public:
    Part(const Product& product, bool gated, int64_t rows, Team& team, RowMemory& memory)
        : product_(product), memory_(memory), team_(team),
          shares_(product.kind == 0   ? shares_of(product.floats(), gated, rows, team)
                  : product.kind == 1 ? shares_of(product.int8(), gated, rows, team)
                                      : shares_of(product.blocks(), gated, rows, team)) {}

    // Every thread calls it, and none goes on before all are done. False: the calling thread is to leave.
    bool run(const Inputs& x, const Output& out) {
        bool stays = true;
        if (product_.kind == 0)
            float_part(product_.floats(), x, out, shares_);
        else if (product_.kind == 1)
            stays = int8_part(product_.int8(), x, out, memory_.quantized, shares_, team_);
        else
            stays = block_part(product_.blocks(), x, out, memory_.blocks, shares_, team_);
        return stays && team_.meet();
    }

    bool run_gated(const Inputs& x, int64_t activation, const Output& out) {
        bool stays = true;
        if (product_.kind == 0)
            float_gated_part(product_.floats(), x, activation, out, shares_);
        else if (product_.kind == 1)
            stays = int8_gated_part(product_.int8(), x, activation, out, memory_.quantized, shares_, team_);
        else
            stays = block_gated_part(product_.blocks(), x, activation, out, memory_.blocks, shares_, team_);
        return stays && team_.meet();
    }

private:
    const Product& product_;
    RowMemory& memory_;
    Team& team_;
    Shares shares_;
};

// Memory between the products of one layer, used by all layers. wide: the result of the first product, and later the
// gated one: memory that was just used is in a core's cache. kept: the rows of `attended` that the last layer continues
// with.
struct Activations {
    Memory<float> wide{"wide"}, attended{"attended"}, kept{"kept"};
    RowMemory inputs;
    std::vector<const Product*> products;

    // Room for all layers, each buffer as large as the largest layer needs it. A row may be kept twice, so that more are
    // kept than there are. apart: gate and up lie beside each other before they are one.
    void fit(const Layers& model, int64_t rows, int64_t num_kept, bool apart) {
        const int64_t most_rows = std::max(rows, num_kept);
        int64_t most_outs = 0, width = 0;
        products.clear();
        for (int64_t number = 0; number < model.count; ++number) {
            const Layer& layer = model.layers[number];
            most_outs = std::max({most_outs, layer.qkv.outs(), layer.gate_up.outs() / (apart ? 1 : 2)});
            width = std::max(width, layer.heads->heads * layer.heads->head_dim);
            for (const Product* product : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down})
                products.push_back(product);
        }
        inputs.fit(products.data(), static_cast<int64_t>(products.size()), most_rows);
        wide.grow(most_rows * most_outs);
        attended.grow(rows * width);
        kept.grow(num_kept * width);
    }
};

// Rows to go on with behind the last layer's attention; null is all.
struct Keep {
    const int64_t* places;
    int64_t count;
};

// What adapters add, in fields of 8 bytes each: for each layer the weights of qkv, out, gate_up and down; the rows that
// have adapters, of all and of those that are kept behind the last layer's attention.
struct Adapters {
    const LowRank* weights;
    LowRankRows rows, kept;
};

// The layers of one step, made by the thread that then calls for its team.
class LayersPart {
public:
    // adapters: null where no row has one.
    LayersPart(const Layers& model, int64_t rows, const Keep& keep, Activations& memory, Team& team,
               const Adapters* adapters = nullptr)
        : model_(model), rows_(rows), keep_(keep), adapters_(adapters), memory_(memory), team_(team) {
        memory.fit(model, rows, keep.places ? keep.count : 0, adapters != nullptr);
        for (int64_t number = 0; number < model.count; ++number) {
            const Layer& layer = model.layers[number];
            const int64_t after = keeps(number) ? keep.count : rows;
            parts_.emplace_back(layer.qkv, false, rows, team, memory.inputs);
            parts_.emplace_back(layer.out, false, after, team, memory.inputs);
            parts_.emplace_back(layer.gate_up, adapters == nullptr, after, team, memory.inputs);
            parts_.emplace_back(layer.down, false, after, team, memory.inputs);
        }
    }

    // Every thread calls it; false: the calling thread is to leave. residual [rows, hidden] becomes what leaves the
    // last layer, before the final norm; with `keep`, that is `out` [count, hidden]. positions [rows]; views as the
    // layers name them.
    bool run(float* residual, const int64_t* positions, const View* views, float* out) {
        for (int64_t number = 0; number < model_.count; ++number) {
            const Layer& layer = model_.layers[number];
            if (!attend(number, residual, positions, views[layer.view])) return false;
            if (keeps(number)) {
                if (keep_.count == 0) return true;
                gather(residual, model_.hidden, out);
                gather(memory_.attended.data(), layer.heads->heads * layer.heads->head_dim, memory_.kept.data());
                if (!team_.meet() || !feed(number, keep_.count, memory_.kept.data(), out)) return false;
            } else if (!feed(number, rows_, memory_.attended.data(), residual)) {
                return false;
            }
        }
        return true;
    }

private:
    bool keeps(int64_t number) const { return keep_.places && number == model_.count - 1; }

    // Up to what is attended to.
    bool attend(int64_t number, const float* residual, const int64_t* positions, const View& view) {
        const Layer& layer = model_.layers[number];
        const Heads& heads = *layer.heads;
        const Rotation angles = heads.half ? model_.rotations[layer.rotation] : Rotation{};
        const int64_t width = layer.qkv.outs();
        const Inputs normed{residual, model_.hidden, rows_, layer.attention_norm, layer.eps};
        if (!run(4 * number, normed, {memory_.wide.data(), width, false, 1.0f}, false)) return false;
        return attention_part({&heads, view.plan, memory_.wide.data(), width, rows_, model_.caches[number].keys,
                        model_.caches[number].values, model_.cells, view.rows, positions, angles.cosines, angles.sines,
                        memory_.attended.data(), heads.heads * heads.head_dim}, team_) && team_.meet();
    }

    // From there on.
    bool feed(int64_t number, int64_t rows, const float* attended, float* residual) {
        const Layer& layer = model_.layers[number];
        const int64_t inner = layer.gate_up.outs() / 2, hidden = model_.hidden;
        // Of several ranks, the leader adds its part to the residual; the others leave theirs alone to be added to that.
        const bool adds = model_.meeting == nullptr || model_.meeting->rank == 0;
        const Output sum{residual, hidden, adds, static_cast<float>(layer.multiplier)};
        const float factor = adds ? 1.0f : sum.factor;
        const Inputs normed{residual, hidden, rows, layer.feed_forward_norm, layer.eps};
        const bool kept = keeps(number);
        float* const wide = memory_.wide.data();
        if (!run(4 * number + 1, {attended, layer.heads->heads * layer.heads->head_dim, rows, nullptr, 0.0}, sum, kept) ||
            !add_up(residual, rows, factor))
            return false;
        if (adapters_ == nullptr)
            return parts_[4 * number + 2].run_gated(normed, layer.activation, {wide, inner, false, 1.0f}) &&
                   parts_[4 * number + 3].run({wide, inner, rows, nullptr, 0.0}, sum) && add_up(residual, rows, factor);
        if (!run(4 * number + 2, normed, {wide, 2 * inner, false, 1.0f}, kept)) return false;
        team_.each(rows, [&](int64_t row) { gate(wide + row * 2 * inner, inner, layer.activation); });
        return team_.meet() && run(4 * number + 3, {wide, 2 * inner, rows, nullptr, 0.0}, sum, kept);
    }

    // The sum of what all ranks have of the residual [rows, hidden]. False: a rank is lost, or the thread is to leave.
    bool add_up(float* residual, int64_t rows, float factor) {
        if (model_.meeting == nullptr) return true;
        team_.away([&] { lost_ = !meeting_sum(*model_.meeting, residual, rows * model_.hidden, factor); });
        return team_.meet() && !lost_;
    }

    // One product, with what adapters add to it. kept: the rows are those that are kept.
    bool run(int64_t part, const Inputs& x, const Output& out, bool kept) {
        if (!parts_[part].run(x, out)) return false;
        if (adapters_ == nullptr) return true;
        const LowRankRows& rows = kept ? adapters_->kept : adapters_->rows;
        const int64_t share = low_rank_share(rows.count, team_.threads());
        team_.each_in_turn((rows.count + share - 1) / share, 1, [&](int64_t turn) {
            const int64_t first = turn * share;
            add_low_rank(adapters_->weights[part], rows, first, std::min(first + share, rows.count), x, out.factor,
                         out.data, out.stride);
        });
        return team_.meet();
    }

    // activation(gate) * up in place of the gate [inner], which `up` lies behind.
    static void gate(float* row, int64_t inner, int64_t activation) {
        const float* const up = row + inner;
        int64_t i = 0;
        for (; i + kLanes <= inner; i += kLanes) store(row + i, activated(load(row + i), activation) * load(up + i));
        if (i == inner) return;
        Floats gates = {}, ups = {};
        std::memcpy(&gates, row + i, sizeof(float) * (inner - i));
        std::memcpy(&ups, up + i, sizeof(float) * (inner - i));
        const Floats found = activated(gates, activation) * ups;
        std::memcpy(row + i, &found, sizeof(float) * (inner - i));
    }

    // to [kept, width] = the rows of `from` that are kept.
    void gather(const float* from, int64_t width, float* to) const {
        team_.each(keep_.count, [&](int64_t i) {
            std::memcpy(to + i * width, from + keep_.places[i] * width, sizeof(float) * width);
        });
    }

    const Layers& model_;
    const int64_t rows_;
    const Keep keep_;
    const Adapters* const adapters_;
    Activations& memory_;
    Team& team_;
    std::deque<Part> parts_;
    bool lost_ = false;  // written by the first thread before the team meets
};

}  // namespace
