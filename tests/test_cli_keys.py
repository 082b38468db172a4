"""What `attnscope keys` gives: what every token receives, against sums over `output_attentions`."""

import io
import json
import re

import pyarrow.parquet as pq
import pytest

from attnscope.inputs.prompt import from_text
from helpers.command_line import SENTENCE, call
from helpers.own import attentions


def ran(*arguments):
    return call("keys", "--text", SENTENCE, *arguments, "--quiet").silent()


@pytest.fixture(scope="module")
def received(demo):
    """{(layer, head): the mean weight on every key}, as Python sums it."""
    layers = attentions(demo.model, from_text(demo.tokenizer, SENTENCE).ids)
    return {
        (layer, head): [sum(float(row[key]) for row in matrix) / len(matrix) for key in range(len(matrix))]
        for layer, matrices in enumerate(layers)
        for head, matrix in enumerate(matrices)
    }


@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_a_row_per_token_says_what_it_receives_and_who_rests_on_it(demo, received, engine):
    rows = ran("--format", "jsonl", "--engine", engine).records
    tokens = from_text(demo.tokenizer, SENTENCE).tokens
    assert sorted((row["position"], row["token"]) for row in rows) == list(enumerate(tokens))
    assert [row["received"] for row in rows] == sorted((row["received"] for row in rows), reverse=True)
    for row in rows:
        key = row["position"]
        mean = sum(masses[key] for masses in received.values()) / len(received)
        assert row["received"] == pytest.approx(mean, abs=1e-5)
        here = {
            name: masses[key] for name, masses in received.items() if masses[key] == max(masses) and masses[key] > 0.3
        }
        best = sorted(here, key=lambda name: -here[name])
        assert row["heads"] == len(best)
        assert row["resting"] == ", ".join(f"L{layer}H{head} {here[layer, head]:.2f}" for layer, head in best)
    assert sum(row["heads"] for row in rows) > 0


def test_of_the_selected_heads_alone(received):
    rows = ran("--select", "1.2").rows
    masses = {int(row["position"]): float(row["received"]) for row in rows}
    assert [masses[key] for key in range(len(masses))] == pytest.approx(received[1, 2], abs=1e-6)
    assert {row["resting"] for row in rows} <= {"", f"L1H2 {max(received[1, 2]):.2f}"}


@pytest.mark.parametrize(("query", "positions"), [("last", [8]), ("bank", [3, 8])])
def test_of_chosen_queries_alone(demo, query, positions):
    """The mean over those rows, with each head at the key that gets most of it."""
    layers = attentions(demo.model, from_text(demo.tokenizer, SENTENCE).ids)
    means = {
        f"L{layer}H{head}": [sum(float(matrix[q][key]) for q in positions) / len(positions) for key in range(9)]
        for layer, matrices in enumerate(layers)
        for head, matrix in enumerate(matrices)
    }
    for row in ran("--query", query, "--format", "jsonl").records:
        key = row["position"]
        assert row["received"] == pytest.approx(sum(mean[key] for mean in means.values()) / len(means), abs=1e-5)
        heads = {name for name, mean in means.items() if mean[key] == max(mean) and mean[key] > 0.3}
        assert set(re.findall(r"L\d+H\d+", row["resting"])) == heads
    named = ran("--query", "it", "--define", f"it={query}")
    assert named.out == ran("--query", query).out != ran().out


def test_every_format_and_the_file_hold_the_same(tmp_path):
    result = ran("--out", str(tmp_path))
    assert (tmp_path / "keys.csv").read_bytes() == result.out
    assert json.loads((tmp_path / "manifest.json").read_text())["files"].keys() == {"keys.csv"}
    found = pq.read_table(io.BytesIO(ran("--format", "parquet").out)).to_pylist()
    assert ran("--format", "jsonl").records == [row | {"received": pytest.approx(row["received"])} for row in found]


def test_a_terminal_gets_those_that_receive_most():
    shown = call("keys", "--text", SENTENCE, "--top", "3", columns=100).ok()
    best = sorted(ran().rows, key=lambda row: -float(row["received"]))[:3]
    body = [line for line in shown.out.decode().splitlines() if re.match(r"\s+\d+  \S", line)]
    assert [int(line.split()[0]) for line in body] == [int(row["position"]) for row in best]
    assert "3 of 9 rows" in shown.err
    assert "L3H1 1.00, L3H0 " in body[0]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_lists_every_head_and_says_what_the_columns_are(columns):
    shown = call("keys", "--text", SENTENCE, columns=columns).ok()
    printed = re.sub(r"\x1b\[[0-9;]*m", "", shown.out.decode())
    assert "…" not in printed
    assert max(map(len, printed.splitlines())) <= columns
    heads = [name for row in ran().rows for name in re.findall(r"L\d+H\d+", row["resting"])]
    assert len(heads) > 10
    assert sorted(re.findall(r"L\d+H\d+", printed)) == sorted(heads)
    assert "top key of" in printed
    assert "resting" not in printed
    assert "received: mean weight on the token as a key, over queries and heads" in shown.err
    assert "with a mean weight above 0.3; top key of: each of them" in shown.err
    assert "received: " not in call("keys", "--text", SENTENCE).err
