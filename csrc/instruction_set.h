// Which of the processor's instructions an operator uses, chosen when it is called.
//
// An operator is written once, as loops in MEGATRON_INLINE templates. One small function for each instruction set, with
// that set in its target attribute, takes the loops in and so has its own vectors: no file needs compiler flags of its
// own, and no code for a new processor can end up in a function that an old one runs.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace megatron {

enum class InstructionSet { kGeneric, kAvx2, kAvx512 };

#if defined(__x86_64__)
#define MEGATRON_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define MEGATRON_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define MEGATRON_TARGET_AVX2
#define MEGATRON_TARGET_AVX512
#endif

// Those of this processor, the best one last.
inline std::vector<std::string> instruction_sets() {
  std::vector<std::string> names{"generic"};
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) names.emplace_back("avx2");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    names.emplace_back("avx512");
  }
#endif
  return names;
}

// One of them by its name, or "best".
// Throws std::invalid_argument for one that this processor does not have.
inline InstructionSet instruction_set(const std::string& name) {
  const std::vector<std::string> names = instruction_sets();
  for (const std::string& present : names) {
    if (name != present && !(name == "best" && present == names.back())) continue;
    if (present == "avx2") return InstructionSet::kAvx2;
    if (present == "avx512") return InstructionSet::kAvx512;
    return InstructionSet::kGeneric;
  }
  throw std::invalid_argument("this processor has no instruction set '" + name + "'");
}

}  // namespace megatron
