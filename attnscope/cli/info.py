"""`attnscope info [MODEL]`: what a model's attention looks like, from its config alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.option_groups import FIRST, check_one_given, models
from attnscope.cli.options import Checkpoint
from attnscope.cli.output import Facts, Noise
from attnscope.errors import UsageError, brief
from attnscope.model.selection import CHANNELS, DECODER, LINEAR, STACKS, as_ranges
from attnscope.utils import display as cells
from attnscope.utils.display import Column, Sheet

if TYPE_CHECKING:
    from rich.console import Group

    from attnscope.model.geometry import Geometry, LayerGeometry
    from attnscope.model.options import LoadOptions

SIZES = ("heads", "kv_heads", "head_dim", "value_dim")
EXAMPLES = ("attnscope info demo", "attnscope info demo --tokens 9,2048,131072 --format json")


class NamedModel(Checkpoint):
    """The model of a command that is about it: --model as everywhere, or for short an argument."""

    name: Annotated[
        str | None,
        "The model: demo, a folder, a GGUF file, or a hub id; also --model.",
        "MODEL",
        Argument(autocompletion=models),
    ] = None
    model: Annotated[str | None, "demo (default), a folder, a GGUF file, or a hub id."] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_one_given({"MODEL": self.name, "--model": self.model})

    @property
    def asked(self) -> str:
        """The model that was named, or the embedded one."""
        return next((name for name in (self.name, self.model) if name is not None), "demo")

    def load_options(self) -> LoadOptions:
        """What `load` takes."""
        return replace(super().load_options(), model=self.asked)


class Costs(Facts, panel="What to ask"):
    """What is printed, and how."""

    tokens: Annotated[str, "Text lengths to estimate, by commas.", "N,N,...", FIRST] = "128,2048,32768"

    @property
    def lengths(self) -> list[int]:
        """The numbers of --tokens."""
        parts = [part.strip().replace("_", "") for part in self.tokens.split(",")]
        if not all(re.fullmatch(r"0*[1-9][0-9]{0,11}", part) for part in parts):
            raise UsageError(
                f"--tokens: expected numbers from 1, joined by commas, got {self.tokens!r}", "write --tokens 128,2048"
            )
        return [int(part) for part in parts]


@with_options(NamedModel, Costs, Noise)
def info(named: NamedModel, costs: Costs, noise: Noise) -> int:
    """Print a model's layers, heads, windows and costs.

    Only the config is read: no weights are loaded.
    """
    lengths = costs.lengths

    from attnscope.model.geometry import geometry_of, with_tower
    from attnscope.model.libraries import silence_libraries
    from attnscope.model.loading import (
        bytes_in_memory,
        bytes_on_disk,
        chosen_device,
        dtype_on,
        has_lm_head,
        load_config,
    )
    from attnscope.model.quantised import method_of
    from attnscope.model.tasks import chosen_task

    silence_libraries(noise.verbose)
    options = named.load_options()
    config = load_config(options)
    geometry = with_tower(geometry_of(config, task=chosen_task(config, options.task, named.asked)), config)
    # A device that was named need not be here: what the model would take there is known without it.
    device = chosen_device(options) if options.device == "auto" else options.device
    room = bytes_in_memory(options, config, device), _free(options, device)
    facts = describe(named.asked, geometry, lengths, (device, named.dtype), room)
    facts["dtype"] = dtype_on(options, device)
    facts["disk_bytes"] = bytes_on_disk(options)
    facts["lm_head"] = has_lm_head(options, config)
    facts["quantised"] = method_of(config) or ("bitsandbytes" if options.quantize else None)
    output.tell(facts, costs.format, lambda: _sheet(facts))
    return 0


def describe(
    name: str, geometry: Any, lengths: list[int], where: tuple[str, str], room: tuple[int | None, int | None]
) -> dict[str, Any]:
    """The facts as plain data. where: device and dtype. room: bytes of the weights, and those free on the device.

    None is an unknown number of bytes.
    """
    from attnscope.hooks.engines import ENGINES, eager_bytes, fused_bytes
    from attnscope.model.families import family
    from attnscope.observe.engine_choice import SHARE, Case, automatic
    from attnscope.observe.request import Request

    # On the CPU `auto` is float32, whatever the checkpoint has: what an engine takes follows from that.
    (device, dtype), (weights, free) = where, room
    float32 = dtype == "float32" or (dtype == "auto" and device == "cpu")
    case = Case(geometry, device, "float32" if float32 else dtype, not family(geometry.model_type).bypasses_interface)

    # Layers without attention are named too: a person counts layers as the config does.
    width = 4 if dtype in ("auto", "float32") else 2
    every = [(stack, layer) for stack, layers in geometry.every.items() for layer in layers]
    attention = [(stack, layer) for stack, layer in every if layer.attention]
    of_text = sum(layer.heads for layers in geometry.in_every_pass.values() for layer in layers.values())
    # What each engine would take: facts of the geometry, while what `auto` takes depends on what is free now.
    fits = [free is not None and eager_bytes(geometry, length, width) <= free * SHARE for length in lengths]
    choices = [
        (length, None if free is None else automatic(case, length, Request(), fits=small))
        for length, small in zip(lengths, fits, strict=True)
    ]
    return {
        "model": name,
        "type": geometry.model_type,
        "parameters": geometry.parameters,
        "weights_bytes": weights,
        "positions": geometry.max_positions,
        "both_ways": geometry.both_ways or None,
        "device": device,
        "layers": len(geometry.layers),
        "attention_layers": [
            {
                "stack": stack,
                "layer": layer.index,
                "type": layer.type,
                **{name: getattr(layer, name) for name in (*SIZES, "window", "generated_window")},
                "keys": layer.in_words,
                "parallel": layer.parallel or None,
                "mixing": _mixing(geometry, stack, layer) if layer.parallel else None,
            }
            for stack, layer in attention
        ],
        "layers_without_attention": [
            {"stack": stack, "layer": layer.index, "type": layer.type, **_mixing(geometry, stack, layer)}
            for stack, layer in every
            if not layer.attention
        ],
        "costs": [
            {
                "tokens": length,
                "eager_bytes": eager_bytes(geometry, length, width),
                "fused_bytes": fused_bytes(geometry, length, device=device),
                "engines": {
                    name: engine.bytes(geometry, length, width, device=device) for name, engine in ENGINES.items()
                },
                "all_matrices_bytes": of_text * length * length * width,
                "auto": choice and {"engine": choice.engine.name, "words": choice.words},
            }
            for length, choice in choices
        ],
    }


def _mixing(geometry: Geometry, stack: str, layer: LayerGeometry) -> dict[str, Any]:
    """How a layer mixes tokens without a softmax: the rule, its maps and their number, or why there are none."""
    from attnscope.model.geometry import NO_TOKENS

    maps, known = geometry.mixing.get(layer.index, (None, None)) if stack == geometry.stack else (None, None)
    if known is None or maps is None:
        why = "mixes no tokens" if layer.type in NO_TOKENS else "no attention, and no rule that is read"
        why = "no rule that is read" if layer.attention else why
        return {"rule": None, "maps": None, "heads": None, "why": why}
    return {"rule": known.keys, "maps": maps, "heads": known.heads, "why": None}


def _free(options: LoadOptions, device: str) -> int | None:
    """The free bytes of a device, None where it is not here."""
    from attnscope.model.loading import chosen_device
    from attnscope.utils.memory import free_memory

    with suppress(UsageError, RuntimeError):
        chosen_device(options)
        return free_memory(device)
    return None


def _sheet(facts: dict[str, Any]) -> Group:
    from rich.console import Group

    # Layers of one shape are one row, whatever their number.
    runs = _runs(facts)
    several = len({stack for stack, _, _ in runs}) > 1
    titles = ("stack", "layers", "type", "heads", "kv heads", "head dim", "value dim", "window")
    columns = [Column(title, align="left" if title in titles[:3] else "right", fit="wrap") for title in titles]
    rows = [dict(zip(titles, (stack, numbers, *shape), strict=True)) for stack, numbers, shape in runs]
    layers = Sheet(rows, columns[not several :])
    # Of engines that take the same, the first has a column.
    names: dict[tuple[int, ...], str] = {}
    for name in facts["costs"][0]["engines"]:
        names.setdefault(tuple(cost["engines"][name] for cost in facts["costs"]), name)
    takes = partial(Column, format=cells.decimal_bytes, fit="wrap")
    columns = [Column("tokens", fit="wrap"), *(takes(f"{name}: one layer", name=name) for name in names.values())]
    columns.append(takes("all matrices kept", name="all_matrices_bytes"))
    columns += [Column("auto takes", align="left", fit="wrap")] * bool(facts["costs"][0]["auto"])
    rows = [{**cost, **cost["engines"], "auto takes": (cost["auto"] or {}).get("words")} for cost in facts["costs"]]
    costs = Sheet(rows, columns)
    # The heading is of what is known: a config may lack what counts parameters, a checkpoint may not be here.
    size = "parameters not counted"
    if facts["parameters"] and facts["weights_bytes"]:
        memory = "memory" if facts["quantised"] or facts["dtype"] == "auto" else facts["dtype"]
        sizes = [f"{cells.decimal_bytes(facts['disk_bytes'])} on disk"] if facts["disk_bytes"] else []
        sizes.append(f"{cells.decimal_bytes(facts['weights_bytes'])} in {memory}")
        size = f"{facts['parameters'] / 1e6:,.1f} M parameters ({', '.join(sizes)})"
    positions = f"{facts['positions'] or 'any number of'} positions"
    where = [f"on {facts['device']}"] + [f"looks both ways ({why})" for why in [facts["both_ways"]] if why]
    decodes = any(layer["stack"] == DECODER for layer in facts["attention_layers"])
    head = ["no LM head: no logits"] if decodes and not facts["lm_head"] else []
    packed = [f"quantised ({brief(facts['quantised'])})"] if facts["quantised"] else []
    # Of an encoder-decoder each stack is counted: `encoder 6, decoder 6, cross 6`.
    counts = Counter(layer["stack"] for layer in (*facts["attention_layers"], *facts["layers_without_attention"]))
    counted = ", ".join(f"{stack} {counts[stack]}" for stack in sorted(counts, key=STACKS.index))
    counted = counted if len(counts) > 1 else str(facts["layers"])
    parts = [facts["model"], facts["type"], f"{counted} layers", size, *packed, positions, *head, *where]
    return Group("  ".join(parts), layers, costs)


def _runs(facts: dict[str, Any]) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Layers of one shape in a row, together: ("decoder", "0-3", (type, heads, ...))."""
    shapes = []
    for layer in facts["attention_layers"]:
        kind = layer["type"]
        if layer["mixing"]:  # `full + ssm: Mamba-2, 4 heads` of one that computes both
            kind += f" + {_mixer(layer['parallel'], layer['mixing'])}"
            kind += f", {layer['mixing']['heads']} heads" * (layer["mixing"]["maps"] == LINEAR)
        sizes = (layer[key] for key in SIZES)
        shapes.append((layer["stack"], layer["layer"], (kind, *sizes, _window(layer))))
    shapes += [
        (
            layer["stack"],
            layer["layer"],
            (_mixer(layer["type"], layer), layer["heads"], *[None] * (len(SIZES) - 1), None),
        )
        for layer in facts["layers_without_attention"]
    ]
    shapes.sort(key=lambda entry: (STACKS.index(entry[0]), entry[1]))
    runs: list[tuple[str, list[int], tuple[Any, ...]]] = []
    for stack, layer, shape in shapes:
        if runs and runs[-1][::2] == (stack, shape) and runs[-1][1][-1] == layer - 1:
            runs[-1][1].append(layer)
        else:
            runs.append((stack, [layer], shape))
    return [(stack, as_ranges(run), shape) for stack, run, shape in runs]


def _mixer(type: str, mixing: Mapping[str, Any]) -> str:
    """What mixes tokens without a softmax: `ssm: Mamba, by channel` where one head shows the mean over all channels."""
    by_channel = ", by channel" * (mixing["maps"] == CHANNELS)
    return f"{type}: {mixing['rule'] or mixing['why']}{by_channel}"


def _window(layer: Mapping[str, Any]) -> str | None:
    """The window of a layer, and of what it is where that is not the text's last tokens."""
    from attnscope.model.geometry import NOT_KNOWN

    if layer["generated_window"]:
        return f"{layer['generated_window']} of generated tokens"
    if layer["keys"].endswith(NOT_KNOWN):
        return NOT_KNOWN
    sides = " to either side" * layer["keys"].endswith("to either side")
    return layer["window"] and f"{layer['window']}{sides}"
