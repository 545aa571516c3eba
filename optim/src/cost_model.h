// What one orthogonalization and update of an s x l matrix (s <= l) costs. Free of ATen.
#pragma once

namespace dmuon::optim {

// FLOPs of 5 steps with the cheaper of the direct form and the Gram form of mode "fast".
double cheaperFlops(double s, double l);

// Modelled time of the same on one CPU core; see the source for where the numbers come from.
double measuredNanoseconds(double s, double l);

}  // namespace dmuon::optim
