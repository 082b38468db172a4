"""Options of the model: which, where its weights go, and who computes its attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from typer import BadParameter, Option

from attnscope.cli.completion import models, offer
from attnscope.cli.groups import FIRST, HELD, SETTING, fill, option_group
from attnscope.errors import brief

if TYPE_CHECKING:
    from attnscope.model.options import LoadOptions


@option_group
class Checkpoint:
    """Which model, and how it is read."""

    panel = "Model"
    model: Annotated[
        str, "demo, a folder, a GGUF file, or a hub id.", "NAME", Option("-m", autocompletion=models), FIRST, HELD
    ] = "demo"
    device: Annotated[
        str,
        "auto, cpu, cuda, cuda:N or mps.",
        "DEVICE",
        Option(autocompletion=offer("auto", "cpu", "cuda", "mps")),
        FIRST,
        HELD,
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "auto: the checkpoint's on an accelerator, float32 on CPU.",
        HELD,
    ] = "auto"
    revision: Annotated[str | None, "Branch, tag or commit on the hub.", "REVISION", HELD] = None
    offline: Annotated[bool, "Never use the network."] = False
    trust_remote_code: Annotated[bool, "Run code from the model's files."] = False
    base: Annotated[
        str | None, "The model that an adapter changes (default: what its config names).", "NAME", HELD, SETTING
    ] = None
    task: Annotated[
        Literal["auto", "decoder", "encoder", "seq2seq", "vision"] | None,
        "What the model is read as (default: auto, as its config says).",
        HELD,
        SETTING,
    ] = None
    gguf: Annotated[
        Literal["check", "trust"],
        "`trust`: read a GGUF file whatever it states that is left out (default: check).",
        HELD,
        SETTING,
    ] = "check"

    def load_options(self) -> LoadOptions:
        """What `load` takes."""
        from attnscope.model.options import LoadOptions

        return fill(LoadOptions, self)


@option_group
class Loading(Checkpoint):
    """Where its weights go."""

    device_map: Annotated[str | None, "`auto` spreads the model over several devices.", "MAP", HELD, SETTING] = None
    quantize: Annotated[Literal["8bit", "4bit"] | None, "Load with bitsandbytes.", HELD] = None
    adapter: Annotated[
        Literal["merged", "beside"] | None,
        "`merged`: added to its base's weights (default, but for quantized ones); `beside`: kept separate.",
        "WHERE",
        HELD,
        SETTING,
    ] = None
    allow_pickle: Annotated[bool, "Read weights that are not safetensors.", SETTING] = False


MOST_TOKENS = 10**9  # of a text, a batch, an answer
ENGINE_WORDS = ("auto", "eager", "fused")  # that --help lists; others are one way of these


def engine_word(text: str) -> str:
    """The name of an engine. Raises BadParameter for a word that is none."""
    if text not in ENGINE_WORDS:
        from attnscope.hooks.engines import ENGINES

        if text not in ENGINES:
            raise BadParameter(f"expected {', '.join(ENGINE_WORDS[:-1])} or {ENGINE_WORDS[-1]}, got {brief(text)}")
    return text


@option_group
class EngineName:
    """Who computes the attention."""

    panel = "Engine"
    engine: Annotated[
        str,
        "eager: the model's own matrices, bit for bit; fused: no matrix is stored; auto: the faster one that "
        "gives what is asked and fits the memory.",
        "|".join(ENGINE_WORDS),
        Option(parser=engine_word, autocompletion=offer(*ENGINE_WORDS)),
        FIRST,
        HELD,
    ] = "auto"


@option_group
class Memory(EngineName):
    """Who computes the attention, and in how much memory."""

    panel = "Engine"
    memory: Annotated[
        str | None, "What a layer's matrices may take, e.g. 4GB (default: half of what is free).", "SIZE", SETTING
    ] = None


@option_group
class EngineChoice(Memory):
    """Who computes the attention, and whether it is checked."""

    listen: Annotated[bool, "Fused: keep the model's own attention call, too.", SETTING] = False
    positions: Annotated[
        int | None,
        "Extend the model to so many positions, by linear rope scaling.",
        Option(min=1, max=MOST_TOKENS),
        SETTING,
    ] = None
    verify: Annotated[bool, "Check every layer against the oracle, as `parity` does."] = False
