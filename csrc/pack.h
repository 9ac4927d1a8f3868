// Neighbours in memory that a thread of a GPU reads and writes at once.
#pragma once

#include <cstdint>

namespace megatron {

// So many as 16 bytes hold, or one alone where rows are not aligned to that.
template <typename Number, int count>
struct alignas(sizeof(Number) * count) Pack {
  Number numbers[count];
};

template <typename Number>
constexpr int kPackSize = 16 / sizeof(Number);

// Whether rows of this width in memory from each of the pointers (which may be null) are made of whole packs.
template <typename Number, typename... Pointers>
bool packs(std::int64_t width, Pointers... pointers) {
  const std::uintptr_t addresses = (reinterpret_cast<std::uintptr_t>(pointers) | ...);
  return addresses % 16 == 0 && width % kPackSize<Number> == 0;
}

}  // namespace megatron
