// Device type CUDA for a torch without CUDA: memory of the host, ops by the kernels of the CPU. What streams, events and
// reports are, is written in Python, which is called at each allocation, op and wait.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

namespace py = pybind11;

constexpr int kMostDevices = 8;
constexpr unsigned char kFresh = 0xCB;
constexpr unsigned char kFreed = 0xDB;

int devices = 2;
thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId stream_of[kMostDevices] = {};

// ---- Calls of Python ----

PyObject* runtime = nullptr;  // the object whose methods are called; null before the start and after the end

template <typename... Arguments>
py::object call(const char* method, Arguments&&... arguments) {
  return py::reinterpret_borrow<py::object>(runtime).attr(method)(std::forward<Arguments>(arguments)...);
}

bool is_running() { return runtime != nullptr && Py_IsInitialized(); }

// The streams that have work waiting: ops on them are written down and run later. Others run at once.
std::mutex busy_mutex;
std::set<std::pair<int, int64_t>> busy;
std::atomic<bool> any_busy{false};

bool is_busy(int device, int64_t stream) {
  if (!any_busy) return false;
  std::lock_guard lock(busy_mutex);
  return busy.contains({device, stream});
}

// ---- Devices, streams and events ----

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, {c10::DeviceType::CUDA, index}, stream_of[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    py::gil_scoped_acquire gil;
    const auto index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, {c10::DeviceType::CUDA, index}, call("new_stream", index).cast<int64_t>());
  }
  // gloo takes a stream for each operation on the device's tensors, and waits for it.
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (!is_running()) return;
    py::gil_scoped_acquire gil;
    call("waited", "stream.synchronize", stream.device_index(), stream.id());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    stream_of[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(devices); }
  // Autograd's engine makes streams wait for each other by these.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!is_running()) return;
    py::gil_scoped_acquire gil;
    if (*event == nullptr) *event = new py::object(call("new_event"));
    call("record", *static_cast<py::object*>(*event), stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr || !is_running()) return;
    py::gil_scoped_acquire gil;
    call("block", *static_cast<py::object*>(event), stream.device_index(), stream.id());
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr || !is_running()) return true;
    py::gil_scoped_acquire gil;
    return static_cast<py::object*>(event)->attr("query")().cast<bool>();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr || !is_running()) return;
    py::gil_scoped_acquire gil;
    static_cast<py::object*>(event)->attr("synchronize")();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event == nullptr || !is_running()) return;
    py::gil_scoped_acquire gil;
    delete static_cast<py::object*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- Memory ----

struct Block {
  std::size_t bytes;
  int device;
  int64_t stream;
};
std::mutex memory_mutex;
std::unordered_map<void*, Block> blocks;  // live ones, and freed ones until they are recycled
std::map<std::tuple<int, int64_t, std::size_t>, std::vector<void*>> recycled;
struct Statistics {
  int64_t allocated = 0, peak = 0, reserved = 0;
};
Statistics statistics[kMostDevices];

// Fills a freed block and lets the next allocation on its stream have it.
void recycle(void* memory) {
  std::lock_guard lock(memory_mutex);
  const auto block = blocks.at(memory);
  std::memset(memory, kFreed, block.bytes);
  blocks.erase(memory);
  recycled[{block.device, block.stream, block.bytes}].push_back(memory);
}

void free_block(void* memory) {
  if (memory == nullptr) return;
  {
    std::lock_guard lock(memory_mutex);
    const auto& block = blocks.at(memory);
    statistics[block.device].allocated -= static_cast<int64_t>(block.bytes);
  }
  if (!is_running()) return;
  py::gil_scoped_acquire gil;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  try {
    call("freed", reinterpret_cast<uintptr_t>(memory));
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("freeing memory of the stand-in for CUDA");
  }
  PyErr_Restore(type, value, trace);
}

struct Allocator final : public c10::Allocator {
  c10::DataPtr allocate(std::size_t asked) override {
    const c10::Device device(c10::DeviceType::CUDA, current_device);
    if (asked == 0) return {nullptr, nullptr, &free_block, device};
    const auto bytes = (asked + 511) / 512 * 512;
    const auto stream = stream_of[current_device];
    void* memory = nullptr;
    bool is_intact = true;
    {
      std::lock_guard lock(memory_mutex);
      auto& ready = recycled[{current_device, stream, bytes}];
      auto& counts = statistics[current_device];
      if (!ready.empty()) {
        memory = ready.back();
        ready.pop_back();
        const auto* first = static_cast<unsigned char*>(memory);
        is_intact = std::all_of(first, first + bytes, [](unsigned char byte) { return byte == kFreed; });
      } else {
        TORCH_CHECK(posix_memalign(&memory, 512, bytes) == 0, "CUDA out of memory");
        counts.reserved += static_cast<int64_t>(bytes);
      }
      std::memset(memory, kFresh, bytes);
      blocks[memory] = {bytes, current_device, stream};
      counts.allocated += static_cast<int64_t>(bytes);
      counts.peak = std::max(counts.peak, counts.allocated);
    }
    if (is_running()) {
      py::gil_scoped_acquire gil;
      call("allocated", reinterpret_cast<uintptr_t>(memory), bytes, static_cast<int>(current_device), stream, is_intact);
    }
    return {memory, memory, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;
[[maybe_unused]] const bool has_allocator = (c10::SetAllocator(c10::DeviceType::CUDA, &allocator, 1), true);

// Host memory that the device may copy from and to without the host: by torch's allocator, or registered.
std::mutex pinned_mutex;
std::map<uintptr_t, std::size_t> pinned;
std::atomic<int> pinned_count{0};

void pin(uintptr_t address, std::size_t bytes) {
  std::lock_guard lock(pinned_mutex);
  pinned[address] = bytes;
  pinned_count = static_cast<int>(pinned.size());
}

void unpin(uintptr_t address) {
  std::lock_guard lock(pinned_mutex);
  pinned.erase(address);
  pinned_count = static_cast<int>(pinned.size());
}

std::size_t pinned_bytes(uintptr_t address) {
  std::lock_guard lock(pinned_mutex);
  return pinned.at(address);
}

bool is_pinned(const void* memory) {
  if (pinned_count == 0) return false;
  const auto address = reinterpret_cast<uintptr_t>(memory);
  std::lock_guard lock(pinned_mutex);
  auto next = pinned.upper_bound(address);
  return next != pinned.begin() && address < (--next)->first + next->second;
}

struct PinnedAllocator final : public c10::Allocator {
  static void release(void* memory) {
    const auto address = reinterpret_cast<uintptr_t>(memory);
    if (is_running()) {
      py::gil_scoped_acquire gil;
      call("pinned_freed", address, pinned_bytes(address));
    }
    unpin(address);
    std::free(memory);
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 512, std::max<std::size_t>(bytes, 1)) == 0, "CUDA out of pinned memory");
    pin(reinterpret_cast<uintptr_t>(memory), std::max<std::size_t>(bytes, 1));
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

// ---- Random numbers: a generator of the CPU behind one that says "cuda" ----

struct Generator final : public c10::GeneratorImpl {
  Generator(c10::DeviceIndex device, at::Generator inner)
      : GeneratorImpl({c10::DeviceType::CUDA, device}, c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner_(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner_.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the stand-in's generators have no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner_.current_seed(); }
  uint64_t seed() override { return inner_.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner_.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new Generator(device_.index(), inner_.clone()); }
  at::Generator inner_;
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device : device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator> of = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostDevices; i++) made.push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return of[device < 0 ? current_device : device];
}

struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(devices); }
  int getNumGPUs() const override { return devices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { ::current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(::current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? ::current_device : std::exchange(::current_device, device);
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::DeviceType::CUDA, ::current_device}; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    py::gil_scoped_acquire gil;
    call("synchronize_device", static_cast<int>(device));
  }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

// ---- Ops ----

// A tensor of the other device type over the same memory, which it doesn't own.
at::Tensor alias(const at::Tensor& tensor, c10::Device device, c10::Storage storage) {
  const auto key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return made;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const auto& storage = tensor.storage();
  c10::DataPtr memory(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU));
  return alias(tensor, c10::kCPU, c10::Storage({}, storage.nbytes(), std::move(memory), nullptr, false));
}

// What a kernel of the CPU returned, as a tensor of the device with the same strides.
at::Tensor on_device(const at::Tensor& tensor, c10::Device device) {
  c10::DeviceGuard guard(device);
  const auto bytes = tensor.storage().nbytes();
  auto memory = allocator.allocate(bytes);
  if (bytes) std::memcpy(memory.get(), tensor.storage().data(), bytes);
  return alias(tensor, device, c10::Storage({}, bytes, std::move(memory), &allocator, true));
}

// Set in a thread while it does work of the device, which is no op of the host.
thread_local bool does_work = false;
struct DoesWork {
  bool before = std::exchange(does_work, true);
  ~DoesWork() { does_work = before; }
};

uintptr_t address_of(const at::Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.storage().data()); }

// Reports an op to the detector: what it reads and what it writes.
void launched(const std::string& name, c10::Device device, const std::vector<uintptr_t>& reads,
              const std::vector<uintptr_t>& writes) {
  if (!is_running()) return;
  py::gil_scoped_acquire gil;
  call("launched", name, static_cast<int>(device.index()), stream_of[device.index()], reads, writes);
}

// Puts work behind what already waits on the current stream of a device.
void defer(c10::Device device, std::function<void()> work) {
  py::gil_scoped_acquire gil;
  call("deferred", static_cast<int>(device.index()), stream_of[device.index()], py::cpp_function([work = std::move(work)] {
         py::gil_scoped_release release;
         at::AutoDispatchBelowADInplaceOrView below;
         work();
       }));
}

void run_or_defer(c10::Device device, std::function<void()> work) {
  if (is_busy(device.index(), stream_of[device.index()]))
    defer(device, std::move(work));
  else
    work();
}

// The host waits for the current stream of a device, and that is written down.
void synchronize(c10::Device device, const std::string& why) {
  if (!is_running()) return;
  py::gil_scoped_acquire gil;
  call("waited", why, static_cast<int>(device.index()), stream_of[device.index()]);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(c10::Device(c10::DeviceType::CUDA, current_device)));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(c10::Device(c10::DeviceType::CUDA, current_device)));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

void copied(const at::Tensor& to, const at::Tensor& from) {
  const DoesWork work;
  to.copy_(from);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const auto device = source.is_cuda() ? source.device() : self.device();
  const auto to = on_host(self);
  auto from = on_host(source);
  std::vector<uintptr_t> reads, writes;
  const auto is_watched = [](const at::Tensor& tensor) { return tensor.is_cuda() || is_pinned(tensor.storage().data()); };
  if (is_watched(self)) writes.push_back(address_of(self));
  if (is_watched(source)) reads.push_back(address_of(source));
  const auto join = [&] {
    if (!self.is_cuda() || !source.is_cuda() || self.device() == source.device()) return;
    py::gil_scoped_acquire gil;
    call("joined", static_cast<int>(self.get_device()), static_cast<int>(source.get_device()));
  };
  join();
  launched("aten::copy_", device, reads, writes);
  if (self.is_cuda() == source.is_cuda()) {
    run_or_defer(device, [to, from] { copied(to, from); });
    join();
    return self;
  }
  const auto& host = self.is_cuda() ? source : self;
  const bool is_pageable = !is_pinned(host.storage().data());
  const std::string what =
      std::string(self.is_cuda() ? "copy to the device" : "copy to the host") + (is_pageable ? " of pageable memory" : "");
  // CUDA reads pageable memory before it returns.
  if (is_pageable && self.is_cuda() && is_busy(device.index(), stream_of[device.index()])) from = from.clone();
  run_or_defer(device, [to, from] { copied(to, from); });
  if (!non_blocking || is_pageable) synchronize(device, what);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  copy_(target, self, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  auto target = to;
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  copy_(target, self, false);
  return to;
}

at::Scalar item(const at::Tensor& tensor) {
  launched("aten::item", tensor.device(), {address_of(tensor)}, {});
  synchronize(tensor.device(), ".item()");
  return on_host(tensor).item();
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  py::gil_scoped_acquire gil;
  call("record_stream", address_of(self), static_cast<int>(stream.device_index()), stream.id());
}

// Ops that CUDA's wrappers check strictly; others take CPU tensors without dimensions beside tensors of the device.
const std::set<std::string> kStrict = {"aten::nll_loss_backward",
                                       "aten::nll_loss2d_backward",
                                       "aten::nll_loss_forward",
                                       "aten::mm",
                                       "aten::addmm",
                                       "aten::bmm",
                                       "aten::_log_softmax_backward_data",
                                       "aten::_softmax_backward_data",
                                       "aten::native_layer_norm_backward",
                                       "aten::embedding_dense_backward",
                                       "aten::index_select",
                                       "aten::gather",
                                       "aten::scatter_add",
                                       "aten::cat"};
// Ops whose results' shapes depend on values: the host waits for them.
const std::set<std::string> kWaiting = {"aten::nonzero",    "aten::masked_select",      "aten::_unique2",
                                        "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
                                        "aten::bincount",   "aten::repeat_interleave"};

template <typename Change>
c10::IValue changed(const c10::IValue& value, Change&& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(tensor.defined() ? change(tensor) : tensor);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const auto& tensor : value.toOptionalTensorVector())
      made.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
    return made;
  }
  return value;
}

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit&& visit) {
  changed(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

bool is_generator(const c10::Argument& argument) {
  return argument.type()->str().find("Generator") != std::string::npos;
}

// While it lives, ops of this thread that name no generator draw from one, those within other ops too. The CPU's default
// generator is left alone, as other threads of the host draw from it meanwhile.
thread_local const at::Generator* drawn_from = nullptr;
constexpr auto kDraws = c10::DispatchKey::TESTING_ONLY_GenericMode;
struct DrawsFrom {
  explicit DrawsFrom(const at::Generator& generator) : before(std::exchange(drawn_from, &generator)) {}
  ~DrawsFrom() { drawn_from = before; }
  const at::Generator* before;
  // Within a mode of Python torch excludes all keys before Python's.
  const c10::impl::ForceDispatchKeyGuard key{c10::impl::tls_local_dispatch_key_set().included_.add(kDraws),
                                             c10::impl::tls_local_dispatch_key_set().excluded_.remove(kDraws)};
};

void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size() && op.hasTag(at::Tag::nondeterministic_seeded); i++) {
    auto& value = torch::jit::peek(*stack, i, arguments.size());
    if (value.isNone() && is_generator(arguments[i])) value = *drawn_from;
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDraws), stack);
}

// One call of an op: its arguments, and what the kernel of the CPU is to be given instead.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), arguments_(torch::jit::last(*stack, schema_.arguments().size()).vec()) {
    find_device();
    for (std::size_t i = 0; i < arguments_.size(); i++) {
      const auto& argument = schema_.arguments()[i];
      const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
      each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        if (!tensor.is_cuda() || !tensor.has_storage()) return;
        (is_written ? writes_ : reads_).push_back(address_of(tensor));
        if (is_written)
          written_.push_back(tensor);
        else
          read_.push_back(tensor);
      });
    }
  }

  std::vector<c10::IValue> run() {
    const bool is_view =
        !schema_.returns().empty() && std::all_of(schema_.returns().begin(), schema_.returns().end(), [](const auto& returned) {
          return returned.alias_info() && !returned.alias_info()->isWrite();
        });
    if (kWaiting.contains(schema_.name())) synchronize(device_, schema_.name());
    auto outputs = !is_view && is_busy(device_.index(), stream_of[device_.index()]) ? deferred() : at_once();
    if (!is_view) launched(schema_.name(), device_, reads_, writes_);
    return outputs;
  }

 private:
  void find_device() {
    std::optional<c10::Device> common;
    const bool takes_scalars = !kStrict.contains(schema_.name());
    for (std::size_t i = 0; i < arguments_.size(); i++) {
      const auto& argument = schema_.arguments()[i];
      if (arguments_[i].isOptionalTensorList()) continue;  // indices may lie on the host
      each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
        if (takes_scalars && tensor.is_cpu() && tensor.dim() == 0) return;
        if (!common) common = tensor.device();
        TORCH_CHECK(*common == tensor.device(), "Expected all tensors to be on the same device, but got ", argument.name(),
                    " is on ", tensor.device(), ", different from other tensors on ", *common,
                    " (when checking argument in method ", schema_.name(), ")");
      });
      if (!common && arguments_[i].isDevice() && arguments_[i].toDevice().is_cuda()) common = arguments_[i].toDevice();
    }
    device_ = common && common->is_cuda() && common->has_index() ? *common : c10::Device(c10::DeviceType::CUDA, current_device);
  }

  // The arguments for a kernel of the CPU. Outputs that are still to be sized are given as empty tensors.
  torch::jit::Stack host_stack(const at::Generator& generator) {
    torch::jit::Stack stack;
    for (std::size_t i = 0; i < arguments_.size(); i++) {
      const auto& argument = schema_.arguments()[i];
      const auto& value = arguments_[i];
      if (value.isDevice())
        stack.emplace_back(c10::Device(c10::kCPU));
      else if (is_generator(argument))
        stack.emplace_back(value.isNone() ? generator : inner_of(value.toGenerator()));
      else if (argument.is_out())
        stack.push_back(changed(value, [&](const at::Tensor& tensor) {
          if (tensor.numel() != 0 || !tensor.is_cuda()) return on_host(tensor);
          outs_.emplace_back(tensor, at::empty({0}, tensor.options().device(c10::kCPU)));
          return outs_.back().second;
        }));
      else
        stack.push_back(changed(value, on_host));
    }
    return stack;
  }

  const at::Generator& inner() const { return inner_of(default_generator(device_.index())); }

  static const at::Generator& inner_of(const at::Generator& generator) {
    TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                generator.device().type(), "'");
    return static_cast<const Generator*>(generator.unsafeGetGeneratorImpl())->inner_;
  }

  std::vector<c10::IValue> at_once() {
    auto stack = host_stack(inner());
    const DrawsFrom draws(inner());
    call_host(op_, stack);
    for (auto& [tensor, made] : outs_) {
      c10::DeviceGuard guard(device_);
      at::native::resize_impl_cpu_(tensor.unsafeGetTensorImpl(), made.sizes(), made.strides());
      if (made.numel()) on_host(tensor).copy_(made);
      writes_.push_back(address_of(tensor));
    }
    std::size_t written = 0;
    std::vector<c10::IValue> outputs;
    for (std::size_t i = 0; i < stack.size(); i++) {
      const auto* info = schema_.returns()[i].alias_info();
      if (info && info->isWrite() && stack[i].isTensor())
        outputs.emplace_back(written_.at(written++));
      else
        outputs.push_back(changed(stack[i], [&](const at::Tensor& tensor) { return returned(tensor); }));
    }
    return outputs;
  }

  at::Tensor returned(const at::Tensor& tensor) {
    for (const auto* known : {&written_, &read_})
      for (const auto& argument : *known)
        if (tensor.storage().data() != nullptr && argument.storage().data() == tensor.storage().data())
          return alias(tensor, argument.device(), argument.storage());
    auto made = on_device(tensor, device_);
    if (tensor.storage().nbytes()) writes_.push_back(address_of(made));
    return made;
  }

  // Sizes of results come from the op on tensors without memory; the kernel runs when its turn has come.
  std::vector<c10::IValue> deferred() {
    torch::jit::Stack shapes;
    for (const auto& value : arguments_)
      shapes.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::kMeta)) : changed(value, [](const at::Tensor& tensor) {
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
      }));
    try {
      call_host(op_, shapes);
    } catch (const c10::Error&) {
      synchronize(device_, schema_.name() + " (whose sizes the stand-in can't foresee)");
      return at_once();
    }
    // The mean and deviation of a LayerNorm are float32 without memory and on CUDA; the CPU's kernels take its own dtype.
    if (schema_.name() == "aten::native_layer_norm") {
      const auto& scale = arguments_[2].isTensor() ? arguments_[2] : arguments_[0];
      for (auto i : {1, 2}) shapes[i] = shapes[i].toTensor().to(scale.toTensor().scalar_type());
    }
    std::vector<c10::IValue> outputs;
    std::vector<std::vector<at::Tensor>> made(shapes.size());
    std::size_t written = 0;
    for (std::size_t i = 0; i < shapes.size(); i++) {
      const auto* info = schema_.returns()[i].alias_info();
      if (info && info->isWrite() && shapes[i].isTensor()) {
        const auto& target = written_.at(written++);
        if (target.sizes() != shapes[i].toTensor().sizes()) target.resize_(shapes[i].toTensor().sizes());
        outputs.emplace_back(target);
      } else {
        outputs.push_back(changed(shapes[i], [&](const at::Tensor& shape) {
          auto tensor = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device_));
          if (tensor.storage().nbytes()) writes_.push_back(address_of(tensor));
          made[i].push_back(on_host(tensor));
          return tensor;
        }));
      }
    }
    auto generator = inner();
    const bool is_random = op_.hasTag(at::Tag::nondeterministic_seeded);
    auto stack = host_stack(generator);
    outs_.clear();
    if (is_random) generator = drawn(stack);
    defer(device_, [op = op_, stack = std::move(stack), made = std::move(made), generator]() mutable {
      const DrawsFrom draws(generator);
      call_host(op, stack);
      for (std::size_t i = 0; i < stack.size(); i++) {
        std::size_t next = 0;
        if (!made[i].empty()) each_tensor(stack[i], [&](const at::Tensor& tensor) { made[i][next++].copy_(tensor); });
      }
    });
    return outputs;
  }

  // Random numbers are drawn in the order of launches: the op gets a copy of its generator, and the generator goes on.
  at::Generator drawn(torch::jit::Stack& stack) {
    torch::jit::Stack trial;
    auto copy = inner().clone();
    for (auto& value : stack) {
      trial.push_back(changed(value, [](const at::Tensor& tensor) { return at::zeros_like(tensor); }));
      if (value.isGenerator()) value = c10::IValue(copy = value.toGenerator().clone());
    }
    const DrawsFrom draws(inner());
    call_host(op_, trial);
    return copy;
  }

  static void call_host(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
    const DoesWork work;
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(&stack);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::vector<c10::IValue> arguments_;
  c10::Device device_{c10::DeviceType::CUDA, 0};
  std::vector<uintptr_t> reads_, writes_;
  std::vector<at::Tensor> read_, written_;
  std::vector<std::pair<at::Tensor, at::Tensor>> outs_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // CUDA's kernel counts integers, which the CPU's does not.
  static const auto histc = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  if (op == histc) {
    auto& counted = torch::jit::peek(*stack, 0, op.schema().arguments().size());
    const auto dtype = counted.toTensor().scalar_type();
    if (c10::isIntegralType(dtype, false)) {
      counted = counted.toTensor().to(at::kDouble);
      op.callBoxed(stack);
      stack->back() = stack->back().toTensor().to(dtype);
      return;
    }
  }
  auto outputs = Call(op, stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& output : outputs) stack->push_back(std::move(output));
}

// Ops of the host on pinned memory, which the device may be copying.
std::unique_ptr<at::ObserverContext> host_op(const at::RecordFunction& function) {
  if (pinned_count == 0 || does_work || !is_running()) return nullptr;
  const auto schema = function.operator_schema();
  if (!schema) return nullptr;
  std::vector<uintptr_t> reads, writes;
  bool is_of_device = false;
  std::size_t i = 0;
  for (const auto& value : function.inputs()) {
    if (i >= schema->arguments().size()) break;
    const auto* info = schema->arguments()[i++].alias_info();
    each_tensor(value, [&](const at::Tensor& tensor) {
      is_of_device |= tensor.is_cuda();
      if (!tensor.is_cpu() || !tensor.has_storage() || tensor.is_meta() || !is_pinned(tensor.storage().data())) return;
      if (info && !info->isWrite()) return;  // a view
      (info ? writes : reads).push_back(address_of(tensor));
    });
  }
  if (is_of_device || (reads.empty() && writes.empty())) return nullptr;
  py::gil_scoped_acquire gil;
  call("host_op", schema->name(), reads, writes);
  return nullptr;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&draw>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("resize_", resize_);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("start", [](py::object object, int count) {
    TORCH_CHECK(1 <= count && count <= kMostDevices, "1 to ", kMostDevices, " devices, not ", count);
    devices = count;
    runtime = object.release().ptr();
    at::addGlobalCallback(at::RecordFunctionCallback(&host_op).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  });
  // torch asks whether a device has a kernel of its own for an op, and composes the op of others if not.
  module.def("cover", [](const std::vector<std::string>& names) {
    static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    for (const auto& name : names) library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  });
  module.def("stop", [] { runtime = nullptr; });
  module.def("set_busy", [](int device, int64_t stream, bool is_busy) {
    std::lock_guard lock(busy_mutex);
    if (is_busy)
      busy.emplace(device, stream);
    else
      busy.erase({device, stream});
    any_busy = !busy.empty();
  });
  module.def("device", [] { return static_cast<int>(current_device); });
  module.def("set_device",
             [](int device) { Guard().setDevice({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)}); });
  module.def("stream", [](int device) { return stream_of[device]; });
  module.def("set_stream", [](int device, int64_t stream) { stream_of[device] = stream; });
  module.def("recycle", [](uintptr_t memory) { recycle(reinterpret_cast<void*>(memory)); });
  module.def("on_host", &on_host);
  module.def("pin", &pin);
  module.def("unpin", &unpin);
  module.def("is_pinned", [](uintptr_t address) { return is_pinned(reinterpret_cast<void*>(address)); });
  module.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
  module.def("memory", [](int device) {
    std::lock_guard lock(memory_mutex);
    const auto& counts = statistics[device];
    return std::make_tuple(counts.allocated, counts.peak, counts.reserved);
  });
  module.def("reset_peak", [](int device) {
    std::lock_guard lock(memory_mutex);
    statistics[device].peak = statistics[device].allocated;
  });
}
