// The routed experts: choices sorted by expert, and a product of each expert's rows with its matrix.
// The weighted sum of a row's results is in ffn.cu.
//
// A choice is one of the k experts of a row, numbered row k + its rank; a place is a position in the
// sorted list. A tile is up to `tile_rows` places of one expert.
#include "tensor_core.cuh"

struct SortArgs {
    uint64_t ids;   // u32 [choices]; what is no expert gets no place
    uint64_t order; // u32 [choices], written: the choice at each place, as far as there are places
    uint64_t place; // u32 [choices], written: the place of each choice, or NONE
    uint64_t tiles; // u32 [slots, 3], written: expert (or NONE), first place, places
    uint32_t choices;
    uint32_t experts;
    uint32_t tile_rows;
    uint32_t slots; // at least the tiles that there can be
};

// Sum over a block of 256 threads, in every thread.
__device__ uint32_t block_count(uint32_t n, uint32_t *scratch) {
    for (int step = 16; step > 0; step /= 2) n += __shfl_xor_sync(0xffffffffu, n, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = n;
    __syncthreads();
    n = 0;
    for (uint32_t warp = 0; warp < 8; warp++) n += scratch[warp];
    return n;
}

// Writes the places of the `n` choices of an expert, from `first` on, in the order of the choices.
__device__ void sort_expert(const SortArgs &args, uint32_t expert, uint32_t first, uint32_t n,
                            uint32_t *scratch) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t *ids = at<const uint32_t>(args.ids);
    for (uint32_t start = 0, end = first + n; first < end; start += blockDim.x) {
        const uint32_t choice = start + threadIdx.x;
        const bool mine = choice < args.choices && ids[choice] == expert;
        const uint32_t lanes = __ballot_sync(0xffffffffu, mine);
        __syncthreads(); // the scratch of the last round has been read
        if (lane == 0) scratch[warp] = __popc(lanes);
        __syncthreads();
        uint32_t place = first + __popc(lanes & ((1u << lane) - 1));
        for (uint32_t w = 0; w < 8; w++) {
            if (w < warp) place += scratch[w];
            first += scratch[w];
        }
        if (mine) {
            at<uint32_t>(args.order)[place] = choice;
            at<uint32_t>(args.place)[choice] = place;
        }
    }
}

// One block per expert; each counts all choices, so that no block waits for another.
extern "C" __global__ void __launch_bounds__(256) sort_choices(const SortArgs args) {
    extern __shared__ uint32_t counts[]; // [experts]
    __shared__ uint32_t scratch[8];
    const uint32_t expert = blockIdx.x;
    for (uint32_t e = threadIdx.x; e < args.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (uint32_t choice = threadIdx.x; choice < args.choices; choice += blockDim.x) {
        const uint32_t id = at<const uint32_t>(args.ids)[choice];
        if (id < args.experts)
            atomicAdd(&counts[id], 1u);
        else if (expert == 0)
            at<uint32_t>(args.place)[choice] = NONE;
    }
    __syncthreads();
    uint32_t first = 0, slot = 0;
    for (uint32_t e = threadIdx.x; e < expert; e += blockDim.x) {
        first += counts[e];
        slot += (counts[e] + args.tile_rows - 1) / args.tile_rows;
    }
    first = block_count(first, scratch);
    slot = block_count(slot, scratch);
    const uint32_t n = counts[expert], tiles = (n + args.tile_rows - 1) / args.tile_rows;
    // The last expert also fills the slots that no tile takes.
    const uint32_t slots = expert + 1 < args.experts ? tiles : args.slots - slot;
    for (uint32_t i = threadIdx.x; i < slots; i += blockDim.x) {
        uint32_t *tile = at<uint32_t>(args.tiles) + (size_t)(slot + i) * 3;
        const uint32_t done = i * args.tile_rows;
        tile[0] = i < tiles ? expert : NONE;
        tile[1] = first + done;
        tile[2] = i < tiles ? min(args.tile_rows, n - done) : 0;
    }
    sort_expert(args, expert, first, n, scratch);
}

struct GroupedGemmArgs {
    uint64_t x;       // T [rows, inner]
    uint64_t order;   // u32 [choices]: place p takes row order[p] / k of x; 0: row p
    uint64_t weights; // T [experts, width, inner]
    uint64_t tiles;   // u32 [slots, 3], as sort_choices wrote them
    uint64_t out;     // T [choices, width], written at the places of the tiles
    uint32_t k;
    uint32_t inner;
    uint32_t width;
    uint32_t column_tiles; // blocks of a slot: each takes BN columns
};

// The part of `out` that a block computes: all have the same expert.
struct Tile {
    uint32_t expert;
    uint32_t first; // place
    uint32_t rows;  // places
    uint32_t column;

    // Of this block. Column tiles of a slot are neighbours, and so are tiles of an expert.
    __device__ static Tile of(const GroupedGemmArgs &args, uint32_t columns) {
        const size_t slot = blockIdx.x / args.column_tiles;
        const uint32_t *tile = at<const uint32_t>(args.tiles) + 3 * slot;
        return {tile[0], tile[1], tile[2], blockIdx.x % args.column_tiles * columns};
    }

    // Row `r` of the left factor; a null pointer if the tile has fewer.
    template <typename T>
    __device__ const T *left(const GroupedGemmArgs &args, uint32_t r) const {
        if (r >= rows) return nullptr;
        uint32_t row = first + r;
        if (args.order != 0) row = at<const uint32_t>(args.order)[row] / args.k;
        return at<const T>(args.x) + (size_t)row * args.inner;
    }

    // Row `r` of the right factor, a column of the result; a null pointer if there are fewer.
    template <typename T>
    __device__ const T *right(const GroupedGemmArgs &args, uint32_t r) const {
        if (column + r >= args.width) return nullptr;
        const size_t row = (size_t)expert * args.width + column + r;
        return at<const T>(args.weights) + row * args.inner;
    }
};

// The tiles of both dtypes are of 16 or 64 rows, low ones where experts have few rows each; those of
// experts_hopper_few.cu are of 32 or 96 and those of experts_hopper.cu of 128. A sum runs over `inner` in the
// same steps in all of them, so a row's result depends neither on the height nor on the row's place in the
// tile, and with that on nothing else in the batch. That wgmma adds within a step as mma does, whichever
// factor comes first, is not written anywhere; a test compares them.

// 256 threads, 16 x 16, each with BM / 16 rows of 4 columns. BN is 64.
template <uint32_t BM> __device__ void grouped_gemm_f32(const GroupedGemmArgs &args) {
    constexpr uint32_t BN = 64, BK = 16, TM = BM / 16, TN = 4;
    __shared__ float a[BK][BM + 4], b[BK][BN + 4];
    const Tile tile = Tile::of(args, BN);
    if (tile.expert == NONE) return;
    // Loads: thread t takes value t % 16 of rows t / 16, t / 16 + 16, ...
    const uint32_t own = threadIdx.x / 16, lane = threadIdx.x % 16;
    const float *left[TM], *right[TN];
    for (uint32_t i = 0; i < TM; i++) left[i] = tile.left<float>(args, own + 16 * i);
    for (uint32_t j = 0; j < TN; j++) right[j] = tile.right<float>(args, own + 16 * j);
    float sums[TM][TN] = {};
    for (uint32_t start = 0; start < args.inner; start += BK) {
        const bool inside = start + lane < args.inner;
        for (uint32_t i = 0; i < TM; i++)
            a[lane][own + 16 * i] = inside && left[i] ? left[i][start + lane] : 0.0f;
        for (uint32_t j = 0; j < TN; j++)
            b[lane][own + 16 * j] = inside && right[j] ? right[j][start + lane] : 0.0f;
        __syncthreads();
        for (uint32_t c = 0; c < BK; c++)
            for (uint32_t i = 0; i < TM; i++)
                for (uint32_t j = 0; j < TN; j++)
                    sums[i][j] = fmaf(a[c][own * TM + i], b[c][lane * TN + j], sums[i][j]);
        __syncthreads();
    }
    for (uint32_t i = 0; i < TM; i++) {
        const uint32_t row = own * TM + i;
        if (row >= tile.rows) break;
        float *out = at<float>(args.out) + (size_t)(tile.first + row) * args.width;
        for (uint32_t j = 0; j < TN; j++) {
            const uint32_t column = tile.column + lane * TN + j;
            if (column < args.width) out[column] = sums[i][j];
        }
    }
}

// 4 warps, WARPS_M of them one above the other, each with WM x WN of the tile. BM rows of the left
// factor and BN of the right one, BK values of each, are a stage of shared memory; while one is
// multiplied, the next STAGES - 1 are on their way.
template <uint32_t BM_, uint32_t BN_, uint32_t BK_, uint32_t STAGES_, uint32_t WARPS_M>
struct Bf16Tile {
    static constexpr uint32_t BM = BM_, BN = BN_, BK = BK_, STAGES = STAGES_;
    static constexpr uint32_t WM = BM / WARPS_M, WN = BN * WARPS_M / 4;
    // 8 rows of 16 bytes lie in different banks, and each is aligned to 16.
    static constexpr uint32_t STRIDE = BK + 8;
    static constexpr uint32_t ROW_CHUNKS = BK / 8, CHUNKS = (BM + BN) * ROW_CHUNKS / 128;
    static_assert(WM % 16 == 0 && WN % 16 == 0 && BK % 16 == 0 && STRIDE / 8 % 2 == 1, "fragments");
    static_assert(CHUNKS * 128 == (BM + BN) * ROW_CHUNKS, "whole chunks");
    typedef bf16 Stage[BM + BN][STRIDE];
};

// Starts to fill a stage from value `start` of every row; absent rows and values are zeros. Where
// rows are `aligned` to 16 bytes, they are so many long too, and a chunk is absent or whole.
template <typename S>
__device__ void fill_stage(typename S::Stage &stage, const bf16 *const (&rows)[S::CHUNKS],
                           uint32_t start, uint32_t inner, bool aligned) {
#pragma unroll
    for (uint32_t i = 0; i < S::CHUNKS; i++) {
        const uint32_t chunk = threadIdx.x + 128 * i, c = chunk % S::ROW_CHUNKS * 8;
        bf16 *to = &stage[chunk / S::ROW_CHUNKS][c];
        const uint32_t from = start + c;
        const uint32_t n = rows[i] && from < inner ? min(8u, inner - from) : 0;
        if (n != 0 && aligned) {
            copy_async(to, rows[i] + from);
            continue;
        }
        *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
        for (uint32_t v = 0; v < n; v++) to[v] = rows[i][from + v];
    }
}

// sums += left right of a stage, for this warp's rows from `m` and columns from `n` of the tile. Only
// the steps that have one of the first `values` values: a step of zeros could turn -0 into 0.
template <typename S>
__device__ void multiply_stage(float (&sums)[S::WM / 16][S::WN / 8][4],
                               const typename S::Stage &stage, uint32_t m, uint32_t n,
                               uint32_t values) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t c = 0; c < S::BK; c += 16) {
        if (c >= values) break;
        uint32_t a[S::WM / 16][4], b[S::WN / 16][4];
#pragma unroll
        for (uint32_t i = 0; i < S::WM / 16; i++)
            load_matrices(a[i], &stage[m + 16 * i + lane % 16][c + lane / 16 * 8]);
        // Rows of the right factor are columns of the product's b: matrices 0 and 1 are those of 8
        // columns of the result, 2 and 3 those of the next 8.
#pragma unroll
        for (uint32_t j = 0; j < S::WN / 16; j++) {
            const uint32_t row = S::BM + n + 16 * j + lane / 16 * 8 + lane % 8;
            load_matrices(b[j], &stage[row][c + lane / 8 % 2 * 8]);
        }
#pragma unroll
        for (uint32_t i = 0; i < S::WM / 16; i++)
#pragma unroll
            for (uint32_t j = 0; j < S::WN / 8; j++)
                multiply_add(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}

template <typename S>
__device__ void write_tile(const GroupedGemmArgs &args, const Tile &tile,
                           const float (&sums)[S::WM / 16][S::WN / 8][4], uint32_t m, uint32_t n) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t i = 0; i < S::WM / 16; i++) {
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t row = m + 16 * i + 8 * half + lane / 4;
            if (row >= tile.rows) continue;
            bf16 *out = at<bf16>(args.out) + (size_t)(tile.first + row) * args.width;
#pragma unroll
            for (uint32_t j = 0; j < S::WN / 8; j++) {
                const uint32_t column = tile.column + n + 8 * j + lane % 4 * 2;
                const float left = sums[i][j][2 * half], right = sums[i][j][2 * half + 1];
                if (args.width % 2 == 0 && column < args.width) {
                    auto *pair = reinterpret_cast<__nv_bfloat162 *>(out + column);
                    *pair = __floats2bfloat162_rn(left, right);
                    continue;
                }
                if (column < args.width) store(out + column, left);
                if (column + 1 < args.width) store(out + column + 1, right);
            }
        }
    }
}

template <typename S> __device__ void grouped_gemm_bf16(const GroupedGemmArgs &args) {
    __shared__ __align__(16) typename S::Stage stages[S::STAGES];
    const Tile tile = Tile::of(args, S::BN);
    if (tile.expert == NONE) return;
    const uint32_t warp = threadIdx.x / 32, across = S::BN / S::WN;
    const uint32_t m = warp / across * S::WM, n = warp % across * S::WN, inner = args.inner;
    const bool aligned = (args.x | args.weights | (uint64_t)inner * sizeof(bf16)) % 16 == 0;
    const bf16 *rows[S::CHUNKS];
#pragma unroll
    for (uint32_t i = 0; i < S::CHUNKS; i++) {
        const uint32_t r = (threadIdx.x + 128 * i) / S::ROW_CHUNKS;
        rows[i] = r < S::BM ? tile.left<bf16>(args, r) : tile.right<bf16>(args, r - S::BM);
    }
    const uint32_t steps = (inner + S::BK - 1) / S::BK;
    // A group of copies is closed for every stage, also where there is none, so that the number of
    // groups that may be under way is always the same.
#pragma unroll
    for (uint32_t s = 0; s + 1 < S::STAGES; s++) {
        if (s < steps) fill_stage<S>(stages[s], rows, s * S::BK, inner, aligned);
        close_copies();
    }
    float sums[S::WM / 16][S::WN / 8][4] = {};
    for (uint32_t s = 0; s < steps; s++) {
        wait_copies<S::STAGES - 2>();
        // All threads' copies of stage s are there, and all have multiplied stage s - 1, whose memory
        // is filled next.
        __syncthreads();
        const uint32_t next = s + S::STAGES - 1;
        if (next < steps)
            fill_stage<S>(stages[next % S::STAGES], rows, next * S::BK, inner, aligned);
        close_copies();
        multiply_stage<S>(sums, stages[s % S::STAGES], m, n, inner - s * S::BK);
    }
    write_tile<S>(args, tile, sums, m, n);
}

#define GROUPED_GEMM(name, threads, ...)                                                           \
    extern "C" __global__ void __launch_bounds__(threads) name(const GroupedGemmArgs args) {      \
        __VA_ARGS__(args);                                                                         \
    }
GROUPED_GEMM(grouped_gemm_16_f32, 256, grouped_gemm_f32<16>)
GROUPED_GEMM(grouped_gemm_64_f32, 256, grouped_gemm_f32<64>)
GROUPED_GEMM(grouped_gemm_16_bf16, 128, grouped_gemm_bf16<Bf16Tile<16, 64, 64, 4, 1>>)
GROUPED_GEMM(grouped_gemm_64_bf16, 128, grouped_gemm_bf16<Bf16Tile<64, 128, 32, 3, 2>>)
