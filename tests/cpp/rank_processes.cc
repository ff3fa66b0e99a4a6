#include "rank_processes.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "communicator/native/native_communicator.h"

namespace pydist::testing {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFlag = "--rank-process";
// The life of a rank, should its parent not see to it. Longer than any test.
constexpr unsigned kLife_s = 120;

// A key is a file; a value appears as a whole.
class FolderStore final : public KeyValueStore {
 public:
  explicit FolderStore(fs::path folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, const std::string& value) override {
    fs::rename(write_fresh(key, value), path_of(key));
  }

  [[nodiscard]] std::string settle(const std::string& key, const std::string& value) override {
    const fs::path fresh = write_fresh(key, value);
    std::error_code is_settled;
    fs::create_hard_link(fresh, path_of(key), is_settled);
    fs::remove(fresh);
    return get(key, Deadline::in({}));
  }

  [[nodiscard]] std::string get(const std::string& key, Deadline deadline) override {
    const fs::path target = path_of(key);
    while (true) {
      if (std::ifstream file(target, std::ios::binary); file) {
        std::ostringstream value;
        value << file.rdbuf();
        return value.str();
      }
      if (deadline.has_passed()) {
        throw Timeout(join("The key '", key, "' did not appear in ", folder_.string(), "."));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void erase(const std::string& key) override { fs::remove(path_of(key)); }

 private:
  // A file with the value that nobody looks for yet.
  [[nodiscard]] fs::path write_fresh(const std::string& key, const std::string& value) const {
    fs::path fresh = path_of(key);
    fresh += join(".", ::getpid());
    std::ofstream(fresh, std::ios::binary) << value;
    return fresh;
  }

  [[nodiscard]] fs::path path_of(const std::string& key) const {
    std::string name;
    for (const char letter : key) {
      name += letter == '/' ? '@' : letter;
    }
    return folder_ / name;
  }

  fs::path folder_;
};

std::map<std::string, RankProgram::Function>& programs() {
  static std::map<std::string, RankProgram::Function> all;
  return all;
}

std::string outcome_key(int rank) { return join("outcome/", rank); }

}  // namespace

RankProgram::RankProgram(const std::string& name, Function function) {
  programs().emplace(name, std::move(function));
}

std::optional<int> play_rank_process(int argc, char** argv) {
  if (argc != 8 || std::string(argv[1]) != kFlag) {
    return std::nullopt;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::alarm(kLife_s);
  const std::string program = argv[2];
  RankOfTest self{std::atoi(argv[3]), std::atoi(argv[4]), std::make_shared<FolderStore>(argv[5]),
                  nullptr, nullptr};
  if (*argv[7] != '\0') {
    self.host_id = argv[7];
  }
  std::string outcome = "ended";
  try {
    self.communicator = join_group(self, "world");
    programs().at(program)(self, argv[6]);
    self.communicator.reset();
    Endpoint::release_process();
  } catch (...) {
    const ErrorDescription error = describe(std::current_exception());
    outcome = join(static_cast<int>(error.kind), " ", error.message);
  }
  self.store->set(outcome_key(self.rank), outcome);
  return ::testing::Test::HasFailure() ? 1 : 0;
}

RankProcesses::RankProcesses(const std::string& program, int size, const std::string& argument,
                             const HostsOfRanks& hosts) {
  std::string name = (fs::temp_directory_path() / "pydist-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) {
    throw system_error("mkdtemp", errno);
  }
  folder_ = name;
  store_ = std::make_shared<FolderStore>(folder_);
  for (int rank = 0; rank < size; ++rank) {
    const std::string host =
        hosts.empty() ? "" : join("host ", hosts.at(static_cast<std::size_t>(rank)));
    std::vector<std::string> words{"pydist_tests", kFlag,   program,  join(rank),
                                   join(size),     folder_, argument, host};
    std::vector<char*> arguments;
    for (std::string& word : words) {
      arguments.push_back(word.data());
    }
    arguments.push_back(nullptr);
    pid_t pid = 0;
    const int code =
        ::posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, arguments.data(), environ);
    if (code != 0) {
      throw system_error("posix_spawn", code);
    }
    pids_.push_back(pid);
  }
}

RankProcesses::~RankProcesses() {
  for (const pid_t pid : pids_) {
    if (pid != 0) {
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

void RankProcesses::signal(int rank, int number) const {
  ASSERT_EQ(::kill(pids_[static_cast<std::size_t>(rank)], number), 0);
}

RankOutcome RankProcesses::wait(int rank, std::chrono::milliseconds limit) {
  pid_t& pid = pids_[static_cast<std::size_t>(rank)];
  const Deadline deadline = Deadline::in(limit);
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (deadline.has_passed()) {
      ADD_FAILURE() << "rank " << rank << " (pid " << pid << ") does not end";
      ::kill(pid, SIGKILL);
      ::waitpid(pid, &status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  pid = 0;
  RankOutcome outcome;
  outcome.has_ended_by_itself = WIFEXITED(status);
  if (!outcome.has_ended_by_itself) {
    return outcome;
  }
  EXPECT_EQ(WEXITSTATUS(status), 0) << "of rank " << rank;
  try {
    const std::string text = store_->get(outcome_key(rank), Deadline::in({}));
    if (text != "ended") {
      const std::size_t space = text.find(' ');
      outcome.error = {static_cast<ErrorKind>(std::stoi(text)), text.substr(space + 1)};
    }
  } catch (const Timeout&) {
    ADD_FAILURE() << "rank " << rank << " left no word";
  }
  return outcome;
}

void expect_death_is_named(RankProcesses& ranks, int size, const std::string& key,
                           std::chrono::milliseconds delay) {
  for (int rank = 0; rank < size; ++rank) {
    static_cast<void>(ranks.store().get(join(key, rank), Deadline::in(std::chrono::seconds(30))));
  }
  std::this_thread::sleep_for(delay);
  const auto start = std::chrono::steady_clock::now();
  ranks.signal(1, SIGKILL);
  for (int rank = 0; rank < size; ++rank) {
    if (rank == 1) {
      continue;
    }
    const RankOutcome outcome = ranks.wait(rank);
    EXPECT_LT(std::chrono::steady_clock::now() - start, kAtOnce);
    ASSERT_TRUE(outcome.error);
    EXPECT_EQ(outcome.error->kind, ErrorKind::kPeerLost) << outcome.error->message;
    EXPECT_PRED2(contains, outcome.error->message, "rank 1 (pid ");
  }
}

}  // namespace pydist::testing
