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

// A float32 in two halves of 16 bits: the nearest bfloat16, the larger in size of two, and by how many units of the
// float32's last bit it was rounded. No bit is lost. (Ties to even would lose one: of two numbers with the same rounded
// half and the same lower half, one was rounded up and the other down.) Not a number stays that, without its payload.
MEGATRON_INLINE BFloat16 upper_half(float value) {
  const std::uint32_t bits = bits_of(value);
  const bool is_number = (bits & 0x7fffffffu) <= 0x7f800000u;
  return {static_cast<std::uint16_t>(is_number ? (bits + 0x8000u) >> 16 : 0x7fc0u)};
}

MEGATRON_INLINE std::int16_t lower_half(float value) {
  const std::uint32_t bits = bits_of(value);
  const bool is_number = (bits & 0x7fffffffu) <= 0x7f800000u;
  return static_cast<std::int16_t>(static_cast<std::uint16_t>(is_number ? bits : 0u));
}

MEGATRON_INLINE float joined(BFloat16 upper, std::int16_t lower) {
  const auto extended = static_cast<std::uint32_t>(static_cast<std::int32_t>(lower));
  return float_of((static_cast<std::uint32_t>(upper.bits) << 16) + extended);
}

}  // namespace megatron
