// The numbers that buffers hold, for CPUs and GPUs: their kinds, and the conversions of the 16-bit ones as bits, so that
// no compiler has to know such types.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define MEGATRON_INLINE __host__ __device__ __forceinline__
#else
// Inlined into its caller it is compiled for the caller's instruction set, see instruction_set.h.
#define MEGATRON_INLINE inline __attribute__((always_inline))
#endif

namespace megatron {

enum class NumberType { kFloat64, kFloat32, kBFloat16, kFloat16 };

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

MEGATRON_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

MEGATRON_INLINE float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename Real>
MEGATRON_INLINE Real widened(Real value) {
  return value;
}

template <typename Real>
MEGATRON_INLINE Real widened(BFloat16 value) {
  return static_cast<Real>(float_of(static_cast<std::uint32_t>(value.bits) << 16));
}

// Each conversion rounds to the nearest number, to the even one of two. Selections and no branches, so that loops become
// vectors.
template <typename Number>
MEGATRON_INLINE Number narrowed(float value);

template <>
MEGATRON_INLINE float narrowed(float value) {
  return value;
}

template <>
MEGATRON_INLINE BFloat16 narrowed(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
}

template <>
MEGATRON_INLINE Float16 narrowed(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t size = bits & 0x7fffffffu;
  const std::uint32_t normal = (size + 0xc8000fffu + ((size >> 13) & 1u)) >> 13;
  // Added to a half, a number below 2**-14 is rounded by the addition to a multiple of the least float16.
  const std::uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
  const std::uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;  // not a number; infinite from 65,536
  const std::uint32_t finite = size < 0x38800000u ? subnormal : normal;
  const std::uint32_t rounded = size >= 0x47800000u ? large : finite;
  return {static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | rounded)};
}

}  // namespace megatron
