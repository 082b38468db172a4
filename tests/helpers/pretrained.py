"""Real pretrained weights, which lie beside the checkout on some machines alone."""

import hashlib
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "models"
ELSEWHERE = "beside the checkout only on some machines"
ORACLES = {  # SHA-256 of each model's oracle.npz: a folder of the same name that is somebody else's is not read
    "stories260K-llama": "98277a2465ec8afaf5a9da37ca32b66d4e508ca87bc6caff34985c6ead1e41c5",
    "babyllama-char105": "4f728ca9f3b69ecd7bc4b5b4de97b5055860db6a5420a78968c0770db5804402",
}


def pretrained(name: str) -> Path:
    """The folder of a model; skips where it is not at hand."""
    folder = SHARED / name
    oracle = folder / "oracle.npz"
    if not oracle.is_file() or hashlib.sha256(oracle.read_bytes()).hexdigest() != ORACLES[name]:
        pytest.skip(f"no pretrained weights at {name}: they lie {ELSEWHERE}")
    return folder
