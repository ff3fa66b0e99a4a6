#include "reducer/timeline.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>

#include "base/error.h"

namespace pydist {
namespace {

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
    }
    json += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return json + '"';
}

std::string microseconds(Instant instant) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%lld.%03lld", static_cast<long long>(instant / 1000),
                static_cast<long long>(instant % 1000));
  return text.data();
}

std::string path_of_rank(const std::string& path, int rank) {
  std::filesystem::path file(path);
  const std::string extension = file.extension().string();
  file.replace_extension(join("rank", rank, extension));
  return file.string();
}

}  // namespace

std::shared_ptr<Timeline> Timeline::open(const std::string& path, int rank) {
  // Kept until the process ends: a model that is made when another is gone adds to the same file.
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<Timeline>> timelines;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Timeline>& timeline = timelines[path_of_rank(path, rank)];
  if (timeline == nullptr) {
    timeline = std::make_shared<Timeline>(path, rank);
  }
  return timeline;
}

Timeline::Timeline(const std::string& path, int rank) : rank_(rank) {
  const std::string name = path_of_rank(path, rank);
  // Where the folder can't be made, the file says why.
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(name).parent_path(), ignored);
  file_ = std::fopen(name.c_str(), "w");
  if (file_ == nullptr) {
    throw InvalidUsage(
        join("PYDIST_TIMELINE='", path, "': ", name, " can't be written: ", std::strerror(errno)));
  }
  std::fputs("[\n]\n", file_);
  event(join(R"({"ph":"M","name":"process_name","pid":)", rank_, R"(,"args":{"name":"rank )", rank_,
             "\"}}"));
}

Timeline::~Timeline() { std::fclose(file_); }

// Over the closing bracket, which is written again behind it.
void Timeline::event(const std::string& json) {
  std::fseek(file_, -2, SEEK_END);
  std::fputs(is_empty_ ? "" : ",\n", file_);
  std::fputs(json.c_str(), file_);
  std::fputs("]\n", file_);
  is_empty_ = false;
}

void Timeline::write(const GradientArena& arena, const RoundTimes& times, std::uint64_t model,
                     std::int64_t round) {
  const std::lock_guard lock(mutex_);
  const auto span = [&](const char* name, Instant from, Instant to) {
    if (from != 0 && to >= from) {
      event(join(R"({"ph":"X","name":")", name, R"(","pid":)", rank_, R"(,"tid":)", model,
                 R"(,"ts":)", microseconds(from), R"(,"dur":)", microseconds(to - from),
                 R"(,"args":{"round":)", round, "}}"));
    }
  };
  span("forward", times.forward_began, times.forward_ended);
  span("backward", times.began, times.computed);
  span("wait for averages", times.wait_began(), times.ended);
  // Buckets overlap each other, which spans of one thread must not.
  const auto overlapping = [&](const char* category, std::size_t number, Instant from, Instant to) {
    if (from == 0 || to < from) {
      return;
    }
    const GradientBucket& bucket = arena.buckets()[number];
    const std::string head = join(R"(,"cat":")", category, R"(","name":)", quoted(bucket.label),
                                  R"(,"id":")", category, ' ', model, ' ', round, ' ', number,
                                  R"(","pid":)", rank_, R"(,"tid":)", model, R"(,"ts":)");
    event(join(R"({"ph":"b")", head, microseconds(from), R"(,"args":{"bytes":)",
               bucket.memory.nbytes(), R"(,"parameters":)", bucket.slots.size(), "}}"));
    event(join(R"({"ph":"e")", head, microseconds(to), "}"));
  };
  for (std::size_t number = 0; number < arena.buckets().size(); ++number) {
    const BucketTimes& bucket = times.buckets[number];
    overlapping("ready, not its turn", number, bucket.ready, bucket.launched);
    overlapping("on its way", number, bucket.launched,
                bucket.done != 0 ? bucket.done.load() : times.ended);
  }
  std::fflush(file_);
}

}  // namespace pydist
