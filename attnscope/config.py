"""A YAML file of a whole run: the options of `attnscope heads`, with underscores for hyphens.

`KEYS` is the one table of what may stand in such a file; the command line's long options are the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attnscope.errors import UsageError


@dataclass(frozen=True)
class Key:
    """What a key of a configuration holds: one of `kinds`, and if it is text and `choices` are named, one of them."""

    kinds: tuple[type, ...]
    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """For people: `true or false`, `a number`, `8bit or 4bit`."""
        names = [NAMES[kind] for kind in self.kinds if not (kind is str and self.choices)]
        return " or ".join([*names, *self.choices])

    def accepts(self, value: object) -> bool:
        # A YAML true is an int in Python, and nobody means `top: true`.
        if type(value) not in self.kinds and not (type(value) is int and float in self.kinds):
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


def read_config(path: Path | str) -> dict[str, object]:
    """The options of a configuration file, by name; keys that say nothing (null) are left out.

    Raises `UsageError`: no such file, not YAML (with the line), an unknown key (with the nearest valid one), a value of
    another type or outside the choices.

    Example:
        read_config("configs/demo.yaml")["model"]  # "demo"
    """
    content = _parse(Path(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a {type(content).__name__}, expected options", "write them as key: value")
    for name, value in content.items():
        _check(path, name, value)
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


def _check(path: Path | str, name: object, value: object) -> None:
    if name not in KEYS:
        close = get_close_matches(str(name).replace("-", "_"), KEYS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"the keys are {', '.join(KEYS)}"
        raise UsageError(f"{path}: unknown key {name!r}", hint)
    key = KEYS[str(name)]
    if value is not None and not key.accepts(value):
        raise UsageError(f"{path}: {name}: expected {key.expected}, got {value!r}", "correct the value")
