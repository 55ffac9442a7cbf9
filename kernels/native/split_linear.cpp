// Products of many rows by the processor's tiles: see split.h.

#include "finish.h"
#include "split.h"

#if defined(TROUPE_AMX)

namespace {

// Segments from `unit` on, before `end`, with sums of `size` floats each; if `gated`, each is followed by the one of the
// second half. `unit` becomes what is behind them; gives back how many there are.
template <bool gated>
int group(const FloatWeight& weight, int64_t& unit, int64_t end, float* sums, int64_t size, Segment* segments) {
    const int64_t halves[] = {0, weight.outs / 2 / kLanes}, first = unit;
    int found = 0;
    while (unit < end && found < kPanels) {
        int64_t width = std::min(weight.beside(unit), end - unit);
        if (gated) width = std::min(width, weight.beside(halves[1] + unit));
        for (int half = 0; half <= gated; ++half, ++found)
            segments[found] = {halves[half] + unit, width, sums + found * size, {}};
        unit += width;
    }
    for (int i = 0; i < found; ++i) {  // its place in the next group
        const int64_t next = segments[i].unit + unit - first;
        if (next < end + halves[gated ? i % 2 : 0]) segments[i].fetch.from = weight.at(next);
    }
    return found;
}

// Calls use(first row, rows, segment, segment of the second half if `gated`) for all of this thread's shares.
template <bool gated, typename Use>
void by_tiles(const FloatWeight& weight, const Inputs& x, Shares& shares, Use use) {
    thread_local SplitRows split;
    thread_local std::vector<float> memory;
    const AmxScope scope;
    const int64_t blocks = blocks_of(x.rows), size = whole_tiles(std::min(x.rows, kBlockRows)) * 64;
    grow(memory, kPanels * size);
    const auto first_of = [&](int64_t block) { return std::min(x.rows, whole_tiles(x.rows * block / blocks)); };
    int64_t held = -1, first = 0, count = 0;
    for (int64_t share = shares.first(); shares.has(share); share = shares.next()) {
        if (const int64_t block = shares.round(share); block != held) {
            held = block, first = first_of(block), count = first_of(block + 1) - first;
            const Rows rows = ready_rows({x.data + first * x.stride, x.stride, count, x.norm, x.eps}, weight.depth);
            split.take(rows.data, rows.stride, count, weight.depth);
        }
        const int64_t end = shares.at(shares.of_round(share) + 1);
        for (int64_t unit = shares.at(shares.of_round(share)); unit < end;) {
            Segment segments[kPanels];
            const int found = group<gated>(weight, unit, end, memory.data(), size, segments);
            split.times(weight, segments, found);
            for (int i = 0; i < found; i += 1 + gated) use(first, count, segments[i], segments[i + gated]);
        }
    }
}

}  // namespace

void troupe::split_part(const FloatWeight& weight, const Inputs& x, const Output& out, Shares& shares) {
    by_tiles<false>(weight, x, shares, [&](int64_t first, int64_t rows, const Segment& at, const Segment&) {
        finish(weight, at.sums, rows, at.unit, at.width, out.adds, out.factor, out.data + first * out.stride, out.stride);
    });
}

void troupe::split_gated_part(const FloatWeight& weight, const Inputs& x, int64_t activation, const Output& out,
                              Shares& shares) {
    by_tiles<true>(weight, x, shares, [&](int64_t first, int64_t rows, const Segment& gate, const Segment& up) {
        finish_gated(weight, gate.sums, up.sums, rows, gate.unit, gate.width, activation,
                     out.data + first * out.stride, out.stride);
    });
}

#else

void troupe::split_part(const FloatWeight&, const Inputs&, const Output&, Shares&) {}
void troupe::split_gated_part(const FloatWeight&, const Inputs&, int64_t, const Output&, Shares&) {}

#endif
