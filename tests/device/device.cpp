// A second device with memory of its own, which torch knows as PrivateUse1.  The CPU computes its operators on copies,
// so that results are real; what a GPU would refuse or wait for shows here too.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

namespace {

const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0);
void (*note_wait)(const char*) = nullptr;
thread_local bool in_fallback = false;  // whose copies are the device's own work

struct InFallback {
  InFallback() { in_fallback = true; }
  ~InFallback() { in_fallback = false; }
};

void wait_for(const std::string& what) {
  if (note_wait && !in_fallback) note_wait(what.c_str());
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    if (data) std::memset(data, 0xFF, size);  // nan, -1 or a bool that is neither: what is read unwritten shows
    return {data, data, &std::free, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} memory;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> {
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {  // the CPU draws the random numbers
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
} hooks;

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The tensor as the CPU sees it: the same memory, dtype, sizes and strides.
at::Tensor on_cpu(const at::Tensor& x) {
  if (x.is_cpu()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (from.device() != to.device() && from.numel() && !non_blocking)
    wait_for(to.is_cpu() ? "values are copied to the host" : "values are copied to the device");
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& x) {
  wait_for("a value is read");
  return on_cpu(x).item();
}

bool may_replace(const at::Tensor&, const at::Tensor&) { return true; }  // so that `.to` keeps tied weights tied

const at::Tensor& resize_(const at::Tensor& x, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(x, size, format);
}

at::Tensor& set_(at::Tensor& x, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(x, std::move(storage), offset, size, stride);
}

const std::set<std::string> READS_VALUES{
    "aten::nonzero",  "aten::masked_select", "aten::equal",   "aten::_unique2", "aten::unique_dim",
    "aten::bincount", "aten::unique_consecutive"};

// Compute an operator on copies of its tensors on the CPU.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = op.schema().name();
  bool reads = READS_VALUES.count(name) > 0;
  const bool puts = name == "aten::_index_put_impl_";
  auto look = [&](const at::Tensor& x, bool listed) {
    TORCH_CHECK(!x.defined() || x.device() == DEVICE || x.dim() == 0, name, " of tensors on two devices: one is on ",
                x.device(), ", of size ", x.sizes());
    reads |= puts && listed && x.defined() && x.scalar_type() == at::kBool;
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor(), false);
    if (value.isList())
      for (const at::IValue& each : value.toListRef())
        if (each.isTensor()) look(each.toTensor(), true);
  }
  if (name == "aten::repeat_interleave") reads = torch::jit::peek(*stack, 1, 2).isNone();  // output_size
  if (reads) wait_for(name + " reads values");
  const InFallback here;
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", may_replace);
  m.impl("as_strided", at::cpu::as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // in which dtype a GPU computes the operators of BERT
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32_set_opt_dtype)
}

}  // namespace

// Make the device known to torch.  `note`: what to call, with the reason, when the host waits for the device.
extern "C" __attribute__((visibility("default"))) void start(void (*note)(const char*)) {
  note_wait = note;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &memory);
}
