// What the ranks of one NCCL channel tell each other through the store when something is wrong: a
// kernel that waits for a peer cannot hear, so the threads that watch over it do.
//
// Costs nothing as long as all is well. A store that fails is not asked again. Thread-safe.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <mutex>
#include <string>
#include <vector>

namespace dmuon {

class NcclReports {
 public:
  struct Report {
    enum Kind : int {
      refused = 0,  // this rank did not launch operation seq; it goes on with the next one
      stuck = 1,    // launched it and waits
      ended = 2,    // takes part in nothing from operation seq on
    } kind = ended;
    int rank = -1;
    uint64_t seq = 0;
    std::string text;
  };

  // `store` may be null: then nobody hears anything.
  NcclReports(c10::intrusive_ptr<c10d::Store> store, int rank);

  void publish(Report::Kind kind, uint64_t seq, const std::string& text);
  // What other ranks have said since the last call.
  std::vector<Report> poll();

 private:
  const int rank_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Store> store_;
  int64_t next_ = 0;
};

}  // namespace dmuon
