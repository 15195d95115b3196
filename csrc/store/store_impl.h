// store_impl.h: the BlockStore behind the public interface. Its methods lie in files by line: put, gather, lookup.
//
// Threads: mutex_ guards the index and the counters; copies and file access run outside of it.
// Owns:    pool, writer, directory, index. Worker threads see bytes only.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "gather/thread_pool.h"
#include "prefixcache/block_store.h"
#include "store/directory.h"
#include "store/index.h"
#include "store/needed_parts.h"
#include "store/writer.h"

namespace prefixcache::store {

// Where one block of a gather is read from. Keeps what it points to alive.
struct Source {
  std::shared_ptr<Image> image;
  std::shared_ptr<PartFile> file;
  std::uint64_t version = 0;  // of the record that it was found in
  const layout::PartHeader& header() const { return image ? image->header : file->header(); }
};

class StoreImpl : public BlockStore {
 public:
  explicit StoreImpl(const Options& options);
  ~StoreImpl() override;

  const Options& options() const override { return options_; }
  Status put(const PutRequest& request, std::uint64_t* added) override;
  std::vector<Presence> presence(std::span<const Key> keys) const override;
  std::size_t longest_prefix(std::span<const Key> keys, const Key& root, std::int64_t block_size, Part part) override;
  std::vector<Child> children(const Key& parent) override;
  ChildMatch longest_child(const Key& parent, std::int64_t start, std::span<const std::uint32_t> tokens,
                           std::span<const ContentKey> content, Part part) override;
  Point deepest_window(const ChainView& chain, const WindowReach& reach, std::int64_t limit) override;
  Point deepest_state(const ChainView& chain, std::int64_t limit) override;
  std::int64_t deepest_fork(const ChainView& chain, std::int64_t limit) override;
  void touch(const Key& key, Part part) override;
  Gathered gather(const GatherRequest& request) override;
  Gathered load(const Key& key, Part part) override;
  Status erase(std::span<const Key> keys, std::span<const Part> parts) override;
  Status clear() override;
  Status flush() override;
  StoreStats stats() const override;
  Status close() override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct FileToRemove {
    layout::NameInfo name;
    std::uint64_t bytes;
  };

  // opening
  void load_index();

  // put
  void find_unless_known(const PutRequest& request);
  bool already_there(const PutRequest& request);
  std::shared_ptr<Buffer> acquire_buffer(const Image& image);
  // What leaves this tier to make room for `newcomer`: the oldest part, of a chain its deepest block. Null if only the
  // chain that it continues is left, and what is needed to take that up; or if it is broken. With the mutex held.
  PartRecord* victim_for(const Image& newcomer, const std::list<PartRecord*>& order);
  bool evict_one_from_ram(const Image& newcomer);
  bool insert(const PutRequest& request, const std::shared_ptr<Image>& image, bool to_disk);
  bool contained_in_sibling(const PutRequest& request) const;
  std::vector<PartRecord*> superseded_by(const PutRequest& request) const;
  void remove_superseded(const PutRequest& request);
  // on the writer's thread
  Status write_image(const std::shared_ptr<Image>& image);
  Status write_file(Image& image, std::string& temp, std::uint64_t& file_bytes);
  Status make_disk_room(const Image& newcomer, std::uint64_t bytes);
  std::vector<FileToRemove> finish_write(const std::shared_ptr<Image>& image, const Status& status,
                                         std::uint64_t file_bytes);

  // lookup
  bool find_on_disk(const Key& key, const Key& parent, std::int64_t depth, Part part);
  std::shared_ptr<const BlockText> text_of(const Key& key, const Key& parent, Part part);
  // Reads the header of a file whose rows are not known yet. False if there is no such part (any more).
  bool rows_of(const Key& key, Part part, std::int64_t& row_lo, std::int64_t& row_hi);
  // Calls visit(entry, text) for each block stored under `parent` that has one of the parts, with the mutex held. Reads
  // the headers of those whose text is not known yet, of `first` first and of a bounded number at a time.
  void visit_children(const Key& parent, std::span<const Part> any_of, const Key* first,
                      const std::function<void(const Entry&, const BlockText&)>& visit);
  // The block of `parent` in which the most of rows up to `n` can be had, and how far.
  Point window_in_block(const ChainView& chain, const WindowReach& reach, std::int64_t n);

  // gather
  Gathered gather_checked(const GatherRequest& request);
  Status source_of(const Key& key, Part part, Source& out);
  // Sets `out.version` in any case.
  Status open_file(const Key& key, Part part, Source& out);
  void limit_open_files();
  // Drops what could not be read, unless something else has come in its place.
  void forget(const Key& key, Part part, std::uint64_t version, const Status& why);
  bool changed_on_disk(const layout::NameInfo& name, std::uint64_t bytes) const;

  // Takes a record out of the index; its file, if it has one, is appended to `files` for remove_files().
  void drop(PartRecord& record, std::vector<FileToRemove>& files);
  // With names_mutex_ held since before the drop, and without mutex_.
  Status remove_files(const std::vector<FileToRemove>& files);

  static layout::NameInfo name_of(const PartRecord& record);

  Options options_;
  Env& env_;
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<BufferPool> queue_pool_;  // images that the RAM tier has no place for, until they are written
  gather::ThreadPool threads_;
  std::unique_ptr<Directory> directory_;  // null without an SSD tier
  // Held from before a file gets or loses its name until the index knows, or the reverse, and while the index asks the
  // disk: without it a file could be found after it was dropped. Taken before mutex_.
  std::mutex names_mutex_;
  mutable std::mutex mutex_;
  Index index_;
  StoreStats stats_;
  std::size_t open_files_ = 0;  // about: counted down when limit_open_files() looks
  std::atomic<bool> closed_{false};
  AskedFor asked_for_;              // guarded by mutex_
  std::unique_ptr<Writer> writer_;  // last: its thread uses all of the above
};

}  // namespace prefixcache::store
