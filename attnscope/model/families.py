"""What is known of a family by its name, where nothing else tells."""

BYPASS_INTERFACE = frozenset(
    [
        "big_bird",
        "bloom",
        "codegen",
        "cpmant",
        "falcon",
        "git",
        "gpt_neo",
        "gpt_neox_japanese",
        "gptj",
        "megatron-bert",
        "mpt",
        "mvp",
        "openai-gpt",
        "prophetnet",
        "rembert",
        "roformer",
        "trocr",
        "xglm",
        "xlm",
        "xlnet",
    ]
)
RETURN_WEIGHTS_WHEN_ASKED = {"falcon", "git", "mvp", "xlm", "openai-gpt", "prophetnet", "trocr", "big_bird"}


# Modules whose sink logits scale the output and leave the returned weights summing to 1.
SINKS_SCALE_OUTPUT = {"GraniteSWAAttention", "GraniteMoeSWAAttention"}
