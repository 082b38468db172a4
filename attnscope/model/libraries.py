"""Progress bars, logs and warnings of the libraries underneath."""

import os
import sys
import warnings


def silence_libraries(verbose: bool) -> None:
    """Silence the progress bars, logs and warnings of the libraries underneath, unless `verbose`.

    To be called before the first import of them: they read these variables once. For those already imported the same is
    said again through their own functions.

    Example:
        silence_libraries(verbose=False)
    """
    if verbose:
        return
    os.environ |= {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_VERBOSITY": "error",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "BITSANDBYTES_NOWELCOME": "1",
    }
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"attnscope(\.|$)")
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
