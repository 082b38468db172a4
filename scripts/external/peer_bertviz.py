"""BertViz' views by the rows of docs/coming-from.md: the numbers that a view is given are attnscope's.

Shapes: L layer, H head, Q query, K key, T token, D width of a head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bertviz import head_view, model_view, neuron_view
from bertviz.transformers_neuron_view import GPT2Config, GPT2Model
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

import attnscope
from external.calls import TEXT, Row, Source, apart, column, notebook, run_rows
from external.common import Report, arguments
from external.models import TINY, tiny, words

WORDS, OTHER, TARGET = words(range(3, 20)), words(range(30, 47)), words(range(20, 31))
PAGE = "attnscope view TEXT -o page.html"


def main() -> None:
    """Run every row on the models that it is for and write the result."""
    asked = arguments()
    report = Report(("bertviz", "transformers", "torch"))
    views = {one.__name__: shown(one) for one in (head_view, model_view)}
    folders = {kind: tiny(kind, Path(kind).resolve()) for kind in ("gpt2", "bart", "bert")}
    attentions = notebook()
    run_rows(report, ROWS, {**attentions, "attention": attentions["attentions"], **views})
    run_rows(report, NEURONS, {"neuron_view": neuron_view, **own_model(folders["gpt2"])}, source(folders["gpt2"]))
    run_rows(report, CROSS, {**views, **two_texts(folders["bart"])}, source(folders["bart"], TARGET=TARGET))
    run_rows(report, PAIR, {**views, **two_sentences(folders["bert"])}, source(folders["bert"], PAIR=TARGET))
    report.write(asked.out)


def source(folder: Path, **more: str) -> Source:
    return Source(f"a tiny {folder.name}", folder.name, WORDS, OTHER, more)


def shown(view: Callable[..., Any]) -> Callable[..., Any]:
    """A view that returns what it shows in a notebook."""

    def called(*given: Any, **options: Any) -> Any:
        page: list[str] = []
        view.__globals__["display"] = lambda one: page.append(one.data)
        returned = view(*given, **options)
        return page_data("".join(page) if returned is None else returned.data, "const params = ")

    return called


def page_data(page: str, before: str) -> Any:
    """What the script of BertViz's page is given."""
    return json.JSONDecoder().raw_decode(page, page.index(before) + len(before))[0]


def own_model(folder: Path) -> dict[str, Any]:
    """A GPT-2 as BertViz' own classes have it: the views of neurons take no other."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sizes = {name: TINY["gpt2"][name] for name in ("n_embd", "n_layer", "n_head", "n_positions")}
    config = GPT2Config(vocab_size_or_config_json_file=theirs.config.vocab_size, n_ctx=sizes["n_positions"], **sizes)
    config.output_attentions = True
    model = GPT2Model(config)
    missing = model.load_state_dict(theirs.transformer.state_dict(), strict=False).missing_keys
    assert not [one for one in missing if not one.endswith("attn.bias")], missing
    return {
        "model": model,
        "tokenizer": AutoTokenizer.from_pretrained(folder),
        "text": WORDS,
        "seen": lambda text: attnscope.capture(attnscope.load(str(folder)), text),
    }


def two_texts(folder: Path) -> dict[str, Any]:
    """An encoder-decoder that has read a text and what it is to write."""
    loaded = attnscope.load(str(folder))
    queries = attnscope.capture(loaded, WORDS, target=TARGET).queries.ids
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    ids = loaded.tokenizer(WORDS, return_tensors="pt")["input_ids"]
    given = {"input_ids": ids, "decoder_input_ids": torch.tensor([queries])}
    result = model(**given, output_attentions=True)
    return {
        **{f"{stack}_attention": result[f"{stack}_attentions"] for stack in ("encoder", "decoder", "cross")},
        "encoder_tokens": loaded.tokenizer.convert_ids_to_tokens(given["input_ids"][0]),
        "decoder_tokens": loaded.tokenizer.convert_ids_to_tokens(queries),
        "seen": lambda text: attnscope.capture(loaded, text, target=TARGET),
    }


def two_sentences(folder: Path) -> dict[str, Any]:
    """An encoder that has read a pair, by a tokenizer that puts a token between the two."""
    pairs = AutoTokenizer.from_pretrained(folder, model_input_names=["input_ids", "token_type_ids"])
    between = TemplateProcessing(single="$A", pair="$A w01 $B:1", special_tokens=[("w01", 1)])
    pairs.backend_tokenizer.post_processor = between
    pairs.save_pretrained(folder)
    loaded = attnscope.load(str(folder))
    seen = attnscope.capture(loaded, WORDS, pair=TARGET)
    model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    given = loaded.tokenizer(WORDS, TARGET, return_tensors="pt")
    assert given["input_ids"][0].tolist() == list(seen.prompt.ids)
    return {
        "attention": model(**given, output_attentions=True).attentions,
        "tokens": loaded.tokenizer.convert_ids_to_tokens(given["input_ids"][0]),
        "sentence_b_start": len(WORDS.split()) + 1,
        "seen": lambda text: attnscope.capture(loaded, text, pair=TARGET),
    }


def layers(seen: Any, stack: str | None = None) -> Tensor:
    """(L, H, Q, K)."""
    return torch.stack([*(seen.of(stack) if stack else seen).weights.values()])


def of_view(data: Any, seen: Any) -> float:
    """Every head of a view with one part."""
    return apart(data["attention"][0]["attn"], layers(seen))


def of_one_head(data: Any, seen: Any) -> float:
    """The head that a view opens with."""
    (head,) = data["heads"]
    return apart(data["attention"][0]["attn"][data["layer"]][head], seen.weights[1][4])


def of_stacks(data: Any, seen: Any) -> float:
    """Every head of the parts Encoder, Decoder and Cross."""
    return max(apart(one["attn"], layers(seen, one["name"].lower())) for one in data["attention"])


def of_pair(data: Any, records: Any) -> float:
    """What the rows of the first sentence give to the second, the mean of each head."""
    (part,) = (one for one in data["attention"] if one["name"] == "Sentence A -> Sentence B")
    mass_LH = torch.tensor(part["attn"])[:, :, :-1].sum(-1).mean(-1)  # without the row of the token between
    return apart(mass_LH.flatten(), column(records, "mass"))


def of_neurons(page: Any, records: Any) -> float:
    """The queries, the keys and the weights of a head."""
    theirs = page_data(page.data, "window.bertviz_params = ")["attention"]["all"]
    ours = {one["name"]: one["values"] for record in records for one in record.get("numbers") or ()}
    result = [theirs[name][1][4] for name in ("queries", "keys", "attn")]
    named = ("q of head 4", "k of kv head 4", "weight")
    return max(apart(one, ours[name]) for one, name in zip(result, named, strict=True))


ROWS = (
    Row("head_view(attention, tokens)", PAGE, of_view),
    Row("head_view(attention, tokens, layer=1, heads=[4])", PAGE, of_one_head),
    Row("model_view(attention, tokens)", PAGE, of_view),
    Row(
        'head_view(attention, tokens, html_action="return")',
        'seen.page().save("page.html")',
        lambda data, page: of_view(data, attnscope.capture(attnscope.load("demo"), TEXT)) if page.exists() else 1.0,
    ),
)
NEURONS = (
    Row(
        'neuron_view.show(model, "gpt2", tokenizer, text, html_action="return")',
        "attnscope explain TEXT --head L1H4 --format jsonl",
        of_neurons,
        1e-5,
    ),
)
CROSS = (
    Row(
        "head_view(encoder_attention=encoder_attention, decoder_attention=decoder_attention, "
        "cross_attention=cross_attention, encoder_tokens=encoder_tokens, decoder_tokens=decoder_tokens)",
        "attnscope view TEXT --target TARGET -o page.html",
        of_stacks,
    ),
)
PAIR = (
    Row(
        "head_view(attention, tokens, sentence_b_start=sentence_b_start)",
        "attnscope heads TEXT --pair PAIR --query text --key pair",
        of_pair,
    ),
)


if __name__ == "__main__":
    main()
