#include "reducer/round_words.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace pydist {
namespace {

// Counts and flags are exact in float64, and so are digests of 53 bits.
constexpr std::size_t kOpeningWords = 12;
constexpr std::size_t kClosingWords = 4;
constexpr std::uint64_t kDigestMask = (std::uint64_t{1} << 53) - 1;

at::Tensor make_words(std::size_t count) {
  return at::zeros({static_cast<std::int64_t>(count)}, at::kDouble);
}

}  // namespace

Openings::Openings(int rank, int size)
    : size_(size),
      all_(make_words(kOpeningWords * static_cast<std::size_t>(size))),
      own_(all_.narrow(0, static_cast<std::int64_t>(kOpeningWords) * rank,
                       static_cast<std::int64_t>(kOpeningWords))) {}

void Openings::write(const Opening& own) {
  auto* const words = own_.mutable_data_ptr<double>();
  words[0] = static_cast<double>(own.mode);
  words[1] = own.share;
  words[2] = static_cast<double>(own.digest & kDigestMask);
  words[3] = static_cast<double>(own.slots);
  words[4] = own.is_present ? 1.0 : 0.0;
  words[5] = own.is_bare ? 1.0 : 0.0;
  words[6] = static_cast<double>(own.forwards);
  words[7] = static_cast<double>(own.options & kDigestMask);
  words[8] = static_cast<double>(own.changed_buffers & kDigestMask);
  words[9] = static_cast<double>(own.first_changed_buffer);
  words[10] = static_cast<double>(own.purpose);
  words[11] = static_cast<double>(own.stepping);
}

Opening Openings::of(int rank) const {
  const double* const words =
      all_.const_data_ptr<double>() + kOpeningWords * static_cast<std::size_t>(rank);
  Opening opening;
  opening.is_present = words[4] != 0;
  opening.mode = static_cast<Opening::Mode>(static_cast<int>(words[0]));
  opening.share = words[1];
  opening.digest = static_cast<std::uint64_t>(words[2]);
  opening.slots = static_cast<std::size_t>(words[3]);
  opening.is_bare = words[5] != 0;
  opening.forwards = static_cast<std::size_t>(words[6]);
  opening.options = static_cast<std::uint64_t>(words[7]);
  opening.changed_buffers = static_cast<std::uint64_t>(words[8]);
  opening.first_changed_buffer = static_cast<std::size_t>(words[9]);
  opening.purpose = static_cast<Opening::Purpose>(static_cast<int>(words[10]));
  opening.stepping = static_cast<int>(words[11]);
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

int Openings::lowest_present() const {
  for (int rank = 0; rank < size_; ++rank) {
    if (of(rank).is_present) {
      return rank;
    }
  }
  return -1;
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
  const int first = lowest_present();
  bool differ = false;
  std::size_t lowest = 0;
  for (int rank = std::max(first, 0); rank < size_; ++rank) {
    const Opening opening = of(rank);
    if (!opening.is_present) {
      continue;
    }
    differ = differ || opening.changed_buffers != of(first).changed_buffers;
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
      memory_(make_words(used_begin_ + 2 * slots)) {}

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
