// Products with a constant weight in the blocks of GGUF files: inputs are quantized per group of 32, sums of a group
// are whole numbers. block_types.h has the layout of a weight, block_inputs.h that of rows, block_tiles.h the arithmetic.

#include "block_tiles.h"

namespace {

constexpr int64_t kMostAtOnce = 1024;  // rows of one walk through the weight, which bounds the memory that they take
constexpr int64_t kUnitsOfShare = 4;

const BlockPart& part_with(const BlockWeight& weight, int64_t unit) {
    int64_t number = 0;
    while (unit >= weight.parts[number].first + weight.parts[number].units) ++number;
    return weight.parts[number];
}

// sums [16 * tiles, 16] of the tiles [begin, end) of rows times a unit.
void multiply(const BlockWeight& weight, int64_t unit, int64_t rows, int64_t begin, int64_t end,
              const BlockInputs& memory, float* sums) {
    const BlockPart& part = part_with(weight, unit);
    const int64_t depth = weight.depth, place = unit - part.first;
    with_type(part.type, [&](auto type) {
        typedef decltype(type) Type;
        const uint8_t* const codes = part.codes + place * Type::unit_codes(depth);
        const uint8_t* const scales = part.scales + place * Type::unit_scales(depth);
        for (int64_t number = begin; number < end; ++number, sums += kTallest * kLanes) {
            const Tile run = tile_of<Type>(height_of(rows, number));
            run(codes, scales, depth / kGroup, tile_inputs(memory, weight, rows, number), sums);
        }
    });
}

// Writes sums of `count` rows from `row` on at a unit; of the product, or of activation(first half) * second half.
template <bool gated>
void finish(const BlockWeight& weight, const Output& out, int64_t activation, int64_t unit, int64_t half, int64_t row,
            int64_t count, const float* first, const float* second) {
    const int64_t column = unit * kLanes, outs = gated ? weight.outs / 2 : weight.outs;
    const Floats bias = weight.bias ? load(weight.bias + column) : Floats{};
    const Floats other = gated && weight.bias ? load(weight.bias + half * kLanes + column) : Floats{};
    for (int64_t r = 0; r < count; ++r) {
        Floats value = load(first + r * kLanes) + bias;
        if (gated) value = activated(value, activation) * (load(second + r * kLanes) + other);
        out.put(row + r, column, value, outs);
    }
}

template <bool gated>
bool product(const BlockWeight& weight, const Inputs& x, int64_t activation, const Output& out, BlockInputs& memory,
             Shares& shares, Team& team) {
    static thread_local BlockInputs own;
    static thread_local Memory<float> sums{"sums of blocks"};
    if (x.rows < 1) return true;  // of a chunk of a prompt, behind which nothing is sampled
    const int64_t rows = x.rows, units = ((gated ? weight.outs / 2 : weight.outs) + kLanes - 1) / kLanes;
    BlockInputs* inputs = &memory;
    if (rows == 1) {  // done by every thread for itself, which is quicker than to wait for one
        inputs = &own;
        inputs->fit(1, weight.depth, weight.fine);
        take_row(*inputs, x, weight, 0);
    } else {
        team.each(rows, [&](int64_t row) { take_row(memory, x, weight, row); });
        if (!team.meet()) return false;
    }
    const int64_t tiles = tiles_of(rows), most = (tiles + shares.rounds() - 1) / shares.rounds() * kTallest * kLanes;
    sums.grow(2 * most);
    for (int64_t share = shares.first(); shares.has(share); share = shares.next(share)) {
        const int64_t round = shares.round(share), number = shares.of_round(share), end = shares.at(number + 1);
        const int64_t from = tiles * round / shares.rounds(), to = tiles * (round + 1) / shares.rounds();
        const int64_t row = from * kTallest, count = std::min(rows, to * kTallest) - row;
        for (int64_t unit = shares.at(number); unit < end; ++unit) {
            for (int half = 0; half < (gated ? 2 : 1); ++half)
                multiply(weight, half * units + unit, rows, from, to, *inputs, sums.data() + half * most);
            finish<gated>(weight, out, activation, unit, units, row, count, sums.data(), sums.data() + most);
        }
    }
    return true;
}

// Calls use(first row, rows, memory) for all rows, with as many at a time as there is memory for.
template <typename Use>
void some_at_a_time(int64_t rows, const BlockWeight& weight, Use use) {
    static thread_local BlockInputs memory;
    memory.fit(std::min(rows, kMostAtOnce), weight.depth, weight.fine);
    const int64_t times = (rows + kMostAtOnce - 1) / kMostAtOnce;
    for (int64_t i = 0; i < times; ++i) use(rows * i / times, rows * (i + 1) / times - rows * i / times, memory);
}

}  // namespace

void troupe::BlockInputs::fit(int64_t rows, int64_t depth, int64_t fine) {
    const int64_t all = padded_rows(rows) * (depth / kGroup);
    values.grow(all * kGroup * (fine ? 2 : 1));
    scales.grow(2 * all);
    starts.grow((kStartKinds + 1) * all);
}

troupe::Shares troupe::shares_of(const BlockWeight& weight, bool gated, int64_t rows, const Team& team) {
    const int64_t units = ((gated ? weight.outs / 2 : weight.outs) + kLanes - 1) / kLanes;
    if (rows <= kFewRows) return {team, units, 1, weight.outs * weight.depth * 5 / 8, 1};
    return {team, units, kUnitsOfShare, std::min(rounds_of(rows, team.threads()), tiles_of(rows))};
}

bool troupe::block_part(const BlockWeight& weight, const Inputs& x, const Output& out, BlockInputs& memory,
                        Shares& shares, Team& team) {
    return product<false>(weight, x, 0, out, memory, shares, team);
}

bool troupe::block_gated_part(const BlockWeight& weight, const Inputs& x, int64_t activation, const Output& out,
                              BlockInputs& memory, Shares& shares, Team& team) {
    return product<true>(weight, x, activation, out, memory, shares, team);
}

// As `linear` of linear.cpp.
extern "C" const Refusal* block_linear(const BlockWeight* weight, const float* x, int64_t x_stride, int64_t rows,
                                       const float* norm, double eps, int64_t adds, double factor, float* out,
                                       int64_t out_stride, int64_t threads) {
    some_at_a_time(rows, *weight, [=](int64_t first, int64_t count, BlockInputs& memory) {
        const Inputs inputs{x + first * x_stride, x_stride, count, norm, eps};
        const Output output{out + first * out_stride, out_stride, adds != 0, static_cast<float>(factor)};
        Team team(threads);
        Shares shares = shares_of(*weight, false, count, team);
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
        {
            team.enter();
            block_part(*weight, inputs, output, memory, shares, team);
        }
    });
    return nullptr;
}

// As `linear_gated` of linear.cpp.
extern "C" const Refusal* block_linear_gated(const BlockWeight* weight, const float* x, int64_t x_stride,
                                             int64_t rows, const float* norm, double eps, int64_t activation,
                                             float* out, int64_t out_stride, int64_t threads) {
    some_at_a_time(rows, *weight, [=](int64_t first, int64_t count, BlockInputs& memory) {
        const Inputs inputs{x + first * x_stride, x_stride, count, norm, eps};
        const Output output{out + first * out_stride, out_stride, false, 1.0f};
        Team team(threads);
        Shares shares = shares_of(*weight, true, count, team);
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
        {
            team.enter();
            block_gated_part(*weight, inputs, activation, output, memory, shares, team);
        }
    });
    return nullptr;
}
