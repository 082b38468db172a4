"""Do the nulls of a knockout hold? `python scripts/nulls.py --out rows.csv` prints the table of docs/statistics.md.

A row plants a world in one model and one text, and asks `attnscope.knockout` for p. In the first kind of world the null
holds: the values of the layer are put in a random order among the keys, while the weights stay with the places. So p at
most 0.05 may come in 0.05 of the rows. In the second the value of the key that is cut is also moved, by five standard
deviations of the values along one direction. It is the direction that the measure's gradient names, or a random one.
There p at most 0.05 should come as often as it can. Keys are drawn at random, or have the row's largest weight.

Nothing of attnscope is used but `load`, `wrap` and `knockout`. Values are moved by hooks on the model's own
projections, so that every pass reads the same ones. In `apart` worlds what is put in order is read by the asked rows of
the cut heads alone: the heads' other rows give 0, and so do heads with the same keys and values. Then the null holds
exactly.

    python scripts/nulls.py --out rows.csv --times 450              # minutes a cell on one core; a stopped run resumes
    python scripts/nulls.py --out rows.csv --times 0            # the table alone

Shapes: N row of a pass, T token, H head, G kv head, D head dim, R asked row.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import attnscope

COLUMNS = ("cell", "row", "pick", "world", "weight", "effect", "p_permuted", "p_heads", "p_distance", "p_mass")
NULLS = COLUMNS[-4:]
WORLDS, PICKS = ("null", "moved", "any direction"), ("random", "largest")
LEVELS = (0.05, 0.10, 0.50)
SINK = 0.3  # a key with more of the mean weight is not chosen
MOVED = 5.0  # standard deviations
MODELS_OF = 10  # rows of each random model


@dataclass(frozen=True)
class Cell:
    """What the rows of a cell have in common.

    tokens: of a text. layer: of the head; None for any. keys, rows, heads, layers, texts: how many are cut together.
    apart: whether the asked rows alone read what is put in order, see above. ordered: whether values are put in a
    random order; False leaves the model as it is. own: whether the answer is the next token of the planted model, not
    that of the model as it is. Then the answer is chosen by the values that are tried.
    """

    model: str
    tokens: int = 45
    how: str = "mask"
    foil: bool = False
    layer: int | None = -1
    keys: int = 1
    rows: int = 1
    heads: int = 1
    layers: int = 1
    texts: int = 1
    apart: bool = True
    ordered: bool = True
    own: bool = False


CELLS = {
    "demo": Cell("demo"),
    "llama": Cell("llama"),
    "demo, zero": Cell("demo", how="zero"),
    "llama, zero": Cell("llama", how="zero"),
    "demo, foil": Cell("demo", foil=True),
    "llama, foil": Cell("llama", foil=True),
    "demo, any layer": Cell("demo", layer=None),
    "llama, any layer": Cell("llama", layer=None),
    "demo, any layer, values for all": Cell("demo", layer=None, apart=False),
    "llama, any layer, values for all": Cell("llama", layer=None, apart=False),
    "demo, own answer": Cell("demo", own=True),
    "llama, own answer": Cell("llama", own=True),
    "gpt_neox": Cell("gpt_neox"),
    "gemma, grouped": Cell("gemma"),
    "llama, 24 tokens": Cell("llama", tokens=24),
    "llama, 60 tokens": Cell("llama", tokens=60),
    "llama, 180 tokens": Cell("llama", tokens=180),
    "demo, 60 tokens": Cell("demo", tokens=60),
    "demo, 180 tokens": Cell("demo", tokens=180),
    "llama, 3 keys": Cell("llama", keys=3),
    "llama, 3 rows": Cell("llama", rows=3),
    "llama, 2 heads": Cell("llama", heads=2),
    "llama, 2 layers": Cell("llama", layer=None, layers=2),
    "llama, 4 texts": Cell("llama", texts=4),
    "demo, 4 texts": Cell("demo", texts=4),
    "demo, any layer, as it is": Cell("demo", layer=None, apart=False, ordered=False),
    "llama, any layer, as it is": Cell("llama", layer=None, apart=False, ordered=False),
}


# Models: random ones whose attention is peaked and whose effects are far above rounding.

SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "tie_word_embeddings": False},
    "gemma": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": False},
    "gpt_neox": {"num_attention_heads": 4, "rotary_pct": 0.5},
}
PEAKED = 1.7  # logits have a standard deviation of its square
FIRST_ID = 100


@cache
def demo() -> attnscope.LoadedModel:
    return attnscope.load("demo", device="cpu", dtype="float32")


@lru_cache(maxsize=8)
def model_of(kind: str, seed: int) -> attnscope.LoadedModel:
    """The demo, or a random model."""
    if kind == "demo":
        return demo()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **SHAPE, **SHAPES[kind], max_position_embeddings=512, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else weight.shape[1] ** -0.5)
        for part in ("q_proj", "k_proj"):
            weight.data *= PEAKED if part in name else 1
        if "query_key_value.weight" in name:
            weight.data.view(-1, 3, 16, 64)[:, :2] *= PEAKED
    model.get_output_embeddings().weight.data.normal_(std=3 * SHAPE["hidden_size"] ** -0.5)
    return attnscope.wrap(model, demo().tokenizer, kind)


class Layer:
    """The projections of one layer: where its values come from, and where heads' outputs go."""

    def __init__(self, model: Any, layer: int) -> None:
        block = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))[layer]
        attention = getattr(block, "self_attn", None) or block.attention
        self.fused = hasattr(attention, "query_key_value")
        self.source = attention.query_key_value if self.fused else attention.v_proj
        self.out = attention.dense if self.fused else attention.o_proj
        self.heads = model.config.num_attention_heads
        self.kv_heads = getattr(model.config, "num_key_value_heads", self.heads)
        self.width = self.out.in_features // self.heads

    def group(self, head: int) -> int:
        return head * self.kv_heads // self.heads

    def values(self, projected_NTX: Tensor) -> Tensor:
        """(N, T, G, D), a view of what the projection gives."""
        split = (self.kv_heads, 3, self.width) if self.fused else (self.kv_heads, self.width)
        found = projected_NTX.unflatten(-1, split)
        return found[..., 2, :] if self.fused else found


# Worlds: what a layer's projections give, changed alike in every pass.


@dataclass
class World:
    """Of every text, by its ids: the heads that are cut, the asked rows, an order of its values, and what is added.

    order_T: of a text, the key whose value each place has. moved: of a text, and in it of a layer and head, the keys
    that are moved and by what (D,).
    """

    heads: Sequence[tuple[int, int]]
    rows: Sequence[int]
    order_T: dict[tuple[int, ...], Tensor]
    moved: dict[tuple[int, ...], dict[tuple[int, int], tuple[list[int], Tensor]]]
    apart: bool

    @contextmanager
    def planted(self, model: Any) -> Iterator[None]:
        texts: list[tuple[int, ...]] = []
        handles = [model.get_input_embeddings().register_forward_pre_hook(_remember(texts))]
        for layer in sorted({layer for layer, _ in self.heads}):
            place = Layer(model, layer)
            handles.append(place.source.register_forward_hook(self._values(place, layer, texts)))
            if self.apart:
                handles.append(place.out.register_forward_pre_hook(self._outputs(place, layer)))
        try:
            yield
        finally:
            for one in handles:
                one.remove()

    def _values(self, place: Layer, layer: int, texts: list[tuple[int, ...]]) -> Any:
        def change(module: Any, inputs: Any, projected_NTX: Tensor) -> Tensor:
            changed_NTX = projected_NTX.clone()
            before_NTGD, after_NTGD = place.values(projected_NTX), place.values(changed_NTX)
            for row in range(len(projected_NTX)):
                # Behind the texts a pass has copies of them, as many as it needs.
                text = next((one for one in self.order_T if texts[row % len(texts)][: len(one)] == one), None)
                if text is None:  # what the model is tried with
                    continue
                order_T, moved = self.order_T[text], self.moved[text]
                for head in [head for of, head in self.heads if of == layer]:
                    group = place.group(head)
                    after_NTGD[row, : len(order_T), group] = before_NTGD[row, order_T, group]
                    if (layer, head) in moved:
                        keys, by_D = moved[layer, head]
                        after_NTGD[row, keys, group] += by_D
            return changed_NTX

        return change

    def _outputs(self, place: Layer, layer: int) -> Any:
        own = [head for of, head in self.heads if of == layer]
        groups = {place.group(head) for head in own}

        def change(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            changed_NTHD = inputs[0].clone().unflatten(-1, (place.heads, place.width))
            for head in range(place.heads):
                if place.group(head) in groups:
                    read_T = [head in own and token in self.rows for token in range(changed_NTHD.shape[1])]
                    changed_NTHD[:, ~torch.tensor(read_T), head] = 0
            return (changed_NTHD.flatten(-2), *inputs[1:])

        return change


def _remember(texts: list[tuple[int, ...]]) -> Any:
    def read(module: Any, inputs: tuple[Tensor, ...]) -> None:
        texts[:] = [tuple(row) for row in inputs[0].tolist()]

    return read


# Rows.


@dataclass
class Text:
    """A text that is asked, and what is cut in it. answer, foil: one token each."""

    ids: tuple[int, ...]
    keys: list[int]
    answer: int = 0
    foil: int | None = None

    def measure(self, logits_V: Tensor) -> Tensor:
        if self.foil is None:
            return logits_V.log_softmax(-1)[self.answer]
        return logits_V[self.answer] - logits_V[self.foil]


def rows_of(name: str, cell: Cell, number: int, worlds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What comes of one row of a cell: of each pick and world."""
    g = np.random.default_rng([number, *name.encode()])
    loaded = model_of(cell.model, 0 if cell.model == "demo" else number // MODELS_OF)
    model = loaded.model
    layers = g.permutation(model.config.num_hidden_layers)[: cell.layers]
    if cell.layer is not None:
        layers = [range(model.config.num_hidden_layers)[cell.layer]]
    heads = [
        (int(layer), int(head))
        for layer in sorted(layers)
        for head in sorted(g.permutation(model.config.num_attention_heads)[: cell.heads])
    ]
    rows = range(cell.tokens - cell.rows, cell.tokens)
    vocabulary = model.config.vocab_size
    texts = [
        Text((0, *g.integers(min(FIRST_ID, vocabulary // 4), vocabulary, cell.tokens - 1).tolist()), [])
        for _ in range(cell.texts)
    ]
    last = rows[0] if len(layers) == 1 else rows[0] - 1  # the last key that every asked row sees, and no cut writes
    orders = {}
    for text in texts:
        order_T = np.arange(cell.tokens)
        if cell.ordered:
            order_T[1 : last + 1] = 1 + g.permutation(last)
        orders[text.ids] = torch.tensor(order_T)
    sign, directions_seed = g.choice([-1.0, 1.0]), int(g.integers(1 << 31))
    for pick in PICKS:
        world = World(heads, rows, orders, {text.ids: {} for text in texts}, cell.apart)
        for text in texts:
            weight_K, logits_V = _read(model, world, text)
            if not cell.own:
                with torch.no_grad():
                    logits_V = model(torch.tensor([text.ids]), use_cache=False).logits[0, -1]
            likely = logits_V.argsort(descending=True)
            text.answer, text.foil = int(likely[0]), int(likely[1]) if cell.foil else None
            eligible = [key for key in range(1, last + 1) if key not in weight_K[1]]
            there = g.permutation(eligible) if pick == "random" else sorted(eligible, key=lambda key: -weight_K[0][key])
            text.keys = sorted(int(key) for key in there[: cell.keys])
        weight = float(np.mean([weight_K[0][text.keys].sum() for text in texts]))
        for kind in worlds:
            moved = {text.ids: _moves(model, world, text, kind, sign, directions_seed) for text in texts}
            with World(heads, rows, orders, moved, cell.apart).planted(model):
                found = attnscope.knockout(
                    loaded,
                    [
                        {
                            "text": text.ids,
                            "key": _spelled(text.keys),
                            "answer": [text.answer],
                            **({} if text.foil is None else {"foil": [text.foil]}),
                        }
                        for text in texts
                    ],
                    query=_spelled(rows),
                    select=",".join(f"L{layer}H{head}" for layer, head in heads),
                    how=cell.how,  # type: ignore[arg-type]
                    random=100,  # so that each key of the pool is exchanged
                    seed=number,
                )
            [row] = found.table().to_pylist()
            yield {
                "cell": name,
                "row": number,
                "pick": pick,
                "world": kind,
                "weight": weight,
                "effect": row["effect"],
                **_p_values(row),
            }


def _spelled(places: Sequence[int]) -> str:
    return ",".join(map(str, places))


def _p_values(row: dict[str, Any]) -> dict[str, float | None]:
    """p as the table has it; of a table with percentiles, p in two equal tails of as many draws."""
    found = {name: row.get(name) for name in NULLS}
    for kind in ("distance", "mass"):
        percentile, count = row.get(f"percentile_{kind}"), row.get(f"n_{kind}")
        if percentile is not None:
            below = percentile / 100 * count
            found[f"p_{kind}"] = min(1.0, 2 * (1 + min(below, count - below)) / (1 + count))
    return found


@torch.no_grad()
def _read(model: Any, world: World, text: Text) -> tuple[tuple[np.ndarray, set[int]], Tensor]:
    """(K,) the weight of each key, mean over the asked rows of the cut heads, and the heads' sinks; the last logits."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with world.planted(model):
        out = model(torch.tensor([text.ids]), output_attentions=True, use_cache=False)
    model.set_attn_implementation(before)
    weight_HQK = [out.attentions[layer][0, head].double().numpy() for layer, head in world.heads]
    received_HK = [weight_QK.mean(0) for weight_QK in weight_HQK]
    sinks = {int(one.argmax()) for one in received_HK if one.max() > SINK}
    weight_K = np.mean([weight_QK[list(world.rows)].mean(0) for weight_QK in weight_HQK], 0)
    return (weight_K, sinks), out.logits[0, -1]


def _moves(
    model: Any, world: World, text: Text, kind: str, sign: float, seed: int
) -> dict[tuple[int, int], tuple[list[int], Tensor]]:
    """What is added to the values of a text's cut keys in each head."""
    if kind == "null":
        return {}
    inputs: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}

    def hear(layer: int) -> Any:
        def read(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            inputs[layer] = given[0] if given[0].requires_grad else given[0].detach().requires_grad_()
            inputs[layer].retain_grad()
            return (inputs[layer], *given[1:])

        return read

    def keep(layer: int, place: Layer) -> Any:
        return lambda module, given, output: values.__setitem__(layer, place.values(output)[0].detach())

    handles = []
    for layer, _ in world.heads:
        place = Layer(model, layer)
        handles.append(place.out.register_forward_pre_hook(hear(layer)))
        handles.append(place.source.register_forward_hook(keep(layer, place)))
    with world.planted(model), torch.enable_grad():
        text.measure(model(torch.tensor([text.ids]), use_cache=False).logits[0, -1]).backward()
    for one in handles:
        one.remove()
    found, generator = {}, torch.Generator().manual_seed(seed)
    for layer, head in world.heads:
        place = Layer(model, layer)
        direction_D = inputs[layer].grad[0].unflatten(-1, (place.heads, place.width))[list(world.rows), head].sum(0)
        if kind == "any direction":
            direction_D = torch.randn(place.width, generator=generator)
        direction_D = direction_D / direction_D.norm()
        along_K = values[layer][1 : world.rows[0] + 1, place.group(head)] @ direction_D
        found[layer, head] = text.keys, sign * MOVED * along_K.std() * direction_D
    return found


# The table.


def read_rows(path: Path | None) -> list[dict[str, str]]:
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """A line per cell, pick and null: rows, those without p, and how often p is small in each world."""
    yield "| cell | key | null | rows | no p | at .05, .10, .50 | moved: at .05 | any direction |"
    yield "|---|---|---|---|---|---|---|---|"
    found: dict[Any, list[float | None]] = defaultdict(list)
    for row, null in itertools.product(rows, NULLS):
        found[row["cell"], row["pick"], null, row["world"]].append(float(row[null]) if row[null] else None)
    names = list(dict.fromkeys(row["cell"] for row in rows))
    for name, pick, null in itertools.product(names, PICKS, NULLS):
        every = {world: found[name, pick, null, world] for world in WORLDS}
        p = {world: np.array([one for one in some if one is not None]) for world, some in every.items()}
        if not any(map(len, p.values())):
            continue
        none = f"{1 - len(p['null']) / len(every['null']):.2f}" if every["null"] else "-"
        shares = [[f"{(some <= level).mean():.3f}" if len(some) else "-" for level in LEVELS] for some in p.values()]
        cells = [name, pick, null.removeprefix("p_"), str(len(p["null"])), none, ", ".join(shares[0])]
        yield f"| {' | '.join([*cells, *(share[0] for share in shares[1:])])} |"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--out", type=Path, required=True, help="a CSV of the rows; those that it has are not run again")
    asked.add_argument("--times", type=int, default=450, help="rows of a cell")
    asked.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS), metavar="CELL")
    asked.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS[:2]))
    given = asked.parse_args()
    done = {(row["cell"], int(row["row"]), row["world"]) for row in read_rows(given.out)}
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not file.tell():
            writer.writeheader()
        for number, name in itertools.product(range(given.times), given.cells):
            worlds = [world for world in given.worlds if (name, number, world) not in done]
            if worlds:
                writer.writerows(rows_of(name, CELLS[name], number, worlds))
                file.flush()
    print("\n".join(table(read_rows(given.out))))


if __name__ == "__main__":
    main()
