// SPDX-License-Identifier: Apache-2.0
#include "testing/spec.h"

#include "testing/input_error.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <system_error>
#include <vector>

namespace octavo::testkit {

const char* const kSpecHelp =
    R"(Words of a case, in any order; what is left out has the value shown:
  b2 q1 s40 steps3   sequences; most new tokens of each in a later step; in the first step; steps
  hq4 hkv2           query heads, key/value heads
  d32 dv32           head dims of q and K, of V
  p16 pages0         page size, pages (0: as many as could be needed)
  f32 | f16 | bf16   dtype
  thd | bshd | sbhd  format of the tokens
  paged | contiguous cache
  causal | full      mask
  w-1,-1             window: keys to the left, to the right (-1: no bound)
  cap0 scale0        softcap (0: off), softmax scale (0: 1/sqrt(d))
  sinks alibi        learned sinks, ALiBi slopes
  life               sequences also pause, end, fork and are cut back
  mag1               magnitude of q and K
  seed1              of the random numbers)";

namespace {

constexpr std::int64_t kMaxElements = std::int64_t{1} << 31;

template <typename T>
T number(std::string_view digits, T low, T high, std::string_view word) {
  T value{};
  const char* end = digits.data() + digits.size();
  const auto [stop, code] = std::from_chars(digits.data(), end, value);
  if (code != std::errc() || stop != end || !(value >= low && value <= high)) {
    throw InputError(fmt::format("case '{}': wanted a number from {} to {}, got '{}'",
                                 printable(word), low, high, printable(digits)));
  }
  return value;
}

// Takes the word when it is a flag or a name.
bool take_name(std::string_view word, CaseSpec& spec) {
  if (const std::optional<DType> dtype = parse_dtype(word)) {
    if (*dtype != DType::F32 && *dtype != DType::F16 && *dtype != DType::BF16) return false;
    spec.dtype = *dtype;
  } else if (const std::optional<TensorFormat> format = parse_format(word)) {
    spec.format = *format;
  } else if (const std::optional<CacheKind> kind = parse_cache_kind(word)) {
    spec.kind = *kind;
  } else if (word == to_string(Mask::Causal)) {
    spec.mask = Mask::Causal;
  } else if (word == to_string(Mask::Full)) {
    spec.mask = Mask::Full;
  } else if (word == "sinks") {
    spec.sinks = true;
  } else if (word == "alibi") {
    spec.alibi = true;
  } else if (word == "life") {
    spec.life = true;
  } else {
    return false;
  }
  return true;
}

void take_window(std::string_view value, std::string_view word, CaseSpec& spec) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::size_t comma = value.find(',');
  if (comma == std::string_view::npos) {
    throw InputError(fmt::format("case '{}': wanted wLEFT,RIGHT, got no comma", printable(word)));
  }
  spec.window.left = number<std::int64_t>(value.substr(0, comma), -1, kMost, word);
  spec.window.right = number<std::int64_t>(value.substr(comma + 1), -1, kMost, word);
}

// Takes a word that is a key and its number.
bool take_number(std::string_view word, CaseSpec& spec) {
  const std::size_t letters = word.find_first_not_of("abcdefghijklmnopqrstuvwxyz");
  if (letters == 0 || letters == std::string_view::npos) return false;
  const std::string_view key = word.substr(0, letters);
  const std::string_view value = word.substr(letters);
  const auto whole = [&](auto& field, std::int64_t low, std::int64_t high) {
    using FieldT = std::remove_reference_t<decltype(field)>;
    field = static_cast<FieldT>(number<std::int64_t>(value, low, high, word));
  };
  const auto real = [&](double low, double high) { return number<double>(value, low, high, word); };
  constexpr std::int64_t kMany = 1'000'000;
  if (key == "b")
    whole(spec.num_seqs, 0, 10'000);
  else if (key == "q")
    whole(spec.new_tokens, 0, kMany);
  else if (key == "s")
    whole(spec.past, 0, kMany);
  else if (key == "steps")
    whole(spec.num_steps, 0, 10'000);
  else if (key == "hq")
    whole(spec.num_q_heads, 1, 1024);
  else if (key == "hkv")
    whole(spec.num_kv_heads, 1, 1024);
  else if (key == "d")
    whole(spec.head_dim, 1, 4096);
  else if (key == "dv")
    whole(spec.head_dim_v, 0, 4096);
  else if (key == "p")
    whole(spec.page_size, 1, kMany);
  else if (key == "pages")
    whole(spec.num_pages, 0, kMany);
  else if (key == "seed")
    whole(spec.seed, 0, std::numeric_limits<std::int64_t>::max());
  else if (key == "w")
    take_window(value, word, spec);
  else if (key == "cap")
    spec.softcap = static_cast<float>(real(0.0, 1e6));
  else if (key == "scale")
    spec.scale = static_cast<float>(real(0.0, 1e6));
  else if (key == "mag")
    spec.magnitude = real(0.0, 1e4);
  else
    return false;
  return true;
}

}  // namespace

CaseSpec parse_spec(std::string_view line) {
  CaseSpec spec;
  bool any = false;
  while (true) {
    const std::size_t start = line.find_first_not_of(" \t\n");
    if (start == std::string_view::npos) break;
    line.remove_prefix(start);
    const std::string_view word = line.substr(0, line.find_first_of(" \t\n"));
    if (!take_name(word, spec) && !take_number(word, spec)) {
      throw InputError(
          fmt::format("case: wanted words such as b3 q1 hq32 hkv8 d128 p16 bf16 seed7, got '{}'",
                      printable(word)));
    }
    any = true;
    line.remove_prefix(word.size());
  }
  if (!any) throw InputError("case: wanted a file or words such as b3 q1 hq32 hkv8 d128, got none");
  if (spec.num_q_heads % spec.num_kv_heads != 0) {
    throw InputError(
        fmt::format("case hq{}: wanted a multiple of hkv{}", spec.num_q_heads, spec.num_kv_heads));
  }
  // The oracle's time as well as memory: what is beyond this was a slip of the finger.
  const double tokens = static_cast<double>(spec.num_seqs) *
                        static_cast<double>(spec.past + spec.num_steps * spec.new_tokens);
  if (tokens * spec.num_q_heads * spec.head_dim > static_cast<double>(kMaxElements)) {
    throw InputError(fmt::format("case: wanted at most {} elements of q, got more", kMaxElements));
  }
  return spec;
}

std::string CaseSpec::to_string() const {
  const CaseSpec plain;
  std::string line = fmt::format("b{} q{} s{}", num_seqs, new_tokens, past);
  if (num_steps != plain.num_steps) line += fmt::format(" steps{}", num_steps);
  line += fmt::format(" hq{} hkv{} d{}", num_q_heads, num_kv_heads, head_dim);
  if (head_dim_v != 0) line += fmt::format(" dv{}", head_dim_v);
  line += fmt::format(" p{}", page_size);
  if (num_pages != 0) line += fmt::format(" pages{}", num_pages);
  line += fmt::format(" {}", octavo::to_string(dtype));
  if (format != plain.format) line += fmt::format(" {}", octavo::to_string(format));
  if (kind != plain.kind) line += fmt::format(" {}", octavo::to_string(kind));
  if (mask != plain.mask) line += fmt::format(" {}", octavo::to_string(mask));
  if (window != plain.window) line += fmt::format(" w{},{}", window.left, window.right);
  if (softcap != 0.0F) line += fmt::format(" cap{}", softcap);
  if (scale != 0.0F) line += fmt::format(" scale{}", scale);
  if (sinks) line += " sinks";
  if (alibi) line += " alibi";
  if (life) line += " life";
  if (magnitude != plain.magnitude) line += fmt::format(" mag{}", magnitude);
  return line + fmt::format(" seed{}", seed);
}

}  // namespace octavo::testkit
