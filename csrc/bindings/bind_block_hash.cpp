// bind_block_hash.cpp: block_hash.h and digest.h for Python.
#include <string_view>

#include <nanobind/stl/string_view.h>

#include "bindings/bindings.h"
#include "bindings/key_casts.h"
#include "bindings/key_chain.h"
#include "bindings/token_buffer.h"
#include "prefixcache/digest.h"

namespace prefixcache::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

nb::list chain_hashes_of(std::string_view name_space, nb::handle tokens, std::int64_t block_size,
                         const std::vector<SaltItem>& salts, const std::vector<ContentItem>& content) {
  const TokenBuffer all = to_tokens(tokens);
  const std::vector<Salt> whole = to_salts(salts);
  const std::vector<ContentKey> ranges = to_content(content);
  std::vector<Key> keys;
  {
    nb::gil_scoped_release release;
    const Key id = namespace_id(name_space);
    keys = chain_hashes(id, chain_root(id, whole), all.span(), block_size, ranges);
  }
  return to_list(keys);
}

nb::bytes block_key_of(std::string_view name_space, const nb::bytes& parent, nb::handle tokens,
                       const std::vector<ContentItem>& content) {
  const TokenBuffer block = to_tokens(tokens);
  return to_bytes(block_key(namespace_id(name_space), bytes_span(parent), block.span(), to_content(content)));
}

nb::bytes array_digest_of(const mlx::core::array& array, int threads) {
  Key key;
  {
    nb::gil_scoped_release release;
    key = array_digest(array, threads);
  }
  return to_bytes(key);
}

}  // namespace

void init_block_hash(nb::module_& m) {
  nb::enum_<Purpose>(m, "Purpose", nb::is_arithmetic(), "What a salt is for. The numbers enter the keys.")
      .value("tenant", Purpose::tenant, "who may share")
      .value("kv_format", Purpose::kv_format, "how the KV is represented")
      .value("content", Purpose::content, "what stands behind a range of tokens");
  init_token_buffer(m);
  init_key_chain(m);
  m.def("chain_hashes", &chain_hashes_of, "namespace"_a, "tokens"_a.none(), "block_size"_a, "salts"_a = nb::list(),
        "content"_a = nb::list(),
        nb::sig("def chain_hashes(namespace: str, tokens: object, block_size: int, "
                "salts: collections.abc.Sequence[tuple[int, bytes]] = (), "
                "content: collections.abc.Sequence[tuple[int, int, bytes]] = ()) -> list[bytes]"),
        "The keys of all whole blocks, 32 bytes each: equal keys mean equal prefixes, in every process.\n"
        "ValueError for a block size below 1, a token or a range out of range; TypeError for tokens that are none.");
  m.def("block_key", &block_key_of, "namespace"_a, "parent"_a, "tokens"_a.none(), "content"_a = nb::list(),
        nb::sig("def block_key(namespace: str, parent: bytes, tokens: object, "
                "content: collections.abc.Sequence[tuple[int, int, bytes]] = ()) -> bytes"),
        "The key of one block. `parent` may be any bytes; `content` is what first applies in this block.");
  m.def(
      "group_key",
      [](const nb::bytes& key, std::uint64_t group) { return to_bytes(group_key(to_key(key, "key"), group)); }, "key"_a,
      "group"_a, "The key under which rows that are needed over another reach are stored. Its own inverse.");
  m.def(
      "sha256", [](const nb::bytes& data) { return to_bytes(sha256(bytes_span(data))); }, "data"_a,
      "SHA-256 of `data`, 32 bytes.");
  m.def("array_digest", &array_digest_of, "array"_a, "threads"_a = 0,
        "Digest (32 bytes) of dtype, shape and every byte of an array in row-major order, whatever its strides.\n"
        "Not proof against an attacker. threads: 0 is one a core, at most 8; it does not change the digest.");
}

}  // namespace prefixcache::bindings
