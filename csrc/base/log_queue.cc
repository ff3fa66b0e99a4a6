#include "base/log_queue.h"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <utility>

#include "base/log.h"

namespace pydist {
namespace {

constexpr std::size_t kMostLines = 64;
// How long the end of a queue waits for its last lines.
constexpr std::chrono::milliseconds kPatience{200};

}  // namespace

struct LogQueue::Lines {
  struct Line {
    LogLevel level;
    std::string text;
    const char* file;  // a literal
  };

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Line> waiting;     // guarded by mutex
  std::size_t dropped = 0;      // guarded by mutex
  bool is_ending = false;       // guarded by mutex
  bool has_thread_end = false;  // guarded by mutex

  void write_all() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return is_ending || !waiting.empty(); });
      if (waiting.empty()) {
        break;
      }
      Line line = std::move(waiting.front());
      waiting.pop_front();
      if (const std::size_t lost = std::exchange(dropped, 0); lost != 0) {
        line.text += " (" + std::to_string(lost) + " lines were dropped, as nobody read the log)";
      }
      lock.unlock();
      log_line(line.level, line.text, line.file);
      lock.lock();
    }
    has_thread_end = true;
    changed.notify_all();
  }
};

LogQueue::LogQueue() : lines_(std::make_shared<Lines>()) {}

LogQueue::~LogQueue() {
  if (!thread_.has_started() || birth_.is_inherited()) {
    return;
  }
  std::unique_lock lock(lines_->mutex);
  lines_->is_ending = true;
  lines_->changed.notify_all();
  lines_->changed.wait_for(lock, kPatience, [this] { return lines_->has_thread_end; });
  if (!lines_->has_thread_end) {
    thread_.let_go();
  }
}

void LogQueue::post(LogLevel level, std::string text, const char* file) noexcept {
  if (!is_logged(level, file)) {
    return;
  }
  try {
    const std::lock_guard lock(lines_->mutex);
    if (lines_->waiting.size() == kMostLines) {
      ++lines_->dropped;
      return;
    }
    if (!thread_.has_started()) {
      thread_ = EngineThread("pydist-log", [lines = lines_] { lines->write_all(); });
    }
    lines_->waiting.push_back({level, std::move(text), file});
    lines_->changed.notify_all();
  } catch (...) {  // no memory, or no thread: a lost log line is no reason to fail
  }
}

}  // namespace pydist
