// Which tokens make up which training sample. Plain pointers and sizes; see index_builder.cpp.
#pragma once

#include <cstdint>

namespace megatron {

// Where each sample starts and the last one ends.
//
// lengths[num_sequences]      tokens of each sequence of the file
// documents[num_documents]    the order in which sequences are read, epochs after each other
// boundaries[2*(num_samples+1)]  out: rows (position in documents, token offset in that sequence)
//
// Sample k starts at token k*sequence_length of the stream; neighbours share `extra_tokens` tokens (0 or 1). The last
// boundary is cut at total_tokens - extra_tokens, so the last sample may be short.
// Throws std::out_of_range for a document that does not exist, std::invalid_argument where the tokens do not suffice.
template <typename Document, typename Boundary>
void build_sample_index(const std::int32_t* lengths, std::int64_t num_sequences, const Document* documents,
                        std::int64_t num_documents, std::int64_t sequence_length, std::int64_t extra_tokens,
                        std::int64_t total_tokens, std::int64_t num_samples, std::int64_t threads,
                        Boundary* boundaries);

}  // namespace megatron
