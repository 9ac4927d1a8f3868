// The only file that knows Python. Index builders: numpy arrays in, and those of the caller to fill. Kernels: the
// addresses of tensors, with the names of their types. The interpreter lock is released while they work.
// Sizes and ranges are checked by the Python file of each operator, which alone calls it; those of arrays that an index
// builder fills, here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "activation.h"
#include "bert_mapping.h"
#include "blend_index.h"
#include "cross_entropy.h"
#include "fused_adam.h"
#include "grad_norm.h"
#include "index_builder.h"
#include "instruction_set.h"
#include "rms_norm.h"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;  // noconvert below: a silent copy of gigabytes is an error

// Output arrays are the caller's, who may have them in a file.
template <typename Document, typename Boundary>
void sample_index(const Array<std::int32_t>& lengths, const Array<Document>& documents, std::int64_t sequence_length,
                  std::int64_t extra_tokens, std::int64_t total_tokens, std::int64_t num_samples,
                  std::int64_t threads, Array<Boundary>& boundaries) {
  if (boundaries.size() != 2 * (num_samples + 1)) throw std::invalid_argument("boundaries of another size");
  const auto* lengths_data = lengths.data();
  const auto* documents_data = documents.data();
  auto* boundaries_data = boundaries.mutable_data();
  const auto num_sequences = static_cast<std::int64_t>(lengths.size());
  const auto num_documents = static_cast<std::int64_t>(documents.size());
  py::gil_scoped_release unlocked;
  megatron::build_sample_index(lengths_data, num_sequences, documents_data, num_documents, sequence_length,
                               extra_tokens, total_tokens, num_samples, threads, boundaries_data);
}

template <typename Document, typename Boundary>
void define_sample_index(py::module_& module, const char* name) {
  module.def(name, &sample_index<Document, Boundary>, py::arg("lengths").noconvert(), py::arg("documents").noconvert(),
             py::arg("sequence_length"), py::arg("extra_tokens"), py::arg("total_tokens"), py::arg("num_samples"),
             py::arg("threads"), py::arg("boundaries").noconvert());
}

// Defines `name`(shares, dataset_index, dataset_sample_index, plan…), where `run` gets plain pointers.
template <typename Share, typename Run>
void define_blend_index(py::module_& module, const char* name, Run run) {
  module.def(
      name,
      [run](const Array<Share>& shares, Array<std::int16_t>& dataset_index, Array<std::int64_t>& dataset_sample_index,
            std::int64_t threads, std::int64_t chunk, const std::string& instruction_set) {
        if (dataset_index.size() != dataset_sample_index.size()) throw std::invalid_argument("indices of two sizes");
        const auto* shares_data = shares.data();
        auto* index_data = dataset_index.mutable_data();
        auto* sample_data = dataset_sample_index.mutable_data();
        const auto num_datasets = static_cast<std::int64_t>(shares.size());
        const auto size = static_cast<std::int64_t>(dataset_index.size());
        const megatron::BlendPlan plan{threads, chunk, instruction_set};
        py::gil_scoped_release unlocked;
        run(shares_data, num_datasets, size, plan, index_data, sample_data);
      },
      py::arg("shares").noconvert(), py::arg("dataset_index").noconvert(), py::arg("dataset_sample_index").noconvert(),
      py::kw_only(), py::arg("threads"), py::arg("chunk") = 0, py::arg("instruction_set") = "best");
}

megatron::Sentences sentences(const Array<std::int32_t>& lengths, const Array<std::int64_t>& documents,
                              std::int64_t sequence_length, std::int64_t short_every, std::int64_t least_sentences,
                              std::int64_t requested, std::uint32_t seed) {
  return {lengths.data(),
          static_cast<std::int64_t>(lengths.size()),
          documents.data(),
          static_cast<std::int64_t>(documents.size()) - 1,
          sequence_length,
          short_every,
          least_sentences,
          requested,
          seed};
}

// Defines `name`(lengths, documents, walk…, extra…), where `run` gets the sentences.
template <typename... Extra, typename Run, typename... ExtraNames>
void define_bert_walk(py::module_& module, const char* name, Run run, const ExtraNames&... extra_names) {
  module.def(
      name,
      [run](const Array<std::int32_t>& lengths, const Array<std::int64_t>& documents, std::int64_t sequence_length,
            std::int64_t short_every, std::int64_t least_sentences, std::int64_t requested, std::uint32_t seed,
            Extra&... extra) {
        return run(sentences(lengths, documents, sequence_length, short_every, least_sentences, requested, seed),
                   extra...);
      },
      py::arg("lengths").noconvert(), py::arg("documents").noconvert(), py::arg("sequence_length"),
      py::arg("short_every"), py::arg("least_sentences"), py::arg("requested"), py::arg("seed"), extra_names...);
}

// Marks as Python has them: (document, numbers drawn, samples).
using Marks = std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>;

Marks mark_bert_samples(const megatron::Sentences& of, std::int64_t spacing) {
  std::vector<megatron::BertMark> marks;
  {
    py::gil_scoped_release unlocked;
    marks = megatron::mark_bert_samples(of, spacing);
  }
  Marks found;
  for (const auto& mark : marks) found.emplace_back(mark.document, mark.drawn, mark.samples);
  return found;
}

template <typename Row>
void define_bert_mapping(py::module_& module, const char* name) {
  define_bert_walk<const Marks, std::int64_t, Array<Row>>(
      module, name,
      [](const megatron::Sentences& of, const Marks& given, std::int64_t threads, Array<Row>& rows) {
        std::vector<megatron::BertMark> marks;
        for (const auto& [document, drawn, samples] : given) marks.push_back({document, drawn, samples});
        if (marks.empty() || rows.size() != 3 * marks.back().samples) throw std::invalid_argument("rows of another size");
        Row* rows_data = rows.mutable_data();
        py::gil_scoped_release unlocked;
        megatron::build_bert_mapping(of, marks, threads, rows_data);
      },
      py::arg("marks"), py::arg("threads"), py::arg("rows").noconvert());
}

// Address and type of a tensor, such as (tensor.data_ptr(), "float32"); (0, "") for none.
using Address = std::uintptr_t;
using Tensor = std::pair<Address, std::string>;

megatron::NumberType number_type(const std::string& name) {
  if (name == "float64") return megatron::NumberType::kFloat64;
  if (name == "float32") return megatron::NumberType::kFloat32;
  if (name == "bfloat16") return megatron::NumberType::kBFloat16;
  if (name == "float16") return megatron::NumberType::kFloat16;
  throw std::invalid_argument("no kernel takes numbers of type '" + name + "'");
}

megatron::FlatArray flat_array(const Tensor& tensor) {
  if (tensor.second.empty()) return {nullptr, megatron::NumberType::kFloat32};
  return {reinterpret_cast<void*>(tensor.first), number_type(tensor.second)};
}

template <typename Number>
Number* pointer(Address address) {
  return reinterpret_cast<Number*>(address);
}

// Defines `name`(tensors…, spans…, hyper-parameters…, extra…), where `run` gets the first three as structs.
template <typename... Extra, typename Run, typename... ExtraNames>
void define_adamw(py::module_& module, const char* name, Run run, const ExtraNames&... extra_names) {
  module.def(
      name,
      [run](std::int64_t size, const Tensor& parameter, const Tensor& gradient, const Tensor& exp_avg,
            const Tensor& exp_avg_sq, const Tensor& low_precision, Address remainder, std::int64_t num_spans,
            Address span_ends, Address lr_multipliers, Address weight_decay_multipliers, std::int64_t step, double lr,
            double weight_decay, double beta1, double beta2, double eps, double gradient_scale, bool decoupled,
            const Extra&... extra) {
        const megatron::AdamBuffers buffers{size,
                                            flat_array(parameter),
                                            flat_array(gradient),
                                            flat_array(exp_avg),
                                            flat_array(exp_avg_sq),
                                            flat_array(low_precision),
                                            pointer<std::int16_t>(remainder)};
        const megatron::HyperSpans spans{num_spans, pointer<const std::int64_t>(span_ends),
                                         pointer<const double>(lr_multipliers),
                                         pointer<const double>(weight_decay_multipliers)};
        const megatron::AdamHyperParameters hyper{step,  lr,  weight_decay,   beta1,
                                                  beta2, eps, gradient_scale, decoupled};
        py::gil_scoped_release unlocked;
        run(buffers, spans, hyper, extra...);
      },
      py::kw_only(), py::arg("size"), py::arg("parameter"), py::arg("gradient"), py::arg("exp_avg"),
      py::arg("exp_avg_sq"), py::arg("low_precision"), py::arg("remainder"), py::arg("num_spans"),
      py::arg("span_ends"), py::arg("lr_multipliers"), py::arg("weight_decay_multipliers"), py::arg("step"),
      py::arg("lr"), py::arg("weight_decay"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
      py::arg("gradient_scale"), py::arg("decoupled"), py::arg(extra_names)...);
}

double sum_of_squares_cpu(const Tensor& data, Address tiles, std::int64_t num_tiles, std::int64_t threads,
                          const std::string& instruction_set) {
  const megatron::FlatArray array = flat_array(data);
  py::gil_scoped_release unlocked;
  return megatron::sum_of_squares_cpu(array.data, array.type, pointer<const std::int64_t>(tiles), num_tiles, threads,
                                      instruction_set);
}

// Defines `name`(logits…, maximum, sum, target_logit, logit_sum, extra…) and the like, where `run` gets structs.
template <typename... Extra, typename Run, typename... ExtraNames>
void define_logit_statistics(py::module_& module, const char* name, Run run, const ExtraNames&... extra_names) {
  module.def(
      name,
      [run](const Tensor& logits, std::int64_t rows, std::int64_t width, std::int64_t valid, Address targets,
            Address maximum, Address sum, Address target_logit, Address logit_sum, const Extra&... extra) {
        const megatron::FlatArray array = flat_array(logits);
        const megatron::Logits input{array.data, array.type, rows, width, valid, pointer<const std::int64_t>(targets)};
        const megatron::LogitStatistics statistics{pointer<void>(maximum), pointer<void>(sum),
                                                   pointer<void>(target_logit), pointer<void>(logit_sum)};
        py::gil_scoped_release unlocked;
        run(input, statistics, extra...);
      },
      py::kw_only(), py::arg("logits"), py::arg("rows"), py::arg("width"), py::arg("valid"), py::arg("targets"),
      py::arg("maximum"), py::arg("sum"), py::arg("target_logit"), py::arg("logit_sum"), py::arg(extra_names)...);
}

template <typename... Extra, typename Run, typename... ExtraNames>
void define_logit_gradient(py::module_& module, const char* name, Run run, const ExtraNames&... extra_names) {
  module.def(
      name,
      [run](const Tensor& logits, std::int64_t rows, std::int64_t width, std::int64_t valid, Address targets,
            Address maximum, Address sum, Address scale, double on_target, double on_each, Address gradient,
            const Extra&... extra) {
        const megatron::FlatArray array = flat_array(logits);
        const megatron::Logits input{array.data, array.type, rows, width, valid, pointer<const std::int64_t>(targets)};
        const megatron::LogitGradient output{pointer<const void>(maximum), pointer<const void>(sum),
                                             pointer<const void>(scale), on_target, on_each, pointer<void>(gradient)};
        py::gil_scoped_release unlocked;
        run(input, output, extra...);
      },
      py::kw_only(), py::arg("logits"), py::arg("rows"), py::arg("width"), py::arg("valid"), py::arg("targets"),
      py::arg("maximum"), py::arg("sum"), py::arg("scale"), py::arg("on_target"), py::arg("on_each"),
      py::arg("gradient"), py::arg(extra_names)...);
}

// The same for the operators that follow: `run` gets structs, and extra arguments as they are.
template <typename... Extra, typename Run, typename... ExtraNames>
void define_rms_norm(py::module_& module, const char* name, Run run, const ExtraNames&... extra_names) {
  module.def(
      name,
      [run](const Tensor& input, std::int64_t rows, std::int64_t width, Address weight, Address inverse,
            Address output, double epsilon, const Extra&... extra) {
        const megatron::FlatArray array = flat_array(input);
        const megatron::RmsNorm norm{array.type, rows, width, array.data, pointer<const void>(weight),
                                     pointer<void>(inverse)};
        py::gil_scoped_release unlocked;
        run(norm, pointer<void>(output), epsilon, extra...);
      },
      py::kw_only(), py::arg("input"), py::arg("rows"), py::arg("width"), py::arg("weight"), py::arg("inverse"),
      py::arg("output"), py::arg("epsilon"), py::arg(extra_names)...);
}

template <typename... Extra, typename Run, typename... ExtraNames>
void define_rms_norm_gradient(py::module_& module, const char* name, Run run, const ExtraNames&... extra_names) {
  module.def(
      name,
      [run](const Tensor& input, std::int64_t rows, std::int64_t width, Address weight, Address inverse,
            Address gradient, Address input_gradient, Address weight_gradients, std::int64_t group,
            const Extra&... extra) {
        const megatron::FlatArray array = flat_array(input);
        const megatron::RmsNorm norm{array.type, rows, width, array.data, pointer<const void>(weight),
                                     pointer<void>(inverse)};
        const megatron::RmsNormGradient out{pointer<const void>(gradient), pointer<void>(input_gradient),
                                            pointer<void>(weight_gradients), group};
        py::gil_scoped_release unlocked;
        run(norm, out, extra...);
      },
      py::kw_only(), py::arg("input"), py::arg("rows"), py::arg("width"), py::arg("weight"), py::arg("inverse"),
      py::arg("gradient"), py::arg("input_gradient"), py::arg("weight_gradients"), py::arg("group"),
      py::arg(extra_names)...);
}

template <typename... Extra, typename Run, typename... ExtraNames>
void define_activation(py::module_& module, const char* name, megatron::Function function, Run run,
                       const ExtraNames&... extra_names) {
  module.def(
      name,
      [function, run](const Tensor& input, std::int64_t rows, std::int64_t width, Address output,
                      const Extra&... extra) {
        const megatron::FlatArray array = flat_array(input);
        const megatron::Activation activation{function, array.type, rows, width, array.data};
        py::gil_scoped_release unlocked;
        run(activation, pointer<void>(output), extra...);
      },
      py::kw_only(), py::arg("input"), py::arg("rows"), py::arg("width"), py::arg("output"), py::arg(extra_names)...);
}

template <typename... Extra, typename Run, typename... ExtraNames>
void define_activation_gradient(py::module_& module, const char* name, megatron::Function function, Run run,
                                const ExtraNames&... extra_names) {
  module.def(
      name,
      [function, run](const Tensor& input, std::int64_t rows, std::int64_t width, Address gradient,
                      Address input_gradient, const Extra&... extra) {
        const megatron::FlatArray array = flat_array(input);
        const megatron::Activation activation{function, array.type, rows, width, array.data};
        py::gil_scoped_release unlocked;
        run(activation, pointer<const void>(gradient), pointer<void>(input_gradient), extra...);
      },
      py::kw_only(), py::arg("input"), py::arg("rows"), py::arg("width"), py::arg("gradient"), py::arg("input_gradient"),
      py::arg(extra_names)...);
}

void define_functions(py::module_& module, const std::string& name, megatron::Function function) {
  define_activation<std::int64_t, std::string>(module, (name + "_cpu").c_str(), function, &megatron::activation_cpu,
                                               "threads", "instruction_set");
  define_activation_gradient<std::int64_t, std::string>(module, (name + "_gradient_cpu").c_str(), function,
                                                        &megatron::activation_gradient_cpu, "threads",
                                                        "instruction_set");
#ifdef MEGATRON_CUDA
  define_activation<int, Address>(
      module, (name + "_cuda").c_str(), function,
      [](const megatron::Activation& activation, void* output, int device, Address stream) {
        megatron::activation_cuda(activation, output, device, pointer<void>(stream));
      },
      "device", "stream");
  define_activation_gradient<int, Address>(
      module, (name + "_gradient_cuda").c_str(), function,
      [](const megatron::Activation& activation, const void* gradient, void* input_gradient, int device,
         Address stream) {
        megatron::activation_gradient_cuda(activation, gradient, input_gradient, device, pointer<void>(stream));
      },
      "device", "stream");
#endif
}

void define_activation_kernels(py::module_& module) {
  define_functions(module, "gelu", megatron::Function::kGelu);
  define_functions(module, "swiglu", megatron::Function::kSwiGlu);
  define_rms_norm<std::int64_t, std::string>(module, "rms_norm_cpu", &megatron::rms_norm_cpu, "threads",
                                             "instruction_set");
  define_rms_norm_gradient<std::int64_t, std::string>(
      module, "rms_norm_gradient_cpu", &megatron::rms_norm_gradient_cpu, "threads", "instruction_set");
#ifdef MEGATRON_CUDA
  define_rms_norm<int, Address>(
      module, "rms_norm_cuda",
      [](const megatron::RmsNorm& norm, void* output, double epsilon, int device, Address stream) {
        megatron::rms_norm_cuda(norm, output, epsilon, device, pointer<void>(stream));
      },
      "device", "stream");
  define_rms_norm_gradient<int, Address>(
      module, "rms_norm_gradient_cuda",
      [](const megatron::RmsNorm& norm, const megatron::RmsNormGradient& out, int device, Address stream) {
        megatron::rms_norm_gradient_cuda(norm, out, device, pointer<void>(stream));
      },
      "device", "stream");
#endif
}

void define_kernels(py::module_& module) {
  module.def("instruction_sets", &megatron::instruction_sets);
  define_adamw<std::int64_t, std::string>(module, "adamw_cpu", &megatron::adamw_cpu, "threads", "instruction_set");
  module.def("sum_of_squares_cpu", &sum_of_squares_cpu, py::kw_only(), py::arg("data"), py::arg("tiles"),
             py::arg("num_tiles"), py::arg("threads"), py::arg("instruction_set"));
  define_logit_statistics<std::int64_t, std::string>(module, "logit_statistics_cpu", &megatron::logit_statistics_cpu,
                                                     "threads", "instruction_set");
  define_logit_gradient<std::int64_t, std::string>(module, "logit_gradient_cpu", &megatron::logit_gradient_cpu,
                                                   "threads", "instruction_set");
#ifdef MEGATRON_CUDA
  module.attr("cuda") = true;
  module.attr("cuda_architectures") = MEGATRON_CUDA_ARCHITECTURES;
  define_logit_statistics<int, Address>(
      module, "logit_statistics_cuda",
      [](const megatron::Logits& logits, const megatron::LogitStatistics& statistics, int device, Address stream) {
        megatron::logit_statistics_cuda(logits, statistics, device, pointer<void>(stream));
      },
      "device", "stream");
  define_logit_gradient<int, Address>(
      module, "logit_gradient_cuda",
      [](const megatron::Logits& logits, const megatron::LogitGradient& gradient, int device, Address stream) {
        megatron::logit_gradient_cuda(logits, gradient, device, pointer<void>(stream));
      },
      "device", "stream");
  define_adamw<int, Address>(
      module, "adamw_cuda",
      [](const megatron::AdamBuffers& buffers, const megatron::HyperSpans& spans,
         const megatron::AdamHyperParameters& hyper, int device, Address stream) {
        megatron::adamw_cuda(buffers, spans, hyper, device, pointer<void>(stream));
      },
      "device", "stream");
  module.def("sum_of_squares_scratch", &megatron::sum_of_squares_scratch, py::arg("num_tiles"));
  module.def(
      "sum_of_squares_cuda",
      [](const Tensor& data, Address tiles, std::int64_t num_tiles, Address scratch, int device,
         Address stream) {
        const megatron::FlatArray array = flat_array(data);
        py::gil_scoped_release unlocked;
        megatron::sum_of_squares_cuda(array.data, array.type, pointer<const std::int64_t>(tiles), num_tiles,
                                      pointer<double>(scratch), device, pointer<void>(stream));
      },
      py::kw_only(), py::arg("data"), py::arg("tiles"), py::arg("num_tiles"), py::arg("scratch"), py::arg("device"),
      py::arg("stream"));
#else
  module.attr("cuda") = false;
#endif
#ifdef MEGATRON_OPENMP
  module.attr("openmp") = true;
#else
  module.attr("openmp") = false;
#endif
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Compiled operators of megatron; each has a reference in Python beside its caller.";
  define_kernels(module);
  define_activation_kernels(module);
  define_sample_index<std::int32_t, std::int32_t>(module, "build_sample_index_int32");
  define_sample_index<std::int64_t, std::int32_t>(module, "build_sample_index_int32");
  define_sample_index<std::int32_t, std::int64_t>(module, "build_sample_index_int64");
  define_sample_index<std::int64_t, std::int64_t>(module, "build_sample_index_int64");
  define_blend_index<double>(module, "build_blend_index", megatron::build_blend_index);
  define_blend_index<std::int64_t>(module, "build_exhaustive_blend_index",
                                   [](const std::int64_t* sizes, std::int64_t num_datasets, std::int64_t size,
                                      const megatron::BlendPlan& plan, std::int16_t* dataset_index,
                                      std::int64_t* dataset_sample_index) {
                                     if (std::accumulate(sizes, sizes + num_datasets, std::int64_t{0}) != size) {
                                       throw std::invalid_argument("indices of another size");
                                     }
                                     megatron::build_exhaustive_blend_index(sizes, num_datasets, plan, dataset_index,
                                                                            dataset_sample_index);
                                   });
  define_bert_walk<std::int64_t>(module, "mark_bert_samples", mark_bert_samples, py::arg("spacing"));
  define_bert_mapping<std::uint32_t>(module, "build_bert_mapping_uint32");
  define_bert_mapping<std::uint64_t>(module, "build_bert_mapping_uint64");
}
