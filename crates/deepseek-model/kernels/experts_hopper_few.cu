// The grouped products of the routed experts on Hopper, for few rows of an expert, in bf16: what they wait
// for is the memory that the matrices come from. In a build for other GPUs the file is empty.
//
// The factors change their parts: rows of the expert's matrix are those of which the instruction always
// takes 64, and the places are its columns, of which there may be few. Each sum is that of the same
// products in the same steps as in experts_hopper.cu.
//
// A multiprocessor that reads alone is hardly faster than one that shares the memory with all others: it
// multiplies, or waits for its own copies. So the last tiles should end together, and the height of a tile
// is an argument: with the right one, each block has as many.
#include "experts_hopper.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Values of a row or place that are a stage of shared memory.
#define BK 64

// A tile is of up to PLACES places and ROWS rows of the expert's matrix. One warpgroup fills STAGES stages
// of them, MULTIPLIERS multiply them, each 64 rows. BLOCKS blocks of a multiprocessor have 144 KiB of
// matrices on their way, also between one tile and the next.
template <uint32_t PLACES_, uint32_t MULTIPLIERS_, uint32_t STAGES_, uint32_t BLOCKS_> struct Tiling {
    static constexpr uint32_t PLACES = PLACES_, MULTIPLIERS = MULTIPLIERS_, STAGES = STAGES_;
    static constexpr uint32_t BLOCKS = BLOCKS_, ROWS = 64 * MULTIPLIERS;
    static constexpr uint32_t THREADS = (MULTIPLIERS + 1) * 128;

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
};

// Small tiles, of which many leave no multiprocessor idle.
typedef Tiling<32, 1, 9, 2> Low;
// Where experts have more places, these are read again for every tile of rows: tiles are taller, so that
// the cache has little more to give than the memory. With fewer places most matrices would be read twice.
typedef Tiling<96, 3, 6, 1> Tall;

__device__ __forceinline__ uint32_t packed(float left, float right) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(left, right);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// Which row of the expert's matrix is row r of a tile, and what becomes of the sums of 8 places: values
// that are neighbours in `out`, once rows and places are turned.
struct Plain {
    static constexpr uint32_t TO_COLUMN = 1; // rows of the matrix that make a column of `out`
    static constexpr uint32_t OWN = 4;       // columns of a thread, at a place

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
    static constexpr uint32_t TO_COLUMN = 2;
    static constexpr uint32_t OWN = 2;

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
// t / 8 + 16, ... of the matrix and of such places. A place or row that a tile does not have is left as it
// is, and a row that a matrix does not have is another, since what comes of them is not written.
template <typename T, typename Columns>
__device__ void fill_stages(const GroupedGemmArgs &args, typename T::Shared &shared) {
    const uint32_t own = threadIdx.x % 128 / 8, chunk = threadIdx.x % 8;
    const uint32_t to = own * BK + (chunk ^ own % 8) * 8;
    typename T::Turn turn;
    for (uint32_t index = blockIdx.x; index < args.slots * args.column_tiles; index += gridDim.x) {
        const Tile tile = Tile::of(args, index);
        if (tile.expert == NONE) continue;
        const bf16 *places[T::PLACES / 16];
#pragma unroll
        for (uint32_t i = 0; i < T::PLACES / 16; i++) {
            uint32_t row = tile.first + min(own + 16 * i, tile.rows - 1);
            if (args.order != 0) row = at<const uint32_t>(args.order)[row] / args.k;
            places[i] = at<const bf16>(args.x) + (size_t)row * args.inner + chunk * 8;
        }
        const uint32_t column = tile.column * (args.height / Columns::TO_COLUMN);
        const bf16 *rows[T::ROWS / 16];
#pragma unroll
        for (uint32_t i = 0; i < T::ROWS / 16; i++) {
            const uint32_t r = Columns::matrix_row(args, column, own + 16 * i);
            rows[i] = at<const bf16>(args.weights) +
                      ((size_t)tile.expert * args.width + r) * args.inner + chunk * 8;
        }
        for (uint32_t from = 0; from < args.inner; from += BK, turn.next()) {
            typename T::Stage &stage = shared.stages[turn.stage];
            wait_phase(&shared.empty[turn.stage], turn.round - 1);
#pragma unroll
            for (uint32_t i = 0; i < T::ROWS / 16; i++)
                if (16 * i < args.height) copy_async(&stage.matrix[to + 16 * i * BK], rows[i] + from);
#pragma unroll
            for (uint32_t i = 0; i < T::PLACES / 16; i++)
                if (own + 16 * i < tile.rows) copy_async(&stage.places[to + 16 * i * BK], places[i] + from);
            arrive_with_copies(&shared.full[turn.stage]);
        }
    }
}

// Of 16 rows, a warp's, either all are of the tile or none.
template <typename T, typename Columns>
__device__ __forceinline__ void write_tile(const GroupedGemmArgs &args, const Tile &tile,
                                           const typename T::Sums &sums) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, width = Columns::width(args);
    const uint32_t column =
        tile.column * (args.height / Columns::TO_COLUMN) + (warp * 4 + lane % 4) * Columns::OWN;
    if (warp * 16 >= args.height) return;
#pragma unroll
    for (uint32_t first = 0; first < T::PLACES; first += 8) {
        const auto values = Columns::values(args, &sums[first / 2]);
        const uint32_t place = first + lane / 4;
        if (place >= tile.rows || column >= width) continue;
        Columns::write(at<bf16>(args.out) + (size_t)(tile.first + place) * width + column, values);
    }
}

// sums = this warpgroup's part of a tile: of 64 rows of the matrix, and all places.
template <typename T>
__device__ __forceinline__ void multiply_stages(typename T::Sums &sums, typename T::Shared &shared,
                                                typename T::Turn &turn, uint32_t inner) {
    const bool first_lane = threadIdx.x % 32 == 0;
    const uint32_t first_row = threadIdx.x / 128 * 64;
    uint64_t *last = nullptr;
#pragma unroll
    for (uint32_t i = 0; i < T::PLACES / 2; i++) sums[i] = 0.0f;
    for (uint32_t from = 0; from < inner; from += BK, turn.next()) {
        const typename T::Stage &stage = shared.stages[turn.stage];
        const uint64_t a = swizzled_factor(&stage.matrix[first_row * BK]);
        const uint64_t b = swizzled_factor(stage.places);
        wait_phase(&shared.full[turn.stage], turn.round);
        show_to_products();
        open_products();
#pragma unroll
        for (uint32_t step = 0; step < BK / 16; step++) multiply_add_64(sums, a + 2 * step, b + 2 * step);
        close_products();
        // The stage before this one has been read then.
        wait_products<1>();
        if (last && first_lane) arrive(last);
        last = &shared.empty[turn.stage];
    }
    wait_products<0>();
    if (first_lane) arrive(last);
}

// Multiplies the stages of all tiles of this block and writes the sums. MULTIPLIERS warpgroups.
template <typename T, typename Columns>
__device__ void make_tiles(const GroupedGemmArgs &args, typename T::Shared &shared) {
    typename T::Turn turn;
    Tile tile = Tile::of(args, blockIdx.x);
    for (uint32_t index = blockIdx.x; index < args.slots * args.column_tiles;) {
        // Asked for long before it is used.
        index += gridDim.x;
        const Tile next = Tile::of(args, index);
        if (tile.expert != NONE) {
            typename T::Sums sums;
            multiply_stages<T>(sums, shared, turn, args.inner);
            write_tile<T, Columns>(args, tile, sums);
        }
        tile = next;
    }
}

template <typename T, typename Columns> __device__ void grouped_gemm_few(const GroupedGemmArgs &args) {
    extern __shared__ uint8_t memory[];
    typename T::Shared &shared =
        *reinterpret_cast<typename T::Shared *>(((uintptr_t)memory + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (uint32_t s = 0; s < T::STAGES; s++) {
            init_barrier(&shared.full[s], 128);
            init_barrier(&shared.empty[s], T::MULTIPLIERS * 4); // once for each warp
        }
    }
    __syncthreads();
    if (threadIdx.x < T::MULTIPLIERS * 128)
        make_tiles<T, Columns>(args, shared);
    else
        fill_stages<T, Columns>(args, shared);
}

#define GROUPED_GEMM(name, T, Columns)                                                             \
    extern "C" __global__ void __launch_bounds__(T::THREADS, T::BLOCKS) name(const GroupedGemmArgs args) { \
        grouped_gemm_few<T, Columns>(args);                                                        \
    }
GROUPED_GEMM(hopper_low, Low, Plain)
GROUPED_GEMM(hopper_low_swiglu, Low, Swiglu)
GROUPED_GEMM(hopper_tall, Tall, Plain)
GROUPED_GEMM(hopper_tall_swiglu, Tall, Swiglu)

#endif
