"""Every metric on matrices whose scores are known by hand: uniform, identity, shifted by one, block-diagonal.

Shapes: B text, H head, Q query, K key.
"""

import math
from collections.abc import Callable, Iterable

import pytest
import torch

import attnscope
from attnscope.attention.operator import AttentionOperator, DenseAttention
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.attention.tiling import TiledAttention
from attnscope.metrics.metrics import KNOWN, SIGNED, Texts, measure

N, PERIOD, BLOCK, NAMED = 48, 5, 8, 4  # tokens; they repeat after 5; keys 1, 5, 9, ... are named
AT = 28  # where an answer begins, in the middle of a block
TWO, THREE, ALL, AGAIN = range(1, N), range(2, N), range(N), range(PERIOD, N)  # rows that count
ANSWER = range(AT, N - 1)


def mean(rows: Iterable[int], value: Callable[[int], float]) -> float:
    values = [value(i) for i in rows]
    return sum(values) / len(values)


def named(low: int, high: int) -> int:
    """How many of the keys from `low` to `high` are named."""
    return sum(key % NAMED == 1 for key in range(low, high + 1))


def streaming(width: int) -> float:
    """Uniform attention: of i + 1 keys 4 + width are kept."""
    return mean(TWO, lambda i: min(4 + width, i + 1) / (i + 1))


ONE_KEY = {  # what every head scores that gives each row to one key, which is not key 0 but in the first rows
    "off_token_mass": 0,
    "duplicate_token": 0,
    "induction": 0,
    "entropy": 0,
    "entropy_normalised": 0,
    "effective_keys": 1,
    "confidence": 1,
    "local_mass_32": 1,
    "focus": 1,
    "keys_95": 1,
    "streaming_mass_32": 1,
    "streaming_mass_128": 1,
    "streaming_mass_512": 1,
}
BY_HAND: dict[str, dict[str, float]] = {
    "uniform": {
        "previous_token": mean(TWO, lambda i: 1 / (i + 1)),
        "self": mean(TWO, lambda i: 1 / (i + 1)),
        "sink": mean(ALL, lambda i: 1 / (i + 1)),
        "off_token_mass": 0,
        "duplicate_token": mean(AGAIN, lambda i: i // PERIOD / (i + 1)),
        "induction": mean(AGAIN, lambda i: i // PERIOD / (i + 1)),
        "entropy": mean(TWO, lambda i: math.log(i + 1)),
        "entropy_normalised": 1,
        "effective_keys": mean(TWO, lambda i: i + 1),
        "confidence": mean(TWO, lambda i: 1 / (i + 1)),
        "distance": mean(TWO, lambda i: i / 2),
        "local_mass_32": mean(TWO, lambda i: min(32, i + 1) / (i + 1)),
        "focus": 0,
        "keys_95": mean(TWO, lambda i: -(-95 * (i + 1) // 100)),
        "streaming_mass_32": streaming(32),
        "streaming_mass_128": 1,
        "streaming_mass_512": 1,
        "lookback": 1 / 2,
        "lookback_without_key0": 1 / 2,
        "mass": mean(TWO, lambda i: named(0, i) / (i + 1)),
    },
    "identity": {
        **ONE_KEY,
        "previous_token": 0,
        "self": 1,
        "sink": 1 / N,
        "distance": 0,
        "lookback": 0,
        "lookback_without_key0": 0,
        "mass": mean(TWO, lambda i: named(i, i)),
    },
    "shifted": {
        **ONE_KEY,
        "previous_token": 1,
        "self": 0,
        "sink": 2 / N,
        "distance": 1,
        "lookback": mean(ANSWER, lambda i: i == AT),  # its first row alone looks at the prompt
        "lookback_without_key0": mean(ANSWER, lambda i: i == AT),
        "mass": mean(TWO, lambda i: named(i - 1, i - 1)),
    },
    "block": {  # the i % 8 + 1 keys of a query's own block, as much each
        "previous_token": mean(TWO, lambda i: (i % BLOCK > 0) / (i % BLOCK + 1)),
        "self": mean(TWO, lambda i: 1 / (i % BLOCK + 1)),
        "sink": sum(1 / (i + 1) for i in range(BLOCK)) / N,
        "off_token_mass": 0,
        "duplicate_token": mean(AGAIN, lambda i: (i % BLOCK >= PERIOD) / (i % BLOCK + 1)),
        "induction": mean(AGAIN, lambda i: (i % BLOCK >= PERIOD - 1) / (i % BLOCK + 1)),
        "entropy": mean(TWO, lambda i: math.log(i % BLOCK + 1)),
        "entropy_normalised": mean(TWO, lambda i: math.log(i % BLOCK + 1) / math.log(i + 1)),
        "effective_keys": mean(TWO, lambda i: i % BLOCK + 1),
        "confidence": mean(TWO, lambda i: 1 / (i % BLOCK + 1)),
        "distance": mean(TWO, lambda i: i % BLOCK / 2),
        "local_mass_32": 1,
        # in the first block the row without key 0 is uniform over all that it may see
        "focus": mean(THREE, lambda i: 0 if i < BLOCK else 1 - math.log(i % BLOCK + 1) / math.log(i)),
        "keys_95": mean(TWO, lambda i: i % BLOCK + 1),  # 95 % of up to 8 equal keys takes them all
        "streaming_mass_32": 1,
        "streaming_mass_128": 1,
        "streaming_mass_512": 1,
        # four keys of the prompt are in the block in which the answer begins, as heavy as each of the answer's
        "lookback": mean(ANSWER, lambda i: (i < 32) * (4 / AT) / (4 / AT + 1)),
        "lookback_without_key0": mean(ANSWER, lambda i: (i < 32) * (4 / (AT - 1)) / (4 / (AT - 1) + 1)),
        "mass": mean(TWO, lambda i: named(i - i % BLOCK, i) / (i % BLOCK + 1)),
    },
}


def matrix(pattern: str) -> torch.Tensor:
    """(Q, K), rows that sum to 1."""
    query, key = torch.arange(N)[:, None], torch.arange(N)
    seen = {
        "uniform": key <= query,
        "identity": key == query,
        "shifted": key == (query - 1).clamp_min(0),
        "block": (key <= query) & (key // BLOCK == query // BLOCK),
    }[pattern]
    return seen / seen.sum(-1, keepdim=True)


def operator(pattern: str, engine: str) -> AttentionOperator:
    """The pattern as weights, and as logits that are tiled; the queries may see all keys before them."""
    weights, visible = matrix(pattern)[None, None], Visibility(N, N)
    if engine == "dense":
        return DenseAttention(weights, visible)
    zeros = torch.zeros(1, 1, N, 4)
    return TiledAttention(AttentionSpec(zeros, zeros, zeros, 1.0, visible, bias=(weights > 0).float().sub(1) * 1e4))


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("pattern", BY_HAND)
def test_every_metric_scores_what_one_expects_by_hand(pattern: str, engine: str) -> None:
    assert set(BY_HAND[pattern]) == KNOWN.keys() - SIGNED  # a new metric says here what it scores
    ids_BT = torch.arange(N)[None] % PERIOD
    named_BT = torch.arange(N)[None] % NAMED == 1
    texts = Texts(ids_BT, torch.tensor([N]), key_BT=named_BT, answer_B=torch.tensor([AT]))
    scores = measure(operator(pattern, engine), texts, list(KNOWN))
    found = {name: float(score[0, 0]) for name, score in scores.items()}
    of_signed_maps = dict.fromkeys(SIGNED, math.nan)
    assert found == pytest.approx(BY_HAND[pattern] | of_signed_maps, abs=2e-6, rel=2e-6, nan_ok=True)


def test_induction_is_that_of_transformer_lens() -> None:
    """Its head detector's score ("mul") is ours times the rows that repeat over all rows.

    https://github.com/TransformerLensOrg/TransformerLens, transformer_lens/head_detector.py: the pattern of equal
    earlier tokens, rolled one key to the right, times the weights, summed, over the sum of all weights.
    """
    loaded, rows = attnscope.load("demo"), 50
    begin, *drawn = [loaded.tokenizer.bos_token_id, *range(100, 100 + rows)]
    ids = [begin, *drawn, *drawn]
    with torch.no_grad():
        matrices = loaded.model(torch.tensor([ids]), output_attentions=True).attentions
    equal = [[float(j < i and ids[i] == ids[j]) for j in range(len(ids))] for i in range(len(ids))]
    pattern = torch.tensor([[0.0, *row[:-1]] for row in equal]).tril()
    seen = attnscope.capture(loaded, ids)
    ours = {(head.layer, head.head): head.score["induction"] for head in seen.heads}
    theirs = {
        (layer, head): float((weights * pattern).sum() / weights.sum())
        for layer, of_heads in enumerate(matrices)
        for head, weights in enumerate(of_heads[0])
    }
    assert rows / len(ids) == pytest.approx(0.495, abs=1e-4)
    assert {place: score * rows / len(ids) for place, score in ours.items()} == pytest.approx(theirs, abs=1e-5)
    assert sorted(theirs, key=theirs.__getitem__)[-2:] in ([(3, 0), (3, 1)], [(3, 1), (3, 0)])
