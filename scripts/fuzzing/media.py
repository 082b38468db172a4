"""Sounds: cut short, of other formats, with headers that lie. Files of tensors: damaged, and of other arrays."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path

import torch
from safetensors.torch import save

from fuzzing.made import sound, whisper
from fuzzing.trying import Try, kind

RATES = (16_000, 16_000, 44_100, 0, 1, 2**32 - 1)  # samples per second
FORMATS = (
    ("WAV", None), ("WAV", "FLOAT"), ("WAV", "IMA_ADPCM"), ("WAV", "GSM610"), ("WAVEX", None), ("RF64", None),
    ("AIFF", None), ("AIFF", "IMA_ADPCM"), ("AU", None), ("CAF", None), ("CAF", "ALAC_16"), ("FLAC", None),
    ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None), ("SVX", None), ("NIST", None), ("W64", None), ("VOC", None),
    ("MAT4", None), ("MAT5", None), ("HTK", None), ("PVF", None), ("SDS", None), ("AVR", None), ("IRCAM", None),
    ("PAF", None), ("MPC2K", None),
)  # fmt: skip


def _lying(rng: random.Random) -> bytes:
    """A WAV file whose header is made up."""
    wide, channels, rate = rng.choice((8, 16, 24, 32, 40, 0, 65535)), rng.choice((1, 2, 0, 65535)), rng.choice(RATES)
    data = rng.randbytes(rng.choice((0, 1, 700, 4000)))
    form = struct.pack("<HHIIHH", rng.choice((1, 1, 3, 65534)), channels, rate, 0, 4, wide)
    parts = b"WAVEfmt " + struct.pack("<I", rng.choice((16, 16, 0))) + form + b"data"
    parts += struct.pack("<I", rng.choice((len(data), 2**32 - 1))) + data
    document = b"RIFF" + struct.pack("<I", len(parts)) + parts
    start = rng.choice((b"", b"", b"", b"fLaC", b"OggS", b"ID3", rng.randbytes(9)))
    return start + document[: rng.choice((len(document), 30))]


def _damaged(rng: random.Random) -> bytes:
    """A sound of some format that is cut short, or some of whose first bytes are others."""
    content = sound(*rng.choice(FORMATS))
    if rng.random() < 0.5:
        return content[: rng.randrange(len(content))]
    for _ in range(rng.choice((1, 2, 8))):
        at = rng.randrange(min(200, len(content)))
        content = content[:at] + rng.choice((b"\0", b"\xff", rng.randbytes(1))) + content[at + 1 :]
    return content


@kind
def sounds(rng: random.Random, folder: Path) -> Try:
    path = folder / rng.choice(("sound.wav", "a b.mp3", "x.flac", "x.aiff", "x"))
    path.write_bytes(_damaged(rng) if rng.random() < 0.75 else _lying(rng))
    model = ["--model", str(whisper()), "--target", "hi"] if rng.random() < 0.9 else []
    return Try(["heads", "-q", *model, "--audio", rng.choice((str(path), "-"))], path.read_bytes(), terminal=True)


def _weights(rng: random.Random) -> bytes:
    """A file of attention weights or of q and k, whole, damaged, or with an array that is none."""
    import numpy as np

    tokens = [rng.choice(("the", " bank", "<s>", "\x1b[2J", "\u202e")) for _ in range(rng.choice((1, 3, 3, 3)))]
    weights = np.tile(np.eye(3, dtype=rng.choice(("f2", "f4", "f8", "i4"))), (2, 2, 1, 1))
    arrays = {"weights": weights[: rng.choice((0, 1, 2))], "tokens": np.array(tokens)}
    arrays |= rng.choice(({}, {}, {"layer.0": weights[0]}, {"kv_heads": np.array(rng.choice((0, 2, 5)))}))
    if rng.random() < 0.5:  # q and k in their place, with sizes and numbers that may not fit
        del arrays["weights"]
        heads, groups, width, queries = rng.choice((2, 3)), rng.choice((1, 2)), rng.choice((0, 4)), rng.choice((1, 3))
        arrays |= {"layer.0.q": np.ones((heads, queries, width), "f4"), "layer.0.k": np.ones((groups, 3, width), "f2")}
        arrays |= {"layer.0.scale": np.array(rng.choice((0.5, -1.0, np.nan)))}
        arrays |= rng.choice(({}, {"window": np.array(rng.choice((-1, 0, 2)))}, {"layer.0.mask": np.eye(3)[1:]}))
        arrays |= rng.choice(({}, {"query_positions": np.arange(rng.choice((1, 3, 9)))}, {"layer.7.v": np.ones(3)}))
    arrays |= rng.choice(({}, {}, {"tokens_utf8": np.frombuffer(rng.randbytes(9), np.uint8)}))
    stream = io.BytesIO()
    rng.choice((np.savez, np.savez_compressed))(stream, **arrays)
    content = stream.getvalue()
    if rng.random() < 0.3:
        content = save(
            {"layer.0": torch.eye(3)[None]}, {"tokens": rng.choice(('["a","b","c"]', "[1]", "{", "[" * 9000))}
        )
    for _ in range(rng.choice((0, 0, 1, 4))):
        at = rng.randrange(len(content))
        content = content[:at] + rng.choice((b"\0", b"\xff", rng.randbytes(1))) + content[at + 1 :]
    return content[: rng.choice((len(content), len(content), rng.randrange(len(content))))]


@kind
def weights_files(rng: random.Random, folder: Path) -> Try:
    path = folder / rng.choice(("bank.npz", "bank.npz", "bank.safetensors", "bank"))
    path.write_bytes(_weights(rng))
    command = rng.choice(("heads", "heads", "relations", "tokens", "keys"))
    return Try([command, "-q", "--tensors", str(path)], b"", terminal=True)
