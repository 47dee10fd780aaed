// SPDX-License-Identifier: Apache-2.0
// Byte-level byte-pair encoding, from the vocabulary in a GGUF file: text to token ids and back.
// Chat templates are chat.h's.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "examples/generate/gguf.h"
#include "examples/generate/pretokenizer.h"

namespace generate {

using TokenId = std::int32_t;

/// Whether names of control tokens in a text (<|im_end|>) stand for the tokens. Where the text is
/// somebody's message they must not: it could end its own turn.
enum class Specials : std::uint8_t { AsText, AsTokens };

class Tokenizer {
 public:
  /// Errors: InvalidArgument for a vocabulary of another kind, or one that contradicts itself.
  explicit Tokenizer(const Gguf& file);
  Tokenizer(const Tokenizer&) = delete;  // ids_ looks into tokens_, which a move leaves in place
  Tokenizer& operator=(const Tokenizer&) = delete;
  Tokenizer(Tokenizer&&) noexcept = default;
  Tokenizer& operator=(Tokenizer&&) noexcept = default;
  ~Tokenizer() = default;

  /// Errors: InvalidArgument for text that is not UTF-8. Bytes that the vocabulary has no token for
  /// (rare control codes) are left out, as the model never saw them.
  [[nodiscard]] std::vector<TokenId> encode(std::string_view text, Specials specials) const;

  /// The bytes of a token: a character may be spread over several. Control tokens have none.
  [[nodiscard]] std::string_view bytes(TokenId token) const;

  [[nodiscard]] std::int32_t num_tokens() const noexcept {
    return static_cast<std::int32_t>(tokens_.size());
  }
  /// The control token of that name.
  [[nodiscard]] std::optional<TokenId> find_control(std::string_view name) const;
  /// Whether a model that says this has finished.
  [[nodiscard]] bool ends_text(TokenId token) const noexcept;
  /// What every text starts with, if the file says so.
  [[nodiscard]] std::optional<TokenId> leading_token() const noexcept { return leading_token_; }

 private:
  enum class Kind : std::uint8_t { Normal, Control, UserDefined };
  struct Token {
    std::string bytes;  // of a control token: its name
    Kind kind = Kind::Normal;
  };
  struct Merge {
    std::int32_t rank = 0;
    TokenId merged = 0;
  };

  void read_tokens(const Gguf& file);
  void read_merges(const Gguf& file);
  void read_ends(const Gguf& file);
  [[nodiscard]] const Merge* find_merge(TokenId left, TokenId right) const;
  [[nodiscard]] std::optional<TokenId> special_at(std::string_view text, Specials specials) const;
  void encode_plain(std::string_view text, std::vector<TokenId>& out) const;
  void encode_piece(std::string_view piece, std::vector<TokenId>& out) const;

  Pretokenizer pretokenizer_;
  std::vector<Token> tokens_;
  std::unordered_map<std::string_view, TokenId> ids_;  // of normal tokens, by their bytes
  std::array<TokenId, 256> byte_ids_ = {};             // -1 where there is none
  std::unordered_map<std::uint64_t, Merge> merges_;    // by the ids of both halves
  std::array<std::vector<TokenId>, 256> specials_;     // by first byte, the longest first
  std::vector<TokenId> ends_;
  std::optional<TokenId> leading_token_;
};

}  // namespace generate
