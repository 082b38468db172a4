"""The reference stands alone: torch, the standard library and itself; and its docstrings' examples are true."""

import ast
import doctest
import importlib
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import attnscope.reference
from attnscope.reference.attention import MultiHeadAttention
from attnscope.reference.layouts import layout_of
from attnscope.reference.masks import causal_mask, positions
from attnscope.reference.projections import LayerInputs
from attnscope.reference.reader import read

FOLDER = Path(attnscope.reference.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))


def imported(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def strangers(source):
    ours = ("torch", "attnscope.reference")
    return [
        name
        for name in imported(source)
        if name.split(".")[0] not in sys.stdlib_module_names and not any(f"{name}.".startswith(f"{o}.") for o in ours)
    ]


@pytest.mark.parametrize("module", MODULES)
def test_imports_torch_alone(module):
    assert strangers((FOLDER / f"{module}.py").read_text()) == []


def test_a_stranger_would_be_seen():
    source = "import math\nimport torch.nn\nimport numpy as np\ndef f():\n    from attnscope import errors"
    assert strangers(source) == ["numpy", "attnscope"]
    assert strangers("from . import masks\nfrom transformers.models import llama") == [".", "transformers.models"]


def order_of(sources):
    """The modules, each after those that it imports, `if TYPE_CHECKING` included; raises CycleError for a circle."""
    ours = "attnscope.reference."
    graph = {
        module: {name.removeprefix(ours) for name in imported(source) if name.startswith(ours)}
        for module, source in sources.items()
    }
    return list(TopologicalSorter(graph).static_order())


def test_no_circle_not_even_between_types():
    assert "projections" in order_of({module: (FOLDER / f"{module}.py").read_text() for module in MODULES})
    circle = {
        "a": "if TYPE_CHECKING:\n    from attnscope.reference.b import B",
        "b": "from attnscope.reference.a import A",
    }
    with pytest.raises(CycleError):
        order_of(circle)


@pytest.mark.e2e
def test_importing_it_brings_no_transformers():
    code = "import sys, attnscope.reference; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def examples_need():
    """What a reader of an example has at hand."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = SimpleNamespace(model_type="llama", rope_parameters=rope)
    layer = SimpleNamespace(index=0, heads=2, kv_heads=1, type="full", window=None)
    shapes = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}
    parameters = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    inputs = LayerInputs(layout_of(config), parameters, config, layer, torch.randn(1, 9, 8), torch.arange(9))
    return {
        "config": config,
        "inputs": inputs,
        "read": read,
        "torch": torch,
        "attn": MultiHeadAttention(8, 2),
        "x": torch.randn(5, 8),
        "one": torch.ones(1, 2, 1, 1),
        "causal_mask": causal_mask,
        "positions": positions,
        "attention_weights": attnscope.reference.attention_weights,
    }


@pytest.mark.parametrize("module", [name for name in MODULES if name != "__init__"])
def test_examples_are_true(module):
    loaded = importlib.import_module(f"attnscope.reference.{module}")
    public = [f for f in vars(loaded).values() if getattr(f, "__module__", None) == loaded.__name__ and callable(f)]
    assert all(">>>" in (f.__doc__ or "") for f in public if not f.__name__.startswith("_"))
    result = doctest.testmod(loaded, globs=examples_need() | vars(loaded))
    assert result.attempted > 0
    assert result.failed == 0
