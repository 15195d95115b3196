// token_buffer.cpp: the shared memory of tokens, and its Python class.
#include "bindings/token_buffer.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <string_view>

namespace prefixcache::bindings {

namespace nb = nanobind;
using namespace nb::literals;

TokenBuffer::TokenBuffer(std::size_t size) : storage_(std::make_shared<Storage>()), size_(size) {
  storage_->tokens.reset(new std::uint32_t[size]);  // not zeroed: it is filled next
  storage_->capacity = size;
  storage_->used = size;
  data_ = storage_->tokens.get();
}

TokenBuffer TokenBuffer::slice(std::size_t lo, std::size_t hi) const {
  TokenBuffer part = *this;
  part.data_ = data_ + lo;
  part.size_ = hi - lo;
  return part;
}

TokenBuffer TokenBuffer::append(std::span<const std::uint32_t> more) const {
  if (more.empty()) return *this;
  const std::size_t size = size_ + more.size();
  if (storage_) {
    std::size_t end = static_cast<std::size_t>(data_ - storage_->tokens.get()) + size_;
    const std::size_t new_end = end + more.size();
    // Whoever moves `used` from our end owns the room behind it; everybody else copies.
    if (new_end <= storage_->capacity && storage_->used.compare_exchange_strong(end, new_end)) {
      std::copy(more.begin(), more.end(), data_ + size_);
      TokenBuffer longer = *this;
      longer.size_ = size;
      return longer;
    }
  }
  TokenBuffer longer(size + size / 2);
  longer.size_ = size;
  longer.storage_->used = size;
  std::copy(data_, data_ + size_, longer.data_);
  std::copy(more.begin(), more.end(), longer.data_ + size_);
  return longer;
}

std::size_t TokenBuffer::common_run(const TokenBuffer& other, std::size_t start) const {
  constexpr std::size_t kStep = 1024;
  const std::size_t end = std::min(size_, other.size_);
  std::size_t at = start;
  while (at + kStep <= end && std::memcmp(data_ + at, other.data_ + at, kStep * sizeof *data_) == 0) at += kStep;
  while (at < end && data_[at] == other.data_[at]) ++at;
  return at > start ? at - start : 0;
}

namespace {

std::size_t checked_index(const TokenBuffer& tokens, Py_ssize_t index) {
  const auto size = static_cast<Py_ssize_t>(tokens.size());
  const Py_ssize_t at = index < 0 ? index + size : index;
  if (at < 0 || at >= size) {
    throw nb::index_error(("token " + std::to_string(index) + " of " + std::to_string(size)).c_str());
  }
  return static_cast<std::size_t>(at);
}

TokenBuffer checked_slice(const TokenBuffer& tokens, Py_ssize_t lo, Py_ssize_t hi) {
  if (lo < 0 || lo > hi || hi > static_cast<Py_ssize_t>(tokens.size())) {
    throw nb::value_error(("slice [" + std::to_string(lo) + ", " + std::to_string(hi) + ") is not within the " +
                           std::to_string(tokens.size()) + " tokens")
                              .c_str());
  }
  return tokens.slice(static_cast<std::size_t>(lo), static_cast<std::size_t>(hi));
}

nb::list to_list(const TokenBuffer& tokens) {
  const auto size = static_cast<Py_ssize_t>(tokens.size());
  nb::list list = nb::steal<nb::list>(PyList_New(size));
  if (!list.is_valid()) throw nb::python_error();
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyLong_FromUnsignedLong(tokens.data()[i]);
    if (item == nullptr) throw nb::python_error();
    PyList_SET_ITEM(list.ptr(), i, item);
  }
  return list;
}

bool equal(const TokenBuffer& a, const TokenBuffer& b) {
  return std::ranges::equal(a.span(), b.span());
}

extern "C" int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto& tokens = *nb::inst_ptr<TokenBuffer>(self);
  if (PyBuffer_FillInfo(view, self, const_cast<std::uint32_t*>(tokens.data()),
                        static_cast<Py_ssize_t>(tokens.size() * sizeof(std::uint32_t)), 1, flags) != 0) {
    return -1;
  }
  auto* shape = new (std::nothrow) Py_ssize_t(static_cast<Py_ssize_t>(tokens.size()));
  if (shape == nullptr) {
    PyBuffer_Release(view);
    PyErr_NoMemory();
    return -1;
  }
  static char format[] = "I";
  view->itemsize = sizeof(std::uint32_t);
  view->internal = shape;
  if ((flags & PyBUF_FORMAT) == PyBUF_FORMAT) view->format = format;
  if ((flags & PyBUF_ND) == PyBUF_ND) view->shape = shape;
  return 0;
}

extern "C" void release_buffer(PyObject*, Py_buffer* view) {
  delete static_cast<Py_ssize_t*>(view->internal);
}

PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                              {Py_bf_releasebuffer, reinterpret_cast<void*>(release_buffer)},
                              {0, nullptr}};

}  // namespace

void init_token_buffer(nb::module_& m) {
  nb::class_<TokenBuffer> cls(
      m, "TokenBuffer", nb::type_slots(buffer_slots),
      "Tokens as contiguous unsigned 32-bit integers. Never changes; slices share its memory; any thread may read it.\n"
      "It has the buffer protocol (format 'I', one dimension, read-only).");
  cls.def(
      "__init__", [](TokenBuffer* self, nb::handle tokens) { new (self) TokenBuffer(to_tokens(tokens)); },
      "tokens"_a.none(), nb::sig("def __init__(self, tokens: object) -> None"),
      "Takes a list, tuple or other sequence of integers, an MLX integer array, or a one-dimensional buffer of\n"
      "integers (array.array, numpy, memoryview; any stride). ValueError names a token that is negative or above\n"
      "2**32 - 1 and its position; TypeError names what is not an integer.");
  cls.def("__len__", &TokenBuffer::size);
  cls.def(
      "__getitem__", [](const TokenBuffer& self, Py_ssize_t i) { return self.data()[checked_index(self, i)]; },
      "index"_a);
  cls.def(
      "__eq__", [](const TokenBuffer& self, const TokenBuffer& other) { return equal(self, other); }, nb::is_operator(),
      nb::sig("def __eq__(self, other: object, /) -> bool"));
  cls.def("__hash__", [](const TokenBuffer& self) {
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(self.data()), self.span().size_bytes()});
  });
  cls.def("slice", &checked_slice, "lo"_a, "hi"_a, "Tokens [lo, hi), sharing memory. ValueError outside of 0..len.");
  cls.def(
      "tobytes", [](const TokenBuffer& self) { return nb::bytes(self.data(), self.size() * sizeof(std::uint32_t)); },
      "The tokens as bytes, four each, in the machine's order.");
  cls.def("tolist", &to_list, nb::sig("def tolist(self) -> list[int]"));
  cls.def(
      "common_prefix",
      [](const TokenBuffer& self, nb::handle other, Py_ssize_t start) {
        if (start < 0) throw nb::value_error(("start must not be negative: " + std::to_string(start)).c_str());
        return self.common_run(to_tokens(other), static_cast<std::size_t>(start));
      },
      "other"_a.none(), "start"_a = 0, nb::sig("def common_prefix(self, other: object, start: int = 0) -> int"),
      "How many tokens are equal from position `start` of both on.");
}

}  // namespace prefixcache::bindings
