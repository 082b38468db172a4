"""Parity with pictures: positions on several axes and blocks of tokens, and what is wrong in them is caught.

Shapes: T token, A axis, M pair of dims.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

import attnscope
from attnscope.certificate.check import ATOL, ParityReport, certificate, check_parity
from attnscope.certificate.oracle import arrangements_of
from attnscope.model.loaded import LoadedModel
from attnscope.model.selection import DECODER, VISION
from attnscope.observe.request import CaptureSpec
from attnscope.observe.run import prepare
from attnscope.reference import reader
from attnscope.reference.masks import grid_positions, mixed_positions, windows
from attnscope.reference.positions import axial_cos_sin
from attnscope.reference.reader import AXES
from helpers import picture_models
from helpers.picture_models import TEXT, Models, picture, read_here, saved

SAID = "What is on the river bank?"
FULL = {DECODER: "full", VISION: "full"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def field(place: Path) -> str:
    return picture(place / "field.png")


@pytest.fixture(scope="module")
def models(place: Path) -> dict[str, LoadedModel]:
    return Models(place)


@pytest.fixture(autouse=True)
def no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    read_here(monkeypatch)


def and_slowly(quick: str, *slow: str) -> list[Any]:
    return [quick, *(pytest.param(family, marks=pytest.mark.slow) for family in slow)]


def parity(loaded: LoadedModel, pictures: Any, **how: Any) -> ParityReport:
    run = prepare(loaded, CaptureSpec(SAID, picture=pictures, engine="eager"))
    return check_parity(run.loaded, run.prompt, engine=run.engine, **how)


def assert_full(report: ParityReport) -> None:
    """The one assertion of this file: every layer at level full, weights and output within 1e-5, and nothing said."""
    assert (report.levels, report.verdict, {layer.why for layer in report.layers}) == (FULL, True, {""}), (
        report.largest()
    )
    for layer in report.layers:
        assert layer.implementation.weights is not None
        assert max(layer.implementation.weights, layer.implementation.output_relative or 0) <= ATOL


@pytest.mark.parametrize("family", and_slowly("qwen2_5_vl", "gemma3", "paligemma", "idefics3", "qwen2_vl", "qwen3_vl"))
def test_several_pictures(family: str, models: dict[str, LoadedModel], field: str, place: Path) -> None:
    assert_full(parity(models[family], [field, picture(place / "tall.png", (84, 200))]))


@pytest.mark.parametrize("family", and_slowly("qwen2_5_vl", "gemma3", "qwen3_vl"))
def test_half_precision(family: str, models: dict[str, LoadedModel], field: str) -> None:
    loaded = attnscope.load(str(models[family].source_folder), dtype="bfloat16")
    report = parity(loaded, field)
    assert (report.levels, report.verdict) == (FULL, True), report.largest()
    assert all(layer.rounding.weights for layer in report.layers)


def test_a_block_that_is_longer_than_the_window(models: dict[str, LoadedModel], field: str, place: Path) -> None:
    """Gemma 3's window ends behind a query alone: the tokens of its picture are all seen ahead."""
    folder = Path(shutil.copytree(str(models["gemma3"].source_folder), place / "narrow"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["sliding_window"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    loaded = attnscope.load(str(folder))
    assert_full(parity(loaded, field))
    seen = attnscope.capture(loaded, SAID, picture=field, engine="eager")
    first, *_, last = seen.prompt.medium.patches
    assert last - first == 3
    assert (seen.weights[0][:, first, last] > 0).all()
    assert (seen.weights[0][:, last, first] == 0).all()


def test_paligemma_2_sees_its_whole_prompt_beyond_the_window(
    place: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> Any:
        config, words, images, own = picture_models._paligemma()
        text = hf.Gemma2Config(**TEXT, vocab_size=len(words), sliding_window=4).to_dict()
        config = hf.PaliGemmaConfig(**config.to_dict() | {"text_config": text})
        return config, words, images, own

    monkeypatch.setitem(picture_models.FAMILIES, "paligemma2", (made, "PaliGemma"))
    loaded = attnscope.load(saved("paligemma2", place))
    assert {layer.window for layer in loaded.geometry.layers} == {4, None}
    assert_full(parity(loaded, field))


@pytest.mark.parametrize("family", and_slowly("paligemma", "gemma3", "qwen3_vl"))
def test_an_answer_follows_the_prompt(family: str, models: dict[str, LoadedModel], field: str) -> None:
    run = prepare(models[family], CaptureSpec(SAID, picture=field, engine="eager", answer=" A house and the sun."))
    assert_full(check_parity(run.loaded, run.prompt, engine=run.engine))


def test_what_is_not_known_is_said(models: dict[str, LoadedModel], field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.certificate.oracle.BLOCKS", {})
    report = parity(models["gemma3"], field)
    assert report.levels == {DECODER: "scores", VISION: "full"}
    assert "see each other" in report.layers[0].why
    padded = {"pixel_attention_mask": torch.tensor([[[[1, 0]]]])}
    config = models["idefics3"].model.config
    assert "padding" in arrangements_of(config, [], padded)[VISION].unknown
    qwen, one = models["qwen3_vl"].model.config, {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    twice = [qwen.image_token_id, 5, qwen.image_token_id]
    assert "do not fit" in arrangements_of(qwen, twice, one)[DECODER].unknown


def test_what_a_small_picture_cannot_show(models: dict[str, LoadedModel], place: Path, field: str) -> None:
    small = picture(place / "small.png", (56, 56))
    assert "vision: the windows of 16" in parity(models["qwen2_5_vl"], small).too_short
    run = prepare(models["qwen2_5_vl"], CaptureSpec(SAID, picture=field, engine="eager"))
    report = check_parity(run.loaded, run.prompt, engine=run.engine)
    assert report.too_short == ()
    written = certificate(report, run.loaded, run.prompt)
    assert [layer["stack"] for layer in written["layers"]] == [DECODER] * 2 + [VISION] * 3


# Oracles that are wrong: the assertion that passes for the right one catches each, in the stack where it is wrong.


def rolled(rule: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda given, pairs: rule(given, pairs).roll(1)


def failing(loaded: LoadedModel, field: str) -> set[str]:
    return {layer.stack for layer in parity(loaded, field).failures}


@pytest.mark.parametrize(
    ("family", "rule", "where"),
    [
        ("qwen3_vl", "interleaved", DECODER),
        ("qwen3_vl", "halves", VISION),
        pytest.param("qwen2_vl", "sections", DECODER, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_axis_is_caught(
    family: str,
    rule: str,
    where: str,
    models: dict[str, LoadedModel],
    field: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(AXES, rule, rolled(AXES[rule]))  # type: ignore[arg-type]
    assert failing(models[family], field) == {where}


@pytest.mark.slow
def test_sections_are_not_interleaved(
    models: dict[str, LoadedModel], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AXES, "interleaved", AXES["sections"])  # type: ignore[arg-type]
    assert failing(models["qwen3_vl"], field) == {DECODER}


@pytest.mark.parametrize("family", and_slowly("paligemma", "gemma3"))
def test_a_causal_oracle_is_caught(
    family: str, models: dict[str, LoadedModel], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reader.visible
    monkeypatch.setattr(reader, "visible", lambda given: right(replace(given, block_T=None)))
    assert failing(models[family], field) == {DECODER}


def test_windows_beside_the_true_ones_are_caught(
    models: dict[str, LoadedModel], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = reader.visible

    def wrong(given: Any) -> torch.Tensor:
        windowed = given.layer.type == "windowed"
        return right(replace(given, block_T=given.block_T.roll(1)) if windowed else given)

    monkeypatch.setattr(reader, "visible", wrong)
    report = parity(models["qwen2_5_vl"], field)
    assert [(layer.stack, layer.layer) for layer in report.failures] == [(VISION, 0), (VISION, 2)]


def test_a_corrupted_layer_fails_and_is_named(models: dict[str, LoadedModel], field: str) -> None:
    """One window of a tower that reads its keys in reverse."""
    attention = models["qwen2_5_vl"].model.model.visual.blocks[2].attn
    handle = attention.qkv.register_forward_hook(lambda module, args, out: torch.cat([out[:8].flip(0), out[8:]]))
    try:
        failures = parity(models["qwen2_5_vl"], field).failures
    finally:
        handle.remove()
    assert [(layer.stack, layer.layer) for layer in failures] == [(VISION, 2)]


# The parts that the oracle is made of, against transformers' own and against index arithmetic.


@pytest.mark.parametrize("family", and_slowly("qwen3_vl", "qwen2_vl"))
def test_positions_are_those_of_transformers(
    family: str, models: dict[str, LoadedModel], field: str, place: Path
) -> None:
    pictures = [field, picture(place / "tall.png", (84, 200))]
    prompt = attnscope.capture(models[family], SAID, picture=pictures).prompt
    model, grids = models[family].model, prompt.medium.inputs["image_grid_thw"]
    kinds = {"mm_token_type_ids": prompt.medium.inputs["mm_token_type_ids"], "image_grid_thw": grids}
    expected, _ = model.model.get_rope_index(torch.tensor([prompt.ids]), **kinds)
    image = [token == model.config.image_token_id for token in prompt.ids]
    found = mixed_positions(image, [(rows // 2, columns // 2) for _, rows, columns in grids.tolist()])
    assert torch.equal(found, expected[:, 0])
    assert not torch.equal(found[1], found[2])


def test_order_of_patches_is_that_of_transformers() -> None:
    from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

    for rows, columns in ((4, 10), (14, 6), (8, 8), (2, 2)):
        grid = torch.tensor([[1, rows, columns]])
        axes = grid_positions(rows, columns, merge=2)
        assert torch.equal(axes.T, get_vision_position_ids(grid, 2))
        index, bounds = get_vision_window_index(grid, spatial_merge_size=2, window_size=56, patch_size=14)
        order, window = windows(axes, side=4)
        assert order.tolist() == [4 * cell + part for cell in index.tolist() for part in range(4)]
        assert window.unique_consecutive(return_counts=True)[1].cumsum(0).tolist() == bounds[1:].tolist()


def test_angles_on_several_axes_are_sums_of_loops() -> None:
    positions, axis, frequency = torch.tensor([[3, 4], [7, 9]]), torch.tensor([0, 1, 0]), torch.tensor([1.0, 0.5, 0.1])
    cos, sin = axial_cos_sin(positions, axis, frequency, scaling=2.0)
    for t in range(2):
        for m in range(3):
            angle = positions[axis[m], t] * frequency[m]
            assert cos[t, m] == pytest.approx(2 * float(angle.cos()))
            assert sin[t, m] == pytest.approx(2 * float(angle.sin()))


def test_axes_of_pairs_as_spelled_out() -> None:
    given: Any = SimpleNamespace(rope={"mrope_section": [4, 2, 1]})
    assert AXES["sections"](given, 7).tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert AXES["interleaved"](given, 7).tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert AXES["halves"](given, 4).tolist() == [0, 0, 1, 1]


@pytest.mark.slow
def test_a_second_instance_is_given_the_picture_too(models: dict[str, LoadedModel], field: str) -> None:
    report = parity(models["qwen2_5_vl"], [field], whole=True)
    assert report.whole.holds
    assert {name.split(".")[1] for name in report.whole.differences if "." in name} == {"visual", "language_model"}
