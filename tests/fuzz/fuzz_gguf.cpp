// SPDX-License-Identifier: Apache-2.0
// Any bytes as a GGUF file: read, tokenise, load. Refusals are octavo::Error; anything else is a
// finding.
#include <octavo/error.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <span>

#include "examples/generate/chat.h"
#include "examples/generate/gguf.h"
#include "examples/generate/tokenizer.h"
#include "examples/generate/weights.h"

namespace {

// One part at a time: a file that is no tokenizer may still be a model.
template <typename CallT>
void refuse_or_do(CallT&& call) {
  try {
    call();
  } catch (const octavo::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  refuse_or_do([&] {
    const generate::Gguf file(std::as_bytes(std::span(data, size)), "fuzz");
    refuse_or_do([&] {
      const generate::Tokenizer tokenizer(file);
      tokenizer.encode("the answer is 42<|im_end|>", generate::Specials::AsTokens);
      const generate::ChatTemplate chat(file, tokenizer);
      chat.encode(tokenizer, "the");
    });
    refuse_or_do([&] { generate::load_weights(file, generate::WeightType::F32, 1, {}); });
  });
  return 0;
}
