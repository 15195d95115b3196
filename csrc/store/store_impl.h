// store_impl.h: the BlockStore behind the public interface. Its methods lie in files by line: put, gather, lookup.
//
// Threads: mutex_ guards the index and the counters; copies and file access run outside of it.
// Owns:    pool, writer, directory, index. Worker threads see bytes only.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "gather/thread_pool.h"
#include "prefixcache/block_store.h"
#include "store/directory.h"
#include "store/index.h"
#include "store/needed_parts.h"
#include "store/patience.h"
#include "store/writer.h"

namespace prefixcache::gather {
class DeviceGather;
}

namespace prefixcache::store {

// Where one block of a gather is read from. Keeps what it points to alive.
struct Source {
  std::shared_ptr<Image> image;
  std::shared_ptr<PartFile> file;
  std::uint64_t version = 0;  // of the record that it was found in
  const layout::PartHeader& header() const { return image ? image->header : file->header(); }
  // Null where it is not known.
  const std::string* form() const { return image ? image->form.get() : nullptr; }
};

struct GatherJob;

class StoreImpl : public BlockStore {
 public:
  // `arena`: the RAM tier lies in a few arrays of MLX's, where kernels can read it. `device` gathers from there.
  explicit StoreImpl(const Options& options, bool arena = false, const gather::DeviceGather* device = nullptr);
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
  std::uint64_t trim_ram(std::uint64_t target_bytes, std::span<const Key> protected_keys) override;
  StoreStats stats() const override;
  Status close() override;
  // After close(): none of its threads does anything more.
  bool at_rest() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct FileToRemove {
    layout::NameInfo name;
    std::uint64_t bytes;
  };

  // put
  Status put_checked(const PutRequest& request, std::uint64_t* added);
  Status put_full(const std::string& why);
  void find_unless_known(const PutRequest& request);
  bool already_there(const PutRequest& request);
  bool insert(const PutRequest& request, const std::shared_ptr<Image>& image, bool queued);
  const std::deque<Entry*>& siblings_of(const PutRequest& request) const;
  bool contained_in_sibling(const PutRequest& request) const;
  std::vector<PartRecord*> superseded_by(const PutRequest& request) const;
  void watch_writer();

  // RAM
  std::shared_ptr<Buffer> acquire_buffer(const Image& image);
  bool memory_may_come(const BufferPool& pool) const;
  // What leaves this tier to make room for `newcomer`: the oldest part, of a chain its deepest block. Null if only the
  // chain that it continues is left, and what is needed to take that up; or if it is broken. With the mutex held.
  PartRecord* victim_for(const Image& newcomer, const std::list<PartRecord*>& order, bool in_ram);
  enum class Evicted { one, soon, none };
  Evicted evict_one_from_ram(const Image& newcomer);
  void drop_images(std::uint64_t bytes, std::span<const Key> protected_keys);
  // What to drop for `bytes` of memory, the deepest blocks first. Has those written that can only go later. With the
  // mutex held.
  std::vector<PartRecord*> oldest_images(std::uint64_t bytes, const std::unordered_set<Key>& kept);
  std::vector<PartRecord*> images_of_oldest_slabs(std::uint64_t bytes, const std::unordered_set<Key>& kept);
  std::vector<PartRecord*> images_in(const std::unordered_set<const Slab*>& slabs,
                                     const std::unordered_set<Key>& kept) const;
  bool can_go(const PartRecord& record, const std::unordered_set<Key>& kept) const;
  void write_if_it_can_go_then(PartRecord& record, const std::unordered_set<Key>& kept);
  // With the mutex held; a record without a file goes. The caller lets go of the image without the mutex.
  std::shared_ptr<Image> leave_ram(PartRecord& record);
  // Whether a new part stays in RAM for now: by policy, or while the disk rests.
  bool written_later(const Image& image) const;
  // With the mutex held.
  void queue_write(PartRecord& record);
  void write_before_leaving(PartRecord& victim);
  void queue_unwritten();
  Status write_all();
  Status give_up_writing();

  // on the writer's thread
  Status write_image(const std::shared_ptr<Image>& image);
  Status write_file(Image& image, std::string& temp, std::uint64_t& file_bytes);
  Status make_disk_room(const Image& newcomer, std::uint64_t bytes);
  // The oldest part of all namespaces. False if nothing may go, or with a status why it could not.
  bool evict_one_from_disk(const Image* newcomer, Status& status);
  PartRecord* disk_victim(const Image* newcomer);
  std::vector<FileToRemove> finish_write(const std::shared_ptr<Image>& image, const Status& status,
                                         std::uint64_t file_bytes);
  // With the mutex held.
  void leave_disk(PartRecord& record);
  void not_written(PartRecord& record, bool try_again);
  double idle();
  void look_for_the_first_time();
  void try_again();
  // What a count is for: good order; evicting nothing in vain; something to evict.
  enum class CountFor { order, evictions, lack };
  bool count_is_due(CountFor reason) const;
  // Counts what is there, takes it into the index and evicts what is too much.
  Status recount();
  void merge(const std::vector<FoundPart>& found, std::uint64_t removals);
  bool merge_one(const FoundPart& part, const Key* parent, double last_count);
  void drop_vanished();
  void date_files();

  // any thread
  void wait_for_scan(double seconds);
  // After a failure the disk is left alone for a while.
  bool disk_rests() const;
  double seconds_of_rest() const;
  void disk_failed(const Status& status);
  void disk_works();
  // Makes it the newest, and its file too. With the mutex held.
  void use(PartRecord& record);

  // The answer of `work`, which may touch the disk, or `otherwise` where that takes longer than the caller may be held,
  // `more` seconds added. It then goes on by itself: it must own what it uses.
  template <class Answer, class Work>
  Answer ask_disk(Work work, Answer otherwise, double more = 0) {
    if (directory_ == nullptr) return work();
    auto answer = std::make_shared<Answer>();
    const auto ask = [answer, work = std::move(work)]() mutable {
      try {
        *answer = work();
      } catch (const std::exception&) {
        // No memory, say: as good as no answer.
      }
    };
    if (patience_.run(ask, options_.disk_wait_seconds + more)) return std::move(*answer);
    disk_failed(no_answer());
    return otherwise;
  }
  static Status no_answer();

  // lookup
  bool find_on_disk_now(const Key& key, const Key& parent, std::int64_t depth, Part part);
  bool find_on_disk(const Key& key, const Key& parent, std::int64_t depth, Part part);
  std::shared_ptr<const BlockText> text_of(const Key& key, const Key& parent, Part part);
  // Reads the header of a file whose rows are not known yet. False if there is no such part (any more).
  bool rows_of(const Key& key, Part part, std::int64_t& row_lo, std::int64_t& row_hi);
  // Reads the headers of blocks under `parent` with one of the parts whose text is not known yet: of `first`, if it is
  // given, and of a bounded number at a time, the newest first.
  void read_children(const Key& parent, std::span<const Part> any_of, const Key* first);
  // Then calls visit(entry, text) for each of them that begins with the first of `tokens`, with the mutex held.
  void visit_children(const Key& parent, std::span<const Part> any_of, const Key* first,
                      std::span<const std::uint32_t> tokens,
                      const std::function<void(const Entry&, const BlockText&)>& visit);
  // Whether a block under `parent`, known with its rows or a state, begins with another token.
  bool other_child(const Key& parent, std::uint32_t first_token) const;
  // Has the writer's thread look for what other processes wrote.
  void look_for_others();
  void look();
  // The block of `parent` in which the most of rows up to `n` can be had, and how far.
  Point window_in_block(const ChainView& chain, const WindowReach& reach, std::int64_t n);

  // gather
  Gathered gather_checked(const std::shared_ptr<GatherJob>& job);
  // What is in RAM or open. The rest, from the first one that is not an image on, is for open_sources().
  std::size_t known_sources(GatherJob& job);
  // Opens what is not open, and looks whether files that are open are still there.
  void open_sources(GatherJob& job);
  void take_results(GatherJob& job, Gathered& result);
  // One string for all images whose tensors are alike.
  std::shared_ptr<const std::string> form_of(const layout::PartHeader& header);
  // Tries the gather of a form of parts that is new: a device takes seconds to compile kernels, and no fetch should
  // wait for that.
  void prepare_device(const std::shared_ptr<Image>& image);
  void leave_late(const std::shared_ptr<GatherJob>& job);
  void drop_late_jobs();
  Status source_of(const Key& key, Part part, Source& out);
  // Sets `out.version` in any case that had an answer.
  Status open_file(const Key& key, Part part, Source& out);
  Status open_file_now(const Key& key, Part part, Source& out);
  // The same in two steps, for many at a time. After begin_open() there is no file where it failed, and none is needed
  // where the block is in RAM now.
  struct Opening;
  Status begin_open(const Key& key, Part part, Opening& opening, Source& out);
  Status end_open(Opening& opening, Source& out);
  bool has_file(const Key& key, Part part);
  void limit_open_files();
  // Drops what could not be read, unless something else has come in its place.
  void forget(const Key& key, Part part, std::uint64_t version, const Status& why);
  void forget_now(const Key& key, Part part, std::uint64_t version, const Status& why);
  Status erase_now(const std::vector<Key>& keys, const std::vector<Part>& parts);
  Status clear_now();
  bool changed_on_disk(const layout::NameInfo& name, std::uint64_t bytes) const;

  // Takes a record out of the index; its file, if it has one, is appended to `files` for remove_files().
  void drop(PartRecord& record, std::vector<FileToRemove>& files);
  // With names_mutex_ held since before the drop, and without mutex_.
  Status remove_files(const std::vector<FileToRemove>& files);

  static layout::NameInfo name_of(const PartRecord& record);

  Options options_;
  const bool arena_;
  Env& env_;
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<BufferPool> queue_pool_;  // images that the RAM tier has no place for, until they are written
  gather::ThreadPool threads_;
  const gather::DeviceGather* const device_;  // null: the CPU copies
  std::unique_ptr<Directory> directory_;      // null without an SSD tier
  // Held from before a file gets or loses its name until the index knows, or the reverse, and while the index asks the
  // disk: without it a file could be found after it was dropped. Taken before mutex_.
  std::mutex names_mutex_;
  mutable std::mutex mutex_;
  Index index_;
  StoreStats stats_;
  std::size_t open_files_ = 0;  // about: counted down when limit_open_files() looks
  std::atomic<bool> closed_{false};
  std::atomic<bool> abandoned_{false};  // closed while the disk did not answer: its threads write nothing more
  std::unordered_map<std::string_view, std::shared_ptr<const std::string>> forms_;  // guarded by mutex_
  std::unordered_set<std::string> prepared_;                  // forms without their rows; guarded by mutex_
  AskedFor asked_for_;                                        // guarded by mutex_
  std::vector<std::pair<layout::NameInfo, double>> to_date_;  // guarded by mutex_
  std::uint64_t scan_number_ = 0;                             // guarded by mutex_
  std::atomic<bool> scanned_{false};                          // the first scan has ended, well or not
  std::condition_variable scan_ended_;
  bool ready_ = false;                 // the directory could be used at open
  std::atomic<double> rest_until_{0};  // 0: the disk works
  double rest_seconds_ = 0;            // guarded by mutex_
  Status trouble_;                     // what it rests from; guarded by mutex_
  std::atomic<int> insisting_{0};      // callers for whom the disk does not rest
  std::atomic<std::uint64_t> removals_{0};
  std::atomic<bool> look_wanted_{false};
  // of the writer's thread
  std::chrono::steady_clock::time_point counted_at_;
  double count_seconds_ = 0;
  std::chrono::steady_clock::time_point looked_at_;
  double look_seconds_ = 0;
  double last_count_ = 0;                         // by the file system's clock
  std::vector<std::shared_ptr<GatherJob>> late_;  // guarded by mutex_
  std::unique_ptr<Writer> writer_;                // its thread uses all of the above
  Patience patience_;                             // last: its threads use the writer too
};

}  // namespace prefixcache::store
