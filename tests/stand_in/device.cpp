/* A device "cuda" for a CPU build of torch whose memory is the host's and whose kernels are the CPU's.

   Tensors are of device cuda:N and dispatch as such: every operator without a kernel for CUDA, which in such a build is
   nearly every one, comes to on_host(), which gives the CPU's kernel the same memory under another name.  So the
   arithmetic is real, a tensor on the wrong device is refused, and each byte is accounted to its GPU.  Loaded before
   torch is imported: torch asks once whether there is a GPU.  cuda.py is the other half; it calls the C functions. */
#include "gpus.h"
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/library.h>
#include <functional>
#include <mutex>
#include <unistd.h>
#include <unordered_set>

namespace {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::kCUDA;

constexpr int MAX_GPUS = 16;
constexpr int64_t SEGMENT = 2 << 20, ROUND = 512; /* as torch's caching allocator */

/* ---- the GPUs: what is allocated on each, and whether it still answers */

struct Gpu { int64_t total = 80ll << 30, others = 0, allocated = 0, reserved = 0, peak_allocated = 0, peak_reserved = 0, allocs = 0, retries = 0, ooms = 0; };
Gpu gpus[MAX_GPUS];
std::mutex mutex;
int num_gpus = 0;
thread_local DeviceIndex current = 0;
int line_of[MAX_GPUS]; /* of the file, by CUDA's number */
void (*on_memory)(int device, int is_alloc, void *address, int64_t size) = nullptr;    /* while a history is recorded */
void (*on_oom)(int device, int64_t size, int64_t total, int64_t free) = nullptr;

gpu_line line(int device) {
    static std::mutex reading;
    std::lock_guard<std::mutex> lock(reading);
    read_gpus();
    return gpu_lines[line_of[device]];
}
void check(int device) { /* ECC: cudaErrorECCUncorrectable; a GPU that is off the bus is most often a launch failure */
    gpu_line now = line(device < 0 ? current : device);
    for (; now.hang; now = line(device < 0 ? current : device)) usleep(20000);
    int code = now.ecc_uncorrected ? 214 : now.lost ? 719 : now.cuda_error;
    if (!code) return;
    const char *what = code == 214 ? "uncorrectable ECC error encountered" : code == 719 ? "unspecified launch failure" : code == 700 ? "an illegal memory access was encountered" : "unknown error";
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, std::string("CUDA error: ") + what + "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n");
}
std::string gib(int64_t bytes) {
    char text[40];
    if (bytes < 1 << 30) snprintf(text, sizeof text, "%.2f MiB", bytes / 1048576.0);
    else snprintf(text, sizeof text, "%.2f GiB", bytes / 1073741824.0);
    return text;
}
void take(int device, int64_t size) {
    check(device);
    int64_t rounded = (size + ROUND - 1) / ROUND * ROUND;
    std::unique_lock<std::mutex> lock(mutex);
    Gpu &gpu = gpus[device];
    int64_t segments = (gpu.allocated + rounded + SEGMENT - 1) / SEGMENT * SEGMENT;
    if (segments > gpu.reserved && segments > gpu.total - gpu.others) {
        gpu.retries++, gpu.ooms++;
        int64_t free = gpu.total - gpu.others - gpu.reserved, allocated = gpu.allocated, reserved = gpu.reserved;
        lock.unlock();
        if (on_oom) on_oom(device, size, gpu.total, free);
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", gib(size), ". GPU ", device, " has a total capacity of ", gib(gpu.total), " of which ", gib(free), " is free. Including non-PyTorch memory, this process has ", gib(reserved), " memory in use. Of the allocated memory ", gib(allocated), " is allocated by PyTorch, and ", gib(reserved - allocated), " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)");
    }
    gpu.allocated += rounded, gpu.allocs++;
    gpu.reserved = std::max(gpu.reserved, segments);
    gpu.peak_allocated = std::max(gpu.peak_allocated, gpu.allocated);
    gpu.peak_reserved = std::max(gpu.peak_reserved, gpu.reserved);
}
void give(int device, void *address, int64_t size) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        gpus[device].allocated -= (size + ROUND - 1) / ROUND * ROUND;
    }
    if (on_memory) on_memory(device, 0, address, size);
}

struct Held { c10::DataPtr host; int device; int64_t size; };
void release(void *context) {
    Held *held = static_cast<Held *>(context);
    give(held->device, held->host.get(), held->size);
    delete held;
}
c10::DataPtr on_gpu(int device, int64_t size, const std::function<c10::DataPtr()> &host) {
    if (!size) return {nullptr, Device(kCUDA, device)};
    take(device, size);
    Held *held = new Held{host(), device, size};
    if (on_memory) on_memory(device, 1, held->host.get(), size);
    return {held->host.get(), held, release, Device(kCUDA, device)};
}
struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override { return on_gpu(current, size, [&] { return at::getCPUAllocator()->allocate(size); }); }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void *to, const void *from, size_t size) const override { memcpy(to, from, size); }
} memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kCUDA; }
    Device exchangeDevice(Device device) const override { Device was(kCUDA, current); if (device.index() >= 0) current = device.index(); return was; }
    Device getDevice() const override { return Device(kCUDA, current); }
    void setDevice(Device device) const override { if (device.index() >= 0) current = device.index(); }
    void uncheckedSetDevice(Device device) const noexcept override { if (device.index() >= 0) current = device.index(); }
    c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device.index() < 0 ? getDevice() : device); }
    c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
    DeviceIndex deviceCount() const noexcept override { return num_gpus; }
    void record(void **, const c10::Stream &, const DeviceIndex, const c10::EventFlag) const override {}
    void block(void *, const c10::Stream &) const override {}
    bool queryEvent(void *) const override { return true; }
    bool queryStream(const c10::Stream &) const override { return true; }
    void synchronizeStream(const c10::Stream &stream) const override { check(stream.device_index()); }
    void synchronizeEvent(void *) const override {}
    void synchronizeDevice(const DeviceIndex device) const override { check(device); }
};
struct CUDAHooks : at::CUDAHooksInterface { /* the name is the registry's key */
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return num_gpus > 0; }
    bool hasCUDA() const override { return num_gpus > 0; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return num_gpus; }
    DeviceIndex current_device() const override { return current; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex device) const override { current = device; }
    DeviceIndex exchangeDevice(DeviceIndex device) const override { auto was = current; if (device >= 0) current = device; return was; }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
    int getNumGPUs() const override { return num_gpus; }
    void deviceSynchronize(DeviceIndex device) const override { check(device); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
    const at::Generator &getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
    at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
    std::string showConfig() const override { return "  - CUDA Runtime 13.0 (a stand-in)\n"; }
    long versionRuntimeCuDNN() const override { return 0; }
    bool isPinnedPtr(const void *) const override { return false; }
};

/* ---- every operator: the CPU's kernel on the same memory */

Tensor tensor_of(c10::Storage storage, const Tensor &like, c10::DispatchKey key) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    auto *impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sym_sizes(), like.sym_strides(), like.sym_storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
}
c10::Storage storage_of(size_t size, c10::DataPtr data, c10::Allocator *allocator) {
    return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size, std::move(data), allocator, true));
}

c10::DataPtr kept(const c10::Storage &storage) {
    auto *keep = new c10::Storage(storage);
    return {const_cast<void *>(storage.data()), keep, [](void *kept) { delete static_cast<c10::Storage *>(kept); }, c10::kCPU};
}

class Names { /* of one call: GPU tensors and what the CPU knows them as */
  public:
    std::optional<Device> device;
    bool mixed = false; /* a CPU tensor with dimensions beside one of the GPU */

    Tensor to_host(const Tensor &tensor) {
        if (!tensor.defined()) return tensor;
        if (!tensor.is_cuda()) {
            others.push_back(tensor);
            mixed |= tensor.is_cpu() && tensor.dim() > 0;
            return tensor;
        }
        if (!device) device = tensor.device();
        TORCH_CHECK(*device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", tensor.device(), "!");
        for (auto &pair : tensors)
            if (pair.first.is_same(tensor)) return pair.second;
        tensors.emplace_back(tensor, tensor_of(to_host(tensor.storage()), tensor, c10::DispatchKey::CPU));
        return tensors.back().second;
    }
    c10::Storage to_host(const c10::Storage &storage) {
        for (auto &pair : storages)
            if (pair.first.is_alias_of(storage)) return pair.second;
        storages.emplace_back(storage, storage_of(storage.nbytes(), kept(storage), at::getCPUAllocator()));
        return storages.back().second;
    }
    Tensor to_gpu(const Tensor &tensor) {
        if (!tensor.defined() || !tensor.is_cpu()) return tensor;
        for (auto &pair : tensors)
            if (pair.second.is_same(tensor)) return pair.first;
        for (auto &other : others)
            if (other.is_same(tensor)) return tensor;
        return tensor_of(to_gpu(tensor.storage()), tensor, c10::DispatchKey::CUDA);
    }
    c10::Storage to_gpu(const c10::Storage &storage) {
        for (auto &pair : storages)
            if (pair.second.is_alias_of(storage)) return pair.first;
        c10::DataPtr data = on_gpu(device ? device->index() : current, storage.nbytes(), [&] { return kept(storage); });
        storages.emplace_back(storage_of(storage.nbytes(), std::move(data), &memory), storage);
        return storages.back().first;
    }
    void settle() { /* what the CPU's kernel resized, transposed or set */
        for (size_t num = 0; num < storages.size(); num++) {
            auto &[gpu, host] = storages[num];
            if (gpu.data() == host.data()) continue;
            gpu.set_data_ptr_noswap(on_gpu(gpu.device().index(), host.nbytes(), [&] { return kept(host); }));
            gpu.set_nbytes(host.nbytes());
        }
        for (auto &[gpu, host] : tensors) {
            auto *impl = gpu.unsafeGetTensorImpl();
            auto storage = to_gpu(host.storage());
            if (!storage.is_alias_of(gpu.storage())) impl->set_storage_keep_dtype(storage);
            if (gpu.sizes() != host.sizes() || gpu.strides() != host.strides() || gpu.storage_offset() != host.storage_offset())
                impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
        }
    }

  private:
    std::vector<std::pair<Tensor, Tensor>> tensors;
    std::vector<std::pair<c10::Storage, c10::Storage>> storages;
    std::vector<Tensor> others;
};

const std::unordered_set<std::string> MIXES = {"aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::set_", "aten::_foreach_copy_"};
bool may_mix(const std::string &name) { return MIXES.count(name) || name.find("index") != std::string::npos; }

/* What would keep a CPU for minutes, the sizes of doctor and passport, is not computed: the output is as it was. */
constexpr int64_t MOST_BYTES = 64 << 20, MOST_FLOP = 1ll << 31;
bool too_large(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    const auto &schema = op.schema();
    const std::string &name = schema.name();
    const size_t begin = stack->size() - schema.arguments().size();
    int64_t bytes = 0, flop = 0;
    std::vector<IValue> written;
    for (size_t at = begin; at < stack->size(); at++) {
        const IValue &value = (*stack)[at];
        if (!value.isTensor() || !value.toTensor().defined()) continue;
        const auto *alias = schema.arguments()[at - begin].alias_info();
        if (alias && alias->isWrite()) written.push_back(value);
        bytes = std::max<int64_t>(bytes, value.toTensor().numel() * value.toTensor().element_size());
    }
    bool is_product = name == "aten::mm" || name == "aten::_scaled_mm";
    if (is_product) flop = 2 * (*stack)[begin].toTensor().numel() * (*stack)[begin + 1].toTensor().size(1);
    if (bytes <= MOST_BYTES && flop <= MOST_FLOP) return false;
    if (written.empty() && is_product) {
        Tensor left = (*stack)[begin].toTensor();
        written.push_back(at::empty({left.size(0), (*stack)[begin + 1].toTensor().size(1)}, left.options().dtype(name == "aten::mm" ? left.scalar_type() : at::kBFloat16)));
    }
    if (written.empty() || written.size() != schema.returns().size()) return false;
    torch::jit::drop(*stack, schema.arguments().size());
    for (IValue &value : written) stack->push_back(value);
    return true;
}

void on_host(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    const auto &schema = op.schema();
    const size_t num_args = schema.arguments().size(), begin = stack->size() - num_args;
    if (too_large(op, stack)) return;
    Names names;
    for (size_t at = begin; at < stack->size(); at++) {
        IValue &value = (*stack)[at];
        if (value.isTensor()) value = names.to_host(value.toTensor());
        else if (value.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor &tensor : value.toTensorVector()) list.push_back(names.to_host(tensor));
            value = std::move(list);
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> list;
            for (const std::optional<Tensor> &tensor : value.toOptionalTensorVector()) list.push_back(tensor ? std::optional<Tensor>(names.to_host(*tensor)) : std::nullopt);
            value = std::move(list);
        } else if (value.isStorage() && value.toStorage().device_type() == kCUDA) value = names.to_host(value.toStorage());
        else if (value.isDevice() && value.toDevice().is_cuda()) {
            if (!names.device && value.toDevice().has_index()) names.device = value.toDevice();
            value = Device(c10::kCPU);
        } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) value = IValue();
    }
    TORCH_CHECK(!(names.mixed && names.device) || may_mix(schema.name()), "Expected all tensors to be on the same device, but found at least two devices, ", *names.device, " and cpu! (", schema.name(), ")");
    if (names.device) check(names.device->index());
    {
        at::AutoDispatchBelowADInplaceOrView below;
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    names.settle();
    for (size_t at = stack->size() - schema.returns().size(); at < stack->size(); at++) {
        IValue &value = (*stack)[at];
        if (value.isTensor()) value = names.to_gpu(value.toTensor());
        else if (value.isTensorList()) {
            c10::List<Tensor> list;
            for (const Tensor &tensor : value.toTensorVector()) list.push_back(names.to_gpu(tensor));
            value = std::move(list);
        }
    }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
    c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}

/* ---- NCCL: gloo on the same memory.  A mean is a sum of parts, so rounding may differ from NCCL's in the last bit. */

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using Op = c10::intrusive_ptr<c10d::ReduceOp>;
using Done = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

void end_if_late(const char *what) { /* as the watchdog of NCCL ends a process */
    if (!strstr(what, "Timed out")) return;
    fprintf(stderr, "[E ProcessGroupNCCL.cpp:688] Watchdog caught collective operation timeout: %s\nterminate called after throwing an instance of 'c10::DistBackendError'\n", what);
    abort();
}
template <typename Call> auto as_nccl(int device, Call call) {
    check(device);
    try {
        if (line(device).nccl_error) throw std::runtime_error("socketProgress: Connection closed by remote peer");
        return call();
    } catch (const std::exception &inner) {
        end_if_late(inner.what());
        check(device);
        throw c10::DistBackendError({__func__, __FILE__, __LINE__}, std::string("NCCL error in: stand-in, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29.0\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast error:\n") + inner.what());
    }
}
struct Collective final : c10d::Work { /* outputs are the GPU's; what fails while it is waited for is NCCL's error */
    Collective(Done inner, Tensors outputs, int device) : inner(std::move(inner)), outputs(std::move(outputs)), device(device) {}
    bool isCompleted() override { return inner->isCompleted(); }
    bool isSuccess() const override { return inner->isSuccess(); }
    std::exception_ptr exception() const override { return inner->exception(); }
    bool wait(std::chrono::milliseconds timeout) override { return as_nccl(device, [&] { return inner->wait(timeout); }); }
    void synchronize() override { wait(kNoTimeout); }
    std::vector<Tensor> result() override { return outputs; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
        auto waited = inner->getFuture();
        waited->addCallback([made, outputs = outputs](c10::ivalue::Future &future) {
            if (future.hasError()) end_if_late(future.tryRetrieveErrorMessage().c_str()), made->setError(future.exception_ptr());
            else made->markCompleted(IValue(outputs));
        });
        return made;
    }
    Done inner;
    Tensors outputs;
    int device;
};
Tensors hosts(at::TensorList tensors) { /* each keeps the GPU's storage alive while gloo works on it */
    Tensors made;
    Names names;
    for (const Tensor &tensor : tensors) made.push_back(names.to_host(tensor));
    return made;
}
c10::intrusive_ptr<c10d::Backend> gloo(const Group &group) { return group->getBackend(kCUDA); }
c10d::ReduceOp plain(const Op &op, const Group &group, const Tensors &hosts) {
    if (op->op_ != c10d::ReduceOp::AVG) return *op;
    for (Tensor host : hosts) host.div_(group->getSize());
    return c10d::ReduceOp::SUM;
}
template <typename Call> Done began(const Tensors &outputs, const Tensor &any, Call call) {
    int device = any.device().index();
    return c10::make_intrusive<Collective>(as_nccl(device, [&] { at::AutoDispatchBelowADInplaceOrView below; return call(); }), outputs, device);
}
std::chrono::milliseconds ms(int64_t timeout) { return std::chrono::milliseconds(timeout); }

std::tuple<Tensors, Done> allreduce(at::TensorList tensors, const Group &group, const Op &op, const std::optional<Tensor> &, bool is_async, int64_t timeout) {
    Tensors outputs = tensors.vec(), aliases = hosts(tensors);
    return {outputs, began(outputs, outputs[0], [&] { c10d::AllreduceOptions options; options.reduceOp = plain(op, group, aliases); options.timeout = ms(timeout); options.asyncOp = is_async; return gloo(group)->allreduce(aliases, options); })};
}
Done allreduce_coalesced(at::TensorList tensors, const Group &group, const Op &op, bool is_async, int64_t timeout) {
    Tensors outputs = tensors.vec(), aliases = hosts(tensors);
    return began(outputs, outputs[0], [&] { c10d::AllreduceCoalescedOptions options; options.reduceOp = plain(op, group, aliases); options.timeout = ms(timeout); return gloo(group)->allreduce_coalesced(aliases, options); });
}
std::tuple<Tensors, Done> broadcast(at::TensorList tensors, const Group &group, int64_t root, int64_t root_tensor, bool is_async, int64_t timeout) {
    Tensors outputs = tensors.vec(), aliases = hosts(tensors);
    return {outputs, began(outputs, outputs[0], [&] { c10d::BroadcastOptions options; options.rootRank = root; options.rootTensor = root_tensor; options.timeout = ms(timeout); options.asyncOp = is_async; return gloo(group)->broadcast(aliases, options); })};
}
std::tuple<Tensor, Done> allgather_base(Tensor &output, Tensor &input, const Group &group, bool is_async, int64_t timeout) {
    Tensors aliases = hosts({output, input});
    return {output, began({output}, output, [&] { c10d::AllgatherOptions options; options.timeout = ms(timeout); options.asyncOp = is_async; return gloo(group)->_allgather_base(aliases[0], aliases[1], options); })};
}
std::tuple<std::vector<Tensors>, Done> allgather(const std::vector<Tensors> &outputs, at::TensorList inputs, const Group &group, bool is_async, int64_t timeout) {
    std::vector<Tensors> aliases{hosts(outputs[0])};
    Tensors given = hosts(inputs);
    return {outputs, began(outputs[0], inputs[0], [&] { c10d::AllgatherOptions options; options.timeout = ms(timeout); options.asyncOp = is_async; return gloo(group)->allgather(aliases, given, options); })};
}
std::tuple<Tensor, Done> reduce_scatter_base(Tensor &output, Tensor &input, const Group &group, const Op &op, bool is_async, int64_t timeout) {
    Tensors aliases = hosts({output, input}); /* NCCL leaves the input as it is, gloo's mean would not */
    if (op->op_ == c10d::ReduceOp::AVG) aliases[1] = aliases[1].clone();
    return {output, began({output}, output, [&] { c10d::ReduceScatterOptions options; options.reduceOp = plain(op, group, {aliases[1]}); options.timeout = ms(timeout); options.asyncOp = is_async; return gloo(group)->_reduce_scatter_base(aliases[0], aliases[1], options); })};
}
Done barrier(Tensor tensor, const Group &group, const std::vector<int64_t> &, bool is_async, int64_t timeout) {
    return began({}, tensor, [&] { c10d::BarrierOptions options; options.timeout = ms(timeout); return gloo(group)->barrier(options); });
}
struct Stopwatch final : c10d::Timer { /* DistributedDataParallel's, of a CUDA module */
    explicit Stopwatch(Device) {}
    std::optional<int64_t> measureDifference(Event start, Event end) override { return getTimeRef(end) - getTimeRef(start); }
};
using torch::profiler::impl::ProfilerVoidEventStub;
struct Stubs final : torch::profiler::impl::ProfilerStubs { /* the profiler's events; a trace has no kernels */
    void record(DeviceIndex *device, ProfilerVoidEventStub *event, int64_t *cpu_ns) const override {
        if (device) *device = current;
        if (cpu_ns) *cpu_ns = c10::getTime();
        *event = std::make_shared<int64_t>(c10::getTime());
    }
    float elapsed(const ProfilerVoidEventStub *start, const ProfilerVoidEventStub *end) const override { return (*static_cast<int64_t *>(end->get()) - *static_cast<int64_t *>(start->get())) / 1e3f; }
    void mark(const char *) const override {}
    void rangePush(const char *) const override {}
    void rangePop() const override {}
    bool enabled() const override { return true; }
    void onEachDevice(std::function<void(int)> call) const override { for (int num = 0; num < num_gpus; num++) call(num); }
    void synchronize() const override {}
} stubs;
} // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at { REGISTER_CUDA_HOOKS(CUDAHooks) }
namespace c10d { C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Stopwatch) }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    for (const char *name : {"copy_", "resize_", "set_.source_Storage_storage_offset"}) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
}
struct Quiet : c10::WarningHandler { /* while a kernel of c10d is replaced, which torch warns of */
    Quiet() { c10::WarningUtils::set_warning_handler(this); }
    void process(const c10::Warning &) override {}
} quiet;
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
    library.impl("allreduce_", allreduce);
    library.impl("allreduce_coalesced_", allreduce_coalesced);
    library.impl("broadcast_", broadcast);
    library.impl("_allgather_base_", allgather_base);
    library.impl("allgather_", allgather);
    library.impl("_reduce_scatter_base_", reduce_scatter_base);
    library.impl("barrier", barrier);
}
struct Loud { Loud() { c10::WarningUtils::set_warning_handler(nullptr); } } loud;

extern "C" {
void stand_in_begin(int number, const int *lines, void (*oom)(int, int64_t, int64_t, int64_t)) {
    num_gpus = number, on_oom = oom;
    for (int num = 0; num < number; num++) {
        line_of[num] = lines[num];
        gpu_line now = line(num);
        gpus[num].total = now.memory_mib << 20, gpus[num].others = now.others_mib << 20;
    }
    c10::SetAllocator(kCUDA, &memory, 1);
    torch::profiler::impl::registerCUDAMethods(&stubs);
}
int stand_in_device(void) { return current; }
void stand_in_set_device(int device) { current = device; }
void stand_in_check(int device) { check(device); }
void stand_in_stats(int device, int64_t *out) { std::lock_guard<std::mutex> lock(mutex); memcpy(out, &gpus[device], sizeof(Gpu)); }
void stand_in_reset_peaks(int device) { std::lock_guard<std::mutex> lock(mutex); gpus[device].peak_allocated = gpus[device].allocated, gpus[device].peak_reserved = gpus[device].reserved; }
void stand_in_empty_cache(int device) { std::lock_guard<std::mutex> lock(mutex); gpus[device].reserved = (gpus[device].allocated + SEGMENT - 1) / SEGMENT * SEGMENT; }
void stand_in_history(void (*callback)(int, int, void *, int64_t)) { on_memory = callback; }
}
