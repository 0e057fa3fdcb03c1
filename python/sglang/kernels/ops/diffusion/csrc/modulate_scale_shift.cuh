// out = round(round(x * round(1 + scale)) + shift), 16 bytes a thread and step.
//
// x is `gridDim.y` samples of `vectors` 16-byte vectors each (fewer than 2^32); scale and shift hold one
// row of `vectors_per_row` vectors per sample, rows adjoining. Tiling as in residual_gate_add.cuh.
#include "rounding.cuh"

template <typename T>
__device__ __forceinline__ void modulate_scale_shift(const Vector* x, const Vector* scale,
                                                     const Vector* shift, Vector* out,
                                                     unsigned int vectors,
                                                     unsigned int vectors_per_row,
                                                     unsigned int column_step) {
  const unsigned long long sample = blockIdx.y;
  x += sample * vectors;
  out += sample * vectors;
  scale += sample * vectors_per_row;
  shift += sample * vectors_per_row;

  const unsigned int first = blockIdx.x * (blockDim.x * VECTORS_PER_THREAD) + threadIdx.x;
  unsigned int column = first % vectors_per_row;
  Vector a[VECTORS_PER_THREAD], s[VECTORS_PER_THREAD], t[VECTORS_PER_THREAD];
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    const unsigned int i = first + step * blockDim.x;
    if (i < vectors) {
      a[step] = load_streaming(x + i);
      s[step] = load_reused(scale + column);
      t[step] = load_reused(shift + column);
    }
    column += column_step;
    if (column >= vectors_per_row) column -= vectors_per_row;
  }
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    const unsigned int i = first + step * blockDim.x;
    if (i >= vectors) return;
    float values[T::kValues], factors[T::kValues], shifts[T::kValues];
    T::unpack(s[step], factors);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) factors[k] = __fadd_rn(factors[k], 1.0f);
    round_to_storage<T>(factors);
    T::unpack(a[step], values);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) values[k] = __fmul_rn(values[k], factors[k]);
    round_to_storage<T>(values);
    T::unpack(t[step], shifts);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) values[k] = __fadd_rn(values[k], shifts[k]);
    store(out + i, T::pack(values));
  }
}

#define MODULATE_SCALE_SHIFT_KERNEL(name, T)                                                      \
  extern "C" __global__ void __launch_bounds__(BLOCK)                                             \
      name(const Vector* x, const Vector* scale, const Vector* shift, Vector* out,                \
           unsigned int vectors, unsigned int vectors_per_row, unsigned int column_step) {        \
    modulate_scale_shift<T>(x, scale, shift, out, vectors, vectors_per_row, column_step);         \
  }

MODULATE_SCALE_SHIFT_KERNEL(modulate_scale_shift_bfloat16, Bfloat16)
MODULATE_SCALE_SHIFT_KERNEL(modulate_scale_shift_float16, Float16)
