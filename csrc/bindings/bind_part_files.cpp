// bind_part_files.cpp: part_files.h for Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/key_casts.h"
#include "prefixcache/part_files.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace prefixcache::bindings {

namespace {

using NameItem = std::tuple<nb::bytes, std::uint64_t, std::int64_t, Part>;

std::optional<NameItem> parse(std::string_view name) {
  PartName found;
  if (!parse_part_name(name, found)) return std::nullopt;
  return NameItem{to_bytes(found.key), found.parent_prefix, found.depth, found.part};
}

// A message names the path, which need not be UTF-8.
Status readable(const Status& status) {
  const std::string& bytes = status.message();
  nb::object text = nb::steal(PyUnicode_DecodeUTF8(bytes.data(), nb::ssize_t(bytes.size()), "backslashreplace"));
  if (!text.is_valid()) throw nb::python_error();
  return {status.code(), nb::cast<std::string>(text), status.error_number()};
}

std::pair<Status, PartSummary> check(const nb::bytes& path, bool data) {
  const std::string text(path.c_str(), path.size());
  if (text.find('\0') != std::string::npos) throw nb::value_error("a path holds no zero byte");
  PartSummary summary;
  Status status;
  {
    nb::gil_scoped_release release;
    status = check_part(Env::posix(), text, data, summary);
  }
  return {readable(status), summary};
}

std::vector<std::pair<std::size_t, double>> order(const std::vector<std::pair<std::string_view, double>>& parts) {
  std::vector<PartAge> ages(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!parse_part_name(parts[i].first, ages[i].name)) throw nb::value_error("not the name of a part file");
    ages[i].modified = parts[i].second;
  }
  std::vector<std::pair<std::size_t, double>> out;
  out.reserve(parts.size());
  for (const std::size_t place : eviction_order(ages)) out.emplace_back(place, ages[place].modified);
  return out;
}

}  // namespace

void init_part_files(nb::module_& m) {
  nb::class_<PartSummary>(m, "PartSummary", "What the header of a part file says.")
      .def_ro("row_lo", &PartSummary::row_lo)
      .def_ro("row_hi", &PartSummary::row_hi)
      .def_ro("tokens", &PartSummary::tokens)
      .def_ro("tensors", &PartSummary::tensors)
      .def_ro("tensor_bytes", &PartSummary::tensor_bytes);
  m.def("parse_part_name", &parse, "name"_a,
        "What the name of a part file says: (key, first 8 bytes of its parent's as a number, depth, part), or None.");
  m.def("check_part", &check, "path"_a, "data"_a = true,
        "Checks a part file: its header, that it is what its name says and, with `data`, every tensor's digest.\n"
        "Returns OK, NOT_FOUND, CORRUPT or IO_ERROR, and the header's summary: all zero unless the header is sound.");
  m.def(
      "eviction_order", &order, "parts"_a,
      "The order in which a store would evict parts, given as (file name, time of last use): (place in `parts`, time\n"
      "that counts), first to go first. What stays are prefixes, wherever one stops.");
}

}  // namespace prefixcache::bindings
