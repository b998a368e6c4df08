// Between torch's stable ABI and the plain arguments of the kernels: checks, allocation, the stream. Included by binding.cpp files
// only. Tensor arguments arrive contiguous where a kernel wants it: the bindings copy what is not.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>

#include "common/dtype.h"
#include "common/stream.h"

#if defined(MEGAPPO_CUDA) && !defined(MEGAPPO_CUDA_ON_CPU)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#endif

namespace megappo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Dtype dtype_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Dtype::f32;
    case ScalarType::BFloat16: return Dtype::bf16;
    case ScalarType::Half: return Dtype::f16;
    default: break;
  }
  STD_TORCH_CHECK(false, name, " must be fp32, bf16 or fp16");
}

inline void check_type(const Tensor& x, ScalarType want, const char* name, const char* type_name) {
  STD_TORCH_CHECK(x.scalar_type() == want, name, " must be ", type_name);
}

inline void check_vector(const Tensor& x, int64_t size, const char* name) {
  STD_TORCH_CHECK(x.dim() == 1 && x.size(0) == size, name, " must have one value for each of ", size, ", not ", x.numel());
}

inline void check_device(const Tensor& x, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(x.is_cuda() == like.is_cuda() && x.get_device_index() == like.get_device_index(), name, " is on another device");
}

// [n] fp32, contiguous; converts other floating types.
inline Tensor as_floats(const Tensor& x) {
  return torch::stable::contiguous(x.scalar_type() == ScalarType::Float ? x : torch::stable::to(x, ScalarType::Float));
}

template <class T>
const T* data(const Tensor& x) {
  return static_cast<const T*>(x.data_ptr());
}

template <class T>
T* out(const Tensor& x) {
  return static_cast<T*>(x.data_ptr());
}

template <class T>
const T* data(const OptionalTensor& x) {
  return x.has_value() ? data<T>(*x) : nullptr;
}

#ifdef MEGAPPO_CUDA_ON_CPU  // the tests' build: CUDA kernels run on CPU tensors
struct CudaContext {
  explicit CudaContext(const Tensor&) {}
  Stream stream = nullptr;
};
inline bool is_for_cuda(const Tensor&) { return true; }
#elif defined(MEGAPPO_CUDA)
#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch 2.11 has it by the older name alone
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif
// Kernels launch on the device of their tensors, whichever is current, and on its current stream.
struct CudaContext {
  explicit CudaContext(const Tensor& x) : guard(x.get_device_index()) {
    void* current = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &current));
    stream = static_cast<Stream>(current);
  }
  torch::stable::accelerator::DeviceGuard guard;
  Stream stream;
};
inline bool is_for_cuda(const Tensor& x) { return x.is_cuda(); }
#endif

// Runs one or the other kernel: on_cpu(), or on_cuda(stream) where the build has CUDA and `x` lives there.
#ifdef MEGAPPO_CUDA
template <class OnCpu, class OnCuda>
void on_device_of(const Tensor& x, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  if (!is_for_cuda(x)) return on_cpu();
  CudaContext context(x);
  on_cuda(context.stream);
}
#define MEGAPPO_ON_CUDA(...) [&](megappo::Stream stream) { __VA_ARGS__; }
#else
template <class OnCpu>
void on_device_of(const Tensor&, OnCpu&& on_cpu, int) {
  on_cpu();
}
#define MEGAPPO_ON_CUDA(...) 0
#endif

}  // namespace megappo

// Where the native ops are registered; the tests' build of the CUDA kernels for the CPU takes another name.
#ifndef MEGAPPO_NAMESPACE
#define MEGAPPO_NAMESPACE megappo_native
#endif

// Registers the function `name` under its schema for every device that this build has kernels for. Used at file scope.
#define MEGAPPO_OP(name, schema)                                                             \
  STABLE_TORCH_LIBRARY_FRAGMENT(MEGAPPO_NAMESPACE, m) { m.def(#name schema); }                \
  STABLE_TORCH_LIBRARY_IMPL(MEGAPPO_NAMESPACE, CPU, m) { m.impl(#name, TORCH_BOX(&name)); } \
  MEGAPPO_OP_ON_CUDA(name)

#if defined(MEGAPPO_CUDA) && !defined(MEGAPPO_CUDA_ON_CPU)
#define MEGAPPO_OP_ON_CUDA(name) \
  STABLE_TORCH_LIBRARY_IMPL(MEGAPPO_NAMESPACE, CUDA, m) { m.impl(#name, TORCH_BOX(&name)); }
#else
#define MEGAPPO_OP_ON_CUDA(name)
#endif
