"""What a model folder must hold, checked before anything heavy is imported.

Every check answers in milliseconds, reads at most the headers of the weights, and raises a `ModelError` with the next
step.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path, PurePath
from typing import Any

from attnscope.errors import ModelError, brief, is_panic
from attnscope.model.families import BYTE_TOKENIZERS, family
from attnscope.utils import files

TOKENIZER_BYTES = 2**30
CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*("[^"]*")')
ESCAPED_LETTER = re.compile(rb"\\u00(?:5[fF]|6[1-9a-fA-F]|7[0-9aA])")  # of a to z, and of the underscore
ESCAPE = re.compile(rb"\\(?:u00([0-9a-fA-F]{2})|.)", re.DOTALL)  # one after the other: two backslashes are one of them
MOST_PARTS = 10**6
# Keys of a config that count what a list or modules are made of: not positions, words or parameters, which may be more.
COUNT = re.compile(
    r"(?:^|_)(?:num|n|nb)_(?!.*(?:position|ctx|token|embedding|vocab|sample|step|param|word|bucket))"
    r"|(?:^|_)(?:layer|head|expert|label|block|stage|level|depth|kernel_size|replace)s?$"
)
DOCUMENTS = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")  # that transformers reads whole
VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab*", "merges.txt", "tekken.json", "*.tiktoken", "dict.txt")
ADAPTER_CONFIG = "adapter_config.json"
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Files besides those of the vocabulary that decide what a model computes and how it reads a text.
DECIDING = (
    *("config.json", ADAPTER_CONFIG, "*.index.json", "*.py"),
    *("tokenizer*", "special_tokens*", "added_tokens*", "chat_template*"),
)
TYPES = re.compile("float|uint|int")  # as torch writes what safetensors has in a letter
BELOW = 64  # folders in a folder that are looked into for a model
SAMPLES, SAMPLE_BYTES = 256, 4096
CONVERT = "convert them to safetensors, or pass {allow_pickle=True} if you trust their author"


@dataclass(frozen=True)
class Stored:
    """A tensor as the header of its file states it. dtype: in the words of safetensors, such as "BF16" or "F8_E4M3"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_packed(self) -> bool:
        """Whether it holds integers or float8, and not floating-point numbers that a model computes with."""
        return self.dtype[0] in "IU" or self.is_float8

    @property
    def is_float8(self) -> bool:
        """Whether it holds floating-point numbers of 8 bits or less."""
        return self.dtype[0] == "F" and self.bits <= 8

    @property
    def bits(self) -> int:
        """Of one of its numbers, as the name of its type says."""
        return int("".join(filter(str.isdigit, self.dtype.partition("_")[0])) or 8)  # BOOL says nothing

    @property
    def bytes(self) -> int:
        """What all its numbers take in the file."""
        return prod(self.shape) * self.bits // 8


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a `ModelError` that names the file, and the line if it is not JSON."""
    try:
        content = files.read_json(path)
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not JSON: {error.msg} in line {error.lineno}", "download the file again") from None
    except (OSError, ValueError) as error:  # not UTF-8, a number of 5,000 digits, a thousand brackets
        raise ModelError(f"{path} cannot be read: {error}", "download the file again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, expected an object", "download the file again")
    return content


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter.

    >>> is_adapter(DEMO_FOLDER)
    False
    """
    return (folder / ADAPTER_CONFIG).is_file()


def quantization_of(path: Path) -> list[Any]:
    """What a config.json says of quantised weights, of the whole model and of its parts; empty where nothing."""
    raw = read_json(path)
    stated = (part.get("quantization_config") for part in (raw, *raw.values()) if isinstance(part, dict))
    return [content for content in stated if content]


def check_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder, of a type that may have attention."""
    path = folder / "config.json"
    if not path.is_file():
        # sentence-transformers has the model in `0_Transformer`, a trainer in its `checkpoint-500`, PEFT several
        # adapters.
        inside: list[str] = []
        with suppress(OSError):
            below = sorted(part for part in folder.iterdir() if part.is_dir())[:BELOW]
            names = ("config.json", ADAPTER_CONFIG)
            inside = [part.name for part in below if any((part / name).is_file() for name in names)]
        otherwise = "pass a folder written by save_pretrained, or a Hugging Face Hub id"
        raise ModelError(
            f"{folder} has no config.json" + (f"; the folder {inside[0]} in it has one" if inside else ""),
            f"pass {folder / inside[0]}" if inside else otherwise,
        )
    check_sizes(folder)
    config = read_json(path)

    # What transformers looks at before anything else: of other types it raises errors that name no file.
    if not config.get("model_type") and not config.get("auto_map"):
        raise ModelError(f"{path} does not say its model_type", 'add it, for example: "model_type": "llama"')
    for key, kind, name in (("model_type", str, "a text"), ("auto_map", dict, "an object")):
        if not isinstance(config.get(key) or kind(), kind):
            raise ModelError(f"{path}: expected {name} as {key}, got {brief(config[key])}", "download the file again")
    check_counts(config, path)
    check_has_attention(config.get("model_type"))
    return config


def check_counts(config: Mapping[str, Any], path: Path) -> None:
    """Raise for a count of parts that no model has, in a config or in one that it holds.

    transformers makes a list, a dictionary or modules of such a length before it looks at anything else.
    """
    inside = [config]
    while inside:
        for key, value in inside.pop().items():
            values = value if isinstance(value, list) else [value]
            inside += [part for part in values if isinstance(part, dict)]
            if COUNT.search(str(key)) and any(isinstance(count, int) and count > MOST_PARTS for count in values):
                raise ModelError(
                    f"{path} says that {brief(key)} is {brief(value)}, and no model has more than {MOST_PARTS:,}",
                    "download the file again",
                )


def check_sizes(folder: Path) -> None:
    """Raise for a document that is longer than any: transformers would read and parse it whole."""
    bounds = dict.fromkeys(VOCABULARY_FILES, TOKENIZER_BYTES) | dict.fromkeys(DOCUMENTS, files.SMALL_BYTES)
    for pattern, most in bounds.items():
        for path in folder.glob(pattern):
            bound = TOKENIZER_BYTES if path.name == "tokenizer.json" else most
            if path.is_file() and path.stat().st_size > bound:
                raise ModelError(f"{path} is larger than {bound >> 20} MiB", "download the file again")


def check_has_attention(model_type: str | None) -> None:
    """Raise for the types whose attention cannot be read."""
    if why := family(model_type).unread:
        raise ModelError(f"the attention of {model_type} cannot be read: it {why}", "choose another model")


def has_vocabulary(folder: Path) -> bool:
    """Whether a folder has files that a tokenizer can be built from."""
    return any(next(folder.glob(pattern), None) for pattern in VOCABULARY_FILES)


def check_tokenizer(folder: Path, trust_remote_code: bool = False) -> None:
    """Raise when the folder has nothing to build a tokenizer from."""
    check_sizes(folder)
    config = read_json(path) if (path := folder / "tokenizer_config.json").is_file() else {}
    if str(config.get("tokenizer_class")) in BYTE_TOKENIZERS or (trust_remote_code and "auto_map" in config):
        return
    if not has_vocabulary(folder):
        raise ModelError(
            f"{folder} has no tokenizer (no tokenizer.json, tokenizer.model or vocabulary)",
            "copy the tokenizer files of the model into it",
        )
    # A precompiled normalizer says in its first four bytes how many follow them (sentencepiece's normalizer.cc). One
    # that says more has tokenizers take as much memory, or abort. What sentencepiece wrote is converted where there is
    # no other.
    whole = [path] if (path := folder / "tokenizer.json").is_file() else sorted(folder.glob("*.model"))
    for path in whole:
        try:
            document = files.read_small(path, TOKENIZER_BYTES)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}", "check the file") from None
        for content in _charsmaps(document, path.suffix == ".json"):
            if len(content) < 4 or int.from_bytes(content[:4], "little") > len(content) - 4:
                raise ModelError(f"{path} has a damaged normalizer (precompiled_charsmap)", "download the model again")


def _charsmaps(document: bytes, is_json: bool) -> Iterator[bytes]:
    """The precompiled normalizers of a tokenizer.json, or of a model of sentencepiece; empty where one is no base64.

    JSON has several ways to write its key, letter by letter; a document that uses them is spelled plainly first. It is
    not parsed: that would take twenty times its size, and half a second of each command.
    """

    if not is_json:
        # ModelProto of sentencepiece_model.proto has its normalizer_spec as field 3, and that the map as field 2.
        specs = (content for number, content in _fields(document) if number == 3)
        yield from (content for spec in specs for number, content in _fields(spec) if number == 2 and content)
        return

    def plain(escape: re.Match[bytes]) -> bytes:  # what is no letter stays escaped
        return bytes([int(escape[1], 16)]) if escape[1] and ESCAPED_LETTER.fullmatch(escape[0]) else escape[0]

    if ESCAPED_LETTER.search(document):
        document = ESCAPE.sub(plain, document)
    for encoded in CHARSMAP.findall(document):
        try:
            yield base64.b64decode(json.loads(encoded), validate=True)
        except ValueError:
            yield b""


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The number and content of each field of bytes in a message of Protocol Buffers, up to what is none."""
    at = 0
    with suppress(IndexError, ValueError):
        while at < len(message):
            tag, at = files.varint(message, at)
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                _, at = files.varint(message, at)
            elif wire == 2:
                length, at = files.varint(message, at)
                yield number, message[at : at + length]
                at += length
            elif wire in (1, 5):
                at += 8 if wire == 1 else 4
            elif wire > 5:  # 3 and 4 begin and end a group, and have no content
                return


def weight_files(folder: Path, allow_pickle: bool = False, listing: frozenset[str] | None = None) -> list[str]:
    """The names of the files that hold the weights, safetensors first.

    `listing` is what there is to download when the folder is only part of a repository; without it the folder counts.
    """
    there = frozenset(path.name for path in folder.iterdir()) if listing is None else listing
    for single, index in (SAFETENSORS, PICKLES) if allow_pickle else (SAFETENSORS,):
        if single in there:  # transformers takes it, too, before any index
            return [single]
        if index not in there:
            continue
        content = read_json(folder / index)
        shards = content.get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{folder / index} has no weight_map", "download the file again")
        if not isinstance(content.get("metadata"), dict):
            why = "has no metadata, which transformers reads of it"
            raise ModelError(f"{folder / index} {why}", 'add to it: "metadata": {}')
        for name in shards.values():  # files of its own folder
            if not isinstance(name, str) or not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                problem = f"{folder / index} names {brief(name)}, expected files in its folder"
                raise ModelError(problem, "download the file again")
        return sorted(set(shards.values()))
    if there.intersection(PICKLES):
        raise ModelError(f"{folder} has its weights as pickle only, which can run any code when it is read", CONVERT)
    raise ModelError(f"{folder} has no weights (no model.safetensors)", "download the model again")


def check_weights(folder: Path, allow_pickle: bool = False) -> list[Path]:
    """The files of the weights, all there, what they may be by their content, and as long as their headers say."""
    paths = [folder / name for name in weight_files(folder, allow_pickle)]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path} is missing, and the index of the weights names it", "download it again")
        check_weight_file(path, allow_pickle)
    return paths


def check_weight_file(path: Path, allow_pickle: bool = False) -> None:
    """Raise for a file of weights that is damaged, or may run code."""
    if path.suffix != ".safetensors":  # by this transformers decides how it reads a file
        if not allow_pickle:
            raise ModelError(
                f"{path} is not a safetensors file, and others can run any code when they are read", CONVERT
            )
        return
    from safetensors import SafetensorError, safe_open

    # safetensors compares what the header promises with the file's length.
    try:
        with safe_open(path, framework="numpy"):
            pass
    except BaseException as error:
        if not (isinstance(error, SafetensorError | OSError | ValueError) or is_panic(error)):
            raise
        raise ModelError(f"{path} is cut short or damaged: {error}", "download it again") from error


def digest(folder: Path, allow_pickle: bool = False, weights: Sequence[Path] | None = None) -> str:
    """A hash of a model folder that other weights, another config or another tokenizer change, in milliseconds.

    Small files are read whole; of the weights their names, sizes and headers, and 256 samples of 4 KiB a file: a model
    of the same shape after more training has the same header. weights: their files, where these are not the folder's
    as a model. Raises `ModelError` as `check_weights`.
    """
    hashed = hashlib.sha256()
    small = {path for pattern in (*DECIDING, *VOCABULARY_FILES) for path in folder.glob(pattern) if path.is_file()}
    for path in sorted(small):
        hashed.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        hashed.update(path.read_bytes())
    for path in check_weights(folder, allow_pickle) if weights is None else weights:
        hashed.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for piece in _samples(path):
            hashed.update(piece)
    return hashed.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    """The header of a file of weights, and pieces at even distances; a small file whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            yield file.read(int.from_bytes(file.read(8), "little"))
        for place in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
            file.seek(place)
            yield file.read(SAMPLE_BYTES)


def weights_sha256(*folders: Path | None) -> dict[str, str]:
    """The sha256 of each safetensors file of some folders, by name: seconds for a large model, once per process.

    In place of a folder a GGUF file.

    >>> weights_sha256(loaded.source_folder, loaded.base_folder).keys()
    dict_keys(['model.safetensors'])
    """
    places = [place for place in folders if place]
    paths = [path for place in places for path in ([place] if place.is_file() else sorted(place.glob("*.safetensors")))]
    return {path.name: _sha256(path, files.state_of(path)) for path in paths}


@lru_cache
def _sha256(path: Path, state: files.FileState) -> str:
    """state: the file is read again where it is another."""
    return files.sha256_of(path)


def stored_tensors(paths: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of some files by name, as their headers state them; of a pickle what torch reads without its numbers.

    >>> stored_tensors([Path("gpt2/model.safetensors")])["wte.weight"]
    Stored(dtype='F32', shape=(50257, 768))
    """
    from safetensors import safe_open

    tensors: dict[str, Stored] = {}
    for path in paths:
        if path.suffix != ".safetensors":
            import torch

            # None of a file from before 2020, which would have to be read whole. Whatever torch raises: transformers
            # reads the file, and says what is wrong.
            with suppress(Exception):
                content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
                for name, tensor in content.items() if isinstance(content, dict) else ():
                    if hasattr(tensor, "dtype"):
                        dtype = TYPES.sub(lambda word: word[0][0], str(tensor.dtype).removeprefix("torch."))
                        tensors[name] = Stored(dtype.upper(), tuple(tensor.shape))
            continue
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                header = file.get_slice(name)
                tensors[name] = Stored(header.get_dtype(), tuple(header.get_shape()))
    return tensors
