// cuModule* and cuLaunchKernel. A module is PTX or an ELF file, read only for the names of its kernels. A launch runs
// the host kernel (host_kernel.h) of that name, which must exist.
#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include "abort.h"
#include "counters.h"
#include "launch_check.h"
#include "slices.h"
#include "stream.h"

using namespace fake;

namespace {

struct Function {
  Context* context;
  const HostKernel* kernel;
};

struct Module {
  Context* context;
  std::string image;
  std::mutex mutex;
  // By name; guarded by `mutex`.
  std::map<std::string, CUfunction> functions;
};

Handles<Module, CUmodule>& modules() { return never_destroyed<Handles<Module, CUmodule>>(); }
Handles<Function, CUfunction>& functions() { return never_destroyed<Handles<Function, CUfunction>>(); }

std::size_t skip_space(const std::string& text, std::size_t at) {
  while (at < text.size() && std::isspace(static_cast<unsigned char>(text[at]))) ++at;
  return at;
}

// Whether the PTX contains ".entry NAME(", with any white space.
bool has_entry(const std::string& ptx, const std::string& name) {
  const std::string directive = ".entry";
  for (std::size_t at = ptx.find(directive); at != std::string::npos; at = ptx.find(directive, at + 1)) {
    const std::size_t start = skip_space(ptx, at + directive.size());
    if (ptx.compare(start, name.size(), name) != 0) continue;
    const std::size_t end = skip_space(ptx, start + name.size());
    if (end < ptx.size() && ptx[end] == '(') return true;
  }
  return false;
}

// The header of an ELF file.
struct ElfHeader {
  unsigned char identity[16];
  std::uint16_t type, machine;
  std::uint32_t version;
  std::uint64_t entry, segments, sections;
  std::uint32_t flags;
  std::uint16_t header_bytes, segment_bytes, number_of_segments, section_bytes, number_of_sections, names;
};
static_assert(sizeof(ElfHeader) == 64);
constexpr std::uint16_t kElfMachineOfCuda = 190;
// From this ABI version on, the compute capability is the second byte of the flags; before, the first.
constexpr unsigned char kLaterElf = 0x41;

bool is_elf(const char* image) {
  return std::memcmp(image,
                     "\x7f"
                     "ELF",
                     4) == 0;
}

ElfHeader elf_header(const char* image) {
  ElfHeader header;
  std::memcpy(&header, image, sizeof header);
  return header;
}

std::size_t bytes_of(const ElfHeader& header) {
  return std::max(header.sections + std::size_t{header.section_bytes} * header.number_of_sections,
                  header.segments + std::size_t{header.segment_bytes} * header.number_of_segments);
}

// Machine code runs on GPUs with the same major compute capability and the same or a later minor one.
bool runs_here(const ElfHeader& header) {
  const int made_for = (header.identity[7] >= kLaterElf ? header.flags >> 8 : header.flags) & 0xff;
  return made_for / 10 == capability() / 10 && made_for <= capability();
}

bool has_kernel(const std::string& image, const std::string& name) {
  if (!is_elf(image.c_str())) return has_entry(image, name);
  const std::string section = std::string(1, '\0') + ".text." + name + '\0';
  return image.find(section) != std::string::npos;
}

bool sane(Index size, unsigned max_y_and_z) {
  return size.x > 0 && size.y > 0 && size.z > 0 && size.y <= max_y_and_z && size.z <= max_y_and_z;
}

}  // namespace

FAKE_API CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (handle == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  wait_if_calls_block(*context);
  const auto module = std::make_shared<Module>();
  module->context = context;
  const char* start = static_cast<const char*>(image);
  if (is_elf(start)) {
    const ElfHeader header = elf_header(start);
    if (header.machine != kElfMachineOfCuda) return CUDA_ERROR_INVALID_IMAGE;
    if (!runs_here(header)) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    module->image.assign(start, bytes_of(header));
  } else {
    module->image = start;
    if (module->image.find(".entry") == std::string::npos) return CUDA_ERROR_INVALID_IMAGE;
  }
  *handle = modules().add(module);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuModuleLoadDataEx(CUmodule* handle, const void* image, unsigned, int*, void**) {
  return cuModuleLoadData(handle, image);
}

FAKE_API CUresult cuModuleGetFunction(CUfunction* handle, CUmodule module_handle, const char* name) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  if (handle == nullptr || name == nullptr || *name == '\0') return CUDA_ERROR_INVALID_VALUE;
  const auto module = modules().find(module_handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const HostKernel* kernel = find_host_kernel(name);
  if (kernel == nullptr || !has_kernel(module->image, name)) return CUDA_ERROR_NOT_FOUND;
  const std::lock_guard lock(module->mutex);
  CUfunction& function = module->functions[name];
  if (function == nullptr) function = functions().add(std::make_shared<Function>(Function{module->context, kernel}));
  *handle = function;
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuModuleUnload(CUmodule handle) {
  Context* context = nullptr;
  if (const CUresult refused = need_context(&context)) return refused;
  const auto module = modules().remove(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::lock_guard lock(module->mutex);
  for (const auto& [name, function] : module->functions) functions().remove(function);
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                 unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream_handle,
                                 void** parameters, void** extra) {
  std::shared_ptr<Stream> stream;
  if (const CUresult refused = need_stream(stream_handle, &stream)) return refused;
  const auto function = functions().find(handle);
  if (function == nullptr || function->context != stream->context) return CUDA_ERROR_INVALID_HANDLE;
  const Index grid = {grid_x, grid_y, grid_z}, block = {block_x, block_y, block_z};
  const HostKernel* kernel = function->kernel;
  if (!sane(grid, 65535) || !sane(block, 1024) || grid_x > 0x7fffffff || block_x > 1024 || shared_bytes > 48 << 10 ||
      block_x * block_y * block_z > kernel->threads || parameters == nullptr || parameters[0] == nullptr ||
      extra != nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const KernelArgs work = *static_cast<const KernelArgs*>(parameters[0]);
  const CUresult refused = stream->push([kernel, work, grid, block, context = stream->context] {
    const std::vector<KeepAlive> held = check_launch(*kernel, work, *context);
    const Slice slice(context->device);
    kernel->run(work, grid, block);
  });
  if (refused == CUDA_SUCCESS) ++counters().launches;
  return refused;
}
