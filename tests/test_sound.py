"""Sounds: read from files, as frames with their seconds, through a tiny Whisper in Python and on the command line."""

import json
import shutil
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from transformers import AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor, WhisperTokenizer

import attnscope
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.export.drawing import layer_maps
from attnscope.export.manifest import prompt_of, read_manifest
from attnscope.hooks.generation import POSITIONS
from attnscope.inputs import sound as sounds
from attnscope.inputs.sound import Sound, read_sound, sound_of
from attnscope.model.loading import wrap
from attnscope.model.selection import CROSS, DECODER, ENCODER
from attnscope.observe.request import CaptureSpec, Request, View
from attnscope.observe.run import prepare, read, target_lines
from helpers.command_line import SENTENCE, call
from helpers.sounds import FRAMES, HEADS, LAYERS, RATE, samples, saved_whisper, tiny_listener, write_wav

SPOKEN = 0.6  # seconds
OWN = 30  # frames of them
EVERY = Request(relations=True, top_k=None, maps="all", weights=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_whisper(tmp_path_factory.mktemp("models") / "whisper")


@pytest.fixture(scope="module")
def whisper(folder):
    return attnscope.load(str(folder), device="cpu")


@pytest.fixture(scope="module")
def wav(tmp_path_factory):
    return write_wav(tmp_path_factory.mktemp("sounds") / "tone.wav", samples(SPOKEN))


@pytest.fixture(scope="module")
def seen(whisper, wav):
    return attnscope.capture(whisper, audio=wav, target="hello", request=EVERY)


def features_of(folder, wav):
    """The features as transformers makes them, from a second reading of the file."""
    heard, rate = soundfile.read(wav, dtype="float32")
    return WhisperFeatureExtractor.from_pretrained(folder)(heard, sampling_rate=rate, return_tensors="pt")


def asked(command, folder, wav, *arguments):
    return call(command, "-m", str(folder), "--audio", str(wav), *arguments)


# Files


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_pcm_of_every_width(width, tmp_path):
    sound = read_sound(str(write_wav(tmp_path / "a.wav", samples(0.1), width=width)))
    assert (sound.rate, sound.samples.dtype, len(sound.samples)) == (RATE, np.float32, 1600)
    np.testing.assert_allclose(sound.samples, samples(0.1), atol=1.1 / 2 ** (8 * width - 1))


def test_channels_are_averaged(tmp_path):
    both_SC = np.stack([samples(0.1), 0.25 * samples(0.1, pitch=500)], 1)
    sound = read_sound(str(write_wav(tmp_path / "a.wav", both_SC)))
    expected = [(left + right) / 2 for left, right in both_SC.tolist()]
    np.testing.assert_allclose(sound.samples, expected, atol=1e-4)


@pytest.mark.parametrize(("suffix", "kind"), [("flac", None), ("ogg", None), ("mp3", None), ("wav", "FLOAT")])
def test_other_files_are_read_by_soundfile(suffix, kind, tmp_path):
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, samples(0.5), RATE, subtype=kind)
    sound = read_sound(str(path))
    assert sound.rate == RATE
    assert abs(sound.seconds - 0.5) < 0.1  # mp3 pads
    lossless = suffix in ("flac", "wav")
    if lossless:
        np.testing.assert_allclose(sound.samples, samples(0.5), atol=1e-4)


def test_without_the_extra_wav_is_read_and_others_are_refused(tmp_path, monkeypatch, whisper):
    plain, flac = write_wav(tmp_path / "a.wav", samples(0.1)), tmp_path / "a.flac"
    soundfile.write(flac, samples(0.1), RATE)
    monkeypatch.setattr(sounds, "find_spec", lambda name: None)
    assert len(read_sound(str(plain)).samples) == 1600
    with pytest.raises(UsageError, match="need soundfile"):
        read_sound(str(flac))
    with pytest.raises(UsageError, match=r"8000 .* 16000"):
        prepare(whisper, CaptureSpec(sound_of((samples(0.1, 8_000), 8_000))))


def test_sounds_from_python(wav):
    heard = read_sound(str(wav))
    assert sound_of(wav).sha256 == sound_of(str(wav)).sha256 == heard.sha256
    assert sound_of((heard.samples.astype(np.float64), RATE)).sha256 == heard.sha256
    whole = np.round(heard.samples * 2**15).astype(np.int16)
    assert sound_of((whole, RATE)).sha256 == heard.sha256
    assert sound_of((np.stack([whole, whole], 1), RATE)).sha256 == heard.sha256
    assert sound_of((heard.samples, 8_000)).sha256 != heard.sha256
    with pytest.raises(UsageError, match="expected samples"):
        sound_of((np.zeros((2, 2, 2)), RATE))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros(0), "empty"),
        (np.zeros(100), "silent"),
        (np.array([0.0, np.nan]), "not numbers"),
        (np.array([0.0, np.inf]), "not numbers"),
    ],
)
def test_what_is_no_sound(given, says):
    with pytest.raises(InputError, match=says):
        sound_of((given, RATE))
    with pytest.raises(InputError, match="samples per second"):
        Sound(samples(0.1).astype(np.float32), 3)


# Frames


def test_every_stack_is_the_models_own(whisper, seen, folder, wav):
    """A second spelling: the model loaded by transformers, with its own features and target."""
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder, attn_implementation="eager").eval()
    target = WhisperTokenizer.from_pretrained(folder)("hello", return_tensors="pt").input_ids[:, :-1]
    assert list(seen.queries.ids) == target[0].tolist()
    with torch.no_grad():
        given = features_of(folder, wav).input_features
        found = model(given, decoder_input_ids=target, output_attentions=True, use_cache=False)
    expected = {ENCODER: found.encoder_attentions, DECODER: found.decoder_attentions, CROSS: found.cross_attentions}
    for kind, matrices in expected.items():
        weights = seen.of(kind).weights
        assert len(weights) == len(matrices) == LAYERS
        for layer, one in enumerate(matrices):
            torch.testing.assert_close(weights[layer], one[0], rtol=0, atol=1e-6)
    assert seen.of(CROSS).weights[0].shape == (HEADS, target.shape[1], FRAMES)
    assert seen.failures == []
    assert seen.unmeasured == []


def test_frames_are_named_by_their_seconds(seen):
    prompt = seen.prompt
    assert len(prompt) == FRAMES
    assert prompt.labels == tuple(f"{place * 2 / 100:.2f}s" for place in range(FRAMES))
    assert prompt.tokens[1] == "0.02-0.04s"
    assert list(prompt.special) == [place >= OWN for place in range(FRAMES)]  # the silence that pads
    assert seen.of(CROSS).keys is prompt
    assert set(seen.of(CROSS).relations()["key_token"].to_pylist()) <= set(prompt.tokens)


def test_no_two_frames_are_equal_tokens(seen):
    scores = seen.of(ENCODER).columns.scores
    assert np.isnan(scores["duplicate_token"].value).all()
    assert np.isfinite(scores["previous_token"].value).all()


def test_what_pads_is_a_question_of_its_own(whisper, wav):
    alone = attnscope.load(str(whisper.source_folder), device="cpu", task=ENCODER)
    found = attnscope.capture(alone, audio=wav, query="0.40s", key="special")
    assert found.chosen.query.positions == (20,)
    assert found.chosen.key.positions == tuple(range(OWN, FRAMES))
    expected = found.weights[1][2, 20, OWN:].sum()
    [head] = [head for head in found.heads if head.name == "L1H2"]
    assert abs(head.score["mass"] - float(expected)) < 1e-6
    assert found.unmeasured == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_sound_is_cut(side, whisper):
    whole = samples(1.5)
    with pytest.raises(InputError, match=r"1\.50 s, .* 1;"):
        prepare(whisper, CaptureSpec(sound_of((whole, RATE)), target="hello"))
    run = prepare(whisper, CaptureSpec(sound_of((whole, RATE)), target="hello", truncate=side))
    kept = whole[:RATE] if side == "right" else whole[-RATE:]
    alone = prepare(whisper, CaptureSpec(sound_of((kept, RATE)), target="hello"))
    torch.testing.assert_close(run.source.medium.inputs["input_features"], alone.source.medium.inputs["input_features"])
    assert (run.source.removed, any(run.source.special)) == (25, False)
    assert run.source.labels[0] == {"left": "0.50s", "right": "0.00s"}[side]


def test_another_rate_is_resampled(whisper):
    given = [
        prepare(whisper, CaptureSpec(sound_of((samples(SPOKEN, rate), rate)), target="hello"))
        for rate in (44_100, RATE)
    ]
    first, second = (run.source.medium.inputs["input_features"] for run in given)
    assert sum(given[0].source.special) == FRAMES - OWN
    loud = second > second.max() - 0.5
    assert (first - second)[loud].abs().max() < 0.05


def test_a_target_is_generated_by_the_models_own_rule(whisper, folder, wav):
    run = prepare(whisper, CaptureSpec(sound_of(wav), generate=8))
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    made = model.generate(features_of(folder, wav).input_features, max_new_tokens=8, do_sample=False)
    starts = ["<|startoftranscript|>", "<|en|>", "<|notimestamps|>"]
    assert list(run.prompt.tokens[:3]) == starts
    assert list(run.prompt.ids[3:]) == [token for token in made[0].tolist() if token not in run.prompt.ids[:3]]
    assert run.facts["target"]["generated"]


@pytest.mark.e2e
def test_the_rows_of_a_target_are_those_that_made_it(whisper, wav):
    seen = attnscope.capture(whisper, audio=wav, generate=8)
    assert seen.facts["largest_difference_to_steps"] < 1e-5


def test_a_target_may_say_its_own_start(whisper, wav):
    starts = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>"]
    run = prepare(whisper, CaptureSpec(sound_of(wav), target="".join([*starts, "hi"])))
    assert list(run.prompt.tokens) == [*starts, "h", "i"]


def test_a_target_has_no_more_tokens_than_the_decoder_reads(whisper, wav):
    most = whisper.geometry.max_positions
    for asked_for in (None, 300):
        run = prepare(whisper, CaptureSpec(sound_of(wav), generate=asked_for))
        assert len(run.prompt) == most == 3 + run.facts["target"]["made"]
        assert (run.facts["target"]["asked"], run.facts["target"]["stopped_by"]) == (asked_for, POSITIONS)
    assert "(37 of 300 tokens, as many as the decoder reads)" in "".join(target_lines(run))
    few = prepare(whisper, CaptureSpec(sound_of(wav), generate=1)).facts["target"]
    assert (few["made"], few["stopped_by"], len(few["ids"])) == (1, "number asked for", 4)


def test_fused_reads_what_eager_reads(whisper, wav, seen):
    run = prepare(whisper, CaptureSpec(sound_of(wav), EVERY, engine="fused", target="hello"))
    fused = run.observe()
    assert run.facts["largest_difference_to_eager"] < 1e-5
    for kind in (ENCODER, DECODER, CROSS):
        for layer in range(LAYERS):
            torch.testing.assert_close(fused.of(kind).weights[layer], seen.of(kind).weights[layer], rtol=0, atol=1e-6)


def test_every_layer_holds_against_the_oracle(whisper, wav):
    found = read(whisper, CaptureSpec(sound_of(wav), target="hello", verify=True))
    assert (found.facts["parity"]["holds"], found.facts["parity"]["level"]) == (True, "full")


def test_norms_of_what_frames_write(whisper, wav, seen):
    """A |v W_O|, spelled with the model's own modules."""
    request = Request(view=View(weights="value"), weights=True)
    found = attnscope.capture(whisper, audio=wav, target="hello", request=request)
    encoder = whisper.model.model.encoder
    states = []
    handle = encoder.layers[0].self_attn_layer_norm.register_forward_hook(lambda *call: states.append(call[-1]))
    with torch.no_grad():
        encoder(seen.prompt.medium.inputs["input_features"])
        handle.remove()
        attention = encoder.layers[0].self_attn
        v_KHV = attention.v_proj(states[0])[0].unflatten(-1, (HEADS, -1))
        W_O_EHV = attention.out_proj.weight.unflatten(-1, (HEADS, -1))
        norm_HK = torch.einsum("khv,ehv->hke", v_KHV, W_O_EHV).norm(dim=-1)
    expected = seen.of(ENCODER).weights[0] * norm_HK[:, None]
    torch.testing.assert_close(found.of(ENCODER).weights[0], expected, rtol=1e-4, atol=1e-6)


def test_maps_are_labelled_by_seconds_alone(seen):
    [maps, _] = layer_maps(seen.of(CROSS))
    assert (maps.axis_K.numbered, maps.axis_Q.numbered) == (False, True)
    assert maps.axis_K.marks(5) == (list(range(0, FRAMES, 5)), [f"{place / 10:.2f}s" for place in range(10)])
    assert maps.axis_Q.marks(2)[1][0].startswith("0 ")


def test_models_in_memory_say_what_they_lack(whisper, wav):
    bare = wrap(whisper.model, whisper.tokenizer, "in memory")
    assert (
        len(prepare(bare, CaptureSpec(sound_of(wav), target="hello")).source) == FRAMES
    )  # from where transformers loaded it
    bare.model.config.name_or_path, kept = "", bare.model.config.name_or_path
    try:
        with pytest.raises(ModelError, match="feature extractor"):
            prepare(bare, CaptureSpec(sound_of(wav), target="hello"))
    finally:
        bare.model.config.name_or_path = kept


def test_one_text_or_one_sound(whisper, demo, wav):
    for how in ({}, {"text": SENTENCE, "audio": wav}):
        with pytest.raises(UsageError, match="one text, or one sound"):
            attnscope.capture(whisper, **how)
    with pytest.raises(ModelError, match=r"text, .*sound"):
        attnscope.capture(demo, audio=wav)


STEPS = {"moonshine": 0.024, "speech_to_text": 0.04, "sew": 0.04, "sew-d": 0.04}  # seconds; 0.02 for others
AS_WAV2VEC2 = ("data2vec-audio", "hubert", "unispeech", "unispeech-sat")
ENCODERS = ["data2vec-audio", "hubert", "sew", "sew-d", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-bert"]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.families if family in AS_WAV2VEC2 else ())
        for family in (*ENCODERS, "wav2vec2-conformer", "moonshine", "speech_to_text")
    ],
)
def test_other_models_of_sound(family, demo, tmp_path):
    loaded = tiny_listener(family, demo.tokenizer, tmp_path)
    two = loaded.geometry.task == "seq2seq"
    given = (samples(SPOKEN), RATE)
    seen = attnscope.capture(loaded, audio=given, target="hello" if two else None, request=Request(weights=True))
    more = {"decoder_input_ids": torch.tensor([seen.queries.ids]), "use_cache": False} if two else {}
    with torch.no_grad():
        found = loaded.model(seen.prompt.medium.inputs[loaded.model.main_input_name], **more, output_attentions=True)
    names = {ENCODER: "encoder_attentions", DECODER: "decoder_attentions", CROSS: "cross_attentions"}
    for kind, name in (names if two else {ENCODER: "attentions"}).items():
        weights, expected = seen.of(kind).weights, getattr(found, name)
        assert len(weights) == len(expected) > 0
        for layer, one in enumerate(expected):
            torch.testing.assert_close(weights[layer], one[0], rtol=0, atol=1e-6)
    step = STEPS.get(family, 0.02)
    assert float(seen.prompt.labels[7][:-1]) == pytest.approx(7 * step, abs=1e-9)
    assert abs(len(seen.prompt) * step - SPOKEN) < 2.5 * step
    assert not any(seen.prompt.special)


def test_the_mean_of_the_heads_is_no_head(demo, tmp_path):
    loaded = tiny_listener("wavlm", demo.tokenizer, tmp_path)
    with pytest.raises(ModelError, match="the mean of its heads"):
        attnscope.capture(loaded, audio=(samples(SPOKEN), RATE))
    with pytest.raises(InputError, match="less than a frame"):
        prepare(loaded, CaptureSpec(sound_of((samples(0.001), RATE))))


# The command line


def test_heads_of_a_sound(folder, wav):
    result = asked("heads", folder, wav, "--generate", "4", "--format", "csv")
    assert sorted({row["stack"] for row in result.ok().rows}) == [CROSS, DECODER, ENCODER]
    assert "0.60 s of sound at 16000 Hz: 30 of 50 frames; padded with silence from 0.60s on" in result.err
    assert "target, generated" in result.err


def test_relations_name_frames(folder, wav, seen):
    how = ("--target", "hello", "--select", "cross.1.2", "--top-k", "all", "--format", "csv")
    for row in asked("relations", folder, wav, *how).ok().rows:
        expected = seen.of(CROSS).weights[1][2, int(row["query"]), int(row["key"])]
        assert abs(float(row["weight"]) - float(expected)) < 1e-5
        assert row["key_token"] == seen.prompt.tokens[int(row["key"])]


def test_parity_up_to_level_full(folder, wav, tmp_path):
    out = tmp_path / "certificate.json"
    found = asked("parity", folder, wav, "--target", "hello", "--format", "csv", "--out", str(out)).ok().rows
    assert {(row["stack"], row["level"], row["holds"]) for row in found} == {
        (kind, "full", "True") for kind in (ENCODER, DECODER, CROSS)
    }
    said = json.loads(out.read_text())
    assert (said["source"]["tokens"], len(said["source"]["sha256"])) == (FRAMES, 64)


def test_a_run_in_a_folder_is_of_one_sound(folder, wav, tmp_path):
    out, other = tmp_path / "run", write_wav(tmp_path / "other.wav", samples(SPOKEN, pitch=301))
    how = ("--target", "hello", "--out", str(out), "--format", "csv")
    first = asked("keys", folder, wav, *how)
    assert first.ok().rows
    again = asked("keys", folder, wav, *how)
    assert (again.code, again.out) == (0, first.out)
    refused = asked("keys", folder, other, *how)
    assert (refused.code, "another run" in refused.err) == (2, True)
    said = read_manifest(out / "manifest.json")
    assert said["options"]["audio"] == str(wav)
    assert prompt_of(said, out).medium.sha256 == read_sound(str(wav)).sha256


def test_pictures_of_a_sound(folder, wav, tmp_path):
    how = ("--target", "hello", "--select", "cross.1.2", "--figures", "heads", "--out", str(tmp_path))
    result = asked("draw", folder, wav, *how)
    assert result.out.decode().split() == [str(tmp_path / "cross" / "heads" / "L01H02.png")], result.err


def test_a_run_is_repeated_from_its_sound(folder, tmp_path):
    path, out = write_wav(tmp_path / "a.wav", samples(SPOKEN)), tmp_path / "run"
    first = asked("keys", folder, path, "--target", "hello", "--out", str(out), "-q")
    assert call("keys", "--from", str(out), "-q").out == first.out
    other = write_wav(tmp_path / "b.wav", samples(SPOKEN, pitch=200))
    assert call("keys", "--from", str(out), "--audio", str(other), "-q").out not in (first.out, b"")
    shutil.copy(other, path)
    refused = call("keys", "--from", str(out))
    assert (refused.code, "sound" in refused.err) == (2, True)


def test_standard_input_and_a_file_of_options(folder, wav, tmp_path):
    how = ("--target", "hello", "--format", "csv", "-q")
    first = asked("keys", folder, wav, *how)
    assert "0.00-0.02s" in {row["token"] for row in first.ok().rows}
    assert call("keys", "-m", str(folder), "--audio", "-", *how, stdin=wav.read_bytes()).out == first.out
    (tmp_path / "options.yaml").write_text(f"model: {folder}\naudio: {wav}\ntarget: hello\n")
    assert call("keys", "--config", str(tmp_path / "options.yaml"), "--format", "csv", "-q").out == first.out


@pytest.mark.parametrize("command", ["rollout", "text", "view"])
def test_what_is_of_one_text_reads_the_encoder_alone(command, folder, wav, tmp_path):
    how = {"view": ("--out", str(tmp_path / "page.html")), "text": ("--query", "last"), "rollout": ()}[command]
    result = asked(command, folder, wav, "--set", "task=encoder", *how).ok()
    assert "not measured" not in result.err
    assert b"0.60-0.62s" in (result.out or (tmp_path / "page.html").read_bytes()) or command == "view"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--audio", "absent.wav"), 4, "there is no file absent.wav"),
        (("--audio", "."), 4, "is a folder"),
        (("--audio", "{text}"), 4, "not a file of sound that can be read"),
        (("--audio", "-"), 4, "not a file of sound that can be read"),
        (("--audio", "{empty}"), 4, "the sound is empty"),
        (("--audio", "{silent}"), 4, "the sound is silent"),
        (("--audio", "{nan}"), 4, "not numbers"),
        (("--audio", "{long}"), 4, "the model reads at most 1"),
        (("--audio", "{wav}", "--text", "a"), 2, "--text and --audio were both given"),
        (("--audio", "{wav}", "--chat"), 2, "--chat needs a text"),
        (("--audio", "{wav}", "-m", "demo"), 3, "choose a model that reads sound"),
        (("--text", "a"), 3, "give it a recording with --audio FILE"),
        (("--ids", "{ids}"), 3, "give it a recording with --audio FILE"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(arguments, code, said, folder, wav, tmp_path):
    made = {"wav": wav} | {name: tmp_path / f"{name}.wav" for name in ("empty", "silent", "nan", "long", "text", "ids")}
    made["text"].write_text("RIFF and no more")
    made["ids"].write_text("1 2")
    for name, given in (("empty", np.zeros(0)), ("silent", np.zeros(RATE // 2)), ("long", samples(1.5))):
        write_wav(made[name], given)
    soundfile.write(made["nan"], np.array([0.1, np.nan, 0.2], np.float32), RATE, subtype="FLOAT")
    result = call("heads", "-m", str(folder), *(one.format(**made) for one in arguments))
    assert (result.code, result.out) == (code, b""), result.err
    assert len(result.err.strip().splitlines()) == 1, result.err
    assert said in result.err


def test_a_feature_extractor_of_another_model(folder, wav, tmp_path):
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    path = other / "preprocessor_config.json"
    for change, says in (
        ({"feature_size": 20}, "makes 50 frames of 20 numbers, and the model reads 50 of 16"),
        ({"chunk_length": 2}, "makes 100 frames of 16 numbers"),
        ({"sampling_rate": 0}, "no feature extractor that can be read"),
    ):
        path.write_text(json.dumps(json.loads((folder / path.name).read_text()) | change))
        result = asked("heads", other, wav)
        assert (result.code, len(result.err.strip().splitlines())) == (3, 1), result.err
        assert says in result.err
    path.unlink()
    assert asked("heads", other, wav).code == 3


def test_a_recording_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path, wav):
    data = wav.read_bytes()
    path = tmp_path / "cut.wav"
    path.write_bytes(data[:-1001])
    heard = read_sound(str(path))
    with wave.open(str(wav)) as whole:
        assert 0 < len(heard.samples) < whole.getnframes()


def test_why_a_frame_is_looked_at(whisper, wav):
    sound = read_sound(str(wav))
    for head, side, first in (
        ("cross L1H2", "key", "encoder embedding"),
        ("cross L1H2", "query", "embedding"),
        ("encoder L1H2", "key", "encoder embedding"),
    ):
        found = attnscope.why(whisper, sound, head, key=7, side=side, target="ab")
        assert first in {one.name for one in found.parts.components}
        assert found.parts.sum == pytest.approx(found.parts.logit, abs=1e-5)
        assert found.token(7) == "0.14s(7)"
