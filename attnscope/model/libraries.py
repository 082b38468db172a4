"""The libraries underneath: their versions, their switches, and their progress bars, logs and warnings.

`ProcessWide` is for settings of the whole process that several threads may change at once.

A model's generation config: which of its settings an answer follows, for the time of one call.

An answer is the likeliest token, one after another, each by one pass over what is there so far. A setting is followed
where it changes which token is the likeliest, or where the text ends. Chance, beams and ways to the same tokens have no
part in it. Any other setting is ignored and named: a second pass, another prompt, a clock, or what a later transformers
adds.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from functools import partial, wraps
from importlib import import_module
from typing import Any, Generic, ParamSpec

from attnscope._version import __version__
from attnscope.errors import ModelError, brief
from attnscope.utils.stages import Stage, at_hand

WEIGHTS = "Loading weights"  # what transformers calls the bar of its tensors
WHOLE_LIBRARY = 200  # modules that only the first import of a library brings: no model is there yet
TRIED = ("5.17.0", "5.23.0")  # versions of transformers, the oldest and the newest: docs/versions.md

P = ParamSpec("P")


class ProcessWide(Generic[P]):
    """A change that holds while anyone needs it: the first who enters makes it, the last who leaves undoes it.

    Each thread that read the setting for itself and put back what it read would undo another's change, and leave its
    own in place.

    >>> @ProcessWide
    ... @contextmanager
    ... def more_threads(): ...
    """

    def __init__(self, change: Callable[P, AbstractContextManager[object]]) -> None:
        self.change, self.lock, self.users, self.undo = change, threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
        with self.lock:
            if not self.users:
                self.undo.enter_context(self.change(*args, **kwargs))
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if not self.users:
                    self.undo.close()


@contextmanager
def _switched(module: str, name: str, value: Any) -> Iterator[None]:
    """While open a setting that all calls of a library share has another value."""
    before, library = needed(module, name), import_module(module)
    setattr(library, name, value)
    try:
        yield
    finally:
        setattr(library, name, before)


offline = ProcessWide(partial(_switched, "huggingface_hub.constants", "HF_HUB_OFFLINE", True))
# Whether it may run a model's code is then a refusal of transformers, and no question on standard input.
never_asks = ProcessWide(partial(_switched, "transformers.dynamic_module_utils", "TIME_OUT_REMOTE_CODE", 0))


QUIET = {  # what has them say nothing
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "critical",
    "TRANSFORMERS_VERBOSITY": "critical",  # an error is raised too, and with some the whole config is printed
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "BITSANDBYTES_NOWELCOME": "1",
}


def silence_libraries(verbose: bool) -> None:
    """Silence the progress bars, logs and warnings of the libraries underneath, unless `verbose`.

    To be called before the first import of them: they read these variables once. For those already imported the same is
    done through their own functions.

    Example:
        silence_libraries(verbose=False)
    """
    if verbose:
        return
    os.environ |= QUIET
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"attnscope(\.|$)")
    warnings.filterwarnings("ignore", category=ResourceWarning)  # of files that they leave open, wherever it is noticed
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a line for every layer that it casts
    logging.getLogger("torchao").setLevel(logging.ERROR)  # a line for every kernel of another device
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # two lines that torchao causes
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # two lines where there is no home for its own cache
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity(logging.CRITICAL)
        transformers_logging.disable_progress_bar()


@ProcessWide
@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection while the block imports: all that it makes stays, and looking for garbage in it takes a
    fifth of the time. Where the process has frozen objects before, as the command line does, these are frozen as well.
    """
    running, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - modules >= WHOLE_LIBRARY and gc.get_freeze_count():
            gc.freeze()  # else the next three collections go through all of it
        if running:
            gc.enable()


@ProcessWide
@contextmanager
def bars_as_elsewhere() -> Iterator[None]:
    """While the block runs, bars that libraries draw with tqdm itself are drawn where those of transformers are."""
    from transformers.utils.logging import is_progress_bar_enabled

    tqdm = import_module("tqdm.std").tqdm
    own = tqdm.__init__

    @wraps(own)
    def init(self: Any, *args: Any, **options: Any) -> None:
        own(self, *args, **(options if is_progress_bar_enabled() else options | {"disable": True}))

    tqdm.__init__ = init
    try:
        yield
    finally:
        tqdm.__init__ = own


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bar of transformers while the block runs; afterwards as it was."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


@contextmanager
def weights_counted(sizes: Mapping[str, int]) -> Iterator[None]:
    """While the block runs, the weights that transformers loads are counted by the stage at hand, in bytes.

    sizes: the bytes of each tensor of the files, by name. Where transformers has no such hook nothing is counted.
    """
    from transformers.utils import logging as bars

    give, stage = getattr(bars, "set_tqdm_hook", None), at_hand()
    if give is None or not stage.title:
        yield
        return

    def hooked(factory: Any, arguments: Any, options: Any) -> Any:
        bar = factory(*arguments, **options) if before is None else before(factory, arguments, options)
        if not arguments or options.get("desc") != WEIGHTS:
            return bar
        # The bytes that each weight is read from; those that no conversion names are shared by the others evenly.
        patterns = (getattr(made, "source_patterns", ()) for _, made in arguments[0])
        known = [sum(sizes.get(str(source), 0) for source in sources) for sources in patterns]
        rest = max((sum(sizes.values()) - sum(known)) / max(known.count(0), 1), 0.0)
        return _counted(bar, [each or rest for each in known], stage)

    before = give(hooked)
    try:
        yield
    finally:
        give(before)


def _counted(weights: Iterable[Any], shares: Sequence[float], stage: Stage) -> Iterator[Any]:
    stage.expect(sum(shares), "bytes")
    for weight, share in zip(weights, shares, strict=True):
        yield weight
        stage.advance(share)


def needed(module: str, name: str, *attributes: str) -> Any:
    """A name of transformers that is not promised to stay, with attributes that are not either.

    Raises ModelError with the versions that have it.

    >>> needed("transformers.modeling_utils", "AttentionInterface", "get_interface").__name__
    'AttentionInterface'
    """
    import transformers

    try:
        value = getattr(import_module(module), name)
        for attribute in attributes:
            getattr(value, attribute)
    except (ImportError, AttributeError) as error:
        path = ".".join((module, name, *attributes))
        raise ModelError(
            f"transformers {transformers.__version__} has no {path}, which attnscope needs",
            f'install one that was tried: pip install "transformers>={TRIED[0]},<={TRIED[-1]}"',
        ) from error
    return value


def knows_interface(kind: type) -> bool:
    """Whether the file of transformers that a class comes from asks its attention interface.

    >>> knows_interface(transformers.ViTModel)
    True
    """
    return hasattr(sys.modules.get(kind.__module__), "ALL_ATTENTION_FUNCTIONS")


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    import torch
    import transformers

    return {
        "attnscope": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


CHOOSING = {  # may make another token the likeliest than the row before it does
    *("bad_words_ids", "begin_suppress_tokens", "sequence_bias", "suppress_tokens", "watermarking_config"),
    *("encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "no_repeat_ngram_size", "repetition_penalty"),
    *("exponential_decay_length_penalty", "forced_bos_token_id", "min_length", "min_new_tokens"),
}
FOLLOWED = CHOOSING | {
    *("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "remove_invalid_values")
}
STOP = "stop_strings"  # followed too, by a criterion of attnscope's own
LENGTH = {"forced_eos_token_id", "max_length", "max_new_tokens"}  # the number of tokens that is asked for
CHANCE_AND_BEAMS = {
    *("do_sample", "temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("num_beams", "num_beam_groups", "num_return_sequences", "diversity_penalty", "early_stopping", "length_penalty"),
    "renormalize_logits",
}
MEANS = {  # to the same tokens: caches, drafts, compiling; and what is returned beside them
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind", "use_mtp"),
    *("max_matching_ngram_size", "prompt_lookup_num_tokens", "speculation_type"),
    *("compile_config", "disable_compile", "continuous_batching_config", "transformers_version"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
}
WITHOUT_EFFECT = {  # values that are there and change nothing
    **dict.fromkeys(("guidance_scale", "repetition_penalty", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    "penalty_alpha": 0,
}
_replaced: dict[int, Any] = {}  # the own config of each model that generates now, by the id of its module


def ignored_settings(model: Any) -> tuple[str, ...]:
    """The settings that change what the model itself generates, and that an answer does not follow.

    >>> ignored_settings(loaded.model)
    ('max_time', 'token_healing')
    """
    return tuple(sorted(_changed_settings(model) - (FOLLOWED | {STOP} | LENGTH | CHANCE_AND_BEAMS | MEANS)))


def choosing_settings(model: Any) -> tuple[str, ...]:
    """The settings that an answer follows, and that may choose another token than the likeliest of its row.

    >>> choosing_settings(loaded.model)
    ('repetition_penalty', 'suppress_tokens')
    """
    return tuple(sorted(_changed_settings(model) & CHOOSING))


def _changed_settings(model: Any) -> set[str]:
    """The settings that change something."""
    changing = set()
    for config in map(_own_config, _generating(model)):
        for name in vars(type(config)()):  # what any generation config of this transformers has
            value = getattr(config, name, None)
            if not (
                name.startswith("_")
                or value is None
                or value is False
                or value in ([], {}, "", WITHOUT_EFFECT.get(name))
            ):  # 0 may
                changing.add(name)
    return changing


def stop_strings(model: Any) -> tuple[str, ...]:
    """The strings after which the model's generation config ends a text, without empty ones. Raises ModelError."""
    value = getattr(_own_config(model), STOP, None) or ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(string, str) for string in strings):
        raise ModelError(
            f"expected texts as {STOP} of the model's generation config, got {brief(value)}",
            "correct its generation_config.json",
        )
    return tuple(filter(None, strings))


@contextmanager
def following(model: Any, most: int, start: int | None = None, settings: bool = True) -> Iterator[None]:
    """While open, the model generates by a copy of its generation config that has the settings an answer follows.

    Its own config is back afterwards. A family's own settings, as Whisper has them, stay. most: the tokens that are
    asked for at the most. start: how many there are before them, where that is known. settings: whether the config's
    are followed at all.

    >>> with following(loaded.model, 8):
    ...     loaded.model.generate(ids, max_new_tokens=8)
    """
    own = [(module, module.generation_config) for module in _generating(model)]
    try:
        for module, config in own:
            followed, plain = deepcopy(config), type(config)()
            for name, value in vars(plain).items():
                if not (name.startswith("_") or (settings and name in FOLLOWED)):
                    setattr(followed, name, value)
            # A number that so few tokens cannot have is lowered, since transformers warns of it.
            if followed.min_new_tokens is not None:  # it goes before min_length
                followed.min_new_tokens, followed.min_length = min(followed.min_new_tokens, most), None
            if followed.min_length is not None and start is not None:
                followed.min_length = min(followed.min_length, start + most)
            _replaced[id(module)] = config
            module.generation_config = followed
        yield
    finally:
        for module, config in own:
            module.generation_config = config
            _replaced.pop(id(module), None)


def _own_config(model: Any) -> Any:
    """The model's own generation config, also while another thread generates with it; None where it has none."""
    return _replaced.get(id(model)) or getattr(model, "generation_config", None)


def _generating(model: Any) -> list[Any]:
    """The modules of a model that generate by a config of their own: itself, and the language model in some."""
    from transformers import GenerationConfig

    return [part for part in model.modules() if isinstance(vars(part).get("generation_config"), GenerationConfig)]
