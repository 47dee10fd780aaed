# SPDX-License-Identifier: Apache-2.0
"""Plants violations in a small tree and asks that tools/check_includes.py names each of them."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, sys.argv.pop(1))
import check_includes  # noqa: E402

SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
HEADER = SPDX + "#pragma once\n"


class IncludeRules(unittest.TestCase):
    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)
        self.root = Path(self.scratch.name)
        self.write("include/octavo/types.h", HEADER)
        for room in ("base", "cache", "plan", "kernels/cpu", "kernels/cuda/flash2"):
            self.write(f"src/{room}/part.h", HEADER)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def problems(self, name, text):
        self.write(name, text)
        return [message for _, message in check_includes.check_file(self.root, name)]

    def assert_clean(self, name, text):
        self.assertEqual(self.problems(name, text), [])

    def assert_found(self, name, text, wanted):
        found = self.problems(name, text)
        self.assertEqual(len(found), 1, found)
        self.assertIn(wanted, found[0])

    def test_room_may_include_what_is_below_it(self):
        self.assert_clean("src/plan/a.cpp", SPDX + '#include "cache/part.h"\n#include <vector>\n')

    def test_room_may_include_public_headers(self):
        self.assert_clean("src/base/a.cpp", SPDX + "#include <octavo/types.h>\n")

    def test_room_may_include_itself_by_a_short_path(self):
        self.assert_clean("src/plan/a.cpp", SPDX + '#include "part.h"\n')

    def test_room_may_not_include_what_is_above_it(self):
        self.assert_found("src/cache/a.cpp", SPDX + '#include "plan/part.h"\n', "of src/plan")

    def test_way_round_by_dots_is_seen(self):
        self.assert_found("src/cache/a.cpp", SPDX + '#include "../plan/part.h"\n', "of src/plan")

    def test_plan_and_kernels_do_not_know_each_other(self):
        self.assert_found("src/plan/a.cpp", SPDX + '#include "kernels/cpu/part.h"\n', "src/kernels")
        self.assert_found("src/kernels/cpu/a.cpp", SPDX + '#include "plan/part.h"\n', "of src/plan")

    def test_kernel_family_may_not_include_another(self):
        self.assert_found("src/kernels/cuda/flash3/a.cu",
                          SPDX + '#include "kernels/cuda/flash2/part.h"\n', "flash2")

    def test_oracle_may_not_see_the_library_inside(self):
        self.assert_found("testing/a.cpp", SPDX + '#include "src/base/part.h"\n', "of src/base")

    def test_public_header_may_not_use_a_library(self):
        self.assert_found("include/octavo/a.h", HEADER + "#include <fmt/core.h>\n", "of fmt")

    def test_public_header_may_not_see_the_inside(self):
        self.assert_found("include/octavo/a.h", HEADER + '#include "base/part.h"\n', "of src/base")

    def test_unknown_header_is_named(self):
        self.assert_found("src/base/a.cpp", SPDX + "#include <boost/any.hpp>\n", "unknown header")

    def test_iostream_in_a_header(self):
        self.assert_found("src/base/a.h", HEADER + "#include <iostream>\n", "iostream")

    def test_using_namespace_in_a_header(self):
        self.assert_found("src/base/a.h", HEADER + "using namespace std;\n", "using namespace")

    def test_missing_pragma_once(self):
        self.assert_found("src/base/a.h", SPDX, "#pragma once")

    def test_missing_licence_line(self):
        self.assert_found("src/base/a.cpp", "#include <vector>\n", "SPDX")

    def test_file_outside_every_room(self):
        self.assert_found("extras/a.cpp", SPDX, "no room")


if __name__ == "__main__":
    unittest.main()
