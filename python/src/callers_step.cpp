// SPDX-License-Identifier: Apache-2.0
#include "callers_step.h"

#include <fmt/format.h>

#include <algorithm>

#include "errors.h"
#include "layer.h"
#include "names.h"
#include "workspace.h"

namespace octavo::python {
namespace {

constexpr std::int64_t kMaxInt32 = 0x7FFFFFFF;

std::int32_t count(std::string_view name, std::int64_t value) {
  if (value > kMaxInt32) throw_mismatch(name, "at most 2^31 - 1", fmt::to_string(value));
  return static_cast<std::int32_t>(value);
}

Memory read_page_table(nb::handle object, Device device) {
  Memory memory = read_memory("page_table", object);
  if (memory.kind != Kind::Int || memory.bytes != 4)
    throw_mismatch("page_table.dtype", "int32", kind_text(memory));
  if (memory.rank != 2)
    throw_mismatch("page_table.shape", "[rows, max_pages_per_seq]", shape_text(memory));
  if (memory.shape[1] > 1 && memory.strides[1] != 1)
    throw_mismatch("page_table.strides", "1 along a row", fmt::to_string(memory.strides[1]));
  if (memory.device != device)
    throw_mismatch("page_table.device", device_text(device), device_text(memory.device));
  return memory;
}

/// [tokens, heads, dim] as [pages, 1, heads, dim].
TensorView as_pages(TensorView packed) {
  for (std::size_t axis = 3; axis > 1; --axis) {
    packed.shape[axis] = packed.shape[axis - 1];
    packed.strides[axis] = packed.strides[axis - 1];
  }
  packed.shape[1] = 1;
  packed.strides[1] = packed.strides[0];
  packed.rank = 4;
  return packed;
}

}  // namespace

CallersCache::CallersCache(const CacheWords& words)
    : packed_(words.packed),
      keys_("k_cache", words.k_cache),
      values_("v_cache", words.v_cache),
      row_indices_("row_indices", words.row_indices, keys_.device()) {
  const std::int32_t rank = words.packed ? 3 : 4;
  for (const auto& [name, array] : {std::pair("k_cache", &keys_), std::pair("v_cache", &values_)}) {
    if (array->view().rank != rank)
      throw_mismatch(fmt::format("{}.rank", name), fmt::to_string(rank),
                     fmt::to_string(array->view().rank));
  }
  view_.k = words.packed ? as_pages(keys_.view()) : keys_.view();
  view_.v = words.packed ? as_pages(values_.view()) : values_.view();
  view_.row_indices = row_indices_.data();
  if (words.page_table.is_none()) return;
  page_table_ = read_page_table(words.page_table, keys_.device());
  // An empty table still is one: null would mean that the cache has rows.
  static const std::int32_t kNone = 0;
  view_.page_table =
      page_table_.data != nullptr ? static_cast<const std::int32_t*>(page_table_.data) : &kNone;
  view_.num_rows = count("page_table.shape[0]", page_table_.shape[0]);
  view_.max_pages_per_seq = count("page_table.shape[1]", page_table_.shape[1]);
  view_.page_table_stride =
      page_table_.shape[0] > 1 ? page_table_.strides[0] : page_table_.shape[1];
}

void CallersCache::require_writable() const {
  static_cast<void>(keys_.writable("k_cache"));
  static_cast<void>(values_.writable("v_cache"));
}

TokenOffsets::TokenOffsets(nb::handle given, std::string_view name, const Array& tensor,
                           TensorFormat format, std::int64_t num_seqs)
    : given_("token_offsets", given, tensor.device()) {
  check_token_rank(name, tensor, format);
  const bool on_host = tensor.device().type == DeviceType::Cpu;
  const TensorView& view = tensor.view();
  if (num_seqs < 0 && format != TensorFormat::Thd && given.is_none())
    num_seqs = view.shape[format == TensorFormat::Bshd ? 0 : 1];
  if (num_seqs < 0) num_seqs = given_.size() - 1;
  if (given.is_none() && (num_seqs < 0 || !on_host)) {
    throw_mismatch("token_offsets",
                   on_host ? "prefix sums [num_seqs + 1]"
                           : fmt::format("an int32 array on {}", device_text(tensor.device())),
                   "None");
  }
  num_seqs_ = count("num_seqs", std::max<std::int64_t>(num_seqs, 0));
  if (given.is_none()) {
    set_equal(name, tensor, format);
    return;
  }
  given_.require("token_offsets", std::int64_t{num_seqs_} + 1);
  data_ = given_.data();
  if (on_host) {
    num_tokens_ = data_[num_seqs_];
    return;
  }
  const std::int64_t room = format == TensorFormat::Thd
                                ? view.shape[0]
                                : num_seqs_ * view.shape[format == TensorFormat::Bshd ? 1 : 0];
  num_tokens_ = count("num_tokens", room);
}

void TokenOffsets::set_equal(std::string_view name, const Array& tensor, TensorFormat format) {
  const TensorView& view = tensor.view();
  std::int64_t each = view.shape[format == TensorFormat::Bshd ? 1 : 0];
  if (format == TensorFormat::Thd) {
    const bool divides = num_seqs_ > 0 ? each % num_seqs_ == 0 : each == 0;
    if (!divides) {
      throw_mismatch(
          "token_offsets", "prefix sums [num_seqs + 1]", "None",
          fmt::format("{} has {} tokens, no multiple of {} sequences", name, each, num_seqs_));
    }
    each = num_seqs_ > 0 ? each / num_seqs_ : 0;
  }
  num_tokens_ = count("num_tokens", each * num_seqs_);
  equal_.resize(static_cast<std::size_t>(num_seqs_) + 1);
  for (std::size_t b = 0; b < equal_.size(); ++b)
    equal_[b] = static_cast<std::int32_t>(each * static_cast<std::int64_t>(b));
  data_ = equal_.data();
}

CallersStep::CallersStep(nb::handle kv_lens, const CallersCache& cache)
    : kv_lens_("kv_lens", kv_lens, cache.keys().device()), device_(cache.keys().device()) {
  if (kv_lens.is_none()) throw_mismatch("kv_lens", "lengths [num_seqs]", "None");
  arrays_.num_seqs = count("num_seqs", kv_lens_.size());
  arrays_.kv_lens = kv_lens_.data();
  cache.require_rows(arrays_.num_seqs);
}

CallersStep::CallersStep(const StepWords& words, std::string_view name, const Array& tensor,
                         TensorFormat format, const CallersCache& cache)
    : CallersStep(words.kv_lens, cache) {
  offsets_ = TokenOffsets(words.token_offsets, name, tensor, format, arrays_.num_seqs);
  arrays_.token_offsets = offsets_.data();
  arrays_.num_tokens = offsets_.num_tokens();
  set_maxima(words);
}

CallersStep::CallersStep(const StepWords& words, std::int32_t num_tokens, const CallersCache& cache)
    : CallersStep(words.kv_lens, cache) {
  given_offsets_ = Integers("token_offsets", words.token_offsets, device_);
  if (words.token_offsets.is_none())
    throw_mismatch("token_offsets", "prefix sums [num_seqs + 1]", "None");
  given_offsets_.require("token_offsets", std::int64_t{arrays_.num_seqs} + 1);
  arrays_.token_offsets = given_offsets_.data();
  arrays_.num_tokens = num_tokens;
  set_maxima(words);
}

void CallersStep::set_maxima(const StepWords& words) {
  arrays_.max_new_tokens = words.max_new_tokens;
  arrays_.max_kv_len = words.max_kv_len;
  if (words.workspace == nullptr) return;
  if (device_.type == DeviceType::Cpu)
    throw_mismatch("workspace", "None on the CPU", device_text(words.workspace->device()));
  arrays_.workspace = &words.workspace->workspace();
}

std::int64_t CallersStep::longest_kv_len(std::string_view argument) const {
  if (device_.type != DeviceType::Cpu)
    throw_mismatch(argument, "the length of a row", "0", "the host doesn't see kv_lens");
  std::int32_t longest = 0;
  for (std::int32_t b = 0; b < arrays_.num_seqs; ++b)
    longest = std::max(longest, arrays_.kv_lens[b]);
  return longest;
}

}  // namespace octavo::python
