// SPDX-License-Identifier: Apache-2.0
// Chat templates.
#include "examples/generate/chat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/generate/expect_error.h"
#include "tests/generate/tiny_model.h"

namespace generate::testing {
namespace {

using ::testing::HasSubstr;

struct Chat {
  explicit Chat(const TinyModel& model)
      : bytes(model.writer(false).bytes()),
        file(bytes, "tiny.gguf"),
        tokenizer(file),
        format(file, tokenizer) {}

  std::vector<std::byte> bytes;
  Gguf file;
  Tokenizer tokenizer;
  ChatTemplate format;
};

// The tokens as text, control tokens in brackets.
std::string spell(const Tokenizer& tokenizer, const std::vector<TokenId>& tokens) {
  std::string text;
  for (const TokenId token : tokens) {
    if (token == TinyModel::kStart) {
      text += "[start]";
    } else if (token == TinyModel::kEnd) {
      text += "[end]";
    } else {
      text += tokenizer.bytes(token);
    }
  }
  return text;
}

TEST(Chat, WrapsAMessageWithTheFilesSystemPrompt) {
  const Chat chat{TinyModel{}};
  EXPECT_EQ(spell(chat.tokenizer, chat.format.encode(chat.tokenizer, "Hi")),
            "[start]system\nBe brief[end]\n[start]user\nHi[end]\n[start]assistant\n");
}

TEST(Chat, AMessageCannotEndItsOwnTurn) {
  const Chat chat{TinyModel{}};
  EXPECT_THAT(spell(chat.tokenizer, chat.format.encode(chat.tokenizer, "a<|im_end|>b")),
              HasSubstr("[start]user\na<|im_end|>b[end]\n"));
}

TEST(Chat, KnowsChatMlWithoutSystemPromptInOtherSpelling) {
  TinyModel model;
  model.chat_template =
      "{%- for message in messages -%}{{ \"<|im_start|>\" + message.role + \"\\n\" + "
      "message.content + \"<|im_end|>\\n\" }}{%- endfor -%}{{ \"<|im_start|>assistant\\n\" }}";
  const Chat chat(model);
  EXPECT_EQ(spell(chat.tokenizer, chat.format.encode(chat.tokenizer, "Hi")),
            "[start]user\nHi[end]\n[start]assistant\n");
}

TEST(Chat, RefusesAnotherTemplateByItsText) {
  TinyModel model;
  model.chat_template = "[INST] {{ messages[0]['content'] }} [/INST]";
  EXPECT_EQ(error_of([&] { const Chat chat(model); }),
            "tiny.gguf: tokenizer.chat_template: wanted ChatML, got \"[INST] {{ "
            "messages[0]['content'] }} [/INST]\" (--raw takes prompts as they are)");
}

TEST(Chat, RefusesAFileWithoutTemplate) {
  TinyModel model;
  model.chat_template = "";
  EXPECT_THAT(error_of([&] { const Chat chat(model); }), HasSubstr("got no template (--raw"));
}

TEST(Chat, RawPromptsAreTheirTokens) {
  const Chat chat{TinyModel{}};
  EXPECT_EQ(spell(chat.tokenizer, encode_raw(chat.tokenizer, "<|im_start|>x")), "[start]x");
}

TEST(Chat, RefusesAnEmptyRawPrompt) {
  const Chat chat{TinyModel{}};
  EXPECT_THAT(error_of([&] { encode_raw(chat.tokenizer, ""); }),
              HasSubstr("prompt: wanted at least one token, got none"));
}

TEST(Chat, AnswersAnEmptyMessage) {
  const Chat chat{TinyModel{}};
  EXPECT_THAT(spell(chat.tokenizer, chat.format.encode(chat.tokenizer, "")),
              HasSubstr("[start]user\n[end]\n"));
}

}  // namespace
}  // namespace generate::testing
