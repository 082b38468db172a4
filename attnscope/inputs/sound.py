"""A sound -> the Prompt of an encoder that reads sound: a token per frame, named by its seconds, and the features.

    sound = read_sound("speech.wav")
    prompt = sound_prompt(loaded, sound)       # of Whisper 1,500 frames of 0.02 s, silence after the sound itself

WAV is read by Python's own `wave`; other files, and resampling, need the extra `audio`. The features are those of the
checkpoint's own feature extractor.

Shapes: S sample, C channel, B text, F feature, N input (a sample, or a vector of features).
"""

from __future__ import annotations

import hashlib
import math
import wave
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import InputError, ModelError, UsageError, first_line
from attnscope.inputs.processor import read_files
from attnscope.inputs.prompt import Medium, Prompt, Side
from attnscope.model.options import RUNS_CODE, TRUST, needs_code
from attnscope.utils.files import opened
from attnscope.utils.isolation import without_stderr

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel

MOST_SECONDS = 600  # of a file that are read
MOST_BYTES = 2**30  # of standard input
RATES = range(1_000, 768_001)  # samples per second that a recording may have
LONG = 1_000_000  # inputs, by which a model's stride is found
EXTRA = 'pip install "attnscope[audio]"'
MODEL_OF_SOUND = "choose a model that reads sound, such as openai/whisper-tiny"


@dataclass(frozen=True, eq=False)
class Sound:
    """A recording, one channel: samples (S,) float32, mostly within -1 to 1, and how many there are per second.

    whole: how many samples the recording has, of which the first are here. Raises InputError for one that is empty,
    silent, or not finite.
    """

    samples: np.ndarray
    rate: int
    whole: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", max(self.whole, len(self.samples)))
        if self.rate not in RATES:
            raise InputError(f"the sound has {self.rate} samples per second", f"give {RATES[0]} to {RATES[-1]}")
        if not len(self.samples):
            raise InputError("the sound is empty", "give a recording with at least one sample")
        if not np.isfinite(self.samples).all():
            raise InputError("the sound has samples that are not numbers (NaN or infinite)", "export it again")
        if not np.ptp(self.samples):
            raise InputError("the sound is silent: all its samples are equal", "check the recording's level")

    @property
    def seconds(self) -> float:
        return self.whole / self.rate

    @cached_property
    def sha256(self) -> str:
        """Hash of the samples and their rate, in hexadecimal."""
        return hashlib.sha256(f"{self.rate} ".encode() + self.samples.astype("<f4").tobytes()).hexdigest()


def sound_of(source: Any) -> Sound:
    """A sound from Python: a path, a Sound, or (samples, rate) with samples (S,) or (S, C), whole numbers or not.

    Raises InputError and UsageError, as `read_sound` and `Sound` do.

    >>> sound_of((np.sin(np.arange(16_000) / 10), 16_000)).seconds
    1.0
    """
    if isinstance(source, Sound):
        return source
    if not (isinstance(source, tuple) and len(source) == 2):
        return read_sound(str(source))
    samples, rate = np.asarray(source[0]), source[1]
    if samples.ndim not in (1, 2) or samples.dtype.kind not in "iuf" or int(rate) != rate:
        raise UsageError("expected samples (S,) or (S, C) and how many a second", "give {audio=(samples, rate)}")
    return Sound(_mono(samples), int(rate))


def read_sound(file: str) -> Sound:
    """A sound from a file, or from standard input where it is `-`: at most its first 10 minutes, channels averaged.

    Raises InputError for a file that cannot be read or is no sound, UsageError where the extra `audio` is needed.
    """
    with opened(file, "name a sound with {audio}", MOST_BYTES) as stream:
        try:
            with wave.open(stream) as recording:
                channels, width, rate, count, *_ = recording.getparams()
                if width > 4:
                    raise wave.Error(f"expected samples of 1 to 4 bytes, got {width}")
                data = recording.readframes(min(count, MOST_SECONDS * rate))
            data = data[: len(data) // (width * channels) * width * channels]  # a recording that was cut off
            samples = _numbers(data, width).reshape(-1, channels)
            return Sound(_mono(samples), rate, count if count > MOST_SECONDS * rate else 0)
        except (wave.Error, EOFError, RuntimeError):  # of another format, or cut off in its header
            stream.seek(0)

        # libsndfile reads flac, ogg, mp3, and WAV that is no plain PCM.
        name = "standard input" if file == "-" else file
        if find_spec("soundfile") is None:
            raise UsageError(f"{name} is not PCM WAV, and other files of sound need soundfile", EXTRA)
        import soundfile

        try:  # where libmpg123 warns, and callbacks of ours fail
            with without_stderr(), soundfile.SoundFile(stream) as recording:
                samples = recording.read(MOST_SECONDS * recording.samplerate, dtype="float32", always_2d=True)
                whole = recording.frames if recording.frames > len(samples) else 0
                return Sound(_mono(samples), recording.samplerate, whole)
        except (soundfile.SoundFileError, TypeError, ValueError) as error:
            raise InputError(f"{name} is not a file of sound that can be read", "give wav, flac, ogg or mp3") from error


def _numbers(data: bytes, width: int) -> np.ndarray:
    """The samples of PCM of so many bytes each: of one byte without a sign, else little-endian with one."""
    if width == 1:
        return np.frombuffer(data, np.uint8)
    if width == 3:  # as the upper bytes of four
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0]
    return np.frombuffer(data, f"<i{width}")


def _mono(samples: np.ndarray) -> np.ndarray:
    """Samples (S,) or (S, C) as (S,) float32, the mean of the channels; whole numbers within -1 to 1."""
    if samples.dtype.kind in "iu":
        half = 2.0 ** (8 * samples.dtype.itemsize - 1)
        samples = samples / half - (samples.dtype.kind == "u")
    return np.ascontiguousarray(samples.mean(1) if samples.ndim == 2 else samples, np.float32)


def reads_sound(model: Any) -> bool:
    """Whether the first thing that a model's forward takes is a sound, or features of one."""
    return getattr(model, "main_input_name", "input_ids") in ("input_features", "input_values")


def sound_prompt(loaded: LoadedModel, sound: Sound, truncate: Side | None = None) -> Prompt:
    """The prompt of a sound: a token per position of the encoder, `0.02s` and exactly `0.02-0.04s`, and its features.

    Its ids are the numbers of the frames, so that no two are equal; `special` are those of the silence that pads a
    sound to the length that the model reads. A longer sound is an InputError, or is cut on the side `truncate`.
    Raises ModelError where the checkpoint has no feature extractor, or one that is not this model's; UsageError where
    resampling needs the extra `audio`.
    """
    extractor = extractor_of(loaded)
    config, own_input, rate = loaded.model.config, loaded.model.main_input_name, extractor.sampling_rate
    samples = _resampled(sound, rate)

    # An input is a sample, or a vector of features, of which some models put several into one.
    hop = 1
    if own_input != "input_values":
        hop = getattr(extractor, "hop_length", rate // 100) * getattr(extractor, "stride", 1)
    stride = round(LONG / max(_positions(loaded, LONG), 1)) * hop  # samples from one position to the next
    positions_read = getattr(config, "max_source_positions", None)
    most = MOST_SECONDS * rate if positions_read is None else positions_read * stride
    most = min(most, getattr(extractor, "n_samples", most))

    # At most as many as the model reads; `removed` positions are cut off.
    whole, removed = max(len(samples), round(sound.seconds * rate)), 0
    if whole > most:
        if truncate is None:
            message = f"the sound has {sound.seconds:.2f} s, the model reads at most {most / rate:g}"
            raise InputError(message, "cut it, or use {truncate=right}")
        if truncate == "left" and whole > len(samples):
            raise InputError(f"of a sound over {MOST_SECONDS} s the end is not read", "cut it, or use {truncate=right}")
        samples = samples[:most] if truncate == "right" else samples[-most:]
        removed = math.ceil((whole - most) / stride)
    try:
        features = extractor(samples, sampling_rate=rate, return_tensors="pt")[own_input]
    except Exception as error:  # any family's code
        message = f"the feature extractor of {loaded.name} failed: {first_line(error)}"
        raise ModelError(message, MODEL_OF_SOUND) from error

    # The extractor may pad a sound to the model's length: `own` positions are of the sound, the others of silence. Its
    # inputs: of (B, S), (B, N, F) or (B, F, N) the side that is as long as so many samples make it.
    padded = hasattr(extractor, "n_samples")
    expected = (extractor.n_samples if padded else len(samples)) / hop
    count = _positions(loaded, min(features.shape[1:], key=lambda size: abs(size - expected)))
    own = _positions(loaded, math.ceil(len(samples) / hop))
    bins = getattr(config, "num_mel_bins", None)
    if padded and (positions_read, bins) != (count, features.shape[1]):
        raise ModelError(
            f"the feature extractor of {loaded.name} makes {count} frames of {features.shape[1]} numbers, and the "
            f"model reads {positions_read} of {bins}",
            "copy the model's own preprocessor_config.json into its folder",
        )
    if count < 1:
        raise InputError(f"the sound has {sound.seconds:g} s, which is less than a frame", "give a longer one")

    # Positions are named by their time in the whole recording, also where its beginning was cut off.
    step = stride / rate
    start = removed * step if truncate == "left" else 0.0
    digits = 2 if math.isclose(round(step, 2), step) else 3
    times = [f"{start + place * step:.{digits}f}" for place in range(count + 1)]
    labels, heading = tuple(f"{time}s" for time in times[:-1]), f"{sound.seconds:.2f} s of sound at {sound.rate} Hz: "
    ends = accumulate((len(label) + 1 for label in labels), initial=len(heading))
    return Prompt(
        text=heading + " ".join(labels),
        ids=tuple(range(count)),
        tokens=tuple(f"{first}-{last}s" for first, last in pairwise(times)),
        labels=labels,
        special=tuple(place >= own for place in range(count)),
        plain=tuple(f"{label} " for label in labels),
        turns=(),
        removed=removed,
        characters=tuple((first, last - 1) for first, last in pairwise(ends)),
        medium=Medium({own_input: features}, sound.sha256, step),
    )


def _resampled(sound: Sound, rate: int) -> np.ndarray:
    """The samples of a sound at another rate. Raises UsageError where that needs the extra `audio`."""
    if sound.rate == rate:
        return sound.samples
    if find_spec("soxr") is None:
        message = f"the sound has {sound.rate} samples per second, the model reads {rate}, and resampling needs soxr"
        raise UsageError(message, f"{EXTRA}, or resample it, for example with ffmpeg -i IN -ar {rate} OUT.wav")
    import soxr

    resampled: np.ndarray = soxr.resample(sound.samples, sound.rate, rate)
    return resampled


def _positions(loaded: LoadedModel, inputs: int) -> int:
    """Positions of the encoder of so many inputs, by the model's own rule. Raises ModelError where it has none."""
    import torch

    try:  # a name that transformers does not promise, and not every family has
        count = int(loaded.model._get_feat_extract_output_lengths(torch.tensor(inputs)))
    except (AttributeError, TypeError) as error:
        kind = loaded.geometry.model_type
        raise ModelError(f"{kind} does not say how many frames it makes of a sound", MODEL_OF_SOUND) from error
    return count // getattr(loaded.model.config, "squeeze_factor", 1)  # SEW attends to several at once


def extractor_of(loaded: LoadedModel) -> Any:
    """The checkpoint's own feature extractor. Raises ModelError where it has none that can be read."""
    from transformers import AutoFeatureExtractor

    folder = loaded.base_folder or loaded.source_folder or loaded.model.config.name_or_path
    read_files(Path(folder))
    try:
        with loaded.permits.held(), without_stderr():
            extractor = AutoFeatureExtractor.from_pretrained(folder, **loaded.permits.given)
        most = dict.fromkeys(("sampling_rate", "hop_length", "stride"), RATES[-1])
        most |= {"n_samples": MOST_SECONDS * RATES[-1]}
        numbers = {name: getattr(extractor, name, 1) for name in most} | {"sampling_rate": extractor.sampling_rate}
        if not all(numbers[name] in range(1, size + 1) for name, size in most.items()):
            raise ValueError(f"expected numbers up to {most}")
        return extractor
    except Exception as error:  # any family's class, of any file
        if needs_code(error):
            raise ModelError(f"the feature extractor of {loaded.name} {RUNS_CODE}", TRUST) from error
        message = f"{loaded.name} has no feature extractor that can be read (preprocessor_config.json)"
        raise ModelError(message, "copy that file of the model into its folder") from error
