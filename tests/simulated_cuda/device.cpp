// CUDA devices made of host memory, for a CPU build of torch.
//
// The library has to be loaded before torch, which looks for CUDA once, when it is imported.
// Kernels are those of the CPU. What is real: the device of each tensor, errors where devices mix,
// autograd's thread for each device, autocast, and where the host waits for the device (reported).
// What is not: time, and work that is still running when a call returns.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
constexpr c10::DeviceIndex kDevices = 4;
constexpr size_t kAlignment = 512;

// -- reports of waits --------------------------------------------------------------------------

using Report = int (*)(const char*);
Report report = nullptr;  // returns whether the wait is an error
thread_local int silent = 0;

struct Silence {
  Silence() { ++silent; }
  ~Silence() { --silent; }
};

void wait(const std::string& kind) {
  if (report != nullptr && silent == 0)
    TORCH_CHECK(report(kind.c_str()) == 0, "called a synchronizing CUDA operation: ", kind);
}

// -- devices and streams -----------------------------------------------------------------------

thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device.has_value() && device->index() >= 0 ? device->index() : current;
}

struct OnDevice {
  explicit OnDevice(c10::DeviceIndex index) : before(std::exchange(current, index)) {}
  ~OnDevice() { current = before; }
  c10::DeviceIndex before;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device d) const override { current = index_of(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = index_of(d); }
  c10::Device exchangeDevice(c10::Device d) const override {
    return {c10::kCUDA, std::exchange(current, index_of(d))};
  }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, {c10::kCUDA, index_of(d)});
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  // all work is done when a call returns, so each event has happened
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("synchronize"); }
  void synchronizeEvent(void*) const override { wait("synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// -- memory ------------------------------------------------------------------------------------

std::atomic<int64_t> allocated[kDevices], peak[kDevices];

// Each block starts with its size and its device.
struct DeviceMemory final : c10::Allocator {
  static void release(void* data) {
    auto* header = reinterpret_cast<int64_t*>(static_cast<char*>(data) - kAlignment);
    allocated[header[1]] -= header[0];
    free(header);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* block = nullptr;
    if (posix_memalign(&block, kAlignment, bytes + 2 * kAlignment) != 0) throw std::bad_alloc();
    auto* header = static_cast<int64_t*>(block);
    header[0] = static_cast<int64_t>(bytes);
    header[1] = current;
    const int64_t now = allocated[current] += header[0];
    if (now > peak[current]) peak[current] = now;
    void* data = static_cast<char*>(block) + kAlignment;
    return {data, data, &release, {c10::kCUDA, current}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::kCUDA, &device_memory)

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_blocks;
std::atomic<int64_t> pinned_bytes;

struct PinnedMemory final : at::HostAllocator {
  static void release(void* data) {
    std::lock_guard lock(pinned_mutex);
    auto block = pinned_blocks.find(static_cast<char*>(data));
    pinned_bytes -= static_cast<int64_t>(block->second);
    pinned_blocks.erase(block);
    free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    if (posix_memalign(&data, kAlignment, std::max<size_t>(bytes, 1)) != 0) throw std::bad_alloc();
    std::lock_guard lock(pinned_mutex);
    pinned_blocks[static_cast<char*>(data)] = bytes;
    pinned_bytes += static_cast<int64_t>(bytes);
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(c10::kCUDA, &pinned_memory)

bool is_pinned(const void* data) {
  std::lock_guard lock(pinned_mutex);
  auto after = pinned_blocks.upper_bound(static_cast<const char*>(data));
  if (after == pinned_blocks.begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return static_cast<const char*>(data) < start + bytes;
}

// -- random numbers ----------------------------------------------------------------------------

at::Generator& device_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {  // once, whichever thread asks first
    std::vector<at::Generator> made;
    while (made.size() < kDevices) made.push_back(at::detail::createCPUGenerator(0));
    return made;
  }();
  return generators[index];
}

// Lets the CPU's kernels draw from the device's generator in place of their default one.
struct DeviceNumbers {
  explicit DeviceNumbers(c10::DeviceIndex index)
      : device(device_generator(index)), host(at::detail::getDefaultCPUGenerator()) {
    before = host.get_state();
    host.set_state(device.get_state());
  }
  ~DeviceNumbers() {
    device.set_state(host.get_state());
    host.set_state(before);
  }
  at::Generator& device;
  at::Generator host;
  Tensor before;
};

// -- operators ---------------------------------------------------------------------------------

Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  OnDevice on(index_of(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_generic(
      size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(index_of(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

// The same memory as a CPU tensor.
Tensor as_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  TORCH_CHECK(!from.is_sparse() && !to.is_sparse(), "sparse copies are not simulated");
  const bool to_host = from.is_cuda() && !to.is_cuda(), to_device = to.is_cuda() && !from.is_cuda();
  // a copy into memory that is not pinned waits whatever it was told
  if ((to_host && (!non_blocking || !is_pinned(to.data_ptr()))) || (to_device && !non_blocking))
    wait("copy " + from.device().str() + " to " + to.device().str());
  Silence silence;
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  as_host(to).copy_(as_host(from).expand(to.sizes()));
  return to;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, from, non_blocking);
}

// UntypedStorage.resize_, by which fully_shard frees a whole parameter
void resize_storage(const Tensor& tensor, int64_t bytes) {
  OnDevice on(tensor.device().index());
  auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  auto memory = device_memory.allocate(bytes);
  const size_t kept = std::min<size_t>(storage.nbytes(), bytes);
  if (kept != 0) memcpy(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

const Tensor& resize_(
    const Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() == size) return tensor;
  const size_t needed =
      (c10::multiply_integers(size) + tensor.storage_offset()) * tensor.dtype().itemsize();
  if (impl->unsafe_storage().nbytes() < needed) resize_storage(tensor, needed);
  impl->set_sizes_contiguous(size);
  return tensor;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

c10::Scalar local_scalar_dense(const Tensor& tensor) {
  wait("item");
  Silence silence;
  return at::native::_local_scalar_dense_cpu(as_host(tensor));
}

Tensor as_strided(
    const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

Tensor view(const Tensor& tensor, c10::IntArrayRef size) { return at::native::view(tensor, size); }

Tensor reshape_alias(const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(tensor, size, stride);
}

Tensor& set_storage(
    Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return tensor;
}

Tensor& set_whole_storage(Tensor& tensor, at::Storage storage) {
  const int64_t length = storage.nbytes() / tensor.dtype().itemsize();
  return set_storage(tensor, std::move(storage), 0, {length}, {1});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage(
      tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor&, c10::Stream) {}

// One GEMM in half precision with sums in fp32, which a CPU does not have.
Tensor& addmm_widened(
    const Tensor& self, const Tensor& left, const Tensor& right, c10::ScalarType dtype,
    const c10::Scalar& beta, const c10::Scalar& alpha, Tensor& out) {
  TORCH_CHECK(out.scalar_type() == dtype && self.scalar_type() == dtype, "self and out_dtype differ");
  Silence silence;
  const Tensor product = at::mm(as_host(left).to(dtype), as_host(right).to(dtype));
  as_host(out).copy_(as_host(self).mul(beta).add_(product, alpha));
  return out;
}

bool reads_back(const std::string& name, const torch::jit::Stack& arguments) {
  static const std::set<std::string> names = {
      "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::_coalesce"};
  if (names.count(name) != 0) return true;
  if (name.find("index_put") == std::string::npos) return false;
  for (const c10::IValue& index : arguments[1].toListRef())  // a mask is counted first
    if (index.isTensor() && index.toTensor().defined() &&
        index.toTensor().scalar_type() == c10::kBool)
      return true;
  return false;
}

// Raises where CUDA would, because the operands are on several devices; returns the device.
std::optional<c10::Device> common_device(
    const c10::FunctionSchema& schema, const torch::jit::Stack& arguments) {
  const std::string& name = schema.name();
  const bool mixes = name.find("_foreach_") != std::string::npos ||
      name.find("_fused_") != std::string::npos || name.find("index") != std::string::npos;
  std::optional<c10::Device> device;
  auto refuse = [&](const std::string& one, const std::string& other) {
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ",
        one, " and ", other, "! (", name, ")");
  };
  auto look = [&](const Tensor& tensor, bool mixed) {
    if (!tensor.defined() || !tensor.is_cuda()) return;
    if (device && *device != tensor.device() && !mixed)
      refuse(device->str(), tensor.device().str());
    if (!device) device = tensor.device();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) look(argument.toTensor(), false);
    if (argument.isTensorList())
      for (const Tensor& tensor : argument.toTensorList()) look(tensor, mixes);
  }
  if (!device || mixes) return device;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    const auto* alias = schema.arguments()[i].alias_info();
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().is_cpu() &&
        (argument.toTensor().dim() > 0 || (alias != nullptr && alias->isWrite())))
      refuse(device->str(), "cpu");
    if (argument.isTensorList())
      for (const Tensor& tensor : argument.toTensorList())
        if (tensor.defined() && tensor.is_cpu()) refuse(device->str(), "cpu");
  }
  return device;
}

// A CUDA kernel reads a 0-dim operand in the dtype of the others; the CPU's reads it as fp32.
void round_scalars(const std::string& name, torch::jit::Stack* stack, size_t count) {
  static const std::set<std::string> names = {"aten::mul",           "aten::mul_",
                                              "aten::div",           "aten::div_",
                                              "aten::_foreach_mul",  "aten::_foreach_mul_",
                                              "aten::_foreach_div_", "aten::_foreach_div"};
  if (names.count(name) == 0) return;
  auto arguments = torch::jit::last(*stack, count);
  std::optional<c10::ScalarType> narrow;
  auto look = [&](const Tensor& tensor) {
    if (tensor.dim() > 0 && c10::isReducedFloatingType(tensor.scalar_type()))
      narrow = tensor.scalar_type();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) look(argument.toTensor());
    if (argument.isTensorList())
      for (const Tensor& tensor : argument.toTensorList()) look(tensor);
  }
  if (!narrow) return;
  for (auto each = stack->end() - static_cast<int64_t>(count); each != stack->end(); ++each) {
    c10::IValue& argument = *each;
    if (argument.isTensor() && argument.toTensor().is_cuda() && argument.toTensor().dim() == 0 &&
        argument.toTensor().is_floating_point())
      argument = argument.toTensor().to(*narrow);
  }
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto last = torch::jit::last(*stack, schema.arguments().size());
  const torch::jit::Stack arguments(last.begin(), last.end());
  const auto device = common_device(schema, arguments);
  if (reads_back(schema.name(), arguments)) wait(schema.name());
  Silence silence;
  round_scalars(schema.name(), stack, schema.arguments().size());
  OnDevice on(index_of(device));
  std::optional<DeviceNumbers> numbers;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) numbers.emplace(current);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY(simulated_cuda, library) {
  library.def("resize_storage(Tensor(a!) tensor, int bytes) -> ()");
}

TORCH_LIBRARY_IMPL(simulated_cuda, CUDA, library) {
  library.impl("resize_storage", resize_storage);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record_stream);
  library.impl("addmm.dtype_out", addmm_widened);
  // torch would make these of their out= variants, which warn of the shape of a scalar's buffer
  for (const char* name : {"mse_loss", "smooth_l1_loss"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

// -- what torch asks of CUDA -------------------------------------------------------------------

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex current_device() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return device_generator(index < 0 ? current : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void deviceSynchronize(c10::DeviceIndex) const override { wait("synchronize"); }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

namespace c10d {
struct InstantTimer final : Timer {  // DDP takes times of its backward
  explicit InstantTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    return to < from ? std::nullopt : std::optional<int64_t>(to - from);
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, InstantTimer)
}  // namespace c10d

// -- for Python --------------------------------------------------------------------------------

extern "C" {
void on_wait(Report function) { report = function; }
void set_silent(int on) { silent += on != 0 ? 1 : -1; }
int current_device() { return current; }
void set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
int64_t memory_allocated(int index) { return allocated[index]; }
int64_t memory_peak(int index) { return peak[index]; }
void reset_memory_peak(int index) { peak[index] = allocated[index].load(); }
int64_t memory_pinned() { return pinned_bytes; }
void seed(int index, uint64_t value) { device_generator(index).set_current_seed(value); }
uint64_t initial_seed(int index) { return device_generator(index).current_seed(); }
void get_rng_state(int index, char* to) {
  const Tensor state = device_generator(index).get_state();
  memcpy(to, state.data_ptr(), state.nbytes());
}
void set_rng_state(int index, const char* from, int64_t bytes) {
  Tensor state = at::detail::empty_cpu({bytes}, c10::kByte);
  memcpy(state.data_ptr(), from, bytes);
  device_generator(index).set_state(state);
}
}
