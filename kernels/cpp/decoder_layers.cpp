// All layers of a decoder in one call.

#include "decoder_layers.h"

// residual [rows, hidden] becomes what leaves the last layer, before the final norm. positions [rows]; views as the
// layers name them, `num_views` of them. With `keep` [num_kept], only these rows go on behind the last layer's
// attention, and what leaves it is `out` [num_kept, hidden]. adapters: null where no row has one.
extern "C" const Refusal* decoder_layers(const Layers* model, float* residual, int64_t rows, const int64_t* positions,
                                         const View* views, int64_t num_views, const int64_t* keep, int64_t num_kept,
                                         float* out, const Adapters* adapters, int64_t threads) {
    const Refusal* refusal = any_outside("position", positions, rows, model->positions);
    for (int64_t i = 0; !refusal && i < num_views; ++i)
        refusal = check_attention(*views[i].plan, rows, views[i].rows, model->size);
    if (!refusal && keep) refusal = any_outside("kept row", keep, num_kept, rows);
    if (!refusal && adapters) refusal = check_low_rank(adapters->rows, rows, adapters->weights->groups);
    if (!refusal && adapters && keep) refusal = check_low_rank(adapters->kept, num_kept, adapters->weights->groups);
    if (refusal) return refusal;
    static thread_local Activations memory;
    Team team(threads);
    LayersPart layers(*model, rows, {keep, num_kept}, memory, team, adapters);
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    {
        team.enter();
        layers.run(residual, positions, views, out);
    }
    return nullptr;
}
