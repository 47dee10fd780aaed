// SPDX-License-Identifier: Apache-2.0
// What the user sees: answers on standard output, progress on standard error. On a terminal a bar
// stays below the text that streams; elsewhere progress is plain lines.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <string_view>

namespace generate {

class Screen {
 public:
  /// `quiet`: neither bars nor notes.
  explicit Screen(bool quiet);
  ~Screen();
  Screen(const Screen&) = delete;
  Screen& operator=(const Screen&) = delete;

  /// Draws the bar anew, at most a few times a second. Without a terminal: nothing.
  void show_progress(std::string_view label, double share, std::string_view detail);
  /// Takes the bar away.
  void end_progress();
  /// A whole line of progress on standard error.
  void note(std::string_view line);
  /// Answer text on standard output, above the bar. Errors: octavo::Error when it can't be written.
  void write(std::string_view text);

 private:
  void erase_bar();
  void draw_bar();

  bool quiet_;
  bool bar_terminal_;   // standard error can show a bar
  bool text_terminal_;  // standard output shares the terminal
  bool drawn_ = false;
  std::string bar_;
  std::string partial_line_;  // of the text, when it shares the terminal
  std::chrono::steady_clock::time_point next_draw_;
};

}  // namespace generate
