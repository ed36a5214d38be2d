// Rotary embedding, and rounding to the formats of the released cache.
#include "wide.cuh"

struct RopeTableArgs {
    uint64_t positions;   // u32 [rows], tokens
    uint64_t frequencies; // f32 [pairs], radians per position
    uint64_t table;       // f32 [rows, pairs, 2], written: cosine and sine
    uint32_t rows;
    uint32_t pairs;
};

// One thread per angle. The product is an f32 one: the released runtime rotates by the rounded angle.
extern "C" __global__ void __launch_bounds__(256) rope_table(const RopeTableArgs args) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)args.rows * args.pairs) return;
    const float position = (float)at<const uint32_t>(args.positions)[i / args.pairs];
    const float angle = __fmul_rn(position, at<const float>(args.frequencies)[i % args.pairs]);
    float sine, cosine;
    sincosf(angle, &sine, &cosine);
    float *out = at<float>(args.table) + 2 * i;
    out[0] = cosine;
    out[1] = sine;
}

// Formats of a rounding; 0 is none.
#define MX_FP8 1
#define MX_FP4 2
#define NV_FP4 3

// The least power of two that is not below x, for positive normal x.
__device__ __forceinline__ float pow2_ceil(float x) {
    const uint32_t bits = __float_as_uint(x);
    return __uint_as_float(((bits >> 23) + ((bits & 0x007fffffu) != 0)) << 23);
}

// Rounds |x| <= 448 to E4M3, ties to even, keeping the sign of zero.
__device__ __forceinline__ float round_e4m3(float x) {
    const float step = 1.5f * 8388608.0f / 512.0f; // rounds to whole steps of 2^-9
    const float magnitude = fabsf(x);
    const float subnormal = __fsub_rn(__fadd_rn(magnitude, step), step);
    const uint32_t bits = __float_as_uint(magnitude);
    const float normal = __uint_as_float((bits + 0x0007ffffu + ((bits >> 20) & 1u)) & ~0x000fffffu);
    return copysignf(magnitude < 1.0f / 64.0f ? subnormal : normal, x);
}

// Rounds |x| <= 6 to E2M1, ties to the even code.
__device__ __forceinline__ float round_e2m1(float x) {
    const float step = 1.5f * 8388608.0f;
    const float magnitude = fabsf(x);
    const float magic = magnitude < 2.0f ? 0.5f * step : magnitude < 4.0f ? step : 2.0f * step;
    return copysignf(__fsub_rn(__fadd_rn(magnitude, magic), magic), x);
}

__device__ __forceinline__ float clamped(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }

// One value of a group whose largest magnitude is `most`. Divisions and products are single
// roundings: a fused or approximate one would move a value to another bin.
__device__ __forceinline__ float round_value(float x, float most, uint32_t format) {
    if (format == MX_FP8) {
        const float scale = pow2_ceil(__fmul_rn(fmaxf(most, 1e-4f), 1.0f / 448.0f));
        return __fmul_rn(round_e4m3(clamped(__fdiv_rn(x, scale), 448.0f)), scale);
    }
    if (format == MX_FP4) {
        const float least = 6.0f * 1.17549435082228750797e-38f;
        const float scale = pow2_ceil(__fmul_rn(fmaxf(most, least), 1.0f / 6.0f));
        return __fmul_rn(round_e2m1(clamped(__fdiv_rn(x, scale), 6.0f)), scale);
    }
    const float scale = round_e4m3(fminf(__fdiv_rn(fmaxf(most, 6.0f / 512.0f), 6.0f), 448.0f));
    return __fmul_rn(round_e2m1(clamped(__fdiv_rn(x, scale), 6.0f)), scale);
}

// Two channels rotated by an angle. As the CPU multiplies: no fused product.
__device__ __forceinline__ void turn(float &a, float &b, float cosine, float sine) {
    const float left = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
    const float right = __fadd_rn(__fmul_rn(a, sine), __fmul_rn(b, cosine));
    a = left;
    b = right;
}

struct RotateArgs {
    uint64_t x;     // T [rows, heads, dim]
    uint64_t table; // f32 [rows, pairs, 2]
    uint64_t out;   // T [rows, heads, dim]
    uint32_t rows;
    uint32_t heads;
    uint32_t dim;    // even; a multiple of 32 with MX formats, of 16 with NV_FP4
    uint32_t pairs;  // the last 2 pairs channels of a head rotate
    uint32_t format; // of the rounding after it
    uint32_t pad;
};

// One warp per 64 channels of a head, each lane with 2 neighbouring ones: 16 lanes are a group of 32
// channels, 8 lanes one of 16.
template <typename T> __device__ void rotate(const RotateArgs &args) {
    const uint32_t lane = threadIdx.x % 32, parts = (args.dim + 63) / 64;
    const size_t part = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, head = part / parts;
    if (head >= (size_t)args.rows * args.heads) return;
    const uint32_t c = part % parts * 64 + 2 * lane;
    const bool inside = c < args.dim;
    const T *x = at<const T>(args.x) + head * args.dim + c;
    float a = inside ? load(x) : 0.0f, b = inside ? load(x + 1) : 0.0f;
    const uint32_t first = args.dim - 2 * args.pairs;
    if (inside && c >= first) {
        const float *angle =
            at<const float>(args.table) + head / args.heads * args.pairs * 2 + (c - first);
        turn(a, b, angle[0], angle[1]);
        a = rounded<T>(a);
        b = rounded<T>(b);
    }
    if (args.format != 0) {
        float most = fmaxf(fabsf(a), fabsf(b));
        for (uint32_t step = args.format == NV_FP4 ? 4 : 8; step > 0; step /= 2)
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
        a = round_value(a, most, args.format);
        b = round_value(b, most, args.format);
    }
    if (!inside) return;
    T *out = at<T>(args.out) + head * args.dim + c;
    store(out, a);
    store(out + 1, b);
}
FOR_ACTIVATIONS(rotate, RotateArgs, 256)

struct RotateTailsArgs {
    uint64_t x;     // T [rows, heads, dim], rotated in place
    uint64_t table; // f32 [rows, pairs, 2]
    uint32_t rows;
    uint32_t heads;
    uint32_t dim;
    uint32_t pairs; // the last 2 pairs channels of a head rotate; the others are not touched
    float sign;     // -1 rotates back
    uint32_t pad;
};

// One thread per 16 bytes of the channels that rotate.
template <typename T, bool ALIGNED> __device__ void rotate_tail(const RotateTailsArgs &args) {
    constexpr uint32_t COUNT = Wide<T>::COUNT;
    const uint32_t width = 2 * args.pairs, parts = (width + COUNT - 1) / COUNT;
    const size_t part = (size_t)blockIdx.x * blockDim.x + threadIdx.x, head = part / parts;
    if (head >= (size_t)args.rows * args.heads) return;
    const uint32_t c = part % parts * COUNT;
    T *tail = at<T>(args.x) + (head + 1) * args.dim - width;
    const float *table = at<const float>(args.table) + head / args.heads * width;
    float angles[COUNT];
    load_beside<T, ALIGNED>(angles, table, c, width);
    Wide<T> x = load_within<T, ALIGNED>(tail, c, width);
#pragma unroll
    for (uint32_t v = 0; v < COUNT; v += 2) {
        float a = x.get(v), b = x.get(v + 1);
        turn(a, b, angles[v], args.sign * angles[v + 1]);
        x.set(v, a);
        x.set(v + 1, b);
    }
    store_within<T, ALIGNED>(tail, c, width, x);
}

template <typename T> __device__ void rotate_tails(const RotateTailsArgs &args) {
    const bool whole_heads = args.dim % Wide<T>::COUNT == 0;
    if (whole_heads && rows_aligned<T>(args.x | args.table, 2 * args.pairs))
        rotate_tail<T, true>(args);
    else
        rotate_tail<T, false>(args);
}
FOR_ACTIVATIONS(rotate_tails, RotateTailsArgs, 256)
