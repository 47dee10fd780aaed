// SPDX-License-Identifier: Apache-2.0
// Progress bars and streaming text on one terminal.
#include "examples/generate/screen.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "examples/generate/error.h"
#include "examples/generate/utf8.h"

namespace generate {
namespace {

constexpr std::size_t kBarWidth = 24;
constexpr auto kDrawEvery = std::chrono::milliseconds(80);

std::size_t terminal_width() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 20) return 80;
  return size.ws_col;
}

// Columns a character takes, never too few: wide scripts and symbols take two.
std::size_t columns(char32_t code) { return code >= 0x1100 ? 2 : 1; }

std::size_t columns(std::string_view text) {
  std::size_t total = 0;
  while (!text.empty()) {
    const Utf8Char next = first_char(text);
    total += columns(next.code);
    text.remove_prefix(next.num_bytes);
  }
  return total;
}

void put_error(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stderr); }

}  // namespace

Screen::Screen(bool quiet)
    : quiet_(quiet),
      bar_terminal_(!quiet && isatty(STDERR_FILENO) != 0),
      text_terminal_(bar_terminal_ && isatty(STDOUT_FILENO) != 0) {}

Screen::~Screen() { erase_bar(); }

void Screen::show_progress(std::string_view label, double share, std::string_view detail) {
  if (!bar_terminal_) return;
  const auto now = std::chrono::steady_clock::now();
  if (drawn_ && now < next_draw_) return;
  next_draw_ = now + kDrawEvery;
  const auto filled =
      static_cast<std::size_t>(std::clamp(share, 0.0, 1.0) * static_cast<double>(kBarWidth));
  std::string bar;
  for (std::size_t i = 0; i < kBarWidth; ++i) bar += i < filled ? "█" : "░";
  erase_bar();
  bar_ = fmt::format("{} {} {}", label, bar, detail);
  // A bar longer than the line could not be taken away again. Its blocks are three bytes each.
  const std::size_t room = terminal_width() - 1 + 2 * kBarWidth;
  if (bar_.size() > room) bar_.resize(room);
  draw_bar();
}

void Screen::draw_bar() {
  if (bar_.empty()) return;
  if (!partial_line_.empty()) {
    put_error("\n");
  }
  put_error(bar_);
  std::fflush(stderr);
  drawn_ = true;
}

// Leaves the cursor where the text goes on: behind the partial line, which is written anew rather
// than counted, so that no odd character can throw the column off.
void Screen::erase_bar() {
  if (!drawn_) return;
  drawn_ = false;
  put_error("\r\x1b[K");
  if (!partial_line_.empty()) {
    put_error("\x1b[A\r");
    put_error(partial_line_);
  }
  std::fflush(stderr);
}

void Screen::end_progress() {
  erase_bar();
  bar_.clear();
}

void Screen::note(std::string_view line) {
  if (quiet_) return;
  erase_bar();
  put_error(fmt::format("{}\n", line));
  draw_bar();
}

void Screen::write(std::string_view text) {
  erase_bar();
  std::string out;
  if (!text_terminal_) {
    out = text;
  } else {
    // Lines are broken here, at the terminal's width: the bar needs to know where a line ends.
    const std::size_t width = terminal_width() - 1;
    while (!text.empty()) {
      const Utf8Char next = first_char(text);
      const std::string_view piece = text.substr(0, next.num_bytes);
      text.remove_prefix(next.num_bytes);
      if (next.code == '\n') {
        out += '\n';
        partial_line_.clear();
        continue;
      }
      if (columns(partial_line_) + columns(next.code) > width) {
        out += '\n';
        partial_line_.clear();
      }
      out += piece;
      partial_line_ += piece;
    }
  }
  const bool written = std::fwrite(out.data(), 1, out.size(), stdout) == out.size();
  if (!written || std::fflush(stdout) != 0) {
    fail("standard output: wanted to write {} bytes, got: {}", out.size(), std::strerror(errno));
  }
  draw_bar();
}

}  // namespace generate
