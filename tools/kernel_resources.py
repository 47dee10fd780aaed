#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kernel_resources.py TABLE NVCC_VERSION COMMAND…: runs nvcc, and holds what its kernels take to a table.

Stands in front of the compiler (RULE_LAUNCH_COMPILE) of a family built with -Xptxas -v. A kernel that
takes more registers than the table says, or other bytes of stack, spills or static shared memory, or that
is not in the table, makes the compilation fail, as does a row without a kernel. Registers are compared
where nvcc's version is the table's. OCTAVO_KERNEL_TABLE=write puts what was found into the table.

A row: source (or kernel), template parameters, architecture, registers, bytes of stack, of spills, of
static and of dynamic shared memory. The last is the launch's: tests/resources holds it to config.h.
Instances for both dtypes share a row, which has the larger number.
"""

import fcntl
import os
import pathlib
import re
import subprocess
import sys

COLUMNS = ("registers", "bytes of stack", "bytes of spills", "bytes of static shared memory")


def read_table(text):
    """Version, and rows: (name, parameters, architecture) -> numbers."""
    version = re.search(r"^# nvcc (\S+)", text, re.M)
    rows = {}
    for line in text.splitlines():
        words = line.split()
        if words and words[0] != "#":
            rows[tuple(words[:3])] = [int(word) for word in words[3:]]
    return version.group(1) if version else "", rows


def format_row(key, numbers):
    return f"{key[0]:<19} {key[1]:<19} {key[2]:<6}" + "".join(f" {n:>9}" for n in numbers)


def found_rows(source, output):
    """What ptxas says of each kernel of a file."""
    rows = {}
    key = None
    for line in output.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernel = re.search(r"\d([a-z][a-z_]*_kernel)", entry.group(1)).group(1)
            config = re.search(r"ConfigI((?:L[ib]\d+E)+)E", entry.group(1))
            parameters = ",".join(re.findall(r"\d+", config.group(1))) if config else "-"
            name = source if kernel == "attend_kernel" else kernel
            key = (name, parameters, entry.group(2))
            found = rows.setdefault(key, [0, 0, 0, 0])
        elif key is None:
            continue
        elif used := re.search(r"Used (\d+) registers", line):
            stack = re.search(r"(\d+) bytes cumulative stack size", line)
            smem = re.search(r"(\d+) bytes smem", line)
            found[0] = max(found[0], int(used.group(1)))
            found[1] = max(found[1], int(stack.group(1)) if stack else 0)
            found[3] = max(found[3], int(smem.group(1)) if smem else 0)
        elif spills := re.search(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill", line):
            found[2] = max(found[2], int(spills.group(1)), int(spills.group(2)))
    return rows


def write_table(path, found):
    with open(path, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        comments = [line for line in text.splitlines() if line.startswith("#")]
        rows = read_table(text)[1]
        sources = {key[0] for key in found}
        dynamic = {key[:2]: numbers[4] for key, numbers in rows.items()}
        rows = {key: numbers for key, numbers in rows.items() if key[0] not in sources}
        for key, numbers in found.items():
            rows[key] = numbers + [dynamic.get(key[:2], 0)]
        written = "\n".join(comments + [format_row(*row) for row in sorted(rows.items())]) + "\n"
        if written != text:
            file.seek(0)
            file.truncate()
            file.write(written)


def differences(rows, found, same_version):
    lines = []
    for key, got in sorted(found.items()):
        wanted = rows.get(key)
        if wanted is None:
            lines.append(f"{' '.join(key)}: wanted a row, got none; it would be\n{format_row(key, got)}")
            continue
        for i, column in enumerate(COLUMNS):
            wrong = got[i] > wanted[i] and same_version if i == 0 else got[i] != wanted[i]
            if wrong:
                lines.append(f"{' '.join(key)}: wanted {wanted[i]} {column}, got {got[i]}")
    built = {(key[0], key[2]) for key in found}
    for key in sorted(rows.keys() - found.keys()):
        if (key[0], key[2]) in built:
            lines.append(f"{' '.join(key)}: wanted a kernel for its row, got none")
    return lines


def main():
    table = pathlib.Path(sys.argv[1])
    version, command = sys.argv[2], sys.argv[3:]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    source = next((word for word in command if word.endswith(".cu")), None)
    kept = [
        line
        for line in done.stderr.splitlines()
        if source is None or not re.match(r"ptxas info|    \d+ bytes stack frame", line)
    ]
    if kept:
        print("\n".join(kept), file=sys.stderr)
    if done.returncode != 0 or source is None:
        return done.returncode
    found = found_rows(pathlib.Path(source).stem, done.stderr)
    if os.environ.get("OCTAVO_KERNEL_TABLE") == "write":
        write_table(table, found)
        return 0
    table_version, rows = read_table(table.read_text())
    lines = differences(rows, found, version == table_version)
    if not lines:
        return 0
    print(f"{table.name} does not hold (OCTAVO_KERNEL_TABLE=write makes it):", file=sys.stderr)
    print("\n".join(lines), file=sys.stderr)
    pathlib.Path(command[command.index("-o") + 1]).unlink(missing_ok=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
