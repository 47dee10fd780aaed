// SPDX-License-Identifier: Apache-2.0
// The backend `fused`: attention by cuDNN's graphs, over the cache as it lies. Compiles without
// CUDA.
//
// A call enqueues up to four things: prepare_step (once a step), clear_tails (where asked for),
// cuDNN's own kernels, and finish_step (where something may be padded). None allocates or waits
// once the graph is built. What cuDNN cannot do is said by support.h, not found out here.
//
// Where every sequence has few new tokens, each token is handed to cuDNN as a batch row of its own,
// with the keys that it sees: so thd, bshd and sbhd all get cuDNN's decode path, which splits long
// caches. Otherwise a batch row is a sequence, and thd goes by ragged offsets.
//
// With sequences as rows cuDNN multiplies masked V by 0, so V's slots behind a sequence's end must
// be finite up to the next multiple of kTailTile, or of kContiguousTailTile where sequences lie in
// one stretch each (and no farther than the page's end); otherwise ask for clear_tails. Table
// entries behind a sequence's last page are never read, and no null page is needed: the expanded
// table repeats the sequence's first page there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/params.h"

struct CUstream_st;

namespace octavo::kernels::fused {

/// Pages are handed to cuDNN in parts of at most so many slots.
inline constexpr std::int32_t kTailTile = 64;
/// cuDNN's tile of keys.
inline constexpr std::int32_t kContiguousTailTile = 128;
/// New tokens of a sequence up to which tokens are batch rows.
inline constexpr std::int32_t kMaxTokensAsRows = 4;

/// The sizes that a graph is built for: those of the step, or of a captured graph's maxima. They
/// are rounded up to buckets, so that few graphs serve many steps.
struct Maxima {
  std::int32_t num_seqs = 0;
  std::int32_t num_tokens = 0;
  std::int32_t q_len = 0;   ///< New tokens of one sequence.
  std::int32_t kv_len = 0;  ///< Keys of one sequence, new ones included.
  /// These are the step's own sizes, batch.num_seqs and num_tokens too, and every new token sees a
  /// key. Where nothing is padded either, finish_step is left out.
  /// Not for a captured graph that is replayed with other lengths.
  bool exact = false;
  /// Beside being exact, every sequence has q_len new tokens and kv_len keys. Saves cuDNN the mask
  /// of lengths where K and V are contiguous and the sizes are a bucket's.
  bool uniform = false;
  /// K and V of batch row b lie in page first_page + b alone, whatever the page table says; -1: by
  /// the table. Saves cuDNN the table where sequences are batch rows.
  /// Not for a captured graph that is replayed with other pages.
  std::int32_t first_page = -1;
  /// K and V of each sequence lie in one page, which no other sequence has, also where the call is
  /// replayed with other pages. Saves cuDNN the table too: every page is a batch row then.
  bool one_page_each = false;
};

struct CallOptions {
  /// The workspace's step arrays are not this step's yet: true for the first layer of each step,
  /// and after anything else used the workspace. The first call in a captured graph always makes
  /// them.
  bool new_step = true;
  /// Slots behind the sequences' ends may be anything.
  bool clear_tails = false;
};

/// Whether work on the stream goes into a CUDA graph.
bool is_captured(CUstream_st* stream);

struct FusedOptions {
  std::size_t max_graphs = 128;  ///< Kept; those in captured graphs are kept beside.
  std::int32_t max_tokens_as_rows = kMaxTokensAsRows;
  /// Take none of cuDNN's engines that may give other bits for the same call.
  bool deterministic = false;
};

/// Graphs of one device, the newest used kept. One thread at a time.
class FusedAttention {
 public:
  /// Opens cuDNN on the current device, whose architecture is e.g. 90. Throws NotCompiled when
  /// there is no cuDNN.
  explicit FusedAttention(std::int32_t arch, const FusedOptions& options = {});
  ~FusedAttention();
  FusedAttention(FusedAttention&&) noexcept;
  FusedAttention& operator=(FusedAttention&&) noexcept;

  /// Bytes of workspace for such a call; builds its graph when it isn't there, which takes up to a
  /// second and must not happen under capture. Throws Unsupported with cuDNN's words when there is
  /// no such graph.
  std::size_t workspace_bytes(const AttendParams& params, const Maxima& maxima);

  /// Enqueues the attention. `workspace` is aligned to 256 bytes. Throws InvalidArgument for a
  /// workspace that is too small, Unsupported when the graph is missing and `stream` is being
  /// captured.
  void attend(const AttendParams& params, const Maxima& maxima, const CallOptions& options,
              void* workspace, std::size_t workspace_bytes, CUstream_st* stream);

  [[nodiscard]] std::size_t num_graphs() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace octavo::kernels::fused
