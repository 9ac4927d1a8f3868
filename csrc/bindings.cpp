// The only file that knows Python: numpy arrays in, numpy arrays out, the interpreter lock released while building.
// Sizes and ranges are checked by megatron/data/index_builder.py, which alone calls these functions.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <numeric>

#include "index_builder.h"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;  // noconvert below: a silent copy of gigabytes is an error

template <typename Document, typename Boundary>
Array<Boundary> sample_index(const Array<std::int32_t>& lengths, const Array<Document>& documents,
                             std::int64_t sequence_length, std::int64_t extra_tokens, std::int64_t total_tokens,
                             std::int64_t num_samples) {
  Array<Boundary> boundaries({static_cast<py::ssize_t>(num_samples + 1), static_cast<py::ssize_t>(2)});
  const auto* lengths_data = lengths.data();
  const auto* documents_data = documents.data();
  auto* boundaries_data = boundaries.mutable_data();
  const auto num_sequences = static_cast<std::int64_t>(lengths.size());
  const auto num_documents = static_cast<std::int64_t>(documents.size());
  {
    py::gil_scoped_release unlocked;
    megatron::build_sample_index(lengths_data, num_sequences, documents_data, num_documents, sequence_length,
                                 extra_tokens, total_tokens, num_samples, boundaries_data);
  }
  return boundaries;
}

template <typename Document>
void define_sample_index(py::module_& module) {
  module.def("build_sample_index_int32", &sample_index<Document, std::int32_t>, py::arg("lengths").noconvert(),
             py::arg("documents").noconvert(), py::arg("sequence_length"), py::arg("extra_tokens"),
             py::arg("total_tokens"), py::arg("num_samples"));
  module.def("build_sample_index_int64", &sample_index<Document, std::int64_t>, py::arg("lengths").noconvert(),
             py::arg("documents").noconvert(), py::arg("sequence_length"), py::arg("extra_tokens"),
             py::arg("total_tokens"), py::arg("num_samples"));
}

py::tuple blend_index(const Array<double>& weights, std::int64_t size) {
  Array<std::int16_t> dataset_index(static_cast<py::ssize_t>(size));
  Array<std::int64_t> dataset_sample_index(static_cast<py::ssize_t>(size));
  const auto* weights_data = weights.data();
  auto* index_data = dataset_index.mutable_data();
  auto* sample_data = dataset_sample_index.mutable_data();
  const auto num_datasets = static_cast<std::int64_t>(weights.size());
  {
    py::gil_scoped_release unlocked;
    megatron::build_blend_index(weights_data, num_datasets, size, index_data, sample_data);
  }
  return py::make_tuple(dataset_index, dataset_sample_index);
}

py::tuple exhaustive_blend_index(const Array<std::int64_t>& sizes) {
  const auto* sizes_data = sizes.data();
  const auto num_datasets = static_cast<std::int64_t>(sizes.size());
  const std::int64_t size = std::accumulate(sizes_data, sizes_data + num_datasets, std::int64_t{0});
  Array<std::int16_t> dataset_index(static_cast<py::ssize_t>(size));
  Array<std::int64_t> dataset_sample_index(static_cast<py::ssize_t>(size));
  auto* index_data = dataset_index.mutable_data();
  auto* sample_data = dataset_sample_index.mutable_data();
  {
    py::gil_scoped_release unlocked;
    megatron::build_exhaustive_blend_index(sizes_data, num_datasets, index_data, sample_data);
  }
  return py::make_tuple(dataset_index, dataset_sample_index);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Compiled operators of megatron; each has a reference in Python beside its caller.";
  define_sample_index<std::int32_t>(module);
  define_sample_index<std::int64_t>(module);
  module.def("build_blend_index", &blend_index, py::arg("weights").noconvert(), py::arg("size"));
  module.def("build_exhaustive_blend_index", &exhaustive_blend_index, py::arg("sizes").noconvert());
}
