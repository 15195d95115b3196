#include "store/patience.h"

#include <algorithm>
#include <chrono>

namespace prefixcache::store {

Patience::~Patience() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& helper : helpers_) helper->wake.notify_all();
  }
  for (const auto& helper : helpers_) helper->thread.join();
}

bool Patience::overrun() const {
  std::lock_guard lock(mutex_);
  return overruns_ > 0;
}

bool Patience::run(std::function<void()> work, double seconds) {
  std::unique_lock lock(mutex_);
  if (overruns_ > 0 || stopping_) return false;
  const auto idle = std::find_if(helpers_.begin(), helpers_.end(), [](const auto& helper) { return !helper->busy; });
  Helper* helper = idle == helpers_.end() ? nullptr : idle->get();
  if (helper == nullptr) {
    helper = helpers_.emplace_back(std::make_unique<Helper>()).get();
    helper->thread = std::thread([this, helper] { serve(*helper); });
  }
  helper->work = std::move(work);
  helper->asked = helper->busy = true;
  helper->left_alone = false;
  helper->wake.notify_one();
  // Nobody else gives this helper work before it is let go.
  if (done_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return !helper->asked; })) {
    helper->busy = false;
    return true;
  }
  helper->left_alone = true;
  ++overruns_;
  return false;
}

void Patience::serve(Helper& helper) {
  std::unique_lock lock(mutex_);
  for (;;) {
    helper.wake.wait(lock, [&] { return stopping_ || helper.asked; });
    if (!helper.asked) return;
    auto work = std::move(helper.work);
    lock.unlock();
    work();
    // What it owns goes before anybody is told.
    work = nullptr;
    lock.lock();
    helper.asked = false;
    if (helper.left_alone) {
      --overruns_;
      helper.busy = false;
    }
    done_.notify_all();
  }
}

}  // namespace prefixcache::store
