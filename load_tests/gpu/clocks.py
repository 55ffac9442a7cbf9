"""The device's clocks while it works: at rest they say nothing, and under load they fall with power and heat."""

import subprocess
import time

import torch

SIDE, PRODUCTS = 8192, 20
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader")
LIMIT_SECONDS = 20.0


def clocks_under_load(device: torch.device) -> str:
    """As `nvidia-smi` tells them beside products of matrices, or that it does not."""
    left, right = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    try:
        with subprocess.Popen(QUERY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as asked:
            deadline = time.monotonic() + LIMIT_SECONDS
            while asked.poll() is None:
                if time.monotonic() > deadline:
                    asked.kill()
                for _ in range(PRODUCTS):
                    torch.mm(left, right)
                torch.cuda.synchronize(device)
            said, _ = asked.communicate()
    except OSError as error:
        return f"unknown: {type(error).__name__}"
    return said.strip().splitlines()[0] if asked.returncode == 0 and said.strip() else "unknown: nvidia-smi failed"
