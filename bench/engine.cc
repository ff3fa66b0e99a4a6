// Collectives of the native engine from C++: latency and bandwidth by size, on ordinary and on
// symmetric memory, beside the roofline: the same reads and writes, on as many processes, without
// any synchronisation. The three take turns of a few calls, so that they meet the same noise.
//
//   bench_engine [kind=all_reduce] [ranks=2] [smallest=8] [largest=268435456]
//                [seconds per size=0.5] [dtype=float32|bfloat16] [wire=float32|bfloat16]
//
//   bench_engine handover [ranks=2]
//
// The latter prints how many nanoseconds a cache line takes from the first rank's core to the
// farthest of the others': where a hypervisor moves them, everything else depends on that.
//
// Kinds: all_reduce, reduce_scatter, all_gather, broadcast, all_to_all. Bytes are those of the
// larger one of the buffers that a rank gives and gets; all but all_to_all are in place. Prints
// medians over turns; a call's time is that of the slowest rank. Ranks are forked processes, each
// pinned to a core (round robin where there are more ranks than cores).

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.h"
#include "collectives/line_handover.h"
#include "collectives/roofline.h"
#include "communicator/native/native_communicator.h"
#include "communicator/peers/endpoint.h"

namespace pydist {
namespace {

// A key a file.
class FolderStore final : public KeyValueStore {
 public:
  explicit FolderStore(std::filesystem::path folder) : folder_(std::move(folder)) {}
  void set(const std::string& key, const std::string& value) override {
    const auto path = file(key);
    std::ofstream(path.string() + ".new") << value;
    std::filesystem::rename(path.string() + ".new", path);
  }
  std::string get(const std::string& key, Deadline deadline) override {
    while (!std::filesystem::exists(file(key))) {
      if (deadline.has_passed()) {
        throw Timeout("no key " + key);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ifstream stream(file(key));
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::string settle(const std::string& key, const std::string& value) override {
    const auto mine = file(key).string() + "." + std::to_string(::getpid());
    std::ofstream(mine) << value;
    std::error_code failure;
    std::filesystem::create_hard_link(mine, file(key), failure);
    std::filesystem::remove(mine);
    if (failure && failure != std::errc::file_exists) {
      throw std::filesystem::filesystem_error("no key " + key, failure);
    }
    return get(key, Deadline::in(std::chrono::seconds(0)));
  }
  void erase(const std::string& key) override { std::filesystem::remove(file(key)); }

 private:
  std::filesystem::path file(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '_');
    return folder_ / key;
  }
  std::filesystem::path folder_;
};

struct Settings {
  OpKind kind = OpKind::kAllReduce;
  int ranks = 2;
  std::size_t smallest = 8;
  std::size_t largest = std::size_t{256} << 20;
  double seconds = 0.5;
  DType dtype = DType::kFloat32;
  std::optional<DType> wire_dtype;
};

// Shared by all ranks: each writes its time of a call, rank 0 collects the slowest.
struct Scratch {
  std::atomic<double> seconds[64];
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double>& values) {
  if (values.empty()) {
    return 0;
  }
  std::nth_element(values.begin(), values.begin() + static_cast<long>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

void* shared_memory(std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw system_error("mmap", errno);
  }
  return data;
}

class Rank {
 public:
  Rank(const Settings& settings, int rank, Scratch& scratch, std::byte* roofline_buffers,
       const std::string& folder)
      : settings_(settings),
        rank_(rank),
        scratch_(scratch),
        roofline_buffers_(roofline_buffers),
        communicator_(create_native_communicator(std::make_shared<FolderStore>(folder), rank,
                                                 settings.ranks, {})) {}

  void measure() {
    // The second half is what all_to_all gets.
    const std::size_t memory = 2 * settings_.largest;
    ordinary_.assign(memory, std::byte{0});
    symmetric_ = communicator_->allocate(memory, {});
    std::memset(symmetric_->data(), 0, memory);
    if (rank_ == 0) {
      std::printf("%12s %12s %12s %12s %12s %10s\n", "bytes", "ordinary us", "symmetric us",
                  "roofline us", "calls", "% of roof");
    }
    for (std::size_t bytes = settings_.smallest; bytes <= settings_.largest; bytes *= 2) {
      measure_size(bytes);
    }
  }

 private:
  void measure_size(std::size_t bytes) {
    const Roofline traffic = roofline(bytes);
    const std::function<void()> arms[] = {
        [&] { run(ordinary_.data(), bytes); },
        [&] { run(symmetric_->data(), bytes); },
        [&] { traffic.run(); },
    };
    // Calls in a row, behind one that is not timed, which finds in the caches what the arm before
    // has left there. The clock costs as much as small calls do.
    const int batch = bytes <= 4096 ? 100 : bytes <= 65536 ? 10 : bytes <= 1 << 20 ? 4 : 1;
    std::vector<double> times[3];
    // As long again before, in which the tuner finds its way.
    const double warm_up = now();
    for (std::size_t calls = 0; keep_going(warm_up, calls); ++calls) {
      for (const auto& arm : arms) {
        arm();
      }
    }
    const double start = now();
    while (keep_going(start, times[0].size())) {
      for (int arm = 0; arm < 3; ++arm) {
        arms[arm]();
        barrier();
        const double begin = now();
        for (int i = 0; i < batch; ++i) {
          arms[arm]();
        }
        scratch_.seconds[rank_].store((now() - begin) / batch);
        barrier();
        double slowest = 0;
        for (int rank = 0; rank < settings_.ranks; ++rank) {
          slowest = std::max(slowest, scratch_.seconds[rank].load());
        }
        times[arm].push_back(slowest);
      }
    }
    if (rank_ == 0) {
      const double symmetric = median(times[1]);
      const double roofline = median(times[2]);
      std::printf("%12zu %12.3f %12.3f %12.3f %12zu %10.0f\n", bytes, median(times[0]) * 1e6,
                  symmetric * 1e6, roofline * 1e6,
                  times[0].size() * static_cast<std::size_t>(batch), roofline / symmetric * 100);
      std::fflush(stdout);
    }
  }

  // Rank 0 decides, so that all stop together.
  bool keep_going(double start, std::size_t calls) {
    std::int32_t more = now() - start < settings_.seconds || calls < 5 ? 1 : 0;
    Operation operation;
    operation.kind = OpKind::kBroadcast;
    const Buffer buffer{&more, 1, DType::kInt32, {}};
    if (rank_ == 0) {
      operation.inputs = {buffer};
    } else {
      operation.outputs = {buffer};
    }
    communicator_->run(std::move(operation));
    return more != 0;
  }

  void barrier() {
    Operation operation;
    operation.kind = OpKind::kBarrier;
    communicator_->run(std::move(operation));
  }

  // Elements of what is given or got: of a block where the kind has blocks.
  [[nodiscard]] std::size_t count(std::size_t bytes) const {
    const bool has_blocks =
        settings_.kind != OpKind::kAllReduce && settings_.kind != OpKind::kBroadcast;
    return bytes / element_size(settings_.dtype) / (has_blocks ? ranks() : 1);
  }
  [[nodiscard]] std::size_t ranks() const { return static_cast<std::size_t>(settings_.ranks); }

  void run(void* memory, std::size_t bytes) {
    const std::size_t block = count(bytes);
    const std::size_t block_bytes = block * element_size(settings_.dtype);
    auto* const data = static_cast<std::byte*>(memory);
    const Buffer one{data, block, settings_.dtype, {}};
    const Buffer own{
        data + static_cast<std::size_t>(rank_) * block_bytes, block, settings_.dtype, {}};
    const Buffer all{data, ranks() * block, settings_.dtype, {}};
    Operation operation;
    operation.kind = settings_.kind;
    operation.wire_dtype = settings_.wire_dtype;
    switch (settings_.kind) {
      case OpKind::kReduceScatter:
        operation.inputs = {all};
        operation.outputs = {own};
        break;
      case OpKind::kAllGather:
        operation.inputs = {own};
        operation.outputs = {all};
        break;
      case OpKind::kAllToAll:
        operation.inputs = {all};
        operation.outputs = {{data + settings_.largest, all.count, settings_.dtype, {}}};
        break;
      case OpKind::kBroadcast:
        (rank_ == 0 ? operation.inputs : operation.outputs) = {one};
        break;
      default:
        operation.inputs = {one};
        operation.outputs = {one};
        break;
    }
    communicator_->run(std::move(operation));
  }

  // What the collective on symmetric memory reads and writes, without waiting for anybody.
  [[nodiscard]] Roofline roofline(std::size_t bytes) const {
    Roofline::Case all;
    all.kind = settings_.kind;
    all.dtype = settings_.dtype;
    all.rank = rank_;
    all.count = count(bytes);
    const std::size_t block_bytes = all.count * element_size(settings_.dtype);
    for (std::size_t rank = 0; rank < ranks(); ++rank) {
      std::byte* const whole = roofline_buffers_ + rank * 2 * settings_.largest;
      std::byte* const own = whole + rank * block_bytes;
      all.inputs.push_back(settings_.kind == OpKind::kAllGather ? own : whole);
      all.outputs.push_back(settings_.kind == OpKind::kReduceScatter ? own
                            : settings_.kind == OpKind::kAllToAll    ? whole + settings_.largest
                                                                     : whole);
    }
    return Roofline(all);
  }

  const Settings& settings_;
  const int rank_;
  Scratch& scratch_;
  std::byte* const roofline_buffers_;
  CommunicatorPtr communicator_;
  std::vector<std::byte> ordinary_;
  MemoryPtr symmetric_;
};

void pin(int rank) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ::sched_getaffinity(0, sizeof allowed, &allowed);
  int wanted = rank % CPU_COUNT(&allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed) && wanted-- == 0) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      ::sched_setaffinity(0, sizeof one, &one);
      return;
    }
  }
}

// Of a cache line, from the core of rank 0 to that of another one; 0 where that failed, which it
// has said. Both are processes of their own, since one that is pinned can't be pinned elsewhere.
double handover_to(int other) {
  constexpr std::uint64_t kTurns = 20000;
  auto* const lines = static_cast<std::byte*>(shared_memory(3 * kHandoverBytes));
  auto* const took = reinterpret_cast<double*>(lines + 2 * kHandoverBytes);
  for (const bool begins : {true, false}) {
    const pid_t child = ::fork();
    if (child < 0) {
      std::perror("handover: fork");
      return 0;
    }
    if (child == 0) {
      int status = 0;
      try {
        pin(begins ? 0 : other);
        const double mine = time_line_handover(lines + (begins ? 0 : kHandoverBytes),
                                               lines + (begins ? kHandoverBytes : 0), begins,
                                               kTurns, Deadline::in(std::chrono::seconds(10)));
        if (begins) {
          *took = mine;
        }
      } catch (const std::exception& error) {
        std::fprintf(stderr, "handover: %s\n", error.what());
        status = 1;
      }
      ::_exit(status);
    }
  }
  int failed = 0;
  for (int child = 0; child < 2; ++child) {
    int status = 0;
    ::wait(&status);
    failed |= status;
  }
  const double result = failed == 0 ? *took : 0;
  ::munmap(lines, 3 * kHandoverBytes);
  return result;
}

int measure_handover(int ranks) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  ::sched_getaffinity(0, sizeof allowed, &allowed);
  const int cores = std::min(ranks, CPU_COUNT(&allowed));
  if (cores < 2) {
    std::fprintf(stderr, "handover: two CPUs are wanted\n");
    return 1;
  }
  double farthest = 0;
  for (int rank = 1; rank < cores; ++rank) {
    const double distance = handover_to(rank);
    if (distance == 0) {
      return 1;
    }
    farthest = std::max(farthest, distance);
  }
  std::printf("%.1f\n", farthest);
  return 0;
}

int run(const Settings& settings) {
  auto* scratch = new (shared_memory(sizeof(Scratch))) Scratch;
  auto* roofline = static_cast<std::byte*>(
      shared_memory(2 * settings.largest * static_cast<std::size_t>(settings.ranks)));
  std::string folder = (std::filesystem::temp_directory_path() / "pydist-bench-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) {
    throw system_error("mkdtemp", errno);
  }
  for (int rank = 0; rank < settings.ranks; ++rank) {
    if (::fork() == 0) {
      pin(rank);
      int status = 0;
      try {
        Rank(settings, rank, *scratch, roofline, folder).measure();
        // Others may still wait for each other: they must not take this end for a death.
        Endpoint::depart_all();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        status = 1;
      }
      std::fflush(stdout);
      ::_exit(status);
    }
  }
  int failed = 0;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    int status = 0;
    ::wait(&status);
    failed |= status;
  }
  std::filesystem::remove_all(folder);
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace pydist

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const auto word = [&words](std::size_t index, const char* usual) {
    return index < words.size() ? words[index] : std::string(usual);
  };
  pydist::Settings settings;
  const std::string kind = word(0, "all_reduce");
  if (kind == "handover") {
    return pydist::measure_handover(std::max(2, std::atoi(word(1, "2").c_str())));
  }
  bool is_kind = false;
  for (const pydist::OpKind each :
       {pydist::OpKind::kAllReduce, pydist::OpKind::kReduceScatter, pydist::OpKind::kAllGather,
        pydist::OpKind::kBroadcast, pydist::OpKind::kAllToAll}) {
    if (kind == pydist::to_string(each)) {
      settings.kind = each;
      is_kind = true;
    }
  }
  settings.ranks = std::clamp(std::atoi(word(1, "2").c_str()), 1, 64);
  settings.smallest = std::strtoull(word(2, "8").c_str(), nullptr, 10);
  settings.largest = std::strtoull(word(3, "268435456").c_str(), nullptr, 10);
  settings.seconds = std::atof(word(4, "0.5").c_str());
  if (word(5, "float32") == "bfloat16") {
    settings.dtype = pydist::DType::kBFloat16;
  }
  if (word(6, "float32") == "bfloat16") {
    settings.wire_dtype = pydist::DType::kBFloat16;
  }
  if (!is_kind || settings.smallest == 0 || settings.largest < settings.smallest) {
    std::fprintf(stderr, "usage: bench_engine [kind] [ranks] [smallest] [largest] [seconds] ...\n");
    return 2;
  }
  return pydist::run(settings);
}
