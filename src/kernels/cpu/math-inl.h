// SPDX-License-Identifier: Apache-2.0
// exp and tanh of float vectors, for each of Highway's targets. The polynomials are least-squares
// fits iterated towards equal ripple.

#if defined(OCTAVO_KERNELS_CPU_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OCTAVO_KERNELS_CPU_MATH_INL_H_
#undef OCTAVO_KERNELS_CPU_MATH_INL_H_
#else
#define OCTAVO_KERNELS_CPU_MATH_INL_H_
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace octavo::kernels::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// e^x for x <= 88: e^x = 2^n e^r with |r| <= ln(2) / 2, about 1 ulp. Below -87 the result is 0
// instead of a subnormal; -inf gives 0, NaN stays NaN.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exponential(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504F)));
  // ln(2) in two parts, the first with enough trailing zeros for n times it to be exact.
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375F), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4F), r);
  V p = hn::Set(d, 0.00138145399F);
  p = hn::MulAdd(p, r, hn::Set(d, 0.00836874513F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.0416683908F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.166665204F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.499999934F));
  p = hn::MulAdd(hn::Mul(r, r), p, hn::Add(r, hn::Set(d, 1.0F)));
  const auto exponent = hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127));
  const V power = hn::BitCast(d, hn::ShiftLeft<23>(exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0F)), hn::Mul(p, power));
}

// tanh: near 0 by an odd polynomial, since 1 - 2 / (e^2x + 1) would cancel there.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V hyperbolic_tangent(D d, V x) {
  const V one = hn::Set(d, 1.0F);
  const V magnitude = hn::Abs(x);
  const V square = hn::Mul(x, x);
  V p = hn::Set(d, -0.00571704451F);
  p = hn::MulAdd(p, square, hn::Set(d, 0.0206505868F));
  p = hn::MulAdd(p, square, hn::Set(d, -0.0537434979F));
  p = hn::MulAdd(p, square, hn::Set(d, 0.133314913F));
  p = hn::MulAdd(p, square, hn::Set(d, -0.333332839F));
  const V near_zero = hn::MulAdd(hn::Mul(square, magnitude), p, magnitude);
  // From 10 on tanh is 1 in float32.
  const V bounded =
      hn::IfThenElse(hn::Gt(magnitude, hn::Set(d, 10.0F)), hn::Set(d, 10.0F), magnitude);
  const V e = exponential(d, hn::Add(bounded, bounded));
  const V far = hn::Sub(one, hn::Div(hn::Set(d, 2.0F), hn::Add(e, one)));
  return hn::CopySign(hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625F)), near_zero, far), x);
}

}  // namespace HWY_NAMESPACE
}  // namespace octavo::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
