#include <math.h>
#include <stdint.h>

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x16_u __attribute__((vector_size(64), aligned(4), may_alias));

// a is bounded by b, which is not NaN
static inline float tw_atleast_f32(float a, float b) { return b > a ? b : a; }
static inline f32x16 tw_broadcast_f32x16(float a) { return (f32x16){a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a}; }
static inline f32x16 tw_atleast_f32x16(f32x16 a, f32x16 b) {
    f32x16 result;
    for (int i = 0; i < 16; ++i)
        result[i] = tw_atleast_f32(a[i], b[i]);
    return result;
}

// C = max(A B, 0), 32 x 64 x 128
// register tile 4 x 32
void micro(void *const *arguments, const int64_t *scalars) {
    const float *restrict const a = arguments[0];
    const float *restrict const b = arguments[1];
    float *restrict const c = arguments[2];
    (void)scalars;
    #pragma omp parallel for schedule(static) collapse(2)
    for (int64_t m = 0; m < 8; ++m) {
        for (int64_t n = 0; n < 4; ++n) {
            f32x16 acc[8];
            #pragma GCC unroll 4
            for (int64_t i = 0; i < 4; ++i) {
                #pragma GCC unroll 2
                for (int64_t j = 0; j < 2; ++j) {
                    acc[i * 2 + j] = tw_broadcast_f32x16(0.0f);
                }
            }
            for (int64_t k = 0; k < 64; ++k) {
                f32x16 w[2];
                #pragma GCC unroll 2
                for (int64_t j = 0; j < 2; ++j) {
                    w[j] = *(const f32x16_u *)(b + n * 2048 + k * 32 + j * 16);
                }
                #pragma GCC unroll 4
                for (int64_t i = 0; i < 4; ++i) {
                    const float x = a[m * 256 + i * 64 + k];
                    #pragma GCC unroll 2
                    for (int64_t j = 0; j < 2; ++j) {
                        acc[i * 2 + j] += x * w[j];
                    }
                }
            }
            #pragma GCC unroll 4
            for (int64_t i = 0; i < 4; ++i) {
                #pragma GCC unroll 2
                for (int64_t j = 0; j < 2; ++j) {
                    *(f32x16_u *)(c + m * 512 + i * 128 + n * 32 + j * 16) = tw_atleast_f32x16(acc[i * 2 + j], tw_broadcast_f32x16(0.0f));
                }
            }
        }
    }
}
