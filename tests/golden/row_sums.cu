static __device__ __forceinline__ int tw_shift_right_i32(int a, int b) { return (int)(a >> (b >= 0 && b < 32 ? b : 31)); }

// sums of 128 rows of 256
extern "C" __global__ void __launch_bounds__(64)
row_sums(const float *__restrict__ x, float *__restrict__ out) {
    const int block_x = blockIdx.x;
    const int thread_x = threadIdx.x;
    __shared__ __align__(16) float sums[64];
    float piece[4];
    const float4 v = *reinterpret_cast<const float4 *>(x + block_x * 256 + thread_x * 4);
    piece[0] = v.x;
    piece[1] = v.y;
    piece[2] = v.z;
    piece[3] = v.w;
    // four elements a thread, then halves
    sums[thread_x] = piece[0] + piece[1] + (piece[2] + piece[3]);
    for (int level = 0; level < 6; ++level) {
        const int half = tw_shift_right_i32(32, level);
        __syncthreads();
        if (thread_x < half) {
            sums[thread_x] += sums[thread_x + half];
        }
    }
    if (thread_x == 0) {
        out[block_x] = sums[0];
    }
}
