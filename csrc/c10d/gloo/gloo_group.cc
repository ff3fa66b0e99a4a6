#include "c10d/gloo/gloo_group.h"

#include <thread>

#include "base/engine_thread.h"
#include "c10d/elastic_threads.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

// How long the reason for a lost connection may be on its way to the store.
constexpr std::chrono::seconds kReasonPatience{1};
// After how many questions without an answer, of a second or so each, the store is gone.
constexpr int kMostSilences = 20;
// How long a farewell may take to be on its way.
constexpr milliseconds kFarewellPatience{500};

}  // namespace

void GlooGroup::require_sound() const {
  const std::lock_guard lock(mutex_);
  if (is_shut_down_) {
    throw InvalidUsage(join("The group '", name_, "' has been shut down."));
  }
  if (const std::exception_ptr error = failure()) {
    std::rethrow_exception(error);
  }
}

std::exception_ptr GlooGroup::fail(const std::exception_ptr& error) {
  const auto [kind, message, blame] = describe(error);
  if (!failure_.set(kind, message, channel.rank(), blame)) {
    return failure();
  }
  channel.close();
  // For ranks that are in no operation of this group, and so notice no closed connection.
  ElasticThreads::shared().post_or_run(
      [store = store_, text = message] { tell_of_failure(*store, text); });
  return error;
}

std::optional<Absence> GlooGroup::absence() {
  const std::lock_guard lock(news_mutex_);
  if (!is_asking_ && next_question_.has_passed()) {
    try {
      ElasticThreads::shared().post([self = shared_from_this()] { self->ask_for_news(); });
      is_asking_ = true;
    } catch (const TransportError&) {
      next_question_ = Deadline::in(kNewsInterval);  // no thread to ask on now
    }
  }
  return news_.empty() ? loss_ : Absence{.what = news_};
}

void GlooGroup::watch_neighbours() {
  for (const int peer : neighbours()) {
    {
      const std::lock_guard lock(mutex_);
      if (is_shut_down_) {
        return;
      }
      is_watching_ = true;
      ++listeners_;
    }
    try {
      EngineThread("pydist-gloo-ear", [self = shared_from_this(), peer] {
        if (const auto done = self->channel.wait_for_farewell(peer)) {
          self->note_loss({.what = join("rank ", peer, " has left"),
                           .is_orderly = true,
                           .done = *done,
                           .blame = {.ranks = {peer}, .cause = "has left"}});
        } else {
          self->explain_loss_of(peer);
        }
        const std::lock_guard lock(self->mutex_);
        --self->listeners_;
        self->quiet_.notify_all();
      }).let_go();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      --listeners_;
      throw;
    }
  }
}

bool GlooGroup::stop_watching(std::chrono::seconds patience) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!is_watching_) {
      return true;
    }
  }
  if (const std::exception_ptr error = failure()) {
    tell_of_failure(*store_, describe(error).message);
  } else {
    const Deadline deadline = Deadline::in(kFarewellPatience);
    for (const int peer : neighbours()) {
      channel.say_farewell(peer, farewell_, deadline);
    }
  }
  channel.close();
  std::unique_lock lock(mutex_);
  return quiet_.wait_for(lock, patience, [this] { return listeners_ == 0; });
}

void GlooGroup::mark_shut_down() {
  const std::lock_guard lock(mutex_);
  is_shut_down_ = true;
}

void GlooGroup::message_started() {
  require_sound();
  const std::lock_guard lock(mutex_);
  if (is_shut_down_) {
    throw Aborted(join("The group '", name_, "' is being shut down."));
  }
  ++messages_;
}

void GlooGroup::message_finished() {
  const std::lock_guard lock(mutex_);
  --messages_;
  quiet_.notify_all();
}

bool GlooGroup::has_messages() const {
  const std::lock_guard lock(mutex_);
  return messages_ != 0;
}

bool GlooGroup::wait_for_messages(std::chrono::seconds patience) {
  std::unique_lock lock(mutex_);
  return quiet_.wait_for(lock, patience, [this] { return messages_ == 0; });
}

std::vector<int> GlooGroup::neighbours() const {
  const int size = channel.size();
  std::vector<int> both{(channel.rank() + 1) % size};
  if (size > 2) {
    both.push_back((channel.rank() + size - 1) % size);
  }
  return both;
}

void GlooGroup::note_loss(Absence loss) {
  const std::lock_guard lock(news_mutex_);
  if (!loss_ || loss.is_worse_than(*loss_)) {
    loss_ = std::move(loss);
  }
}

bool GlooGroup::is_over() const {
  const std::lock_guard lock(mutex_);
  return is_shut_down_ || failure_.is_set();
}

void GlooGroup::tell_of_failure(KeyValueStore& store, const std::string& text) noexcept {
  try {
    static_cast<void>(store.get(kNewsKey, Deadline::in(std::chrono::nanoseconds::zero())));
    return;  // the first failure stays
  } catch (const std::exception&) {
    // None yet.
  }
  try {
    store.set(kNewsKey, text);
  } catch (const std::exception&) {
    // The process that hosts the store is gone, which is a failure as well.
  }
}

bool GlooGroup::is_told(const std::string& key) const {
  try {
    static_cast<void>(store_->get(key, Deadline::in(std::chrono::nanoseconds::zero())));
    return true;
  } catch (const Timeout&) {
    return false;
  }
}

void GlooGroup::explain_loss_of(int peer) {
  const Deadline patience = Deadline::in(kReasonPatience);
  try {
    // Waits until it is known that this rank has cut the connection itself, or why another one
    // did.
    while (!is_over() && !is_told(kNewsKey)) {
      if (patience.has_passed()) {
        const std::string loss = join("rank ", peer, " has died, or the network between rank ",
                                      channel.rank(), " and it");
        note_loss({.what = loss, .blame = {.ranks = {peer}, .cause = "has died, or its network"}});
        store_->set(kNewsKey, loss);
        return;
      }
      std::this_thread::sleep_for(milliseconds(50));
    }
  } catch (const std::exception&) {
    // The neighbour may have cut the connection because of the rank that hosted the store.
    if (!is_over()) {
      const std::lock_guard lock(news_mutex_);
      // The rank that left before is the likely reason.
      loss_ = Absence{.what = join(loss_ ? loss_->what + ". Since then " : "",
                                   "the connection between rank ", channel.rank(), " and rank ",
                                   peer, " is lost, and the job's store does not answer")};
    }
  }
}

void GlooGroup::ask_for_news() {
  std::string news;
  bool is_silent = false;
  try {
    news = store_->get(kNewsKey, Deadline::in(std::chrono::nanoseconds::zero()));
  } catch (const Timeout&) {
    // None.
  } catch (const std::exception& error) {
    news = error.what();
    is_silent = true;
  }
  const std::lock_guard lock(news_mutex_);
  silences_ = is_silent ? silences_ + 1 : 0;
  // A store that is slow for a while says nothing about the ranks.
  if (!is_silent || silences_ >= kMostSilences) {
    news_ = std::move(news);
  }
  is_asking_ = false;
  next_question_ = Deadline::in(kNewsInterval);
}

std::string GlooGroup::name_of(const Operation& operation) {
  std::string name(to_string(operation.kind));
  if (operation.kind == OpKind::kSend) {
    name += join(" to rank ", operation.peer);
  } else if (operation.kind == OpKind::kRecv && operation.peer >= 0) {
    name += join(" from rank ", operation.peer);
  }
  return operation.label.empty() ? name : name + " (" + operation.label + ")";
}

}  // namespace pydist
