#include <dmuon/optim/variants.h>

#include <ATen/ops/linalg_vector_norm.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

namespace dmuon::optim {
namespace {

constexpr double kEps = 1e-8;

int64_t rowDimension(at::IntArrayRef shape) { return shape.size() == 3 ? 1 : 0; }

bool cutsRows(at::IntArrayRef shape, const Blocks& blocks) {
  const auto dims = static_cast<int64_t>(shape.size());
  const int64_t dim = blocks.dim < 0 ? blocks.dim + dims : blocks.dim;
  return !blocks.sizes.empty() && dim != rowDimension(shape);
}

// numerator / denominator, and 0 where the denominator is: there is nothing to scale.
at::Tensor safeRatio(const at::Tensor& numerator, const at::Tensor& denominator) {
  return numerator.div(denominator.masked_fill(denominator.eq(0), 1.0));
}

at::Tensor norMuon(const at::Tensor& x, const at::Tensor& v, double beta2) {
  const at::Tensor mean = x.square().mean(-1, /*keepdim=*/true);
  v.lerp_(mean, 1.0 - beta2);
  const at::Tensor factor = v.sqrt().add_(kEps).reciprocal_();
  // |X|_F^2 = n sum_i mean_i, and |X'|_F^2 = n sum_i mean_i factor_i^2; the long sums in fp64.
  const at::Tensor before = mean.sum(-2, /*keepdim=*/true, at::kDouble).sqrt_();
  const at::Tensor after =
      mean.mul(factor).mul_(factor).sum(-2, /*keepdim=*/true, at::kDouble).sqrt_();
  return x.mul(factor.mul(safeRatio(before, after).to(factor.scalar_type())));
}

at::Tensor adaMuon(const at::Tensor& x, const at::Tensor& second_moment, double beta2) {
  // In the block's own shape: a convolution's part of v need not be viewable as a matrix.
  const at::Tensor shaped = x.view(second_moment.sizes());
  second_moment.mul_(beta2).addcmul_(shaped, shaped, 1.0 - beta2);
  at::Tensor scaled = shaped.div(second_moment.sqrt().add_(kEps)).view(x.sizes());
  // The rows in x's type, their sum in fp64.
  const at::Tensor rows = at::linalg_vector_norm(scaled, 2, {-1}, /*keepdim=*/true);
  const at::Tensor norm = at::linalg_vector_norm(rows, 2, {-2}, /*keepdim=*/true, at::kDouble);
  const auto smaller = static_cast<double>(std::min(x.size(-2), x.size(-1)));
  const at::Tensor target = at::Tensor(norm.new_full({}, std::sqrt(smaller)));
  return scaled.mul_(safeRatio(target, norm).to(scaled.scalar_type()));
}

}  // namespace

MuonVariant variantFromName(const std::string& name) {
  if (name == "none") return MuonVariant::kNone;
  if (name == "normuon") return MuonVariant::kNorMuon;
  TORCH_CHECK_VALUE(name == "adamuon", "dmuon: unknown variant '", name,
                    "', known are 'none', 'normuon' and 'adamuon'");
  return MuonVariant::kAdaMuon;
}

std::vector<int64_t> secondMomentShape(MuonVariant variant, at::IntArrayRef shape,
                                       const Blocks& blocks) {
  if (variant == MuonVariant::kNone) return {};
  if (variant == MuonVariant::kAdaMuon) return shape.vec();
  const MatrixView view = matrixView(shape);
  const int64_t columns =
      cutsRows(shape, blocks) ? static_cast<int64_t>(blocks.sizes.size()) : int64_t{1};
  if (shape.size() == 3) return {view.batch, view.m, columns};
  return {view.m, columns};
}

std::vector<at::Tensor> secondMomentViews(MuonVariant variant, const at::Tensor& second_moment,
                                          at::IntArrayRef shape, const Blocks& blocks) {
  const size_t count = std::max<size_t>(blocks.sizes.size(), 1);
  if (variant == MuonVariant::kNone) return std::vector<at::Tensor>(count);
  if (variant == MuonVariant::kAdaMuon) return blockViews(second_moment, blocks);
  if (cutsRows(shape, blocks)) return second_moment.split(1, -1);
  return blockViews(second_moment, Blocks{rowDimension(shape), blocks.sizes});
}

at::Tensor variantInput(MuonVariant variant, const at::Tensor& u) {
  return variant == MuonVariant::kAdaMuon ? u.sign() : u;
}

at::Tensor applyVariant(MuonVariant variant, const at::Tensor& x, const at::Tensor& second_moment,
                        double beta2) {
  if (variant == MuonVariant::kNone) return x;
  const at::Tensor wide = x.to(second_moment.scalar_type());
  return variant == MuonVariant::kNorMuon ? norMuon(wide, second_moment, beta2)
                                          : adaMuon(wide, second_moment, beta2);
}

}  // namespace dmuon::optim
