"""Pictures beside text: what vision-language models are given, what its tokens are called, and what is measured."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import attnscope
from attnscope.certificate.check import check_parity
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.figures import Patches, PatchSheet, Style
from attnscope.figures.pictures import grid_of, save_patches
from attnscope.inputs.pictures import open_picture, open_pictures
from attnscope.inputs.processor import WHOLE, Sight, patches_of
from attnscope.model.loaded import LoadedModel
from attnscope.model.selection import DECODER, VISION
from attnscope.observe.observation import Observation
from attnscope.observe.request import CaptureSpec, PerLayer
from attnscope.observe.run import prepare
from helpers.command_line import Result, call
from helpers.families import few
from helpers.picture_models import FAMILIES, Models, need_image_processors, picture, read_here, saved

TEXT = "What is on the river bank?"
BOTH_WAYS = ("gemma3", "paligemma")  # whose image tokens see each other
IN_A_FORK = ("test_ids_and_pixels_are_those_of_the_processor", "test_other_commands_read_pictures")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def field(place: Path) -> str:
    return picture(place / "field.png")


@pytest.fixture(scope="module")
def models(place: Path) -> dict[str, LoadedModel]:
    return Models(place)


@pytest.fixture(autouse=True)
def no_forks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.originalname not in IN_A_FORK:
        read_here(monkeypatch)


@pytest.fixture(scope="module")
def read(models: dict[str, LoadedModel], field: str) -> Callable[[str], Observation]:
    """The text and the picture as a family's eager attention reads them, once for all that ask."""
    return cache(lambda family: attnscope.capture(models[family], TEXT, picture=field, engine="eager"))


def own(model: Any, ids: tuple[int, ...], inputs: Any) -> Any:
    """What the whole model returns of its own, under its eager attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.tensor([ids]), **inputs, output_attentions=True, use_cache=False)


def tower_of(model: Any, inputs: Any) -> list[torch.Tensor]:
    """The weights that a tower returns of its own, (texts, H, T, T) each."""
    pixels = inputs["pixel_values"]
    tower = getattr(model.model, "vision_tower", None) or model.model.vision_model
    with torch.no_grad():
        return list(tower(pixels.flatten(0, -4), output_attentions=True).attentions)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_the_models_own(
    family: str, models: dict[str, LoadedModel], read: Callable[[str], Observation]
) -> None:
    seen = read(family)
    expected = own(models[family].model, seen.prompt.ids, seen.prompt.medium.inputs).attentions
    assert not seen.failures
    for layer, weights in enumerate(expected):
        torch.testing.assert_close(seen.weights[layer], weights[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_vl"])
def test_fused_is_eager(
    family: str, models: dict[str, LoadedModel], field: str, read: Callable[[str], Observation]
) -> None:
    eager, fused = read(family), attnscope.capture(models[family], TEXT, picture=field, engine="fused")
    assert list(eager.stacks) == list(fused.stacks)
    assert not fused.failures
    for kind, one in fused.stacks.items():
        for key, weights in one.weights.items():
            torch.testing.assert_close(weights, eager.of(kind).weights[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llava", "gemma3", "paligemma", "idefics3"])
def test_ids_and_pixels_are_those_of_the_processor(family: str, models: dict[str, LoadedModel], field: str) -> None:
    loaded = models[family]
    prompt = attnscope.capture(loaded, TEXT, picture=field).prompt
    processor = hf.AutoProcessor.from_pretrained(loaded.source_folder)
    place = {"llava": "<image>\n", "gemma3": "<start_of_image>"}.get(family, "<image>")
    with Image.open(field) as image:
        made = processor(images=[image.convert("RGB")], text=place + TEXT, return_tensors="pt")
    assert prompt.ids == tuple(made["input_ids"][0].tolist())
    torch.testing.assert_close(prompt.medium.inputs["pixel_values"], made["pixel_values"])


@pytest.mark.parametrize("family", ["llava", "gemma3", "paligemma", "idefics3"])
def test_the_towers_layers_are_its_own(
    family: str, models: dict[str, LoadedModel], read: Callable[[str], Observation]
) -> None:
    seen = read(family)
    expected = tower_of(models[family].model, seen.prompt.medium.inputs)
    assert len(expected) == len(seen.of(VISION).weights) == 3
    for layer, weights in enumerate(expected):
        torch.testing.assert_close(seen.of(VISION).weights[layer], weights[-1], atol=1e-6, rtol=0)


def test_qwens_tower_reads_patches_in_blocks(read: Callable[[str], Observation]) -> None:
    """The rows of its rotary positions, as transformers computes them, are those of the labels."""
    from transformers.vision_utils import get_vision_position_ids

    seen = read("qwen2_vl")
    positions = get_vision_position_ids(seen.prompt.medium.inputs["image_grid_thw"], 2)
    assert seen.of(VISION).queries.tokens == tuple(f"img {row},{column}" for row, column in positions.tolist())


def test_a_tower_of_windows_of_unknown_size_is_left_out_in_a_line(
    models: dict[str, LoadedModel], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscope.model.geometry.window_side", lambda tower: 0)
    seen = attnscope.capture(attnscope.load(str(models["qwen2_5_vl"].source_folder)), TEXT, picture=field)
    assert list(seen.stacks) == [DECODER]
    assert len(seen.heads) == 8
    assert any("vision tower" in line and "windows" in line for line in seen.unmeasured)


LABELS = {
    "llava": ["<s>", *(f"img {i},{j}" for i in range(4) for j in range(4)), "\n"],
    "gemma3": ["<s>", "\n", "\n", "<start_of_image>", "img 0,0", "img 0,1", "img 1,0", "img 1,1", "<end_of_image>"],
    "qwen2_vl": ["<s>", "<|vision_start|>", *(f"img {i},{j}" for i in range(2) for j in range(5)), "<|vision_end|>"],
    "idefics3": [
        *("<s>", "<fake_token_around_image>", "<row_1_col_1>", "img 0,0", "img 0,1", "img 1,0", "img 1,1"),
        *("<fake_token_around_image>", "<row_1_col_2>", "img 0,2", "img 0,3", "img 1,2", "img 1,3", "\n", "\n"),
        *("<fake_token_around_image>", "<global-img>", "img small 0,0", "img small 0,1", "img small 1,0"),
    ],
}


@pytest.mark.parametrize("family", LABELS)
def test_image_tokens_are_called_by_row_and_column(family: str, read: Callable[[str], Observation]) -> None:
    prompt = read(family).prompt
    assert list(prompt.tokens[: len(LABELS[family])]) == LABELS[family]
    assert "img 0" not in prompt.text
    assert prompt.text.endswith(TEXT)
    assert [prompt.tokens[at] for at in prompt.parts["img"]] == [one for one in prompt.tokens if one.startswith("img")]


def test_patches_lie_where_the_picture_was_cut(read: Callable[[str], Observation]) -> None:
    """LLaVA's processor cuts the middle square out of 160 x 80: the patches begin at a quarter of the width."""
    patches = read("llava").prompt.medium.patches
    assert patches[1].box == pytest.approx((0.25, 0.0, 0.375, 0.25))
    assert patches[16].box == pytest.approx((0.625, 0.75, 0.75, 1.0))


def test_several_pictures_have_numbers(models: dict[str, LoadedModel], field: str) -> None:
    for family in ("llava", "qwen2_vl", "idefics3", "gemma3"):
        prompt = prepare(models[family], CaptureSpec(TEXT, picture=[field, field])).prompt
        assert list(prompt.parts) == ["img", "img2"]
        first, second = ([prompt.tokens[at] for at in prompt.parts[name]] for name in ("img", "img2"))
        assert [one.replace("img", "img2") for one in first] == second


@pytest.mark.parametrize(
    ("names", "boxes", "expected"),
    [
        ("I I B I I E", 1, "0,0 0,1 1,0 1,1"),  # a token between rows
        ("I I I B I I I E I I I B I I I E", 2, "0,0 0,1 0,2 1,0 1,1 1,2"),
        ("I I I I I", 1, "0 1 2 3 4"),  # no square: counted
        ("I I B I", 1, "0 1 2"),
    ],
)
def test_arrangements_of_image_tokens(names: str, boxes: int, expected: str) -> None:
    listed = names.split()
    found = patches_of(listed, [name == "I" for name in listed], Sight((WHOLE,) * boxes))
    said = [label for label, patch in found.values() if patch.picture == 0]
    assert said == [f"img {one}" for one in expected.split()]
    assert all((patch.box is None) != ("," in label) for label, patch in found.values())


@pytest.mark.parametrize("family", BOTH_WAYS)
def test_image_tokens_see_each_other(
    family: str, models: dict[str, LoadedModel], read: Callable[[str], Observation]
) -> None:
    seen = read(family)
    patches = list(seen.prompt.medium.patches)
    ahead = seen.weights[1][:, patches[0], patches[1:]]
    assert (ahead > 0).all()
    causal = attnscope.capture(models[family], TEXT, engine="eager")
    assert (causal.weights[1].triu(1) == 0).all()


def test_image_tokens_are_no_repeated_text(models: dict[str, LoadedModel], field: str) -> None:
    """The picture's 16 equal ids are no duplicates: only those of the text are, as loops find them."""
    repeated = "the bank and the bank and the river"
    seen = attnscope.capture(models["llava"], repeated, picture=field, engine="eager")
    ids, patches = seen.prompt.ids, seen.prompt.medium.patches
    means = torch.zeros(4)
    rows = [
        i for i in range(len(ids)) if i not in patches and any(ids[j] == ids[i] for j in range(i) if j not in patches)
    ]
    for i in rows:
        for j in range(i):
            means += seen.weights[0][:, i, j] * (ids[j] == ids[i]) / len(rows)
    found = [head.score["duplicate_token"] for head in seen.heads if (head.layer, head.stack) == (0, DECODER)]
    torch.testing.assert_close(torch.tensor(found), means, atol=1e-6, rtol=0)
    alone = attnscope.capture(models["llava"], "a river", picture=field)
    assert all(np.isnan(head.score["duplicate_token"]) for head in alone.heads)


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_holds(family: str, models: dict[str, LoadedModel], field: str) -> None:
    run = prepare(models[family], CaptureSpec(TEXT, picture=field, engine="eager"))
    report = check_parity(run.loaded, run.prompt, engine=run.engine)
    assert report.holds
    assert report.levels == {DECODER: "full", VISION: "full"}
    assert {(layer.stack, layer.layer, layer.why) for layer in report.layers} == {
        (kind, layer, "") for kind, layers in ((DECODER, 2), (VISION, 3)) for layer in range(layers)
    }
    assert not check_parity(run.loaded, run.prompt, engine=run.engine, atol=0.0).holds


def test_text_alone_is_read_as_ever(models: dict[str, LoadedModel]) -> None:
    for family in FAMILIES:
        loaded = models[family]
        seen = attnscope.capture(loaded, TEXT, engine="eager")
        assert list(seen.stacks) == [DECODER]
        assert not seen.unmeasured
        expected = own(loaded.model, seen.prompt.ids, {}).attentions
        for layer, weights in enumerate(expected):
            torch.testing.assert_close(seen.weights[layer], weights[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", ["llava", "paligemma", "qwen2_vl"])
def test_an_answer_follows_pictures_and_text(
    family: str, models: dict[str, LoadedModel], field: str, read: Callable[[str], Observation]
) -> None:
    loaded = models[family]
    seen = attnscope.capture(loaded, TEXT, picture=field, generate=4, engine="eager")
    prompt = seen.prompt
    assert prompt.answer is not None
    assert 1 <= len(prompt) - prompt.answer <= 4
    before = read(family).prompt
    with torch.no_grad():
        ids = torch.tensor([before.ids])
        how: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 4}
        made = loaded.model.generate(ids, **before.medium.inputs, **how)
    assert prompt.ids == tuple(made[0].tolist())
    last = seen.weights[0][0, prompt.answer :]
    assert (last[:-1, -1] == 0).all()  # an answer's tokens see no later one, in PaliGemma either


def test_the_chat_template_places_the_picture(models: dict[str, LoadedModel], field: str) -> None:
    chat = json.dumps([{"role": "user", "content": TEXT}, {"role": "assistant", "content": "A house."}])
    prompt = attnscope.capture(models["qwen2_vl"], chat, picture=field, chat=True).prompt
    assert [turn.name for turn in prompt.turns] == ["user", "assistant"]
    assert prompt.tokens.index("<|vision_start|>") + 1 == prompt.parts["img"][0]
    assert prompt.text.startswith("<s>user: <|vision_start|><|vision_end|>\n" + TEXT)


def test_a_chat_may_say_where_the_picture_is(models: dict[str, LoadedModel], field: str) -> None:
    first = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": "field.png"}}]
    chat = [{"role": "user", "content": first}, {"role": "assistant", "content": "A house."}]
    prompt = attnscope.capture(models["qwen2_vl"], json.dumps(chat), picture=field, chat=True).prompt
    assert [turn.name for turn in prompt.turns] == ["user", "assistant"]
    assert prompt.text.startswith(f"<s>user: {TEXT}<|vision_start|><|vision_end|>")
    chat[0]["content"] = first + first[1:]
    with pytest.raises(InputError, match=r"expected 1 pictures in the chat.* got 2"):
        attnscope.capture(models["qwen2_vl"], json.dumps(chat), picture=field, chat=True)


def test_a_place_may_be_written_into_the_text(models: dict[str, LoadedModel], field: str) -> None:
    prompt = attnscope.capture(models["llava"], "Look at <image> the bank", picture=field).prompt
    assert prompt.text == "<s>Look at  the bank"
    assert prompt.tokens[prompt.parts["img"][-1] + 1] == " the"
    with pytest.raises(InputError, match=r"1 of <image>.* got 2"):
        attnscope.capture(models["llava"], "<image> or <image>", picture=field)


def test_tokens_of_a_picture_can_be_asked_about(models: dict[str, LoadedModel], field: str) -> None:
    seen = attnscope.capture(models["llava"], TEXT, picture=field, query="last", key="img", engine="eager")
    patches = list(seen.prompt.medium.patches)
    for head in seen.heads:
        assert head.mass == pytest.approx(float(seen.weights[head.layer][head.head, -1, patches].sum()), abs=1e-6)
    one = attnscope.capture(models["llava"], TEXT, picture=field, key='"img 1,2"')
    assert one.chosen.key is not None
    assert one.chosen.key.positions == (7,)


# What a file may hold


def test_a_picture_is_read_as_it_is_seen(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    image = Image.new("RGBA", (4, 2), (255, 0, 0, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.save(place / "clear.png")
    assert open_picture(place / "clear.png").image.getpixel((0, 0)) == (255, 255, 255)
    assert "read on white" in caplog.text
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    Image.new("RGB", (4, 2)).save(place / "turned.jpg", exif=exif)
    assert open_picture(place / "turned.jpg").image.size == (2, 4)
    frames = [Image.new("RGB", (4, 2), colour) for colour in ("red", "blue")]
    frames[0].save(place / "moving.gif", save_all=True, append_images=frames[1:])
    assert open_picture(place / "moving.gif").image.getpixel((0, 0)) == (254, 0, 0) or "2 frames" in caplog.text
    assert "2 frames: the first is read" in caplog.text


def test_a_picture_is_known_by_its_hash(models: dict[str, LoadedModel], place: Path, field: str) -> None:
    other = picture(place / "other.png", (96, 96))
    one, same, two = (
        prepare(models["llava"], CaptureSpec(TEXT, picture=file)).prompt for file in (field, field, other)
    )
    assert one.sha256 == same.sha256 != two.sha256
    alone = attnscope.capture(models["llava"], one.text.removeprefix("<s>"))
    assert alone.prompt.sha256 != one.sha256
    assert one.medium.sha256 == open_pictures(field)[0].sha256


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        (b"no picture", "is not a picture that Pillow reads"),
        (b"", "is not a picture that Pillow reads"),
        ("folder", "is a folder"),
        ("cut", "is damaged"),
    ],
)
def test_what_is_no_picture_is_a_line(content: bytes | str | None, said: str, place: Path, field: str) -> None:
    path = place / f"bad-{said[:9]}-{len(content or '')}"
    if content == "folder":
        path.mkdir()
    elif content == "cut":
        path.write_bytes(Path(field).read_bytes()[:-100])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        open_picture(path)


def test_a_decompression_bomb_is_a_line(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (10, 8000):  # beyond twice as many Pillow raises, below it warns
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
        with pytest.raises(InputError, match="million pixels"):
            open_picture(field)


def test_who_sees_nothing_says_so(models: dict[str, LoadedModel], field: str) -> None:
    with pytest.raises(ModelError, match="no pictures"):
        attnscope.capture(attnscope.load("demo"), TEXT, picture=field)
    with pytest.raises(UsageError, match="is not cut"):
        attnscope.capture(models["llava"], TEXT, picture=field, truncate="left")
    with pytest.raises(UsageError, match="a picture needs a text"):
        attnscope.capture(models["llava"], [5, 6, 7], picture=field)
    with pytest.raises(InputError, match="16 of them the pictures'"):
        attnscope.capture(models["llava"], "the bank " * 300, picture=field)
    with pytest.raises(InputError, match="1 to 16 pictures"):
        attnscope.capture(models["llava"], TEXT, picture=[field] * 17)


def test_a_tower_too_large_to_keep_is_refused(
    models: dict[str, LoadedModel], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrices of the decoder alone would fit."""
    prompt = prepare(models["qwen2_vl"], CaptureSpec(TEXT, picture=field)).prompt
    tokens, patches = len(prompt), len(prompt.medium.tower[0])
    assert 4 * 8 * tokens**2 < 30_000 < 4 * 12 * patches**2
    monkeypatch.setattr("attnscope.utils.memory.SURELY_FREE", 0)
    monkeypatch.setattr("attnscope.utils.memory.free_memory", lambda device: 30_000)
    attnscope.capture(models["qwen2_vl"], TEXT)
    with pytest.raises(attnscope.errors.MemoryLimitError, match="the matrices of 20 heads"):
        attnscope.capture(models["qwen2_vl"], TEXT, picture=field)


def test_a_model_without_its_processor_is_a_line(models: dict[str, LoadedModel], field: str, tmp_path: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(str(models["llava"].source_folder), tmp_path / "bare"))
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="brings no processor"):
        attnscope.capture(attnscope.load(str(folder)), TEXT, picture=field)


# The command line, and figures


def asked(models: dict[str, LoadedModel], command: str, field: str, *more: str, family: str = "llava") -> Result:
    return call(command, "-m", str(models[family].source_folder), "--text", TEXT, "--picture", field, *more)


def test_heads_lists_decoder_and_tower(models: dict[str, LoadedModel], field: str) -> None:
    found = asked(models, "heads", field).ok().rows
    assert {(row["stack"], row["layer"], row["head"]) for row in found} == {
        (kind, str(layer), str(head))
        for kind, layers in ((DECODER, 2), (VISION, 3))
        for layer in range(layers)
        for head in range(4)
    }
    assert all(not row["induction"] and not row["distance"] for row in found if row["stack"] == VISION)
    only = asked(models, "heads", field, "--select", "vision.2.1").ok().rows
    assert [(row["stack"], row["layer"], row["head"]) for row in only] == [(VISION, "2", "1")]


def test_info_lists_the_towers_layers(models: dict[str, LoadedModel]) -> None:
    result = call("info", "-m", str(models["llava"].source_folder))
    found = json.loads(result.out)["attention_layers"]
    assert [(one["stack"], one["layer"], one["heads"]) for one in found] == [
        *((DECODER, layer, 4) for layer in range(2)),
        *((VISION, layer, 4) for layer in range(3)),
    ]


def test_other_commands_read_pictures(models: dict[str, LoadedModel], field: str) -> None:
    found = asked(models, "relations", field, "--query", "last", "--top-k", "all").ok().rows
    assert {row["stack"] for row in found} == {DECODER}
    assert "img 3,3" in {row["key_token"] for row in found}
    keys = asked(models, "keys", field).ok().rows
    patches = sorted((row for row in keys if row["stack"] == VISION), key=lambda row: int(row["position"]))
    assert [row["token"] for row in patches][:2] == ["[CLS]", "img 0,0"]
    tokens = asked(models, "text", field, "--query", "last").ok().rows
    assert tokens[1]["token"] == "img 0,0"
    parity = asked(models, "parity", field, family="gemma3").ok().rows
    assert {(row["stack"], row["level"], row["holds"]) for row in parity} == {
        (kind, "full", "True") for kind in (DECODER, VISION)
    }


def test_a_run_with_a_picture_is_told_apart(models: dict[str, LoadedModel], field: str, tmp_path: Path) -> None:
    result = asked(models, "draw", field, "--query", "last", "--select", "1.3", "--out", str(tmp_path / "run")).ok()
    names = [Path(line).relative_to(tmp_path / "run").as_posix() for line in result.out.decode().splitlines()]
    assert names == ["overview.png", "layers/L01.png", "heads/L01H03.png", "picture.png"]
    said = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert said["prompt"]["media"] == open_pictures(field)[0].sha256
    assert said["options"]["picture"] == [field]
    other = picture(tmp_path / "other.png", (96, 96))
    again = asked(models, "draw", other, "--query", "last", "--select", "1.3", "--out", str(tmp_path / "run"))
    assert again.code == 2
    assert "another run" in again.err
    repeated = call("heads", "--from", str(tmp_path / "run"))
    assert repeated.code == 2
    assert "add --text" in repeated.err


def test_heads_draws_over_a_picture_where_it_is_asked_to(
    models: dict[str, LoadedModel], field: str, tmp_path: Path
) -> None:
    asked(models, "heads", field, "--figures", "picture", "--out", str(tmp_path / "run")).ok()
    assert (tmp_path / "run" / DECODER / "picture.png").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("heads", "--ids", "-"), 2, "--picture needs a text"),
        (("heads", "--chat", "--text", "hi", "--picture", "no.png"), 4, "no.png does not exist"),
        (("draw", "--text", "hi", "--figures", "picture", "--out", "x"), 2, "no --picture was given"),
        (("heads", "--text", "hi", "--figures", "picture", "--out", "x"), 2, "no --picture was given"),
        (("view", "--text", "hi", "--picture", "no.png", "--out", "no.html"), 4, "no.png does not exist"),
    ],
)
def test_bad_inputs(
    arguments: tuple[str, ...], code: int, said: str, models: dict[str, LoadedModel], field: str
) -> None:
    more = ("--picture", field) if "--ids" in arguments else ()
    result = call(*arguments, *more, "-m", str(models["llava"].source_folder))
    assert result.code == code
    assert said in result.err
    assert "Traceback" not in result.err


def test_weights_over_a_picture_are_those_of_the_queries(models: dict[str, LoadedModel], field: str) -> None:
    from attnscope.export.drawing import patch_sheets

    seen = attnscope.capture(models["llava"], TEXT, picture=field, query="bank,last", engine="eager")
    assert seen.chosen.query is not None
    (sheet,) = patch_sheets(seen, ["L1H3"])
    mean = seen.weights[1][3, list(seen.chosen.query.positions)].mean(0)
    at = list(seen.prompt.medium.patches)
    np.testing.assert_allclose(sheet.heads[0].weight_N, mean[at], atol=1e-6)
    share = float(mean[at].sum())
    assert sheet.heads[0].note == f"{share:.2f} on the picture, {1 - share:.2f} on the text"
    assert seen.over_picture("L1H3").png.startswith(b"\x89PNG")
    assert len(patch_sheets(seen, [])[0].heads) == 7
    key, kept = next(iter(seen.per_token.items()))
    faint = PerLayer({**seen.per_token, key: kept._replace(weight=kept.weight * 0.001)})
    hardly = seen.keeping(per_token=faint)
    assert {head.title[:2] for head in patch_sheets(hardly, [])[0].heads} == {"L1"}, "no head of 0.00 among the first"
    assert [head.title for head in patch_sheets(hardly, ["L0H1"])[0].heads] == ["L0H1"], "unless it is named"


def test_patches_of_two_sizes_are_added_up(tmp_path: Path) -> None:
    """A whole of one cell over two tiles: each of these gets half of it."""
    box_N4 = np.array([[0, 0, 0.5, 1], [0.5, 0, 1, 1], [0, 0, 1, 1]])
    (across, down), cells = grid_of(box_N4, [np.array([0.1, 0.2, 0.4])])
    assert across.tolist() == [0, 0.5, 1]
    assert down.tolist() == [0, 1]
    np.testing.assert_allclose(cells, [[[0.3, 0.4]]])
    sheet = PatchSheet(Image.new("RGB", (20, 10)), box_N4, (Patches(np.array([0.1, 0.2, np.nan]), "L0H0"),))
    for image in ("png", "svg"):
        written = save_patches(tmp_path / f"one.{image}", sheet, Style(image=image, width="column"))  # type: ignore[arg-type]
        assert written.stat().st_size > 1000


def test_smolvlm_without_num2words_is_a_line_that_names_it(
    place: Path, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_image_processors()
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", None)  # as where it is not installed
    config, words, images, own = FAMILIES["idefics3"][0]()
    parts = {name: getattr(config, name).to_dict() for name in ("vision_config", "text_config")}
    parts["vision_config"].pop("model_type")
    smaller = hf.SmolVLMConfig(**parts, image_token_id=config.image_token_id, scale_factor=2, pad_token_id=1)
    pixels = hf.SmolVLMImageProcessorPil(size=dict(images.size), max_image_size=dict(images.max_image_size))
    monkeypatch.setitem(FAMILIES, "smolvlm", (lambda: (smaller, words, pixels, own), "SmolVLM"))
    result = call("heads", "-m", saved("smolvlm", place), "--text", TEXT, "--picture", field)
    assert result.code == 3
    assert "Traceback" not in result.err
    [line] = [line for line in result.err.splitlines() if "num2words" in line]
    assert "needs a package" in line


@pytest.mark.parametrize("family", few(FAMILIES, ["llava", "qwen2_vl"]))
def test_why_a_token_of_a_picture_is_looked_at(models: dict[str, LoadedModel], field: str, family: str) -> None:
    loaded = models[family]
    patch = min(prepare(loaded, CaptureSpec(TEXT, picture=field)).prompt.medium.patches)
    found = attnscope.why(loaded, TEXT, "L1H1", key=patch, picture=field)
    assert found.parts.sum == pytest.approx(found.parts.logit, abs=1e-5)
    assert found.token(patch).startswith("img")
    with pytest.raises(UsageError, match=r"vision.*decoder"):
        attnscope.why(loaded, TEXT, "vision L0H0", picture=field)
