"""Runs a script on two gloo ranks on this machine, in the environment that `accelerate launch` makes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("worker.py")


def launch(script: Path, *arguments: str, num_processes: int = 2, timeout: float = 300) -> str:
    """Runs `script` under torchrun, which `accelerate launch` uses too; returns its output, or fails with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--nproc_per_node", str(num_processes), "--master_addr", "127.0.0.1", "--master_port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(WORKER), str(script), *arguments]
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout
