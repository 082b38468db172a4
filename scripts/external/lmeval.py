"""lm-evaluation-harness scores a model alone and while attnscope listens: scores must be equal to the last digit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnscope.hooks.calls import CallSite
from attnscope.hooks.engines import ENGINES, Engine
from attnscope.hooks.listen import listening
from external.common import Check, Report, arguments
from external.models import demo_folder, tiny, words

ROUNDING = 1e-4  # nats of one answer, where attnscope computes the attention itself
SENTENCES = (
    "The small bird sits on the old boat and sings a song",
    "When Mary and John went to the store John gave a drink to Mary",
    "The financial bank is located on the bank of the river",
    "One wheel has lost a tooth so count the teeth of every wheel again",
    "A green bird sings on the hill and a green bird sings",
    "The boat lies by the river until the night is over",
    "He saw the clock and she saw the boat on the water",
    "The dog ran to the house and the cat ran to the tree",
    "They bought bread",
    "Every day the children go down to the river and look for stones that the water has made round and smooth",
)
Model = tuple[Any, Any]  # a model and its tokenizer


@dataclass
class Heard:
    """What was heard while the harness ran: calls of attention, and forward passes of the model."""

    calls: int = 0
    passes: int = 0
    entropies: list[float] = field(default_factory=list)


def main() -> None:
    """Run every task with every model, alone and heard, and write the result."""
    asked = arguments()
    report = Report(("lm-eval", "transformers", "torch", "datasets"))
    folders = {"demo": demo_folder(), "gpt2": tiny("gpt2", Path("gpt2").resolve())}
    write_tasks("demo", list(SENTENCES))
    write_tasks("gpt2", [words(torch.randint(3, 60, (7 + place,)).tolist()) for place in range(10)])
    for attention in ("eager", "sdpa"):
        with (
            report.check(f"{attention}: scores and answers, to the last digit") as check,
            report.check(f"{attention}: every layer of every forward pass was heard, with a finite entropy") as whole,
        ):
            for name, folder in folders.items():
                model = load(folder, attention)
                alone, heard = evaluated(name, model, nullcontext()), Heard()
                compare(check, name, alone, evaluated(name, model, heard_by(model, heard)))
                layers = model[0].config.num_hidden_layers
                said = f"{name}: {heard.calls} calls of {heard.passes} passes through {layers} layers"
                whole.hold(heard.passes > 0 and heard.calls == layers * heard.passes, said)
                whole.hold(all(0 <= one < 10 for one in heard.entropies), f"{name}: an entropy")
                compare(check, name, alone, evaluated(name, model, nullcontext()))  # and after it
    with report.check(f"attnscope's tiles in the place of sdpa: scores and answers, to {ROUNDING:g} nats") as check:
        for name, folder in folders.items():
            model = load(folder, "sdpa")
            found = evaluated(name, model, heard_by(model, Heard(), ENGINES["tiles"]))
            compare(check, name, evaluated(name, model, nullcontext()), found, ROUNDING)
    with report.control("one head of one layer is switched off while attnscope listens") as control:
        for name, folder in folders.items():
            model = load(folder, "eager")
            found = evaluated(name, model, heard_by(model, Heard(), replace(ENGINES["eager"], change=without_a_head)))
            compare(control, name, evaluated(name, model, nullcontext()), found)
    with report.control("one head's output times 1.000001, compared to the last digit") as control:
        for name, folder in folders.items():
            model = load(folder, "eager")
            found = evaluated(name, model, heard_by(model, Heard(), replace(ENGINES["eager"], change=larger)))
            compare(control, name, evaluated(name, model, nullcontext()), found)
    report.write(asked.out)


def without_a_head(place: CallSite, output_BQHV: torch.Tensor) -> torch.Tensor:
    return times(place, output_BQHV, 0.0)


def larger(place: CallSite, output_BQHV: torch.Tensor) -> torch.Tensor:
    return times(place, output_BQHV, 1.000001)


def times(place: CallSite, output_BQHV: torch.Tensor, factor: float) -> torch.Tensor:
    """The output of head 2 of layer 1 times a factor."""
    changed = output_BQHV.clone()
    if place.layer == 1:
        changed[:, :, 2] *= factor
    return changed


def load(folder: Path, attention: str) -> Model:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    return model.eval(), tokenizer


@contextmanager
def heard_by(model: Model, heard: Heard, engine: Engine = ENGINES["eager"]) -> Iterator[None]:
    """While open, attnscope hears every attention call of the model, and its forward passes are counted."""

    def on_call(call: Any) -> None:
        heard.calls += 1
        heard.entropies.append(float(call.P.entropy().mean()))

    def on_pass(*_: Any) -> None:
        heard.passes += 1

    handle = model[0].register_forward_pre_hook(on_pass)
    try:
        with listening(model[0], on_call, engine=engine):
            yield
    finally:
        handle.remove()


def write_tasks(name: str, sentences: list[str]) -> None:
    """Three tasks of the harness on some sentences, as files: NAME_choice, NAME_text, NAME_generation."""
    folder = Path("tasks")
    folder.mkdir(exist_ok=True)
    documents = [document(place, sentences) for place in range(len(sentences))]
    rows = folder / f"{name}.jsonl"
    rows.write_text("".join(json.dumps(one) + "\n" for one in documents))
    of_all = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(rows.resolve())}},
        "test_split": "test",
    }
    kinds: Mapping[str, dict[str, Any]] = {
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{start}}",
            "doc_to_choice": "{{ends}}",
            "doc_to_target": "{{right}}",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "text": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": one} for one in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
        "generation": {
            "output_type": "generate_until",
            "doc_to_text": "{{start}}",
            "doc_to_target": "{{ends[right]}}",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for kind, asked in kinds.items():
        (folder / f"{name}_{kind}.yaml").write_text(yaml.safe_dump({"task": f"{name}_{kind}", **of_all, **asked}))


def document(place: int, sentences: list[str]) -> dict[str, Any]:
    """A sentence, its start, and four ends, of which one is its own."""
    ends = [" " + " ".join(sentences[(place + step) % len(sentences)].split()[-2:]) for step in range(4)]
    return {
        "text": sentences[place],
        "start": " ".join(sentences[place].split()[:-2]) or sentences[place],
        "ends": ends[place % 4 :] + ends[: place % 4],
        "right": (4 - place % 4) % 4,
    }


def evaluated(name: str, model: Model, meanwhile: AbstractContextManager[None]) -> Any:
    """What the harness says of a model's tasks."""
    tasks = [f"{name}_{kind}" for kind in ("choice", "text", "generation")]
    harness = HFLM(pretrained=model[0], tokenizer=model[1], batch_size=4, device="cpu")
    with meanwhile:
        return simple_evaluate(
            harness,
            tasks=tasks,
            task_manager=TaskManager(include_path="tasks", include_defaults=False),
            bootstrap_iters=100,
        )


def compare(check: Check, name: str, alone: Any, heard: Any, allowed: float = 0.0) -> None:
    """Every score and every answer."""
    for task, scores in alone["results"].items():
        for metric, score in scores.items():
            found = heard["results"][task][metric]
            check.hold(equal(found, score, allowed), f"{task} {metric}: {found!r}, expected {score!r}")
    for task, samples in alone["samples"].items():
        for one, other in zip(heard["samples"][task], samples, strict=True):
            check.hold(equal(one["resps"], other["resps"], allowed), f"{task} {one['doc_id']}: {one['resps']!r}")


def equal(found: Any, expected: Any, allowed: float) -> bool:
    """Equal, but that numbers may differ by so much (relative to those above 1)."""
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected, [allowed] * len(found)))
    if isinstance(expected, float) and allowed:
        return abs(found - expected) <= allowed * max(1, abs(expected))
    return bool(found == expected)


if __name__ == "__main__":
    main()
