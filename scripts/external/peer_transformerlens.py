"""TransformerLens' calls by the rows of docs/coming-from.md, and its bridge on tiny models of every type.

Shapes: L layer, H head, Q query, K key, T token, D width of a head, E model width, V token of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformer_lens
from torch import Tensor
from transformer_lens import patching
from transformer_lens.head_detector import detect_head
from transformer_lens.model_bridge import TransformerBridge

import attnscope
from external.calls import OTHER, TEXT, Row, Source, apart, column, printed, run_rows
from external.common import Report, arguments
from external.model_types import Given, Known, run_types
from external.models import demo_folder, tiny, words

CLEAN, CORRUPTED, ANSWER, FOIL = "the bank of the river, the", "the bank of the field, the", " bank", " boat"
BOTH = {"A": ANSWER, "B": FOIL}
PAIR = Source("a pair of texts", "demo", CLEAN, CORRUPTED, {**BOTH, "TEXT2": CORRUPTED})
LAYER, HEAD, KEY = 1, 4, 3
TOKENS = 19
NATS = 1e-5
APART = 1e-4  # of logit differences, after a patch
NORMS = 1e-5  # of the largest
PLAIN = ("llama", "gpt2", "qwen3", "mistral", "gpt_oss", "lfm2")
AFTER = {  # what stands between the projection and the residual, or before the projection
    "gemma2": "a norm after the projection",
    "gemma3_text": "a norm after the projection",
    "olmo2": "a norm after the projection",
    "qwen3_next": "a gate before the projection",
}
KNOWN = Known(refused=dict.fromkeys(("deepseek_v32", "modernbert"), "ValueError"))


def main() -> None:
    """Run every row on the demo and every type, and write the result."""
    asked = arguments()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    report = Report(("transformer-lens", "transformers", "torch"))
    names = of_text()
    run_rows(report, rows(names), names, Source("the demo", "demo", TEXT, OTHER, BOTH))
    with report.check("`HookedTransformer` is an ImportError, as the page says") as check:
        check.hold(not can_import("HookedTransformer"), "it can be imported")
    with report.control("`TransformerBridge` is an ImportError") as control:
        control.hold(not can_import("TransformerBridge"))
    pair = of_pair()
    run_rows(report, patches(pair), pair, PAIR)
    norms(report)
    run_types(report, read, KNOWN)
    report.write(asked.out)


def can_import(name: str) -> bool:
    try:
        return hasattr(transformer_lens, name)
    except ImportError:
        return False


def bridge(folder: Path | str) -> Any:
    return TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32)


# the rows


def of_text() -> dict[str, Any]:
    """The names of a notebook in which the demo has read a text."""
    model, ours = bridge(demo_folder()), attnscope.load("demo")
    a, b = (ours.tokenizer(one, add_special_tokens=False)["input_ids"][0] for one in (ANSWER, FOIL))
    ids = model.to_tokens(TEXT)

    def cut(scores_BHQK: Tensor, hook: Any) -> Tensor:
        scores_BHQK[:, HEAD, -1, KEY] = -torch.inf
        return scores_BHQK

    def zero(z_BTHD: Tensor, hook: Any) -> Tensor:
        z_BTHD[:, :, HEAD] = 0
        return z_BTHD

    Path("corpus.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in (TEXT, OTHER)))
    return {
        "TransformerBridge": TransformerBridge,
        "attnscope": attnscope,
        "torch": torch,
        "detect_head": detect_head,
        "folder": str(demo_folder()),
        "model": model,
        "text": TEXT,
        "ids": ids,
        "texts": model.to_tokens([TEXT, OTHER]),
        "cache": model.run_with_cache(ids)[1],
        "cut": cut,
        "zero": zero,
        "a": a,
        "b": b,
        "seen": lambda text: attnscope.capture(ours, text),
    }


def rows(names: dict[str, Any]) -> tuple[Row, ...]:
    model, ids = names["model"], names["ids"]
    intact_V = model(ids)[0, -1].log_softmax(-1)
    intact_BT = model(names["texts"], return_type="loss", loss_per_token=True)

    def of_cut(logits_BTV: Tensor, records: Sequence[Any]) -> float:
        """What the model's own next token loses, in nats."""
        made = intact_V.argmax()
        lost = intact_V[made] - logits_BTV[0, -1].log_softmax(-1)[made]
        return apart(lost, next(one["effect"] for one in records if one["set"] == "L1H4"))

    def of_ablation(loss_BT: Tensor, records: Sequence[Any]) -> float:
        """What a token costs without the head, in nats."""
        return apart((loss_BT - intact_BT).mean(), records[0]["effect"])

    return (
        Row(
            "TransformerBridge.boot_transformers(folder)",
            "attnscope.load(folder)",
            lambda theirs, ours: abs(theirs.cfg.n_layers * theirs.cfg.n_heads - heads_of(ours)),
        ),
        Row(
            "model.to_str_tokens(text)",
            "attnscope tokens TEXT",
            lambda theirs, records: float(theirs != [one["token"] for one in records]),
        ),
        Row(
            "model.run_with_cache(text)",
            "attnscope.capture(attnscope.load(folder), text)",
            lambda theirs, seen: max(apart(theirs[1]["pattern", layer][0], seen.weights[layer]) for layer in range(4)),
        ),
        Row('cache["pattern", 1][0, 4]', "seen.weights[1][4]", apart),
        Row(
            'cache["attn_scores", 1][0, 4]',
            "attnscope relations TEXT --weights scores --select L1H4",
            lambda theirs, records: printed(theirs, records, "score"),
            1e-5,
        ),
        Row(
            '(cache["pattern", 1][0, 4][..., None] * (cache["v", 1][0, :, 2] @ model.W_O[1, 4])).norm(dim=-1)',
            "attnscope relations TEXT --weights value --select L1H4",
            lambda theirs, records: printed(theirs, records, "norm"),
            1e-5,
        ),
        Row(
            'cache["pattern", 1][0, 4, -1] * (cache["v", 1][0, :, 2] @ model.W_O[1, 4] * model.ln_final.weight '
            '/ cache["ln_final.hook_scale"][0, -1] @ (model.W_U[:, a] - model.W_U[:, b]))',
            "attnscope relations TEXT --answer A --foil B --weights logit --select L1H4",
            lambda theirs, records: apart([theirs[one["key"]] for one in records], [one["logit"] for one in records]),
            1e-5,
        ),
        Row(
            'detect_head(model, text, "induction_head")',
            "attnscope heads TEXT --sort induction",
            lambda theirs, records: apart(theirs.flatten() * 9, column(records, "induction")),
            1e-5,
        ),
        Row(
            'detect_head(model, text, "previous_token_head")',
            "attnscope heads TEXT --sort previous_token",
            lambda theirs, records: apart(theirs.flatten() * 9 / 8, column(records, "previous_token")),
        ),
        Row(
            'detect_head(model, text, "duplicate_token_head")',
            "attnscope heads TEXT --sort duplicate_token",
            lambda theirs, records: apart(theirs.flatten() * 9, column(records, "duplicate_token")),
            1e-5,
        ),
        Row(
            'torch.stack([cache["q", 1][0, :, 4], cache["k", 1][0, :, 2]])',
            "attnscope explain TEXT --head L1H4 --format jsonl",
            lambda theirs, records: apart(theirs, steps(records, "q of head 4", "k of kv head 2")),
            1e-5,
        ),
        Row(
            'model.run_with_hooks(ids, fwd_hooks=[("blocks.1.attn.hook_attn_scores", cut)])',
            'attnscope knockout TEXT --query last --key "bank#1" --over heads --random 0',
            of_cut,
            NATS,
        ),
        Row(
            'model.run_with_hooks(texts, fwd_hooks=[("blocks.1.attn.hook_z", zero)], return_type="loss", '
            "loss_per_token=True)",
            "attnscope ablate demo --select L1H4 --replace zero --on texts --texts corpus.jsonl --random 0",
            of_ablation,
            NATS,
        ),
    )


def heads_of(loaded: Any) -> int:
    return sum(loaded.geometry.heads_by_layer.values())


def steps(records: Sequence[Any], *names: str) -> list[Any]:
    """Numbers that `explain` shows, by their names."""
    shown = {one["name"]: one["values"] for record in records for one in record.get("numbers") or ()}
    return [shown[name] for name in names]


def of_pair() -> dict[str, Any]:
    """The names of a notebook that patches the corrupted text of a pair from the clean one."""
    model, ours = bridge(demo_folder()), attnscope.load("demo")
    clean, corrupted = (model.to_tokens(one) for one in (CLEAN, CORRUPTED))
    a, b = (ours.tokenizer(one, add_special_tokens=False)["input_ids"][0] for one in (ANSWER, FOIL))
    return {
        "patching": patching,
        "model": model,
        "corrupted": corrupted,
        "clean_cache": model.run_with_cache(clean)[1],
        "metric": lambda logits_BTV: logits_BTV[0, -1, a] - logits_BTV[0, -1, b],
        "seen": lambda text: None,
    }


def patches(names: dict[str, Any]) -> tuple[Row, ...]:
    intact = names["metric"](names["model"](names["corrupted"]))

    def of_patch(theirs_LH: Tensor, records: Sequence[Any]) -> float:
        return apart(theirs_LH.flatten() - intact, column(records, "restored"))

    return (
        Row(
            "patching.get_act_patch_attn_head_out_all_pos(model, corrupted, clean_cache, metric)",
            "attnscope patch TEXT --corrupted TEXT2 --answer A --foil B --over heads",
            of_patch,
            APART,
        ),
        Row(
            "patching.get_act_patch_attn_head_pattern_all_pos(model, corrupted, clean_cache, metric)",
            "attnscope patch TEXT --corrupted TEXT2 --answer A --foil B --over heads --what pattern",
            of_patch,
            APART,
        ),
    )


# what keys write


def norms(report: Report) -> None:
    """`pattern * (v @ W_O)` of each head and key: its norm is attnscope's `value` where nothing stands after it."""
    with report.check(f"norms of `pattern * (v @ W_O)` are `--weights value`, to {NORMS:g} of the largest") as check:
        for kind in (*PLAIN, *AFTER):
            apart = norms_apart(kind)
            if kind not in AFTER:
                check.hold(apart <= NORMS, f"{kind}: apart by {apart:.2g} of the largest")
            elif apart > NORMS:
                check.expect(f"{kind}: {AFTER[kind]}: apart by {apart:.2g} of the largest", 1)
            else:
                check.hold(False, f"{kind}: the same, in spite of {AFTER[kind]}")
    with report.control("norms of the heads in reverse order") as control:
        for kind in PLAIN:
            control.hold(norms_apart(kind, reverse=True) <= NORMS)


def norms_apart(kind: str, reverse: bool = False) -> float:
    """The largest difference of a norm in the last layer, as a share of the largest norm."""
    folder = tiny(kind, Path(kind).resolve())
    model, ours = bridge(folder), attnscope.load(str(folder))
    text = words(range(3, 3 + TOKENS))
    _, cache = model.run_with_cache(Given(kind, folder, text).inputs["input_ids"])
    layer, heads = max(ours.geometry.heads_by_layer.items())
    request = attnscope.Request(view=attnscope.View(weights="value"), relations=True, top_k=None)
    table = attnscope.capture(ours, text, request=request).relations().to_pylist()
    norms_HQK = torch.zeros(heads, TOKENS, TOKENS)
    for one in table:
        if one["layer"] == layer:
            norms_HQK[one["head"], one["query"], one["key"]] = one["norm"]
    pattern_HQK, v_KGD = cache["pattern", layer][0], cache["v", layer][0]
    v_HKD = v_KGD.transpose(0, 1).repeat_interleave(heads // v_KGD.shape[1], 0)
    theirs_HQK = pattern_HQK * (v_HKD @ model.W_O[-1]).norm(dim=-1)[:, None]
    apart_HQK = (theirs_HQK - (norms_HQK.flip(0) if reverse else norms_HQK)).abs()
    return float(apart_HQK.max() / norms_HQK.max())


# the types


def read(given: Given) -> dict[str, dict[int, Tensor]]:
    """The patterns of a run with a cache."""
    inputs = given.inputs
    more = {"decoder_input": inputs["decoder_input_ids"]} if given.target is not None else {}
    _, cache = bridge(given.folder).run_with_cache(inputs["input_ids"], **more)
    result: dict[str, dict[int, Tensor]] = {}
    for name in cache:
        if not name.endswith("hook_pattern"):
            continue
        blocks, layer, module, _ = name.split(".")
        stack = "cross" if module == "cross_attn" else {"blocks": "all"}.get(blocks, blocks.removesuffix("_blocks"))
        result.setdefault(stack, {})[int(layer)] = cache[name][0]
    return result


if __name__ == "__main__":
    main()
