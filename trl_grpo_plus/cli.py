"""The `trl-grpo-plus` command. Each subcommand lives in its feature's folder and is imported only when called."""

import importlib
import sys

from trl_grpo_plus._ranks import end_process_group

# name -> (module, one line of help). Each module has `main(argv: list[str]) -> int`.
COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("trl_grpo_plus.demo.command", "see process supervision learn, offline, in minutes"),
    "check-data": ("trl_grpo_plus.check_data", "how the rewards read each gold answer of a data set"),
    "train": ("trl_grpo_plus.train_command", "train a policy from a YAML file"),
    "label": ("trl_grpo_plus.reward_models.label_command", "label steps by roll-outs, without humans"),
    "train-prm": ("trl_grpo_plus.reward_models.train_prm_command", "train a process reward model from a YAML file"),
    "score": ("trl_grpo_plus.reward_models.score_command", "score the steps of completions"),
    "iterate": ("trl_grpo_plus.iterative.command", "iterative GRPO: retrain the reward model as the policy moves"),
    "eval": ("trl_grpo_plus.evaluation.command", "pass@1, maj@k and pass@k on GSM8K, MATH or your own problems"),
    "compare": ("trl_grpo_plus.evaluation.compare_command", "paired comparison of evaluated models"),
    "report": ("trl_grpo_plus.evaluation.report_command", "curves and completions of a training run"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code (0 done, 1 failed, 2 wrong usage)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from trl_grpo_plus import __version__

        print(f"trl-grpo-plus {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"trl-grpo-plus: no command {argv[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[argv[0]]
    code = importlib.import_module(module).main(argv[1:])
    end_process_group()
    return code


def _usage() -> str:
    width = max(map(len, COMMANDS), default=0)
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return f"usage: trl-grpo-plus COMMAND ...\n\n{rows}\n\n`trl-grpo-plus COMMAND --help` tells a command's options."


if __name__ == "__main__":
    sys.exit(main())
