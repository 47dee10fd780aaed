// SPDX-License-Identifier: Apache-2.0
#include "kernels_cudnn/gpu/fused_cases.h"

#include <array>
#include <cstdint>

namespace octavo::test {
namespace {

const std::vector<SeqLens> kMixed = {{17, 17}, {1, 200}, {0, 0},  {0, 70},  {130, 257},
                                     {1, 1},   {64, 64}, {3, 65}, {1, 128}, {2, 2}};
const std::vector<SeqLens> kDecode = {{1, 1}, {1, 63},  {1, 64},  {1, 65}, {1, 511},
                                      {0, 0}, {1, 300}, {1, 129}, {1, 16}};
// A caller's cache that holds fewer keys than there are new tokens: the first rows see none.
const std::vector<SeqLens> kKeyless = {{9, 4}, {5, 0}, {1, 0}, {70, 66}, {8, 8}, {1, 90}};

struct Masking {
  bool causal;
  std::int32_t left, right;
};
constexpr std::array<Masking, 4> kMasks = {
    {{true, -1, -1}, {false, -1, -1}, {true, 40, -1}, {false, 30, 10}}};
constexpr std::array<TensorFormat, 3> kFormats = {TensorFormat::Thd, TensorFormat::Bshd,
                                                  TensorFormat::Sbhd};

Spec basic(std::size_t number) {
  Spec spec;
  spec.seed = static_cast<std::uint32_t>(number + 1);
  spec.format = kFormats[number % 3];
  spec.dtype = number % 2 == 0 ? DType::BF16 : DType::F16;
  spec.lse = number % 4 != 3;
  return spec;
}

void add_pages(std::vector<Spec>& cases) {
  for (const std::int32_t page : {1, 3, 16, 24, 64, 256}) {
    for (const std::int32_t dim : {64, 128, 256}) {
      for (const Masking& mask : kMasks) {
        // Each page size and dim meets every format and both kinds of step.
        Spec spec = basic(cases.size() + cases.size() / 4);
        spec.page_size = page;
        spec.head_dim = spec.head_dim_v = dim;
        spec.causal = mask.causal;
        spec.window_left = mask.left;
        spec.window_right = mask.right;
        spec.lens = cases.size() % 3 == 2 ? kDecode : kMixed;
        cases.push_back(spec);
      }
    }
  }
}

void add_contiguous(std::vector<Spec>& cases) {
  for (const bool shuffled : {false, true}) {
    for (const std::int32_t capacity : {512, 520}) {
      for (const TensorFormat format : kFormats) {
        for (const bool decode : {false, true}) {
          Spec spec = basic(cases.size());
          spec.format = format;
          spec.contiguous = true;
          spec.page_size = capacity;
          spec.shuffled_rows = shuffled;
          spec.lens = decode ? kDecode : kMixed;
          cases.push_back(spec);
        }
      }
    }
  }
}

void add_odd(std::vector<Spec>& cases) {
  const auto add = [&](auto change) {
    Spec spec = basic(cases.size());
    spec.lens = kMixed;
    change(spec);
    cases.push_back(spec);
  };
  for (const TensorFormat format : kFormats) {
    for (const bool causal : {true, false}) {
      add([&](Spec& s) {
        s.format = format;
        s.causal = causal;
        s.lens = kKeyless;
      });
    }
  }
  for (const std::int32_t page : {16, 24}) {
    for (const bool decode : {false, true}) {
      add([&](Spec& s) {
        s.head_major = true;
        s.page_size = page;
        if (decode) s.lens = kDecode;
      });
      add([&](Spec& s) {
        s.keys_and_values = true;
        s.page_size = page;
        if (decode) s.lens = kDecode;
      });
    }
  }
  for (const std::int32_t heads : {1, 3, 7}) {
    add([&](Spec& s) { s.num_q_heads = 2 * heads; });
    add([&](Spec& s) {
      s.num_q_heads = heads;
      s.num_kv_heads = 1;
      s.lens = kDecode;
    });
  }
  for (const std::int32_t dim : {8, 32, 40, 72, 80, 96, 112, 160, 192, 224}) {
    add([&](Spec& s) { s.head_dim = s.head_dim_v = dim; });
    add([&](Spec& s) {
      s.head_dim = s.head_dim_v = dim;
      s.lens = kDecode;
    });
  }
  constexpr std::array<std::array<std::int32_t, 2>, 4> kWidths = {
      {{192, 128}, {128, 64}, {64, 128}, {96, 32}}};
  for (const auto& [dim, dim_v] : kWidths) {
    for (const bool decode : {false, true}) {
      add([&, qk = dim, v = dim_v](Spec& s) {
        s.head_dim = qk;
        s.head_dim_v = v;
        if (decode) s.lens = kDecode;
      });
    }
  }
  // Elements beyond 2^31 and 2^32.
  for (const std::int32_t page : {16, 24}) {
    for (const bool decode : {false, true}) {
      add([&](Spec& s) {
        s.page_size = page;
        s.unused_pages = (std::int64_t{1} << 32) / (page * s.num_kv_heads * s.head_dim);
        if (decode) s.lens = kDecode;
      });
    }
  }
  // Sizes of a bucket, all alike: no mask of lengths.
  for (const TensorFormat format : kFormats) {
    for (const SeqLens lens : {SeqLens{256, 256}, SeqLens{128, 512}}) {
      for (const bool causal : {true, false}) {
        add([&](Spec& s) {
          s.format = format;
          s.contiguous = true;
          s.shuffled_rows = false;
          s.page_size = 600;
          s.causal = causal;
          s.padding_rows = 0;
          s.lens = {lens, lens, lens};
        });
      }
    }
  }
  // Few tokens a sequence, each a batch row.
  for (const TensorFormat format : kFormats) {
    for (const bool causal : {true, false}) {
      add([&](Spec& s) {
        s.format = format;
        s.causal = causal;
        s.lens = {{3, 70}, {0, 9}, {4, 4}, {1, 300}, {2, 129}, {4, 2}};
      });
      add([&](Spec& s) {
        s.format = format;
        s.causal = causal;
        s.window_left = 20;
        s.window_right = causal ? -1 : 5;
        s.lens = {{3, 70}, {0, 9}, {4, 4}, {1, 300}, {2, 129}, {4, 14}};
      });
    }
  }
  add([](Spec& s) { s.lens = {{1, 1}}; });
  add([](Spec& s) { s.lens = {{0, 0}, {0, 5}}; });
  add([](Spec& s) { s.lens = {{300, 1000}, {1, 1024}, {513, 513}}; });
  add([](Spec& s) { s.lens = std::vector<SeqLens>(67, SeqLens{1, 40}); });
}

}  // namespace

std::vector<Spec> fused_cases() {
  std::vector<Spec> cases;
  add_pages(cases);
  add_contiguous(cases);
  add_odd(cases);
  return cases;
}

}  // namespace octavo::test
