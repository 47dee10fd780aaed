// SPDX-License-Identifier: Apache-2.0
// Any bytes are operations on a cache; the naive model must agree after each of them.
#include <cstddef>
#include <cstdint>

#include "cache/model.h"

namespace {

struct ByteChoices : octavo::cache_model::Choices {
  ByteChoices(const std::uint8_t* bytes, std::size_t num_bytes)
      : next(bytes), end(bytes + num_bytes) {}
  std::uint32_t below(std::uint32_t bound) override { return next == end ? 0 : *next++ % bound; }
  [[nodiscard]] bool done() const override { return next == end; }

  const std::uint8_t* next;
  const std::uint8_t* end;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ByteChoices choices(data, size);
  const bool contiguous = choices.below(4) == 0;
  const auto page_size = contiguous ? 24 : static_cast<std::int32_t>(1 + choices.below(24));
  const auto num_pages = contiguous ? 5 : static_cast<std::int32_t>(1 + choices.below(40));
  octavo::cache_model::Driver driver(
      {.kind = contiguous ? octavo::CacheKind::Contiguous : octavo::CacheKind::Paged,
       .max_num_seqs = 5,
       .max_seq_len = 24,
       .page_size = page_size,
       .num_pages = num_pages});
  driver.run(choices);  // throws what it finds, which ends the process
  return 0;
}
