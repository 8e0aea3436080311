// Reads `count` times 16 bytes and keeps nothing: the ceiling of steps, which read weights and write little.
extern "C" __global__ void __launch_bounds__(256) read_all(const uint4* from, unsigned long long count, unsigned* out) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned bits = 0;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = __ldcs(from + i + k * stride);
#pragma unroll
        for (int k = 0; k < 4; k++) bits ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < count; i += stride) {
        const uint4 v = from[i];
        bits ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    // Hardly ever true; without a use the loads would be left out.
    if (bits == 0x9e3779b9u) *out = bits;
}
