"""A YAML file of a whole run: the options of `attnscope heads` or `batch`, with underscores for hyphens.

`KEYS` and `BATCH_KEYS` are the one table of what may stand in such a file; the command line's long options are the same
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError


@dataclass(frozen=True)
class Key:
    """What a key of a configuration holds: one of `kinds`, of at least `least`; text is one of `choices`, if any."""

    kinds: tuple[type, ...]
    choices: tuple[str, ...] = ()
    least: float | None = None

    @property
    def expected(self) -> str:
        """For people: `true or false`, `a number`, `a whole number from 1`, `8bit or 4bit`."""
        names = [NAMES[kind] for kind in self.kinds if not (kind is str and self.choices)]
        return " or ".join([*names, *self.choices]) + ("" if self.least is None else f" from {self.least}")

    def accepts(self, value: object) -> bool:
        # A YAML true is an int in Python, and nobody means `top: true`.
        if type(value) not in self.kinds and not (type(value) is int and float in self.kinds):
            return False
        if self.least is not None and isinstance(value, int | float) and not value >= self.least:
            return False
        return not (isinstance(value, str) and self.choices) or value in self.choices


NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
TEXT, SWITCH = Key((str,)), Key((bool,))

KEYS: dict[str, Key] = {
    "model": TEXT,
    "device": TEXT,
    "dtype": Key((str,), ("auto", "float32", "bfloat16", "float16")),
    "device_map": TEXT,
    "revision": TEXT,
    "offline": SWITCH,
    "quantize": Key((str,), ("8bit", "4bit")),
    "trust_remote_code": SWITCH,
    "allow_pickle": SWITCH,
    "positions": Key((int,)),
    "engine": Key((str,), ("auto", "eager", "fused")),
    "listen": SWITCH,
    "memory": TEXT,
    "verify": SWITCH,
    "text": TEXT,
    "file": TEXT,
    "chat": SWITCH,
    "truncate": Key((str,), ("left", "right")),
    "select": TEXT,
    "sort": TEXT,
    "top": Key((int,)),
    "out": TEXT,
    "format": Key((str,), ("table", "csv", "tsv", "jsonl", "parquet", "arrow")),
    "image": Key((str,), ("png", "svg", "pdf")),
    "top_k": Key((int, str), ("all",)),
    "min_weight": Key((float,)),
    "group": Key((str,), ("words", "sentences")),
    "weights": Key((str,), ("softmax", "scores")),
    "by": Key((str,), ("kv",)),
    "scale": Key((str,), ("linear", "log")),
    "sink": Key((str,), ("keep", "mask")),
    "per_head_scale": SWITCH,
    "bin": Key((str,), ("sum", "max")),
    "annotate": SWITCH,
    "quiet": SWITCH,
    "verbose": SWITCH,
}

SHARED_WITH_BATCH = (
    *("model", "device", "dtype", "device_map", "revision", "offline", "quantize", "trust_remote_code", "allow_pickle"),
    *("chat", "truncate", "select", "out", "image", "top_k", "min_weight", "group", "by", "quiet", "verbose"),
)
FROM_1 = Key((int,), least=1)

BATCH_KEYS: dict[str, Key] = {name: KEYS[name] for name in SHARED_WITH_BATCH} | {
    "tables": TEXT,
    "format": Key((str,), ("parquet", "csv", "jsonl")),
    "to_stdout": Key((str,), ("jsonl",)),
    "input_format": Key((str,), ("txt", "jsonl", "csv", "parquet")),
    "whole": SWITCH,
    "text_field": TEXT,
    "id_field": TEXT,
    "weights": SWITCH,
    "figures": TEXT,
    "spreadsheet": SWITCH,
    "batch_tokens": FROM_1,
    "shard_size": FROM_1,
    "strict": SWITCH,
    "dry_run": SWITCH,
    "ray": Key((bool, str)),
    "num_actors": FROM_1,
    "num_gpus_per_actor": Key((float,), least=0),
}


def read_config(path: Path | str, keys: Mapping[str, Key] = KEYS) -> dict[str, object]:
    """The options of a configuration file, by name; keys that say nothing (null) are left out.

    keys: what may stand in it, KEYS or BATCH_KEYS. Raises `UsageError`: no such file, not YAML (with the line), an
    unknown key (with the nearest valid one), a value of another type or outside the choices.

    Example:
        read_config("configs/demo.yaml")["model"]  # "demo"
    """
    content = _parse(Path(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a {type(content).__name__}, expected options", "write them as key: value")
    for name, value in content.items():
        _check(path, name, value, keys)
    return {name: value for name, value in content.items() if value is not None}


def _parse(path: Path) -> Any:
    import yaml

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_unique_keys())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path} is not YAML: {error.problem} in line {line}", "correct that line") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {str(error).splitlines()[0]}", "correct the file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start}", "save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path of --config") from None


def _unique_keys() -> type:
    """PyYAML's safe loader, refusing a key that stands twice (it would silently take the last)."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def construct(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or a mapping as key: refused by PyYAML itself
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct)
    return Loader


def _check(path: Path | str, name: object, value: object, keys: Mapping[str, Key]) -> None:
    if name not in keys:
        close = get_close_matches(str(name).replace("-", "_"), keys, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(keys)}"
        raise UsageError(f"{path}: unknown key {name!r}", hint)
    key = keys[str(name)]
    if value is not None and not key.accepts(value):
        raise UsageError(f"{path}: {name}: expected {key.expected}, got {value!r}", "correct the value")
