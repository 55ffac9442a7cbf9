// Products of few rows of floats with a constant weight in codes of eight or four bits, which are decoded on the way.
//
// Sixteen outputs are a unit. Codes lie unit by unit, in each of which the outputs of one input lie side by side:
// [units][depth][16] bytes, or [units][depth / 2][16] with the even input in the low half of a byte. A weight is
// decoded(code) * scale + offset, with a scale and an offset per output and group of inputs: [units][groups][16].
//
// Every output is a sum over the inputs in their order, group by group, for any number of rows, thread or tile: a row's
// result does not depend on its neighbours, to the bit.

#include "refusal.h"
#include "registers.h"
#include "rows.h"

using namespace troupe;

namespace {

#if defined(__AVX512F__)
constexpr int kAccumulators = 16;
#else
constexpr int kAccumulators = 4;
#endif
constexpr int kMostColumns = 4;  // units of a tile
constexpr int kMostRows = 4;

enum Kind : int64_t { kInt8 = 0, kTable = 1, kFp8 = 2 };

struct CodedWeight {
    const uint8_t* codes;
    int64_t kind, depth, groups, outs;
    const int8_t* table;  // what the sixteen codes of four bits are
    const float* scale;
    const float* offset;  // or null
    const float* bias;    // or null, of whole units

    int64_t bytes_of_unit() const { return (kind == kTable ? depth / 2 : depth) * kLanes; }
};

constexpr int columns_for(int rows) { return rows * 4 <= kAccumulators ? 4 : rows * 2 <= kAccumulators ? 2 : 1; }

// Two inputs of a unit; the codes of the second follow those of the first, or share their bytes.
template <int64_t kind>
inline void decode(const uint8_t* codes, Bytes table, Register* first, Register* second) {
    const Bytes bytes = bytes_at(codes);
    if (kind == kTable) {
        registers_of(looked_up(table, bytes & 15), first);
        registers_of(looked_up(table, bytes >> 4), second);
    } else if (kind == kInt8) {
        registers_of((Chars)bytes, first);
        registers_of((Chars)bytes_at(codes + kLanes), second);
    } else {
        registers_of_fp8(bytes, first);
        registers_of_fp8(bytes_at(codes + kLanes), second);
    }
}

// Two inputs take so many bytes.
template <int64_t kind>
constexpr int64_t kPair = kind == kTable ? kLanes : 2 * kLanes;

// The inputs of a tile: rows of x, and the sums over groups of each row.
struct TileRows {
    const float* const* x;
    const float* const* sums;
};

// out [rows, kMostColumns, 16] = `rows` rows times `columns` units from `unit` on.
template <int64_t kind, int rows, int columns>
void tile(const TileRows& from, const CodedWeight& weight, int64_t unit, float* out) {
    const int64_t size = weight.depth / weight.groups, unit_bytes = weight.bytes_of_unit();
    const uint8_t* codes = weight.codes + unit * unit_bytes;
    const Bytes table = kind == kTable ? bytes_at(weight.table) : Bytes{};
    std::memset(out, 0, sizeof(float) * rows * kMostColumns * kLanes);
    for (int64_t g = 0; g < weight.groups; ++g) {
        Register part[rows][columns][kRegisters];
        for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < columns; ++c) {
                for (int i = 0; i < kRegisters; ++i) part[r][c][i] = Register{};
            }
        }
        for (int64_t k = g * size; k < (g + 1) * size; k += 2) {
            for (int c = 0; c < columns; ++c) {
                Register first[kRegisters], second[kRegisters];
                decode<kind>(codes + c * unit_bytes, table, first, second);
                for (int r = 0; r < rows; ++r) {
                    for (int i = 0; i < kRegisters; ++i) {
                        part[r][c][i] += from.x[r][k] * first[i];
                        part[r][c][i] += from.x[r][k + 1] * second[i];
                    }
                }
            }
            codes += kPair<kind>;
        }
        for (int c = 0; c < columns; ++c) {
            for (int i = 0; i < kRegisters; ++i) {
                const int64_t at = ((unit + c) * weight.groups + g) * kLanes + i * kRegisterLanes;
                const Register scale = load_register(weight.scale + at);
                for (int r = 0; r < rows; ++r) {
                    float* const to = out + (r * kMostColumns + c) * kLanes + i * kRegisterLanes;
                    Register total = load_register(to) + part[r][c][i] * scale;
                    if (weight.offset != nullptr) total += from.sums[r][g] * load_register(weight.offset + at);
                    store_register(to, total);
                }
            }
        }
    }
}

typedef void (*Tile)(const TileRows&, const CodedWeight&, int64_t, float*);
#define TROUPE_CODED_ROW(kind, rows) {tile<kind, rows, 1>, tile<kind, rows, 2>, tile<kind, rows, 3>, tile<kind, rows, 4>}
#define TROUPE_CODED(kind) \
    {TROUPE_CODED_ROW(kind, 1), TROUPE_CODED_ROW(kind, 2), TROUPE_CODED_ROW(kind, 3), TROUPE_CODED_ROW(kind, 4)}
const Tile kTiles[3][kMostRows][kMostColumns] = {TROUPE_CODED(kInt8), TROUPE_CODED(kTable), TROUPE_CODED(kFp8)};

// Rows ready for tiles.
struct Ready {
    Memory<float> normed{"normed rows"}, sums{"sums of groups"};
    Memory<const float*> x{"rows"}, row_sums{"rows of sums"};

    void fit(int64_t rows, const CodedWeight& weight) {
        normed.grow(rows * weight.depth);
        sums.grow(rows * weight.groups);
        x.grow(rows);
        row_sums.grow(rows);
    }

    void take(const Inputs& inputs, const CodedWeight& weight, int64_t row) {
        x[row] = ready_row(inputs, row, weight.depth, normed.data() + row * weight.depth);
        float* const to = sums.data() + row * weight.groups;
        row_sums[row] = to;
        if (weight.offset == nullptr) return;
        const int64_t size = weight.depth / weight.groups;
        for (int64_t g = 0; g < weight.groups; ++g) {
            float total = 0.0f;
#pragma omp simd reduction(+ : total)
            for (int64_t k = 0; k < size; ++k) total += x[row][g * size + k];
            to[g] = total;
        }
    }
};

// Calls write(row, column, value) for 16 outputs at a time: of the product, or of activation(first half) * second half.
template <bool gated, typename Write>
void product(const CodedWeight& weight, const Inputs& x, int64_t activation, int64_t threads, Write write) {
    static thread_local Ready memory;
    if (x.rows < 1) return;
    const int64_t rows = x.rows, units = ((gated ? weight.outs / 2 : weight.outs) + kLanes - 1) / kLanes;
    const int64_t parts = (rows + kMostRows - 1) / kMostRows;
    const int64_t columns = columns_for(static_cast<int>((rows + parts - 1) / parts));
    Ready* shared = &memory;
    shared->fit(rows, weight);
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        Ready* inputs = shared;
        if (rows == 1) {  // done by every thread for itself, which is quicker than to wait for one
            inputs = &memory;
            inputs->fit(1, weight);
            inputs->take(x, weight, 0);
        } else {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) shared->take(x, weight, row);
        }
        alignas(64) float first[kMostRows * kMostColumns * kLanes], second[kMostRows * kMostColumns * kLanes];
        const auto biased = [&](const float* sums, int64_t column) {
            return weight.bias == nullptr ? load(sums) : load(sums) + load(weight.bias + column);
        };
        const int64_t end = units * (me + 1) / team;
        for (int64_t unit = units * me / team, width; unit < end; unit += width) {
            width = columns < end - unit ? columns : end - unit;
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t begin = rows * part / parts, count = rows * (part + 1) / parts - begin;
                const TileRows from{inputs->x.data() + begin, inputs->row_sums.data() + begin};
                const Tile run = kTiles[weight.kind][count - 1][width - 1];
                run(from, weight, unit, first);
                if (gated) run(from, weight, units + unit, second);
                for (int64_t r = 0; r < count; ++r) {
                    for (int64_t c = 0; c < width; ++c) {
                        const int64_t column = (unit + c) * kLanes, at = (r * kMostColumns + c) * kLanes;
                        Floats value = biased(first + at, column);
                        if (gated) value = activated(value, activation) * biased(second + at, units * kLanes + column);
                        write(begin + r, column, value);
                    }
                }
            }
        }
    }
}

template <int64_t kind>
void decode_unit(const CodedWeight& weight, int64_t unit, float* out, int64_t stride) {
    const int64_t size = weight.depth / weight.groups;
    const uint8_t* codes = weight.codes + unit * weight.bytes_of_unit();
    const Bytes table = kind == kTable ? bytes_at(weight.table) : Bytes{};
    for (int64_t k = 0; k < weight.depth; k += 2, codes += kPair<kind>) {
        Register first[kRegisters], second[kRegisters];
        decode<kind>(codes, table, first, second);
        for (int i = 0; i < kRegisters; ++i) {
            const int64_t lane = i * kRegisterLanes, at = (unit * weight.groups + k / size) * kLanes + lane;
            const Register scale = load_register(weight.scale + at);
            const Register offset = weight.offset == nullptr ? Register{} : load_register(weight.offset + at);
            store_register(out + k * stride + lane, first[i] * scale + offset);
            store_register(out + (k + 1) * stride + lane, second[i] * scale + offset);
        }
    }
}

}  // namespace

// As `linear` of linear.cpp.
extern "C" const Refusal* coded_linear(const CodedWeight* weight, const float* x, int64_t x_stride, int64_t rows,
                                       const float* norm, double eps, int64_t adds, double factor, float* out,
                                       int64_t out_stride, int64_t threads) {
    const float by = static_cast<float>(factor);
    const int64_t outs = weight->outs;
    product<false>(*weight, {x, x_stride, rows, norm, eps}, 0, threads, [=](int64_t r, int64_t column, Floats value) {
        float* const to = out + r * out_stride + column;
        if (outs - column >= kLanes) {
            store(to, adds ? load(to) + by * value : value);
        } else {
            for (int64_t i = 0; i < outs - column; ++i) to[i] = adds ? to[i] + by * value[i] : value[i];
        }
    });
    return nullptr;
}

// As `linear_gated` of linear.cpp.
extern "C" const Refusal* coded_linear_gated(const CodedWeight* weight, const float* x, int64_t x_stride,
                                             int64_t rows, const float* norm, double eps, int64_t activation,
                                             float* out, int64_t out_stride, int64_t threads) {
    product<true>(*weight, {x, x_stride, rows, norm, eps}, activation, threads,
                  [=](int64_t r, int64_t column, Floats value) { store(out + r * out_stride + column, value); });
    return nullptr;
}

// out [depth, 16 * count] = the weights of `count` units from `unit` on, inputs down and outputs across.
extern "C" const Refusal* coded_decode(const CodedWeight* weight, int64_t unit, int64_t count, float* out,
                                       int64_t threads) {
    const int64_t units = (weight->outs + kLanes - 1) / kLanes;
    if (const Refusal* refusal = outside("unit", 0, unit, 0, units - count + 1)) return refusal;
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (threads > 1)
    for (int64_t u = 0; u < count; ++u) {
        float* const to = out + u * kLanes;
        if (weight->kind == kInt8) decode_unit<kInt8>(*weight, unit + u, to, count * kLanes);
        if (weight->kind == kTable) decode_unit<kTable>(*weight, unit + u, to, count * kLanes);
        if (weight->kind == kFp8) decode_unit<kFp8>(*weight, unit + u, to, count * kLanes);
    }
    return nullptr;
}
