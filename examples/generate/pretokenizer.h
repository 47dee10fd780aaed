// SPDX-License-Identifier: Apache-2.0
// Cuts text into the pieces inside which byte pairs may merge, by the pattern of the tokenizer's
// kind. The kinds are named as in the key tokenizer.ggml.pre.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace generate {

class Pretokenizer {
 public:
  /// Errors: InvalidArgument, naming the kinds there are, for another `kind`.
  explicit Pretokenizer(std::string_view kind);

  /// The pieces of `text`, in order, without gaps. Errors: InvalidArgument for text that is not
  /// UTF-8.
  [[nodiscard]] std::vector<std::string_view> split(std::string_view text) const;

  /// Whether a piece that is a token as it stands is taken without merging.
  [[nodiscard]] bool takes_whole_pieces() const noexcept { return takes_whole_pieces_; }

 private:
  struct Pattern;  // a compiled regular expression

  // Applied one after the other, each within the pieces of the one before.
  std::vector<std::shared_ptr<const Pattern>> patterns_;
  bool takes_whole_pieces_ = false;
};

}  // namespace generate
