// How NCCL is found and refused, without a GPU.

#include "communicator/nccl/nccl_api.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "nccl_fakes.h"

namespace pydist::testing {
namespace {

using nccl::Api;
using nccl::Result;

TEST(NcclApi, OpensTheLibraryThatTheProcessHas) {
  const nccl::ApiPtr api = fake_nccl();
  EXPECT_EQ(api->version_text(), "2.30.7");
  EXPECT_TRUE(api->has_registration());
  EXPECT_TRUE(contains(api->origin(), "libnccl.so.2")) << api->origin();
}

TEST(NcclApi, PrefersTheLibraryOfTheProcessToAPath) {
  ASSERT_NE(fake_nccl(), nullptr);  // and so the path is not looked at
  EXPECT_EQ(Api::open("/nowhere/libnccl.so.2")->version(), 23007);
}

TEST(NcclApi, NamesTheVersionThatIsTooOld) {
  nccl::Functions functions = fake_nccl()->functions();
  functions.ncclGetVersion = [](int* version) {
    *version = 21706;
    return Result::kSuccess;
  };
  // As a library of that age would.
  functions.ncclMemAlloc = nullptr;
  const auto [kind, message, blame] = error_of([&] { Api(functions, "/lib/old.so"); });
  EXPECT_EQ(kind, ErrorKind::kTransport);
  EXPECT_TRUE(contains(message, "/lib/old.so is version 2.17.6; pydist needs 2.18.0")) << message;
}

TEST(NcclApi, NamesWhatALibraryLacks) {
  nccl::Functions functions = fake_nccl()->functions();
  functions.ncclCommAbort = nullptr;
  functions.ncclGroupEnd = nullptr;
  const auto [kind, message, blame] = error_of([&] { Api(functions, "/lib/odd.so"); });
  EXPECT_EQ(kind, ErrorKind::kTransport);
  EXPECT_TRUE(contains(message, "/lib/odd.so lacks ncclCommAbort, ncclGroupEnd")) << message;

  functions = {};
  EXPECT_TRUE(contains(error_of([&] { Api(functions, "/lib/none.so"); }).message,
                       "does not tell its version"));
}

TEST(NcclApi, UsesWhatCameLaterOnlyWhereItIs) {
  nccl::Functions functions = fake_nccl()->functions();
  functions.ncclCommRegister = nullptr;
  EXPECT_FALSE(Api(functions, "").has_registration());

  functions = fake_nccl()->functions();
  functions.ncclGetVersion = [](int* version) {
    *version = 21805;
    return Result::kSuccess;
  };
  EXPECT_FALSE(Api(functions, "").has_registration())
      << "a symbol of a version that has not got it";
}

TEST(NcclApi, SaysWhatNcclSays) {
  const nccl::ApiPtr api = fake_nccl();
  const auto [kind, message, blame] =
      describe(api->error_of(Result::kRemoteError, "all_reduce #3", nullptr));
  EXPECT_EQ(kind, ErrorKind::kPeerLost);
  EXPECT_TRUE(contains(message, "all_reduce #3: NCCL 2.30.7 says: remote process exited"))
      << message;
  EXPECT_TRUE(contains(message, "said by the fake")) << message;
  EXPECT_EQ(describe(api->error_of(Result::kInvalidUsage, "", nullptr)).kind,
            ErrorKind::kInvalidUsage);
}

}  // namespace
}  // namespace pydist::testing
