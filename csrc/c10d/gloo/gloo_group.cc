#include "c10d/gloo/gloo_group.h"

#include <algorithm>
#include <string_view>
#include <thread>
#include <utility>

#include "base/engine_thread.h"
#include "c10d/elastic_threads.h"
#include "communicator/departure.h"
#include "topology/hosts.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

// How long the reason for a lost connection may be on its way to the store.
constexpr std::chrono::seconds kReasonPatience{1};
// After how many questions without an answer, of a second or so each, the store is gone.
constexpr int kMostSilences = 20;
// The same where a process has ended, with which it may have gone.
constexpr int kMostSilencesAfterAnEnd = 1;
// How long operations get to end by themselves once a rank has died.
constexpr milliseconds kGrace{200};
// How long a farewell may take to be on its way.
constexpr milliseconds kFarewellPatience{500};
// How long a rank that has cut its connections may take to tell why.
constexpr milliseconds kConfessionPatience{200};

}  // namespace

void GlooGroup::require_sound() const {
  const std::lock_guard lock(mutex_);
  if (is_shut_down_) {
    throw InvalidUsage(join("The group '", name_, "' has been shut down."));
  }
  rethrow_if_any(failure());
}

void GlooGroup::require_hope(const std::vector<int>& ranks) {
  require_sound();
  const auto lose_hope = [this](ErrorKind kind, const std::string& what, const Blame& blame) {
    std::rethrow_exception(make_error(kind,
                                      join(what, ". Rank ", channel.rank(), " of group '", name_,
                                           "' waited for it to make a group."),
                                      blame));
  };
  if (const std::optional<Absence> found = absence()) {
    const std::vector<int>& blamed = found->blame.ranks;
    const bool is_of_these = std::find_first_of(blamed.begin(), blamed.end(), ranks.begin(),
                                                ranks.end()) != blamed.end();
    if (is_of_these || found->kind == ErrorKind::kAborted) {
      lose_hope(found->kind, found->what, found->blame);
    }
  }
  // Also of those that are no neighbours, and before anybody watches these.
  if (const auto gone = first_gone(*store_, ranks)) {
    lose_hope(ErrorKind::kPeerLost, join("rank ", gone->rank, " ", gone->how),
              culprit(gone->rank, std::string(cause_in(gone->how))));
  }
}

std::exception_ptr GlooGroup::fail(const std::exception_ptr& error,
                                   const std::exception_ptr& for_others) {
  const auto [kind, message, blame] = describe(error);
  if (!failure_.set(kind, message, channel.rank(), blame)) {
    return failure();
  }
  {
    const std::lock_guard lock(mutex_);
    is_telling_ = true;
  }
  channel.close();
  // For ranks that are in no operation of this group, and so notice no closed connection.
  ElasticThreads::shared().post_or_run(
      [self = shared_from_this(),
       told = ToldError{channel.rank(), describe(for_others ? for_others : error)}] {
        tell_of_failure(*self->store_, told);
        const std::lock_guard lock(self->mutex_);
        self->is_telling_ = false;
        self->quiet_.notify_all();
      });
  return error;
}

void GlooGroup::wait_until_told(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  quiet_.wait_for(lock, patience, [this] { return !is_telling_; });
}

Blame GlooGroup::culprit(int rank, std::string cause) const {
  if (rank == channel.rank()) {
    return own_blame(rank, std::move(cause));
  }
  Blame blame{
      .ranks = {rank}, .host = known(rank).host, .pid = known(rank).pid, .cause = std::move(cause)};
  try {
    if (const std::optional<std::string> place = look_up(*store_, place_key(rank))) {
      set_place(blame, *place);
    }
  } catch (const std::exception&) {
    // The store is gone.
  }
  return blame;
}

std::optional<ErrorDescription> GlooGroup::confession(bool of_others) const {
  std::optional<ToldError> told = told_failure(*store_);
  if (!told || told->teller == channel.rank()) {
    return std::nullopt;
  }
  ErrorDescription& error = told->error;
  const bool is_of_others = error.kind == ErrorKind::kPeerLost || error.kind == ErrorKind::kTimeout;
  if (!of_others && is_of_others && error.blame.ranks != std::vector<int>{told->teller}) {
    return std::nullopt;
  }
  return std::move(error);
}

std::optional<ErrorDescription> GlooGroup::await_confession() const {
  const Deadline patience = Deadline::in(kConfessionPatience);
  std::optional<ErrorDescription> told = confession(/*of_others=*/true);
  while (!told && !patience.has_passed()) {
    std::this_thread::sleep_for(milliseconds(10));
    told = confession(/*of_others=*/true);
  }
  return told;
}

void GlooGroup::explain(const std::exception_ptr& error) {
  auto [kind, what, blame] = describe(error);
  if (kind == ErrorKind::kMismatch || failure() != nullptr || death()) {
    std::rethrow_exception(error);  // fail_in() says who has died
  }
  channel.close();
  std::optional<ErrorDescription> told;
  const auto is_told = [&] { return (told = confession()).has_value(); };
  const Lookout lookout{
      .has_news = [&] { return death().has_value() || is_told(); },
      .is_disabled = [&](int rank) { return state_of(rank) == ProcessState::kStopped; }};
  RollCall called = call_roll(*store_, collectives_, channel.rank(), channel.size(),
                              /*counts_leavers=*/kind != ErrorKind::kTimeout, lookout);
  if (told || is_told()) {
    std::rethrow_exception(make_error(told->kind, told->message, told->blame));
  }
  if (death()) {
    std::rethrow_exception(error);
  }
  if (called.sentence.empty() && called.missing.empty()) {
    // All have come, this rank perhaps when another had given it up.
    if ((told = confession(/*of_others=*/true))) {
      std::rethrow_exception(make_error(told->kind, told->message, told->blame));
    }
    std::rethrow_exception(error);
  }
  if (!called.lost.empty()) {
    // gloo's words are about the connections, which this rank may have cut itself.
    std::rethrow_exception(make_error(ErrorKind::kPeerLost, called.sentence,
                                      culprit(called.missing[0], std::string(called.lost))));
  }
  if (kind == ErrorKind::kPeerLost && !called.missing.empty()) {
    // Whoever has cut this rank's connections may have waited for the same ranks until its
    // deadline.
    if ((told = await_confession())) {
      std::rethrow_exception(make_error(told->kind, told->message, told->blame));
    }
  }
  if (called.missing.empty()) {
    // The store is silent, too. Its host may be one of those that this rank sees.
    for (int rank = 0; rank < channel.size(); ++rank) {
      if (rank != channel.rank() && !in_words(state_of(rank)).empty()) {
        called.missing.push_back(rank);
      }
    }
    called.sentence += called.missing.empty() ? "" : " ";
  }
  if (!called.missing.empty()) {
    called.sentence += silence_of(called.missing, blame);
  }
  std::rethrow_exception(
      make_error(kind, join(what, what.ends_with('.') ? " " : ". ", called.sentence), blame));
}

void GlooGroup::fail_in(const Operation& operation, const std::exception_ptr& error) {
  auto [kind, what, blame] = describe(error);
  const bool is_message = is_point_to_point(operation.kind);
  if (std::optional<Absence> lost = death(); lost && kind != ErrorKind::kMismatch) {
    kind = ErrorKind::kPeerLost;
    what = lost->what + ".";
    blame = std::move(lost->blame);
  } else if (is_message && kind == ErrorKind::kPeerLost && failure() == nullptr) {
    if (std::optional<ErrorDescription> told = await_confession()) {
      kind = told->kind;
      what = std::move(told->message);
      blame = std::move(told->blame);
    }
  }
  if (is_message && operation.peer >= 0 && blame.ranks.empty() &&
      (kind == ErrorKind::kPeerLost || kind == ErrorKind::kTimeout)) {
    blame =
        culprit(operation.peer, kind == ErrorKind::kTimeout ? "did not come in time" : "has gone");
    if (std::string plight = plight_of(operation.peer); !plight.empty()) {
      what += join(what.ends_with('.') ? " " : ". ", who(operation.peer), " ", plight, ".");
      blame.cause = std::move(plight);
    }
  }
  if (!blame.ranks.empty() && blame.pid == 0) {
    const Blame first = culprit(blame.ranks[0], {});
    blame.host = first.host;
    blame.pid = first.pid;
  }
  blame.operation = join(name_of(operation), " of group '", name_, "'");
  std::rethrow_exception(
      fail(make_error(kind,
                      join(name_of(operation), " on rank ", channel.rank(), " of ", channel.size(),
                           " of group '", name_, "' failed: ", what),
                      blame)));
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
  return news_ ? news_ : loss_;
}

void GlooGroup::note_end_of(int rank, const std::string& process) {
  if (is_over()) {
    return;
  }
  Absence loss;
  for (int silences = 0; loss.what.empty(); ++silences) {
    try {
      if (const auto how = how_gone(*store_, rank); how && !how->ends_with(kHasDied)) {
        return;
      }
      const std::string died = join("(", process, ") ", kHasDied);
      tell_gone(*store_, rank, died);
      loss = {.what = join("rank ", rank, " ", died), .blame = culprit(rank, kHasDied)};
    } catch (const std::exception&) {
      if (is_over() || has_said_farewell(rank)) {
        return;
      }
      // It may have left in good order, but nobody will ever be able to tell.
      if (silences == kMostSilencesAfterAnEnd) {
        loss = {.what = join(who(rank),
                             " has ended, and since then the job's store does not answer, which it "
                             "may have hosted"),
                .blame = known(rank).blame("has ended")};
        break;
      }
      std::this_thread::sleep_for(kNewsInterval);
    }
  }
  {
    const std::lock_guard lock(mutex_);
    death_ = loss;
  }
  note_loss(loss);
  // What the rank did before it died counts: whatever has all that it needs comes to its end.
  const Deadline grace = Deadline::in(kGrace);
  while (is_under_way() && !grace.has_passed()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  channel.close();
  if (!is_under_way()) {
    fail(make_error(ErrorKind::kPeerLost,
                    join(loss.what, ". The group '", name_,
                         "' is of no further use; save what you need and start again."),
                    loss.blame));
  }
}

void GlooGroup::say_left() noexcept {
  try {
    const Blame own = own_blame(channel.rank(), in_words(own_departure()));
    tell_gone(*store_, channel.rank(),
              join("(", name_of_process(own.pid, own.host), ") ", own.cause));
  } catch (const std::exception&) {
    // Whoever hosted the store is gone.
  }
}

std::optional<Absence> GlooGroup::death() const {
  const std::lock_guard lock(mutex_);
  return death_;
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
                           .blame = self->culprit(peer, "has left")});
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
  if (!failure_.is_set()) {
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
  quiet_.notify_all();
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
  quiet_.wait_for(lock, patience, [this] { return messages_ == 0 && !is_looking_; });
  return messages_ == 0;
}

bool GlooGroup::has_said_farewell(int rank) {
  const std::lock_guard lock(news_mutex_);
  return loss_ && loss_->is_orderly && loss_->blame.ranks == std::vector<int>{rank};
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

void GlooGroup::tell_of_failure(KeyValueStore& store, const ToldError& told) noexcept {
  if (told_failure(store)) {
    return;  // the first failure stays
  }
  try {
    store.set(kNewsKey, told.to_text());
  } catch (const std::exception&) {
    // The process that hosts the store is gone, which is a failure as well.
  }
}

std::optional<ToldError> GlooGroup::told_failure(KeyValueStore& store) noexcept {
  try {
    const std::optional<std::string> text = look_up(store, kNewsKey);
    return text ? std::optional(ToldError::from_text(*text)) : std::nullopt;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

bool GlooGroup::is_told(const std::string& key) const { return look_up(*store_, key).has_value(); }

void GlooGroup::explain_loss_of(int peer) {
  const Deadline patience = Deadline::in(kReasonPatience);
  try {
    // Waits until it is known that this rank has cut the connection itself, or why another one
    // did.
    while (!is_over() && !is_told(kNewsKey)) {
      if (patience.has_passed()) {
        const std::string loss = join("rank ", peer, " has died, or the network between rank ",
                                      channel.rank(), " and it");
        const Blame blame = culprit(peer, "has died, or the network to it");
        note_loss({.what = loss, .blame = blame});
        store_->set(kNewsKey,
                    ToldError{channel.rank(), {ErrorKind::kPeerLost, loss, blame}}.to_text());
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
                                   peer, " is lost, and the job's store does not answer"),
                      .blame = loss_ ? loss_->blame : Blame{}};
    }
  }
}

void GlooGroup::ask_for_news() {
  std::optional<Absence> news;
  bool is_silent = false;
  try {
    if (const std::optional<std::string> text = look_up(*store_, kNewsKey)) {
      ErrorDescription told = ToldError::from_text(*text).error;
      news = Absence{
          .what = std::move(told.message), .kind = told.kind, .blame = std::move(told.blame)};
    }
  } catch (const std::exception& error) {
    news = Absence{.what = error.what()};
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
