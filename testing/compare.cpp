// SPDX-License-Identifier: Apache-2.0
#include "testing/compare.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace octavo::testkit {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class StepComparer {
 public:
  StepComparer(const Case& value, std::int64_t step_idx, const HostTensor& out,
               const HostTensor& lse, Comparison& total)
      : case_(value),
        step_(value.steps[static_cast<std::size_t>(step_idx)]),
        out_(out),
        lse_(lse),
        total_(total) {
    place_.step = step_idx;
  }

  void run() {
    const std::int64_t longest = case_.format == TensorFormat::Thd ? 0 : longest_new_tokens(step_);
    std::int64_t packed_start = 0;
    for (const SequenceStep& sequence : step_.sequences) {
      place_.id = sequence.id;
      for (std::int64_t token = 0; token < std::max(longest, sequence.new_tokens); ++token) {
        place_.token_idx = token;
        place_.padding = token >= sequence.new_tokens;
        const std::int64_t row =
            row_of(case_.format, step_.out.shape(), place_.seq_idx, token, packed_start);
        for (std::int64_t head = 0; head < case_.attention.num_q_heads; ++head) {
          compare_head(row, packed_start + token, head);
        }
      }
      packed_start += sequence.new_tokens;
      ++place_.seq_idx;
    }
    finish_rms();
  }

 private:
  void compare_head(std::int64_t row, std::int64_t lse_row, std::int64_t head) {
    place_.head = head;
    const std::int64_t heads = case_.attention.num_q_heads;
    bool must_be_zero = place_.padding;
    if (!place_.padding && step_.lse) {
      const double wanted = step_.lse->get(lse_row * heads + head);
      place_.tensor = "lse";
      place_.dim = -1;
      offer(wanted, lse_.get(lse_row * heads + head), case_.tolerance.atol, case_.tolerance.rtol);
      must_be_zero = wanted == -kInfinity;
    }
    place_.tensor = "out";
    const std::int64_t dim_v = case_.attention.head_dim_v;
    for (std::int64_t dim = 0; dim < dim_v; ++dim) {
      place_.dim = dim;
      const std::int64_t element = (row * heads + head) * dim_v + dim;
      const double wanted = step_.out.get(element);
      const double got = out_.get(element);
      offer(wanted, got, must_be_zero ? 0.0 : case_.tolerance.atol,
            must_be_zero ? 0.0 : case_.tolerance.rtol);
      squared_error_ += (got - wanted) * (got - wanted);
      squared_wanted_ += wanted * wanted;
    }
  }

  void offer(double wanted, double got, double atol, double rtol) {
    const double excess = excess_of(wanted, got, atol, rtol);
    // The first of equals stands: among NaN positions, where the trouble starts.
    if (total_.worst.found && excess <= total_.worst.excess) return;
    place_.found = true;
    place_.wanted = wanted;
    place_.got = got;
    place_.excess = excess;
    total_.worst = place_;
  }

  void finish_rms() {
    double rms = 0.0;
    if (squared_error_ != 0.0) rms = std::sqrt(squared_error_ / squared_wanted_);
    if (!(rms <= case_.tolerance.rms)) total_.rms_ok = false;
    if (!(rms <= total_.rms)) total_.rms = rms;
  }

  const Case& case_;
  const CaseStep& step_;
  const HostTensor& out_;
  const HostTensor& lse_;
  Comparison& total_;
  Worst place_;
  double squared_error_ = 0.0;
  double squared_wanted_ = 0.0;
};

}  // namespace

double excess_of(double wanted, double got, double atol, double rtol) {
  if (std::isnan(wanted) || std::isnan(got)) {
    return std::isnan(wanted) && std::isnan(got) ? 0.0 : kInfinity;
  }
  if (wanted == got) return 0.0;
  if (std::isinf(wanted) || std::isinf(got)) return kInfinity;
  const double allowed = atol + rtol * std::fabs(wanted);
  return allowed == 0.0 ? kInfinity : std::fabs(got - wanted) / allowed;
}

double Worst::error() const { return wanted == got ? 0.0 : std::fabs(got - wanted); }

std::string Worst::to_string() const {
  std::string place = fmt::format("step {}, {}[seq {} (id {}), {} {}, head {}", step, tensor,
                                  seq_idx, id, padding ? "padding row" : "token", token_idx, head);
  if (dim >= 0) place += fmt::format(", dim {}", dim);
  return place + fmt::format("]: wanted {:.8g}, got {:.8g}", wanted, got);
}

void compare_step(const Case& value, std::int64_t step_idx, const HostTensor& out,
                  const HostTensor& lse, Comparison& total) {
  StepComparer(value, step_idx, out, lse, total).run();
}

}  // namespace octavo::testkit
