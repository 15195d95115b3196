// status.h: the result of an operation that may fail for reasons outside the program.
//
// Threads: plain values.
// Owns:    its message.
// Errors:  misuse is not a Status: it throws std::invalid_argument.
#pragma once

#include <string>
#include <utility>

#include "prefixcache/api.h"

namespace prefixcache {

enum class StatusCode {
  Ok,
  NotFound,  // nothing stored under this key: a miss
  Corrupt,   // stored bytes failed a check and were forgotten
  Full,      // a byte bound was reached; nothing was kept
  IOError,   // the file system refused; see error_number()
  Closed,    // the store was closed
};

class PREFIXCACHE_API Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message, int error_number = 0)
      : code_(code), error_number_(error_number), message_(std::move(message)) {}

  static Status ok() { return {}; }

  bool is_ok() const { return code_ == StatusCode::Ok; }
  StatusCode code() const { return code_; }
  // The errno behind an IOError, else 0.
  int error_number() const { return error_number_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::Ok;
  int error_number_ = 0;
  std::string message_;
};

}  // namespace prefixcache
