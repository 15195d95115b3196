#include "store/patience.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>

#include "gather/ready_to_throw.h"

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
    helper = start_helper();
    if (helper == nullptr) return false;
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

Patience::Helper* Patience::start_helper() {
  try {
    auto helper = std::make_unique<Helper>();
    helpers_.reserve(helpers_.size() + 1);
    helper->thread = std::thread([this, own = helper.get()] { serve(*own); });
    return helpers_.emplace_back(std::move(helper)).get();
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  return nullptr;
}

void Patience::serve(Helper& helper) {
  gather::ready_to_throw();
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
