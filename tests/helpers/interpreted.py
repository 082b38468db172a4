"""`pytest ARGUMENTS` in a fork in which Triton's kernels are interpreted: `forked(interpreted.__file__, *ARGUMENTS)`.

Triton reads how it is to run when it is imported, and the server of forks has imported it already: once more, then.
"""

import os
import sys

import pytest


def forget_triton() -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):  # which loads once alone
            del sys.modules[name]


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    forget_triton()
    sys.exit(pytest.main(sys.argv[1:]))
