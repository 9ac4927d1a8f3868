#include "index_builder.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "parallel.h"

namespace megatron {

namespace {

constexpr std::int64_t kPart = 1 << 16;   // documents that a thread walks at a time
constexpr std::int64_t kBlock = 1 << 22;  // documents whose lengths are gathered at a time: 16 MiB

std::int64_t num_parts(std::int64_t documents) { return (documents + kPart - 1) / kPart; }

// What all samples have in common; the stream is that of all documents in their order.
struct Samples {
  std::int64_t length;
  std::int64_t extra_tokens;
  std::int64_t total_tokens;
  std::int64_t count;

  // Where sample k - 1 ends and sample k begins, k > 0. Sample k - 1 has consumed the `extra_tokens` after it, too.
  std::int64_t boundary(std::int64_t k) const { return std::min(k * length, total_tokens - extra_tokens); }

  // The first boundary whose tokens are not all before `start`.
  std::int64_t first_after(std::int64_t start) const {
    if (start >= total_tokens) return count + 1;
    return start < extra_tokens ? 1 : (start - extra_tokens) / length + 1;
  }
};

// Place the boundaries whose last token lies in some documents: those from `position` on, at `start` of the stream.
template <typename Boundary>
void place_boundaries(const Samples& samples, const std::int32_t* lengths, std::int64_t num_documents,
                      std::int64_t position, std::int64_t start, Boundary* boundaries) {
  std::int64_t k = samples.first_after(start);
  for (std::int64_t document = 0; document < num_documents && k <= samples.count; ++document, ++position) {
    const std::int64_t end = start + lengths[document];
    for (; k <= samples.count; ++k) {
      const std::int64_t boundary = samples.boundary(k);
      if (boundary + samples.extra_tokens > end) break;
      boundaries[2 * k] = static_cast<Boundary>(position);
      boundaries[2 * k + 1] = static_cast<Boundary>(boundary - start);
    }
    start = end;
  }
}

}  // namespace

template <typename Document, typename Boundary>
void build_sample_index(const std::int32_t* lengths, std::int64_t num_sequences, const Document* documents,
                        std::int64_t num_documents, std::int64_t sequence_length, std::int64_t extra_tokens,
                        std::int64_t total_tokens, std::int64_t num_samples, std::int64_t threads,
                        Boundary* boundaries) {
  const Samples samples{sequence_length, extra_tokens, total_tokens, num_samples};
  boundaries[0] = 0;
  boundaries[1] = 0;
  std::vector<std::int32_t> gathered(static_cast<std::size_t>(std::min(kBlock, num_documents)));
  std::vector<std::int64_t> starts(static_cast<std::size_t>(num_parts(kBlock) + 1));
  std::atomic<std::int64_t> unknown{-1};
  std::int64_t tokens = 0;  // of the documents before the block
  for (std::int64_t block = 0; block < num_documents && samples.first_after(tokens) <= num_samples; block += kBlock) {
    const std::int64_t count = std::min(kBlock, num_documents - block);
    const auto for_each_part_of_block = [&](const auto& body) {
      for_each_part(num_parts(count), 1, threads, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t part = begin; part < end; ++part) {
          body(static_cast<std::size_t>(part), part * kPart, std::min(kPart, count - part * kPart));
        }
      });
    };
    for_each_part_of_block([&](std::size_t part, std::int64_t first, std::int64_t size) {
      std::int64_t sum = 0;
      for (std::int64_t place = first; place < first + size; ++place) {
        const Document document = documents[block + place];
        if (document < 0 || document >= num_sequences) {
          unknown = block + place;
          return;
        }
        gathered[static_cast<std::size_t>(place)] = lengths[document];
        sum += lengths[document];
      }
      starts[part + 1] = sum;
    });
    if (unknown >= 0) {
      throw std::out_of_range("document " + std::to_string(documents[unknown]) + " of a file with " +
                              std::to_string(num_sequences) + " sequences");
    }
    starts[0] = tokens;
    std::partial_sum(starts.begin(), starts.begin() + num_parts(count) + 1, starts.begin());
    for_each_part_of_block([&](std::size_t part, std::int64_t first, std::int64_t size) {
      place_boundaries(samples, gathered.data() + first, size, block + first, starts[part], boundaries);
    });
    tokens = starts[static_cast<std::size_t>(num_parts(count))];
  }
  if (num_samples > 0 && samples.boundary(num_samples) + extra_tokens > tokens) {
    throw std::invalid_argument("the documents hold " + std::to_string(tokens) + " tokens, which end before sample " +
                                std::to_string(samples.first_after(tokens)) + " of " + std::to_string(num_samples));
  }
}

template void build_sample_index(const std::int32_t*, std::int64_t, const std::int32_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int32_t*);
template void build_sample_index(const std::int32_t*, std::int64_t, const std::int32_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t*);
template void build_sample_index(const std::int32_t*, std::int64_t, const std::int64_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int32_t*);
template void build_sample_index(const std::int32_t*, std::int64_t, const std::int64_t*, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t*);

}  // namespace megatron
