"""What a model's folder says of its feature extractor, its image processor and its whole processor."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from fuzzing.made import copied, lines, llava, picture, sound, whisper
from fuzzing.trying import Try, kind
from fuzzing.words import CODE, JSONS, damage, edit, odd_file, word


def evil(*names: str, **said: Any) -> dict[str, Any]:
    """What names a class of the folder's own for some of transformers' classes."""
    return {**said, "auto_map": dict.fromkeys(names, "evil.Evil")}


PAIR = ["evil.Evil", "evil.Evil"]
BROUGHT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("preprocessor_config.json", evil("AutoFeatureExtractor", feature_extractor_type="NoSuch")),
    ("preprocessor_config.json", evil("AutoImageProcessor", image_processor_type="NoSuch")),
    ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": PAIR}}),
    ("preprocessor_config.json", evil("AutoProcessor", processor_class="NoSuch")),
    ("processor_config.json", evil("AutoProcessor", processor_class="NoSuch")),
    ("processor_config.json", evil("AutoImageProcessor", image_processor={"image_processor_type": "NoSuch"})),
    ("processor_config.json", {"image_processor": evil("AutoImageProcessor")}),
    ("processor_config.json", {"feature_extractor": evil("AutoFeatureExtractor")}),
    ("processor_config.json", {"video_processor": evil("AutoVideoProcessor")}),
    ("video_preprocessor_config.json", evil("AutoVideoProcessor", video_processor_type="NoSuch")),
    ("tokenizer_config.json", {"tokenizer_class": "NoSuch", "auto_map": {"AutoTokenizer": PAIR}}),
    ("config.json", evil("AutoConfig", "AutoFeatureExtractor", "AutoImageProcessor", "AutoProcessor")),
    ("generation_config.json", {"custom_generate": "evil"}),
)
TYPES = ("feature_extractor_type", "image_processor_type", "processor_class")  # of a class that transformers has
# Another folder, or a repository, whose class is asked for by name.
CLASSES = ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoFeatureExtractor", "DacModel", "NoSuch")
ELSEWHERE = ("other", "{here}/other", "owner/tracker", "../here/other", "/dev/zero", "")
CHANGED: dict[str, tuple[Any, ...]] = {
    "vision_feature_select_strategy": ("full", "default", "x"), "num_additional_image_tokens": (0, 1, 2, 10**9, -1),
    "patch_size": (0, 1, 7, 10**6), "image_token": ("a", "", "<s>"), "size": ({"shortest_edge": 10**6}, 0, {}),
    "crop_size": ({"height": 10**6, "width": 10**6}, {"height": 0, "width": 0}), "image_mean": ([], [0], "x"),
    "feature_size": (0, 10**7, 80), "n_fft": (0, 1, 10**8), "hop_length": (0, 1, 10**7), "chunk_length": (0, 10**6),
    "sampling_rate": (0, 1, 10**9), "n_samples": (0, 10**10), "nb_max_frames": (10**9,), "resample": (99, "x"),
}  # fmt: skip


@kind
def processors(rng: random.Random, folder: Path) -> Try:
    made = rng.choice((whisper, llava))
    model = copied(made(), folder)
    for place in (model, folder / "other"):
        place.mkdir(exist_ok=True)
        (place / "evil.py").write_text(CODE)
    brought = {"model_type": "evil", "auto_map": dict.fromkeys(CLASSES, "evil.Evil")}
    (folder / "other" / "config.json").write_text(json.dumps(brought))
    what = rng.choice(("brought", "brought", "elsewhere", "changed", "damaged", "odd"))
    names = [path.name for path in model.glob("*processor*.json")]
    if what == "brought":
        name, said = rng.choice((*BROUGHT, *BROUGHT[:2] * 4))
        edit(model / name, lambda values: values.update(said))
        if rng.random() < 0.5:  # the folder's own class is the only one that is named
            edit(model / name, lambda values: [values.pop(one, None) for one in TYPES])
    elif what == "elsewhere":
        path = rng.choice(ELSEWHERE).replace("{here}", str(folder))
        said = {"audio_tokenizer_class": rng.choice(CLASSES), "audio_tokenizer_name_or_path": path}
        name = rng.choice(("processor_config.json", "processor_config.json", "audio_tokenizer_config.json"))
        edit(model / name, lambda values: values.update(said if "audio" in name else {"audio_tokenizer": said}))
    elif what == "changed":
        key = rng.choice(list(CHANGED))
        edit(model / rng.choice(names), lambda values: values.update({key: rng.choice((*CHANGED[key], *JSONS))}))
    elif what == "damaged":
        damage(rng, model / rng.choice(names))
    else:
        odd_file(rng, model / rng.choice((*names, "processor_config.json", "chat_template.jinja")))
    return _asked(rng, folder, model, made is whisper)


def _asked(rng: random.Random, folder: Path, model: Path, hears: bool) -> Try:
    """A command that gives the model a sound, or a picture with a text."""
    given = folder / ("tone.wav" if hears else "field.png")
    given.write_bytes(sound() if hears else picture().read_bytes())
    more = rng.choice(([], ["--offline"], ["-q"], ["-q", "--offline"]))
    if rng.random() < 0.25:
        (folder / "corpus.jsonl").write_bytes(lines({"text": "hi", "media": str(given), "target": "hi"}))
        fields = ["--audio-field", "media", "--target-field", "target"] if hears else ["--picture-field", "media"]
        arguments = ["batch", "corpus.jsonl", "--to-stdout", "jsonl", "--model", str(model), *fields, *more]
    else:
        asked = ["--audio", str(given), "--target", "hi"] if hears else ["--text", "hi", "--picture", str(given)]
        arguments = [rng.choice(("heads", "heads", "relations")), "--model", str(model), *asked, *more]
    return Try(arguments, before=online)


def online() -> None:
    """What asks the network does so, and is heard."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = False


@kind
def names_of_files(rng: random.Random, folder: Path) -> Try:
    """Files of a model's folder that are no files."""
    made = rng.choice((whisper, llava))
    model = copied(made(), folder)
    path = rng.choice(sorted(model.iterdir()))
    odd_file(rng, path)
    if rng.random() < 0.2:
        path.unlink() if not path.is_dir() else path.rmdir()
        path.symlink_to(word(rng)[:200] or "x")
    return _asked(rng, folder, model, made is whisper)
