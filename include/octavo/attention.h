// SPDX-License-Identifier: Apache-2.0
// Attention over a cache: append a step's new keys and values, then attend.
#pragma once

#include <octavo/backend.h>
#include <octavo/cache.h>
#include <octavo/export.h>
#include <octavo/plan.h>
#include <octavo/tensor.h>
#include <octavo/types.h>

#include <cstddef>
#include <cstdint>

namespace octavo {

class Workspace;

/// What is the same for every step and layer. Order of the maths: scale, softcap, ALiBi, mask,
/// softmax, sink.
struct AttentionConfig {
  std::int32_t num_q_heads = 1;  ///< A multiple of num_kv_heads; query head h reads KV head h /
                                 ///< (num_q_heads / num_kv_heads).
  std::int32_t num_kv_heads = 1;
  std::int32_t head_dim = 0;    ///< Of q and K: 1 … 576.
  std::int32_t head_dim_v = 0;  ///< Of V and the output: 1 … 576; 0 is head_dim.
  float softmax_scale = 0.0F;   ///< 0 is 1 / sqrt(head_dim).
  Mask mask = Mask::Causal;
  Window window = {};
  float softcap = 0.0F;          ///< c > 0 turns a scaled logit s into c * tanh(s / c); 0 is off.
  bool batch_invariant = false;  ///< A sequence's bits don't depend on its batch mates. Costs some
                                 ///< balance across cores; where Auto's backend lacks workspace the
                                 ///< call is refused, not given to another.
  /// Under Auto, OCTAVO_BACKEND in the environment may name one. It is read when an Attention is
  /// made, and by each call of the functions over a caller's cache.
  Backend backend = Backend::Auto;
  Compute compute = Compute::Same;
  std::int32_t num_threads = 0;  ///< Of the CPU backends; 0 is OpenMP's default.
};

enum class RopeStyle : std::uint8_t {
  Interleaved,  ///< Pairs (2i, 2i + 1).
  Half,         ///< Pairs (i, i + rotary_dim / 2).
};

/// Rotary position embedding of q and K. Pair i at position p turns by the angle p * base^(-2i /
/// rotary_dim), or by whatever the caller's tables hold. Arithmetic is float32, angles of the
/// computed form float64.
struct Rope {
  RopeStyle style = RopeStyle::Half;
  std::int32_t rotary_dim =
      0;  ///< Even, at most head_dim; the rest of a head passes unturned. 0 is head_dim.
  double base = 10000.0;
  const float* cos =
      nullptr;  ///< [num_table_positions, rotary_dim / 2], dense; both tables or none.
  const float* sin = nullptr;
  std::int64_t num_table_positions = 0;  ///< A position beyond it is refused.
};

/// One layer's new tokens.
///
/// Shapes: q [.., num_q_heads, head_dim], k [.., num_kv_heads, head_dim], v [.., num_kv_heads,
/// head_dim_v], the leading axes as `format` says: bshd [num_seqs, L], sbhd [L, num_seqs], thd [T],
/// where L >= the step's max_new_tokens and T >= num_tokens. Rows beyond a sequence's new tokens
/// are padding and never read. Dtypes: F32, F16, BF16 each; the CPU converts k and v to the
/// cache's. Strides: any.
struct LayerInputs {
  ConstTensorView q, k, v;
  TensorFormat format = TensorFormat::Thd;
  const float* sinks = nullptr;  ///< [num_q_heads]: exp(sink) joins the softmax's denominator.
  const float* alibi_slopes = nullptr;  ///< [num_q_heads]: -slope * |p - j| joins the logit.
  const Rope* rope =
      nullptr;  ///< Rotates q and the new K; K is stored rotated. Null: neither is touched.
  /// [num_tokens] (with `maxima`: theirs), packed in batch order, for RoPE alone; null: the plan's.
  /// The CPU refuses those below 0 and beyond the tables. In a GPU's memory nobody reads them
  /// before the kernels, which take the tables' nearest row for a position beyond them.
  const std::int32_t* positions = nullptr;
  /// What the call is sized by instead of the step, which must lie within: on a GPU the call then
  /// serves every such step, so that a graph it is captured into can be replayed (GraphedStep does
  /// both). The tensors hold as many rows, and RoPE's tables as many positions, as the maxima say.
  /// For our own caches; null: the step's own sizes.
  const StepMaxima* maxima = nullptr;
};

/// Attention with one configuration, over caches of one configuration. Holds no tensors and no
/// workspace.
///
/// Thread safety: const calls may run at once on different caches.
class OCTAVO_EXPORT Attention {
 public:
  /// Errors: InvalidArgument for a configuration that is wrong in itself or does not fit the
  /// cache's; Unsupported, with required, supported and missing features, when the backend named
  /// (or, under Auto, every backend) cannot run it.
  Attention(const AttentionConfig& config, const CacheConfig& cache_config);

  /// What every backend says to this step, and which one forward would take; with `maxima`, to a
  /// call that is sized by them (LayerInputs::maxima).
  ///
  /// Shapes, Dtypes, Layout: those of the configurations; what the tensors of a call add (their
  /// dtypes, strides, alignment) is taken to fit, and `format` changes no answer. An empty plan is
  /// explained without sizes. Units: bytes of workspace, where a backend lacks some; those of
  /// `fused`, which only its graphs tell, are not looked at. Errors: InvalidArgument for maxima
  /// below 1. Sync: enqueues nothing, waits for nothing. Thread safety: as the class.
  [[nodiscard]] Explanation explain(const StepPlan& plan, TensorFormat format,
                                    const StepMaxima* maxima = nullptr) const;

  /// Writes the step's new keys and values into their slots, rotating K when asked, then attends.
  ///
  /// Shapes: out [.., num_q_heads, head_dim_v] in the inputs' format; lse (optional) F32 [>=
  /// num_tokens, num_q_heads], packed in batch order for every format, natural log, sinks left out.
  /// Padding rows of out become 0, of lse -inf. A row that sees no key gives 0 and -inf. Dtypes:
  /// out is F32 or q's. Overlap: out shares no element with q, k or v; on the CPU it may be q
  /// itself (same data, dtype and strides). Errors: InvalidArgument (nothing was changed), among
  /// them a plan that is not the begun one; Unsupported. Sync: enqueues on `stream`; on the CPU,
  /// done when it returns.
  void forward(const StepPlan& plan, KvCache& cache, std::int32_t layer, const LayerInputs& inputs,
               const TensorView& out, const TensorView* lse = nullptr, Stream stream = {}) const;

  /// The first half of forward. q is not looked at.
  void append(const StepPlan& plan, KvCache& cache, std::int32_t layer, const LayerInputs& inputs,
              Stream stream = {}) const;

  /// The second half of forward, over what the cache holds. k and v are not looked at.
  void attend(const StepPlan& plan, KvCache& cache, std::int32_t layer, const LayerInputs& inputs,
              const TensorView& out, const TensorView* lse = nullptr, Stream stream = {}) const;

  /// As given, with the defaults filled in.
  [[nodiscard]] const AttentionConfig& config() const noexcept { return config_; }
  /// config().backend, or, where that is Auto, the one that the environment named.
  [[nodiscard]] Backend backend() const noexcept { return backend_; }
  [[nodiscard]] const CacheConfig& cache_config() const noexcept { return cache_config_; }

 private:
  AttentionConfig config_;
  CacheConfig cache_config_;
  Backend backend_;
};

/// A cache that the caller manages.
///
/// Shapes: k [N, P, num_kv_heads, head_dim], v [N, P, num_kv_heads, head_dim_v]: N pages of P
/// slots, or, without a page table, N rows of P slots, one for each sequence. Strides: any, so that
/// head-major or interleaved caches fit.
struct KvView {
  TensorView k, v;
  const std::int32_t* page_table = nullptr;  ///< [rows, max_pages_per_seq] of page ids, or null.
  /// Elements from row to row. Rows may overlap: 1, with max_pages_per_seq entries behind the last
  /// row's first, reads one list of all sequences' pages, each from its row_indices on.
  std::int64_t page_table_stride = 0;
  std::int32_t num_rows = 0;  ///< Rows of the page table; without one, N.
  std::int32_t max_pages_per_seq = 0;
  const std::int32_t* row_indices =
      nullptr;  ///< [num_seqs]: which row is each sequence's; null: row b.
};

/// The lengths of a step over the caller's cache.
///
/// Over a cache in a GPU's memory the arrays, and those of KvView, lie there too, and no call reads
/// them back. num_seqs and num_tokens are then maxima: sequences without tokens may fill up the
/// rest. So are the two below. `workspace` is needed, and has planned these arrays since they
/// changed (Workspace::plan).
struct StepArrays {
  std::int32_t num_seqs = 0;
  std::int32_t num_tokens = 0;                  ///< token_offsets[num_seqs].
  const std::int32_t* token_offsets = nullptr;  ///< [num_seqs + 1], prefix sums of the new tokens.
  const std::int32_t* kv_lens = nullptr;  ///< [num_seqs], the step's new tokens included. Query i
                                          ///< of n stands at kv_len - n + i.
  std::int32_t max_new_tokens = 0;        ///< Of one sequence; 0 is num_tokens. GPUs alone.
  std::int32_t max_kv_len = 0;     ///< Of one sequence; 0 is what a row can hold. GPUs alone.
  Workspace* workspace = nullptr;  ///< GPUs alone.
};

/// Attention over the caller's cache; the new tokens are already in it (see append_tokens).
/// Otherwise as Attention::attend.
///
/// Errors: InvalidArgument as there, and for page ids out of range (on the CPU, every id that would
/// be read is checked), lengths beyond the view, offsets that fall; Unsupported. On a GPU a
/// sequence with such a fault writes nothing and gives 0 and -inf; Workspace::check names it. There
/// `fused` sets V's slots behind a sequence's end, up to 128 and no farther than the page's end, to
/// 0: the page that holds a sequence's last token must hold no other's later tokens.
OCTAVO_EXPORT void attend(const AttentionConfig& config, const KvView& cache,
                          const StepArrays& step, const LayerInputs& inputs, const TensorView& out,
                          const TensorView* lse = nullptr, Stream stream = {});

/// Throws what attend would throw for these arguments before it enqueues anything, and does nothing
/// else: before an append whose tokens are not to stay in the cache without their attention. The
/// new tokens need not be in the cache yet, nor, on a GPU, the step be planned.
///
/// Shapes, Dtypes, Errors: as attend; on a GPU also InvalidArgument where the workspace's memory is
/// too small for plan and call. Sync: enqueues nothing. Thread safety: as attend, the workspace's.
OCTAVO_EXPORT void check_attend(const AttentionConfig& config, const KvView& cache,
                                const StepArrays& step, const LayerInputs& inputs,
                                const TensorView& out, const TensorView* lse = nullptr,
                                Stream stream = {});

/// Writes new keys and values into the caller's cache, at the last positions of each sequence,
/// rotating K when asked. Errors: as attend; on a GPU tokens of a sequence whose kv_len does not
/// cover them are left out. Of `config`, the head counts, head dims and num_threads are used.
OCTAVO_EXPORT void append_tokens(const AttentionConfig& config, const KvView& cache,
                                 const StepArrays& step, const LayerInputs& inputs,
                                 Stream stream = {});

/// What each backend says to attention over such a cache, and which one attend would take.
///
/// Shapes: of `cache` k and v as in KvView; of `inputs` q in any format, or none (rank 0), which is
/// taken to fit, as `out` is. Dtypes: as attend; q's counts where there is one. Units: none, since
/// lengths and workspace are not known here: attend may still pass over a backend that lacks room.
/// Layout/strides: those of k, v and q count, as do the addresses of k and v (rows that begin at
/// multiples of 16 bytes). Of the other inputs only whether they are there counts. Errors:
/// InvalidArgument for a configuration or a cache that attend would refuse; DeviceFailure,
/// NotCompiled where the cache's GPU is not there. What a backend can't do is part of the answer.
/// Sync: enqueues nothing, and nothing in memory is read. Thread safety: free.
OCTAVO_EXPORT Explanation explain(const AttentionConfig& config, const KvView& cache,
                                  const LayerInputs& inputs);

}  // namespace octavo
