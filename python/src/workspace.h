// SPDX-License-Identifier: Apache-2.0
// The Python class Workspace: the library's, what it borrows, and the watch over its one thread.
#pragma once

#include <nanobind/nanobind.h>
#include <octavo/workspace.h>

#include <utility>

namespace octavo::python {

namespace nb = nanobind;

class WorkspaceHolder {
 public:
  explicit WorkspaceHolder(Device device) : workspace_(device) {}

  /// The workspace for one call; another thread that comes meanwhile is refused, as by a cache.
  class Use {
   public:
    /// Null: none is used.
    explicit Use(WorkspaceHolder* holder);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    WorkspaceHolder* holder_;
  };

  [[nodiscard]] Workspace& workspace() { return workspace_; }
  [[nodiscard]] Device device() const { return workspace_.device(); }
  void keep_memory(nb::object memory) { memory_ = std::move(memory); }
  void keep_step(nb::object arrays) { step_ = std::move(arrays); }

 private:
  nb::object memory_;
  nb::object step_;      // the planned arrays: other ones at their addresses would pass for them
  Workspace workspace_;  // last: gone before what it uses
  bool busy_ = false;    // read and written under the GIL
};

void bind_workspace(nb::module_& module);
void bind_graphed_step(nb::module_& module);

}  // namespace octavo::python
