"""Encoders and encoder-decoders compared: each stack against loops over the family's own matrices, and the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import attnscope
from attnscope.errors import ModelError
from attnscope.export.study_figures import panels, signed_maps
from attnscope.hooks import generation
from attnscope.inputs.prompt import from_ids
from attnscope.metrics.metrics import METRICS
from attnscope.model.selection import CROSS, DECODER, ENCODER
from attnscope.observe.request import CaptureSpec
from attnscope.observe.run import prepare
from attnscope.studies.baseline import beside_baseline, read_numbers
from attnscope.studies.comparison import OneSide, compare_heads, heads_table, kept_bytes, metrics_table, tokens_table
from attnscope.studies.gate import judge, parse_gate
from helpers.command_line import call
from helpers.compared import differences
from helpers.folders import with_tokenizer
from helpers.sounds import samples, saved_whisper, write_wav
from helpers.stack_families import own, tiny

FIRST, OTHER = "the financial bank is on the river", "the old bank stood on a small river"
TARGETS = ("the bank was old", "a green bank was old")
STACKS = (ENCODER, DECODER, CROSS)
START = {"vocab_size": 2000, "decoder_start_token_id": 0}
MODELS = {
    "bert": {"vocab_size": 2000, "num_hidden_layers": 2},
    "t5": {**START, "num_layers": 2, "num_decoder_layers": 2},
    "bart": {**START, "encoder_layers": 2, "decoder_layers": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    made = {name: tiny(name, **how) for name, how in MODELS.items()} | {"t5b": tiny("t5", **MODELS["t5"])}
    with torch.no_grad():
        made["t5b"].decoder.block[1].layer[1].EncDecAttention.q.weight[:16] *= 1.5  # L1H0
    return {name: str(with_tokenizer(model, place / name)) for name, model in made.items()}


@pytest.fixture(scope="module")
def loaded(folders):
    return {name: attnscope.load(folder, device="cpu") for name, folder in folders.items()}


def reading(loaded, text, target=None, engine="eager"):
    run = prepare(loaded, CaptureSpec(text, engine=engine, target=target))
    return OneSide(loaded, run.prompt, run.engine, run.source)


def matrices(one):
    """The family's own weights by stack and layer, (H, Q, K) lists."""
    target = {"decoder_input_ids": torch.tensor([one.prompt.ids])} if one.source else {}
    found = own(one.loaded.model, torch.tensor([(one.source or one.prompt).ids]), **target)
    return {key: weights[0].double().tolist() for key, weights in found.items()}


def check(found, first, other):
    """js, lost mass and maps of every head are what loops over the families' own matrices say."""
    text = (first.source or first.prompt, other.source or other.prompt)
    target = (first.prompt, other.prompt)
    axes = {ENCODER: (text, text), DECODER: (target, target), CROSS: (target, text)}
    ours, theirs = matrices(first), matrices(other)
    places = {(kind, *head): at for at, (kind, head) in enumerate(zip(found.head_stacks, found.heads, strict=True))}
    for kind, layer in ours:
        maps = next((one for one in signed_maps(found.pair, kind) if one.layer == layer), None)
        for head, expected in enumerate(differences(ours[kind, layer], theirs[kind, layer], *axes[kind])):
            place = places.pop((kind, layer, head))
            assert found.js.effect[place] == pytest.approx(expected.js, abs=1e-6)
            assert found.lost_SN[0, place] == pytest.approx(expected.lost, abs=1e-6)
            assert found.other_lost_SN[0, place] == pytest.approx(expected.other_lost, abs=1e-6)
            if maps is not None:
                seen = np.isfinite(maps.values_HQK[head])
                assert maps.values_HQK[head][seen] == pytest.approx(expected.map[seen], abs=1e-6)
                assert seen.all() == (kind != DECODER)
    assert not places


def every_head(loaded):
    stacks = loaded.geometry.stacks
    return {kind: {at: range(layer.heads) for at, layer in layers.items()} for kind, layers in stacks.items()}


@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_each_stack_of_an_encoder_decoder_has_its_own_tokens_aligned(loaded, family, engine):
    first, other = (
        reading(loaded[family], text, target, engine) for text, target in zip((FIRST, OTHER), TARGETS, strict=True)
    )
    found = compare_heads([(first, other)], maps=every_head(loaded[family]))
    assert list(found.stacks) == list(STACKS)
    assert found.pair.shared.alone[1]  # the decoder's
    assert found.pair.texts[0].units.alone[1]
    check(found, first, other)


def test_an_encoder_sees_both_ways(loaded):
    first, other = reading(loaded["bert"], FIRST), reading(loaded["bert"], OTHER)
    check(compare_heads([(first, other)], maps=every_head(loaded["bert"])), first, other)


def test_metrics_are_those_of_an_observation_and_of_the_stacks_that_they_speak_of(loaded):
    """Of BERT induction was once measured, as if it read from left to right."""
    for name, target in (("bert", None), ("t5", TARGETS[0])):
        one = reading(loaded[name], FIRST, target)
        found = compare_heads([(one, one)])
        seen = attnscope.capture(loaded[name], FIRST, target=target)
        for metric, score in seen.every.scores.items():
            assert found.metrics[metric][0][0] == pytest.approx(score.value, abs=1e-6, nan_ok=True)
        assert not found.js_SN.any()
        induction = found.metrics["induction"][0][0]
        assert np.isnan(induction[[kind != DECODER for kind in found.head_stacks]]).all()


def test_the_head_whose_queries_were_changed_is_named_first(loaded):
    """And no head before it differs, nor any of the encoder."""
    first, other = (reading(loaded[name], FIRST, TARGETS[0]) for name in ("t5", "t5b"))
    found = compare_heads([(first, other)])
    assert [found.name(place) for place in found.order[:1]] == ["cross L1H0"]
    differing = {found.name(place) for place in np.flatnonzero(found.js_SN[0])}
    assert not any(name.startswith(("encoder", "L0", "L1", "cross L0")) for name in differing)


@pytest.mark.parametrize("name", ["t5", "bart", "bert"])
def test_a_gate_holds_every_stack(loaded, name):
    """By both engines; a changed head is named with its stack, and by an atlas where that is of the stack."""
    target = None if name == "bert" else TARGETS[0]
    sides = [reading(loaded[name], FIRST, target, engine) for engine in ("eager", "fused")]
    verdict = judge(compare_heads([tuple(sides)], changes=True), parse_gate("visible=same,js<1e-6,weight<1e-4"))
    assert verdict.holds, verdict.lines
    assert judge(beside_baseline(*map(read_numbers, ([sides[1]], [sides[0]]))), parse_gate("visible=same")).holds
    if name == "t5":
        other = reading(loaded["t5b"], FIRST, target)
        atlas = {(1, 0): ("induction",), (0, 0): ("sink",)}
        verdict = judge(compare_heads([(sides[0], other)], changes=True), parse_gate("weight<1e-5"), atlas=atlas)
        names = [line.partition(":")[0] for line in verdict.lines]
        assert any(line.startswith("cross L1H0") for line in names)
        assert not any("induction" in line for line in names if line.startswith("cross"))


def test_another_dtype_is_another_side(loaded):
    """As a person has it in Python: the same model, rounded."""
    half = replace(loaded["t5"], model=tiny("t5", **MODELS["t5"]).bfloat16(), dtype="bfloat16")
    one, other = reading(loaded["t5"], FIRST, TARGETS[0]), reading(half, FIRST, TARGETS[0])
    found = compare_heads([(one, other)])
    assert 0 < np.nanmax(found.js_SN) < 0.2
    assert not found.failures


def test_a_stack_whose_texts_share_nothing_is_null(loaded):
    """As a source may be of another tokenizer, which puts no begin token before it."""
    sides = ("bank", "the bank was old"), ("an old boat", "the bank is old")
    first, other = (
        reading(loaded["t5"], source, target)._replace(source=without_special(loaded["t5"], source))
        for source, target in sides
    )
    found = compare_heads([(first, other)])
    for kind in STACKS:
        assert np.isnan(found.js.effect[found.stacks[kind]]).all() == (kind != DECODER)
    assert {row["stack"] for row in heads_table(found).to_pylist() if row["js"] is not None} == {DECODER}
    assert compare_heads([(first, other)], maps=every_head(loaded["t5"])).pair.drawn.keys() == {DECODER}


def without_special(loaded, text):
    return from_ids(loaded.tokenizer, loaded.tokenizer(text, add_special_tokens=False).input_ids)


def test_tables_end_with_the_stack(loaded):
    first, other = (reading(loaded["bart"], text, target) for text, target in zip((FIRST, OTHER), TARGETS, strict=True))
    found = compare_heads([(first, other)])
    heads, metrics = heads_table(found), metrics_table(found)
    assert (heads.column_names[-1], metrics.column_names[-1]) == ("stack", "stack")
    assert set(heads["stack"].to_pylist()) == set(STACKS)
    one = next(row for row in metrics.to_pylist() if (row["stack"], row["layer"], row["head"]) == (CROSS, 1, 2))
    same = next(row for row in heads.to_pylist() if (row["stack"], row["layer"], row["head"]) == (CROSS, 1, 2))
    assert same[f"{one['metric']}_difference"] == one["difference"]
    tokens = tokens_table(found.pair).to_pylist()
    for read_by, prompts in ((ENCODER, (first.source, other.source)), (DECODER, (first.prompt, other.prompt))):
        rows = [row for row in tokens if row["read_by"] == read_by]
        for side, read in zip(("first", "other"), prompts, strict=True):
            at = [int(place) for row in rows for place in (row[f"{side}_position"] or "").split(",") if place]
            assert sorted(at) == list(range(len(read)))
    layers, drawn = panels(found, CROSS)
    assert drawn[0].values_LH[layers.index(1), 2] == pytest.approx(same["js"], abs=1e-6)
    assert METRICS["induction"].title not in [panel.name for panel in drawn]


def test_what_is_kept_of_the_first_side_is_counted(loaded):
    """q, k and v of 2 layers a stack, 4 heads of 16: the encoder's, the decoder's, and both texts' in between."""
    layers, heads, width = len(loaded["bart"].geometry.layers), 4, 16
    numbers = 3 * 7 + 3 * 5 + (5 + 2 * 7)
    dims = {(one.heads, one.head_dim) for one in loaded["bart"].geometry.layers}
    [(heads, width)] = dims
    assert kept_bytes(loaded["bart"], 5, 7) == layers * heads * width * numbers * 4


# the command


@pytest.mark.e2e
def test_the_stacks_of_one_encoder_decoder_are_shown_apart(folders, tmp_path):
    flags = ("-m", folders["t5"], "--text", FIRST, "--compare-text", OTHER, "--target", TARGETS[0])
    result = call("compare", *flags, "--select", "cross.1", "--out", str(tmp_path)).ok()
    assert {(row["stack"], row["layer"]) for row in result.rows} == {(CROSS, "1")}
    assert "text: 7 shared tokens" in result.err
    assert "target: 5 shared tokens" in result.err
    assert "other: a small" in result.err
    drawn = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.png")}
    assert drawn == {*(f"{kind}/differences.png" for kind in STACKS), "cross/layers/L01.png"}
    assert json.loads((tmp_path / "compare.json").read_text())["asked"]["options"]["target"] == TARGETS[0]


@pytest.mark.e2e
def test_two_texts_under_one_encoder_decoder(folders, tmp_path):
    """One target for both; tables and pictures of every stack, in a folder of its own."""
    out = tmp_path / "out"
    flags = ("-m", folders["t5"], "--text", FIRST, "--compare-text", OTHER, "--target", TARGETS[0])
    result = call("compare", *flags, "--out", str(out), "--select", "cross.1,0.0")
    listed = result.ok().rows
    assert {(row["stack"], int(row["layer"])) for row in listed} == {(CROSS, 1), (DECODER, 0)}
    assert "text: 7 shared tokens" in result.err
    assert "target: 5 shared tokens" in result.err
    assert "other: a small" in result.err
    drawn = {path.relative_to(out).as_posix() for path in out.rglob("*.png")}
    overview = {f"{kind}/differences.png" for kind in STACKS}
    assert drawn == overview | {"cross/layers/L01.png", "decoder/layers/L00.png"}
    said = json.loads((out / "compare.json").read_text())
    assert said["asked"]["options"]["target"] == TARGETS[0]
    alone = ("-m", folders["t5"], "--text", FIRST, "--compare-text", OTHER, "--set", "task=encoder", "--select", "0.1")
    assert {row["stack"] for row in call("compare", *alone, "--out", str(out), "--force", "-q").ok().rows} == {ENCODER}
    assert {path.relative_to(out).as_posix() for path in out.rglob("*.png")} == {"differences.png", "layers/L00.png"}


def test_targets_that_nobody_gave_are_generated_and_said(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "MOST_MADE", 3)
    result = call("compare", "-m", folders["t5"], "--text", FIRST, "--compare-model", folders["t5b"])
    assert {row["stack"] for row in result.ok().rows} == set(STACKS)
    assert result.err.count("target, generated greedily") == 2
    assert "no encoder head differs" in result.err
    (tmp_path / "texts.txt").write_text(f"{FIRST}\n{OTHER}\n")
    many = call(
        "compare", "-m", folders["t5"], "--texts", str(tmp_path / "texts.txt"), "--compare-model", folders["t5"]
    )
    assert {(row["js"], row["texts"]) for row in many.ok().rows} == {("0.0", "2")}
    assert "the targets are generated greedily" in many.err


def test_a_terminal_names_the_stacks(folders):
    shown = call(
        "compare", "-m", folders["t5"], "--text", FIRST, "--compare-text", OTHER, "--target", "bank", columns=80
    ).ok()
    text = shown.out.decode()
    assert "cross L1H0" in text
    assert "encoder L0H2" in text


def test_an_encoder_in_every_option(folders, tmp_path):
    (tmp_path / "texts.txt").write_text(f"{FIRST}\n{OTHER}\n")
    bert = ("compare", "-m", folders["bert"], "-q")
    texts = ("--text", FIRST, "--compare-text", OTHER)
    for flags in (
        ("--texts", str(tmp_path / "texts.txt"), "--compare-model", folders["bert"], "--engine", "fused"),
        (*texts, "--set", "memory=1MB", "--select", "enc.1,0.2"),
    ):
        found = call(*bert, *flags).ok().rows
        assert {row["stack"] for row in found} == {ENCODER}
        assert not any(row["induction_difference"] for row in found)
    assert {(row["layer"], row["head"]) for row in found} == {("0", "2"), *(("1", str(head)) for head in range(4))}


def test_two_models_of_sound_on_one_recording(tmp_path):
    folder, sound = str(saved_whisper(tmp_path / "whisper")), str(write_wav(tmp_path / "a.wav", samples(0.5)))
    result = call("compare", "-m", folder, "--compare-model", folder, "--audio", sound, "--target", "bank")
    assert {(row["stack"], row["js"]) for row in result.ok().rows} == {(kind, "0.0") for kind in STACKS}
    assert "frames" in result.err


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (("--compare-model", "demo", "--text", "a"), 2, "demo as a causal model: their heads have no counterparts"),
        (("--compare-model", "{bert}", "--text", "a"), 2, "{bert} as an encoder: their heads have no counterparts"),
        (
            ("--compare-text", "b", "--text", "a", "--select", "vision.0"),
            2,
            "a comparison is of encoder and decoder and cross layers",
        ),
        (("--compare-text", "b", "--text", "a", "--select", "@induction"), 2, "@induction needs an atlas"),
        (("--compare-text", "b", "--text", "a", "--target", ""), 4, "the target is empty"),
        (("--compare-model", "{t5}", "--texts", "x", "--target", "a"), 2, "--target is of one text"),
        (("--compare-text", "b", "--audio", "x.wav"), 2, "--audio replaces the text"),
        (("--compare-text", "b", "--text", "a", "--picture", "x.png"), 2, "compare reads no pictures"),
    ],
)
def test_what_is_refused_in_one_line(folders, flags, code, message):
    result = call("compare", "-m", folders["t5"], *(flag.format(**folders) for flag in flags), "-q")
    assert (result.code, result.out) == (code, b"")
    assert message.format(**folders) in result.err
    assert len(result.err.splitlines()) == 1


def test_a_side_without_its_source_is_refused(loaded):
    one = reading(loaded["t5"], FIRST, TARGETS[0])._replace(source=None)
    with pytest.raises(ModelError, match="one text at a time"):
        compare_heads([(one, one)])
