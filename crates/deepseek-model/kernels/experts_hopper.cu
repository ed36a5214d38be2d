// The grouped products of the routed experts on Hopper, for many rows of an expert, in bf16. In a build
// for other GPUs the file is empty.
#include "experts_hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A tile is of BM places and BN rows of the expert's matrix. BK values of each are a stage of shared
// memory: one warpgroup fills stages, the other two multiply them, each with half of the places.
#define BM 128
#define BN 256
#define BK 64
#define STAGES 4
#define MULTIPLIERS 2

// Chunks of a row lie as `swizzled_factor` says.
struct Stage {
    bf16 a[BM * BK];
    bf16 b[BN * BK];
};

struct Shared {
    Stage stages[STAGES];
    uint64_t full[STAGES];  // a phase ends when the stage is filled
    uint64_t empty[STAGES]; // and here when it has been multiplied
};

typedef Turns<STAGES> Turn;

// Which row of the expert's matrix is row r of b, and with that where a thread's sums belong. They are,
// for each j below 32, of rows 8 j + 2 t and 8 j + 2 t + 1 of b, t being its lane % 4. The rows are laid
// so that they are neighbours in `out`: 8 values, or 16 bytes, at a time.
struct Plain {
    static constexpr uint32_t COLUMNS = BN; // of `out`

    // Columns column + 32 q + 8 t .. + 8 of out are j = 4 q .. 4 q + 3.
    __device__ static uint32_t matrix_row(const GroupedGemmArgs &args, uint32_t column, uint32_t r) {
        column += r / 32 * 32 + r % 8 / 2 * 8 + r % 32 / 8 * 2 + r % 2;
        return min(column, args.width - 1);
    }

    __device__ static uint32_t width(const GroupedGemmArgs &args) { return args.width; }

    // Value v of the 8 from column + 32 q + 8 t on, of the upper or lower of the thread's two rows.
    __device__ static float value(const GroupedGemmArgs &args, const float (&sums)[128], uint32_t q,
                                  uint32_t half, uint32_t v) {
        return sums[4 * (4 * q + v / 2) + 2 * half + v % 2];
    }
};

// Of a pair of sums, one is a gate and the other its up value. They are rounded as if they had been
// stored in between.
struct Swiglu {
    static constexpr uint32_t COLUMNS = BN / 2;

    // Columns column + 32 q + 8 t .. + 8 of out are j = 8 q .. 8 q + 7.
    __device__ static uint32_t matrix_row(const GroupedGemmArgs &args, uint32_t column, uint32_t r) {
        const uint32_t m = args.width / 2;
        column += r / 64 * 32 + r % 8 / 2 * 8 + r % 64 / 8;
        return min(column, m - 1) + r % 2 * m;
    }

    __device__ static uint32_t width(const GroupedGemmArgs &args) { return args.width / 2; }

    __device__ static float value(const GroupedGemmArgs &args, const float (&sums)[128], uint32_t q,
                                  uint32_t half, uint32_t v) {
        const float *pair = &sums[4 * (8 * q + v) + 2 * half];
        return gated(rounded<bf16>(pair[0]), rounded<bf16>(pair[1]), args.limit);
    }
};

// Fills the stages of all tiles of this block. A warpgroup; thread t copies chunk t % 8 of rows t / 8,
// t / 8 + 16, ... of both factors. Rows that a tile does not have are left as they are, and those that a
// matrix does not have are others, since what comes of them is not written.
template <typename Columns> __device__ void fill_stages(const GroupedGemmArgs &args, Shared &shared) {
    const uint32_t own = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
    const uint32_t to = own * BK + (chunk ^ own % 8) * 8;
    Turn turn;
    for (uint32_t index = blockIdx.x; index < args.slots * args.column_tiles; index += gridDim.x) {
        const Tile tile = Tile::of(args, index);
        if (tile.expert == NONE) continue;
        const bf16 *a[BM / 16];
#pragma unroll
        for (uint32_t i = 0; i < BM / 16; i++) {
            uint32_t row = tile.first + min(own + 16 * i, tile.rows - 1);
            if (args.order != 0) row = at<const uint32_t>(args.order)[row] / args.k;
            a[i] = at<const bf16>(args.x) + (size_t)row * args.inner + chunk * 8;
        }
        const bf16 *b = at<const bf16>(args.weights) +
                        (size_t)tile.expert * args.width * args.inner + chunk * 8;
        const uint32_t column = tile.column * Columns::COLUMNS;
        for (uint32_t from = 0; from < args.inner; from += BK, turn.next()) {
            Stage &stage = shared.stages[turn.stage];
            wait_phase(&shared.empty[turn.stage], turn.round - 1);
#pragma unroll
            for (uint32_t i = 0; i < BM / 16; i++)
                if (own + 16 * i < tile.rows) copy_async(&stage.a[to + 16 * i * BK], a[i] + from);
#pragma unroll
            for (uint32_t i = 0; i < BN / 16; i++) {
                const uint32_t row = Columns::matrix_row(args, column, own + 16 * i);
                copy_async(&stage.b[to + 16 * i * BK], b + (size_t)row * args.inner + from);
            }
            arrive_with_copies(&shared.full[turn.stage]);
        }
    }
}

template <typename Columns>
__device__ void write_tile(const GroupedGemmArgs &args, const Tile &tile, const float (&sums)[128]) {
    const uint32_t lane = threadIdx.x % 32, width = Columns::width(args);
    const uint32_t column = tile.column * Columns::COLUMNS + lane % 4 * 8;
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t row = threadIdx.x / 32 * 16 + half * 8 + lane / 4;
        if (row >= tile.rows) continue;
        bf16 *out = at<bf16>(args.out) + (size_t)(tile.first + row) * width + column;
#pragma unroll
        for (uint32_t q = 0; q < Columns::COLUMNS / 32; q++) {
            if (column + 32 * q >= width) break;
            __nv_bfloat162 pairs[4];
#pragma unroll
            for (uint32_t p = 0; p < 4; p++)
                pairs[p] =
                    __floats2bfloat162_rn(Columns::value(args, sums, q, half, 2 * p),
                                          Columns::value(args, sums, q, half, 2 * p + 1));
            *reinterpret_cast<uint4 *>(out + 32 * q) = *reinterpret_cast<const uint4 *>(pairs);
        }
    }
}

// sums = this warpgroup's part of a tile: of 64 rows of a, from `first_row` on.
__device__ __forceinline__ void multiply_stages(float (&sums)[128], Shared &shared, Turn &turn,
                                                uint32_t first_row, uint32_t inner) {
    const bool first_lane = threadIdx.x % 32 == 0;
    uint64_t *last = nullptr;
#pragma unroll
    for (uint32_t i = 0; i < 128; i++) sums[i] = 0.0f;
    for (uint32_t from = 0; from < inner; from += BK, turn.next()) {
        const Stage &stage = shared.stages[turn.stage];
        const uint64_t a = swizzled_factor(&stage.a[first_row * BK]);
        const uint64_t b = swizzled_factor(stage.b);
        wait_phase(&shared.full[turn.stage], turn.round);
        show_to_products();
        open_products();
#pragma unroll
        for (uint32_t step = 0; step < BK / 16; step++)
            multiply_add_64(sums, a + 2 * step, b + 2 * step);
        close_products();
        // The stage before this one has been read then.
        wait_products<1>();
        if (last && first_lane) arrive(last);
        last = &shared.empty[turn.stage];
    }
    wait_products<0>();
    if (first_lane) arrive(last);
}

// Lets the stages of a tile pass, of which this warpgroup has no rows.
__device__ __forceinline__ void pass_stages(Shared &shared, Turn &turn, uint32_t inner) {
    const bool first_lane = threadIdx.x % 32 == 0;
    for (uint32_t from = 0; from < inner; from += BK, turn.next()) {
        wait_phase(&shared.full[turn.stage], turn.round);
        if (first_lane) arrive(&shared.empty[turn.stage]);
    }
}

// Multiplies the stages of all tiles of this block and writes the sums. Two warpgroups.
template <typename Columns> __device__ void make_tiles(const GroupedGemmArgs &args, Shared &shared) {
    const uint32_t first_row = threadIdx.x / 128 * 64;
    Turn turn;
    Tile tile = Tile::of(args, blockIdx.x);
    for (uint32_t index = blockIdx.x; index < args.slots * args.column_tiles;) {
        // Asked for long before it is used.
        index += gridDim.x;
        const Tile next = Tile::of(args, index);
        if (tile.expert != NONE && first_row >= tile.rows) {
            pass_stages(shared, turn, args.inner);
        } else if (tile.expert != NONE) {
            float sums[128];
            multiply_stages(sums, shared, turn, first_row, args.inner);
            write_tile<Columns>(args, tile, sums);
        }
        tile = next;
    }
}

template <typename Columns> __device__ void grouped_gemm(const GroupedGemmArgs &args) {
    extern __shared__ uint8_t memory[];
    Shared &shared = *reinterpret_cast<Shared *>(((uintptr_t)memory + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (uint32_t s = 0; s < STAGES; s++) {
            init_barrier(&shared.full[s], 128);
            init_barrier(&shared.empty[s], MULTIPLIERS * 4); // once for each warp
        }
    }
    __syncthreads();
    if (threadIdx.x < MULTIPLIERS * 128)
        make_tiles<Columns>(args, shared);
    else
        fill_stages<Columns>(args, shared);
}

#define GROUPED_GEMM(name, Columns)                                                                \
    extern "C" __global__ void __launch_bounds__((MULTIPLIERS + 1) * 128, 1)                       \
        name(const GroupedGemmArgs args) {                                                         \
        grouped_gemm<Columns>(args);                                                               \
    }
GROUPED_GEMM(hopper_gemm, Plain)
GROUPED_GEMM(hopper_gemm_swiglu, Swiglu)

#endif
