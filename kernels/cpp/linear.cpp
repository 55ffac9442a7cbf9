// Products with a constant weight, float32: one pass over the weight, at the speed of the memory where rows are few.
// They are products of some rows each; where there are more rows, each piece of the weight, which fits in a core's cache,
// is used for all such products before the next piece is read. Many rows are cut into rounds (`rounds_of`), each with a
// walk of its own; or the processor's tiles multiply them (split_bf16.h).
//
// The weight lies as oneDNN packs it for its own products of many rows, so that it is in memory once: panels of `panel`
// outputs, in each of which the outputs of one input lie side by side, [out / panel][padded depth][panel].
//
// Every output is one sum over the inputs in their order, in one accumulator, for any number of rows, thread or tile: a
// row's result does not depend on its neighbours, to the bit.

#include "epilogue.h"
#include "split_bf16.h"
#include "float_tile.h"

namespace {

constexpr int kMostRows = 24;  // of one product
constexpr int64_t kShortRows = 16;  // where rows are few: what comes next is fetched between products

// Products that rows are cut into. Where there are many in all, a product is of four whole tiles, so that what it reads of the
// weight, from a core's second cache, serves as many rows as registers hold sums for.
inline int64_t products(int64_t rows, int64_t all) {
    const int64_t most = all > troupe::kFewRows ? kMostRows : kShortRows;
    return (rows + most - 1) / most;
}
#if defined(__AVX512F__)
constexpr int64_t kDepth = 1 << 30;
#else
constexpr int64_t kDepth = 64;  // inputs at a time: the columns of a panel are several tiles, which share what is read
#endif

#if defined(__AMX_TILE__)
constexpr int64_t kFar = 0;  // these processors read on across pages by themselves, and slower if they are asked to
constexpr int64_t kStreams = kMostStreams;  // panels that a lone row reads at once
#else
constexpr int64_t kFar = 2048;  // floats ahead of what is read: beyond the page, at whose end the processor stops
constexpr int64_t kStreams = 1;
#endif

// Up to so many rows oneDNN is no faster by more than what comes before and behind its products takes, given that the
// panels are small; measured over shapes of models.
#if defined(__AVX512F__) && !defined(__AMX_TILE__)
constexpr int64_t kManyRows = 4096;
#else
constexpr int64_t kManyRows = troupe::kFewRows;
#endif

constexpr int64_t kRoomy = 64 * 1024;  // numbers of a panel: a core's own cache holds four

// A segment of the weight, as wide as the one at hand, that is fetched while that is used `turns` times: its place, or
// null.
struct Next {
    const float* data;
    int64_t turn, turns;
};

// How many units from this one on, before `end`, are a segment: of one panel, or for a lone row of several whole ones,
// about equally many in each segment.
int64_t width_at(const FloatWeight& weight, int64_t unit, int64_t end, int64_t rows) {
    const int64_t left = end - unit, beside = weight.beside(unit), panels = left / 4;
    if (rows > 1 || weight.panel != 64 || beside < 4 || panels < 2) return std::min(beside, left);
    const int64_t segments = (panels + kStreams - 1) / kStreams;
    return 4 * ((panels + segments - 1) / segments);
}

// sums [rows, 64], for at most `kMostRows` rows, = the rows times `width` units of the weight; of a lone row all in line.
void segment(const Rows& x, const FloatWeight& weight, int64_t unit, int64_t width, const Next& next, float* sums) {
    if (width > 4) {
        kRowTiles[width / 4 - 1](x.data, weight.at(unit), weight.panel * weight.padded, weight.depth, sums);
        return;
    }
    const int64_t groups = (x.count + kTileRows - 1) / kTileRows;
    const int columns = static_cast<int>(width * kLanes / kWideLanes);
    const int most = columns_for((x.count + groups - 1) / groups);
    const float* data = weight.at(unit);
    std::memset(sums, 0, sizeof(float) * 64 * x.count);
    // One group of rows has to look beyond its page at the most. With more, what comes next is fetched bit by bit
    // meanwhile: the next inputs where a panel is several tiles wide, else the next segment.
    const bool chunked = kDepth < weight.depth && most < kMostColumns;
    const bool fetches = next.data && groups > 1 && width * kLanes == weight.panel;
    const auto of_chunk = [&](const float* from, int64_t g, int wide) {
        return Ahead{from, g ? 0 : weight.panel, wide * kWideLanes > kLanes ? kLanes : 0};
    };
    const auto of_segment = [&](int64_t g) {
        const int64_t part = next.turn * groups + g, parts = next.turns * groups;
        const int64_t line = width * part / parts, lines = width * (part + 1) / parts - line;
        return Ahead{next.data + line * weight.depth * kLanes, lines * kLanes, lines > 1 ? kLanes : 0};
    };
    for (int64_t k = 0; k < weight.depth; k += kDepth) {
        const int64_t depth = weight.depth - k < kDepth ? weight.depth - k : kDepth;
        for (int c = 0; c < columns; c += most) {
            const int tile_columns = columns - c < most ? columns - c : most;
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t first = x.count * g / groups, count = x.count * (g + 1) / groups - first;
                const Ahead ahead = chunked ? of_chunk(data + (k + kDepth) * weight.panel + c * kWideLanes, g, most)
                                    : fetches ? of_segment(g)
                                    : kFar    ? Ahead{data + kFar, weight.panel, 2 * kLanes}
                                              : Ahead{data, 0, 0};
                kTiles[count - 1][tile_columns - 1](x.data + first * x.stride + k, x.stride,
                                                    data + k * weight.panel + c * kWideLanes, weight.panel, depth,
                                                    ahead, sums + first * 64 + c * kWideLanes);
            }
        }
    }
}

// The rows cut into products of about equally many: the rows of number `tile`.
Rows cut(const Rows& x, int64_t tile, int64_t tiles) {
    const int64_t first = x.count * tile / tiles;
    return {x.data + first * x.stride, x.stride, x.count * (tile + 1) / tiles - first};
}

// The rows of a share's round, behind their norm; of one round at a time.
struct Round {
    const Inputs& x;
    int64_t depth, number = -1, first = 0;
    Rows rows{};

    void take(const Shares& shares, int64_t share) {
        if (number == shares.round(share)) return;
        number = shares.round(share);
        first = x.rows * number / shares.rounds();
        const int64_t count = x.rows * (number + 1) / shares.rounds() - first;
        rows = ready_rows({x.data + first * x.stride, x.stride, count, x.norm, x.eps}, depth);
    }
};

// Units of a share, and where the one behind it begins; -1 is nowhere.
struct Units {
    int64_t begin, end, behind;

    Units(const Shares& shares, int64_t share, int64_t following)
        : begin(shares.at(shares.of_round(share))),
          end(shares.at(shares.of_round(share) + 1)),
          behind(shares.has(following) ? shares.at(shares.of_round(following)) : -1) {}
};

}  // namespace

troupe::Shares troupe::shares_of(const FloatWeight& weight, bool gated, int64_t rows, const Team& team) {
    const int64_t outs = gated ? weight.outs / 2 : weight.outs;
    const int64_t units = (outs + kLanes - 1) / kLanes, panel = weight.panel / kLanes;
    const bool split = splits(weight, rows), many = split && rows > kRowsOfTiles;
    const int64_t rounds = kManyRows > kFewRows && !split ? rounds_of(rows, team.threads()) : 1;
    if (rounds > 1) return {team, units, panel, rounds};
    return {team, units, panel, weight.outs * weight.padded * 4,
            many ? blocks_of(rows) : 1, many ? kPanels * weight.panel * weight.padded * 4 : kShareBytes};
}

void troupe::float_part(const FloatWeight& weight, const Inputs& x, const Output& out, Shares& shares) {
    if (splits(weight, x.rows)) return split_part(weight, x, out, shares);
    Round round{x, weight.depth};
    alignas(64) float sums[kMostRows * 64];
    for (int64_t share = shares.first(), following; shares.has(share); share = shares.settled(share, following)) {
        following = shares.early(share);
        round.take(shares, share);
        const int64_t tiles = products(round.rows.count, x.rows);
        const Units units(shares, share, following);
        for (int64_t unit = units.begin, width; unit < units.end; unit += width) {
            width = width_at(weight, unit, units.end, round.rows.count);
            const int64_t then = unit + width < units.end ? unit + width : units.behind;
            const float* next = then >= 0 ? weight.at(then) : nullptr;
            for (int64_t tile = 0, first = round.first; tile < tiles; ++tile) {
                const Rows some = cut(round.rows, tile, tiles);
                segment(some, weight, unit, width, {next, tile, tiles}, sums);
                finish(weight, sums, some.count, unit, width, out.adds, out.factor, out.data + first * out.stride,
                       out.stride);
                first += some.count;
            }
        }
    }
}

void troupe::float_gated_part(const FloatWeight& weight, const Inputs& x, int64_t activation, const Output& out,
                              Shares& shares) {
    if (splits(weight, x.rows)) return split_gated_part(weight, x, activation, out, shares);
    const int64_t second = weight.outs / 2 / kLanes;
    Round round{x, weight.depth};
    alignas(64) float gates[kMostRows * 64], ups[kMostRows * 64];
    for (int64_t share = shares.first(), following; shares.has(share); share = shares.settled(share, following)) {
        following = shares.early(share);
        round.take(shares, share);
        const int64_t tiles = products(round.rows.count, x.rows);
        const Units units(shares, share, following);
        for (int64_t unit = units.begin, width; unit < units.end; unit += width) {
            width = std::min(width_at(weight, unit, units.end, round.rows.count),
                             width_at(weight, second + unit, second + units.end, round.rows.count));
            // In one turn they are read in the order of gates, ups, next gates. In more, both stay for the next turn,
            // and both of the next ones are fetched where there is room for all four.
            const bool once = tiles == 1, room = weight.panel * weight.padded <= kRoomy;
            const int64_t then = unit + width < units.end ? unit + width : units.behind;
            const float* const next_gates = then >= 0 ? weight.at(then) : nullptr;
            const float* const next_ups = then >= 0 ? weight.at(second + then) : nullptr;
            for (int64_t tile = 0, first = round.first; tile < tiles; ++tile) {
                const Rows some = cut(round.rows, tile, tiles);
                const float* const beside_gates = once ? weight.at(second + unit) : room ? next_gates : nullptr;
                const float* const beside_ups = once || !room ? next_gates : next_ups;
                segment(some, weight, unit, width, {beside_gates, tile, tiles}, gates);
                segment(some, weight, second + unit, width, {beside_ups, tile, tiles}, ups);
                finish_gated(weight, gates, ups, some.count, unit, width, activation, out.data + first * out.stride,
                             out.stride);
                first += some.count;
            }
        }
    }
}

// out [rows, outs] = x [rows, depth] times the weight, plus its bias; or added to what is there, times `factor`. With
// `norm` [depth], the rows go through a root-mean-square norm before.
extern "C" const Refusal* linear(const FloatWeight* weight, const float* x, int64_t x_stride, int64_t rows,
                                 const float* norm, double eps, int64_t adds, double factor, float* out,
                                 int64_t out_stride, int64_t threads) {
    const Team team(threads);
    Shares shares = shares_of(*weight, false, rows, team);
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    float_part(*weight, {x, x_stride, rows, norm, eps}, {out, out_stride, adds != 0, static_cast<float>(factor)}, shares);
    return nullptr;
}

// out [rows, outs / 2] = activation(first half) * second half of the same product; outs / 2 is a multiple of 16.
// activation 0 is SiLU, 1 is GELU with tanh.
extern "C" const Refusal* linear_gated(const FloatWeight* weight, const float* x, int64_t x_stride, int64_t rows,
                                       const float* norm, double eps, int64_t activation, float* out,
                                       int64_t out_stride, int64_t threads) {
    const Team team(threads);
    Shares shares = shares_of(*weight, true, rows, team);
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
    float_gated_part(*weight, {x, x_stride, rows, norm, eps}, activation, {out, out_stride, false, 1.0f}, shares);
    return nullptr;
}

// With how many rows these products are worth calling: where the panels of the weight are small, and where it splits (0:
// that changes nothing).
extern "C" const Refusal* linear_many_rows(int64_t* rows) {
    rows[0] = kManyRows;
    rows[1] = amx_allowed() ? std::numeric_limits<int32_t>::max() : 0;
    return nullptr;
}
