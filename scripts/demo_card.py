"""Measurements on the embedded model, and the card that prints them.

Shapes: B text, T token, L layer, H head, Q query, K key, V vocabulary.
"""

import itertools
from typing import Any

import torch
from transformers import LlamaForCausalLM

PROBE_TEXTS, PROBE_PERIOD = 16, 50
WINDOW = 512
POSITION_BOUNDS = (1, 64, 128, 256, 384, 512)
BEGIN_ID, FIRST_ORDINARY_ID = 0, 3
SCORES = ("induction_probe", "induction_text", "previous_token", "duplicate_token", "self", "sink")
NOTABLE = {
    "induction": ("induction_probe", 0.5),
    "previous token": ("previous_token", 0.5),
    "duplicate token": ("duplicate_token", 0.3),
    "own token": ("self", 0.3),
    "sink": ("sink", 0.3),
}

LICENCE = """The weights, the tokenizer and the configuration in this folder are part of attnscope.

Licensed under the Apache License, Version 2.0 (the "License"); you may not use these files except in compliance
with the License. You may obtain a copy of the License at

    http://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on
an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the
specific language governing permissions and limitations under the License.

The model learned from docstrings, comments and language topics of the Python standard library, Copyright (c) 2001
Python Software Foundation; All Rights Reserved, used under the PSF License Version 2
(https://docs.python.org/3/license.html). None of that text is in this folder, but for words of the vocabulary.
"""


def noise_twice(vocabulary: int) -> torch.Tensor:
    """Begin token, 50 distinct random tokens, the same again: 16 texts x 101 tokens."""
    generator = torch.Generator().manual_seed(1234)
    ordinary = vocabulary - FIRST_ORDINARY_ID
    once = [torch.randperm(ordinary, generator=generator)[:PROBE_PERIOD] for _ in range(PROBE_TEXTS)]
    return _shown_twice(FIRST_ORDINARY_ID + torch.stack(once))


def text_twice(held_T: torch.Tensor) -> torch.Tensor:
    """Begin token, 50 tokens of held-out text, the same again: 16 texts x 101 tokens, spread over the text."""
    starts = [index * (len(held_T) - PROBE_PERIOD) // PROBE_TEXTS for index in range(PROBE_TEXTS)]
    return _shown_twice(torch.stack([held_T[start : start + PROBE_PERIOD] for start in starts]))


def measured_heads(model: LlamaForCausalLM, held_T: torch.Tensor) -> list[dict[str, float]]:
    """Every head on noise, with its kv head and its induction score on text beside it."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    on_noise = probe_heads(model, noise_twice(model.config.vocab_size))
    on_text = probe_heads(model, text_twice(held_T))
    return [
        {**noise, "kv_head": noise["head"] // group, "induction_text": text["induction_probe"]}
        for noise, text in zip(on_noise, on_text, strict=True)
    ]


def _shown_twice(once_BT: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full((len(once_BT), 1), BEGIN_ID), once_BT, once_BT], dim=1)


@torch.no_grad()
def probe_heads(model: LlamaForCausalLM, ids_BT: torch.Tensor) -> list[dict[str, float]]:
    """What every head does on texts made by `noise_twice` or `text_twice`: one row per head, scores 0 to 1.

    `induction_probe` is the mean weight on the token after the earlier copy, `duplicate_token` on the earlier copy,
    both over the second showing; `previous_token` and `self` over all rows that see two keys or more, `sink` over all.
    Source: Olsson et al. 2022; Wang et al. 2022; Clark et al. 2019.
    """
    was_training, implementation = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    attentions = model(ids_BT, output_attentions=True, use_cache=False).attentions
    model.set_attn_implementation(implementation)
    model.train(was_training)
    return [
        {"layer": layer, "head": head, **_scores(attn_BHQK[:, head])}
        for layer, attn_BHQK in enumerate(attentions)
        for head in range(attn_BHQK.shape[1])
    ]


def _scores(attn_BQK: torch.Tensor) -> dict[str, float]:
    second_Q = torch.arange(1 + PROBE_PERIOD, attn_BQK.shape[1])
    rows_Q = torch.arange(1, attn_BQK.shape[1])
    picked = {
        "induction_probe": attn_BQK[:, second_Q, second_Q - PROBE_PERIOD + 1],
        "duplicate_token": attn_BQK[:, second_Q, second_Q - PROBE_PERIOD],
        "previous_token": attn_BQK[:, rows_Q, rows_Q - 1],
        "self": attn_BQK[:, rows_Q, rows_Q],
        "sink": attn_BQK[..., 0],
    }
    return {name: round(weights.mean().item(), 4) for name, weights in picked.items()}


def best_scores(heads: list[dict[str, float]]) -> dict[str, float]:
    """The largest induction, previous-token and duplicate-token score over all heads: for the training log."""
    return {name: max(row[name] for row in heads) for name in ("induction_probe", "previous_token", "duplicate_token")}


@torch.no_grad()
def held_out_losses(model: LlamaForCausalLM, held_T: torch.Tensor, train_T: torch.Tensor) -> dict[str, Any]:
    """Nats per token on text never trained on: the model's, and that of token frequencies alone, on the same tokens.

    The text is cut into windows of 511 tokens, each behind a begin token that is not counted.
    """
    body_BT = held_T[: len(held_T) // (WINDOW - 1) * (WINDOW - 1)].view(-1, WINDOW - 1)
    ids_BT = torch.cat([torch.full((len(body_BT), 1), BEGIN_ID), body_BT], dim=1)
    loss_BT = torch.cat([_token_losses(model, part_BT) for part_BT in ids_BT.split(8)])
    # One added to every count: a token that the training text lacks must not cost infinity.
    counts_V = torch.bincount(train_T, minlength=model.config.vocab_size).double() + 1
    unigram = -(counts_V / counts_V.sum()).log()[body_BT.flatten()].mean().item()
    loss = loss_BT.double().mean().item()
    spans = list(itertools.pairwise(POSITION_BOUNDS))
    return {
        "held_out_tokens": body_BT.numel(),
        "held_out_loss": round(loss, 4),
        "unigram_loss": round(unigram, 4),
        "held_out_gain": round(unigram - loss, 4),
        "loss_by_position": {f"{a}-{b - 1}": round(loss_BT[:, a - 1 : b - 1].mean().item(), 3) for a, b in spans},
    }


def _token_losses(model: LlamaForCausalLM, ids_BT: torch.Tensor) -> torch.Tensor:
    logits_BVT = model(ids_BT, use_cache=False).logits[:, :-1].transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits_BVT, ids_BT[:, 1:], reduction="none")


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; floats with three digits."""
    cells = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def name_of(row: dict[str, Any]) -> str:
    return f"L{row['layer']}H{row['head']}"


def notable_heads(heads: list[dict[str, Any]]) -> list[list[Any]]:
    """For each known kind, the heads whose score is above the kind's bar, best first."""
    found = []
    for kind, (score, bar) in NOTABLE.items():
        ranked = sorted((row for row in heads if row[score] >= bar), key=lambda row: -row[score])
        names = ", ".join(f"{name_of(row)} ({row[score]:.2f})" for row in ranked)
        found.append([kind, f"`{score}` >= {bar}", names or "none"])
    return found


def card(facts: dict[str, Any]) -> str:
    """The card, in Markdown: every number in it is from `facts`."""
    return _made_of(facts) + _trained(facts) + _measured(facts)


def _made_of(facts: dict[str, Any]) -> str:
    characters, model = facts["corpus_characters"], facts["model"]
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# demo: the model that comes with attnscope

A demonstration, not a language model. It is just large enough for attention heads known from the literature to grow in
it, so that `attnscope` has something true to show without a network. What it writes is not worth reading; what its
heads do is. Written by `scripts/train_demo.py`, every number measured on the weights as they ship.

## Architecture

`LlamaForCausalLM`: {model["layers"]} layers, {model["heads"]} heads, {model["kv_heads"]} kv heads (grouped-query),
head_dim {model["head_dim"]}, width {model["width"]}, MLP {model["mlp"]}, rotary positions up to {model["positions"]},
tied embeddings, {facts["parameters"]:,} parameters, float16. Byte-level BPE tokenizer of {model["vocabulary"]:,}
tokens, `<s>` before every text. The chat template is there to be tried; the model was not trained on chats.

## Data

Docstrings, comment blocks and `pydoc_data` topics of Python {facts["python"]}'s own standard library
({characters["train"]:,} characters), and {characters["made"]:,} characters of plain sentences from a small grammar in
the script: {facts["train_tokens"]:,} tokens. One document in sixteen ({characters["held_out"]:,} characters) is held
out; no paragraph occurs twice, and none held out shares eight words in a row with the training text. Half of the
training sequences repeat: a quarter random tokens, a quarter passages of the text.

Corpus sha256: `{facts["corpus_sha256"]}`
Weights sha256: `{facts["weights_sha256"]}`

"""


def _trained(facts: dict[str, Any]) -> str:
    recipe = facts["recipe"]
    steps = [[row["step"], row["loss"], row["induction_probe"], row["previous_token"]] for row in facts["log"]]
    return f"""## Training

Python {facts["python"]}, torch {facts["torch"]}, transformers {facts["transformers"]}, CPU, {recipe["threads"]}
threads, seed {recipe["seed"]}, float32, AdamW, learning rate {recipe["learning_rate"]} after {recipe["warmup"]} steps
of warmup and down a cosine, weight decay {recipe["weight_decay"]}; {recipe["steps"]} steps of 32 x 128 tokens, in the
later half every other step 8 x 512. The loss is over all texts of the steps since the row above, repeating ones too.

{table(["step", "loss", "induction (best head)", "previous token (best head)"], steps)}

## Held-out loss

{
        table(
            ["on held-out text of the standard library", "nats per token"],
            [
                ["this model", facts["held_out_loss"]],
                ["unigram (token frequencies of the standard-library training text)", facts["unigram_loss"]],
                ["better by", facts["held_out_gain"]],
            ],
        )
    }

{facts["held_out_tokens"]:,} tokens, in windows of 512. By position in the window:

{table(list(facts["loss_by_position"]), [list(facts["loss_by_position"].values())])}

"""


def _measured(facts: dict[str, Any]) -> str:
    heads = [[name_of(row), row["kv_head"], *(row[score] for score in SCORES)] for row in facts["heads"]]
    return f"""## What the heads do

Measured on 16 sequences of a begin token and 50 distinct random tokens shown twice; `induction_text` is the same
score on 50 tokens of held-out text shown twice.

{table(["kind", "condition", "heads"], notable_heads(facts["heads"]))}

{table(["head", "kv head", *SCORES], heads)}

## Licence

Weights, tokenizer and configuration: Apache-2.0 (`LICENSE`). The found text is of the Python standard library,
Copyright (c) 2001 Python Software Foundation, under the PSF License Version 2; the made sentences are of this project.
"""
