// The grouped products of the routed experts on Hopper, for few rows of an expert, in bf16: what they wait
// for is the memory that the matrices come from. In a build for other GPUs the file is empty.
//
// The factors change their parts: rows of the expert's matrix are those of which the instruction always
// takes 64, and the places are its columns, of which there may be few. Each sum is that of the same
// products in the same steps as in experts_hopper.cu.
#include "experts_hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A tile is of PLACES places and ROWS rows of the expert's matrix. BK values of each are a stage of shared
// memory: one warpgroup fills stages, the other multiplies them. Two blocks of a multiprocessor have 144 KiB
// of matrices on their way, also between one tile and the next; small tiles leave none idle.
#define PLACES 32
#define ROWS 64
#define BK 64
#define STAGES 9
#define BLOCKS 2

// Chunks of a row lie as `swizzled_factor` says.
struct Stage {
    bf16 matrix[ROWS * BK];
    bf16 places[PLACES * BK];
};

struct Shared {
    Stage stages[STAGES];
    uint64_t full[STAGES];  // a phase ends when the stage is filled
    uint64_t empty[STAGES]; // and here when it has been multiplied
};

typedef Turns<STAGES> Turn;

// A thread's sums are, for each 8 places: two of them in the row of its lane / 4, of the first 8 of its
// warp's 16 rows, and the same two in the second 8.
typedef float Sums[PLACES / 2];

__device__ __forceinline__ uint32_t packed(float left, float right) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(left, right);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// Which row of the expert's matrix is row r of a tile, and what becomes of the sums of 8 places: values
// that are neighbours in `out`, once rows and places are turned.
struct Plain {
    static constexpr uint32_t COLUMNS = ROWS;    // of `out`
    static constexpr uint32_t OWN = COLUMNS / 16; // of a thread, at a place

    __device__ static uint32_t matrix_row(const GroupedGemmArgs &args, uint32_t column, uint32_t r) {
        return min(column + r / 16 * 16 + r % 8 / 2 * OWN + r / 8 % 2 * 2 + r % 2, args.width - 1);
    }

    __device__ static uint32_t width(const GroupedGemmArgs &args) { return args.width; }

    __device__ __forceinline__ static uint2 values(const GroupedGemmArgs &, const float *sums) {
        return make_uint2(turned(packed(sums[0], sums[1])), turned(packed(sums[2], sums[3])));
    }

    __device__ __forceinline__ static void write(bf16 *out, uint2 values) {
        *reinterpret_cast<uint2 *>(out) = values;
    }
};

// The first 8 rows are gates and the second their up values. They are rounded as if they had been stored
// in between.
struct Swiglu {
    static constexpr uint32_t COLUMNS = ROWS / 2;
    static constexpr uint32_t OWN = COLUMNS / 16;

    __device__ static uint32_t matrix_row(const GroupedGemmArgs &args, uint32_t column, uint32_t r) {
        const uint32_t m = args.width / 2;
        return min(column + r / 16 * 8 + r % 8, m - 1) + r / 8 % 2 * m;
    }

    __device__ static uint32_t width(const GroupedGemmArgs &args) { return args.width / 2; }

    __device__ __forceinline__ static uint32_t values(const GroupedGemmArgs &args, const float *sums) {
        const float left = gated(rounded<bf16>(sums[0]), rounded<bf16>(sums[2]), args.limit);
        const float right = gated(rounded<bf16>(sums[1]), rounded<bf16>(sums[3]), args.limit);
        return turned(packed(left, right));
    }

    __device__ __forceinline__ static void write(bf16 *out, uint32_t values) {
        *reinterpret_cast<uint32_t *>(out) = values;
    }
};

// Fills the stages of all tiles of this block. A warpgroup; thread t copies chunk t % 8 of rows t / 8,
// t / 8 + 16, ... of the matrix and of such places. A place that a tile does not have is left as it is, and
// a row that a matrix does not have is another, since what comes of them is not written.
template <typename Columns> __device__ void fill_stages(const GroupedGemmArgs &args, Shared &shared) {
    const uint32_t own = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
    const uint32_t to = own * BK + (chunk ^ own % 8) * 8;
    Turn turn;
    for (uint32_t index = blockIdx.x; index < args.slots * args.column_tiles; index += gridDim.x) {
        const Tile tile = Tile::of(args, index);
        if (tile.expert == NONE) continue;
        const bf16 *places[PLACES / 16];
#pragma unroll
        for (uint32_t i = 0; i < PLACES / 16; i++) {
            uint32_t row = tile.first + min(own + 16 * i, tile.rows - 1);
            if (args.order != 0) row = at<const uint32_t>(args.order)[row] / args.k;
            places[i] = at<const bf16>(args.x) + (size_t)row * args.inner + chunk * 8;
        }
        const bf16 *rows[ROWS / 16];
#pragma unroll
        for (uint32_t i = 0; i < ROWS / 16; i++) {
            const uint32_t r = Columns::matrix_row(args, tile.column * Columns::COLUMNS, own + 16 * i);
            rows[i] = at<const bf16>(args.weights) +
                      ((size_t)tile.expert * args.width + r) * args.inner + chunk * 8;
        }
        for (uint32_t from = 0; from < args.inner; from += BK, turn.next()) {
            Stage &stage = shared.stages[turn.stage];
            wait_phase(&shared.empty[turn.stage], turn.round - 1);
#pragma unroll
            for (uint32_t i = 0; i < ROWS / 16; i++)
                copy_async(&stage.matrix[to + 16 * i * BK], rows[i] + from);
#pragma unroll
            for (uint32_t i = 0; i < PLACES / 16; i++)
                if (own + 16 * i < tile.rows) copy_async(&stage.places[to + 16 * i * BK], places[i] + from);
            arrive_with_copies(&shared.full[turn.stage]);
        }
    }
}

template <typename Columns>
__device__ __forceinline__ void write_tile(const GroupedGemmArgs &args, const Tile &tile,
                                           const Sums &sums) {
    const uint32_t lane = threadIdx.x % 32, width = Columns::width(args);
    const uint32_t column = tile.column * Columns::COLUMNS + (threadIdx.x / 32 * 4 + lane % 4) * Columns::OWN;
#pragma unroll
    for (uint32_t first = 0; first < PLACES; first += 8) {
        const auto values = Columns::values(args, &sums[first / 2]);
        const uint32_t place = first + lane / 4;
        if (place >= tile.rows || column >= width) continue;
        Columns::write(at<bf16>(args.out) + (size_t)(tile.first + place) * width + column, values);
    }
}

// sums = this warpgroup's, of all rows and places of a tile.
__device__ __forceinline__ void multiply_stages(Sums &sums, Shared &shared, Turn &turn, uint32_t inner) {
    const bool first_lane = threadIdx.x % 32 == 0;
    uint64_t *last = nullptr;
#pragma unroll
    for (uint32_t i = 0; i < PLACES / 2; i++) sums[i] = 0.0f;
    for (uint32_t from = 0; from < inner; from += BK, turn.next()) {
        const Stage &stage = shared.stages[turn.stage];
        const uint64_t a = swizzled_factor(stage.matrix), b = swizzled_factor(stage.places);
        wait_phase(&shared.full[turn.stage], turn.round);
        show_to_products();
        open_products();
#pragma unroll
        for (uint32_t step = 0; step < BK / 16; step++)
            multiply_add_64_32(sums, a + 2 * step, b + 2 * step);
        close_products();
        // The stage before this one has been read then.
        wait_products<1>();
        if (last && first_lane) arrive(last);
        last = &shared.empty[turn.stage];
    }
    wait_products<0>();
    if (first_lane) arrive(last);
}

// Multiplies the stages of all tiles of this block and writes the sums. A warpgroup.
template <typename Columns> __device__ void make_tiles(const GroupedGemmArgs &args, Shared &shared) {
    Turn turn;
    Tile tile = Tile::of(args, blockIdx.x);
    for (uint32_t index = blockIdx.x; index < args.slots * args.column_tiles;) {
        // Asked for long before it is used.
        index += gridDim.x;
        const Tile next = Tile::of(args, index);
        if (tile.expert != NONE) {
            Sums sums;
            multiply_stages(sums, shared, turn, args.inner);
            write_tile<Columns>(args, tile, sums);
        }
        tile = next;
    }
}

template <typename Columns> __device__ void grouped_gemm_few(const GroupedGemmArgs &args) {
    extern __shared__ uint8_t memory[];
    Shared &shared = *reinterpret_cast<Shared *>(((uintptr_t)memory + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (uint32_t s = 0; s < STAGES; s++) {
            init_barrier(&shared.full[s], 128);
            init_barrier(&shared.empty[s], 4); // once for each warp
        }
    }
    __syncthreads();
    if (threadIdx.x < 128)
        make_tiles<Columns>(args, shared);
    else
        fill_stages<Columns>(args, shared);
}

#define GROUPED_GEMM(name, Columns)                                                                \
    extern "C" __global__ void __launch_bounds__(2 * 128, BLOCKS) name(const GroupedGemmArgs args) { \
        grouped_gemm_few<Columns>(args);                                                           \
    }
GROUPED_GEMM(hopper_few, Plain)
GROUPED_GEMM(hopper_few_swiglu, Swiglu)

#endif
