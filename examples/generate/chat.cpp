// SPDX-License-Identifier: Apache-2.0
// ChatML.
#include "examples/generate/chat.h"

#include <algorithm>
#include <utility>

#include "examples/generate/error.h"

namespace generate {
namespace {

constexpr std::string_view kStart = "<|im_start|>";
constexpr std::string_view kEnd = "<|im_end|>";

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (std::size_t at = text.find(from); at != std::string_view::npos; at = text.find(from)) {
    out.append(text.substr(0, at)).append(to);
    text.remove_prefix(at + from.size());
  }
  return out.append(text);
}

// The template with the freedoms of its language taken out: quotes, spaces, ways to write a line
// break and a field.
std::string normalised(std::string_view source) {
  std::string text(source);
  for (const auto& [from, to] :
       {std::pair{"\\n", "\n"}, std::pair{"\"", "'"}, std::pair{"['role']", ".role"},
        std::pair{"['content']", ".content"}}) {
    text = replaced(text, from, to);
  }
  text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
  return replaced(text, "'+'", "");
}

// The system message that the template puts in when there is none: the one that it spells out.
std::optional<std::string> find_system_message(std::string_view source) {
  const std::string text = replaced(source, "\\n", "\n");
  const std::string opening = std::string(kStart) + "system\n";
  for (std::size_t at = text.find(opening); at != std::string::npos;
       at = text.find(opening, at + 1)) {
    const std::size_t begin = at + opening.size();
    const std::size_t end = text.find(kEnd, begin);
    if (end == std::string::npos) break;
    const std::string message = text.substr(begin, end - begin);
    if (message.find_first_of("'\"{}") == std::string::npos) return message;
  }
  return std::nullopt;
}

}  // namespace

ChatTemplate::ChatTemplate(const Gguf& file, const Tokenizer& tokenizer) {
  const auto source = file.text("tokenizer.chat_template");
  if (!source) {
    fail(
        "{}: tokenizer.chat_template: wanted ChatML, got no template (--raw takes prompts as they "
        "are)",
        file.name());
  }
  const std::string text = normalised(*source);
  const bool known = text.find("'<|im_start|>'+message.role+'\n'+message.content+'<|im_end|>") !=
                         std::string::npos &&
                     text.find("'<|im_start|>assistant\n'") != std::string::npos;
  const auto start = tokenizer.find_control(kStart);
  const auto end = tokenizer.find_control(kEnd);
  if (!known || !start || !end) {
    fail("{}: tokenizer.chat_template: wanted ChatML, got \"{}\" (--raw takes prompts as they are)",
         file.name(), printable(*source));
  }
  start_ = *start;
  end_ = *end;
  system_message_ = find_system_message(*source);
}

std::vector<TokenId> ChatTemplate::encode(const Tokenizer& tokenizer,
                                          std::string_view message) const {
  std::vector<TokenId> tokens;
  if (tokenizer.leading_token()) tokens.push_back(*tokenizer.leading_token());
  const auto append = [&](const std::string& text) {
    const auto more = tokenizer.encode(text, Specials::AsText);
    tokens.insert(tokens.end(), more.begin(), more.end());
  };
  const auto append_turn = [&](std::string_view role, std::string_view content) {
    tokens.push_back(start_);
    append(fmt::format("{}\n{}", role, content));
    tokens.push_back(end_);
    append("\n");
  };
  if (system_message_) append_turn("system", *system_message_);
  append_turn("user", message);
  tokens.push_back(start_);
  append("assistant\n");
  return tokens;
}

std::vector<TokenId> encode_raw(const Tokenizer& tokenizer, std::string_view prompt) {
  std::vector<TokenId> tokens;
  if (tokenizer.leading_token()) tokens.push_back(*tokenizer.leading_token());
  const auto more = tokenizer.encode(prompt, Specials::AsTokens);
  tokens.insert(tokens.end(), more.begin(), more.end());
  if (tokens.empty()) fail("prompt: wanted at least one token, got none (an empty prompt?)");
  return tokens;
}

}  // namespace generate
