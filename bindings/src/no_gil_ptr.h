// A holder for objects whose destructor waits for other threads.
//
// Gloo's threads and the workers of the owner collectives drop tensors, which may need the GIL; a
// destructor that joins them must not hold it. torch holds its own process groups in the same way.
// One member, so that a base class's c10::intrusive_ptr holder has the same layout.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace dmuon::bindings {

template <typename T>
class NoGilPtr {
 public:
  NoGilPtr() = default;
  NoGilPtr(const NoGilPtr&) = default;
  NoGilPtr(NoGilPtr&&) noexcept = default;
  NoGilPtr& operator=(const NoGilPtr&) = default;
  NoGilPtr& operator=(NoGilPtr&&) noexcept = default;
  NoGilPtr(c10::intrusive_ptr<T> pointer) : pointer_(std::move(pointer)) {}  // NOLINT: a holder
  explicit NoGilPtr(T* pointer) : pointer_(c10::intrusive_ptr<T>::unsafe_steal_from_new(pointer)) {}
  ~NoGilPtr() {
    if (pointer_ && PyGILState_Check()) {
      pybind11::gil_scoped_release release;
      pointer_.reset();
    }
  }
  T* get() const { return pointer_.get(); }
  T& operator*() const { return *pointer_; }
  T* operator->() const { return pointer_.get(); }
  explicit operator bool() const { return static_cast<bool>(pointer_); }

 private:
  c10::intrusive_ptr<T> pointer_;
};

}  // namespace dmuon::bindings

PYBIND11_DECLARE_HOLDER_TYPE(T, dmuon::bindings::NoGilPtr<T>, true)
