// SPDX-License-Identifier: Apache-2.0
// Any bytes as a GGUF file: read, tokenise, load. Refusals are octavo::Error; anything else is a
// finding. Inputs that start with an odd byte are changes to a good file, so that the fuzzer gets
// deep without having to invent one.
#include <octavo/error.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include "examples/generate/chat.h"
#include "examples/generate/gguf.h"
#include "examples/generate/tokenizer.h"
#include "examples/generate/weights.h"
#include "tests/generate/tiny_model.h"

namespace {

// One part at a time: a file that is no tokenizer may still be a model.
template <typename CallT>
void refuse_or_do(CallT&& call) {
  try {
    call();
  } catch (const octavo::Error&) {
  }
}

const std::vector<std::byte>& good_file() {
  static const std::vector<std::byte> kFile = [] {
    generate::testing::TinyModel model;
    model.num_layers = 1;
    model.width = 8;
    model.ffn_width = 8;
    model.num_q_heads = 2;
    model.num_kv_heads = 1;
    return model.writer().bytes();
  }();
  return kFile;
}

// Three bytes for each change: where (two of them) and what.
std::vector<std::byte> changed_file(std::span<const std::uint8_t> changes) {
  std::vector<std::byte> file = good_file();
  for (std::size_t i = 0; i + 3 <= changes.size(); i += 3) {
    const std::size_t at = changes[i] | (std::size_t{changes[i + 1]} << 8U);
    file[at % file.size()] = std::byte{changes[i + 2]};
  }
  return file;
}

void read(std::span<const std::byte> bytes) {
  refuse_or_do([&] {
    const generate::Gguf file(bytes, "fuzz");
    refuse_or_do([&] {
      const generate::Tokenizer tokenizer(file);
      (void)tokenizer.encode("the answer is 42<|im_end|>", generate::Specials::AsTokens);
      const generate::ChatTemplate chat(file, tokenizer);
      (void)chat.encode(tokenizer, "the");
    });
    refuse_or_do([&] { generate::load_weights(file, generate::WeightType::F32, 1, {}); });
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span input(data, size);
  if (size > 0 && data[0] % 2 == 1) {
    read(changed_file(input.subspan(1)));
  } else {
    read(std::as_bytes(input));
  }
  return 0;
}
