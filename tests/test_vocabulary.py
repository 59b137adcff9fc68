"""Tokens that are learnt from the text the main job trains on."""

import builtins
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common.errors import caught
from common.jobs import TINY

from zero_nb.apps.checkpoints import read_checkpoint
from zero_nb.apps.config import TrainConfig
from zero_nb.apps.gpt import GPT, generate
from zero_nb.apps.loop import train_rank
from zero_nb.apps.resume import configured
from zero_nb.apps.sides import _mean
from zero_nb.apps.text import (
    PLAIN_BYTES,
    BytePairs,
    learn_pairs,
    rank_windows,
    read_corpus,
    windows,
)
from zero_nb.comm.groups import Group
from zero_nb.comm.launch import run

PAIRS = {**TINY, "vocabulary": 400, "horizon": 6, "rounds": 0}


@pytest.fixture(scope="module")
def corpus():
    read = read_corpus()
    return replace(read, vocabulary=BytePairs(learn_pairs(read.train, 400)))


def test_every_text_comes_back_from_its_tokens(corpus):
    pairs = corpus.vocabulary
    assert pairs.size == 400 and BytePairs(pairs.text).tokens == pairs.tokens
    for text in (b"", b"\tdef f(self):\n\t\treturn 1\n", "größer\0→".encode(), bytes(range(128))):
        tokens = pairs.encode(text)
        assert pairs.decode(tokens) == text
        assert pairs.nbytes(torch.tensor(tokens, dtype=torch.long)).sum() == len(text)
    part = corpus.held_out[:20_000].numpy().tobytes()
    assert len(pairs.encode(part)) < 0.7 * len(part)


def test_windows_begin_at_lines_and_are_a_function_of_their_key(corpus):
    pairs = corpus.vocabulary
    text = corpus.held_out
    lines = {*text.numpy().tobytes().split(b"\n")}
    drawn = windows(text, 6, 40, "train", 0, 3, vocabulary=pairs)
    assert drawn.shape == (6, 41) and drawn.max() < 400
    assert drawn.equal(windows(text, 6, 40, "train", 0, 3, vocabulary=pairs))
    assert not drawn.equal(windows(text, 6, 40, "train", 0, 4, vocabulary=pairs))
    for row in drawn.tolist():
        first, *_ = pairs.decode(row).split(b"\n")
        assert any(line.startswith(first) for line in lines)
    group = lambda rank: SimpleNamespace(group_rank=rank, global_rank=rank, size=3)
    shares = [
        rank_windows(text, 0, 6, 40, group(r), "train", 0, 3, vocabulary=pairs) for r in range(3)
    ]
    assert torch.cat(shares).equal(drawn)


def test_windows_of_a_text_that_is_mostly_one_token_are_long_enough():
    text = torch.frombuffer(bytearray(b"=" * 1500 + b"\nab"), dtype=torch.uint8)
    pairs = BytePairs(learn_pairs(text, 300))
    for step in range(5):
        assert windows(text, 2, 50, step, vocabulary=pairs).shape == (2, 51)


def test_a_loss_per_byte_does_not_depend_on_the_tokens_or_on_who_has_them(corpus):
    """A model that gives each token the chance of its bytes costs the same in any vocabulary."""

    def share(vocabulary, uneven):
        group = Group()
        batch = rank_windows(corpus.train, 0, 12, 64, group, 0, vocabulary=vocabulary)
        nats = vocabulary.nbytes(batch[:, 1:]) * math.log(256) + uneven * (batch[:, 1:] % 7)
        return _mean(nats.double().mean(), group, vocabulary.bytes_per_token(batch))

    for vocabulary in (PLAIN_BYTES, corpus.vocabulary):
        assert run(2, share, vocabulary, 0)[0] == pytest.approx(math.log(256))
        two, three = (run(n, share, vocabulary, 1)[0] for n in (2, 3))
        assert two == pytest.approx(three, rel=1e-12) and two > 1.1 * math.log(256)


def test_a_prompt_may_end_within_a_token(corpus):
    pairs = corpus.vocabulary
    model = GPT(1, 16, 2, vocabulary=400)
    prompts = ["import ", "class Po", "\tfor "]
    texts = generate(model, prompts, 50, 16, seed=1, vocabulary=pairs)
    assert texts == generate(model, prompts, 50, 16, seed=1, vocabulary=pairs)
    for text, prompt in zip(texts, prompts, strict=True):
        assert text.startswith(prompt.replace("\t", "    "))
        assert len(text.encode()) >= len(prompt) + 50
    space = pairs.encode(b" ")[-1]
    assert len(pairs.beginning_with(space)) > 10


@pytest.mark.turns(2)
@pytest.mark.parametrize("checkpoint", ["full", "sharded"])
def test_resumed_equals_uninterrupted(checkpoint, tmp_path):
    chosen = {**PAIRS, "checkpoint": checkpoint}
    whole = run(2, train_rank, configured({**chosen, "out": str(tmp_path / "whole")}))
    run(2, train_rank, configured({**chosen, "steps": 3, "out": str(tmp_path / "broken")}))
    resumed = configured({"resume": True, "steps": 6, "out": str(tmp_path / "broken")})
    again = run(2, train_rank, resumed)
    ours, plain = again[0].losses["zero_nb"], again[0].losses["plain DDP"]
    assert ours == whole[0].losses["zero_nb"] and again[0].samples == whole[0].samples
    # which goes on from our parameters, and these are DDP's but for rounding
    assert plain == pytest.approx(whole[0].losses["plain DDP"], abs=1e-6)
    assert again[0].held_out["zero_nb"][6] < math.log(400)  # in nats per byte
    texts = [read_checkpoint(str(tmp_path / n))["vocabulary"] for n in ("whole", "broken")]
    assert texts[0] == texts[1] and BytePairs(texts[0]).size == 400


def test_tokens_of_a_checkpoint_are_not_trusted(tmp_path):
    run(1, train_rank, configured({**PAIRS, "steps": 1, "compare": False, "out": str(tmp_path)}))
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    small = json.loads(state["vocabulary"])
    small["model"] |= {"vocab": {"a": 0}, "merges": []}
    many = learn_pairs(read_corpus().train, 500)
    for vocabulary, words in (
        ("", "it is no vocabulary"),
        ("{}", "it is no vocabulary"),
        (json.dumps(small), "it has no token for some bytes"),
        (many, "vocabulary must have from 256 to 400 tokens, got 500"),
    ):
        torch.save({**state, "vocabulary": vocabulary}, path)
        with pytest.raises(ValueError, match=words):
            configured({"resume": True, "out": str(tmp_path)})


def test_without_the_package_all_ranks_say_what_to_do(tmp_path, monkeypatch):
    real = builtins.__import__

    def none_of_it(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    config = TrainConfig(**PAIRS, out=str(tmp_path))
    monkeypatch.setattr(builtins, "__import__", none_of_it)
    for said in run(2, lambda: caught(lambda: train_rank(config))):
        assert said.startswith("ImportError") and "or train on bytes with --vocabulary 256" in said
    run(2, train_rank, replace(config, vocabulary=256, steps=1))


@pytest.mark.parametrize("wrong", [255, 0, -1])
def test_a_vocabulary_has_every_byte(wrong):
    with pytest.raises(ValueError, match="--vocabulary must be at least 256, got"):
        TrainConfig(vocabulary=wrong)
