// Threads of an operator: OpenMP, which is what torch uses. A process has one OpenMP of GNU's, torch's own, because
// torch is loaded first; so its threads are torch's, and no second set of them competes for the cores.
#pragma once

#include <algorithm>
#include <cstdint>

namespace megatron {

// Calls body(begin, end) for consecutive parts of [0, size), one a thread. Parts begin at multiples of `grain` and no
// thread is woken for less. Without OpenMP, or for one thread, all is done in the calling one: a process that was forked
// from one with threads may then call it. The body must not throw: what leaves a thread ends the program.
template <typename Body>
void for_each_part(std::int64_t size, std::int64_t grain, std::int64_t threads, const Body& body) {
  const std::int64_t grains = (size + grain - 1) / grain;
  const std::int64_t parts = std::min(std::max<std::int64_t>(threads, 1), grains);
  if (parts <= 1) {
    body(std::int64_t{0}, size);
    return;
  }
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(parts))
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t begin = grains * part / parts * grain;
    const std::int64_t end = std::min(size, grains * (part + 1) / parts * grain);
    body(begin, end);
  }
}

}  // namespace megatron
