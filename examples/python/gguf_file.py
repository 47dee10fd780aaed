# SPDX-License-Identifier: Apache-2.0
"""What generate_text.py needs of a GGUF file: keys, tensors as float32, and the tokenizer."""

from __future__ import annotations

import functools
import itertools
import mmap
import re
import struct

import numpy as np

# GGUF's type numbers of values, as formats of the module struct.
SCALARS = dict(zip([0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12], "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
# Types of elements: number -> (elements of a block, bytes of a block).
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34)}


class GgufFile:
    """`keys` by name; `tensor(name)` dequantised."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 0
        magic, version, num_tensors, num_keys = self._take("<4sIQQ")
        if magic != b"GGUF" or version != 3:
            raise ValueError(f"{path}: wanted GGUF version 3, got {magic!r} version {version}")
        self.keys = {}
        for _ in range(num_keys):
            name = self._string()
            self.keys[name] = self._value(*self._take("<I"))
        self.tensors = {}
        for _ in range(num_tensors):
            name = self._string()
            (rank,) = self._take("<I")
            shape = self._take(f"<{rank}Q")[::-1]  # GGUF counts the fastest axis first
            self.tensors[name] = (shape, *self._take("<IQ"))
        alignment = self.keys.get("general.alignment", 32)
        self.start = -(-self.at // alignment) * alignment

    def tensor(self, name):
        shape, kind, offset = self.tensors[name]
        if kind not in BLOCKS:
            raise ValueError(f"{name}: wanted F32, F16, Q4_0, Q4_1 or Q8_0, got type {kind}")
        elements, block_bytes = BLOCKS[kind]
        count = int(np.prod(shape)) // elements
        raw = np.frombuffer(self.data, np.uint8, count * block_bytes, self.start + offset)
        return widen(kind, raw.reshape(count, block_bytes)).reshape(shape)

    def _take(self, form):
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def _string(self):
        (length,) = self._take("<Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def _value(self, kind):
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            kind, count = self._take("<IQ")
            return [self._value(kind) for _ in range(count)]
        return self._take("<" + SCALARS[kind])[0]


def widen(kind, blocks):
    """Blocks of a type as float32: each has a scale (and an offset) and 32 small integers."""
    if kind in (0, 1):
        return blocks.view(np.float32 if kind == 0 else np.float16).astype(np.float32)
    scale = blocks[:, :2].view(np.float16).astype(np.float32)
    if kind == 8:
        return scale * blocks[:, 2:].view(np.int8)
    packed = blocks[:, 2 if kind == 2 else 4 :]
    numbers = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    if kind == 2:
        return scale * (numbers - 8)
    return scale * numbers + blocks[:, 2:4].view(np.float16).astype(np.float32)


class Tokenizer:
    """Byte-level byte-pair encoding with the file's own vocabulary and merges."""

    # GPT-2's pieces, digits one by one. `re` has no \p{L}: [^\W\d_] is all but the same.
    PIECES = re.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+|\d|\s+(?=\d)| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
    )
    CONTROL = 3  # a token's type in tokenizer.ggml.token_type

    def __init__(self, file):
        tokens = file.keys["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        merges = file.keys["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        kinds = file.keys["tokenizer.ggml.token_type"]
        control = [tokens[i] for i, kind in enumerate(kinds) if kind == self.CONTROL]
        self.controls = re.compile("(" + "|".join(map(re.escape, control)) + ")")
        # Bytes that print stand for themselves, the others for characters from 256 on.
        printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printing]
        self.letters = {byte: chr(byte) for byte in printing}
        self.letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
        letters_bytes = {letter: byte for byte, letter in self.letters.items()}
        self.bytes = [
            bytes(letters_bytes[c] for c in token) if kind != self.CONTROL else b""
            for token, kind in zip(tokens, kinds, strict=True)
        ]

    def encode(self, text):
        """Token ids of a text; names of control tokens stand for the tokens."""
        ids = []
        for part in self.controls.split(text):
            if self.controls.fullmatch(part):
                ids.append(self.ids[part])
            else:
                for piece in self.PIECES.findall(part):
                    ids += self._merge("".join(self.letters[byte] for byte in piece.encode()))
        return ids

    def decode(self, ids):
        return b"".join(self.bytes[i] for i in ids).decode(errors="replace")

    @functools.lru_cache(maxsize=10000)  # noqa: B019 - one tokenizer a program
    def _merge(self, piece):
        """Joins the pair of the lowest rank until no pair has one."""
        parts = list(piece)
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            i = pairs.index(best)
            parts[i : i + 2] = ["".join(best)]
        return tuple(self.ids[part] for part in parts)
