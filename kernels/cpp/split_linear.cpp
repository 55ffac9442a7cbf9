// Products of many rows by the processor's tiles: see split_bf16.h.

#include "epilogue.h"
#include "split_bf16.h"

#if defined(TROUPE_AMX)

namespace {

// Units of a share, [begin, end).
struct Span {
    int64_t begin, end;
};

// Segments of a span's first panels, `most` at the most, with sums of `size` floats each, which are taken from it; if `gated`, each is followed
// by the one of the second half. Gives back how many there are.
template <bool gated>
int take_segments(const FloatWeight& weight, Span& span, int most, float* sums, int64_t size, Segment* segments) {
    const int64_t second = weight.outs / 2 / kLanes;
    int found = 0;
    while (span.begin < span.end && found < most) {
        int64_t width = std::min(weight.beside(span.begin), span.end - span.begin);
        if (gated) width = std::min(width, weight.beside(second + span.begin));
        for (int half = 0; half <= gated; ++half, ++found)
            segments[found] = {span.begin + half * second, width, sums + found * size, {}};
        span.begin += width;
    }
    return found;
}

// Each segment's counterpart in what comes next is fetched while it is used.
template <bool gated>
void look_ahead(const FloatWeight& weight, const Span& next, int count, Segment* segments) {
    const int64_t second = weight.outs / 2 / kLanes;
    for (int i = 0; i < count; ++i) {
        const int64_t half = gated ? i % 2 * second : 0;
        const int64_t unit = next.begin + segments[i].unit - half - segments[0].unit;
        if (unit < next.end) segments[i].fetch.from = weight.at(unit + half);
    }
}

// Calls use(first row, rows, segment, segment of the second half if `gated`) for all of this thread's shares.
template <bool gated, typename Use>
void by_tiles(const FloatWeight& weight, const Inputs& x, Shares& shares, Use use) {
    thread_local SplitRows split;
    thread_local Memory<float> memory{"sums of segments"};
    const AmxScope scope;
    const int64_t blocks = blocks_of(x.rows), size = whole_tiles(std::min(x.rows, kBlockRows)) * 64;
    const int most = x.rows > kRowsOfTiles ? kPanels : 1 + gated;  // few rows are read whole for each panel
    memory.grow(most * size);
    const auto first_of = [&](int64_t block) { return std::min(x.rows, whole_tiles(x.rows * block / blocks)); };
    const auto span_of = [&](int64_t share) {
        const int64_t number = shares.of_round(share);
        return shares.has(share) ? Span{shares.at(number), shares.at(number + 1)} : Span{};
    };
    int64_t held = -1, first = 0, count = 0;
    for (int64_t share = shares.first(), following; shares.has(share); share = following) {
        following = shares.next();  // taken early: what it reads can be fetched
        if (const int64_t block = shares.round(share); block != held) {
            held = block, first = first_of(block), count = first_of(block + 1) - first;
            const Rows rows = ready_rows({x.data + first * x.stride, x.stride, count, x.norm, x.eps}, weight.depth);
            split.take(rows.data, rows.stride, count, weight.depth);
        }
        for (Span span = span_of(share); span.begin < span.end;) {
            Segment segments[kPanels];
            const int found = take_segments<gated>(weight, span, most, memory.data(), size, segments);
            look_ahead<gated>(weight, span.begin < span.end ? span : span_of(following), found, segments);
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
