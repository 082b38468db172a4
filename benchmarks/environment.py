"""What a machine with a card has: driver, versions, what builds kernels, and which attention PyTorch takes.

python3 benchmarks/environment.py --device cuda:0
"""

import argparse
import json
import subprocess

import torch

from attnscope.attention.kernels_cuda import device_can
from attnscope.attention.kernels_cuda import operator as driver
from attnscope.attention.spec import AttentionSpec, Visibility
from attnscope.cli.doctor import examined
from attnscope.hooks.calls import sdpa_kernel

CARD = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit", "--format=csv"]
SHAPES = {"Llama-3.2-3B": (24, 8, 128, None), "with a mask": (24, 8, 128, True)}


def called(command: list[str]) -> str:
    """What a program says, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout + done.stderr).strip()


def attention(device: str, heads: int, kv_heads: int, width: int, masked: bool | None, tokens: int = 2048) -> str:
    """The kernel that PyTorch's own attention takes for such a call in bfloat16."""
    q, k = (torch.zeros(1, count, tokens, width, dtype=torch.bfloat16, device=device) for count in (heads, kv_heads))
    where = torch.device(device)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).tril() if masked else None
    return sdpa_kernel(AttentionSpec(q, k, k, width**-0.5, Visibility(tokens, tokens, mask, device=where)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    device = parser.parse_args().device
    print(called(CARD))
    facts = examined()
    shown = {name: facts[name] for name in ("python", "system", "versions", "devices", "kernels", "threads")}
    print(json.dumps(shown, indent=1))
    print(f"CUDA of PyTorch: {torch.version.cuda}; cuDNN: {torch.backends.cudnn.version()}")
    can = device_can(torch.device(device))
    missing = driver.missing() if can and device.startswith("cuda") else ""
    print(f"the kernels can run on {device}: {'yes' if can and not missing else 'no'} {missing}".strip())
    for name, shape in SHAPES.items():
        print(f"attention of {name}'s shape: {attention(device, *shape)}")


if __name__ == "__main__":
    main()
