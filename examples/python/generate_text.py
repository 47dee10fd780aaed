# SPDX-License-Identifier: Apache-2.0
"""Generates text with a small Llama-like model: NumPy for the model, Octavo for its attention.

    python examples/python/generate_text.py "What is the capital of France?" "Name three colours."

Prompts are answered side by side: each step holds whatever new tokens each answer has, a whole
prompt or one token. The model is the one that `python tools/fetch_model.py` fetches.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

# Octavo's threads wait in the layer's attention while NumPy's work on its products: they must not
# spin meanwhile. Read when Octavo's OpenMP starts, hence above the imports.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

import octavo
from gguf_file import GgufFile, Tokenizer

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHAT = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
    "<|im_start|>assistant\n"
)


class Model:
    """A Llama-like model: RMS norms, grouped attention with RoPE, a gated feed-forward part."""

    def __init__(self, file):
        def number(name):
            return file.keys["llama." + name]

        self.num_layers = number("block_count")
        self.num_q_heads = number("attention.head_count")
        self.num_kv_heads = number("attention.head_count_kv")
        self.epsilon = number("attention.layer_norm_rms_epsilon")
        self.embedding = file.tensor("token_embd.weight")
        self.head_dim = self.embedding.shape[1] // self.num_q_heads
        # GGUF lays Llama's heads out for pairs of neighbours.
        self.rope = octavo.Rope("interleaved", base=number("rope.freq_base"))
        self.last_norm = file.tensor("output_norm.weight")
        tied = "output.weight" not in file.tensors
        self.head = self.embedding if tied else file.tensor("output.weight")
        names = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down"
        self.layers = [
            {name: file.tensor(f"blk.{i}.{name}.weight") for name in names.split()}
            for i in range(self.num_layers)
        ]

    def make_cache(self, num_seqs, max_seq_len):
        return octavo.KvCache(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_num_seqs=num_seqs,
            max_seq_len=max_seq_len,
        )

    def norm(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * weight

    def step(self, tokens, plan, cache, attention):
        """Logits after the last new token of each sequence of the step: [num_seqs, vocabulary]."""
        x = self.embedding[tokens]
        for i, layer in enumerate(self.layers):
            normed = self.norm(x, layer["attn_norm"])
            q = (normed @ layer["attn_q"].T).reshape(-1, self.num_q_heads, self.head_dim)
            k = (normed @ layer["attn_k"].T).reshape(-1, self.num_kv_heads, self.head_dim)
            v = (normed @ layer["attn_v"].T).reshape(-1, self.num_kv_heads, self.head_dim)
            # Appends k (rotated) and v to the cache, rotates q, attends: all of this layer's part.
            attended = attention.forward(plan, cache, i, q, k, v, rope=self.rope)
            x = x + attended.reshape(len(tokens), -1) @ layer["attn_output"].T

            normed = self.norm(x, layer["ffn_norm"])
            gate = normed @ layer["ffn_gate"].T
            gated = gate / (1.0 + np.exp(-gate)) * (normed @ layer["ffn_up"].T)
            x = x + gated @ layer["ffn_down"].T
        last = x[plan.token_offsets[1:] - 1]
        return self.norm(last, self.last_norm) @ self.head.T


def generate(model, prompts, end_token, max_new_tokens):
    """Greedy answers to prompts (lists of token ids), all in one continuous batch."""
    longest = max(map(len, prompts)) + max_new_tokens
    cache = model.make_cache(len(prompts), longest)
    attention = octavo.Attention(cache, num_q_heads=model.num_q_heads)
    answers = [[] for _ in prompts]
    new_tokens = dict(enumerate(prompts))  # of each sequence that goes on
    while new_tokens:
        plan = cache.plan({seq: len(tokens) for seq, tokens in new_tokens.items()})
        cache.begin(plan)
        tokens = np.concatenate([new_tokens[seq] for seq in plan.ids.tolist()])
        logits = model.step(tokens, plan, cache, attention)
        for seq, token in zip(plan.ids.tolist(), logits.argmax(axis=-1).tolist(), strict=True):
            ended = token == end_token
            if not ended:
                answers[seq].append(token)
            if ended or len(answers[seq]) == max_new_tokens:
                cache.release(seq)
                del new_tokens[seq]
            else:
                new_tokens[seq] = [token]
    return answers


def find_model():
    script = Path(__file__).resolve().parents[2] / "tools" / "fetch_model.py"
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--model", help="a GGUF file (default: the small model, fetched once)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    arguments = parser.parse_args()

    file = GgufFile(arguments.model or os.environ.get("OCTAVO_MODEL") or find_model())
    tokenizer, model = Tokenizer(file), Model(file)
    chats = [CHAT.format(system=SYSTEM, user=text) for text in arguments.prompts]
    prompts = [tokenizer.encode(chat) for chat in chats]
    end_token = file.keys["tokenizer.ggml.eos_token_id"]
    answers = generate(model, prompts, end_token, arguments.max_new_tokens)
    for prompt, answer in zip(arguments.prompts, answers, strict=True):
        print(f"> {prompt}\n{tokenizer.decode(answer)}\n")


if __name__ == "__main__":
    main()
