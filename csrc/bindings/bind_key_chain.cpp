// bind_key_chain.cpp: the Python class KeyChain.
#include <new>
#include <optional>
#include <string>
#include <string_view>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>

#include "bindings/key_casts.h"
#include "bindings/key_chain.h"

namespace prefixcache::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

void construct(KeyChain* self, std::string_view name_space, const std::vector<SaltItem>& salts, nb::handle tokens,
               std::int64_t block_size, const std::vector<ContentItem>& content, const KeyChain* previous) {
  KeyChain chain(name_space, to_salts(salts), block_size, to_content(content));
  TokenBuffer all = to_tokens(tokens);
  {
    nb::gil_scoped_release release;
    chain.assign(std::move(all), previous);
  }
  new (self) KeyChain(std::move(chain));
}

void extend(KeyChain& self, nb::handle tokens) {
  const TokenBuffer more = to_tokens(tokens);
  nb::gil_scoped_release release;
  self.extend(more.span());
}

// Block numbers run over the whole blocks and, one further, the tail.
std::size_t checked_block(const KeyChain& chain, Py_ssize_t i) {
  const auto blocks = static_cast<Py_ssize_t>(chain.keys.size()) + (chain.tail_size() > 0 ? 1 : 0);
  if (i < 0 || i >= blocks) {
    throw nb::index_error(("block " + std::to_string(i) + " of " + std::to_string(blocks)).c_str());
  }
  return static_cast<std::size_t>(i);
}

nb::bytes key(const KeyChain& self, Py_ssize_t i) {
  const auto blocks = static_cast<Py_ssize_t>(self.keys.size());
  if (i < 0 || i >= blocks) {
    throw nb::index_error(("block " + std::to_string(i) + " of " + std::to_string(blocks)).c_str());
  }
  return to_bytes(self.keys[static_cast<std::size_t>(i)]);
}

nb::bytes cut_key(const KeyChain& self, Py_ssize_t i, std::int64_t depth) {
  const std::size_t block = checked_block(self, i);
  const auto lo = static_cast<std::int64_t>(block) * self.block_size;
  const auto tokens = self.block_tokens(block);
  if (depth <= lo || depth > lo + static_cast<std::int64_t>(tokens.size())) {
    throw nb::value_error(("depth " + std::to_string(depth) + " is not in block " + std::to_string(i)).c_str());
  }
  const auto content = content_of_block(self.content, lo, depth);
  const auto cut = tokens.first(static_cast<std::size_t>(depth - lo));
  return to_bytes(block_key(self.name_space, self.parent(block).bytes, cut, content));
}

TokenBuffer block_tokens(const KeyChain& self, Py_ssize_t i) {
  const std::size_t block = checked_block(self, i);
  const std::size_t lo = block * static_cast<std::size_t>(self.block_size);
  return self.tokens.slice(lo, lo + self.block_tokens(block).size());
}

}  // namespace

void init_key_chain(nb::module_& m) {
  nb::class_<KeyChain>(m, "KeyChain",
                       "The tokens of one request and the keys of their whole blocks, hashed once without the GIL.\n"
                       "Reading from several threads is fine; extend() needs the chain to itself.")
      .def("__init__", &construct, "namespace"_a, "salts"_a, "tokens"_a.none(), "block_size"_a,
           "content"_a = nb::list(), "previous"_a.none() = nb::none(),
           nb::sig("def __init__(self, namespace: str, salts: collections.abc.Sequence[tuple[int, bytes]], "
                   "tokens: object, block_size: int, content: collections.abc.Sequence[tuple[int, int, bytes]] = (), "
                   "previous: KeyChain | None = None) -> None"),
           "salts: (purpose, canonically encoded value) for the whole request. tokens: what TokenBuffer takes.\n"
           "content: (start, end, 32-byte digest), ranges of tokens in any order; ranges may lie behind the tokens.\n"
           "previous: a chain whose keys are taken over for the leading blocks that are equal.")
      .def(
          "__len__", [](const KeyChain& self) { return self.keys.size(); }, "The number of whole blocks.")
      .def("extend", &extend, "tokens"_a.none(), nb::sig("def extend(self, tokens: object) -> None"),
           "Adds tokens behind the last one and hashes the blocks that became whole.")
      .def("key", &key, "i"_a, "The key of whole block i. IndexError if there is none.")
      .def("cut_key", &cut_key, "i"_a, "depth"_a,
           "The key of block i cut after token `depth` of the sequence; i = len(self) is the tail. ValueError if that\n"
           "is not in the block.")
      .def("block_tokens", &block_tokens, "i"_a,
           "The tokens of block i, sharing memory. i = len(self) is the tail. IndexError if there is none.")
      .def(
          "content_of_block",
          [](const KeyChain& self, Py_ssize_t i) {
            return from_content(self.content_of_block(checked_block(self, i)));
          },
          "i"_a, "The (start, end, digest) that first apply in block i. i = len(self) is the tail.")
      .def_prop_ro(
          "root", [](const KeyChain& self) { return to_bytes(self.root); },
          "The parent of the first block, 32 bytes: namespace and salts.")
      .def_prop_ro(
          "keys", [](const KeyChain& self) { return to_list(self.keys); }, nb::sig("def keys(self) -> list[bytes]"),
          "The keys of the whole blocks, 32 bytes each. A new list.")
      .def_prop_ro(
          "content", [](const KeyChain& self) { return from_content(self.content); },
          "All (start, end, digest), sorted.")
      .def_prop_ro(
          "tokens", [](const KeyChain& self) { return self.tokens; }, "All tokens, sharing memory.")
      .def_ro("block_size", &KeyChain::block_size);
}

}  // namespace prefixcache::bindings
