// out = round(round(x * round(1 + scale)) + shift), 16 bytes a thread and step.
//
// x is `gridDim.y` samples of `vectors` 16-byte vectors each (fewer than 2^32); scale and shift hold one
// row of `vectors_per_row` vectors per sample, rows adjoining. Thread i works on the vectors i,
// i + stride, ...: `stride` is a multiple of `vectors_per_row`, so that all of them lie in one column
// and take one scale and shift. All its loads are issued before the first use.
#include "rounding.cuh"

template <typename T>
struct Modulation {
  float factors[T::kValues], shifts[T::kValues];

  __device__ __forceinline__ Modulation(const Vector& scale, const Vector& shift) {
    T::unpack(scale, factors);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) factors[k] = __fadd_rn(factors[k], 1.0f);
    round_to_storage<T>(factors);
    T::unpack(shift, shifts);
  }

  __device__ __forceinline__ Vector operator()(const Vector& x) const {
    float values[T::kValues];
    T::unpack(x, values);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) values[k] = __fmul_rn(values[k], factors[k]);
    round_to_storage<T>(values);
#pragma unroll
    for (int k = 0; k < T::kValues; ++k) values[k] = __fadd_rn(values[k], shifts[k]);
    return T::pack(values);
  }
};

// bf16 arithmetic gives eager's bits. A sum of two bf16 numbers rounded to fp32 and then to bf16 is
// rounded once (24 bits >= 2 * 8 + 2). A product has 16 bits, which fp32 holds exactly but below half
// of bf16's least number, where both round to zero. The addend -0 and the factor 1 make the FMA a
// product and a sum that keep the signs of zeros.
template <>
struct Modulation<Bfloat16> {
  Vector factors, shifts;

  __device__ __forceinline__ Modulation(const Vector& scale, const Vector& shift)
      : factors(Bfloat16::fma(scale, ones(), ones())), shifts(shift) {}

  __device__ __forceinline__ Vector operator()(const Vector& x) const {
    const Vector scaled = Bfloat16::fma(x, factors, Bfloat16::splat(0x80008000u));
    return Bfloat16::fma(scaled, ones(), shifts);
  }

  static __device__ __forceinline__ Vector ones() { return Bfloat16::splat(0x3f803f80u); }
};

template <typename T>
__device__ __forceinline__ void modulate_scale_shift(const Vector* x, const Vector* scale,
                                                     const Vector* shift, Vector* out,
                                                     unsigned int vectors, unsigned int stride,
                                                     unsigned int vectors_per_row) {
  const unsigned int first = blockIdx.x * blockDim.x + threadIdx.x;
  if (first >= stride) return;
  const unsigned long long sample = blockIdx.y;
  x += sample * vectors;
  out += sample * vectors;
  const unsigned long long column = sample * vectors_per_row + first % vectors_per_row;
  Vector a[VECTORS_PER_THREAD];
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    const unsigned long long i = first + step * static_cast<unsigned long long>(stride);
    if (i < vectors) a[step] = load_streaming(x + i);
  }
  const Modulation<T> modulate(load_reused(scale + column), load_reused(shift + column));
#pragma unroll
  for (int step = 0; step < VECTORS_PER_THREAD; ++step) {
    const unsigned long long i = first + step * static_cast<unsigned long long>(stride);
    if (i >= vectors) return;
    store(out + i, modulate(a[step]));
  }
}

#define MODULATE_SCALE_SHIFT_KERNEL(name, T)                                                      \
  extern "C" __global__ void __launch_bounds__(BLOCK)                                             \
      name(const Vector* x, const Vector* scale, const Vector* shift, Vector* out,                \
           unsigned int vectors, unsigned int stride, unsigned int vectors_per_row) {             \
    modulate_scale_shift<T>(x, scale, shift, out, vectors, stride, vectors_per_row);              \
  }

MODULATE_SCALE_SHIFT_KERNEL(modulate_scale_shift_bfloat16, Bfloat16)
MODULATE_SCALE_SHIFT_KERNEL(modulate_scale_shift_float16, Float16)
