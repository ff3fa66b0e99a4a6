#include "reducer/round_words.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace pydist {
namespace {

// Openings are gathered, so they travel as the bytes that they are.
static_assert(std::is_trivially_copyable_v<Opening>);
constexpr auto kOpeningBytes = static_cast<std::int64_t>(sizeof(Opening));

// Closings are summed, in float64, in which counts and flags are exact.
constexpr std::size_t kClosingWords = 4;

}  // namespace

Openings::Openings(int rank, int size)
    : size_(size),
      all_(at::zeros({kOpeningBytes * size}, at::kByte)),
      own_(all_.narrow(0, kOpeningBytes * rank, kOpeningBytes)) {}

void Openings::write(const Opening& own) { std::memcpy(own_.mutable_data_ptr(), &own, sizeof own); }

Opening Openings::of(int rank) const {
  Opening opening;
  std::memcpy(&opening, all_.const_data_ptr<std::uint8_t>() + kOpeningBytes * rank, sizeof opening);
  return opening;
}

double Openings::total_share() const {
  double total = 0;
  for (int rank = 0; rank < size_; ++rank) {
    total += of(rank).share;
  }
  return total;
}

int Openings::present() const {
  int count = 0;
  for (int rank = 0; rank < size_; ++rank) {
    count += of(rank).is_present ? 1 : 0;
  }
  return count;
}

int Openings::highest_present() const {
  int rank = size_ - 1;
  while (rank >= 0 && !of(rank).is_present) {
    --rank;
  }
  return rank;
}

std::vector<int> Openings::ranks_with(Opening::Purpose purpose) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (of(rank).purpose == purpose) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::size_t Openings::first_differing_buffer() const {
  const int root = highest_present();
  bool differ = false;
  std::size_t lowest = 0;
  for (int rank = 0; rank <= root; ++rank) {
    const Opening opening = of(rank);
    if (!opening.is_present) {
      continue;
    }
    differ = differ || opening.changed_buffers != of(root).changed_buffers;
    const std::size_t changed = opening.first_changed_buffer;
    lowest = lowest == 0 || (changed != 0 && changed < lowest) ? changed : lowest;
  }
  return differ ? lowest : 0;
}

Closings::Closings(int rank, int size, std::size_t slots)
    : rank_(rank),
      size_(size),
      slots_(slots),
      used_begin_(kClosingWords * static_cast<std::size_t>(size)),
      memory_(at::zeros({static_cast<std::int64_t>(used_begin_ + 2 * slots)}, at::kDouble)) {}

double* Closings::words() const { return memory_.mutable_data_ptr<double>(); }

void Closings::write(const Closing& own) {
  std::fill_n(words(), memory_.numel(), 0.0);
  double* const mine = words() + kClosingWords * static_cast<std::size_t>(rank_);
  mine[0] = static_cast<double>(own.status);
  mine[1] = own.wants_buffers ? 1.0 : 0.0;
  mine[2] = own.wants_plan ? 1.0 : 0.0;
  mine[3] = own.is_captured ? 1.0 : 0.0;
}

Closing Closings::of(int rank) const {
  const double* const theirs = words() + kClosingWords * static_cast<std::size_t>(rank);
  return {static_cast<Closing::Status>(static_cast<int>(theirs[0])), theirs[1] != 0, theirs[2] != 0,
          theirs[3] != 0};
}

bool Closings::any(bool Closing::* wish) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (of(rank).*wish) {
      return true;
    }
  }
  return false;
}

bool Closings::all(bool Closing::* wish) const {
  for (int rank = 0; rank < size_; ++rank) {
    if (!(of(rank).*wish)) {
      return false;
    }
  }
  return true;
}

int Closings::used(std::size_t slot) const { return static_cast<int>(words()[used_begin_ + slot]); }

bool Closings::is_late(std::size_t slot) const { return words()[used_begin_ + slots_ + slot] != 0; }

}  // namespace pydist
