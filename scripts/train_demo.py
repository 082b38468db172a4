"""Train the embedded model, measure it, and write its folder with a card: `python scripts/train_demo.py --out DIR`.

A small Llama learns from short texts (`demo_corpus.py`), half of them sequences that repeat: that is what makes
previous-token and induction heads grow. The same script, Python, torch and thread count give the same weights.
The atlas in the folder is of other weights then: `python scripts/demo_atlas.py` scans the new ones.

Shapes: B text, T token, L layer, H head, Q query, K key.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import demo_card
import torch
import transformers
from demo_card import BEGIN_ID, FIRST_ORDINARY_ID
from demo_corpus import Corpus, read_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
END_ID = 1
VOCABULARY = 2000
POSITIONS = 512
SHORT, LONG = (32, 128), (8, 512)  # texts x tokens: the same work a step
IGNORED = -100  # transformers' own mark for a token without a loss
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """What a run is made of; the card prints it."""

    steps: int = 2200
    seed: int = 0
    threads: int = 2
    learning_rate: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.1


def train_tokenizer(corpus: Corpus) -> PreTrainedTokenizerFast:
    """Byte-level BPE in the way of GPT-2, with a begin token put before every text, as Llama does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END, UNKNOWN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus.train, *corpus.made], trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1", special_tokens=[(BEGIN, BEGIN_ID)]
            ),
        ]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def new_model(seed: int) -> LlamaForCausalLM:
    """A Llama with two query heads to each kv head, untrained."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=POSITIONS,
        bos_token_id=BEGIN_ID,
        eos_token_id=END_ID,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


class Texts:
    """Token ids of the training text, and batches drawn from them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, documents: list[str], seed: int) -> None:
        ids: list[int] = []
        starts: list[int] = []
        for document in documents:
            starts.append(len(ids))
            ids += [*tokenizer.backend_tokenizer.encode(document, add_special_tokens=False).ids, END_ID]
        self.ids_T = torch.tensor(ids)
        self.starts = starts
        self.rng = random.Random(seed)

    def passage(self, length: int) -> torch.Tensor:
        """Consecutive tokens; half of the passages begin where a document does, as a person's text would."""
        latest = len(self.ids_T) - length
        start = self.rng.choice(self.starts) if self.rng.random() < 0.5 else self.rng.randint(0, latest)
        start = min(start, latest)
        return self.ids_T[start : start + length]

    def noise(self, length: int) -> torch.Tensor:
        return torch.tensor([self.rng.randrange(FIRST_ORDINARY_ID, VOCABULARY) for _ in range(length)])

    def batch(self, texts: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels: a half of plain passages, a quarter of repeated passages, a quarter of repeated noise."""
        rows = [self._row(index * 4 // texts, tokens) for index in range(texts)]
        return torch.stack([ids for ids, _ in rows]), torch.stack([labels for _, labels in rows])

    def _row(self, kind: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        room = tokens - 1
        if kind < 2:
            body_T = self.passage(room)
            silent = 0
        else:
            period = self.rng.randint(8, room // 2)
            part_T = self.passage(period) if kind == 2 else self.noise(period)
            body_T = part_T.repeat(room // period + 1)[:room]
            # Noise that was not seen yet can't be foretold: its loss would only shake the weights.
            silent = 0 if kind == 2 else period
        ids_T = torch.cat([torch.tensor([BEGIN_ID]), body_T])
        labels_T = ids_T.clone()
        labels_T[: 1 + silent] = IGNORED
        return ids_T, labels_T


def rate_at(step: int, recipe: Recipe) -> float:
    """Learning rate: linear warmup, then a cosine down to a twentieth."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def optimizer_for(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))


def train(model: LlamaForCausalLM, texts: Texts, recipe: Recipe) -> list[dict[str, float]]:
    """Train in place; return the log, a row each sixteenth of the way."""
    optimizer = optimizer_for(model, recipe)
    log: list[dict[str, float]] = []
    recent: list[float] = []
    began = time.monotonic()
    model.train()
    for step in range(recipe.steps):
        # Long texts come in the later half, every other step: positions up to 512, without slowing the start.
        late = step >= recipe.steps // 2 and step % 2 == 0
        ids_BT, labels_BT = texts.batch(*(LONG if late else SHORT))
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, recipe)
        loss = model(input_ids=ids_BT, labels=labels_BT, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
        if (step + 1) % max(1, recipe.steps // 16) == 0 or step + 1 == recipe.steps:
            heads = demo_card.probe_heads(model, demo_card.noise_twice(VOCABULARY))
            best = demo_card.best_scores(heads)
            log.append({"step": step + 1, "loss": sum(recent) / len(recent), **best})
            recent.clear()
            print(f"{time.monotonic() - began:6.0f} s {json.dumps(log[-1])}", file=sys.stderr, flush=True)
    return log


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The weights as they ship, float16, but computed with in float32: what the card measures."""
    return model.half().float().eval()


def shape_of(config: LlamaConfig) -> dict[str, int]:
    return {
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "width": config.hidden_size,
        "mlp": config.intermediate_size,
        "positions": config.max_position_embeddings,
        "vocabulary": config.vocab_size,
    }


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(folder: Path, recipe: Recipe) -> dict[str, Any]:
    """Make the whole folder; return what was measured (also written there as training.json)."""
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    corpus = read_corpus(recipe.seed)
    tokenizer = train_tokenizer(corpus)
    texts = Texts(tokenizer, [*corpus.train, *corpus.made], recipe.seed)
    model = new_model(recipe.seed)
    log = train(model, texts, recipe)
    model = rounded(model)
    held_out = Texts(tokenizer, corpus.held_out, recipe.seed)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # The found text alone: what is held out has no made sentences, so theirs would make the unigram model worse.
    found_T = texts.ids_T[: texts.starts[len(corpus.train)]]
    losses = demo_card.held_out_losses(model, held_out.ids_T, found_T)
    heads = demo_card.measured_heads(model, held_out.ids_T)
    model.half().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
    facts = {
        "recipe": asdict(recipe),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": shape_of(model.config),
        "parameters": sum(p.numel() for p in model.parameters()),
        "corpus_sha256": corpus.sha256,
        "corpus_characters": {name: sum(map(len, getattr(corpus, name))) for name in ("train", "held_out", "made")},
        "train_tokens": len(texts.ids_T),
        "weights_sha256": sha256_of(folder / "model.safetensors"),
        **losses,
        "log": log,
        "heads": heads,
    }
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(demo_card.card(facts), encoding="utf-8")
    (folder / "LICENSE").write_text(demo_card.LICENCE, encoding="utf-8")
    return facts


def replace_folder(made: Path, out: Path) -> None:
    """Put the finished folder where the old one was; nobody sees half of it."""
    old = out.with_name(f".{out.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    made.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    default = Recipe()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "attnscope" / "demo")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--threads", type=int, default=default.threads)
    given = parser.parse_args()
    out = given.out.resolve()
    made = out.with_name(f".{out.name}.{os.getpid()}")
    made.mkdir(parents=True)
    try:
        facts = build(made, Recipe(steps=given.steps, seed=given.seed, threads=given.threads))
        replace_folder(made, out)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    print(f"{out}: held out {facts['held_out_loss']:.3f}, unigram {facts['unigram_loss']:.3f} nats", file=sys.stderr)


if __name__ == "__main__":
    main()
