// SPDX-License-Identifier: Apache-2.0
// Pre-tokenizers as lists of patterns for PCRE2.
#include "examples/generate/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cstdint>
#include <span>

#include "examples/generate/error.h"
#include "examples/generate/utf8.h"

namespace generate {
namespace {

constexpr const char* kDigit = R"(\p{N})";
constexpr const char* kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen2 =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";

struct Kind {
  const char* name;
  std::array<const char*, 2> patterns;
  bool takes_whole_pieces;
};

constexpr std::array<Kind, 4> kKinds = {{{"smollm", {kDigit, kGpt2}, false},
                                         {"gpt-2", {kGpt2, nullptr}, false},
                                         {"llama-bpe", {kLlama3, nullptr}, true},
                                         {"qwen2", {kQwen2, nullptr}, false}}};

// Unicode's white space. PCRE2's own \s has U+180E besides, which Unicode took out of it.
constexpr std::string_view kSpaces =
    R"(\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

// The pattern with \s and \S spelled out.
std::string with_unicode_spaces(std::string_view source) {
  std::string out;
  bool in_class = false;
  for (std::size_t i = 0; i < source.size(); ++i) {
    const char c = source[i];
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    if (c != '\\') {
      out += c;
      continue;
    }
    const char escaped = source[++i];
    if (escaped != 's' && escaped != 'S') {
      out += {c, escaped};
    } else if (in_class) {
      out += kSpaces;
    } else {
      out += fmt::format("[{}{}]", escaped == 'S' ? "^" : "", kSpaces);
    }
  }
  return out;
}

struct FreeMatch {
  void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
};

}  // namespace

struct Pretokenizer::Pattern {
  explicit Pattern(const std::string& source) {
    int error = 0;
    PCRE2_SIZE at = 0;
    code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(),
                         PCRE2_UTF | PCRE2_UCP, &error, &at, nullptr);
    if (code == nullptr) {
      fail("PCRE2: wanted Unicode support, got error {} at offset {} of {}", error, at, source);
    }
    // Without a JIT for this machine the pattern is interpreted, to the same result.
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  }
  ~Pattern() { pcre2_code_free(code); }
  Pattern(const Pattern&) = delete;
  Pattern& operator=(const Pattern&) = delete;

  // Appends the matches in `text` and what lies between them.
  void split(std::string_view text, std::vector<std::string_view>& pieces) const {
    const std::unique_ptr<pcre2_match_data, FreeMatch> match(
        pcre2_match_data_create_from_pattern(code, nullptr));
    std::size_t done = 0;
    while (done < text.size()) {
      const int found = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                    done, PCRE2_NO_UTF_CHECK, match.get(), nullptr);
      if (found == PCRE2_ERROR_NOMATCH) break;
      if (found < 0) fail("text: wanted to split it into words, got PCRE2 error {}", found);
      const PCRE2_SIZE* const bounds = pcre2_get_ovector_pointer(match.get());
      if (bounds[0] > done) pieces.push_back(text.substr(done, bounds[0] - done));
      pieces.push_back(text.substr(bounds[0], bounds[1] - bounds[0]));
      done = bounds[1];
    }
    if (done < text.size()) pieces.push_back(text.substr(done));
  }

  pcre2_code* code = nullptr;
};

Pretokenizer::Pretokenizer(std::string_view kind) {
  std::string known;
  for (const Kind& candidate : kKinds) {
    known += fmt::format("{}{}", known.empty() ? "" : ", ", candidate.name);
    if (kind != candidate.name) continue;
    takes_whole_pieces_ = candidate.takes_whole_pieces;
    for (const char* source : candidate.patterns) {
      if (source != nullptr)
        patterns_.push_back(std::make_shared<const Pattern>(with_unicode_spaces(source)));
    }
    return;
  }
  fail("tokenizer.ggml.pre: wanted one of {}, got {}", known, printable(kind));
}

std::vector<std::string_view> Pretokenizer::split(std::string_view text) const {
  // PCRE2 is told not to check; a broken character would lead it beyond the end.
  if (const auto at = find_invalid(text)) {
    fail("text: wanted UTF-8, got byte 0x{:02x} at offset {}",
         static_cast<unsigned>(static_cast<unsigned char>(text[*at])), *at);
  }
  std::vector<std::string_view> pieces;
  if (!text.empty()) pieces.push_back(text);
  for (const auto& pattern : patterns_) {
    std::vector<std::string_view> finer;
    for (const std::string_view piece : pieces) pattern->split(piece, finer);
    pieces = std::move(finer);
  }
  return pieces;
}

}  // namespace generate
