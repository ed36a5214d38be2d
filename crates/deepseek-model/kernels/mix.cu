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

// Warps of a block of `mix`.
#define MIX_WARPS 4
#define MAX_VALUES ((MAX_STREAMS + 1) * (MAX_STREAMS + 1))

// 1 / x to the last bit or the one before it, without the branches of an exact division: what follows
// waits for it, and a division by the next sum corrects it.
__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A matrix of N x N in the lanes of a warp: lane P i + j has row i and column j, P being N or the power
// of two above it. More lanes than that repeat the first; where there are fewer, a lane has HELD rows,
// the first of them below 32 / P. Cells beyond N are zeros.
template <uint32_t N> struct LaneCells {
    static constexpr uint32_t P = N > 4 ? 8 : N > 2 ? 4 : N;
    static constexpr uint32_t ROWS_AT_ONCE = P < 8 ? P : 4, HELD = P / ROWS_AT_ONCE;
    float cells[HELD];

    __device__ __forceinline__ static uint32_t row(uint32_t k) {
        return threadIdx.x / P % ROWS_AT_ONCE + ROWS_AT_ONCE * k;
    }
    __device__ __forceinline__ static uint32_t column() { return threadIdx.x % P; }
    __device__ __forceinline__ static bool there(uint32_t k) {
        return N == P || (row(k) < N && column() < N);
    }

    // Sum over the columns of a row, in each of its lanes.
    __device__ __forceinline__ static float over_row(float x) {
#pragma unroll
        for (uint32_t step = 1; step < P; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
        return x;
    }

    // Each row's softmax, plus eps.
    __device__ __forceinline__ void start(const float *comb, float eps) {
#pragma unroll
        for (uint32_t k = 0; k < HELD; k++) {
            const float value = there(k) ? comb[row(k) * N + column()] : -INFINITY;
            float top = value;
#pragma unroll
            for (uint32_t step = 1; step < P; step *= 2)
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            const float power = there(k) ? expf(value - top) : 0.0f;
            const float sum = over_row(power);
            cells[k] = there(k) ? power / sum + eps : 0.0f;
        }
    }

    __device__ __forceinline__ void scale(uint32_t k, float by) {
        cells[k] = there(k) ? cells[k] * by : 0.0f;
    }

    __device__ __forceinline__ void divide_rows(float eps) {
#pragma unroll
        for (uint32_t k = 0; k < HELD; k++) scale(k, inverse(over_row(cells[k]) + eps));
    }

    __device__ __forceinline__ void divide_columns(float eps) {
        float sum = cells[0];
#pragma unroll
        for (uint32_t k = 1; k < HELD; k++) sum += cells[k];
#pragma unroll
        for (uint32_t step = P; step < P * ROWS_AT_ONCE; step *= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        const float by = inverse(sum + eps);
#pragma unroll
        for (uint32_t k = 0; k < HELD; k++) scale(k, by);
    }

    __device__ __forceinline__ void write(float *out) const {
        if (threadIdx.x >= P * ROWS_AT_ONCE) return;
#pragma unroll
        for (uint32_t k = 0; k < HELD; k++)
            if (there(k)) out[row(k) * N + column()] = cells[k];
    }
};

// One warp. Sums of four at a time, in lanes: a step of an iteration waits for two exchanges.
template <uint32_t N>
__device__ void sinkhorn(const float *comb, float *out, uint32_t iterations, float eps) {
    LaneCells<N> m;
    m.start(comb, eps);
    m.divide_columns(eps);
#pragma unroll 1
    for (uint32_t done = 1; done < iterations; done++) {
        m.divide_rows(eps);
        m.divide_columns(eps);
    }
    m.write(out);
}

__device__ void sinkhorn_of(uint32_t n, const float *comb, float *out, uint32_t iterations, float eps) {
    switch (n) {
    case 1: return sinkhorn<1>(comb, out, iterations, eps);
    case 2: return sinkhorn<2>(comb, out, iterations, eps);
    case 3: return sinkhorn<3>(comb, out, iterations, eps);
    case 4: return sinkhorn<4>(comb, out, iterations, eps);
    case 5: return sinkhorn<5>(comb, out, iterations, eps);
    case 6: return sinkhorn<6>(comb, out, iterations, eps);
    case 7: return sinkhorn<7>(comb, out, iterations, eps);
    case 8: return sinkhorn<8>(comb, out, iterations, eps);
    }
}

// Adds up the warp's quarter of the segments of `n` sums, in their order; the sums of a segment are
// `stride` apart. The loads of many segments are under way together: with one row, this is what the
// kernel waits for.
__device__ __forceinline__ void add_segments(float *to, const float *sums, uint32_t n,
                                             uint32_t segments, size_t stride) {
    constexpr uint32_t TOGETHER = 10;
    const uint32_t part = (segments + MIX_WARPS - 1) / MIX_WARPS, first = threadIdx.x / 32 * part;
    const uint32_t end = min(first + part, segments);
    for (uint32_t i = threadIdx.x % 32; i < n; i += 32) {
        float sum = 0.0f;
        for (uint32_t s = first; s < end; s += TOGETHER) {
            float parts[TOGETHER];
#pragma unroll
            for (uint32_t k = 0; k < TOGETHER; k++)
                parts[k] = s + k < end ? sums[(s + k) * stride + i] : 0.0f;
#pragma unroll
            for (uint32_t k = 0; k < TOGETHER; k++) sum += parts[k];
        }
        to[i] = sum;
    }
}

// One block per row. All warps add segments up, and the first does what is left.
extern "C" __global__ void __launch_bounds__(32 * MIX_WARPS) mix(const MixArgs args) {
    __shared__ float parts[MIX_WARPS][MAX_VALUES], values[MAX_VALUES], base[MAX_VALUES], scale[3];
    const uint32_t n = args.n, cells = n * n, columns = cells + 2 * n, count = columns + 1;
    const size_t row = blockIdx.x;
    static_assert(MAX_VALUES <= 32 * MIX_WARPS, "a thread for each");
    // The site's own values are asked for with the sums: they come from further away than those.
    const float own_base = threadIdx.x < columns ? at<const float>(args.base)[threadIdx.x] : 0.0f;
    const float own_scale = threadIdx.x < 3 ? at<const float>(args.scale)[threadIdx.x] : 0.0f;
    add_segments(parts[threadIdx.x / 32], at<const float>(args.sums) + row * count, count,
                 args.segments, (size_t)args.rows * count);
    if (threadIdx.x < columns) base[threadIdx.x] = own_base;
    if (threadIdx.x < 3) scale[threadIdx.x] = own_scale;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const auto sum = [&](uint32_t c) {
        float sum = parts[0][c];
#pragma unroll
        for (uint32_t w = 1; w < MIX_WARPS; w++) sum += parts[w][c];
        return sum;
    };
    const float inv = inverse_root(sum(columns) / (float)args.width + args.norm_eps);
    float *pre = at<float>(args.pre) + row * n;
    float *post = at<float>(args.post_comb) + row * (n + cells);
    for (uint32_t c = threadIdx.x; c < columns; c += 32) {
        const float value = sum(c) * inv * scale[min(c / n, 2)] + base[c];
        if (c < n)
            pre[c] = sigmoid(value) + args.eps;
        else if (c < 2 * n)
            post[c - n] = 2.0f * sigmoid(value);
        else
            values[c - 2 * n] = value;
    }
    __syncwarp();
    sinkhorn_of(n, values, post + n, args.iterations, args.eps);
}
