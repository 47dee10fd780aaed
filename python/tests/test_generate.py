# SPDX-License-Identifier: Apache-2.0
"""The example generates, token for token, what the model says."""

import json
import os

import pytest

from case_files import REPOSITORY

MODEL = os.environ.get("OCTAVO_MODEL")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "python")
    import generate_text

    return generate_text


@pytest.mark.skipif(not MODEL, reason="the model is not there (OCTAVO_MODEL)")
def test_two_prompts_side_by_side_get_the_models_answers(example):
    wanted = json.loads((REPOSITORY / "tests" / "data" / "generate.json").read_text())["answers"]
    file = example.GgufFile(MODEL)
    tokenizer, model = example.Tokenizer(file), example.Model(file)
    prompts = [
        tokenizer.encode(example.CHAT.format(system=example.SYSTEM, user=answer["prompt"]))
        for answer in wanted
    ]
    assert prompts == [answer["prompt_tokens"] for answer in wanted]
    answers = example.generate(model, prompts, 2, max_new_tokens=48)
    assert answers == [answer["tokens"] for answer in wanted]
    assert [tokenizer.decode(answer) for answer in answers] == [a["text"] for a in wanted]


def test_pieces_of_a_text_are_gpt2s(example):
    pieces = example.Tokenizer.PIECES
    text = "I'm here:  it's  12 o'clock_now\n\n (ok)"
    assert pieces.findall(text) == [
        "I",
        "'m",
        " here",
        ":",
        " ",
        " it",
        "'s",
        "  ",
        "1",
        "2",
        " o",
        "'",
        "clock",
        "_",
        "now",
        "\n\n",
        " (",
        "ok",
        ")",
    ]
