// Products with a constant weight in eight bits: each group of a row's inputs is quantized by itself, and its sums are
// whole numbers. Where the processor has tiles (int8_tiles.h), they compute all but the fewest rows; without AVX2 few
// rows are what this is for.
//
// The weight lies in panels of `panel` outputs, in each of which four inputs of one output lie side by side,
// [outs / panel][depth / 4][panel][4]. kWeightZero of int8_sums.h is added to its numbers.
//
// Sums of whole numbers are exact, and what follows is done number by number in one order: a row's result does not
// depend on its neighbours, the tile or the instruction set, to the bit.

#include "quantized_codes.h"
#include "int8_tiles.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// A line is four inputs of 16 outputs. `Dots` are the sums of 16 outputs, `Weights` a line of the weight.
#if defined(__AVX512VNNI__)
constexpr int kAccumulators = 24;
typedef Ints Dots;
typedef Ints Weights;
inline Dots started(int32_t start) { return Ints{} + start; }
inline Weights line(const int8_t* from) { return (Ints)_mm512_loadu_si512(from); }
inline void dot(Dots& sum, int32_t x, const Weights& w) {
    sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(x));
}
inline void add_group(float* totals, const Dots& sum, float scale) { store(totals, with_group(load(totals), sum, scale)); }
#elif defined(__AVX2__)
constexpr int kAccumulators = 4;
struct Dots {
    __m256i low, high;
};
inline Dots started(int32_t start) { return {_mm256_set1_epi32(start), _mm256_set1_epi32(start)}; }
inline __m256i half_line(const int8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void add_half(float* totals, __m256i sum, float scale) {
    const __m256 whole = _mm256_cvtepi32_ps(sum);
#if defined(__FMA__)
    _mm256_storeu_ps(totals, _mm256_fmadd_ps(whole, _mm256_set1_ps(scale), _mm256_loadu_ps(totals)));
#else  // a virtual machine may hide the instruction
    for (int lane = 0; lane < 8; ++lane) totals[lane] = std::fma(whole[lane], scale, totals[lane]);
#endif
}
inline void add_group(float* totals, const Dots& sum, float scale) {
    add_half(totals, sum.low, scale);
    add_half(totals + 8, sum.high, scale);
}
#if defined(__AVXVNNI__)
struct Weights {
    __m256i low, high;
};
inline Weights line(const int8_t* from) { return {half_line(from), half_line(from + 32)}; }
inline void dot(Dots& sum, int32_t x, const Weights& w) {
    const __m256i inputs = _mm256_set1_epi32(x);
    sum.low = _mm256_dpbusd_avx_epi32(sum.low, w.low, inputs);
    sum.high = _mm256_dpbusd_avx_epi32(sum.high, w.high, inputs);
}
#else
// The weight gives its sign to the inputs: |w| * x of two inputs is at most 2 * 128 * 127, which 16 bits hold.
struct Weights {
    __m256i low, high, low_size, high_size;
};
inline Weights line(const int8_t* from) {
    const __m256i low = half_line(from), high = half_line(from + 32);
    return {low, high, _mm256_abs_epi8(low), _mm256_abs_epi8(high)};
}
inline __m256i dot_half(__m256i sum, __m256i x, __m256i w, __m256i size) {
    const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline void dot(Dots& sum, int32_t x, const Weights& w) {
    const __m256i inputs = _mm256_set1_epi32(x);
    sum.low = dot_half(sum.low, inputs, w.low, w.low_size);
    sum.high = dot_half(sum.high, inputs, w.high, w.high_size);
}
#endif
#else
constexpr int kAccumulators = 4;
typedef Ints Dots;
struct Weights {
    int8_t values[4 * kLanes];
};
inline Dots started(int32_t start) { return Ints{} + start; }
inline Weights line(const int8_t* from) {
    Weights bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return bytes;
}
inline void dot(Dots& sum, int32_t x, const Weights& w) {
    int8_t inputs[4];
    std::memcpy(inputs, &x, sizeof inputs);
    for (int lane = 0; lane < kLanes; ++lane)
        for (int k = 0; k < 4; ++k) sum[lane] += inputs[k] * w.values[4 * lane + k];
}
inline void add_group(float* totals, const Dots& sum, float scale) { store(totals, with_group(load(totals), sum, scale)); }
#endif

constexpr int kMostColumns = 4;  // vectors of 16 outputs of a tile
constexpr int kMostRows = 6;
constexpr int64_t kMostAtOnce = 2048;  // rows of one walk through the weight, which bounds the memory that they take

constexpr int columns_for(int rows) { return rows * 4 <= kAccumulators ? 4 : rows * 2 <= kAccumulators ? 2 : 1; }

// Rows that a tile begins with.
struct TileRows {
    const int8_t* values;
    const float* scales;
    const int32_t* starts;
    int64_t padded;
};

// Totals of `rows` rows times 16 * `columns` outputs. Template: the sums of a group stay in registers.
template <int rows, int columns>
void tile(const TileRows& x, const int8_t* weight, int64_t panel, float* out) {
    const int64_t groups = input_groups(x.padded);
    std::memset(out, 0, sizeof(float) * rows * kMostColumns * kLanes);
    for (int64_t g = 0; g < groups; ++g) {
        Dots sums[rows][columns];
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; ++c) sums[r][c] = started(kWeightZero ? x.starts[r * groups + g] : 0);
        const int64_t end = std::min(x.padded, (g + 1) * kInputGroup) / 4;
        for (int64_t k = g * kInputGroup / 4; k < end; ++k) {
            Weights w[columns];
            for (int c = 0; c < columns; ++c) w[c] = line(weight + (k * panel + c * kLanes) * 4);
            for (int r = 0; r < rows; ++r) {
                int32_t inputs;
                std::memcpy(&inputs, x.values + r * x.padded + 4 * k, sizeof inputs);
                for (int c = 0; c < columns; ++c) dot(sums[r][c], inputs, w[c]);
            }
        }
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; ++c)
                add_group(out + (r * kMostColumns + c) * kLanes, sums[r][c], x.scales[r * groups + g]);
    }
}

typedef void (*Tile)(const TileRows&, const int8_t*, int64_t, float*);
#define TILES(rows) {tile<rows, 1>, tile<rows, 2>, tile<rows, 3>, tile<rows, 4>}
const Tile kTiles[kMostRows][kMostColumns] = {TILES(1), TILES(2), TILES(3), TILES(4), TILES(5), TILES(6)};

// A row in eight bits, group by group; starts (or null): what each group's sums begin with.
void quantize_groups(const float* x, int64_t depth, int8_t* to, int64_t padded, float* scales, int32_t* starts) {
    for (int64_t begin = 0; begin < padded; begin += kInputGroup) {
        const int64_t size = std::min(depth - begin, kInputGroup), room = std::min(padded - begin, kInputGroup);
        *scales++ = quantize(x + begin, size, reinterpret_cast<uint8_t*>(to + begin), room, 0);
        if (kWeightZero == 0 || starts == nullptr) continue;
        int32_t sum = 0;
        for (int64_t k = begin; k < begin + room; ++k) sum += to[k];
        *starts++ = -kWeightZero * sum;
    }
}

// Row `row` of the inputs in eight bits: in line, or as tiles want it.
void take(Quantized& memory, const Inputs& x, const Int8Weight& weight, int64_t row, bool in_tiles) {
    static thread_local Memory<float> normed{"normed row"};
    static thread_local Memory<int8_t> values{"row in eight bits"};
    normed.grow(weight.depth);
    values.grow(weight.padded);
    const float* from = ready_row(x, row, weight.depth, normed.data());
    int8_t* const to = in_tiles ? values.data() : memory.values.data() + row * weight.padded;
    const int64_t first = row * input_groups(weight.padded);
    quantize_groups(from, weight.depth, to, weight.padded, memory.scales.data() + first, memory.starts.data() + first);
#if defined(TROUPE_AMX)
    if (in_tiles) lay(to, weight.padded, memory.values.data() + place_of(row, weight.padded));
#endif
}

// Totals of rows [begin, begin + count) times the units [unit, unit + width).
inline void totals_of(const Quantized& x, int64_t begin, int64_t count, const Int8Weight& weight, int64_t unit,
                      int64_t width, float* to) {
    const int64_t first = begin * input_groups(weight.padded);
    const TileRows rows{x.values.data() + begin * weight.padded, x.scales.data() + first, x.starts.data() + first,
                        weight.padded};
    kTiles[count - 1][width - 1](rows, weight.at(unit), weight.panel, to);
}

// Calls write(row, column, value) for 16 outputs at a time: of the product, or of activation(first half) * second half.
template <bool gated, typename Write>
bool product(const Int8Weight& weight, const Inputs& x, int64_t activation, Quantized& memory, Shares& shares,
             Team& team, const Write& write) {
    static thread_local Quantized own;
    if (x.rows < 1) return true;  // of a chunk of a prompt, behind which nothing is sampled
    const int64_t rows = x.rows, units = ((gated ? weight.outs / 2 : weight.outs) + kLanes - 1) / kLanes;
    const bool in_tiles = takes_tiles(rows);
    Quantized* inputs = &memory;
    if (rows == 1) {  // done by every thread for itself, which is quicker than to wait for one
        inputs = &own;
        inputs->fit(1, weight.padded);
        take(*inputs, x, weight, 0, false);
    } else {
        team.each(rows, [&](int64_t row) { take(memory, x, weight, row, in_tiles); });
        if (!team.meet()) return false;
    }
#if defined(TROUPE_AMX)
    if (in_tiles) {
        multiply_shares<gated>(weight, memory, rows, activation, shares, write);
        return true;
    }
#endif
    alignas(64) float first[kMostRows * kMostColumns * kLanes], second[kMostRows * kMostColumns * kLanes];
    for (int64_t share = shares.first(); shares.has(share); share = shares.next(share)) {
        const int64_t round = shares.round(share), number = shares.of_round(share), end = shares.at(number + 1);
        const int64_t top = rows * round / shares.rounds(), some = rows * (round + 1) / shares.rounds() - top;
        const int64_t parts = (some + kMostRows - 1) / kMostRows;
        const int64_t columns = columns_for(static_cast<int>((some + parts - 1) / parts));
        for (int64_t unit = shares.at(number), width; unit < end; unit += width) {
            width = weight.beside(unit) < end - unit ? weight.beside(unit) : end - unit;
            if (gated && weight.beside(units + unit) < width) width = weight.beside(units + unit);
            width = width < columns ? width : columns;
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t begin = top + some * part / parts, count = top + some * (part + 1) / parts - begin;
                totals_of(*inputs, begin, count, weight, unit, width, first);
                if (gated) totals_of(*inputs, begin, count, weight, units + unit, width, second);
                for (int64_t r = 0; r < count; ++r) {
                    for (int64_t c = 0; c < width; ++c) {
                        const int64_t column = (unit + c) * kLanes, at = (r * kMostColumns + c) * kLanes;
                        Floats value = Meaning(weight, column)(first + at);
                        if (gated)
                            value = activated(value, activation) * Meaning(weight, units * kLanes + column)(second + at);
                        write(begin + r, column, value);
                    }
                }
            }
        }
    }
    return true;
}

Quantized& fitting(int64_t rows, const Int8Weight& weight) {
    static thread_local Quantized memory;
    memory.fit(rows, weight.padded);
    return memory;
}

}  // namespace

troupe::Shares troupe::shares_of(const Int8Weight& weight, bool gated, int64_t rows, const Team& team) {
    const int64_t outs = gated ? weight.outs / 2 : weight.outs;
    const int64_t units = (outs + kLanes - 1) / kLanes, panel = weight.panel / kLanes;
    const int64_t rounds = takes_tiles(rows) ? blocks_of(weight, rows, team.threads()) : rounds_of(rows, team.threads());
    if (rows > kFewRows) return {team, units, panel, rounds};
    return {team, units, panel, weight.outs * weight.padded, 1};
}

bool troupe::int8_part(const Int8Weight& weight, const Inputs& x, const Output& out, Quantized& memory,
                       Shares& shares, Team& team) {
    return product<false>(weight, x, 0, memory, shares, team, [&](int64_t row, int64_t column, Floats value) {
        out.put(row, column, value, weight.outs);
    });
}

bool troupe::int8_gated_part(const Int8Weight& weight, const Inputs& x, int64_t activation, const Output& out,
                             Quantized& memory, Shares& shares, Team& team) {
    return product<true>(weight, x, activation, memory, shares, team, [&](int64_t row, int64_t column, Floats value) {
        out.put(row, column, value, weight.outs / 2);
    });
}

// x [rows, depth] with its stride to values [rows, padded] and scales [rows, groups].
extern "C" const Refusal* int8_quantize(const float* x, int64_t x_stride, int64_t rows, int64_t depth, int8_t* values,
                                        int64_t padded, float* scales, int64_t threads) {
    const int64_t groups = input_groups(padded);
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (threads > 1 && rows > 1)
    for (int64_t r = 0; r < rows; ++r)
        quantize_groups(x + r * x_stride, depth, values + r * padded, padded, scales + r * groups, nullptr);
    return nullptr;
}

// Calls use(first row, rows, memory) for all rows, with as many at a time as there is memory for.
template <typename Use>
static void some_at_a_time(int64_t rows, const Int8Weight& weight, Use use) {
    Quantized& memory = fitting(std::min(rows, kMostAtOnce), weight);
    const int64_t times = (rows + kMostAtOnce - 1) / kMostAtOnce;
    for (int64_t i = 0; i < times; ++i) use(rows * i / times, rows * (i + 1) / times - rows * i / times, memory);
}

// As `linear` of linear.cpp.
extern "C" const Refusal* int8_linear(const Int8Weight* weight, const float* x, int64_t x_stride, int64_t rows,
                                      const float* norm, double eps, int64_t adds, double factor, float* out,
                                      int64_t out_stride, int64_t threads) {
    some_at_a_time(rows, *weight, [=](int64_t first, int64_t count, Quantized& memory) {
        const Inputs inputs{x + first * x_stride, x_stride, count, norm, eps};
        const Output output{out + first * out_stride, out_stride, adds != 0, static_cast<float>(factor)};
        Team team(threads);
        Shares shares = shares_of(*weight, false, count, team);
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
        {
            team.enter();
            int8_part(*weight, inputs, output, memory, shares, team);
        }
    });
    return nullptr;
}

// As `linear_gated` of linear.cpp.
extern "C" const Refusal* int8_linear_gated(const Int8Weight* weight, const float* x, int64_t x_stride, int64_t rows,
                                            const float* norm, double eps, int64_t activation, float* out,
                                            int64_t out_stride, int64_t threads) {
    some_at_a_time(rows, *weight, [=](int64_t first, int64_t count, Quantized& memory) {
        const Inputs inputs{x + first * x_stride, x_stride, count, norm, eps};
        const Output output{out + first * out_stride, out_stride, false, 1.0f};
        Team team(threads);
        Shares shares = shares_of(*weight, true, count, team);
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
        {
            team.enter();
            int8_gated_part(*weight, inputs, activation, output, memory, shares, team);
        }
    });
    return nullptr;
}

// limits [3] = up to how many rows these products take, 0: that depends on the weight; what is added to the numbers of a
// weight; inputs that share a scale.
extern "C" const Refusal* int8_limits(int64_t* limits) {
#if defined(__AVX2__)
    limits[0] = std::numeric_limits<int32_t>::max();
#else
    limits[0] = 0;
#endif
    limits[1] = kWeightZero;
    limits[2] = kInputGroup;
    return nullptr;
}
