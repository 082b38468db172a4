"""transformers' own tests/test_modeling_common.py on tiny models of many families: testers, cases, what they found.

The source distribution has the tests that all families share, and not the testers of each. Here is one tester, in the
form that they have there, for every family; its configs are those of this repository's tests, made small.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from attnscope.model.geometry import geometry_of

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from helpers.families import LAYER_COUNTS, tiny_config
from helpers.stack_families import BROUGHT, OVERRIDES

TEXTS = 13  # as many as transformers' own testers have
RANGES = ("initializer_range", "init_range", "_std", "initializer_factor")  # what configs call it
MAPPINGS: Mapping[str, Any] = {
    "decoder": MODEL_FOR_CAUSAL_LM_MAPPING,
    "hybrid": MODEL_FOR_CAUSAL_LM_MAPPING,
    "encoder": MODEL_FOR_MASKED_LM_MAPPING,
    "encoder-decoder": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
}
ABSENT = {  # classes that test_modeling_common imports from files which the source distribution leaves out
    "exporters/test_export.py": "ExportTesterMixin",
    "generation/test_utils.py": "GenerationTesterMixin",
}


@dataclass(frozen=True)
class Family:
    """A model type, and what of it is tested; wide: weights drawn with a standard deviation of 1."""

    name: str
    kind: str
    wide: bool = False
    tokens: int = 7

    @property
    def model_class(self) -> Any:
        return MAPPINGS[self.kind][type(self.config())]

    def config(self) -> Any:
        """A tiny config, new for each test: tests change it."""
        overrides = OVERRIDES.get(self.name, {}) if self.kind.startswith("encoder") else {}
        if self.kind in ("decoder", "encoder"):
            known = CONFIG_MAPPING[self.name]().to_dict()
            overrides = overrides | {name: 2 for name in LAYER_COUNTS if name in known}
        config = tiny_config(self.name, **overrides)
        if self.wide:
            widen(config)
        return config


@dataclass
class Found:
    """How the cases of one family ended: of how many, which failed or were not allowed, and why.

    heard: what a listener counted in each case.
    """

    cases: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    heard: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def widen(config: Any) -> None:
    """Draw weights with a standard deviation of 1, so that rows of attention are far from uniform."""
    for name, value in config.to_dict().items():
        if isinstance(value, int | float) and not isinstance(value, bool) and name.endswith(RANGES):
            setattr(config, name, 1.0)
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            widen(getattr(config, name))


def suite_in(folder: Path) -> Any:
    """transformers' module of shared tests, unmodified; the classes that are absent stay empty."""
    for path, name in ABSENT.items():
        (folder / "tests" / path).parent.mkdir(exist_ok=True)
        (folder / "tests" / path).write_text(f"class {name}: pass\n")
        (folder / "tests" / path).with_name("__init__.py").touch()
    (folder / "tests" / "__init__.py").touch()
    sys.path.insert(0, str(folder))
    return importlib.import_module("tests.test_modeling_common")


class Tester:
    """What transformers' tests ask of a family's model tester."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.batch_size, self.seq_length = TEXTS, family.tokens
        stacks = geometry_of(family.config(), count=False).stacks
        layers = next(iter(stacks.values()))
        self.num_hidden_layers = len(layers)
        self.num_attention_heads = next(iter(layers.values())).heads

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        drawn = torch.Generator().manual_seed(0)
        ids = torch.randint(6, 100, (TEXTS, self.seq_length), generator=drawn)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.family.kind == "encoder-decoder":
            target = torch.randint(6, 100, (TEXTS, self.seq_length), generator=drawn)
            inputs |= {"decoder_input_ids": target, "decoder_attention_mask": torch.ones_like(target)}
        return self.family.config(), inputs


def test_class(suite: Any, family: Family) -> type[unittest.TestCase]:
    """The suite's tests of one family."""
    given = {
        "all_model_classes": (family.model_class,),
        "model_tester": Tester(family),
        "is_encoder_decoder": family.kind == "encoder-decoder",
    }
    return type(f"Test_{family.name}", (suite.ModelTesterMixin, unittest.TestCase), given)


def run_cases(
    suite: Any, family: Family, test: str, calling: Callable[..., Any], wanted: Callable[[str], bool] = bool
) -> Found:
    """Every case of a test on one family, or those that are wanted by name.

    calling(model, forward, note, *args, **kwargs): runs a model in place of its `__call__`; what it notes is kept.
    """
    found = Found()
    tests = test_class(suite, family)
    for name in sorted(name for name in dir(tests) if name.startswith(test) and callable(getattr(tests, name))):
        short = name.removeprefix(test).lstrip("_") or test
        if not wanted(short):
            continue
        noted: list[Any] = []
        with called_by(family.model_class, calling, noted.append):
            result = tests(name).run()
        found.cases += 1
        found.heard[short] = noted
        for kept, ended in ((found.failed, result.failures + result.errors), (found.skipped, result.skipped)):
            if ended:
                kept[short] = ended[0][1].strip().splitlines()[-1][:200]
    return found


@contextmanager
def called_by(model_class: Any, calling: Callable[..., Any], note: Callable[[Any], None]) -> Iterator[None]:
    """While open, models of this class are run by `calling`."""
    forward = model_class.__call__

    def called(model: Any, *args: Any, **kwargs: Any) -> Any:
        return calling(model, forward, note, *args, **kwargs)

    model_class.__call__ = called
    try:
        yield
    finally:
        del model_class.__call__


def own_attentions(model: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """A model's output, and the attentions that it returns by their stack, with columns that are positions of keys."""
    output = forward(model, *args, **copy.deepcopy(kwargs))
    names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    if "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        names = {"": "attentions"}
    bring = BROUGHT.get(model.config.model_type, lambda stack, given, tokens: given)
    tokens = kwargs["input_ids"].shape[1]
    returned = {stack: getattr(output, name, None) or () for stack, name in names.items()}
    return output, {
        stack: [bring(stack, one, tokens) for one in some if one is not None] for stack, some in returned.items()
    }


def in_float64(model: Any, forward: Callable[..., Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The last hidden states of the same model in float64, by PyTorch's own sdpa; eager attention rounds to float32."""
    exact = copy.deepcopy(model).double()
    if hasattr(exact.config, "num_experts_per_tok") or hasattr(exact.config, "num_local_experts"):
        exact.set_experts_implementation("eager")  # the grouped product has no float64
    return last_states(forward(exact, **copy.deepcopy(dict(kwargs))))


def last_states(output: Any) -> torch.Tensor:
    """What the test compares: the last hidden states, of the decoder where there are two stacks."""
    found = output["decoder_hidden_states"] if "decoder_hidden_states" in output else output["hidden_states"]
    return found[-1].double()


def distance(found: torch.Tensor, expected: torch.Tensor, kwargs: Mapping[str, Any]) -> float:
    """Root mean square difference over the tokens that the mask shows; NaN where one is none."""
    mask = kwargs.get("decoder_attention_mask", kwargs.get("attention_mask"))
    kept = torch.ones(found.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    return float((found - expected)[kept].square().mean().sqrt())
