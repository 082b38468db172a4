"""What a model's generation config may say: which tokens are the likeliest, and not how they are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OF_TOKENS = {  # beside the ids of special tokens
    "bad_words_ids",
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "exponential_decay_length_penalty",
    "max_length",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "remove_invalid_values",
    "repetition_penalty",
    "sequence_bias",
    "suppress_tokens",
}


def leave_tokens(model: PreTrainedModel) -> None:
    """Reset what says how tokens are found: drafts by other models, lookups, caches and chunks of any size.

    >>> leave_tokens(loaded.model)
    """
    said: Any = getattr(model, "generation_config", None)
    if said is None:
        return
    plain = type(said)()
    for name, value in vars(plain).items():  # a family's own settings, as Whisper has them, are not among these
        if not (name in OF_TOKENS or name.startswith("_") or name.endswith("_token_id")):
            setattr(said, name, value)
