// Products of low rank for the rows of one product.

#include "low_rank.h"

using namespace troupe;

// out [count, outs] += factor * the groups' products with x [count, depth], at `num_rows` rows with a group each.
extern "C" const Refusal* low_rank_add(const LowRank* weight, const float* x, int64_t x_stride, int64_t count,
                                       const int64_t* rows, const int64_t* groups, int64_t num_rows, double factor,
                                       float* out, int64_t out_stride, int64_t threads) {
    const LowRankRows given{rows, groups, num_rows};
    if (const Refusal* refusal = check_low_rank(given, count, weight->groups)) return refusal;
    const Inputs inputs{x, x_stride, count, nullptr, 0.0};
    const int64_t share = low_rank_share(num_rows, threads);
#pragma omp parallel for num_threads(static_cast<int>(threads)) if (threads > 1 && num_rows > 1)
    for (int64_t first = 0; first < num_rows; first += share)
        add_low_rank(*weight, given, first, std::min(first + share, num_rows), inputs, static_cast<float>(factor), out,
                     out_stride);
    return nullptr;
}
