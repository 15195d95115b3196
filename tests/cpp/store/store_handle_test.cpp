#include "store/store_handle.h"

#include <csignal>
#include <iostream>

#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "support/store_fixture.h"

namespace prefixcache {
namespace {

using testing::chain;
using testing::keys_of;
using testing::put_block;
using testing::test_root;

class StoreHandleTest : public testing::StoreFixture {
 protected:
  // The exit status of a child that runs this, which must not take long. -1: it was ended.
  static int in_a_child(const std::function<bool()>& body) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      ::_exit(body() ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
};

TEST_F(StoreHandleTest, AForkedOneGetsMissesAndWaitsForNothing) {
  for (const std::uint64_t ram : {0u, 1u << 20}) {
    options_.ram_bytes = ram;
    auto store = BlockStore::open(options_);
    const auto blocks = chain(2, 4, static_cast<std::uint32_t>(ram));
    put_chain(*store, blocks);
    ASSERT_TRUE(store->flush().is_ok());
    const auto keys = keys_of(blocks);
    const std::vector<Part> kv = {Part::kv};
    const ChainView view{test_root(), keys, 4, blocks[0].tokens, {}};
    EXPECT_EQ(in_a_child([&] {
                bool closed = put_block(*store, chain(1, 4, 9)[0]).code() == StatusCode::Closed;
                closed &= store->gather(testing::request_for(blocks)).status.code() == StatusCode::Closed;
                closed &= store->load(keys[0], Part::kv).status.code() == StatusCode::Closed;
                closed &= store->erase(keys, kv).code() == StatusCode::Closed;
                closed &= store->clear().code() == StatusCode::Closed;
                closed &= store->flush().code() == StatusCode::Closed;
                closed &= found(*store, blocks) == 0 && !has(*store, blocks[0]);
                closed &= store->children(test_root()).empty() && store->trim_ram(0) == 0;
                closed &= store->longest_child(test_root(), 0, blocks[0].tokens, {}, Part::kv).rows == 0;
                closed &= store->deepest_window(view, {}, 4).n == 0 && store->deepest_state(view, 4).n == 0;
                closed &= store->deepest_fork(view, 4) == 0;
                store->touch(keys[0], Part::kv);
                closed &= store->stats().degraded && store->options().directory == options_.directory;
                closed &= store->close().is_ok();
                store.reset();
                return closed;
              }),
              0);
#ifdef __SANITIZE_THREAD__
    std::cout << "a store opened after a fork is not tried: ThreadSanitizer ends what starts threads there\n";
#else
    // One that it opens itself is its own.
    EXPECT_EQ(in_a_child([&] {
                const auto own = BlockStore::open(options_);
                return found(*own, blocks) == 2 && own->close().is_ok();
              }),
              0);
#endif
    testing::expect_chain(*store, blocks);
    EXPECT_TRUE(store->clear().is_ok());
  }
}

}  // namespace
}  // namespace prefixcache
