"""A person's own texts in a scan: how far apart heads are on them, and what each head looks like on how many.

    result = on_texts(loaded, prompts_of(loaded, ["the financial bank", ...]))
    result.js_NN, result.shares[3, 1]      # {"sink": 0.82, "induction": 0.18}

Then average linkage (UPGMA; Sokal & Michener 1958): which of N things are alike, as a tree with its leaves in a row.
scipy has it too, but seaborn imports scipy where it is there, and every picture would begin half as late again.

    tree = clustered(distance_NN)
    tree.leaves       # neighbours are alike

Shapes: N head of all layers, or thing, T token, E entry below the diagonal, S text.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from attnscope.errors import InputError
from attnscope.inputs.prompt import Prompt
from attnscope.model.selection import everything, pairs
from attnscope.observe.atlas import columns_of
from attnscope.observe.collect import observe
from attnscope.observe.request import Request
from attnscope.studies.probes import natural_prompts
from attnscope.studies.study_folder import Column, Parts, claim, head_columns, of_heads
from attnscope.utils.files import check_types, damaged, read_json
from attnscope.utils.tables import as_table, save, words

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

LONGEST = 128  # tokens: rows of every head are held at once, and compared pair by pair
AT_ONCE = 16  # texts whose readings share a file
DIVERGENCES, LOOKS, READINGS = "head_js.parquet", "looks_like.csv", "texts"
STORED = pa.schema({**dict.fromkeys(("layer", "head", "other_layer", "other_head"), pa.int32()), "js": pa.float64()})
CORPUS = "corpus"  # what says in the folder of the readings which texts they are of


@dataclass(frozen=True)
class OnTexts:
    """js_NN: the mean Jensen-Shannon divergence of every pair of heads, in bits. looks_SN: what they look like."""

    heads: tuple[tuple[int, int], ...]
    js_NN: np.ndarray
    looks_SN: np.ndarray

    @property
    def texts(self) -> int:
        """How many there are."""
        return len(self.looks_SN)

    @cached_property
    def shares(self) -> Mapping[tuple[int, int], Mapping[str, float]]:
        """{(layer, head): {look: share of the texts}}, the largest first; `-` where a text cannot show it."""
        counts = [Counter(looks.tolist()).most_common() for looks in self.looks_SN.T]
        shares = [{look: number / self.texts for look, number in of_head} for of_head in counts]
        return dict(zip(self.heads, shares, strict=True))

    def save(self, folder: Path) -> None:
        """Write both tables: a row per pair of heads with js, and per head and look with its share of the texts."""
        one, two = np.triu_indices(len(self.heads), 1)
        ends, others = (head_columns([self.heads[place] for place in places]) for places in (one, two))
        ends |= {f"other_{name}": values for name, values in others.items()}
        save(as_table({**ends, "js": self.js_NN[one, two]}), folder / DIVERGENCES)
        rows = [(head, look, share) for head, shares in self.shares.items() for look, share in shares.items()]
        heads, looks, shares = zip(*rows, strict=True)
        save(as_table({**head_columns(heads), "looks_like": words(looks), "share": np.array(shares)}), folder / LOOKS)


def load_texts(folder: Path) -> OnTexts | None:
    """How far apart heads are by the tables of a scan's folder; None where it read no texts.

    What each head looks like on each text is not in the tables. Raises InputError for a table that is not whole.
    """
    if not (folder / DIVERGENCES).exists():
        return None
    with damaged(f"{folder} holds no whole scan of texts", "scan the model again with {texts}"):
        corpus = read_json(folder / READINGS / f"{CORPUS}.json")
        check_types(corpus, {"texts": int})
        columns = columns_of(folder / DIVERGENCES, STORED)
        ends = [list(zip(columns[f"{side}layer"], columns[f"{side}head"], strict=True)) for side in ("", "other_")]
        heads = tuple(dict.fromkeys([*ends[0], *ends[1]]))
        place = {head: at for at, head in enumerate(heads)}
        js_NN = np.zeros((len(heads), len(heads)))
        one, two = ([place[head] for head in of_side] for of_side in ends)
        js_NN[one, two] = js_NN[two, one] = np.array(columns["js"], np.float64)
        return OnTexts(heads, js_NN, np.empty((corpus["texts"], 0), "U1"))


def prompts_of(loaded: LoadedModel, texts: Sequence[str]) -> list[Prompt]:
    """The texts as tokens, at most LONGEST of each. Raises InputError where none has two."""
    loaded.check_bare("a scan")
    loaded.check_softmax("a comparison of heads on texts", "leave out {texts}")
    # A single token sees itself, whatever the head.
    prompts = [prompt for prompt in natural_prompts(loaded, texts, LONGEST) if len(prompt) > 1]
    if not prompts:
        raise InputError("no text has two tokens", "give longer texts")
    return prompts


def on_texts(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    folder: Path | None = None,
    *,
    force: bool = False,
    advance: Callable[[int], object] = lambda texts: None,
) -> OnTexts:
    """Read every text; with the folder of a scan, keep what was read there, and write tables.

    advance: called with the texts of every pass, and of what an earlier run had read. Raises UsageError for a folder
    in which other texts were read, unless force says to write over them.
    """
    stored = Parts()
    if folder is not None:
        # Other texts, or as many tokens of other lengths, are another scan.
        ids = hashlib.sha256(b"".join(np.array([len(prompt), *prompt.ids], np.int64).tobytes() for prompt in prompts))
        facts = {"texts": len(prompts), "longest": LONGEST, "ids_sha256": ids.hexdigest()}
        stored = claim(folder, READINGS, CORPUS, facts, force)
    # Of heads of attention alone: the map of a linear layer is no distribution.
    selection = everything(loaded.geometry.heads_by_layer)
    starts, (heads, fits) = range(0, len(prompts), AT_ONCE), of_heads(pairs(selection))
    stored.expect(len(starts))

    def read(some: Sequence[Prompt]) -> Mapping[str, np.ndarray]:
        js_NN, looks_SN = [], []
        for prompt in some:
            # One forward pass says how far apart all heads are, and what each looks like.
            [observation] = observe(loaded, [prompt], Request(weights=True))
            js_NN.append(head_js(torch.cat(list(observation.weights.values())).to(loaded.device)))
            looks_SN.append(observation.columns.text_role.astype(str))
            advance(1)
        of = np.stack([observation.columns.layer, observation.columns.head], 1)
        return {"heads": of, "sum_NN": np.sum(js_NN, 0), "looks_SN": np.stack(looks_SN)}

    # Some texts share a file, so that a scan that was stopped has few to read again.
    parts, count = [], heads.shape[0]
    with stored.resumable():
        for start in starts:
            some = prompts[start : start + AT_ONCE]
            looks = Column((len(some), count), "U")
            expected = {"heads": heads, "sum_NN": Column((count, count)), "looks_SN": looks}
            skipped = partial(advance, len(some))
            parts.append(stored.kept(f"{start:06}", expected, partial(read, some), fits=fits, skipped=skipped))
    mean_NN = np.sum([part["sum_NN"] for part in parts], axis=0) / len(prompts)
    looks_SN = np.concatenate([part["looks_SN"] for part in parts])
    result = OnTexts(tuple((int(layer), int(head)) for layer, head in parts[0]["heads"]), mean_NN, looks_SN)
    if folder is not None:
        result.save(folder)
    return result


def head_js(weights_NTT: Tensor) -> np.ndarray:
    """The Jensen-Shannon divergence of every pair of heads in bits, (N, N) float64: the mean over rows.

    Row 0 sees one key, and is left out. Lin 1991, doi 10.1109/18.61115.
    """
    count, tokens, _ = weights_NTT.shape
    seen_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=weights_NTT.device).tril()
    seen_TT[0] = False
    rows_NE = weights_NTT[:, seen_TT]
    entropy_N = _entropy(rows_NE)
    js_NN = torch.zeros(count, count, dtype=torch.float64, device=weights_NTT.device)
    for head in range(count - 1):
        middle_NE = (rows_NE[head] + rows_NE[head + 1 :]) / 2
        js_NN[head, head + 1 :] = _entropy(middle_NE) - (entropy_N[head] + entropy_N[head + 1 :]) / 2
    js_NN = js_NN.clamp(min=0) / ((tokens - 1) * np.log(2))
    return (js_NN + js_NN.T).cpu().numpy()


def _entropy(rows_NE: Tensor) -> Tensor:
    """Summed over the rows, in nats, (N,)."""
    return torch.special.entr(rows_NE).sum(1, dtype=torch.float64)


@dataclass(frozen=True)
class Tree:
    """leaves: the N things in their order. merges: (one, two, height) of things 0 to N-1, N + k of merge k."""

    leaves: tuple[int, ...]
    merges: tuple[tuple[int, int, float], ...]


def clustered(distance_NN: np.ndarray) -> Tree:
    """The tree of a symmetric matrix of distances; of two clusters' four joints the shortest is in the row."""
    apart_NN = distance_NN.astype(np.float64)
    np.fill_diagonal(apart_NN, np.inf)
    count = len(apart_NN)
    number = list(range(count))
    rows: list[tuple[int, ...]] = [(leaf,) for leaf in range(count)]
    merges: list[tuple[int, int, float]] = []
    for step in range(count - 1):
        one, two = sorted(divmod(int(apart_NN.argmin()), count))
        merges.append((number[one], number[two], float(apart_NN[one, two])))
        sizes = len(rows[one]), len(rows[two])
        mean_N = (sizes[0] * apart_NN[one] + sizes[1] * apart_NN[two]) / sum(sizes)
        apart_NN[one], apart_NN[:, one] = mean_N, mean_N
        apart_NN[two], apart_NN[:, two], apart_NN[one, one] = np.inf, np.inf, np.inf
        # Both rows become one, each forward or backward, so that those which meet are nearest.
        ways = product((rows[one], rows[one][::-1]), (rows[two], rows[two][::-1]))
        first, second = min(ways, key=lambda pair: distance_NN[pair[0][-1], pair[1][0]])
        number[one], rows[one] = count + step, first + second
    return Tree(rows[0], tuple(merges))
