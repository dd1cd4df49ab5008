"""Collectives up to the last moment, then the command line's way out."""

import sys

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from trl_grpo_plus import cli


class Command:
    """Stands for a subcommand that trains."""

    @staticmethod
    def main(argv: list[str]) -> int:
        distributed.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        model(torch.randn(8, 64)).sum().backward()
        return 0


if __name__ == "__main__":
    sys.modules["command_under_test"] = Command
    cli.COMMANDS["stand-in"] = ("command_under_test", "")
    code = cli.main(["stand-in"])
    assert not distributed.is_initialized()
    sys.exit(code)
