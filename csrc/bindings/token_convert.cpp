// token_convert.cpp: to_tokens(). Lists of plain ints and buffers have a fast way, everything else goes by __index__.
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include <mlx/array.h>

#include "arrays/shared_array.h"
#include "bindings/token_buffer.h"

namespace prefixcache::bindings {

namespace nb = nanobind;
namespace mx = mlx::core;

namespace {

constexpr std::uint64_t kLargestToken = std::numeric_limits<std::uint32_t>::max();
constexpr Py_ssize_t kAhead = 16;

[[noreturn]] void bad_token(const std::string& value, std::size_t position) {
  throw nb::value_error(
      ("token " + value + " at position " + std::to_string(position) + " is outside of 0..4294967295").c_str());
}

[[noreturn]] void bad_tokens(const std::string& what) {
  throw nb::type_error(("tokens must be a one-dimensional sequence or array of integers, not " + what).c_str());
}

std::string python_type(nb::handle object) {
  return Py_TYPE(object.ptr())->tp_name;
}

// The value of an exact int that fits a token, or -1 for any other int. Reads the digits without a call.
inline std::int64_t small_int(PyObject* object) {
  auto* number = reinterpret_cast<PyLongObject*>(object);
#if PY_VERSION_HEX >= 0x030C0000
  if (PyUnstable_Long_IsCompact(number)) return PyUnstable_Long_CompactValue(number);
#else
  const Py_ssize_t digits = Py_SIZE(number);
  if (digits == 1) return number->ob_digit[0];
  if (digits == 0) return 0;
#endif
  return -1;
}

std::string int_text(PyObject* number) {
  nb::object text = nb::steal(PyObject_Str(number));
  const char* utf8 = text.is_valid() ? PyUnicode_AsUTF8(text.ptr()) : nullptr;
  if (utf8 != nullptr) return utf8;
  PyErr_Clear();  // Python refuses to print integers of thousands of digits
  return "(a very large integer)";
}

// One element that is no small exact int. May run Python code.
std::uint32_t token_of(nb::handle item, std::size_t position) {
  if (PyBool_Check(item.ptr()) || !PyIndex_Check(item.ptr())) {
    throw nb::type_error(
        ("token at position " + std::to_string(position) + " must be an integer, not " + python_type(item)).c_str());
  }
  nb::object number = nb::steal(PyNumber_Index(item.ptr()));
  if (!number.is_valid()) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
    PyErr_Clear();
    throw nb::type_error(
        ("token at position " + std::to_string(position) + " must be an integer, not " + python_type(item)).c_str());
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0 || value < 0 || static_cast<std::uint64_t>(value) > kLargestToken) {
    bad_token(int_text(number.ptr()), position);
  }
  return static_cast<std::uint32_t>(value);
}

// A list or tuple.
TokenBuffer from_fast_sequence(nb::handle sequence) {
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(sequence.ptr());
  TokenBuffer tokens(static_cast<std::size_t>(size));
  std::uint32_t* out = tokens.writable();
  PyObject** items = PySequence_Fast_ITEMS(sequence.ptr());
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = items[i];
    // The ints lie anywhere in memory: ask for the ones to come early.
    if (i + kAhead < size) __builtin_prefetch(items[i + kAhead]);
    const std::int64_t value = PyLong_CheckExact(item) ? small_int(item) : -1;
    if (value >= 0 && static_cast<std::uint64_t>(value) <= kLargestToken) {
      out[i] = static_cast<std::uint32_t>(value);
      continue;
    }
    out[i] = token_of(nb::borrow(item), static_cast<std::size_t>(i));
    // __index__ may have run code that changed the list.
    if (PySequence_Fast_GET_SIZE(sequence.ptr()) != size) {
      throw nb::value_error("the list of tokens changed its length while it was read");
    }
    items = PySequence_Fast_ITEMS(sequence.ptr());
  }
  return tokens;
}

template <typename T>
bool is_token(T value) {
  if constexpr (std::is_signed_v<T>) {
    if (value < 0) return false;
  }
  return static_cast<std::uint64_t>(value) <= kLargestToken;
}

// Contiguous items are checked as a whole, which compilers turn into vector code.
template <typename T>
bool all_tokens(const std::uint8_t* __restrict data, std::size_t count, std::uint32_t* __restrict out) {
  bool good = true;
  for (std::size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, data + i * sizeof(T), sizeof(T));
    good &= is_token(value);
    out[i] = static_cast<std::uint32_t>(value);
  }
  return good;
}

template <typename T>
TokenBuffer from_items(const std::uint8_t* data, std::ptrdiff_t stride, std::size_t count) {
  TokenBuffer tokens(count);
  std::uint32_t* out = tokens.writable();
  if (stride == sizeof(T) && all_tokens<T>(data, count, out)) return tokens;
  for (std::size_t i = 0; i < count; ++i, data += stride) {
    T value;
    std::memcpy(&value, data, sizeof(T));
    if (!is_token(value)) bad_token(std::to_string(value), i);
    out[i] = static_cast<std::uint32_t>(value);
  }
  return tokens;
}

// `stride` in bytes.
TokenBuffer from_integers(const void* data, bool is_signed, std::size_t item_size, std::ptrdiff_t stride,
                          std::size_t count) {
  const auto* bytes = static_cast<const std::uint8_t*>(data);
  switch (item_size) {
    case 1:
      return is_signed ? from_items<std::int8_t>(bytes, stride, count) : from_items<std::uint8_t>(bytes, stride, count);
    case 2:
      return is_signed ? from_items<std::int16_t>(bytes, stride, count)
                       : from_items<std::uint16_t>(bytes, stride, count);
    case 4:
      return is_signed ? from_items<std::int32_t>(bytes, stride, count)
                       : from_items<std::uint32_t>(bytes, stride, count);
    case 8:
      return is_signed ? from_items<std::int64_t>(bytes, stride, count)
                       : from_items<std::uint64_t>(bytes, stride, count);
    default:
      bad_tokens("integers of " + std::to_string(item_size) + " bytes");
  }
}

TokenBuffer from_mlx(mx::array array) {
  if (!mx::issubdtype(array.dtype(), mx::integer)) bad_tokens("an MLX array that holds no integers");
  if (array.ndim() != 1) bad_tokens("an MLX array of " + std::to_string(array.ndim()) + " dimensions");
  const std::uint8_t* bytes = nullptr;
  {
    nb::gil_scoped_release release;
    if (!is_evaluated(array)) array.eval();
    bytes = bytes_of(array);
  }
  if (array.size() == 0) return {};
  const std::size_t item_size = array.itemsize();
  const auto stride = static_cast<std::ptrdiff_t>(array.strides(0)) * static_cast<std::ptrdiff_t>(item_size);
  const bool is_signed = mx::issubdtype(array.dtype(), mx::signedinteger);
  return from_integers(bytes, is_signed, item_size, stride, array.size());
}

struct BufferView {
  Py_buffer view{};
  ~BufferView() { PyBuffer_Release(&view); }
};

// Nothing for a buffer of Python objects, which is read as a sequence.
std::optional<TokenBuffer> from_buffer(nb::handle object) {
  BufferView held;
  const Py_buffer& view = held.view;
  if (PyObject_GetBuffer(object.ptr(), &held.view, PyBUF_RECORDS_RO) != 0) throw nb::python_error();
  std::string_view format = view.format != nullptr ? view.format : "B";
  const std::string what = python_type(object) + " of format '" + std::string(format) + "'";
  if (view.ndim != 1) bad_tokens(python_type(object) + " of " + std::to_string(view.ndim) + " dimensions");
  if (format == "O") return std::nullopt;
  const char native = std::endian::native == std::endian::little ? '<' : '>';
  if (format.size() == 2 && (format[0] == '@' || format[0] == '=' || format[0] == native)) format.remove_prefix(1);
  if (format.size() != 1) bad_tokens(what);
  const bool is_signed = std::string_view("bhilqn").find(format[0]) != std::string_view::npos;
  if (!is_signed && std::string_view("BHILQN").find(format[0]) == std::string_view::npos) bad_tokens(what);
  // ctypes leaves the strides of contiguous arrays out.
  const std::ptrdiff_t stride = view.strides != nullptr ? view.strides[0] : view.itemsize;
  return from_integers(view.buf, is_signed, static_cast<std::size_t>(view.itemsize), stride,
                       static_cast<std::size_t>(view.shape[0]));
}

}  // namespace

TokenBuffer to_tokens(nb::handle tokens) {
  PyObject* object = tokens.ptr();
  if (PyList_Check(object) || PyTuple_Check(object)) return from_fast_sequence(tokens);
  if (nb::isinstance<TokenBuffer>(tokens)) return nb::cast<TokenBuffer>(tokens);
  if (nb::isinstance<mx::array>(tokens)) return from_mlx(nb::cast<mx::array>(tokens));
  // Raw bytes are more often an encoding of tokens than tokens.
  if (PyUnicode_Check(object) || PyBytes_Check(object) || PyByteArray_Check(object)) bad_tokens(python_type(tokens));
  if (PyObject_CheckBuffer(object)) {
    if (std::optional<TokenBuffer> from = from_buffer(tokens)) return *from;
  }
  if (!PySequence_Check(object)) bad_tokens(python_type(tokens));
  nb::object list = nb::steal(PySequence_List(object));
  if (!list.is_valid()) throw nb::python_error();
  return from_fast_sequence(list);
}

}  // namespace prefixcache::bindings
