// Moves rows of many tensors in one launch: gather, scatter with zeros between, scatter without.
//
// Rows are bytes here: a dtype is only a width. Each tensor is copied in units of the widest power
// of two, up to 16 bytes, that divides both addresses and the row's length, so that every access is
// aligned whatever view a tensor is.
//
// Grid: one block per tile, the tiles of tensor 0 first, then those of tensor 1, and so on; any
// number of threads per block. A tile is a part of one row (wide tensors) or some whole rows (narrow
// ones); the host cuts them (`src/tiling.rs`). No shared memory, no barrier, no atomics: every unit
// of every output is written by exactly one thread.

typedef unsigned int u32;

#define MAX_COPIES 32
#define NONE 0xffffffffu

// One tensor's part of a launch. The layout is `raw::RowCopy`.
struct RowCopy {
    const void *src;    // device, [src_rows, row_units] units, aligned to a unit; read only
    void *dst;          // device, [dst_rows, row_units] units, aligned to a unit; overlaps nothing else
    u32 src_rows;
    u32 dst_rows;
    u32 n_rows;         // rows to walk: of the list for gather and write, of `dst` for scatter
    u32 row_units;      // units per row, at least 1
    u32 unit_log2;      // a unit is 1 << unit_log2 bytes, 0 to 4
    u32 first_tile;     // tiles of the tensors before
    u32 tiles_per_row;  // a wide row's tiles; 1 for narrow tensors
    u32 tile_units;     // a wide tile's units; the last tile of a row may have fewer
    u32 rows_per_tile;  // 1 for wide tensors; a narrow tile's rows, at least 2
    u32 pad;
};

struct CopyArgs {
    RowCopy copies[MAX_COPIES];  // by value, `n_copies` of them; `first_tile` ascends from 0
    const u32 *rows;             // device, [n_list], aligned to 4
    u32 n_list;
    u32 n_copies;                // 1 to MAX_COPIES
};

static_assert(sizeof(CopyArgs) == 1808, "the layout of raw::CopyArgs");

enum Map { GATHER, SCATTER, WRITE };

// Index of the first entry of the ascending list that is not below `row`; `n` without one. Whatever
// the list holds, the result is at most `n`.
static __device__ __forceinline__ u32 lower_bound(const u32 *__restrict__ rows, u32 n, u32 row) {
    u32 low = 0, high = n;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (__ldg(rows + middle) < row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// Where walked row `row` is read from (NONE: zero) and written to (NONE: nowhere). No value of the
// list gives a row that its tensor lacks.
template <Map MAP>
static __device__ __forceinline__ void resolve(const CopyArgs &args, const RowCopy &copy, u32 row,
                                               u32 &from, u32 &to) {
    if (MAP == GATHER) {
        from = __ldg(args.rows + row);
        from = from < copy.src_rows ? from : NONE;
        to = row;
    } else if (MAP == SCATTER) {
        const u32 place = lower_bound(args.rows, args.n_list, row);
        from = place < args.n_list && __ldg(args.rows + place) == row ? place : NONE;
        to = row;
    } else {
        from = row;
        to = __ldg(args.rows + row);
        to = to < copy.dst_rows ? to : NONE;
    }
}

#define UNROLL 4

// Units of one row, from `begin` to `end`. All loads of a round are issued before its stores.
template <typename Unit>
static __device__ __forceinline__ void copy_units(const Unit *__restrict__ src, Unit *__restrict__ dst,
                                                  u32 begin, u32 end) {
    const u32 step = blockDim.x;
    u32 unit = begin + threadIdx.x;
    for (; unit + (UNROLL - 1) * step < end; unit += UNROLL * step) {
        Unit held[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            held[k] = __ldcs(src + unit + k * step);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            dst[unit + k * step] = held[k];
        }
    }
    Unit held[UNROLL - 1];
#pragma unroll
    for (int k = 0; k < UNROLL - 1; ++k) {
        if (unit + k * step < end) {
            held[k] = __ldcs(src + unit + k * step);
        }
    }
#pragma unroll
    for (int k = 0; k < UNROLL - 1; ++k) {
        if (unit + k * step < end) {
            dst[unit + k * step] = held[k];
        }
    }
}

template <typename Unit>
static __device__ __forceinline__ void zero_units(Unit *__restrict__ dst, u32 begin, u32 end) {
    const Unit zero = {};
    for (u32 unit = begin + threadIdx.x; unit < end; unit += blockDim.x) {
        __stcs(dst + unit, zero);
    }
}

template <Map MAP, typename Unit>
static __device__ __forceinline__ void copy_tile(const CopyArgs &args, const RowCopy &copy, u32 tile) {
    const Unit *src = static_cast<const Unit *>(copy.src);
    Unit *dst = static_cast<Unit *>(copy.dst);
    const size_t width = copy.row_units;
    u32 from, to;
    if (copy.rows_per_tile == 1) {
        const u32 row = tile / copy.tiles_per_row;
        const u32 begin = (tile - row * copy.tiles_per_row) * copy.tile_units;
        const u32 end = min(begin + copy.tile_units, copy.row_units);
        resolve<MAP>(args, copy, row, from, to);
        if (to == NONE) {
            return;
        }
        if (from == NONE) {
            zero_units(dst + to * width, begin, end);
        } else {
            copy_units(src + from * width, dst + to * width, begin, end);
        }
    } else {
        const u32 first = tile * copy.rows_per_tile;
        const u32 units = min(copy.rows_per_tile, copy.n_rows - first) * copy.row_units;
        for (u32 unit = threadIdx.x; unit < units; unit += blockDim.x) {
            const u32 row = unit / copy.row_units;
            const u32 column = unit - row * copy.row_units;
            resolve<MAP>(args, copy, first + row, from, to);
            if (to != NONE) {
                const Unit zero = {};
                dst[to * width + column] = from == NONE ? zero : __ldcs(src + from * width + column);
            }
        }
    }
}

template <Map MAP>
static __device__ __forceinline__ void copy_rows(const CopyArgs &args) {
    u32 index = 0;
    while (index + 1 < args.n_copies && args.copies[index + 1].first_tile <= blockIdx.x) {
        ++index;
    }
    const RowCopy &copy = args.copies[index];
    const u32 tile = blockIdx.x - copy.first_tile;
    switch (copy.unit_log2) {
        case 4:
            return copy_tile<MAP, uint4>(args, copy, tile);
        case 3:
            return copy_tile<MAP, uint2>(args, copy, tile);
        case 2:
            return copy_tile<MAP, u32>(args, copy, tile);
        case 1:
            return copy_tile<MAP, unsigned short>(args, copy, tile);
        default:
            return copy_tile<MAP, unsigned char>(args, copy, tile);
    }
}

// dst[i] = src[rows[i]]; zero where `src` lacks that row.
extern "C" __global__ void gather_rows(const __grid_constant__ CopyArgs args) {
    copy_rows<GATHER>(args);
}

// dst[rows[i]] = src[i], and zero in every other row. The list ascends strictly up to its padding;
// if it does not, which rows are zero is unspecified, and still each is written once.
extern "C" __global__ void scatter_rows(const __grid_constant__ CopyArgs args) {
    copy_rows<SCATTER>(args);
}

// dst[rows[i]] = src[i], nowhere where `dst` lacks that row; other rows are left alone. Of a row that
// is listed twice the bytes of either may remain.
extern "C" __global__ void write_rows(const __grid_constant__ CopyArgs args) {
    copy_rows<WRITE>(args);
}
