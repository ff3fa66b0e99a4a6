// Loads and stores of the CUDA kernels.
//
// On the device they are instructions for global memory by name. A pointer that comes out of a
// table is generic to the compiler otherwise; and because it may take neither kind of access for
// the other's business, they stay in the order in which they are written here, which in-place calls
// rely on and which keeps several loads in flight. On the host, for tests, they are copies.

#pragma once

#include <cstdint>

#include "kernels/cuda/elements.h"

namespace pydist::cuda {

PYDIST_DEVICE const unsigned char* at(const void* base, std::uint64_t bytes) {
  return static_cast<const unsigned char*>(base) + bytes;
}
PYDIST_DEVICE unsigned char* at(void* base, std::uint64_t bytes) {
  return static_cast<unsigned char*>(base) + bytes;
}

#if defined(__CUDA_ARCH__)

PYDIST_DEVICE std::uint64_t global(const void* pointer) {
  return static_cast<std::uint64_t>(__cvta_generic_to_global(pointer));
}

// Bytes: as many as the name says. Addresses are multiples of that.
PYDIST_DEVICE Words load_16(const void* from) {
  Words words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
               : "l"(global(from)));
  return words;
}
PYDIST_DEVICE Words load_8(const void* from) {
  Words words = {};
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.word[0]), "=r"(words.word[1])
               : "l"(global(from)));
  return words;
}
PYDIST_DEVICE std::uint32_t load_4(const void* from) {
  std::uint32_t word;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(global(from)));
  return word;
}
PYDIST_DEVICE std::uint32_t load_2(const void* from) {
  std::uint16_t word;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(word) : "l"(global(from)));
  return word;
}
PYDIST_DEVICE std::uint32_t load_1(const void* from) {
  std::uint32_t word;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(word) : "l"(global(from)));
  return word;
}

PYDIST_DEVICE void store_16(void* to, const Words& words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global(to)), "r"(words.word[0]),
               "r"(words.word[1]), "r"(words.word[2]), "r"(words.word[3]));
}
PYDIST_DEVICE void store_8(void* to, const Words& words) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(global(to)), "r"(words.word[0]),
               "r"(words.word[1]));
}
PYDIST_DEVICE void store_4(void* to, std::uint32_t word) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(global(to)), "r"(word));
}
PYDIST_DEVICE void store_2(void* to, std::uint32_t word) {
  asm volatile("st.global.u16 [%0], %1;" ::"l"(global(to)), "h"(static_cast<std::uint16_t>(word)));
}
PYDIST_DEVICE void store_1(void* to, std::uint32_t word) {
  asm volatile("st.global.u8 [%0], %1;" ::"l"(global(to)), "r"(word));
}

#else

template <int kBytes>
inline Words copied_from(const void* from) {
  Words words = {};
  __builtin_memcpy(&words, __builtin_assume_aligned(from, kBytes), kBytes);
  return words;
}
inline Words load_16(const void* from) { return copied_from<16>(from); }
inline Words load_8(const void* from) { return copied_from<8>(from); }
inline std::uint32_t load_4(const void* from) { return copied_from<4>(from).word[0]; }
inline std::uint32_t load_2(const void* from) { return copied_from<2>(from).word[0]; }
inline std::uint32_t load_1(const void* from) { return copied_from<1>(from).word[0]; }

inline void store_16(void* to, const Words& words) { __builtin_memcpy(to, &words, 16); }
inline void store_8(void* to, const Words& words) { __builtin_memcpy(to, &words, 8); }
inline void store_4(void* to, std::uint32_t word) { __builtin_memcpy(to, &word, 4); }
inline void store_2(void* to, std::uint32_t word) { __builtin_memcpy(to, &word, 2); }
inline void store_1(void* to, std::uint32_t word) { __builtin_memcpy(to, &word, 1); }

#endif

// One element, aligned to its size; of complex128 and complex64 to that of a part.
template <typename Storage>
PYDIST_DEVICE Storage load_element(const void* from) {
  if constexpr (sizeof(Storage) == 16) {
    const Words low = load_8(from);
    const Words high = load_8(at(from, 8));
    return bits_as<Storage>(Words{{low.word[0], low.word[1], high.word[0], high.word[1]}});
  } else if constexpr (sizeof(Storage) == 8 && alignof(Storage) == 8) {
    const Words words = load_8(from);
    return bits_as<Storage>(std::uint64_t{words.word[1]} << 32 | words.word[0]);
  } else if constexpr (sizeof(Storage) == 8) {
    const std::uint64_t low = load_4(from);
    return bits_as<Storage>(std::uint64_t{load_4(at(from, 4))} << 32 | low);
  } else if constexpr (sizeof(Storage) == 4) {
    return bits_as<Storage>(load_4(from));
  } else if constexpr (sizeof(Storage) == 2) {
    return bits_as<Storage>(static_cast<std::uint16_t>(load_2(from)));
  } else {
    return bits_as<Storage>(static_cast<std::uint8_t>(load_1(from)));
  }
}

template <typename Storage>
PYDIST_DEVICE void store_element(void* to, const Storage& stored) {
  if constexpr (sizeof(Storage) == 16) {
    const auto words = bits_as<Words>(stored);
    store_8(to, words);
    store_8(at(to, 8), Words{{words.word[2], words.word[3], 0, 0}});
  } else if constexpr (sizeof(Storage) == 8) {
    const auto bits = bits_as<std::uint64_t>(stored);
    const auto low = static_cast<std::uint32_t>(bits);
    const auto high = static_cast<std::uint32_t>(bits >> 32);
    if constexpr (alignof(Storage) == 8) {
      store_8(to, Words{{low, high, 0, 0}});
    } else {
      store_4(to, low);
      store_4(at(to, 4), high);
    }
  } else if constexpr (sizeof(Storage) == 4) {
    store_4(to, bits_as<std::uint32_t>(stored));
  } else if constexpr (sizeof(Storage) == 2) {
    store_2(to, bits_as<std::uint16_t>(stored));
  } else {
    store_1(to, bits_as<std::uint8_t>(stored));
  }
}

}  // namespace pydist::cuda
