// A simulated accelerator, for tests: torch's PrivateUse1 device under the name "sim", whose kernels run on the CPU.
//
// Tensors lie in memory of their own kind, so mixing them with others is the same error as with CUDA. Kernels run when they are
// called, but the order that real streams promise is kept in vector clocks, and whoever relies on more is an error:
//   - reading what another stream has written, or writing what another stream still uses, without an event between them;
//   - freeing memory in one stream that another one still uses, without record_stream;
//   - a copy into pinned memory that does not block arrives only when the host waits for it: until then there are NaNs;
//   - pinned memory that changes before a copy from it is done.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMost = 8;
constexpr int kAsked = 8;        // so many queries in vain are a wait
constexpr uint64_t kBehind = 16;  // so many operations a device is behind the host, for all that a query finds

// --- order --------------------------------------------------------------------------------------------------------------

using StreamKey = std::pair<DeviceIndex, c10::StreamId>;
using Moments = std::map<StreamKey, uint64_t>;  // of each stream, up to which of its operations something is known to be done

void join(Moments& into, const Moments& other) {
  for (const auto& [stream, moment] : other) into[stream] = std::max(into[stream], moment);
}

bool knows(const Moments& known, const StreamKey& stream, uint64_t moment) {
  auto found = known.find(stream);
  return moment == 0 || (found != known.end() && found->second >= moment);
}

struct Block {  // what was done to one piece of device memory
  size_t bytes;
  StreamKey home;
  StreamKey writer{0, 0};
  uint64_t written = 0;
  Moments readers;
  std::set<StreamKey> recorded;
};

struct Later {  // a copy between device and host that is not done until the host waits
  StreamKey stream;
  uint64_t moment;
  std::function<void()> complete;
};

// What lives as long as the process is never destroyed: torch drops its last tensors after static objects are gone.
auto& lock = *new std::recursive_mutex;
thread_local int held = 0;
thread_local auto& finished = *new std::list<Later>;

struct Locked {  // tensors are dropped after it: that may need Python's lock, whose owner may wait for this one
  Locked() {
    lock.lock();
    ++held;
  }
  ~Locked() {
    std::list<Later> dropped;
    if (--held == 0) dropped.swap(finished);
    lock.unlock();
  }
};

auto& streams = *new std::map<StreamKey, Moments>;
auto& host = *new Moments;
auto& blocks = *new std::unordered_map<void*, Block>;
auto& later = *new std::list<Later>;
auto& violation = *new std::string;  // found where nothing may be thrown; told by the next operation
int64_t synchronizations = 0;
thread_local int64_t own_synchronizations = 0;  // of this thread alone
thread_local bool may_wait = true;
int64_t operations = 0;                         // views included
thread_local int64_t own_operations = 0;
int64_t launches = 0;                           // kernels and copies
int64_t copies_to_host = 0, copies_to_device = 0;
int count = 0;
size_t memory_bytes[kMost], used_bytes[kMost], peak_bytes[kMost];
c10::StreamId newest_stream = 0;
thread_local DeviceIndex current_device = 0;
thread_local auto& current_streams = *new std::map<DeviceIndex, c10::StreamId>;

void count_synchronization() {
  TORCH_CHECK(may_wait, "this thread waits for the device, and is not to");
  ++synchronizations;
  ++own_synchronizations;
}

std::string name_of(const StreamKey& stream) {
  return "stream " + std::to_string(stream.second) + " of sim:" + std::to_string(stream.first);
}

StreamKey stream_of(DeviceIndex device) { return {device, current_streams[device]}; }

void tell_violation() {
  if (violation.empty()) return;
  std::string told;
  told.swap(violation);
  TORCH_CHECK(false, told);
}

uint64_t launch(const StreamKey& stream) {  // one operation more; what the host knew is done before it
  tell_violation();
  auto& own = streams[stream];
  join(own, host);
  ++operations;
  ++own_operations;
  return ++own[stream];
}

void host_waits_for(const Moments& done) {
  join(host, done);
  for (auto each = later.begin(); each != later.end();) {
    if (knows(host, each->stream, each->moment)) {
      each->complete();
      finished.splice(finished.end(), later, each++);
    } else {
      ++each;
    }
  }
}

void host_waits_for_stream(const StreamKey& stream) {
  count_synchronization();
  host_waits_for(streams[stream]);
}

void used(const StreamKey& stream, uint64_t moment, void* memory, bool writes) {
  auto found = blocks.find(memory);
  if (found == blocks.end()) return;
  auto& block = found->second;
  const auto& known = streams[stream];
  TORCH_CHECK(knows(known, block.writer, block.written), name_of(stream), " uses what ", name_of(block.writer),
              " may not have written yet: wait for an event of it");
  if (writes) {
    for (const auto& [reader, read] : block.readers)
      TORCH_CHECK(knows(known, reader, read), name_of(stream), " writes what ", name_of(reader),
                  " may still use: wait for an event of it");
    block.writer = stream;
    block.written = moment;
    block.readers.clear();
  } else {
    block.readers[stream] = std::max(block.readers[stream], moment);
  }
}

// --- memory -------------------------------------------------------------------------------------------------------------

void begin_block(void* memory, size_t bytes, DeviceIndex device) {
  if (!memory) return;  // of a tensor without entries
  Locked guard;
  if (used_bytes[device] + bytes > memory_bytes[device]) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes, " bytes; sim:", int(device), " has ",
                     memory_bytes[device], " of which ", memory_bytes[device] - used_bytes[device], " are free");
  }
  used_bytes[device] += bytes;
  peak_bytes[device] = std::max(peak_bytes[device], used_bytes[device]);
  blocks[memory] = Block{bytes, stream_of(device)};
}

void end_block(void* memory, DeviceIndex device) {
  Locked guard;
  auto found = blocks.find(memory);
  if (found == blocks.end()) return;
  const auto& block = found->second;
  used_bytes[device] -= block.bytes;
  auto known = streams[block.home];
  join(known, host);
  auto uses = block.readers;
  if (block.written) uses[block.writer] = std::max(uses[block.writer], block.written);
  for (const auto& [user, moment] : uses)
    if (user != block.home && !block.recorded.count(user) && !knows(known, user, moment))
      violation = "memory of " + name_of(block.home) + " was freed while " + name_of(user) +
          " may still use it: call record_stream, or wait for an event of it";
  blocks.erase(found);
}

struct Adopted {  // memory of a CPU tensor that is now a device's
  Tensor tensor;
  void* memory;
  DeviceIndex device;
};

void drop(void* context) {
  auto* held = static_cast<Adopted*>(context);
  end_block(held->memory, held->device);
  delete held;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = current_device;
    auto tensor = at::empty({int64_t(std::max<size_t>(bytes, 1))}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    void* memory = tensor.mutable_data_ptr();
    begin_block(memory, bytes, device);
    return {memory, new Adopted{tensor, memory, device}, &drop, Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Locked guard;
    auto found = blocks.find(data.get());
    if (found != blocks.end()) found->second.recorded.insert({stream.device_index(), stream.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* rows : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      auto& all = (*rows)[0];
      all.current = int64_t(used_bytes[device]);
      all.peak = int64_t(peak_bytes[device]);
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { peak_bytes[device] = used_bytes[device]; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {memory_bytes[device] - used_bytes[device], memory_bytes[device]};
  }
};
Allocator allocator;

auto& pinned = *new std::map<const char*, size_t>;  // where it begins -> bytes

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    Locked guard;
    pinned[memory] = std::max<size_t>(bytes, 1);
    return {memory, memory, &free_pinned, Device(at::kCPU)};
  }
  static void free_pinned(void* memory) {
    Locked guard;
    pinned.erase(static_cast<char*>(memory));
    std::free(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* memory) {
  Locked guard;
  auto* at = static_cast<const char*>(memory);
  auto next = pinned.upper_bound(at);
  if (next == pinned.begin()) return false;
  --next;
  return at < next->first + next->second;
}

// --- what torch asks of a device ----------------------------------------------------------------------------------------

struct Event {
  Moments done;
  int asked = 0;      // how often in a row the host found it not done, and did nothing else
  int64_t moment = 0;  // of the thread that asked last
  std::chrono::steady_clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(Device device) const override {
    if (!device.has_index()) return;
    TORCH_CHECK(device.index() < count, "there is no sim:", int(device.index()), ", only ", count);
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream stream(Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(kSim, device.has_index() ? device.index() : current_device), id);
  }
  c10::Stream getStream(Device device) const override {
    auto index = device.has_index() ? device.index() : current_device;
    return stream(device, current_streams[index]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    Locked guard;
    return stream(device, ++newest_stream);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(count); }
  bool queryStream(const c10::Stream& each) const override {
    synchronizeStream(each);
    return true;
  }
  void synchronizeStream(const c10::Stream& each) const override {
    Locked guard;
    host_waits_for_stream({each.device_index(), each.id()});
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    Locked guard;
    count_synchronization();
    for (auto& [each, moments] : streams)
      if (each.first == device) host_waits_for(moments);
    tell_violation();
  }
  void record(void** event, const c10::Stream& each, const DeviceIndex, const c10::EventFlag) const override {
    Locked guard;
    if (!*event) *event = new Event;
    StreamKey key{each.device_index(), each.id()};
    launch(key);
    *static_cast<Event*>(*event) = Event{streams[key], 0, 0, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& each) const override {
    if (!event) return;
    Locked guard;
    join(streams[{each.device_index(), each.id()}], static_cast<Event*>(event)->done);
  }
  // A device is kBehind operations behind the host. One that only asks, again and again, waits.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Locked guard;
    auto* own = static_cast<Event*>(event);
    if (own->moment != own_operations) own->asked = 0;
    own->moment = own_operations;
    bool waits = own->asked > kAsked;
    for (auto& [stream, moment] : own->done)
      if (!waits && !knows(host, stream, moment) && streams[stream][stream] < moment + kBehind) return ++own->asked, false;
    if (waits) count_synchronization();
    host_waits_for(own->done);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Locked guard;
    count_synchronization();
    host_waits_for(static_cast<Event*>(event)->done);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto passed = static_cast<Event*>(second)->at - static_cast<Event*>(first)->at;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator.recordStream(data, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto next = allocator.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(next.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(next));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return count > 0; }
  DeviceIndex deviceCount() const override { return DeviceIndex(count); }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({kSim, device}); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice({kSim, device}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return {kSim, current_device}; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

// --- tensors as the CPU's kernels see them -----------------------------------------------------------------------------

Tensor bare(c10::Storage storage, const Tensor& like, c10::DispatchKeySet keys) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  return tensor;
}

Tensor on_cpu(const Tensor& tensor) {  // the same memory, as a CPU tensor
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), Device(at::kCPU));
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(at::kCPU), true);
  auto result = bare(std::move(alias), tensor, c10::DispatchKeySet(c10::DispatchKey::CPU));
  result._set_conj(tensor.is_conj());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
  return result;
}

Tensor on_sim(c10::Storage storage, const Tensor& like) {
  return bare(std::move(storage), like, c10::DispatchKeySet{c10::DispatchKey::PrivateUse1, c10::DispatchKey::ADInplaceOrView,
                                                            c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::AutocastPrivateUse1});
}

Tensor adopt(const Tensor& made, DeviceIndex device) {  // a CPU tensor that a kernel has made, now the device's
  const auto& storage = made.storage();
  void* memory = storage.mutable_data();
  auto bytes = storage.nbytes();
  begin_block(memory, bytes, device);
  c10::DataPtr data(memory, new Adopted{made, memory, device}, &drop, Device(kSim, device));
  return on_sim(c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), &allocator, true), made);
}

bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

struct Aliases {
  std::unordered_map<c10::TensorImpl*, Tensor> tensors;    // CPU alias -> device tensor
  std::unordered_map<c10::StorageImpl*, Tensor> storages;  // CPU alias's storage -> device tensor
  std::optional<Device> device;
  std::optional<Device> foreign;  // of a tensor with axes that lies elsewhere
  std::vector<Tensor> kept;       // a kernel that returns one of its arguments drops the arguments first

  Tensor enter(const Tensor& tensor, bool may_be_elsewhere) {
    if (!tensor.defined()) return tensor;
    if (!is_sim(tensor)) {
      if (tensor.dim() > 0 && !may_be_elsewhere) foreign = tensor.device();
      return tensor;
    }
    if (device && *device != tensor.device()) foreign = tensor.device();
    if (!device) device = tensor.device();
    auto alias = on_cpu(tensor);
    tensors.emplace(alias.unsafeGetTensorImpl(), tensor);
    storages.emplace(alias.storage().unsafeGetStorageImpl(), tensor);
    kept.push_back(alias);
    return alias;
  }

  Tensor leave(const Tensor& tensor, DeviceIndex target) {
    if (!tensor.defined() || tensor.device().type() != at::kCPU) return tensor;
    if (auto found = tensors.find(tensor.unsafeGetTensorImpl()); found != tensors.end()) {
      auto* own = found->second.unsafeGetTensorImpl();
      if (own->sizes() != tensor.sizes() || own->strides() != tensor.strides()) own->set_sizes_and_strides(tensor.sizes(), tensor.strides());
      own->set_storage_offset(tensor.storage_offset());
      if (tensor.storage().data() != own->storage().data()) {  // the kernel has resized it
        auto fresh = adopt(tensor, target);
        auto* storage = own->storage().unsafeGetStorageImpl();
        storage->set_nbytes(fresh.storage().nbytes());
        storage->set_data_ptr_noswap(std::move(fresh.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      }
      return found->second;
    }
    if (auto found = storages.find(tensor.storage().unsafeGetStorageImpl()); found != storages.end())
      return on_sim(found->second.storage(), tensor);
    return adopt(tensor, target);
  }
};

// What CUDA's kernels refuse and the CPU's accept.
void refuse_as_cuda(const std::string& name, c10::ArrayRef<IValue> arguments) {
  if (name == "aten::native_batch_norm_backward") {  // it creates the gradients with the options of the weight
    auto mask = arguments[9].toBoolList();
    TORCH_CHECK(arguments[2].isTensor() || !(mask[1] || mask[2]), "tensor does not have a device (native_batch_norm_backward without a weight)");
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = op.operator_name().name;
  auto arguments = torch::jit::last(stack, schema.arguments().size());
  auto begin = stack->size() - schema.arguments().size();
  bool indexes = name.find("index") != std::string::npos;
  refuse_as_cuda(name, arguments);
  Aliases aliases;
  std::optional<Device> wanted;
  std::vector<std::pair<Tensor, bool>> touched;  // and whether it is written
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto& value = (*stack)[begin + i];
    const auto* info = schema.arguments()[i].alias_info();
    bool writes = info && info->isWrite();
    auto enter = [&](const Tensor& tensor) {
      if (is_sim(tensor)) touched.emplace_back(tensor, writes);
      return aliases.enter(tensor, indexes && i > 0);
    };
    if (value.isTensor()) {
      value = enter(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> entered;
      for (const Tensor& each : value.toTensorVector()) entered.push_back(enter(each));
      value = IValue(c10::List<Tensor>(entered));
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> entered;
      for (std::optional<Tensor> each : value.toOptionalTensorVector())
        entered.push_back(each ? std::optional<Tensor>(enter(*each)) : std::nullopt);
      value = IValue(entered);
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      wanted = value.toDevice();
      value = IValue(Device(at::kCPU));
    }
  }
  TORCH_CHECK(!aliases.device || !aliases.foreign, "Expected all tensors to be on the same device, but found at least two devices, ",
              *aliases.device, " and ", *aliases.foreign, "! (", name, ")");
  auto device = wanted && wanted->has_index() ? wanted->index() : aliases.device ? aliases.device->index() : current_device;
  auto stream = stream_of(device);
  uint64_t moment = 0;
  bool tells = false;  // numbers leave the device: the host waits
  for (const auto& returned : schema.returns())
    tells = tells || !(returned.type()->isSubtypeOf(*c10::TensorType::get()) || returned.type()->isSubtypeOf(*c10::ListType::ofTensors()));
  tells = tells || name == "aten::nonzero" || name == "aten::masked_select" || name == "aten::_unique2";
  static const std::set<std::string> views{"aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::detach", "aten::alias"};
  {
    Locked guard;
    moment = launch(stream);
    if (!views.count(name) && !touched.empty()) ++launches;  // a tensor that is only allocated launches nothing
    if (!views.count(name))
      for (const auto& [tensor, writes] : touched) used(stream, moment, tensor.storage().mutable_data(), writes);
    if (tells && !touched.empty()) host_waits_for_stream(stream);
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  auto returned = stack->size() - schema.returns().size();
  for (size_t i = returned; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    auto leave = [&](const Tensor& tensor) {
      auto result = aliases.leave(tensor, device);
      if (is_sim(result) && !views.count(name)) {
        Locked guard;
        auto found = blocks.find(result.storage().mutable_data());
        if (found != blocks.end() && found->second.written == 0) {
          found->second.writer = stream;
          found->second.written = moment;
        }
      }
      return result;
    };
    if (value.isTensor()) {
      value = leave(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> left;
      for (const Tensor& each : value.toTensorVector()) left.push_back(leave(each));
      value = IValue(c10::List<Tensor>(left));
    }
  }
}

// --- operations of their own --------------------------------------------------------------------------------------------

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto same = [](const Tensor& tensor) { return bare(c10::Storage(tensor.storage()), tensor, c10::DispatchKeySet(c10::DispatchKey::CPU)); };
  auto source = is_sim(from) ? on_cpu(from) : same(from), target = is_sim(to) ? on_cpu(to) : same(to);
  const bool within = is_sim(from) && is_sim(to);
  const bool waits = !within && !(non_blocking && is_pinned((is_sim(from) ? to : from).storage().data()));
  auto stream = stream_of(is_sim(from) ? from.device().index() : to.device().index());
  auto now = !within && !waits ? at::empty_like(source).copy_(source) : Tensor();
  uint64_t moment = 0;
  {
    Locked guard;
    moment = launch(stream);
    ++launches;
    if (!within) ++(is_sim(from) ? copies_to_host : copies_to_device);
    if (is_sim(from)) used(stream, moment, from.storage().mutable_data(), false);
    if (is_sim(to)) used(stream, moment, to.storage().mutable_data(), true);
    if (waits) host_waits_for_stream(stream);
  }
  if (waits || within) {
    target.copy_(source);
    return to;
  }
  std::function<void()> complete;
  if (is_sim(from)) {  // arrives when the host waits
    if (target.is_contiguous()) std::memset(target.mutable_data_ptr(), 0xff, target.nbytes());
    complete = [target, now]() mutable {
      at::AutoDispatchBelowADInplaceOrView inner;
      target.copy_(now);
    };
  } else {
    target.copy_(source);
    complete = [source, now]() {
      at::AutoDispatchBelowADInplaceOrView inner;
      if (std::memcmp(source.contiguous().const_data_ptr(), now.contiguous().const_data_ptr(), source.nbytes()) != 0)
        violation = "pinned memory was changed before a copy from it was done: wait for an event behind the copy";
    };
  }
  {
    Locked guard;
    later.push_back({stream, moment, std::move(complete)});
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  auto wanted = (size_t(c10::multiply_integers(sizes)) + impl->storage_offset()) * self.element_size();
  if (wanted > self.storage().nbytes()) {
    auto next = allocator.allocate(wanted);
    std::memcpy(next.get(), self.storage().data(), self.storage().nbytes());
    self.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(next));
    self.storage().unsafeGetStorageImpl()->set_nbytes(wanted);
  }
  impl->set_sizes_contiguous(sizes);
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) { allocator.recordStream(self.storage().data_ptr(), stream); }

template <typename F>
auto computed(std::initializer_list<Tensor> inputs, F call) {
  Aliases aliases;
  std::vector<Tensor> entered;
  for (const auto& each : inputs) entered.push_back(aliases.enter(each, false));
  TORCH_CHECK(!aliases.foreign, "Expected all tensors to be on the same device, but found at least two devices, ", *aliases.device, " and ",
              *aliases.foreign, "!");
  auto device = aliases.device->index();
  auto stream = stream_of(device);
  uint64_t moment = 0;
  {
    Locked guard;
    moment = launch(stream);
    ++launches;
    for (const auto& each : inputs)
      if (is_sim(each)) used(stream, moment, each.storage().mutable_data(), false);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  std::vector<Tensor> outputs = call(entered);
  for (auto& each : outputs)
    if (each.defined()) {
      each = adopt(each, device);
      Locked guard;
      auto found = blocks.find(each.storage().mutable_data());
      if (found != blocks.end()) found->second.writer = stream, found->second.written = moment;
    }
  return outputs;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
                   c10::SymInt groups) {
  return computed({input, weight, bias.value_or(Tensor())}, [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    auto b = in[2].defined() ? std::optional<Tensor>(in[2]) : std::nullopt;
    return {at::convolution_symint(in[0], in[1], b, stride, padding, dilation, transposed, output_padding, groups)};
  })[0];
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  auto found = computed({gradient, input, weight}, [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    std::vector<c10::SymInt> sizes{weight.sym_size(transposed ? 1 : 0) * (transposed ? groups : c10::SymInt(1))};
    auto [a, b, c] = at::convolution_backward_symint(in[0], in[1], in[2], c10::SymIntArrayRef(sizes), stride, padding, dilation, transposed,
                                                     output_padding, groups, mask);
    return {a, b, c};
  });
  return {found[0], found[1], found[2]};
}

// The kernels of SyncBatchNorm, which the CPU does not have, by their formulas.

Tensor along(const Tensor& v_C, const Tensor& x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[1] = -1;
  return v_C.view(shape);
}

std::tuple<Tensor, Tensor> gather_stats(const Tensor& x, const Tensor& mean, const Tensor& inverse, const std::optional<Tensor>& running_mean,
                                        const std::optional<Tensor>& running_var, double momentum, double eps, const Tensor& counts) {
  auto found = computed({x, mean, inverse, running_mean.value_or(Tensor()), running_var.value_or(Tensor()), counts},
                        [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    auto n = in[5].unsqueeze(1), total = in[5].sum();
    auto whole = (in[1] * n).sum(0) / total;
    auto variance = ((in[2].pow(-2) - eps + (in[1] - whole).square()) * n).sum(0) / total;
    if (in[3].defined()) in[3].mul_(1 - momentum).add_(whole, momentum);
    if (in[4].defined()) in[4].mul_(1 - momentum).add_(variance * total / (total - 1), momentum);
    return {whole, (variance + eps).rsqrt()};
  });
  return {found[0], found[1]};
}

Tensor norm_elemt(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, const Tensor& mean,
                  const Tensor& inverse, double) {
  return computed({x, weight.value_or(Tensor()), bias.value_or(Tensor()), mean, inverse}, [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    auto y = (in[0] - along(in[3], in[0])) * along(in[4], in[0]);
    if (in[1].defined()) y = y * along(in[1], in[0]);
    if (in[2].defined()) y = y + along(in[2], in[0]);
    return {y.to(in[0].dtype())};
  })[0];
}

Tensor norm_backward_elemt(const Tensor& g, const Tensor& x, const Tensor& mean, const Tensor& inverse, const std::optional<Tensor>& weight,
                           const Tensor& sum_g, const Tensor& sum_g_x, const Tensor& counts) {
  TORCH_CHECK(counts.scalar_type() == at::kInt, "expected scalar type Int but found ", counts.scalar_type());
  return computed({g, x, mean, inverse, weight.value_or(Tensor()), sum_g, sum_g_x, counts}, [&](const std::vector<Tensor>& in) -> std::vector<Tensor> {
    auto total = in[7].sum().to(in[2].dtype());
    auto mean_g = in[5] / total, slope = in[6] / total * in[3].square(), scale = in[4].defined() ? in[3] * in[4] : in[3];
    auto y = (in[0] - along(mean_g, in[0]) - (in[1] - along(in[2], in[0])) * along(slope, in[0])) * along(scale, in[0]);
    return {y.to(in[1].dtype())};
  })[0];
}

int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // by matrix products and softmax
}

void set_up(int64_t devices, int64_t bytes) {
  Locked guard;
  TORCH_CHECK(0 <= devices && devices <= kMost, "from 0 to ", kMost, " devices");
  count = int(devices);
  violation.clear();
  for (auto& each : memory_bytes) each = size_t(bytes);
  for (int i = 0; i < kMost; ++i) peak_bytes[i] = used_bytes[i];
  if (current_device >= count) current_device = 0;
}

}  // namespace

TORCH_LIBRARY(sim, m) {
  m.def("register_hooks", [] {
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::SetAllocator(kSim, &allocator);
  });
  m.def("set_up", &set_up);
  m.def("synchronizations", [] { return synchronizations; });
  m.def("let_wait", [](bool may) { may_wait = may; });
  m.def("own_synchronizations", [] { return own_synchronizations; });
  m.def("operations", [] { return operations; });
  m.def("launches", [] { return launches; });
  m.def("copies", [](bool to_host) { return to_host ? copies_to_host : copies_to_device; });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_fused_sdp_choice", &attention_choice);
  m.impl("batch_norm_gather_stats_with_counts", &gather_stats);
  m.impl("batch_norm_elemt", &norm_elemt);
  m.impl("batch_norm_backward_elemt", &norm_backward_elemt);
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
}
