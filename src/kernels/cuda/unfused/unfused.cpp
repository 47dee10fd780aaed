// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/unfused/unfused.h"

#include "base/math.h"
#include "device/gpu.h"
#include "kernels/cuda/unfused/chunks.h"
#include "kernels/cuda/unfused/gather.h"
#include "kernels/cuda/unfused/matmul.h"
#include "kernels/cuda/unfused/rows.h"

namespace octavo::kernels::cuda {
namespace {

using device::check;

// Rows and lengths of our own cache's are in range.
constexpr std::int32_t kNoBound = 0x7FFFFFFF;

// Rows of 16 bytes in every dtype: what cuBLASLt multiplies fastest.
std::int32_t padded(std::int32_t dim) { return base::ceil_div(dim, 8) * 8; }

UnfusedShape shape_of(const AttendParams& p, DType dtype) {
  return {.group = p.num_q_heads / p.num_kv_heads,
          .num_kv_heads = p.num_kv_heads,
          .padded_dim = padded(p.head_dim),
          .padded_dim_v = padded(p.head_dim_v),
          .element_bytes = dtype_bytes(dtype),
          .causal = p.causal,
          .window_right = p.window_right};
}

DType product_dtype(const AttendParams& p) {
  return p.q_dtype == p.kv.dtype ? p.kv.dtype : DType::F32;
}

class Call {
 public:
  Call(const AttendParams& params, DType dtype, std::byte* workspace, Matmul& matmul,
       CUstream_st* stream)
      : params_(params),
        dtype_(dtype),
        shape_(shape_of(params, dtype)),
        scratch_(workspace),
        arrays_(workspace + Matmul::kScratchBytes),
        matmul_(matmul),
        stream_(stream) {}

  [[nodiscard]] const UnfusedShape& shape() const { return shape_; }

  void run(const UnfusedChunk& chunk) {
    const UnfusedLayout layout(shape_, chunk);
    auto* scores = reinterpret_cast<float*>(arrays_ + layout.scores);
    auto* out = reinterpret_cast<float*>(arrays_ + layout.out);
    const UnfusedRows rows{.attend = params_,
                           .chunk = chunk,
                           .group = shape_.group,
                           .padded_dim = shape_.padded_dim,
                           .padded_dim_v = shape_.padded_dim_v,
                           .dtype = dtype_,
                           .q = arrays_ + layout.q,
                           .scores = scores,
                           .out = out,
                           .factors = reinterpret_cast<float*>(arrays_ + layout.factors)};
    if (chunk.gathers) {
      gather(chunk, params_.kv.k, params_.head_dim, shape_.padded_dim, arrays_ + layout.k);
      gather(chunk, params_.kv.v, params_.head_dim_v, shape_.padded_dim_v, arrays_ + layout.v);
    }
    check(gather_queries(rows, stream_), "gather_queries");
    Product product{.dtype = dtype_, .batch = chunk.num_seqs * chunk.num_heads};
    product.m = std::int64_t{chunk.num_tokens} * shape_.group;
    product.b_transposed = true;
    product.n = chunk.seen_keys;
    product.k = shape_.padded_dim;
    product.a_row = product.k;
    product.a_stride = product.m * product.a_row;
    product.b_stride = chunk.num_keys * shape_.padded_dim;
    product.c_stride = product.m * chunk.seen_keys;
    matmul_.run(product, params_.scale, rows.q, arrays_ + layout.k, scores, scratch_, stream_);
    check(softmax_rows(rows, stream_), "softmax_rows");
    product.b_transposed = false;
    product.n = shape_.padded_dim_v;
    product.k = chunk.seen_keys;
    product.a_row = chunk.seen_keys * 4 / shape_.element_bytes;
    product.a_stride = product.m * product.a_row;
    product.b_stride = chunk.num_keys * shape_.padded_dim_v;
    product.c_stride = product.m * shape_.padded_dim_v;
    matmul_.run(product, 1.0F, scores, arrays_ + layout.v, out, scratch_, stream_);
    check(write_rows(rows, stream_), "write_rows");
  }

 private:
  void gather(const UnfusedChunk& chunk, const PagedTensor& from, std::int32_t dim,
              std::int32_t padded_dim, std::byte* to) const {
    const GatherParams p{.batch = params_.batch,
                         .from = from,
                         .from_dtype = params_.kv.dtype,
                         .num_pages = params_.kv.num_pages,
                         .page_size = params_.kv.page_size,
                         .num_rows = kNoBound,
                         .max_slots = kNoBound,
                         .to = to,
                         .to_dtype = dtype_,
                         .to_seq_stride = chunk.num_heads * chunk.num_keys * padded_dim,
                         .to_slot_stride = padded_dim,
                         .to_head_stride = chunk.num_keys * padded_dim,
                         .first_seq = chunk.first_seq,
                         .num_seqs = chunk.num_seqs,
                         .first_head = chunk.first_head,
                         .num_heads = chunk.num_heads,
                         .dim = dim,
                         .padded_dim = padded_dim,
                         .num_slots = chunk.num_keys};
    check(gather_keys(p, stream_), "gather_keys");
  }

  const AttendParams& params_;
  DType dtype_;
  UnfusedShape shape_;
  std::byte* scratch_;
  std::byte* arrays_;
  Matmul& matmul_;
  CUstream_st* stream_;
};

}  // namespace

std::size_t least_unfused_bytes(std::int32_t group, std::int32_t head_dim, std::int32_t head_dim_v,
                                std::int64_t kv_len) {
  const UnfusedShape shape{.group = group,
                           .padded_dim = padded(head_dim),
                           .padded_dim_v = padded(head_dim_v),
                           .element_bytes = 4};  // of the widest products
  return Matmul::kScratchBytes + least_chunk_bytes(shape, kv_len);
}

std::size_t whole_unfused_bytes(const AttendParams& params, const StepLengths& lengths) {
  return Matmul::kScratchBytes +
         whole_chunk_bytes(shape_of(params, product_dtype(params)), lengths);
}

Unfused::Unfused() : matmul_(std::make_unique<Matmul>()) {}
Unfused::~Unfused() = default;

void Unfused::attend(const AttendParams& params, const StepLengths& lengths, void* workspace,
                     std::size_t workspace_bytes, CUstream_st* stream) {
  check(pad_outputs(params, stream), "pad_outputs");
  const DType dtype = product_dtype(params);
  Call call(params, dtype, static_cast<std::byte*>(workspace), *matmul_, stream);
  for_each_chunk(call.shape(), lengths, workspace_bytes - Matmul::kScratchBytes,
                 [&](const UnfusedChunk& chunk) { call.run(chunk); });
}

}  // namespace octavo::kernels::cuda
