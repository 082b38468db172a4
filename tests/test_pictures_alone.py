"""Pictures without a text: vision towers alone, their tokens, their weights and what is refused of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf

import attnscope
from attnscope.certificate.check import check_parity
from attnscope.corpus.folder import Job
from attnscope.corpus.item_requests import check_fields
from attnscope.errors import AttnscopeError, ModelError
from attnscope.model.fitting import check_tower
from attnscope.model.loaded import LoadedModel
from attnscope.model.loading import load, load_tokenizer
from attnscope.model.options import LoadOptions
from attnscope.model.tasks import model_class, task_of
from attnscope.observe.inputs import patch_tokens
from attnscope.observe.observation import Observation
from attnscope.observe.request import CaptureSpec
from attnscope.observe.run import prepare
from attnscope.reference.layouts import UNREAD_TOWERS
from helpers.command_line import call
from helpers.parity_models import rouse
from helpers.picture_models import ALONE, HEADS, SIDES, SQUARE, need_image_processors, picture, read_here, saved_alone
from helpers.seconds import once

BY_DEFAULT = ("vit", "clip")
KINDS = [pytest.param(kind, marks=[] if kind in BY_DEFAULT else [pytest.mark.families]) for kind in ALONE]
BEFORE = {  # the tokens of each that are no patches, before them and behind
    "vit": (["[CLS]"], []),
    "clip": (["[CLS]"], []),
    "clip_vision": (["[CLS]"], []),
    "altclip": (["[CLS]"], []),
    "dinov2_with_registers": (["[CLS]", "[REG0]", "[REG1]", "[REG2]", "[REG3]"], []),
    "dinov3": (["[CLS]", "[REG0]", "[REG1]"], []),
    "internvl": (["[CLS]"], []),
    "deit": (["[CLS]", "[DIST]"], []),
    "siglip_vision": ([], []),
    "yolos": (["[CLS]"], ["[DET0]", "[DET1]", "[DET2]"]),
    "pixio": (["[CLS0]", "[CLS1]"], []),
}


@pytest.fixture(autouse=True)
def no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    read_here(monkeypatch)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def field(place: Path) -> str:
    """A picture of odd sides, which no patch divides."""
    return picture(place / "field.png", (161, 83))


@once
def model_of(kind: str, place: Path) -> LoadedModel:
    return load(LoadOptions(model=saved_alone(kind, place), task="picture"))


@once
def read(kind: str, place: Path, field: str) -> Observation:
    return attnscope.capture(model_of(kind, place), picture=field, engine="eager")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_models_own(kind: str, place: Path, field: str) -> None:
    seen = read(kind, place, field)
    own = hf.AutoModel.from_pretrained(place / kind, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = getattr(own, "vision_model", own)(**seen.prompt.medium.inputs, output_attentions=True).attentions
    assert [(key.stack, key.layer) for key in seen.kv_of] == [("vision", layer) for layer in range(3)]
    for layer, weights_BHQK in enumerate(expected):
        torch.testing.assert_close(seen.weights[layer], weights_BHQK[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_parity_holds(kind: str, place: Path, field: str) -> None:
    model = model_of(kind, place)
    prompt = prepare(model, CaptureSpec("", picture=field)).prompt
    report = check_parity(model, prompt)
    assert report.holds
    assert report.levels == {"vision": "full"}
    assert not check_parity(model, prompt, atol=0.0).holds


@pytest.mark.families
@pytest.mark.parametrize("kind", sorted(UNREAD_TOWERS))
def test_what_is_not_full_says_why(kind: str, place: Path, field: str) -> None:
    model = model_of(kind, place)
    report = check_parity(model, prepare(model, CaptureSpec("", picture=field)).prompt)
    assert report.level in ("scores", "none")
    assert all(layer.why.startswith(UNREAD_TOWERS[kind]) for layer in report.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_patches_and_what_the_model_puts_around_them(kind: str, place: Path, field: str) -> None:
    before, behind = BEFORE[kind]
    rows = 3 if kind == "dinov3" else 4  # which takes any size
    patches = [f"img {row},{column}" for row in range(rows) for column in range(4)]
    prompt = read(kind, place, field).prompt
    assert list(prompt.labels) == [*before, *patches, *behind]
    assert sorted(prompt.medium.patches) == list(range(len(before), len(before) + len(patches)))


def test_patches_are_found_in_whatever_order_the_model_puts_them() -> None:
    """The places are asked of the model: one that turns the order of its patches round has it told so."""

    class Backwards(hf.ViTModel):
        def __init__(self, config: hf.ViTConfig) -> None:
            super().__init__(config)
            self.embeddings.register_forward_hook(lambda module, args, states: states.flip(1))

    torch.manual_seed(0)
    model = Backwards(hf.ViTConfig(**SIDES)).eval()
    rouse(model)
    found = patch_tokens(model, torch.randn(1, 3, 56, 56), {}, (14, 14))
    assert found.tokens == (*range(15, -1, -1), "[CLS]")


@pytest.mark.parametrize(
    ("kind", "left", "right"),
    [
        ("vit", 0.0, 1.0),  # the whole, made a square
        ("clip", 0.5 - 83 / 161 / 2, 0.5 + 83 / 161 / 2),  # the middle, as wide as the picture is high
        pytest.param("deit", 1 / 16, 15 / 16, marks=pytest.mark.families),  # 56 of the 64 that it was made
    ],
)
def test_patches_lie_where_the_processor_cut_them(
    kind: str, left: float, right: float, place: Path, field: str
) -> None:
    boxes = [patch.box for patch in read(kind, place, field).prompt.medium.patches.values()]
    assert min(box[0] for box in boxes if box) == pytest.approx(left, abs=1e-6)
    assert max(box[2] for box in boxes if box) == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"text": "what is this"}, "reads pictures; give it one with picture="),
        ({"text": "what is this", "picture": "FIELD"}, "reads a picture alone; leave out text"),
        ({"picture": ["FIELD", "FIELD"]}, "one picture at a time, got 2"),
        ({"picture": "FIELD", "generate": 2}, "only a causal model has an answer"),
    ],
)
def test_what_a_vision_tower_cannot_be_given_is_a_line(how: dict, said: str, place: Path, field: str) -> None:
    files = {"FIELD": field}
    if "picture" in how:
        given = how["picture"]
        how = how | {"picture": files[given] if isinstance(given, str) else [files[one] for one in given]}
    with pytest.raises(AttnscopeError) as refused:
        attnscope.capture(model_of("vit", place), **how)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (hf.ResNetConfig, "no attention: it is made of convolutions"),
        (hf.SwinConfig, "in stages"),
        pytest.param(hf.SamVisionConfig, "in windows of patches", marks=pytest.mark.families),
        pytest.param(hf.VideoMAEConfig, "videos", marks=pytest.mark.families),
        pytest.param(hf.MobileViTConfig, "does not say how it divides them", marks=pytest.mark.families),
    ],
)
def test_why_a_model_of_pictures_is_not_read(config: type, why: str) -> None:
    with pytest.raises(ModelError, match=f"reads pictures, but .*{why}"):
        check_tower(config(), "MODEL")


def test_patches_that_are_left_out_by_chance_are_refused() -> None:
    model = hf.ViTMAEModel(hf.ViTMAEConfig(**SIDES)).eval()
    with pytest.raises(ModelError, match="leaves out patches by chance"):
        patch_tokens(model, torch.randn(1, 3, 56, 56), {}, (14, 14))


def test_tokens_of_several_patches_are_refused() -> None:
    model = hf.ViTModel(hf.ViTConfig(**SIDES)).eval()
    rouse(model)
    model.embeddings.register_forward_hook(lambda module, args, states: states + states.roll(1, 1))
    with pytest.raises(ModelError, match="tokens of several patches"):
        patch_tokens(model, torch.randn(1, 3, 56, 56), {}, (14, 14))


def test_a_model_of_pictures_has_no_tokenizer_and_no_corpus(place: Path) -> None:
    model = model_of("vit", place)
    with pytest.raises(ModelError, match="reads pictures, and has no tokenizer"):
        load_tokenizer(LoadOptions(model=str(place / "vit")))
    with pytest.raises(ModelError, match="reads pictures alone"):
        check_fields(Job(), model)
    with pytest.raises(ModelError, match="an ablation is for a causal model"):
        attnscope.ablate(model)


def test_a_folder_without_an_image_processor_is_a_line(place: Path, field: str) -> None:
    model = model_of("vit", place)
    without = replace(model, source_folder=place)
    with pytest.raises(ModelError, match="brings no processor, and pictures need one"):
        attnscope.capture(without, picture=field)


def test_a_model_that_writes_the_text_of_a_picture_is_named() -> None:
    parts = hf.ViTConfig(**SIDES), hf.TrOCRConfig(decoder_layers=1)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.architectures = ["VisionEncoderDecoderModel"]
    with pytest.raises(ModelError, match=r"writes the text of a picture.* save its encoder"):
        model_class(config, task_of(config), "MODEL")


def test_what_a_towers_forward_needs_and_nothing_makes_is_named(place: Path, field: str) -> None:
    """A tower that is given its patches in a row, with their grid, is read within the whole model."""
    need_image_processors()
    torch.manual_seed(0)
    tower = hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**HEADS | {"hidden_size": 32, "patch_size": 14}))
    tower.save_pretrained(place / "siglip2")
    hf.ViTImageProcessorPil(size=SQUARE).save_pretrained(place / "siglip2")
    with pytest.raises(ModelError, match="needs pixel_attention_mask, which its image processor does not make"):
        attnscope.capture(load(LoadOptions(model=str(place / "siglip2"))), picture=field)


@pytest.mark.e2e
def test_commands_read_a_picture_alone(place: Path, field: str, tmp_path: Path) -> None:
    folder = saved_alone("vit", place)
    given = ("-m", folder, "--picture", field)
    rows = call("relations", *given, "--query", '"[CLS]"', "--format", "csv").ok().rows
    assert {row["query_token"] for row in rows} == {"[CLS]"}
    call("draw", *given, "--out", str(tmp_path / "maps")).ok()
    assert (tmp_path / "maps" / "picture.png").is_file()
    call("view", *given, "--out", str(tmp_path / "page.html")).ok()
    assert "vit: a picture" in (tmp_path / "page.html").read_text("utf-8")
    assert "img 0,0" in call("text", *given, "--format", "table").ok().out.decode()
    assert "parity holds: 3 at level full" in call("parity", *given, "--whole").ok().err
    for name in ("keys", "rollout"):
        assert b"[CLS]" in call(name, *given).ok().out


def test_a_tower_that_is_given_patches_reads_pictures_whatever_its_class_calls_them() -> None:
    """Qwen3-VL's leaves `main_input_name` at transformers' default, and was taken for a model of text."""
    assert task_of(hf.Qwen3VLVisionConfig()) == "vision"
    assert task_of(hf.Qwen3VLTextConfig()) == "decoder"
