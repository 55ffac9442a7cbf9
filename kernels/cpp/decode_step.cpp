// A whole decoding step in one call: each row's last token goes through embedding, layers and head, and the next one is
// chosen and appended to the row. It is the counterpart of a CUDA graph on a GPU.
//
// The operations are those of the other files, to the bit. Rows are given by their slots in the worker's tables; these
// are read and written in place.

#include <vector>

#include "decoder_layers.h"

namespace {

// A model's parts beside its layers, in fields of 8 bytes each. embedding [embedded, hidden], each number times
// `factor`: floats, or a weight in blocks; norm [hidden] before the head. Each of `num_views` views of the cache has a group and a window; window 0 is
// none.
struct Model {
    Layers layers;
    const float* embedding;
    const BlockWeight* blocks;
    int64_t embedded;
    double factor;
    const float* norm;
    double eps;
    Product head;
    int64_t num_views;
    const int64_t *groups, *windows;
};

// The rows' state, by slot: tokens [slots, longest], lengths [slots], blocks [groups, slots, width], and their number,
// counts [groups, slots].
struct Table {
    int32_t* tokens;
    int64_t longest;
    int64_t* lengths;
    const int32_t* blocks;
    const int64_t* counts;
    int64_t num_groups, slots, width;

    const int32_t* blocks_of(int64_t group, int64_t slot) const { return blocks + (group * slots + slot) * width; }
};

// How rows choose, by `slots` slots of their own: see `choose_tokens` of sampling.cpp.
struct Options {
    const int64_t* streams;
    const float *scales, *floors;
    const int32_t* codes;
    int64_t slots;
};

// The first column of a group's blocks that a layer reads for a token at `start`.
int64_t first_column(const Model& model, int64_t group, int64_t start) {
    int64_t first = start;
    for (int64_t view = 0; view < model.num_views; ++view)
        if (model.groups[view] == group)
            first = std::min(first, model.windows[view] ? std::max<int64_t>(0, start + 1 - model.windows[view]) : 0);
    return first / model.layers.size.block_size;
}

// Whether position `start` is that of the last token of a slot, which the model knows, with blocks that the cache has.
bool fits(const Model& model, const Table& table, int64_t slot, int64_t start) {
    const int64_t length = table.lengths[slot], column = start / model.layers.size.block_size;
    if (start < 0 || start + 1 != length || length >= table.longest) return false;
    if (start >= model.layers.positions || column >= table.width) return false;
    const int32_t token = table.tokens[slot * table.longest + start];
    if (token < 0 || token >= model.embedded) return false;
    for (int64_t group = 0; group < table.num_groups; ++group) {
        const int32_t* const blocks = table.blocks_of(group, slot);
        if (column >= table.counts[group * table.slots + slot]) return false;
        for (int64_t i = first_column(model, group, start); i <= column; ++i)
            if (blocks[i] < 0 || blocks[i] >= model.layers.size.blocks) return false;
    }
    return true;
}

// The parts of a step that all layers share, and the memory of its numbers.
struct Step {
    Memory<Job> jobs{"jobs"};
    Memory<int64_t> rows{"cache rows"}, positions{"positions"};  // rows [groups, count, kv_heads], where keys and values go
    std::vector<Plan> plans;
    std::vector<View> views;
    Memory<float> residual{"residual"};
    Activations activations;
    RowMemory inputs;

    void prepare(const Model& model, const Table& table, const int64_t* slots, const int64_t* starts, int64_t count) {
        const int64_t kv_heads = model.layers.size.kv_heads, block_size = model.layers.size.block_size;
        const int64_t each = count * kv_heads;
        jobs.grow(count);
        positions.grow(count);
        rows.grow(table.num_groups * each);
        residual.grow(count * model.layers.hidden);
        plans.clear(), views.clear();
        for (int64_t i = 0; i < count; ++i) {
            jobs[i] = {static_cast<int32_t>(i), 1, static_cast<int32_t>(slots[i]), static_cast<int32_t>(starts[i])};
            positions[i] = starts[i] + 1;
            for (int64_t group = 0; group < table.num_groups; ++group) {
                const int64_t block = table.blocks_of(group, slots[i])[starts[i] / block_size];
                for (int64_t head = 0; head < kv_heads; ++head)
                    rows[group * each + i * kv_heads + head] = (block * kv_heads + head) * block_size + starts[i] % block_size;
            }
        }
        for (int64_t view = 0; view < model.num_views; ++view)
            plans.push_back({table.blocks_of(model.groups[view], 0), table.slots, table.width, jobs.data(), count, block_size,
                             model.windows[view], 1, nullptr});
        for (int64_t view = 0; view < model.num_views; ++view)
            views.push_back({&plans[view], rows.data() + model.groups[view] * each});
    }
};

// Writes the input of the first layer.
void embed(const Model& model, const Table& table, const int64_t* slots, const int64_t* starts, int64_t count, float* to,
           const Team& team) {
    const int64_t hidden = model.layers.hidden;
    const float factor = static_cast<float>(model.factor);
    team.each(count, [&](int64_t i) {
        const int64_t token = table.tokens[slots[i] * table.longest + starts[i]];
        float* const row = to + i * hidden;
        if (model.blocks)
            unpack_block_row(*model.blocks, token, row);
        else
            std::memcpy(row, model.embedding + token * hidden, sizeof(float) * hidden);
        for (int64_t c = 0; c < hidden && factor != 1.0f; ++c) row[c] *= factor;
    });
}

}  // namespace

// Rows at slots [count] compute the positions `starts` and choose what follows: tokens [count] and peaks [count] as of
// `choose_tokens`; a token is written to its row, which is longer by one then, as 0 where none could be chosen. options
// lie at `option_slots` [count]; logits is memory for [count, vocab]. done[0] is 1; or 0 where some row is not about to
// go on from its last token: nothing was changed then.
extern "C" const Refusal* decode_step(const Model* model, const Table* table, const Options* options,
                                      const int64_t* slots, const int64_t* option_slots, const int64_t* starts,
                                      int64_t count, float* logits, int64_t* tokens, float* peaks, int64_t* done,
                                      int64_t threads) {
    static thread_local Step memory;
    done[0] = 0;
    const Refusal* refusal = any_outside("slot", slots, count, table->slots);
    if (!refusal) refusal = any_outside("slot of options", option_slots, count, options->slots);
    if (refusal) return refusal;
    for (int64_t i = 0; i < count; ++i)
        if (!fits(*model, *table, slots[i], starts[i])) return nullptr;
    Step& step = memory;
    step.prepare(*model, *table, slots, starts, count);
    const int64_t hidden = model->layers.hidden, vocab = model->head.outs();
    float* const residual = step.residual.data();
    Team team(threads);
    LayersPart layers(model->layers, count, {}, step.activations, team);
    const Product* const head_alone = &model->head;
    step.inputs.fit(&head_alone, 1, count);
    Part head(model->head, false, count, team, step.inputs);
    const Choosing choosing{logits, vocab, count, vocab, option_slots, options->streams, options->scales,
                            options->floors, step.positions.data(), options->codes, nullptr, 0, nullptr, 0,
                            tokens, peaks};
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    {
        team.enter();
        embed(*model, *table, slots, starts, count, residual, team);
        if (team.meet() && layers.run(residual, starts, step.views.data(), nullptr) &&
            head.run({residual, hidden, count, model->norm, model->eps}, {logits, vocab, false, 1.0f}))
            choose_part(choosing, team);
    }
    for (int64_t i = 0; i < count; ++i) {
        int64_t& length = table->lengths[slots[i]];
        table->tokens[slots[i] * table->longest + length++] = static_cast<int32_t>(tokens[i] > 0 ? tokens[i] : 0);
    }
    done[0] = 1;
    return nullptr;
}
