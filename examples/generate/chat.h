// SPDX-License-Identifier: Apache-2.0
// Turns a prompt into the tokens that a chat model was trained to answer (ChatML).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "examples/generate/gguf.h"
#include "examples/generate/tokenizer.h"

namespace generate {

/// The ChatML family of templates, recognised by the file's own template, whose default system
/// message is built in.
class ChatTemplate {
 public:
  /// Errors: InvalidArgument when the file's template is another one, or there is none.
  ChatTemplate(const Gguf& file, const Tokenizer& tokenizer);

  /// The tokens of a conversation with one message of the user's, up to where the answer begins.
  [[nodiscard]] std::vector<TokenId> encode(const Tokenizer& tokenizer,
                                            std::string_view message) const;

  [[nodiscard]] const std::optional<std::string>& system_message() const noexcept {
    return system_message_;
  }

 private:
  TokenId start_ = 0;
  TokenId end_ = 0;
  std::optional<std::string> system_message_;
};

/// The tokens of a prompt without a template, the names of control tokens standing for the tokens.
/// Errors: InvalidArgument when that leaves no token at all.
std::vector<TokenId> encode_raw(const Tokenizer& tokenizer, std::string_view prompt);

}  // namespace generate
