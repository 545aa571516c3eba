// How far an operation has come, for another that goes on with its results before its end: the two
// stages of a reduction or broadcast over a mesh.
//
// The producer's thread reports, the consumer's waits; both may outlive the other. No tensors, no
// communication.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace dmuon {

class Progress {
 public:
  enum class Outcome { reached, failed, stopped };

  explicit Progress(size_t tensors) : ready_(tensors) {}

  // The ranks have agreed: from here on the operation can only fail together with its group.
  // `flags` are the operation's final ones.
  void agreed(std::vector<uint8_t> flags);
  // The first `bytes` bytes of output `tensor` are final. Every call to one tensor names more.
  struct Reached {
    size_t tensor = 0;
    int64_t bytes = 0;
  };
  void advance(const std::vector<Reached>& reached);
  // All outputs are final, or, with an error, none will be any more. The first call counts.
  void end(const std::string& error);

  // Wait until the producer has come so far. `failed` fills error(). `stop` is asked now and then,
  // and ends the wait by returning true.
  using Stop = std::function<bool()>;
  Outcome awaitAgreed(const Stop& stop);
  Outcome awaitBytes(size_t tensor, int64_t bytes, const Stop& stop);
  Outcome awaitEnd(const Stop& stop);

  // Empty unless a wait has failed.
  std::string error() const;
  // Once agreed.
  std::vector<uint8_t> flags() const;

 private:
  Outcome await(const std::function<bool()>& there, const Stop& stop);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int waiting_ = 0;
  bool agreed_ = false;
  bool ended_ = false;
  std::string error_;
  std::vector<uint8_t> flags_;
  std::vector<int64_t> ready_;  // by tensor
};

}  // namespace dmuon
