// All layers of a decoder in one call: norm, queries with keys and values, attention, projection, norm,
// gated feed-forward. One team of threads goes through them; between two operations it meets, which takes a fraction of
// what it takes to come back to the interpreter and to set out again.
//
// The operations are those of the other files, to the bit.

#include <deque>

#include "parts.h"

namespace {

// kind 0: weight is a FloatWeight, 1: an Int8Weight.
struct Product {
    int64_t kind;
    const void* weight;

    const FloatWeight& floats() const { return *static_cast<const FloatWeight*>(weight); }
    const Int8Weight& int8() const { return *static_cast<const Int8Weight*>(weight); }
    int64_t outs() const { return kind == 0 ? floats().outs : int8().outs; }
};

// A layer, in fields of 8 bytes each. The norms [hidden] or null; view and rotation are numbers of `Step`'s; multiplier
// is of what is added to the residual.
struct Layer {
    Product qkv, out, gate_up, down;
    const float *attention_norm, *feed_forward_norm;
    const Heads* heads;
    int64_t view, rotation, activation;
    double eps, multiplier;
};

// What the layers of one view of the cache read and write: see `paged_attention` of attention.cpp.
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

// A product within the call, with what its threads share.
class Part {
public:
    Part(const Product& product, bool gated, int64_t rows, int64_t threads, Quantized& memory)
        : product_(product), memory_(memory), shares_(product.kind == 0 ? shares_of(product.floats(), gated, rows, threads)
                                                                        : shares_of(product.int8(), gated, rows, threads)) {
        if (product.kind != 0) memory.fit(rows, product.int8());
    }

    // Every thread calls it, and nobody goes on before all are done.
    void run(const Inputs& x, const Output& out) {
        if (product_.kind == 0)
            float_part(product_.floats(), x, out, shares_);
        else
            int8_part(product_.int8(), x, out, memory_, shares_);
#pragma omp barrier
    }

    void run_gated(const Inputs& x, int64_t activation, const Output& out) {
        if (product_.kind == 0)
            float_gated_part(product_.floats(), x, activation, out, shares_);
        else
            int8_gated_part(product_.int8(), x, activation, out, memory_, shares_);
#pragma omp barrier
    }

private:
    const Product& product_;
    Quantized& memory_;
    Shares shares_;
};

// What lies between the products of one layer, for all layers; kept: the rows of `attended` that the last one goes on with.
struct Activations {
    std::vector<float> projected, attended, kept, gated;

    void fit(const Layer& layer, int64_t rows, int64_t num_kept) {
        const int64_t width = layer.heads->heads * layer.heads->head_dim;
        grow(projected, rows * layer.qkv.outs());
        grow(attended, rows * width);
        grow(kept, num_kept * width);
        grow(gated, rows * (layer.gate_up.outs() / 2));
    }
};

// to [count, width] = the rows of `from` at `places`.
void gather(const float* from, const int64_t* places, int64_t count, int64_t width, float* to) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * width, from + places[i] * width, sizeof(float) * width);
}

}  // namespace

// residual [rows, hidden] becomes what leaves the last layer, before the final norm. layers, caches [count]; views and
// rotations as the layers name them; positions [rows]; cells as in `paged_attention`. With `keep` [num_kept], only these
// rows go on behind the last layer's attention, and what leaves it is `out` [num_kept, hidden].
extern "C" void decoder_layers(const Layer* layers, int64_t count, float* residual, int64_t rows, int64_t hidden,
                               const int64_t* positions, const View* views, const Rotation* rotations,
                               const Cache* caches, int64_t cells, const int64_t* keep, int64_t num_kept, float* out,
                               int64_t threads) {
    static thread_local Activations memory;
    static thread_local Quantized quantized;
    std::deque<Part> parts;
    for (int64_t number = 0; number < count; ++number) {
        const Layer& layer = layers[number];
        const int64_t after = keep && number == count - 1 ? num_kept : rows;
        memory.fit(layer, rows, keep ? num_kept : 0);
        parts.emplace_back(layer.qkv, false, rows, threads, quantized);
        parts.emplace_back(layer.out, false, after, threads, quantized);
        parts.emplace_back(layer.gate_up, true, after, threads, quantized);
        parts.emplace_back(layer.down, false, after, threads, quantized);
    }
    Activations& shared = memory;
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    for (int64_t number = 0; number < count; ++number) {
        const Layer& layer = layers[number];
        const Heads& heads = *layer.heads;
        const View& view = views[layer.view];
        const Rotation angles = heads.half ? rotations[layer.rotation] : Rotation{};
        const int64_t width = layer.qkv.outs(), attended = heads.heads * heads.head_dim, inner = layer.gate_up.outs() / 2;
        parts[4 * number].run({residual, hidden, rows, layer.attention_norm, layer.eps},
                              {shared.projected.data(), width, false, 1.0f});
        attention_part({&heads, view.plan, shared.projected.data(), width, rows, caches[number].keys,
                        caches[number].values, cells, view.rows, positions, angles.cosines, angles.sines,
                        shared.attended.data(), attended});
#pragma omp barrier
        const bool keeps = keep && number == count - 1;
        if (keeps && num_kept == 0) break;
        if (keeps) {
            gather(residual, keep, num_kept, hidden, out);
            gather(shared.attended.data(), keep, num_kept, attended, shared.kept.data());
        }
        const float* const from = keeps ? shared.kept.data() : shared.attended.data();
        float* const to = keeps ? out : residual;
        const int64_t after = keeps ? num_kept : rows;
        const Output sum{to, hidden, true, static_cast<float>(layer.multiplier)};
        parts[4 * number + 1].run({from, attended, after, nullptr, 0.0}, sum);
        parts[4 * number + 2].run_gated({to, hidden, after, layer.feed_forward_norm, layer.eps}, layer.activation,
                                        {shared.gated.data(), inner, false, 1.0f});
        parts[4 * number + 3].run({shared.gated.data(), inner, after, nullptr, 0.0}, sum);
    }
}
