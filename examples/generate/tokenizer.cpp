// SPDX-License-Identifier: Apache-2.0
// Byte-level byte-pair encoding.
#include "examples/generate/tokenizer.h"

#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>

#include "examples/generate/error.h"
#include "examples/generate/utf8.h"

namespace generate {
namespace {

// The file's token types.
constexpr std::int64_t kControlType = 3;
constexpr std::int64_t kUserDefinedType = 4;
constexpr std::size_t kMaxTokens = 1U << 24U;

// Vocabularies of this kind write each byte as one printable character: those that are printable in
// Latin-1 as themselves, the others, in order, from U+0100.
bool stands_for_itself(std::uint32_t byte) noexcept {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

std::unordered_map<char32_t, char> make_byte_alphabet() {
  std::unordered_map<char32_t, char> alphabet;
  char32_t next = 0x100;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    alphabet.emplace(stands_for_itself(byte) ? byte : next++, static_cast<char>(byte));
  }
  return alphabet;
}

// Nothing when the text has a character that stands for no byte.
std::optional<std::string> to_bytes(std::string_view text) {
  static const std::unordered_map<char32_t, char> kAlphabet = make_byte_alphabet();
  std::string bytes;
  while (!text.empty()) {
    const Utf8Char next = first_char(text);
    const auto found = next.valid ? kAlphabet.find(next.code) : kAlphabet.end();
    if (found == kAlphabet.end()) return std::nullopt;
    bytes.push_back(found->second);
    text.remove_prefix(next.num_bytes);
  }
  return bytes;
}

std::size_t first_byte(std::string_view text) noexcept {
  return static_cast<unsigned char>(text.front());
}

std::string_view required_text(const Gguf& file, const char* key) {
  const auto value = file.text(key);
  if (!value) fail("{}: {}: wanted a string, got none", file.name(), key);
  return *value;
}

}  // namespace

Tokenizer::Tokenizer(const Gguf& file)
    : pretokenizer_([&file] {
        const std::string_view model = required_text(file, "tokenizer.ggml.model");
        if (model != "gpt2") {
          fail("{}: tokenizer.ggml.model: wanted gpt2 (byte-level BPE), got {}", file.name(),
               printable(model));
        }
        return Pretokenizer(required_text(file, "tokenizer.ggml.pre"));
      }()) {
  read_tokens(file);
  read_merges(file);
  read_ends(file);
}

void Tokenizer::read_tokens(const Gguf& file) {
  const auto texts = file.texts("tokenizer.ggml.tokens");
  const auto types = file.integers("tokenizer.ggml.token_type");
  if (texts.empty() || texts.size() > kMaxTokens) {
    fail("{}: tokenizer.ggml.tokens: wanted 1 to {} tokens, got {}", file.name(), kMaxTokens,
         texts.size());
  }
  if (!types.empty() && types.size() != texts.size()) {
    fail("{}: tokenizer.ggml.token_type: wanted {} types, got {}", file.name(), texts.size(),
         types.size());
  }
  tokens_.reserve(texts.size());  // ids_ holds views into it
  for (std::size_t i = 0; i < texts.size(); ++i) {
    Token token{std::string(texts[i]), Kind::Normal};
    if (!types.empty() && types[i] == kControlType) token.kind = Kind::Control;
    if (!types.empty() && types[i] == kUserDefinedType) token.kind = Kind::UserDefined;
    if (token.kind == Kind::Normal) {
      // Some files hold a few plain words that never come out of merges.
      token.bytes = to_bytes(texts[i]).value_or(token.bytes);
    }
    tokens_.push_back(std::move(token));
  }
  byte_ids_.fill(-1);
  for (TokenId id = 0; id < num_tokens(); ++id) {
    const Token& token = tokens_[static_cast<std::size_t>(id)];
    if (token.bytes.empty()) continue;
    if (token.kind != Kind::Normal) {
      specials_[first_byte(token.bytes)].push_back(id);
    } else if (ids_.emplace(token.bytes, id).second && token.bytes.size() == 1) {
      byte_ids_[first_byte(token.bytes)] = id;
    }
  }
  for (std::vector<TokenId>& group : specials_) {
    std::stable_sort(group.begin(), group.end(), [this](TokenId a, TokenId b) {
      return tokens_[static_cast<std::size_t>(a)].bytes.size() >
             tokens_[static_cast<std::size_t>(b)].bytes.size();
    });
  }
}

void Tokenizer::read_merges(const Gguf& file) {
  const auto rules = file.texts("tokenizer.ggml.merges");
  merges_.reserve(rules.size());
  for (std::size_t rank = 0; rank < rules.size(); ++rank) {
    // A space never occurs inside a half: it is written as another character.
    const std::size_t space = rules[rank].find(' ');
    const auto known = [this](const std::optional<std::string>& bytes) -> std::optional<TokenId> {
      const auto found = bytes ? ids_.find(*bytes) : ids_.end();
      return found != ids_.end() ? std::optional(found->second) : std::nullopt;
    };
    std::optional<TokenId> left;
    std::optional<TokenId> right;
    std::optional<TokenId> merged;
    if (space != std::string_view::npos) {
      left = known(to_bytes(rules[rank].substr(0, space)));
      right = known(to_bytes(rules[rank].substr(space + 1)));
    }
    if (left && right) merged = known(std::string(bytes(*left)) + std::string(bytes(*right)));
    if (!merged) {
      fail("{}: tokenizer.ggml.merges: wanted two tokens that make a third, got \"{}\" at index {}",
           file.name(), printable(rules[rank]), rank);
    }
    const auto key =
        (static_cast<std::uint64_t>(*left) << 32U) | static_cast<std::uint64_t>(*right);
    merges_.emplace(key, Merge{static_cast<std::int32_t>(rank), *merged});
  }
}

void Tokenizer::read_ends(const Gguf& file) {
  const auto named = [&](const char* key) -> std::optional<TokenId> {
    const auto id = file.integer(key);
    if (id && (*id < 0 || *id >= num_tokens())) {
      fail("{}: {}: wanted a token below {}, got {}", file.name(), key, num_tokens(), *id);
    }
    return id ? std::optional(static_cast<TokenId>(*id)) : std::nullopt;
  };
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    if (const auto id = named(key)) ends_.push_back(*id);
  }
  // Files name one end at most, though chat models end a turn and a text differently.
  for (const char* name : {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>"}) {
    if (const auto id = find_control(name)) ends_.push_back(*id);
  }
  const auto leading = named("tokenizer.ggml.bos_token_id");
  if (file.boolean("tokenizer.ggml.add_bos_token").value_or(pretokenizer_.takes_whole_pieces())) {
    leading_token_ = leading;
  }
}

std::string_view Tokenizer::bytes(TokenId token) const {
  const Token& found = tokens_.at(static_cast<std::size_t>(token));
  return found.kind == Kind::Control ? std::string_view() : found.bytes;
}

std::optional<TokenId> Tokenizer::find_control(std::string_view name) const {
  if (name.empty()) return std::nullopt;
  for (const TokenId id : specials_[first_byte(name)]) {
    const Token& token = tokens_[static_cast<std::size_t>(id)];
    if (token.kind == Kind::Control && token.bytes == name) return id;
  }
  return std::nullopt;
}

bool Tokenizer::ends_text(TokenId token) const noexcept {
  return std::find(ends_.begin(), ends_.end(), token) != ends_.end();
}

const Tokenizer::Merge* Tokenizer::find_merge(TokenId left, TokenId right) const {
  const auto key = (static_cast<std::uint64_t>(left) << 32U) | static_cast<std::uint64_t>(right);
  const auto found = merges_.find(key);
  return found != merges_.end() ? &found->second : nullptr;
}

std::optional<TokenId> Tokenizer::special_at(std::string_view text, Specials specials) const {
  for (const TokenId id : specials_[first_byte(text)]) {
    const Token& token = tokens_[static_cast<std::size_t>(id)];
    if (token.kind == Kind::Control && specials == Specials::AsText) continue;
    if (text.starts_with(token.bytes)) return id;
  }
  return std::nullopt;
}

std::vector<TokenId> Tokenizer::encode(std::string_view text, Specials specials) const {
  std::vector<TokenId> out;
  std::size_t plain = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto special = special_at(text.substr(at), specials);
    if (!special) {
      ++at;
      continue;
    }
    encode_plain(text.substr(plain, at - plain), out);
    out.push_back(*special);
    at += tokens_[static_cast<std::size_t>(*special)].bytes.size();
    plain = at;
  }
  encode_plain(text.substr(plain), out);
  return out;
}

void Tokenizer::encode_plain(std::string_view text, std::vector<TokenId>& out) const {
  for (const std::string_view piece : pretokenizer_.split(text)) {
    const auto whole = pretokenizer_.takes_whole_pieces() ? ids_.find(piece) : ids_.end();
    if (whole != ids_.end()) {
      out.push_back(whole->second);
    } else {
      encode_piece(piece, out);
    }
  }
}

// Merges the pair of lowest rank, the leftmost of equals, until none is left. The pairs wait in a
// heap, so that a long piece costs n log n.
void Tokenizer::encode_piece(std::string_view piece, std::vector<TokenId>& out) const {
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  struct Part {
    TokenId id = 0;  // -1 once it has merged into the part on its left
    std::size_t previous = 0;
    std::size_t next = 0;
  };
  struct Pair {
    std::int32_t rank;
    std::size_t left;
    TokenId left_id, right_id;
    TokenId merged;
    bool operator>(const Pair& other) const {
      return std::tie(rank, left) > std::tie(other.rank, other.left);
    }
  };
  std::vector<Part> parts;
  for (const char byte : piece) {
    const TokenId id = byte_ids_[static_cast<unsigned char>(byte)];
    if (id >= 0) parts.push_back({id, parts.size() - 1, parts.size() + 1});
  }
  if (parts.empty()) return;
  parts.front().previous = kNone;
  parts.back().next = kNone;

  std::priority_queue<Pair, std::vector<Pair>, std::greater<>> pairs;
  const auto offer = [&](std::size_t left) {
    if (left == kNone || parts[left].next == kNone) return;
    const TokenId right_id = parts[parts[left].next].id;
    const Merge* const merge = find_merge(parts[left].id, right_id);
    if (merge != nullptr) pairs.push({merge->rank, left, parts[left].id, right_id, merge->merged});
  };
  for (std::size_t i = 0; i < parts.size(); ++i) offer(i);
  while (!pairs.empty()) {
    const Pair best = pairs.top();
    pairs.pop();
    Part& left = parts[best.left];
    // Either half may have merged with something else since.
    if (left.id != best.left_id || left.next == kNone || parts[left.next].id != best.right_id) {
      continue;
    }
    Part& right = parts[left.next];
    left.id = best.merged;
    left.next = right.next;
    right.id = -1;
    if (left.next != kNone) parts[left.next].previous = best.left;
    offer(left.previous);
    offer(best.left);
  }
  for (std::size_t i = 0; i != kNone; i = parts[i].next) out.push_back(parts[i].id);
}

}  // namespace generate
