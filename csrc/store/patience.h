// patience.h: calls that may hang, on threads of their own, so that nobody waits for them longer than he says.
//
// Threads: any.
// Owns:    its threads. The destructor waits for every call, those included that nobody waits for any more.
// Units:   seconds.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace prefixcache::store {

class Patience {
 public:
  Patience() = default;
  ~Patience();
  Patience(const Patience&) = delete;
  Patience& operator=(const Patience&) = delete;

  // Runs `work` and waits for its end. False if that took longer than `seconds`: it goes on by itself, so it must own
  // what it uses and must not throw. False at once, and nothing is run, while such a call is still under way or where
  // the system has no thread for it.
  bool run(std::function<void()> work, double seconds);

  // A call overran and has not ended yet.
  bool overrun() const;

 private:
  struct Helper {
    std::thread thread;
    std::condition_variable wake;
    std::function<void()> work;
    bool asked = false;       // its work has not ended
    bool busy = false;        // somebody waits for it, or it was left alone and has not ended
    bool left_alone = false;  // nobody waits for its work
  };

  Helper* start_helper();
  void serve(Helper& helper);

  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::vector<std::unique_ptr<Helper>> helpers_;  // as many as calls were ever under way at once
  int overruns_ = 0;
  bool stopping_ = false;
};

}  // namespace prefixcache::store
