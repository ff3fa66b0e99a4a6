#include "kernels/cpu/instruction_set.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <string>

#include "base/env.h"
#include "base/error.h"
#include "base/parse_name.h"

namespace pydist {
namespace kernels {
namespace {

struct CompiledSet {
  InstructionSet set;
  const KernelSet& kernels;
};

// The slowest first.
constexpr CompiledSet kCompiledSets[] = {
    {InstructionSet::kPortable, portable_kernels},
#if defined(PYDIST_HAS_AVX_KERNELS)
    {InstructionSet::kAvx2, avx2_kernels},
    {InstructionSet::kAvx512, avx512_kernels},
#elif defined(PYDIST_HAS_NEON_KERNELS)
    {InstructionSet::kNeon, neon_kernels},
#endif
};

#if defined(__x86_64__)
// clang before 16 does not know this feature's name; "avx2" speaks for the operating system.
bool has_f16c() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(/*leaf=*/1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

// Asks for the support of the operating system as well: it must save the wide registers.
bool processor_has(InstructionSet set) noexcept {
  switch (set) {
    case InstructionSet::kPortable:
      return true;
    case InstructionSet::kAvx2:
#if defined(__x86_64__)
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#else
      return false;
#endif
    case InstructionSet::kAvx512:
#if defined(__x86_64__)
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
      return false;
#endif
    case InstructionSet::kNeon:
#if defined(__aarch64__)
      return true;
#else
      return false;
#endif
  }
  return false;
}

std::string names_of_compiled_sets() {
  std::vector<std::string_view> names;
  for (const CompiledSet& compiled : kCompiledSets) {
    names.push_back(to_string(compiled.set));
  }
  return list_of(names);
}

// The last set of kCompiledSets that PYDIST_CPU_ISA permits.
InstructionSet cap() {
  const std::string value = Environment::read().cpu_isa;
  if (value.empty()) {
    return std::end(kCompiledSets)[-1].set;
  }
  for (const CompiledSet& compiled : kCompiledSets) {
    if (value == to_string(compiled.set)) {
      return compiled.set;
    }
  }
  throw InvalidUsage(join("PYDIST_CPU_ISA=", value,
                          ": this build has no kernels of that name; valid here: ",
                          names_of_compiled_sets(), ", or leave it unset for the fastest"));
}

}  // namespace

const KernelSet& kernel_set(std::optional<InstructionSet> set) {
  if (!set) {
    static const KernelSet& fastest = kernel_set(usable_instruction_sets().back());
    return fastest;
  }
  for (const CompiledSet& compiled : kCompiledSets) {
    if (compiled.set == *set && processor_has(*set)) {
      return compiled.kernels;
    }
  }
  throw InvalidUsage(join("the ", to_string(*set), " kernels cannot run here: this processor or ",
                          "operating system lacks them; see usable_instruction_sets()"));
}

}  // namespace kernels

std::vector<InstructionSet> usable_instruction_sets() {
  const InstructionSet last = kernels::cap();
  std::vector<InstructionSet> usable;
  for (const kernels::CompiledSet& compiled : kernels::kCompiledSets) {
    if (kernels::processor_has(compiled.set)) {
      usable.push_back(compiled.set);
    }
    if (compiled.set == last) {
      break;
    }
  }
  return usable;
}

}  // namespace pydist
