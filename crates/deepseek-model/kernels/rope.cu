// Rotary embedding, and rounding to the formats of the released cache.
#include "common.cuh"

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

struct RotateArgs {
    uint64_t x;     // T [rows, heads, dim]
    uint64_t table; // f32 [rows, pairs, 2]
    uint64_t out;   // T [rows, heads, dim]; may be x
    uint32_t rows;
    uint32_t heads;
    uint32_t dim;    // even; a multiple of 32 with MX formats, of 16 with NV_FP4
    uint32_t pairs;  // the last 2 pairs channels of a head rotate
    uint32_t format; // of the rounding after it
    float sign;      // -1 rotates back
};

// One warp per head. Each lane takes 2 neighbouring channels at a time, so a warp covers 64 channels:
// 16 lanes are a group of 32 channels, 8 lanes one of 16.
template <typename T> __device__ void rotate(const RotateArgs &args) {
    const uint32_t lane = threadIdx.x % 32;
    const size_t head = ((size_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (head >= (size_t)args.rows * args.heads) return;
    const T *x = at<const T>(args.x) + head * args.dim;
    T *out = at<T>(args.out) + head * args.dim;
    const float *table = at<const float>(args.table) + head / args.heads * args.pairs * 2;
    const uint32_t first = args.dim - 2 * args.pairs;
    const uint32_t group_lanes = args.format == NV_FP4 ? 8 : 16;
    for (uint32_t start = 0; start < args.dim; start += 64) {
        const uint32_t c = start + 2 * lane;
        const bool inside = c < args.dim;
        float a = inside ? load(x + c) : 0.0f, b = inside ? load(x + c + 1) : 0.0f;
        if (inside && c >= first) {
            const float cosine = table[c - first], sine = args.sign * table[c - first + 1];
            // As the CPU multiplies: no fused product.
            const float left = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
            const float right = __fadd_rn(__fmul_rn(a, sine), __fmul_rn(b, cosine));
            a = rounded<T>(left);
            b = rounded<T>(right);
        }
        if (args.format != 0) {
            float most = fmaxf(fabsf(a), fabsf(b));
            for (uint32_t step = group_lanes / 2; step > 0; step /= 2)
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
            a = round_value(a, most, args.format);
            b = round_value(b, most, args.format);
        }
        if (inside) {
            store(out + c, a);
            store(out + c + 1, b);
        }
    }
}
FOR_ACTIVATIONS(rotate, RotateArgs, 256)
