// Products of bf16 activations with f32 matrices: of few rows, without a copy of them in f32; and that
// copy, where there are more.
#include "wide.cuh"

typedef Wide<bf16> Eight;

struct FewProductsArgs {
    uint64_t x;      // bf16 [rows, inner]
    uint64_t weight; // f32 [width, inner]
    uint64_t out;    // f32 [rows, width]
    uint32_t rows;
    uint32_t inner;
    uint32_t width;
    uint32_t pad;
};

// Channels of a warp at a time. A lane takes every 32nd eight of a row, however many rows there are.
#define STEP (32 * Eight::COUNT)

// Adds the products of ROWS rows from `row` on with a column to their sums, over STEPS steps from
// channel `start` of the lane. WHOLE: all channels are there, and rows are aligned, so that no load
// waits for a comparison or for another load. Rows that there are not repeat the last one.
template <bool WHOLE, uint32_t ROWS, uint32_t STEPS>
__device__ __forceinline__ void add_products(float (&sums)[ROWS], const FewProductsArgs &args,
                                             uint32_t row, uint32_t column, uint32_t start) {
    const uint32_t inner = args.inner;
    const float *weight = at<const float>(args.weight) + (size_t)column * inner;
    Wide<float> low[STEPS], high[STEPS];
    Eight eights[STEPS][ROWS];
#pragma unroll
    for (uint32_t s = 0; s < STEPS; s++) {
        const uint32_t c = start + s * STEP;
        low[s] = WHOLE ? Wide<float>::load(weight + c) : load_within<float, false>(weight, c, inner);
        high[s] = WHOLE ? Wide<float>::load(weight + c + 4)
                        : load_within<float, false>(weight, c + 4, inner);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            const bf16 *x = at<const bf16>(args.x) + (size_t)min(row + r, args.rows - 1) * inner;
            eights[s][r] = WHOLE ? Eight::load(x + c) : load_within<bf16, false>(x, c, inner);
        }
    }
#pragma unroll
    for (uint32_t s = 0; s < STEPS; s++)
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
#pragma unroll
            for (uint32_t v = 0; v < Eight::COUNT; v++) {
                const float w = v < 4 ? low[s].get(v % 4) : high[s].get(v % 4);
                sums[r] = fmaf(eights[s][r].get(v), w, sums[r]);
            }
}

// The products of a column with all rows, ROWS at a time.
template <uint32_t ROWS, uint32_t STEPS>
__device__ __forceinline__ void few_products_of(const FewProductsArgs &args, uint32_t column) {
    const uint32_t inner = args.inner, lane = threadIdx.x % 32, own = lane * Eight::COUNT;
    const bool aligned = rows_aligned<bf16>(args.x | args.weight, inner);
    for (uint32_t row = 0; row < args.rows; row += ROWS) {
        float sums[ROWS] = {};
        uint32_t done = 0;
        if (aligned)
            for (; inner - done >= STEPS * STEP; done += STEPS * STEP)
                add_products<true, ROWS, STEPS>(sums, args, row, column, done + own);
        for (; done < inner; done += STEP)
            add_products<false, ROWS, 1>(sums, args, row, column, done + own);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            const float sum = warp_sum(sums[r]);
            if (lane == 0 && row + r < args.rows)
                at<float>(args.out)[(size_t)(row + r) * args.width + column] = sum;
        }
    }
}

// One warp per column. With one row, more of it is under way at a time.
extern "C" __global__ void __launch_bounds__(128) few_products(const FewProductsArgs args) {
    const size_t column = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (column >= args.width) return;
    if (args.rows == 1)
        few_products_of<1, 10>(args, column);
    else
        few_products_of<4, 4>(args, column);
}

struct WidenArgs {
    uint64_t x;   // bf16 [count]
    uint64_t out; // f32 [count]
    uint64_t count;
};

// One thread per eight values.
extern "C" __global__ void __launch_bounds__(256) widen(const WidenArgs args) {
    const uint64_t i = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * Eight::COUNT;
    if (i >= args.count) return;
    const bf16 *x = at<const bf16>(args.x) + i;
    float *out = at<float>(args.out) + i;
    if ((args.x | args.out) % 16 != 0 || args.count - i < Eight::COUNT) {
        const uint64_t n = min((uint64_t)Eight::COUNT, args.count - i);
        for (uint32_t v = 0; v < n; v++) out[v] = load(x + v);
        return;
    }
    const Eight eight = Eight::load(x);
    Wide<float> low, high;
#pragma unroll
    for (uint32_t v = 0; v < 4; v++) {
        low.set(v, eight.get(v));
        high.set(v, eight.get(4 + v));
    }
    low.store(out);
    high.store(out + 4);
}
