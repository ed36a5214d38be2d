// Hyper-connections: the coefficients of a mixing site, in two launches. The first projects the
// streams, and sums their squares, over segments of the channels; the second adds the segments up and
// makes coefficients of them. A row's sums are taken in one order, whatever the number of rows; where
// those are many, mix_tensor.cu takes them in another.
#include "wide.cuh"

#define MAX_STREAMS 8

// Channels of a lane, and of a segment: a warp's.
#define LANE_CHANNELS 16
#define SEGMENT (32 * LANE_CHANNELS)
// Columns of a warp, and rows that it takes at a time.
#define COLUMNS 4
#define ROWS 4

struct MixSumsArgs {
    uint64_t streams; // T [rows, width]
    uint64_t project; // f32 [columns, width]
    uint64_t sums;    // f32 [segments, rows, columns + 1], written: products, then the sum of squares
    uint32_t rows;
    uint32_t columns;
    uint32_t width;
    uint32_t segments;     // width / SEGMENT, rounded up
    uint32_t block_rows;   // rows of a block
    uint32_t column_parts; // blocks that share the columns of the same rows and segment
};

// The part of the sums that a warp computes.
struct MixPart {
    uint32_t segment;
    uint32_t first, end; // rows
    uint32_t unit;       // of COLUMNS columns; behind them comes the sum of squares

    __device__ static MixPart of(const MixSumsArgs &args) {
        const uint32_t place = blockIdx.x / args.column_parts;
        const uint32_t first = place / args.segments * args.block_rows;
        const uint32_t part = blockIdx.x % args.column_parts;
        return {place % args.segments, first, min(first + args.block_rows, args.rows),
                part * (blockDim.x / 32) + threadIdx.x / 32};
    }

    // Where the sum of a row and column goes.
    __device__ float *sum(const MixSumsArgs &args, uint32_t row, uint32_t column) const {
        const size_t at_row = (size_t)segment * args.rows + row;
        return at<float>(args.sums) + at_row * (args.columns + 1) + column;
    }
};

// Values c on of a row of `width`. WHOLE: all are there, and aligned, so that no load waits for a
// comparison.
template <typename T, bool WHOLE>
__device__ __forceinline__ Wide<T> load_part(const T *row, uint32_t c, uint32_t width) {
    return WHOLE ? Wide<T>::load(row + c) : load_within<T, false>(row, c, width);
}

// A lane's channels of ROWS rows: wides that are 32 wides apart, so that a warp reads neighbours.
template <typename T, bool WHOLE> struct LaneRows {
    static constexpr uint32_t WIDES = LANE_CHANNELS / Wide<T>::COUNT;
    Wide<T> wides[ROWS][WIDES];

    __device__ __forceinline__ static uint32_t channel(const MixPart &part, uint32_t wide) {
        return part.segment * SEGMENT + (wide * 32 + threadIdx.x % 32) * Wide<T>::COUNT;
    }

    // Rows from `row` on; rows that the part does not have repeat its last.
    __device__ __forceinline__ void load(const MixSumsArgs &args, const MixPart &part, uint32_t row) {
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            const size_t from = min(row + r, part.end - 1);
            const T *streams = at<const T>(args.streams) + from * args.width;
#pragma unroll
            for (uint32_t k = 0; k < WIDES; k++)
                wides[r][k] = load_part<T, WHOLE>(streams, channel(part, k), args.width);
        }
    }

    __device__ __forceinline__ float get(uint32_t row, uint32_t channel) const {
        return wides[row][channel / Wide<T>::COUNT].get(channel % Wide<T>::COUNT);
    }
};

// Sums over the warp; lane l gets number l / 2. Of the HELD sums that both lanes of a pair have, the
// upper lane goes on with the upper half.
template <uint32_t HELD>
__device__ __forceinline__ float warp_sums(float (&sums)[ROWS * COLUMNS]) {
    static_assert(ROWS * COLUMNS == 16, "a sum for two lanes each");
    constexpr uint32_t HALF = HELD / 2;
    const bool upper = threadIdx.x & HELD;
#pragma unroll
    for (uint32_t i = 0; i < HALF; i++) {
        const float kept = upper ? sums[i + HALF] : sums[i];
        const float given = upper ? sums[i] : sums[i + HALF];
        sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, HELD);
    }
    if constexpr (HALF > 1)
        return warp_sums<HALF>(sums);
    else
        return sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], 1);
}

// Four columns of every row of the part. The weights stay in registers; rows come and go. Columns that
// there are not repeat the last one.
template <typename T, bool WHOLE>
__device__ void sum_products(const MixSumsArgs &args, const MixPart &part) {
    constexpr uint32_t V = Wide<T>::COUNT, PER_WEIGHT = Wide<float>::COUNT;
    typedef LaneRows<T, WHOLE> Lanes;
    const uint32_t lane = threadIdx.x % 32, column = part.unit * COLUMNS;
    float weights[COLUMNS][LANE_CHANNELS];
#pragma unroll
    for (uint32_t q = 0; q < COLUMNS; q++) {
        const size_t from = min(column + q, args.columns - 1);
        const float *project = at<const float>(args.project) + from * args.width;
#pragma unroll
        for (uint32_t c = 0; c < LANE_CHANNELS; c += PER_WEIGHT) {
            const uint32_t channel = Lanes::channel(part, c / V) + c % V;
            const auto four = load_part<float, WHOLE>(project, channel, args.width);
#pragma unroll
            for (uint32_t i = 0; i < PER_WEIGHT; i++) weights[q][c + i] = four.get(i);
        }
    }
    for (uint32_t row = part.first; row < part.end; row += ROWS) {
        Lanes x;
        x.load(args, part, row);
        float sums[ROWS * COLUMNS] = {};
#pragma unroll
        for (uint32_t c = 0; c < LANE_CHANNELS; c++)
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) {
                const float value = x.get(r, c);
#pragma unroll
                for (uint32_t q = 0; q < COLUMNS; q++)
                    sums[r * COLUMNS + q] = fmaf(value, weights[q][c], sums[r * COLUMNS + q]);
            }
        const float sum = warp_sums<ROWS * COLUMNS>(sums);
        const uint32_t to_row = row + lane / (2 * COLUMNS), to = column + lane / 2 % COLUMNS;
        if (lane % 2 == 0 && to_row < part.end && to < args.columns) *part.sum(args, to_row, to) = sum;
    }
}

template <typename T, bool WHOLE>
__device__ void sum_squares(const MixSumsArgs &args, const MixPart &part) {
    for (uint32_t row = part.first; row < part.end; row += ROWS) {
        LaneRows<T, WHOLE> x;
        x.load(args, part, row);
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            float sum = 0.0f;
#pragma unroll
            for (uint32_t c = 0; c < LANE_CHANNELS; c++) sum = fmaf(x.get(r, c), x.get(r, c), sum);
            sum = warp_sum(sum);
            if (threadIdx.x % 32 == 0 && row + r < part.end)
                *part.sum(args, row + r, args.columns) = sum;
        }
    }
}

template <typename T, bool WHOLE>
__device__ void sum_part(const MixSumsArgs &args, const MixPart &part) {
    const uint32_t units = (args.columns + COLUMNS - 1) / COLUMNS;
    if (part.unit < units)
        sum_products<T, WHOLE>(args, part);
    else if (part.unit == units)
        sum_squares<T, WHOLE>(args, part);
}

// One warp per part. Warps of a block read the same channels of the same rows.
template <typename T> __device__ void mix_sums(const MixSumsArgs &args) {
    const MixPart part = MixPart::of(args);
    const bool whole = (part.segment + 1) * SEGMENT <= args.width;
    // Rows of whole wides of T are rows of whole wides of f32, the dtype of the weights.
    if (whole && rows_aligned<T>(args.streams | args.project, args.width))
        sum_part<T, true>(args, part);
    else
        sum_part<T, false>(args, part);
}
FOR_ACTIVATIONS(mix_sums, MixSumsArgs, 224)

struct MixArgs {
    uint64_t sums;      // f32 [segments, rows, (1 + n) (1 + n)], of mix_sums or mix_tiles
    uint64_t base;      // f32 [(2 + n) n]
    uint64_t scale;     // f32 [3]
    uint64_t pre;       // f32 [rows, n], written
    uint64_t post_comb; // f32 [rows, n + n n], written
    uint32_t rows;
    uint32_t segments;
    uint32_t n;     // at most MAX_STREAMS
    uint32_t width; // n h
    uint32_t iterations;
    float eps;
    float norm_eps;
    uint32_t pad;
};

// Rows of a block.
#define MIX_ROWS 32
#define MAX_VALUES ((MAX_STREAMS + 1) * (MAX_STREAMS + 1))

template <uint32_t N>
__device__ __forceinline__ void divide_columns(float (&m)[N][N], float eps) {
    float sums[N] = {};
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
#pragma unroll
        for (uint32_t j = 0; j < N; j++) sums[j] += m[i][j];
#pragma unroll
    for (uint32_t j = 0; j < N; j++) sums[j] = 1.0f / (sums[j] + eps);
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
#pragma unroll
        for (uint32_t j = 0; j < N; j++) m[i][j] *= sums[j];
}

// As the CPU's. One thread has a whole matrix: its rows, and its columns, do not wait for each other.
template <uint32_t N> __device__ void sinkhorn(float *comb, uint32_t iterations, float eps) {
    float m[N][N];
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < N; j++) top = fmaxf(top, comb[i * N + j]);
#pragma unroll
        for (uint32_t j = 0; j < N; j++) sum += m[i][j] = expf(comb[i * N + j] - top);
#pragma unroll
        for (uint32_t j = 0; j < N; j++) m[i][j] = m[i][j] / sum + eps;
    }
    divide_columns(m, eps);
#pragma unroll 1
    for (uint32_t done = 1; done < iterations; done++) {
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            float sum = 0.0f;
#pragma unroll
            for (uint32_t j = 0; j < N; j++) sum += m[i][j];
            const float inv = 1.0f / (sum + eps);
#pragma unroll
            for (uint32_t j = 0; j < N; j++) m[i][j] *= inv;
        }
        divide_columns(m, eps);
    }
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
#pragma unroll
        for (uint32_t j = 0; j < N; j++) comb[i * N + j] = m[i][j];
}

__device__ void sinkhorn_of(uint32_t n, float *comb, uint32_t iterations, float eps) {
    switch (n) {
    case 1: return sinkhorn<1>(comb, iterations, eps);
    case 2: return sinkhorn<2>(comb, iterations, eps);
    case 3: return sinkhorn<3>(comb, iterations, eps);
    case 4: return sinkhorn<4>(comb, iterations, eps);
    case 5: return sinkhorn<5>(comb, iterations, eps);
    case 6: return sinkhorn<6>(comb, iterations, eps);
    case 7: return sinkhorn<7>(comb, iterations, eps);
    case 8: return sinkhorn<8>(comb, iterations, eps);
    }
}

// Adds the segments of `n` sums up, in their order; the sums of a segment are `stride` long. The loads
// of many segments are under way together: with one row, this is what the kernel waits for.
__device__ __forceinline__ void add_segments(float *to, const float *sums, uint32_t n,
                                             uint32_t segments, size_t stride) {
    constexpr uint32_t TOGETHER = 20;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        float sum = 0.0f;
        for (uint32_t s = 0; s < segments; s += TOGETHER) {
            float parts[TOGETHER];
#pragma unroll
            for (uint32_t k = 0; k < TOGETHER; k++)
                parts[k] = s + k < segments ? sums[(s + k) * stride + i] : 0.0f;
#pragma unroll
            for (uint32_t k = 0; k < TOGETHER; k++) sum += parts[k];
        }
        to[i] = sum;
    }
}

// One block per MIX_ROWS rows.
extern "C" __global__ void __launch_bounds__(128) mix(const MixArgs args) {
    __shared__ float values[MIX_ROWS * MAX_VALUES]; // [rows of the block, (1 + n) (1 + n)]
    const uint32_t n = args.n, cells = n * n, columns = cells + 2 * n, count = columns + 1;
    const uint32_t first = blockIdx.x * MIX_ROWS, rows = min(MIX_ROWS, args.rows - first);
    add_segments(values, at<const float>(args.sums) + (size_t)first * count, rows * count,
                 args.segments, (size_t)args.rows * count);
    __syncthreads();
    const float *base = at<const float>(args.base), *scale = at<const float>(args.scale);
    float *pre = at<float>(args.pre) + (size_t)first * n;
    float *post = at<float>(args.post_comb) + (size_t)first * (n + cells);
    for (uint32_t i = threadIdx.x; i < rows * columns; i += blockDim.x) {
        const uint32_t row = i / columns, c = i % columns;
        float *own = values + row * count;
        const float inv = inverse_root(own[columns] / (float)args.width + args.norm_eps);
        const float value = own[c] * inv * scale[min(c / n, 2)] + base[c];
        if (c < n)
            pre[row * n + c] = sigmoid(value) + args.eps;
        else if (c < 2 * n)
            post[row * (n + cells) + c - n] = 2.0f * sigmoid(value);
        else
            own[c] = value;
    }
    __syncthreads();
    if (threadIdx.x < rows)
        sinkhorn_of(n, values + threadIdx.x * count + 2 * n, args.iterations, args.eps);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < rows * cells; i += blockDim.x) {
        const uint32_t row = i / cells, cell = i % cells;
        post[row * (n + cells) + n + cell] = values[row * count + 2 * n + cell];
    }
}
