"""`attnscope depth`: what each layer reads of earlier blocks, spelled again with hooks and loops."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import attnscope
from attnscope.errors import ModelError
from attnscope.studies import depth as rules
from attnscope.studies import residual_tape
from attnscope.studies.attribution_records import Block, DepthParts, DepthPoint
from helpers.command_line import call
from helpers.families import WITHOUT_ATTENTION, few
from helpers.folders import with_tokenizer
from helpers.parity_models import TYPES, ids_for, rouse, roused_model
from helpers.stack_families import ids as stack_ids
from helpers.stack_families import inputs_of, tiny
from helpers.why_families import wrapped

RIVER = "the bank of the river, the bank of the"
COLUMNS = ["stack", "layer", "use", "position", "token", "stream", "block", "weight", "share", "norm"]
REFUSED = {  # type: part of the message
    "reformer": "cannot be read",
    "blt": "reads bytes and patches",
    "xlnet": "is not made of what enters it",  # tokens first, and two streams
}
READ_OTHERWISE = ("musicgen", "musicgen_melody")  # rows of ids for one text
ALSO = ("cpmant", "gemma3n_text", "deepseek_v4", "falcon_h1", "mamba2", "qwen4_exp_text")


def depths(model: Any, ids: Any, **how: Any) -> DepthParts:
    numbers = ids[0].tolist()
    return attnscope.depth(wrapped(model), numbers, **how).parts


def numbers(point: DepthPoint, stream: int = 0) -> dict[str, float]:
    return dict(zip(point.blocks, point.number_CSQ[:, stream].mean(-1).tolist(), strict=True))


def outputs(model: Any, ids: Any, names: list[str]) -> dict[str, torch.Tensor]:
    """What some modules gave in a pass, and what they were given, `NAME in`."""
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            kept[name] = (output[0] if isinstance(output, tuple) else output)[0]
            kept[f"{name} in"] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name), with_kwargs=True) for name in names]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return kept


def by_hand(part_TE: torch.Tensor, residual_TE: torch.Tensor) -> float:
    """The mean over tokens of <part, residual> / |residual|^2, in loops."""
    shares = []
    for part_E, residual_E in zip(part_TE.double().tolist(), residual_TE.double().tolist(), strict=True):
        product = sum(one * other for one, other in zip(part_E, residual_E, strict=True))
        shares.append(product / sum(one * one for one in residual_E))
    return sum(shares) / len(shares)


@pytest.mark.parametrize(
    ("family", "attention", "mlp", "times"),
    [
        ("llama", "self_attn", "mlp", 1.0),
        ("gemma2", "post_attention_layernorm", "post_feedforward_layernorm", 1.0),  # a norm behind is a part of it
        ("granite", "self_attn", "mlp", 0.22),  # and so is a multiplier
        ("gpt_neox", "attention", "mlp", 1.0),  # both are given the same residual
    ],
)
def test_shares_are_those_that_loops_make_of_what_modules_gave(family, attention, mlp, times):
    overrides = {"residual_multiplier": times} if times != 1 else {}
    model, ids = roused_model(family, **overrides), ids_for(family)[:1]
    base = model.base_model_prefix
    layers = [f"{base}.layers.{layer}" for layer in range(4)]
    kept = outputs(model, ids, [f"{layer}{part}" for layer in layers for part in ("", f".{attention}", f".{mlp}")])
    parts = depths(model, ids)
    assert parts.error < 1e-6
    reads = {point.layer: point for point in parts.points}
    final = kept[f"{layers[-1]}"]
    expected = {"embedding": by_hand(kept[f"{layers[0]} in"], final)}
    for number, layer in enumerate(layers):
        for kind, part in (("attention", attention), ("mlp", mlp)):
            expected[f"L{number} {kind}"] = by_hand(times * kept[f"{layer}.{part}"], final)
    assert numbers(reads[None]) == pytest.approx(expected, abs=1e-6)
    assert list(numbers(reads[None])) == list(expected)  # in the order of the model
    entering = {"embedding": by_hand(kept[f"{layers[0]} in"], kept[f"{layers[1]} in"])}
    assert numbers(reads[1])["embedding"] == pytest.approx(entering["embedding"], abs=1e-6)
    norm = (times * kept[f"{layers[2]}.{mlp}"]).norm(dim=-1).mean()
    assert dict(zip(reads[None].blocks, reads[None].norm_CSQ[:, 0, 0], strict=True))["L2 mlp"] == pytest.approx(
        float(norm), rel=1e-5
    )


@pytest.mark.parametrize("family", few(sorted({*TYPES, *WITHOUT_ATTENTION} - {*REFUSED, *READ_OTHERWISE}), also=ALSO))
def test_parts_sum_to_each_residual(family):
    parts = depths(roused_model(family), ids_for(family)[:1])
    assert parts.error <= (rules.MIXED if parts.measure == "weight" else rules.ALLOWED)
    for point in parts.points:
        assert point.number_CSQ.sum(0) == pytest.approx(1.0, abs=1e-4), point.use
    written = {block.partition(" ")[0] for block in parts.points[-1].blocks}
    assert parts.measure == "weight" or len(written - {"embedding"}) == len(parts.points) - 1  # every layer writes


def test_a_model_without_attention_reads_the_text_once_and_its_mixers_are_its_blocks():
    model, ids = roused_model("mamba2"), ids_for("mamba2")[:1]
    read: list[torch.Tensor] = []
    handle = model.backbone.layers[0].mixer.register_forward_hook(lambda module, args, output: read.append(args[0]))
    kept = outputs(model, ids, [f"backbone.layers.{layer}.mixer" for layer in range(4)] + ["backbone.norm_f"])
    read.clear()
    parts = depths(model, ids)
    handle.remove()
    assert [hidden.shape[1] for hidden in read].count(ids.shape[1]) == 1  # others are of a few tokens
    final = kept["backbone.norm_f in"]
    expected = {f"L{layer} mixer": by_hand(kept[f"backbone.layers.{layer}.mixer"], final) for layer in range(4)}
    written = numbers(parts.points[-1])
    assert list(written) == ["embedding", *expected]
    assert written.pop("embedding") == pytest.approx(1 - sum(expected.values()), abs=1e-6)
    assert written == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", few(REFUSED, also=["xlnet"]))
def test_a_residual_that_cannot_be_followed_is_refused_with_the_reason(family):
    with pytest.raises(ModelError, match=REFUSED[family]):
        depths(roused_model(family), ids_for(family)[:1])


def test_an_addition_that_is_read_wrongly_is_seen_in_the_sum(monkeypatch):
    monkeypatch.setitem(residual_tape.SUMS, "add", -1)
    with pytest.raises(ModelError, match="differs from the residual of layer 1"):
        depths(roused_model("llama"), ids_for("llama")[:1])


# Gemma 3n adds to some of its streams in place; Qwen4's lie one after the other in one vector.
@pytest.mark.parametrize("family", ["deepseek_v4", "gemma3n_text", "qwen4_exp_text"])
def test_streams_of_a_residual_are_kept_apart(family):
    parts = depths(roused_model(family), ids_for(family)[:1])
    streams = parts.points[1].number_CSQ
    assert streams.shape == (3, 4, 1)
    assert streams.sum(0) == pytest.approx(1.0, abs=1e-5)
    assert abs(streams[:, 0] - streams[:, 1]).max() > 1e-3  # they are not one


def test_streams_one_after_the_other_in_a_vector_are_of_the_width_that_attention_writes():
    model, ids = roused_model("qwen4_exp_text"), ids_for("qwen4_exp_text")[:1]
    kept = outputs(model, ids, ["model.layers.0"])
    width = model.config.hidden_size
    shares = depths(model, ids).points[1].number_CSQ[0, :, 0]
    expected = [
        by_hand(kept["model.layers.0 in"][:, first : first + width], kept["model.layers.0"][:, first : first + width])
        for first in range(0, 4 * width, width)
    ]
    assert shares == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "layer", "blocks"),
    [
        ("falcon_h1", 0, ["mamba", "attention", "mlp"]),  # side by side, each with a multiplier of its own
        ("zamba2", 0, ["mamba"]),
        ("nemotron_h", 0, ["mixer"]),
        ("qwen3_next", 0, ["linear_attn", "mlp"]),
        ("bert", 3, ["attention", "mlp", "rest"]),  # the bias of a norm that all of it passes
        ("deepseek_v4", 0, ["attention", "mlp"]),
        ("mamba2", 0, ["mixer"]),  # no layer attends
        ("xlstm", 0, ["mlstm_layer", "mlp"]),
    ],
)
def test_blocks_are_named_by_what_they_do_or_as_the_model_calls_them(family, layer, blocks):
    names = depths(roused_model(family), ids_for(family)[:1]).points[-1].blocks
    assert [name.partition(" ")[2] for name in names if name.startswith(f"L{layer} ")] == blocks


@pytest.mark.parametrize(("family", "mixer"), [("qwen3_next", "linear_attn"), ("kimi_linear", "self_attn")])
def test_a_linear_layer_is_a_block_of_its_own_for_one_token_too(family, mixer):
    """Without other tokens it gives the token what it gives it with them, as an MLP does."""
    model = roused_model(family)
    parts = depths(model, ids_for(family)[:1, :1])
    blocks = parts.points[1].blocks
    assert list(blocks) == ["embedding", f"L0 {mixer}", "L0 mlp"]
    entering = next(path for path, part in model.named_modules() if isinstance(part, torch.nn.ModuleList))
    names = [f"{entering}.0.{mixer}", f"{entering}.1"]
    kept = outputs(model, ids_for(family)[:1, :1], names)
    share = numbers(parts.points[1])[f"L0 {mixer}"]
    assert share == pytest.approx(by_hand(kept[names[0]], kept[f"{names[1]} in"]), abs=1e-5)


def test_a_model_that_mixes_blocks_gives_its_weights_times_the_stack(monkeypatch):
    model, ids = roused_model("inkling2_text", n_layers_per_attn_res_block=2), ids_for("inkling2_text")[:1]
    given: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        given.append((torch.cat([args[0], args[1].unsqueeze(-2)], -2), module.query, torch.stack(output, -2)))

    for module in model.modules():
        if type(module).__name__.endswith("BlockAttentionResidual"):
            assert module.query.abs().max() > 0.01  # a fresh model's are zero
            module.register_forward_hook(keep)
    with torch.no_grad():
        model(ids)
    expected = []
    for stack_BTCE, query, output_BTNE in given:
        for number, query_E in enumerate(query.view(-1, query.shape[-1])):
            rows = []
            for token, state_CE in enumerate(stack_BTCE[0].double()):
                normed = [state_E / (state_E.square().mean() + 1e-6).sqrt() for state_E in state_CE]
                logits = torch.stack([(state_E * query_E).sum() / len(query_E) ** 0.5 for state_E in normed])
                weights = logits.exp() / logits.exp().sum()
                mixed = sum(weight * state_E for weight, state_E in zip(weights, normed, strict=True))
                assert (mixed - output_BTNE[0, token, number]).norm() < 1e-5 * mixed.norm()
                rows.append(weights)
            expected.append(torch.stack(rows))
    parts = depths(model, ids, query="0,5,last")
    assert parts.measure == "weight"
    assert parts.error < rules.MIXED
    assert [(point.layer, point.use) for point in parts.points[-6:]] == [
        *((2, "mlp"), (3, "q"), (3, "k"), (3, "v"), (3, "mlp"), (None, "final")),
    ]
    assert [point.blocks for point in parts.points[-2:]] == [
        ("embedding", "L0-L1", "L2 + L3 attention"),
        ("embedding", "L0-L1", "L2-L3"),
    ]
    for point, weight_TC in zip(parts.points, expected, strict=True):
        assert point.tokens == (0, 5, ids.shape[1] - 1)
        torch.testing.assert_close(
            torch.tensor(point.number_CSQ[:, 0]).T, weight_TC[list(point.tokens)], atol=1e-5, rtol=1e-4
        )
    monkeypatch.setattr(rules, "MIXED", 0.0)
    with pytest.raises(ModelError, match="times their states differ"):
        depths(model, ids)


@pytest.mark.parametrize(("family", "stacks"), [("bert", {"encoder": 5}), ("t5", {"encoder": 3, "decoder": 3})])
def test_encoders_and_both_stacks_of_an_encoder_decoder(family, stacks):
    model = tiny(family, **({"num_layers": 2, "num_decoder_layers": 2} if family == "t5" else {}))
    rouse(model)
    target = inputs_of(model).get("decoder_input_ids")
    numbers = None if target is None else target[0].tolist()
    found = attnscope.depth(wrapped(model), stack_ids(12, texts=1)[0].tolist(), target=numbers)
    counts = {stack: sum(point.stack == stack for point in found.parts.points) for stack in stacks}
    assert counts == stacks
    assert found.parts.error < rules.ALLOWED
    if family == "t5":
        assert "L1 cross attention" in found.parts.points[-1].blocks


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_it_is_the_same_in_inference_mode(family):
    made = {}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            made[mode] = depths(roused_model(family, hidden_size=64), ids_for(family)[:1])
    for own, other in zip(*(parts.points for parts in made.values()), strict=True):
        assert own.blocks == other.blocks
        assert own.number_CSQ == pytest.approx(other.number_CSQ, abs=1e-6)


def test_half_precision_is_allowed_what_it_rounds():
    model = roused_model("llama").to(torch.bfloat16)
    assert 1e-5 < depths(model, ids_for("llama")[:1]).error < 0.05


def test_blocks_of_one_state_are_named_together():
    layers = [Block(kind, layer) for layer in (0, 1, 3) for kind in ("attention", "mlp")]
    assert (
        rules.names_of([Block("embedding"), *layers, Block("attention", 4)]) == "embedding + L0-L1 + L3 + L4 attention"
    )


# The command.


def test_a_row_per_reader_and_block_in_a_pipe():
    found = call("depth", RIVER).ok()
    assert list(found.rows[0]) == COLUMNS
    assert len(found.rows) == sum(1 + 2 * layer for layer in range(5))
    assert {(row["use"], row["layer"]) for row in found.rows} == {
        ("final", ""),
        *(("layer", str(at)) for at in range(4)),
    }
    for use in ("0", "3", ""):
        assert sum(float(row["share"]) for row in found.rows if row["layer"] == use) == pytest.approx(1, abs=1e-5)
    assert "the parts sum to each residual within" in found.err


def test_query_gives_tokens_rows_of_their_own_and_their_mean_is_the_mean():
    rows = call("depth", RIVER, "--query", "*", "--format", "jsonl", "-q").silent().records
    means = call("depth", RIVER, "-q", "--format", "jsonl").silent().records
    assert {row["position"] for row in rows} == set(range(11))
    assert rows[0]["token"] == "<s>"
    for mean in means:
        own = [row for row in rows if (row["layer"], row["block"]) == (mean["layer"], mean["block"])]
        for name in ("share", "norm"):
            assert sum(row[name] for row in own) / len(own) == pytest.approx(mean[name], abs=1e-5)


def test_a_terminal_has_a_row_per_reader_with_its_largest_blocks():
    found = call("depth", RIVER, "--format", "table", columns=100).ok()
    [final] = [line for line in found.lines if "final" in line]
    shares = [float(word.strip(",")) for word in final.split() if word[0] in "+-"]
    assert len(shares) == 4
    assert all(abs(one) >= abs(other) for one, other in pairwise(shares))
    assert max(map(len, found.lines)) <= 100


def test_the_folder_has_table_facts_and_figure_and_is_of_one_text(tmp_path: Path):
    folder = tmp_path / "depth"
    call("depth", RIVER, "--out", str(folder)).ok()
    assert sorted(path.name for path in folder.iterdir()) == ["depth.html", "depth.json", "depth.parquet", "depth.png"]
    assert pq.read_table(folder / "depth.parquet").column_names == COLUMNS
    other = call("depth", "the cat sat on the mat", "--out", str(folder))
    assert other.code == 2
    assert "--force" in other.err


@pytest.mark.e2e
def test_force_writes_over_the_depth_of_another_text(tmp_path: Path):
    for text in (RIVER, "the cat sat on the mat"):
        call("depth", text, "--out", str(tmp_path / "depth"), "--force").ok()
    assert pq.read_table(tmp_path / "depth" / "depth.parquet").num_rows == sum(1 + 2 * layer for layer in range(5))
    assert '"tokens": 8' in (tmp_path / "depth" / "depth.json").read_text("utf-8")


def test_the_call_and_the_command_have_the_same_numbers(demo):
    table = attnscope.depth(demo, RIVER, query="last").table().to_pylist()
    rows = call("depth", RIVER, "--query", "last", "--format", "jsonl", "-q").silent().records
    for own, other in zip(table, rows, strict=True):
        assert own["block"] == other["block"]
        assert own["share"] == pytest.approx(other["share"], abs=1e-6)


def test_what_is_refused_is_said_in_a_line(tmp_path: Path):
    folder = with_tokenizer(roused_model("xlnet"), tmp_path / "xlnet")
    (tmp_path / "ids.json").write_text("[5, 6, 7, 8]")
    refused = call("depth", "--ids", str(tmp_path / "ids.json"), "-m", str(folder))
    assert refused.code == 3
    assert "what leaves the last layer is not made of what enters it" in refused.err
    assert call("depth", RIVER, "--query", "elephant").code == 4
