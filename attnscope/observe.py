"""Texts in, observations out: the one path that heads, relations, heatmap and batch share.

    >>> loaded = load(LoadOptions())
    >>> prompt = from_text(loaded.tokenizer, "the financial bank is located on river bank")
    >>> [seen] = observe(loaded, [prompt], Request())
    >>> seen.heads[0].score["entropy"]

Shapes: B text, H head, Q query, T token, k kept keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import torch

from attnscope.attention.tiled import TiledAttention
from attnscope.errors import UsageError
from attnscope.measure.metrics import METRICS, Texts
from attnscope.measure.probes import HeadScores, Layer, Maps, Strongest, TopKeys, View, Weights
from attnscope.measure.roles import NONE, role_of
from attnscope.measure.rollout import Rollout, RolloutProbe, bins
from attnscope.seam.call import AttentionCall, CaptureReport
from attnscope.seam.listen import listen
from attnscope.tables import as_table, texts_at

if TYPE_CHECKING:
    from attnscope.model.loading import LoadedModel
    from attnscope.text.prompt import Prompt, Span


@dataclass(frozen=True)
class Request:
    """What to keep of a forward pass.

    view: how entries are read, and of which heads relations and maps are kept. metrics: ids to measure. key_zero:
    lets key 0 into a head's strongest relation. relations: whether to keep the `top_k` strongest keys of every query
    (None: all), of `group`s if given. maps: the heads to draw ("all", "kept" or None), binned by `bin_rule`,
    with key 0 in a column of its own if `split_sink`. weights: keep whole matrices. rollout: the units whose attention
    is rolled out; `bins` are at most MAP_SIDE runs of tokens.
    """

    view: View = View()
    metrics: Sequence[str] = tuple(METRICS)
    key_zero: bool = False
    relations: bool = False
    top_k: int | None = 5
    group: Literal["words", "sentences"] | None = None
    maps: Literal["all", "kept"] | None = None
    bin_rule: Literal["sum", "max"] = "sum"
    split_sink: bool = False
    weights: bool = False
    rollout: Literal["bins", "tokens", "words", "sentences"] | None = None

    def __post_init__(self) -> None:
        if self.group and self.view.weights == "scores":
            raise UsageError("logits of several keys cannot be summed into one", "use --weights softmax with --group")


@dataclass(frozen=True)
class Relation:
    """One query looking at one key: token positions and the weight."""

    query: int
    key: int
    weight: float


@dataclass(frozen=True)
class Head:
    """What one head (with by_kv, the mean of the heads of one kv head) does with a text; scores are NaN for null."""

    layer: int
    head: int | None
    kv_head: int
    role: str
    score: Mapping[str, float]
    strongest: Relation | None

    @property
    def name(self) -> str:
        """`L27H3`, or `L27KV1` for the mean over a kv head's group."""
        return f"L{self.layer}KV{self.kv_head}" if self.head is None else f"L{self.layer}H{self.head}"


@dataclass
class Observation:
    """One text, observed: its heads, relations, maps, and how the capture held.

    even[layer]: what attention spread evenly over the visible keys would score. support[layer]: rows of each kind.
    """

    prompt: Prompt
    heads: list[Head]
    even: Mapping[int, Mapping[str, float]]
    support: Mapping[int, Mapping[str, int]]
    report: CaptureReport
    maps: Maps | None = None
    weights: Mapping[int, torch.Tensor] = field(default_factory=dict)
    _top: TopKeys | None = None
    _row: int = 0
    _kv_of: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # layer -> heads, kv heads
    group: str | None = None
    view: View = View()
    context: dict[str, Any] = field(default_factory=dict)  # what else the manifest is to say of the run
    rollout: Rollout | None = None

    def kept_heads(self) -> list[Head]:
        """The heads that the view keeps, in the model's order."""
        chosen = self.view.heads
        if chosen is None:
            return list(self.heads)
        wanted = {
            (layer, self.kv_head(layer, head) if self.view.by_kv else head)
            for layer in chosen
            for head in chosen[layer]
        }
        return [one for one in self.heads if (one.layer, one.kv_head if one.head is None else one.head) in wanted]

    def units(self) -> Sequence[str]:
        """The exact text of what relations speak of: tokens, or the words or sentences of the grouping."""
        if self.group is None:
            return self.prompt.tokens
        return [span.name for span in _spans(self.prompt, self.group)]

    def relations(self, min_weight: float | None = None) -> pa.Table:
        """Who looks at whom: a row a (head, query, key), strongest key first.

        Columns layer, head, kv_head, query, query_token, key, key_token, weight (`score` where logits were asked for);
        entries under min_weight are left out.
        """
        numbers = self.relation_numbers(min_weight)
        units = self.units()
        return as_table(
            {
                "layer": numbers["layer"],
                "head": pa.array(numbers["head"], mask=numbers["head"] < 0),
                "kv_head": numbers["kv_head"],
                "query": numbers["query"],
                "query_token": texts_at(units, numbers["query"]),
                "key": numbers["key"],
                "key_token": texts_at(units, numbers["key"]),
                self._entry: numbers["weight"],
            }
        )

    def relation_numbers(self, min_weight: float | None = None) -> dict[str, np.ndarray]:
        """The columns of `relations` that are numbers; head is -1 where kv heads were averaged."""
        parts = list(self._relation_parts(min_weight))
        kinds = {name: np.float32 if name == "weight" else np.int32 for name in RELATION}
        return {
            name: np.concatenate([part[name] for part in parts], dtype=kind, casting="same_kind")
            if parts
            else np.empty(0, kind)
            for name, kind in kinds.items()
        }

    @property
    def most_relations(self) -> int:
        """How many rows `relations` can have."""
        weights = self._top.weight.values() if self._top else ()
        return sum(len(self.prompt) * weight.shape[1] * weight.shape[-1] for weight in weights)

    @property
    def _by_kv(self) -> bool:
        return bool(self._top and self._top.view.by_kv)

    @property
    def _entry(self) -> str:
        return "score" if self._top and self._top.view.weights == "scores" else "weight"

    def _relation_parts(self, min_weight: float | None) -> Iterator[dict[str, np.ndarray]]:
        if self._top is None:
            raise UsageError("this observation kept no relations", "ask with Request(relations=True)")
        count = len(self.units())
        for layer, names in self._top.heads.items():
            weight_HQk = self._top.weight[layer][self._row, :, :count].numpy()
            key_HQk = self._top.key[layer][self._row, :, :count].numpy()
            keep = ~np.isnan(weight_HQk) & (key_HQk < count)
            if min_weight is not None:
                keep &= weight_HQk >= min_weight
            kept_HQ = keep.sum(-1)
            head = np.repeat(np.array(names, np.int32), kept_HQ.sum(-1))
            query = np.repeat(np.tile(np.arange(count, dtype=np.int32), len(names)), kept_HQ.ravel())
            yield {
                "layer": np.full(head.shape, layer, np.int32),
                "head": np.full(head.shape, -1, np.int32) if self._by_kv else head,
                "kv_head": head if self._by_kv else self.kv_head(layer, head),
                "query": query,
                "key": key_HQk[keep],
                "weight": weight_HQk[keep],
            }

    def kv_head(self, layer: int, head: Any) -> Any:
        """The kv head that a query head (or each of an array of them) reads."""
        heads, kv_heads = self._kv_of[layer]
        return head * kv_heads // heads

    def table(self) -> pa.Table:
        """The heads as a table: layer, head, kv_head, role, then a column a metric, in the order of `heads`."""
        ids = list(self.heads[0].score) if self.heads else []
        return as_table(
            {
                "layer": np.array([head.layer for head in self.heads], dtype=np.int32),
                "head": pa.array([head.head for head in self.heads], pa.int32()),
                "kv_head": np.array([head.kv_head for head in self.heads], dtype=np.int32),
                "role": pa.array([head.role for head in self.heads], pa.string()),
                **{name: np.array([head.score[name] for head in self.heads]) for name in ids},
            }
        )


RELATION = ("layer", "head", "kv_head", "query", "key", "weight")


def observe(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    request: Request,
    *,
    engine: Literal["eager", "fused"] = "eager",
    answer: bool = True,
) -> list[Observation]:
    """One forward pass over some prompts; an observation each, in order.

    Prompts of different length are padded on the right, without a mask, which leaves causal rows exact. engine:
    "eager" reads the matrices of a model loaded so; "fused" answers from q and k without ever making one, and unless
    `answer` is False gives each layer's output in the same pass instead of the model's own attention. Raises
    ModelError where a layer that should attend was not heard.
    """
    texts = _texts(prompts, loaded.device)
    layers = {layer.index: layer for layer in loaded.geometry.attention_layers}
    probes = _probes(prompts, request)
    kv_of: dict[int, tuple[int, int]] = {}

    def hear(call: AttentionCall) -> None:
        P = call.P
        if call.call > 0 or P.keys != texts.ids_BT.shape[1]:  # the report lists what is not read, and why
            return
        known = layers.get(call.layer)
        kv_heads = call.logits.k_BGKD.shape[1] if call.logits else known.kv_heads if known else P.heads
        kv_of[call.layer] = (P.heads, kv_heads)
        layer = Layer(call.layer, P, kv_heads, texts)
        if isinstance(P, TiledAttention):  # every question of every probe, answered in one pass
            with P.planning():
                _run(probes, layer)
        _run(probes, layer)

    report = listen(
        loaded.model,
        texts.ids_BT,
        hear,
        expected_layers=tuple(layers),
        windows={index: layer.window for index, layer in layers.items()},
        answer=engine == "fused" and answer,
        whole=False,
    )
    scores = _Scores(probes["scores"], probes["strongest"])
    return [_observation(prompt, row, scores, probes, request, report, kv_of) for row, prompt in enumerate(prompts)]


def _run(probes: Mapping[str, Any], layer: Layer) -> None:
    for probe in probes.values():
        probe(layer)


def _texts(prompts: Sequence[Prompt], device: str) -> Texts:
    longest = max(len(prompt) for prompt in prompts)
    ids = [list(prompt.ids) + [prompt.ids[-1]] * (longest - len(prompt)) for prompt in prompts]
    return Texts(torch.tensor(ids, device=device), torch.tensor([len(prompt) for prompt in prompts], device=device))


def _probes(prompts: Sequence[Prompt], request: Request) -> dict[str, Any]:
    probes: dict[str, Any] = {"scores": HeadScores(request.metrics)}
    if request.relations:
        groups = _groups(prompts, request.group) if request.group else None
        probes["relations"] = TopKeys(request.top_k, request.view, groups)
    probes["strongest"] = Strongest(request.key_zero)  # after those that ask for more keys: it reads theirs
    if request.maps:
        view = request.view
        view = View(view.weights, view.by_kv, None) if request.maps == "all" else view
        probes["maps"] = Maps(len(prompts[0]), view, request.bin_rule, request.split_sink)
    if request.weights:
        probes["weights"] = Weights(request.view)
    if request.rollout:
        probes["rollout"] = RolloutProbe(_groups(prompts, request.rollout))
    return probes


def _spans(prompt: Prompt, group: str) -> Sequence[Span]:
    if group in ("bins", "tokens"):
        return bins(prompt) if group == "bins" else bins(prompt, len(prompt))
    return prompt.words if group == "words" else prompt.sentences


def _groups(prompts: Sequence[Prompt], group: str) -> torch.Tensor:
    """The number of each token's group, (B, T); -1 for padding."""
    groups_BT = torch.full((len(prompts), max(len(prompt) for prompt in prompts)), -1)
    for row, prompt in enumerate(prompts):
        for number, span in enumerate(_spans(prompt, group)):
            groups_BT[row, span.start : span.stop] = number
    return groups_BT


class _Scores:
    """The probes' numbers as Python's own, made once for all texts: asking a tensor for each of them is slow."""

    def __init__(self, scores: HeadScores, strongest: Strongest) -> None:
        self.of = {layer: _listed(found) for layer, found in scores.scores.items()}
        self.even = {layer: _listed(found) for layer, found in scores.even.items()}
        self.rows = {layer: _listed(found) for layer, found in scores.support.items()}
        self.strongest = {layer: tuple(part.tolist() for part in found) for layer, found in strongest.found.items()}


def _listed(found: Mapping[str, torch.Tensor]) -> list[dict[str, list[Any]]]:
    """{name: (B, H)} -> for each text {name: a number a head}, in one go."""
    numbers = torch.stack(list(found.values()), 1).tolist() if found else [[]]
    return [dict(zip(found, of_text, strict=True)) for of_text in numbers]


def _of_text(found: Mapping[int, Sequence[Mapping[str, list[Any]]]], row: int) -> dict[int, dict[str, Any]]:
    """One text's entry of each layer; texts that share a mask may share one entry."""
    return {
        layer: {name: value[0] for name, value in texts[min(row, len(texts) - 1)].items()}
        for layer, texts in found.items()
    }


def _observation(
    prompt: Prompt,
    row: int,
    scores: _Scores,
    probes: Mapping[str, Any],
    request: Request,
    report: CaptureReport,
    kv_of: Mapping[int, tuple[int, int]],
) -> Observation:
    weights = probes.get("weights")
    even, rows = _of_text(scores.even, row), _of_text(scores.rows, row)
    heads = _heads(row, scores, request.view.by_kv, even, rows, kv_of)
    kept = (
        {layer: matrix[row, :, : len(prompt), : len(prompt)] for layer, matrix in weights.weights.items()}
        if weights
        else {}
    )
    return Observation(
        prompt,
        heads,
        even,
        rows,
        report,
        probes.get("maps"),
        kept,
        probes.get("relations"),
        row,
        kv_of,
        request.group,
        request.view,
        rollout=probes["rollout"].rolled(row, _spans(prompt, request.rollout)) if request.rollout else None,
    )


def _heads(
    row: int,
    scores: _Scores,
    by_kv: bool,
    even: Mapping[int, Mapping[str, float]],
    support: Mapping[int, Mapping[str, int]],
    kv_of: Mapping[int, tuple[int, int]],
) -> list[Head]:
    found = []
    for layer, score in scores.of.items():
        heads, kv_heads = kv_of[layer]
        size = heads // kv_heads if by_kv else 1
        weight, query, key = (part[row] for part in scores.strongest[layer])
        columns = score[min(row, len(score) - 1)]
        named = METRICS.keys() <= columns.keys()
        for head in range(0, heads, size):
            group = range(head, head + size)
            means = {name: column[head] for name, column in columns.items()}
            if size > 1:
                means = {name: sum(column[head : head + size]) / size for name, column in columns.items()}
            role = role_of(means, even[layer], support[layer]) if named else NONE
            known = [one for one in group if not math.isnan(weight[one])]
            best = max(known, key=lambda one: weight[one], default=None)
            relation = None if best is None else Relation(query[best], key[best], weight[best])
            found.append(Head(layer, None if by_kv else head, head * kv_heads // heads, role, means, relation))
    return found
