// The directory that holds the images of one job: DIR/000001, DIR/000002, and so on, of which the
// newest is what the job goes on from.
//
// Holds the directory's lock for as long as it lives. Follows no link in it. One thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/fd.h"
#include "base/ids.h"
#include "base/result.h"

namespace stasis::job {

class Images {
 public:
  // Makes the directory, in a parent that is there, and takes its lock. kBusy names the holder;
  // kTimeout if the init that a killed supervisor has left behind does not end; kInterrupted if
  // `stop`, which may be empty, returns true before that.
  static Result<Images> open(const std::string& dir, const std::function<bool()>& stop = {});
  // Removes the directory and the lock if open() made them, unless keep() was called.
  ~Images();
  Images(Images&&) noexcept = default;
  Images& operator=(Images&&) = delete;
  // A job has begun.
  void keep() { made_folder_ = made_lock_ = false; }

  const std::string& path() const { return path_; }
  // Where another user can give the images, or a folder on the way to them, another name, or put
  // something else there: for each place why. Nothing if only we and root can, or who has called us
  // by sudo.
  std::vector<std::string> who_may_rename() const;
  // What the folder is, under whatever name: a folder_id(). What is done by its path is to be done
  // in it alone.
  const std::string& id() const { return id_; }
  // kNotPermitted if its path leads to another folder by now, kIo if to none.
  Result<void> check_place() const;
  std::string path_of(int number) const;

  // Writes into the lock which process the init of our job is: see open().
  Result<void> note_init(Pid init) const;

  struct Cleared {
    std::vector<std::string> removed;
    std::vector<Error> failed;  // for each entry that could not be removed, and stays
  };
  // Clears away what killed dumps and removals have left. An image that a killed dump had completed
  // but not named gets its name.
  Result<Cleared> clear() const;

  // All that have an image's name, the newest first, and without those that are known to be
  // damaged: one without a manifest has lost it, or was copied here in part.
  Result<std::vector<int>> all() const;
  // Those of them with a manifest.
  Result<std::vector<int>> complete() const;
  // The image has proven damaged: from now on it does not count as one.
  void damaged(int number) { damaged_.insert(number); }
  bool any_damaged() const { return !damaged_.empty(); }
  // The number of the next image: above all that are there, or have left a trace.
  Result<int> next() const;

  // Notes that the job has ended well, by itself, in the run that `word` stands for; on the disk
  // when this returns.
  Result<void> note_done(const std::string& word, const std::vector<std::string>& command) const;
  // Whether that was noted for this command.
  bool is_done(const std::string& word, const std::vector<std::string>& command) const;
  // kUsage, unless it is letters, digits, ".", "_" and "-".
  static Result<void> check_word(const std::string& word);

  // Removes what is older than the `keep` newest complete images, the oldest first. Returns what
  // was removed; or, when all were tried, the first error.
  Result<std::vector<int>> remove_old(int keep) const;

 private:
  Images() = default;

  std::string path_;
  std::string id_;
  UniqueFd dir_;
  UniqueFd lock_;
  bool made_folder_ = false;
  bool made_lock_ = false;
  std::set<int> damaged_;
};

// The paths of the complete images in a job's directory, the newest first; none for any other path,
// such as an image. Takes no lock: the job may run.
std::vector<std::string> images_of_job(const std::string& dir);
// The newest of them, or the path itself where there are none.
std::string image_in(const std::string& dir);

}  // namespace stasis::job
