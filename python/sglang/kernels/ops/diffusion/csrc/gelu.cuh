#pragma once
// aten's two GELUs, as nvcc compiles its CUDA kernels.

// The tanh-GELU of aten's CUDA kernel, in float32:
//   0.5 x (1 + tanh(beta (x + kappa x^3))),  beta = sqrt(2 / pi)
// with the one FMA that nvcc makes of aten's expression, and the full-precision tanhf.
__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float kBeta = 0.79788456080286535588;
  constexpr float kKappa = 0.044715;
  const float cube = __fmul_rn(__fmul_rn(x, x), x);
  const float sum = __fmaf_rn(kKappa, cube, x);
  return __fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, tanhf(__fmul_rn(kBeta, sum))));
}

// The erf-GELU of aten's CUDA kernel, in float32: 0.5 x (1 + erf(x / sqrt(2))). No product meets a
// sum, so there is nothing for a compiler to contract.
__device__ __forceinline__ float gelu_erf(float x) {
  constexpr float kAlpha = 0.70710678118654752440;
  return __fmul_rn(__fmul_rn(x, 0.5f), __fadd_rn(1.0f, erff(__fmul_rn(x, kAlpha))));
}
