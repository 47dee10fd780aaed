// SPDX-License-Identifier: Apache-2.0
#include "testing/callers_step.h"

#include <algorithm>

namespace octavo::testkit {
namespace {

// No page of any pool.
constexpr std::int32_t kNoPage = 2'147'480'000;

}  // namespace

void CallersWorkspace::fit(const AttentionConfig& config, const KvView& view,
                           const StepArrays& step, const LayerInputs& inputs, const TensorView& out,
                           const TensorView* lse) {
  if (!workspace_) return;
  const WorkspaceSizes sizes = workspace_->sizes(config, view, step, inputs, out, lse);
  if (static_cast<std::size_t>(sizes.good) <= memory_.size()) return;
  synchronize(workspace_->device());
  memory_ = DeviceMemory(workspace_->device(), static_cast<std::size_t>(sizes.good));
  workspace_->use(memory_.data(), sizes.good);
}

CallersStep::CallersStep(KvCache& cache, const StepPlan& plan, CallersWorkspace& workspace)
    : cache_(cache),
      workspace_(workspace),
      width_(static_cast<std::int32_t>((cache.config().max_seq_len + cache.config().page_size - 1) /
                                       cache.config().page_size)),
      offsets_(plan.token_offsets().begin(), plan.token_offsets().end()),
      kv_lens_(plan.kv_lens().begin(), plan.kv_lens().end()) {
  const bool paged = cache.config().kind == CacheKind::Paged;
  const std::size_t num_seqs = kv_lens_.size();
  const auto width = static_cast<std::size_t>(width_);
  if (offsets_.empty()) offsets_ = {0};
  if (paged) table_.assign((num_seqs + 1) * width, kNoPage);
  for (std::size_t b = 0; b < num_seqs; ++b) {
    const std::vector<std::int32_t> pages = cache.page_ids(plan.ids()[b]);
    // Rows of the table in another order than the batch's; a contiguous cache's rows are its pages.
    const std::size_t row = num_seqs - b;
    if (paged) {
      std::copy(pages.begin(), pages.end(),
                table_.begin() + static_cast<std::ptrdiff_t>(row * width));
      rows_.push_back(static_cast<std::int32_t>(row));
    } else {
      rows_.push_back(pages.empty() ? kNoPage : pages.front());
    }
  }
  arrays_.num_seqs = plan.num_seqs();
  arrays_.num_tokens = plan.num_tokens();
  arrays_.token_offsets = placed(offsets_);
  arrays_.kv_lens = placed(kv_lens_);
  arrays_.max_new_tokens = plan.max_new_tokens();
  arrays_.max_kv_len = plan.max_kv_len();
  arrays_.workspace = workspace.get();
  placed_rows_ = placed(rows_);
  if (paged) placed_table_ = placed(table_);
}

const std::int32_t* CallersStep::placed(const std::vector<std::int32_t>& values) {
  if (cache_.config().device.type == DeviceType::Cpu) return values.data();
  // A pointer is wanted for arrays of no element too.
  const std::size_t bytes = values.size() * sizeof(std::int32_t);
  on_gpu_.emplace_back(cache_.config().device, std::max<std::size_t>(bytes, 4));
  if (bytes > 0) on_gpu_.back().upload(values.data(), bytes);
  return reinterpret_cast<const std::int32_t*>(on_gpu_.back().data());
}

KvView CallersStep::view(std::int32_t layer) const {
  KvView view;
  view.k = cache_.key_storage(layer);
  view.v = cache_.value_storage(layer);
  view.page_table = placed_table_;
  view.row_indices = placed_rows_;
  if (placed_table_ != nullptr) {
    view.page_table_stride = width_;
    view.num_rows = static_cast<std::int32_t>(kv_lens_.size()) + 1;
    view.max_pages_per_seq = width_;
  }
  return view;
}

void CallersStep::run(const AttentionConfig& config, std::int32_t layer, const LayerInputs& inputs,
                      const TensorView& out, const TensorView* lse) {
  const KvView cache = view(layer);
  workspace_.fit(config, cache, arrays_, inputs, out, lse);
  if (Workspace* workspace = workspace_.get(); workspace != nullptr && !planned_) {
    workspace->plan(cache, arrays_);
    workspace->check();
    planned_ = true;
  }
  append_tokens(config, cache, arrays_, inputs);
  attend(config, cache, arrays_, inputs, out, lse);
}

}  // namespace octavo::testkit
