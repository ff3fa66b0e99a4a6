#include "base/env.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

// Takes every declared variable out of the environment, and puts it back at the end.
class EnvironmentTest : public ::testing::Test {
 protected:
  EnvironmentTest() {
    for (const EnvironmentVariable& variable : environment_variables()) {
      const std::string name(variable.name);
      if (const char* value = std::getenv(name.c_str())) {
        before_.emplace_back(name, value);
      }
      ::unsetenv(name.c_str());
      touched_.insert(name);
    }
  }
  ~EnvironmentTest() override {
    for (const std::string& name : touched_) {
      ::unsetenv(name.c_str());
    }
    for (const auto& [name, value] : before_) {
      ::setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
    }
  }

  void set(const std::string& name, const std::string& value) {
    touched_.insert(name);
    ::setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
  }

  // What the engine says of a value that it does not take.
  std::string complaint(const std::string& name, const std::string& value) {
    set(name, value);
    std::string text;
    try {
      static_cast<void>(Environment::read());
    } catch (const InvalidUsage& error) {
      text = error.what();
    }
    ::unsetenv(name.c_str());
    return text;
  }

 private:
  std::set<std::string> touched_;
  std::vector<std::pair<std::string, std::string>> before_;
};

TEST_F(EnvironmentTest, DefaultsAreWhatTheListSays) {
  // Writing the documented default of every variable changes nothing.
  const Environment unset = Environment::read();
  for (const EnvironmentVariable& variable : environment_variables()) {
    if (!variable.default_value.empty()) {
      set(std::string(variable.name), std::string(variable.default_value));
    }
  }
  const Environment written = Environment::read();
  EXPECT_EQ(written.algorithm, unset.algorithm);
  EXPECT_EQ(written.timeout, unset.timeout);
  EXPECT_EQ(written.chunk_bytes, unset.chunk_bytes);
  EXPECT_EQ(written.staging_bytes, unset.staging_bytes);
  EXPECT_EQ(written.heartbeat_warning, unset.heartbeat_warning);
  EXPECT_EQ(written.heartbeat_timeout, unset.heartbeat_timeout);
  EXPECT_EQ(written.log_levels.all, unset.log_levels.all);
  EXPECT_FALSE(unset.host_id.has_value());
  EXPECT_FALSE(unset.one_shot_bytes.has_value());
  EXPECT_FALSE(unset.rounds_from.has_value());
  EXPECT_FALSE(unset.rounds_bytes.has_value());
  EXPECT_FALSE(unset.spin.has_value());
  EXPECT_TRUE(unset.cpu_isa.empty());
}

TEST_F(EnvironmentTest, ReadsEveryVariable) {
  set("PYDIST_ALGORITHM", "ring");
  set("PYDIST_TIMEOUT", "1.5");
  set("PYDIST_HOST_ID", "rack 7, left");
  set("PYDIST_SPIN_US", "0");
  set("PYDIST_CHUNK_BYTES", "4096");
  set("PYDIST_ONE_SHOT_BYTES", "0");
  set("PYDIST_ROUNDS_FROM", "3");
  set("PYDIST_ROUNDS_BYTES", "0");
  set("PYDIST_STAGING_BYTES", "65536");
  set("PYDIST_HEARTBEAT_WARNING", "0.25");
  set("PYDIST_HEARTBEAT_TIMEOUT", "90");
  set("PYDIST_CPU_ISA", "portable");
  set("PYDIST_LOG", "debug");
  const Environment environment = Environment::read();
  EXPECT_EQ(environment.algorithm, AlgorithmChoice::kRing);
  EXPECT_EQ(environment.timeout, std::chrono::milliseconds(1500));
  EXPECT_EQ(environment.host_id, "rack 7, left");
  EXPECT_EQ(environment.spin, std::chrono::microseconds(0));
  EXPECT_EQ(environment.chunk_bytes, 4096u);
  EXPECT_EQ(environment.one_shot_bytes, std::size_t{0});
  EXPECT_EQ(environment.rounds_from, std::size_t{3});
  EXPECT_EQ(environment.rounds_bytes, std::size_t{0});
  EXPECT_EQ(environment.staging_bytes, 65536u);
  EXPECT_EQ(environment.heartbeat_warning, std::chrono::milliseconds(250));
  EXPECT_EQ(environment.heartbeat_timeout, std::chrono::seconds(90));
  EXPECT_EQ(environment.cpu_isa, "portable");
  EXPECT_EQ(environment.log_levels.all, LogLevel::kDebug);
}

TEST_F(EnvironmentTest, ReadsWhereOtherHostsConnect) {
  const NetworkSettings unset = Environment::read().network;
  EXPECT_TRUE(unset.interfaces.empty());
  EXPECT_EQ(unset.ports.first, 0);
  EXPECT_EQ(unset.ports.last, 0);
  EXPECT_EQ(unset.sockets, std::nullopt);

  set("PYDIST_SOCKETS", "16");
  const std::vector<std::pair<std::string, std::vector<std::string>>> interfaces = {
      {"eth0", {"eth0"}},
      {"eth0,ib1", {"eth0", "ib1"}},
      {"eth0,,ib1,", {"eth0", "ib1"}},
      {",", {}},
  };
  for (const auto& [text, names] : interfaces) {
    set("PYDIST_INTERFACE", text);
    EXPECT_EQ(Environment::read().network.interfaces, names) << text;
  }
  EXPECT_EQ(Environment::read().network.sockets, 16u);
  const std::vector<std::pair<std::string, std::pair<int, int>>> ports = {
      {"29600-29663", {29600, 29663}},
      {"1-65535", {1, 65535}},
      {"80-80", {80, 80}},
      {"80", {80, 80}}};
  for (const auto& [text, ends] : ports) {
    set("PYDIST_PORTS", text);
    EXPECT_EQ(Environment::read().network.ports.first, ends.first) << text;
    EXPECT_EQ(Environment::read().network.ports.last, ends.second) << text;
  }
}

TEST_F(EnvironmentTest, SubsystemsHaveLogLevelsOfTheirOwn) {
  set("PYDIST_LOG", "health=debug,error,nccl=info");
  const LogLevels levels = Environment::read().log_levels;
  EXPECT_EQ(levels.all, LogLevel::kError);
  const std::vector<std::pair<std::string, LogLevel>> expected = {{"health", LogLevel::kDebug},
                                                                  {"nccl", LogLevel::kInfo}};
  EXPECT_EQ(levels.of_subsystems, expected);
}

TEST_F(EnvironmentTest, EmptyMeansUnset) {
  for (const EnvironmentVariable& variable : environment_variables()) {
    set(std::string(variable.name), "");
  }
  const Environment environment = Environment::read();
  EXPECT_EQ(environment.timeout, Environment().timeout);
  EXPECT_FALSE(environment.host_id.has_value());
  EXPECT_FALSE(environment.spin.has_value());
}

TEST_F(EnvironmentTest, RefusesNonsenseAndSaysWhatIsValid) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> nonsense = {
      {"PYDIST_BACKEND", {"mpi", "Native", "auto ", " "}},
      {"PYDIST_ALGORITHM", {"tree", "RING"}},
      {"PYDIST_TIMEOUT", {"0", "-1", "ten", "1s", "nan", "inf", "1e300", " 1", "0x10", "1,5"}},
      {"PYDIST_SPIN_US", {"-1", "1e9", "few", "nan"}},
      {"PYDIST_CHUNK_BYTES", {"4095", "16777217", "128K", "-4096", "nan"}},
      {"PYDIST_STAGING_BYTES", {"65535", "1073741825", "4M", "-65536", "65536.5"}},
      {"PYDIST_HEARTBEAT_WARNING", {"0", "-5", "soon", "inf"}},
      {"PYDIST_HEARTBEAT_TIMEOUT", {"0", "-5", "late", "inf"}},
      {"PYDIST_PORTS",
       {"0", "65536", "-", "-80", "80-", "90-80", "80-90-100", "80:90", "80 - 90", "80.5-90", "1e3",
        "80-90000", "0-80", "0x50", "+80", "all"}},
      {"PYDIST_SOCKETS", {"0", "17", "-1", "2.5", "two", "nan"}},
      {"PYDIST_CPU_ISA", {"sse", "AVX2", "best"}},
      {"PYDIST_LOG",
       {"verbose", "2", "warning,health", "nerves=debug", "health=", "health=loud", "=debug"}},
  };
  for (const auto& [name, values] : nonsense) {
    for (const std::string& value : values) {
      const std::string text = complaint(name, value);
      EXPECT_NE(text.find(name), std::string::npos) << name << "=" << value << ": " << text;
      EXPECT_NE(text.find("'" + value + "'"), std::string::npos) << name << ": " << text;
    }
  }
  EXPECT_NE(complaint("PYDIST_BACKEND", "mpi").find("auto, native, nccl, gloo"), std::string::npos);
  EXPECT_NE(complaint("PYDIST_CHUNK_BYTES", "1").find("4096"), std::string::npos);
}

TEST_F(EnvironmentTest, NamesOfChoicesComeBack) {
  for (const auto choice :
       {AlgorithmChoice::kAuto, AlgorithmChoice::kDirect, AlgorithmChoice::kRing}) {
    set("PYDIST_ALGORITHM", std::string(to_string(choice)));
    EXPECT_EQ(Environment::read().algorithm, choice);
  }
  for (const auto level :
       {LogLevel::kError, LogLevel::kWarning, LogLevel::kInfo, LogLevel::kDebug}) {
    set("PYDIST_LOG", std::string(to_string(level)));
    EXPECT_EQ(Environment::read().log_levels.all, level);
  }
}

TEST_F(EnvironmentTest, EveryVariableIsDescribedOnce) {
  std::set<std::string_view> names;
  for (const EnvironmentVariable& variable : environment_variables()) {
    EXPECT_TRUE(variable.name.starts_with("PYDIST_")) << variable.name;
    EXPECT_FALSE(variable.values.empty()) << variable.name;
    EXPECT_FALSE(variable.meaning.empty()) << variable.name;
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name;
  }
}

TEST_F(EnvironmentTest, SingleCopiesAreOnOrOff) {
  EXPECT_TRUE(Environment::read().single_copy);
  set("PYDIST_SINGLE_COPY", "off");
  EXPECT_FALSE(Environment::read().single_copy);
  set("PYDIST_SINGLE_COPY", "on");
  EXPECT_TRUE(Environment::read().single_copy);
  set("PYDIST_SINGLE_COPY", "0");
  EXPECT_THROW(static_cast<void>(Environment::read()), InvalidUsage);
}

}  // namespace
}  // namespace pydist
