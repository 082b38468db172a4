"""What other tools call an option or a command: a word that is none here is answered with its name here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attnscope.cli.groups import Parameter, parameters
from attnscope.errors import nearest

# An option here, by its key in --config, with a value where one is meant; or a command. Then what others call it:
# transformers and hf, gh, ruff, pytest, matplotlib, BertViz, TransformerLens, CircuitsVis.
SYNONYMS = {
    "explain": "steps step_by_step show_steps",
    "view": "html page interactive browser web open save_html html_action head_view model_view",
    "heatmap": "plot_heatmap draw visualize visualise",
    "doctor": "env environment system_info sys_info",
    "select": "layer layers head heads block blocks include_layers include_heads",
    "query": "queries q source_token from_token destination dest",
    "key": "keys k source src target_token to_token",
    "text": "p prompt prompts sentence sentence_a input_text string",
    "file": "i input input_file text_file path filename",
    "ids": "tokens token_ids input_ids",
    "pair": "sentence_b text_b text_pair second context",
    "answer": "completion continuation response output_text correct",
    "foil": "incorrect wrong alternative distractor",
    "corrupted": "corrupt corruption counterfactual clean",
    "target": "decoder_input tgt translation labels",
    "generate": "max_new_tokens new_tokens num_tokens n_tokens generation",
    "truncate": "truncation",
    "max_tokens": "max_length max_len max_seq_len seq_len n_ctx",
    "chat": "apply_chat_template chat_template messages instruct",
    "define": "name_tokens alias",
    "texts": "corpus data dataset jsonl records input_file prompts",
    "sequences": "n samples n_samples num_samples examples batches",
    "seed": "random_seed random_state",
    "model": "checkpoint model_name model_id model_name_or_path model_path pretrained repo repo_id hub_id",
    "base": "base_model",
    "revision": "branch tag commit",
    "offline": "local_files_only no_network",
    "trust_remote_code": "remote_code",
    "engine": "attn_implementation attn attention implementation backend",
    "device_map": "multi_gpu",
    "memory": "max_memory",
    "dtype": "torch_dtype precision",
    "dtype=float32": "fp32 full_precision",
    "dtype=float16": "fp16 half",
    "dtype=bfloat16": "bf16",
    "device=cuda": "gpu cuda gpus",
    "device=mps": "mps",
    "device=cpu": "cpu no_cuda",
    "quantize=8bit": "load_in_8bit int8",
    "quantize=4bit": "load_in_4bit int4 nf4",
    "top": "n L limit num rows max_rows head tail",
    "top_k": "topk k",
    "min_weight": "threshold min_attention cutoff least min",
    "sort": "order_by sort_by order rank rank_by",
    "ascending": "reverse asc",
    "metrics": "metric measure measures",
    "format": "output_format fmt",
    "format=json": "json",
    "format=csv": "csv",
    "format=tsv": "tsv",
    "format=parquet": "parquet",
    "out": "O output output_dir out_dir output_file save save_dir save_path dir directory dest export html",
    "force": "overwrite y yes exist_ok clobber",
    "quiet": "silent no_progress s",
    "verbose": "v debug log_level traceback",
    "config": "c yaml settings options",
    "figures": "plot plots pictures kinds graph",
    "image": "ext extension figure_format image_format",
    "image=png": "png",
    "image=svg": "svg",
    "image=pdf": "pdf",
    "cmap": "colormap colourmap colors colours color colour palette color_map",
    "width": "figsize size fig_width",
    "title": "suptitle header",
    "annotate": "annot numbers",
    "replace": "ablation ablate_with replacement ablation_type",
    "random": "n_random null nulls permutations",
    "batch_tokens": "b batch_size bs per_device_batch_size",
    "num_actors": "j jobs workers num_workers n_jobs processes num_proc",
    "shard_size": "max_shard_size chunk_size",
    "strict": "fail_fast x exitfirst",
    "dry_run": "n plan estimate",
}

SENTENCE_END = re.compile(r"(?<!e\.g)\.\s")


def synonyms_of(word: str) -> list[tuple[str, str]]:
    """The options, each with its value or none, and the commands that others call so."""
    return [(key, value) for key, _, value in (row.partition("=") for row in SYNONYMS if word in SYNONYMS[row].split())]


def by_key(groups: Sequence[type]) -> dict[str, Parameter]:
    """The options and settings of groups, by their key in --config."""
    return {option.key: option for option in parameters(*groups).values() if not option.is_argument}


def suggestion(word: str, own: Mapping[str, Parameter]) -> str:
    """The option of a command that a word probably means, as `did you mean --top?`; empty where none is near.

    own: the command's options and settings, by key.
    """
    for key, value in synonyms_of(word):
        if key not in own:
            continue
        option = own[key]
        if value and option.choices:
            value = next((choice for choice in option.choices if choice.startswith(value)), "")
        # With its value, else with the first sentence of its help.
        purpose = SENTENCE_END.split(option.info.help or "")[0].rstrip(".")
        return f"did you mean --{option.spelled} {value}?" if value else f"did you mean --{option.spelled} ({purpose})?"
    near = nearest(word, own)
    return "" if near is None else f"did you mean --{own[near].spelled}?"
