#pragma once
// Storage types as 16-byte vectors, and rounding to them.
//
// A kernel that equals an eager chain rounds wherever eager writes a tensor. `T::round` is that: every
// value goes through the storage format (round to nearest even, subnormals kept, NaN canonical as the
// hardware's cvt makes it, which is what torch's own conversions use). The arithmetic between roundings
// uses __fmul_rn / __fadd_rn, which the compiler may not contract into an FMA.

struct alignas(16) Vector {
  unsigned int word[4];
};

// Read once, never again: keep it out of L1.
__device__ __forceinline__ Vector load_streaming(const Vector* address) {
  Vector v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address));
  return v;
}

// Read by many rows: keep it in L1.
__device__ __forceinline__ Vector load_reused(const Vector* address) {
  Vector v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address));
  return v;
}

__device__ __forceinline__ void store(Vector* address, const Vector& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]),
               "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// Eight values of a half-precision type; `Pair` converts two of them, which lie in one word.
template <typename Pair>
struct Halves : Pair {
  static constexpr int kValues = 8;

  static __device__ __forceinline__ void unpack(const Vector& v, float (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) Pair::unpack_pair(v.word[i], values[2 * i], values[2 * i + 1]);
  }

  static __device__ __forceinline__ Vector pack(const float (&values)[kValues]) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.word[i] = Pair::pack_pair(values[2 * i], values[2 * i + 1]);
    return v;
  }
};

struct Bfloat16Pair {
  static constexpr int kMantissaBits = 7;

  static __device__ __forceinline__ void unpack_pair(unsigned int word, float& low, float& high) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }

  static __device__ __forceinline__ unsigned int pack_pair(float low, float high) {
    unsigned int word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

struct Float16Pair {
  static constexpr int kMantissaBits = 10;

  static __device__ __forceinline__ void unpack_pair(unsigned int word, float& low, float& high) {
    asm("{ .reg .b16 a, b;\n\t"
        "mov.b32 {a, b}, %2;\n\t"
        "cvt.f32.f16 %0, a;\n\t"
        "cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high)
        : "r"(word));
  }

  static __device__ __forceinline__ unsigned int pack_pair(float low, float high) {
    unsigned int word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

struct Float16 : Halves<Float16Pair> {};

struct Bfloat16 : Halves<Bfloat16Pair> {

  // a * b + c, rounded once; subnormals kept.
  static __device__ __forceinline__ Vector fma(const Vector& a, const Vector& b, const Vector& c) {
    Vector v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;"
          : "=r"(v.word[i])
          : "r"(a.word[i]), "r"(b.word[i]), "r"(c.word[i]));
    }
    return v;
  }

  // The same two bf16 numbers everywhere.
  static __device__ __forceinline__ Vector splat(unsigned int pair) {
    return {{pair, pair, pair, pair}};
  }
};

struct Float32 {
  static constexpr int kValues = 4;

  static __device__ __forceinline__ void unpack(const Vector& v, float (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = __uint_as_float(v.word[i]);
  }

  static __device__ __forceinline__ Vector pack(const float (&values)[kValues]) {
    Vector v;
#pragma unroll
    for (int i = 0; i < kValues; ++i) v.word[i] = __float_as_uint(values[i]);
    return v;
  }
};

// What eager does to a tensor that it writes and reads back.
template <typename T>
__device__ __forceinline__ void round_to_storage(float (&values)[T::kValues]) {
  T::unpack(T::pack(values), values);
}
