// The sums of mix.cu of many bf16 rows, on tensor cores. They are also the products of rows with other f32
// matrices of few columns, which add_parts of linear.cu adds up.
//
// A weight is the sum of three bf16 numbers, exactly, so its product with a bf16 value is the sum of
// three that tensor cores take. They round their sums towards zero: those of a stage are added to f32
// sums outside before they grow.
#include "tensor_core.cuh"
#include "wide.cuh"

// Rows and channels of a stage, and columns of a block.
#define BM 64
#define BK 64
#define BN 24
#define STAGES 3
// Numbers that a weight is split into.
#define PARTS 3
// 8 rows of 16 bytes lie in different banks, and each is aligned to 16.
#define STRIDE (BK + 8)
#define THREADS 128

struct MixTilesArgs {
    uint64_t streams; // bf16 [rows, width], aligned to 16 bytes
    uint64_t project; // f32 [columns, width], aligned to 16 bytes
    uint64_t sums;    // f32 [segments, rows, columns + 1], written: products, then the sum of squares
    uint32_t rows;
    uint32_t columns;
    uint32_t width;        // a multiple of BK
    uint32_t segments;     // width / segment, rounded up
    uint32_t column_parts; // columns / BN, rounded up
    uint32_t segment;      // channels of a block, as mix.cu calls them; a multiple of BK
};

// Where a block's part of the sums begins.
struct MixTile {
    uint32_t row, column, channel, segment;

    __device__ static MixTile of(const MixTilesArgs &args) {
        const uint32_t place = blockIdx.x / args.column_parts, segment = place % args.segments;
        return {place / args.segments * BM, blockIdx.x % args.column_parts * BN, segment * args.segment,
                segment};
    }
};

typedef bf16 RowStage[BM][STRIDE];
typedef bf16 WeightStage[PARTS * BN][STRIDE];

// Starts to fill a stage with channels `channel` on; rows that there are not repeat the last one.
__device__ __forceinline__ void fill_rows(RowStage &stage, const MixTilesArgs &args,
                                          const MixTile &tile, uint32_t channel) {
    constexpr uint32_t ROW_CHUNKS = BK / 8;
#pragma unroll
    for (uint32_t i = 0; i < BM * ROW_CHUNKS / THREADS; i++) {
        const uint32_t chunk = threadIdx.x + THREADS * i, r = chunk / ROW_CHUNKS;
        const uint32_t c = chunk % ROW_CHUNKS * 8;
        const size_t row = min(tile.row + r, args.rows - 1);
        copy_async(&stage[r][c], at<const bf16>(args.streams) + row * args.width + channel + c);
    }
}

// A thread's weights of a stage, on their way to shared memory.
struct HeldWeights {
    static constexpr uint32_t ROW_FOURS = BK / 4, FOURS = BN * ROW_FOURS / THREADS;
    static_assert(FOURS * THREADS == BN * ROW_FOURS, "whole fours");
    Wide<float> fours[FOURS];

    // Columns that there are not repeat the last one.
    __device__ __forceinline__ void load(const MixTilesArgs &args, const MixTile &tile,
                                         uint32_t channel) {
#pragma unroll
        for (uint32_t i = 0; i < FOURS; i++) {
            const uint32_t four = threadIdx.x + THREADS * i;
            const size_t column = min(tile.column + four / ROW_FOURS, args.columns - 1);
            const float *from = at<const float>(args.project) + column * args.width + channel;
            fours[i] = Wide<float>::load(from + four % ROW_FOURS * 4);
        }
    }

    // Row p BN + q of a stage holds part p of column q.
    __device__ __forceinline__ void split(WeightStage &stage) const {
#pragma unroll
        for (uint32_t i = 0; i < FOURS; i++) {
            const uint32_t four = threadIdx.x + THREADS * i;
            float rest[4];
#pragma unroll
            for (uint32_t v = 0; v < 4; v++) rest[v] = fours[i].get(v);
#pragma unroll
            for (uint32_t p = 0; p < PARTS; p++) {
                uint2 pairs;
                pairs.x = take_part(rest[0], rest[1]);
                pairs.y = take_part(rest[2], rest[3]);
                bf16 *to = &stage[p * BN + four / ROW_FOURS][four % ROW_FOURS * 4];
                *reinterpret_cast<uint2 *>(to) = pairs;
            }
        }
    }

    // The nearest bf16 numbers, and what is left of each: nothing, where it is infinite.
    __device__ __forceinline__ static uint32_t take_part(float &a, float &b) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
        const uint32_t bits = *reinterpret_cast<const uint32_t *>(&pair);
        const float low = __uint_as_float(bits << 16), high = __uint_as_float(bits & 0xffff0000u);
        a = isinf(low) ? 0.0f : a - low;
        b = isinf(high) ? 0.0f : b - high;
        return bits;
    }
};

// A lane's sums: of rows lane / 4 and 8 further of the warp's 16, of columns 8 j + lane % 4 * 2 and the
// next, as multiply_add orders them; and its share of the squares of both rows.
struct WarpSums {
    static constexpr uint32_t TILES = BN / 8;
    float products[TILES][4] = {};
    float squares[2] = {};

    // Adds the products of a stage, the small parts of the weights first.
    __device__ __forceinline__ void add(const RowStage &rows, const WeightStage &weights) {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float of_stage[TILES][4] = {};
#pragma unroll
        for (uint32_t c = 0; c < BK; c += 16) {
            uint32_t a[4];
            load_matrices(a, &rows[warp * 16 + lane % 16][c + lane / 16 * 8]);
            add_squares(a);
            // Rows of the weights are columns of the product's b, 16 of them at a time; the last 8 are
            // loaded twice.
#pragma unroll
            for (int first = (int)PARTS * BN - 8; first >= 0; first -= 16) {
                const int second = first >= 8 ? first - 8 : first;
                uint32_t b[4];
                const int row = (lane < 16 ? first : second) + (int)(lane % 8);
                load_matrices(b, &weights[row][c + lane / 8 % 2 * 8]);
                multiply_add(of_stage[first / 8 % TILES], a, b[0], b[1]);
                if (first >= 8) multiply_add(of_stage[second / 8 % TILES], a, b[2], b[3]);
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < TILES; j++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) products[j][i] += of_stage[j][i];
    }

    __device__ __forceinline__ void add_squares(const uint32_t (&a)[4]) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const float low = __uint_as_float(a[i] << 16), high = __uint_as_float(a[i] & 0xffff0000u);
            squares[i % 2] = fmaf(high, high, fmaf(low, low, squares[i % 2]));
        }
    }

    __device__ __forceinline__ void write(const MixTilesArgs &args, const MixTile &tile) {
        const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            // Four lanes share a row.
            squares[half] += __shfl_xor_sync(0xffffffffu, squares[half], 1);
            squares[half] += __shfl_xor_sync(0xffffffffu, squares[half], 2);
            const uint32_t row = tile.row + warp * 16 + 8 * half + lane / 4;
            if (row >= args.rows) continue;
            const size_t at_row = (size_t)tile.segment * args.rows + row;
            float *out = at<float>(args.sums) + at_row * (args.columns + 1);
#pragma unroll
            for (uint32_t j = 0; j < TILES; j++)
#pragma unroll
                for (uint32_t i = 0; i < 2; i++) {
                    const uint32_t column = tile.column + 8 * j + lane % 4 * 2 + i;
                    if (column < args.columns) out[column] = products[j][2 * half + i];
                }
            if (tile.column == 0 && lane % 4 == 0) out[args.columns] = squares[half];
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) mix_tiles(const MixTilesArgs args) {
    __shared__ __align__(16) RowStage rows[STAGES];
    __shared__ __align__(16) WeightStage weights[2];
    const MixTile tile = MixTile::of(args);
    const uint32_t steps = (min(tile.channel + args.segment, args.width) - tile.channel) / BK;
    // A group of copies is closed for every stage, also where there is none, so that the number of
    // groups that may be under way is always the same.
#pragma unroll
    for (uint32_t s = 0; s + 1 < STAGES; s++) {
        if (s < steps) fill_rows(rows[s], args, tile, tile.channel + s * BK);
        close_copies();
    }
    HeldWeights held;
    held.load(args, tile, tile.channel);
    WarpSums sums;
    for (uint32_t s = 0; s < steps; s++) {
        // Others may still read the weights of stage s - 1; those of s - 2, no more.
        held.split(weights[s % 2]);
        if (s + 1 < steps) held.load(args, tile, tile.channel + (s + 1) * BK);
        wait_copies<STAGES - 2>();
        // All threads' copies of stage s are there, and all have added up stage s - 1, whose rows' memory
        // is filled next.
        __syncthreads();
        const uint32_t next = s + STAGES - 1;
        if (next < steps) fill_rows(rows[next % STAGES], args, tile, tile.channel + next * BK);
        close_copies();
        sums.add(rows[s % STAGES], weights[s % 2]);
    }
    sums.write(args, tile);
}
