#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# pkg_config.sh COMPILER PREFIX SOURCE FOLDER VERSION: builds and runs the consumer by octavo.pc alone.
set -euo pipefail
compiler="$1" prefix="$2" source="$3" folder="$4" version="$5"

pc="$(find "$prefix" -name octavo.pc)"
PKG_CONFIG_PATH="$(dirname "$pc")"
export PKG_CONFIG_PATH
[[ $(pkg-config --modversion octavo) == "$version" ]]
mkdir -p "$folder"
read -r -a flags <<<"$(pkg-config --cflags octavo)"
read -r -a libraries <<<"$(pkg-config --libs --static octavo)"
"$compiler" -std=c++20 "${flags[@]}" "$source" -o "$folder/consumer" "${libraries[@]}"
LD_LIBRARY_PATH="$(dirname "$pc")/.." "$folder/consumer" "$version"
