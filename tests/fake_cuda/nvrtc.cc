// NVRTC that compiles nothing: its images have the names of the kernels that the source defines, which is all that
// module.cc reads. It knows GPUs of compute capability 8.0 and 9.0. tests/single/test_cuda_kernels.py has the real one.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "cuda_api.h"
#include "host_kernel.h"

using namespace fake;

namespace {

enum Result { kSuccess = 0, kInvalidInput = 3, kInvalidProgram = 4, kCompilation = 6 };
constexpr int kArchitectures[] = {80, 90};
constexpr char kMachine[] = "--gpu-architecture=sm_", kPtx[] = "--gpu-architecture=compute_";

struct Program {
  std::string source, image, log;
  bool machine_code = false;
};

// The kernels of a source: each defines them by DL_COMM_KERNEL(NAME, ...), by DL_COMM_KERNEL(FIRST_PART##type, ...) for
// some types, or with a name from a list of its macro.
std::vector<std::string> kernels_of(const std::string& source) {
  const std::string macro = "DL_COMM_KERNEL(", bits = "DL_COMM_BIT_OPERATORS";
  std::vector<std::string> found;
  for (std::size_t at = source.find(macro); at != std::string::npos; at = source.find(macro, at + 1)) {
    const std::size_t start = at + macro.size(), end = source.find_first_of(",#", start);
    std::string part = source.substr(start, end - start);
    const bool is_part = source[end] == '#' || part == "name";
    if (part == "name") part = source.find(bits) == std::string::npos ? "?" : "bit_";
    for (const std::string& name : host_kernel_names()) {
      if (is_part ? name.compare(0, part.size(), part) == 0 : name == part) found.push_back(name);
    }
  }
  return found;
}

std::string ptx(const std::vector<std::string>& kernels) {
  std::string text = ".version 8.0\n";
  for (const std::string& name : kernels) text += ".visible .entry " + name + "()\n";
  return text + '\0';
}

// An ELF file with no sections but their names.
std::string machine_code(const std::vector<std::string>& kernels, int architecture) {
  std::string names(1, '\0');
  for (const std::string& name : kernels) names += ".text." + name + '\0';
  std::string file =
      "\x7f"
      "ELF\x02\x01\x01";
  file.resize(64);
  const std::uint16_t machine = 190;
  const std::uint64_t end = file.size() + names.size();
  const std::uint32_t flags = static_cast<std::uint32_t>(architecture);
  std::memcpy(&file[18], &machine, sizeof machine);
  std::memcpy(&file[40], &end, sizeof end);
  std::memcpy(&file[48], &flags, sizeof flags);
  return file + names;
}

Result copy(const std::string& text, char* to) {
  std::memcpy(to, text.data(), text.size());
  return kSuccess;
}

}  // namespace

FAKE_API Result nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 0;
  return kSuccess;
}

FAKE_API Result nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kArchitectures));
  return kSuccess;
}

FAKE_API Result nvrtcGetSupportedArchs(int* architectures) {
  std::copy(std::begin(kArchitectures), std::end(kArchitectures), architectures);
  return kSuccess;
}

FAKE_API Result nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char* const*,
                                   const char* const*) {
  *program = new Program{source, {}, {}};
  return kSuccess;
}

FAKE_API Result nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return kSuccess;
}

FAKE_API Result nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  const char* refused = std::getenv("FAKE_CUDA_NVRTC_FAILS");
  if (refused != nullptr && program->source.find(refused) != std::string::npos) {
    program->log = "FAKE_CUDA_NVRTC_FAILS";
    return kCompilation;
  }
  const std::vector<std::string> kernels = kernels_of(program->source);
  if (kernels.empty()) {
    program->log = "the source defines no kernel";
    return kCompilation;
  }
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    if (option.rfind(kMachine, 0) == 0) {
      program->image = machine_code(kernels, std::stoi(option.substr(sizeof kMachine - 1)));
      program->machine_code = true;
      return kSuccess;
    }
    if (option.rfind(kPtx, 0) == 0) {
      program->image = ptx(kernels);
      return kSuccess;
    }
  }
  program->log = "no --gpu-architecture";
  return kInvalidInput;
}

FAKE_API Result nvrtcGetCUBINSize(Program* program, std::size_t* size) {
  *size = program->machine_code ? program->image.size() : 0;
  return kSuccess;
}

FAKE_API Result nvrtcGetCUBIN(Program* program, char* image) {
  return program->machine_code ? copy(program->image, image) : kInvalidProgram;
}

FAKE_API Result nvrtcGetPTXSize(Program* program, std::size_t* size) {
  *size = program->machine_code ? 0 : program->image.size();
  return kSuccess;
}

FAKE_API Result nvrtcGetPTX(Program* program, char* image) {
  return program->machine_code ? kInvalidProgram : copy(program->image, image);
}

FAKE_API Result nvrtcGetProgramLogSize(Program* program, std::size_t* size) {
  *size = program->log.size();
  return kSuccess;
}

FAKE_API Result nvrtcGetProgramLog(Program* program, char* log) { return copy(program->log, log); }
