// Products of few bf16 rows with matrices, which are read as they are; the end of those of more rows with few
// columns of f32, which mix_tensor.cu begins; and a copy of activations in f32, where the matrix is f32 and
// there are many of both.
#include "wide.cuh"

typedef Wide<bf16> Eight;

struct FewProductsArgs {
    uint64_t x;      // bf16 [rows, groups inner]
    uint64_t weight; // W [width, inner]: of as many rows for each group
    uint64_t out;    // W [rows, width]
    uint32_t rows;
    uint32_t inner;
    uint32_t width;
    uint32_t groups;
};

// Channels of a warp at a time. A lane takes every 32nd eight of a row, however many rows there are.
#define STEP (32 * Eight::COUNT)
#define WARPS 4

// Eight weights of a lane.
template <typename W> struct Weights;
template <> struct Weights<float> {
    Wide<float> low, high;

    template <bool WHOLE>
    __device__ __forceinline__ void load(const float *weight, uint32_t c, uint32_t inner) {
        low = WHOLE ? Wide<float>::load(weight + c) : load_within<float, false>(weight, c, inner);
        high = WHOLE ? Wide<float>::load(weight + c + 4)
                     : load_within<float, false>(weight, c + 4, inner);
    }
    __device__ __forceinline__ float get(uint32_t v) const {
        return v < 4 ? low.get(v % 4) : high.get(v % 4);
    }
};
template <> struct Weights<bf16> {
    Eight eight;

    template <bool WHOLE>
    __device__ __forceinline__ void load(const bf16 *weight, uint32_t c, uint32_t inner) {
        eight = WHOLE ? Eight::load(weight + c) : load_within<bf16, false>(weight, c, inner);
    }
    __device__ __forceinline__ float get(uint32_t v) const { return eight.get(v); }
};

// A column of the result, and where its factors begin.
template <typename W> struct Column {
    const W *weight;
    const bf16 *x; // of row 0
    uint32_t column;

    __device__ static Column of(const FewProductsArgs &args, uint32_t column) {
        const size_t group = column / (args.width / args.groups);
        return {at<const W>(args.weight) + (size_t)column * args.inner,
                at<const bf16>(args.x) + group * args.inner, column};
    }
};

// Adds the products of ROWS rows from `row` on with a column to their sums, over STEPS steps `apart`
// channels from each other, the first at channel `start` of the lane. WHOLE: all channels are there, and
// rows are aligned, so that no load waits for a comparison or for another load. Rows that there are not
// repeat the last one.
template <typename W, bool WHOLE, uint32_t ROWS, uint32_t STEPS>
__device__ __forceinline__ void add_products(float (&sums)[ROWS], const FewProductsArgs &args,
                                             const Column<W> &column, uint32_t row, uint32_t start,
                                             uint32_t apart) {
    const uint32_t inner = args.inner;
    Weights<W> weights[STEPS];
    Eight eights[STEPS][ROWS];
#pragma unroll
    for (uint32_t s = 0; s < STEPS; s++) {
        const uint32_t c = start + s * apart;
        weights[s].template load<WHOLE>(column.weight, c, inner);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            const bf16 *x = column.x + (size_t)min(row + r, args.rows - 1) * args.groups * inner;
            eights[s][r] = WHOLE ? Eight::load(x + c) : load_within<bf16, false>(x, c, inner);
        }
    }
#pragma unroll
    for (uint32_t s = 0; s < STEPS; s++)
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++)
#pragma unroll
            for (uint32_t v = 0; v < Eight::COUNT; v++)
                sums[r] = fmaf(eights[s][r].get(v), weights[s].get(v), sums[r]);
}

// Adds the products of steps from channel `from` of the warp on, STEPS at a time as far as that many are
// whole, and then fewer. Returns where those begin that are not whole.
template <typename W, uint32_t ROWS, uint32_t STEPS>
__device__ __forceinline__ uint32_t add_whole(float (&sums)[ROWS], const FewProductsArgs &args,
                                              const Column<W> &column, uint32_t row, uint32_t from,
                                              uint32_t apart) {
    const uint32_t own = threadIdx.x % 32 * Eight::COUNT;
    for (; from + (STEPS - 1) * apart + STEP <= args.inner; from += STEPS * apart)
        add_products<W, true, ROWS, STEPS>(sums, args, column, row, from + own, apart);
    if constexpr (STEPS > 1)
        return add_whole<W, ROWS, (STEPS > 8 ? 8 : STEPS / 2)>(sums, args, column, row, from, apart);
    else
        return from;
}

// The products of a column with all rows, ROWS at a time: by PARTS warps of the block, of which each takes
// every PARTS-th step, and whose sums are added in their order.
template <typename W, uint32_t PARTS, uint32_t ROWS, uint32_t STEPS>
__device__ __forceinline__ void few_products_of(const FewProductsArgs &args, const Column<W> &column) {
    __shared__ float parts[WARPS][ROWS];
    const uint32_t inner = args.inner, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t part = warp % PARTS, own = lane * Eight::COUNT, apart = PARTS * STEP;
    const bool aligned = rows_aligned<bf16>(args.x | args.weight, inner);
    for (uint32_t row = 0; row < args.rows; row += ROWS) {
        float sums[ROWS] = {};
        uint32_t from = part * STEP;
        if (aligned) from = add_whole<W, ROWS, STEPS>(sums, args, column, row, from, apart);
        for (; from < inner; from += apart)
            add_products<W, false, ROWS, 1>(sums, args, column, row, from + own, apart);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            sums[r] = warp_sum(sums[r]);
            if (PARTS > 1 && lane == 0) parts[warp][r] = sums[r];
        }
        if (PARTS > 1) __syncthreads();
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            if (PARTS > 1) {
                sums[r] = parts[0][r];
#pragma unroll
                for (uint32_t p = 1; p < PARTS; p++) sums[r] += parts[p][r];
            }
            if (part == 0 && lane == 0 && row + r < args.rows)
                store(at<W>(args.out) + (size_t)(row + r) * args.width + column.column, sums[r]);
        }
        if (PARTS > 1) __syncthreads();
    }
}

// PARTS warps per column. With one row, more of it is under way at a time.
template <typename W, uint32_t PARTS> __device__ __forceinline__ void few_products(const FewProductsArgs &args) {
    static_assert(PARTS == 1 || PARTS == WARPS, "a block has warps of one column, or of one each");
    const uint32_t column = (blockIdx.x * WARPS + threadIdx.x / 32) / PARTS;
    if (column >= args.width) return;
    if (args.rows == 1)
        few_products_of<W, PARTS, 1, PARTS == 1 ? 10 : 5>(args, Column<W>::of(args, column));
    else
        few_products_of<W, PARTS, 4, 4>(args, Column<W>::of(args, column));
}

#define FEW_PRODUCTS(name, W, PARTS)                                                               \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) name(const FewProductsArgs args) {    \
        few_products<W, PARTS>(args);                                                              \
    }
FEW_PRODUCTS(few_products_f32, float, 1)
FEW_PRODUCTS(few_products_bf16, bf16, 1)
FEW_PRODUCTS(few_columns_f32, float, WARPS)
FEW_PRODUCTS(few_columns_bf16, bf16, WARPS)

struct AddPartsArgs {
    uint64_t parts; // f32 [segments, rows, columns + 1], of mix_tiles
    uint64_t out;   // f32 [rows, columns], written: the sums over segments, in their order
    uint32_t segments;
    uint32_t rows;
    uint32_t columns;
    uint32_t pad;
};

// A thread for each sum. Loads of many segments are under way together.
extern "C" __global__ void __launch_bounds__(256) add_parts(const AddPartsArgs args) {
    constexpr uint32_t TOGETHER = 8;
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    const size_t row = i / args.columns, stride = (size_t)args.rows * (args.columns + 1);
    if (row >= args.rows) return;
    const float *from = at<const float>(args.parts) + row * (args.columns + 1) + i % args.columns;
    float sum = 0.0f;
    for (uint32_t s = 0; s < args.segments; s += TOGETHER) {
        float parts[TOGETHER];
#pragma unroll
        for (uint32_t k = 0; k < TOGETHER; k++)
            parts[k] = s + k < args.segments ? from[(s + k) * stride] : 0.0f;
#pragma unroll
        for (uint32_t k = 0; k < TOGETHER; k++) sum += parts[k];
    }
    at<float>(args.out)[i] = sum;
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
