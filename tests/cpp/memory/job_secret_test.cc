#include "memory/job_secret.h"

#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

namespace fs = std::filesystem;

TEST(JobSecretTest, ASignatureHoldsForItsTextAndItsSecretAlone) {
  const JobSecret secret = JobSecret::random();
  const std::string signature = secret.sign("a text");
  EXPECT_TRUE(secret.has_signed("a text", signature));
  EXPECT_FALSE(secret.has_signed("another text", signature));
  EXPECT_FALSE(secret.has_signed("a text", ""));
  EXPECT_FALSE(JobSecret::random().has_signed("a text", signature));
  EXPECT_FALSE(secret.derive("a purpose").has_signed("a text", signature));
  EXPECT_EQ(secret.derive("a purpose").key(), secret.derive("a purpose").key());
  EXPECT_NE(secret.derive("a purpose").key(), secret.derive("another purpose").key());
  // What is derived and what is signed do not mix.
  EXPECT_NE(secret.derive("a text").key(), signature);
}

// A folder of the test's own as XDG_RUNTIME_DIR.
class SecretFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "pydist-test-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    top_ = name;
    if (const char* const before = std::getenv("XDG_RUNTIME_DIR")) {
      before_ = before;
    }
    ::setenv("XDG_RUNTIME_DIR", name.c_str(), 1);
  }
  void TearDown() override {
    if (before_) {
      ::setenv("XDG_RUNTIME_DIR", before_->c_str(), 1);
    } else {
      ::unsetenv("XDG_RUNTIME_DIR");
    }
    fs::remove_all(top_);
  }

  [[nodiscard]] std::string own_folder() const {
    return join(top_.string(), "/pydist-", ::geteuid());
  }

  fs::path top_;
  std::optional<std::string> before_;
};

TEST_F(SecretFileTest, IsReadByItsUserAndLeavesNothing) {
  const JobSecret secret = JobSecret::random();
  {
    const SecretFile file("0123", secret);
    EXPECT_EQ(file.folder(), own_folder());
    EXPECT_EQ(read_secret(file.folder(), "0123").key(), secret.key());
    struct stat status{};
    ASSERT_EQ(::stat((file.folder() + "/0123").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0600u);
    ASSERT_EQ(::stat(file.folder().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0700u);
  }
  EXPECT_TRUE(fs::is_empty(top_));
  EXPECT_THROW(static_cast<void>(read_secret(own_folder(), "0123")), TransportError);
}

TEST_F(SecretFileTest, ManyJobsUseTheFolderAtOnce) {
  std::vector<std::thread> jobs;
  for (int job = 0; job < 4; ++job) {
    jobs.emplace_back([job] {
      for (int turn = 0; turn < 200; ++turn) {
        const JobSecret secret = JobSecret::random();
        const std::string name = join("job", job);
        const SecretFile file(name, secret);
        EXPECT_EQ(read_secret(file.folder(), name).key(), secret.key());
      }
    });
  }
  for (std::thread& job : jobs) {
    job.join();
  }
  EXPECT_TRUE(fs::is_empty(top_));
}

TEST_F(SecretFileTest, IsNotReadWhereOthersCouldHaveWrittenIt) {
  const JobSecret secret = JobSecret::random();
  const SecretFile file("0123", secret);
  const std::string path = own_folder() + "/0123";
  const auto is_refused = [&] {
    try {
      static_cast<void>(read_secret(own_folder(), "0123"));
      return false;
    } catch (const TransportError&) {
      return true;
    }
  };
  EXPECT_FALSE(is_refused());
  fs::permissions(path, fs::perms::group_read, fs::perm_options::add);
  EXPECT_TRUE(is_refused());
  fs::permissions(path, fs::perms::group_read, fs::perm_options::remove);
  fs::permissions(own_folder(), fs::perms::others_write, fs::perm_options::add);
  EXPECT_TRUE(is_refused());
  fs::permissions(own_folder(), fs::perms::others_write, fs::perm_options::remove);
  EXPECT_FALSE(is_refused());
  // A link, to the file or to the folder.
  fs::rename(path, own_folder() + "/real");
  fs::create_symlink(own_folder() + "/real", path);
  EXPECT_TRUE(is_refused());
  fs::remove(path);
  fs::rename(own_folder() + "/real", path);
  fs::create_directory_symlink(own_folder(), top_ / "link");
  EXPECT_THROW(static_cast<void>(read_secret((top_ / "link").string(), "0123")), TransportError);
  fs::remove(top_ / "link");
  // Something else, or of another length.
  EXPECT_THROW(static_cast<void>(read_secret("/dev", "zero")), TransportError);
  EXPECT_THROW(static_cast<void>(read_secret(own_folder(), "../0123")), TransportError);
  EXPECT_THROW(static_cast<void>(read_secret("relative", "0123")), TransportError);
  fs::resize_file(path, 63);
  EXPECT_TRUE(is_refused());
  if (::geteuid() == 0) {
    fs::resize_file(path, 64);
    EXPECT_FALSE(is_refused());
    ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
    EXPECT_TRUE(is_refused());
  }
}

TEST_F(SecretFileTest, WhoCannotReadItIsToldOfTheVariable) {
  for (const std::string& folder : {own_folder(), std::string("/dev"), std::string()}) {
    try {
      static_cast<void>(read_secret(folder, "zero"));
      FAIL() << folder;
    } catch (const TransportError& error) {
      EXPECT_NE(std::string(error.what()).find("PYDIST_JOB_SECRET"), std::string::npos)
          << error.what();
    }
  }
}

TEST_F(SecretFileTest, AnotherPlaceIsTakenWhereOneIsNotPrivate) {
  fs::create_directory(own_folder());
  fs::permissions(own_folder(), fs::perms::all);
  const SecretFile file("0123", JobSecret::random());
  EXPECT_NE(file.folder(), own_folder());
}

TEST_F(SecretFileTest, NobodyCanTakeTheFoldersNameAway) {
  const char* const before = std::getenv("TMPDIR");
  const std::optional<std::string> kept =
      before ? std::optional<std::string>(before) : std::nullopt;
  ::setenv("TMPDIR", top_.c_str(), 1);
  fs::create_directory(own_folder());
  fs::permissions(own_folder(), fs::perms::all);
  {
    const JobSecret secret = JobSecret::random();
    const SecretFile file("0123", secret);
    EXPECT_TRUE(file.folder().starts_with(own_folder() + "-")) << file.folder();
    EXPECT_EQ(read_secret(file.folder(), "0123").key(), secret.key());
    EXPECT_TRUE(fs::exists(file.folder()));
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(top_), fs::directory_iterator()), 1);
  kept ? ::setenv("TMPDIR", kept->c_str(), 1) : ::unsetenv("TMPDIR");
}

}  // namespace
}  // namespace pydist
