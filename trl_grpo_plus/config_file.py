"""What the commands that run from a YAML file share: parsing with overrides, and one line for what is wrong."""

import contextlib
import io
import sys
from collections.abc import Callable


def run_from_file(
    argv: list[str], prog: str, usage: str, prepare: Callable[[list[str]], Callable[[], int | None]]
) -> int:
    """Shows the usage, or prepares a run with `CONFIG.yaml ...` turned into `--config CONFIG.yaml ...`, and runs it.

    A user's mistake in preparing is told on stderr in one line. What goes wrong in the run itself keeps its traceback.

    Returns:
        The exit code: what the run returns (None is 0), or 2 after a mistake.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0 if argv else 2
    try:
        run = prepare(argv if argv[0].startswith("-") else ["--config", *argv])
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"{prog}: {one_line(error)}", file=sys.stderr)
        return 2
    return run() or 0


def one_line(error: Exception) -> str:
    """An error for a terminal: transformers and datasets write whole paragraphs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def parse_config_file(argv: list[str], dataclass_types: tuple[type, ...], prog: str, usage: str) -> tuple:
    """One instance per dataclass from a command line with `--config FILE`; `--help-all` lists every field.

    Raises:
        ValueError: a field is unknown or has a value of the wrong kind.
    """
    from trl import TrlParser

    if "--help-all" in argv:
        TrlParser(dataclass_types, prog=prog).print_help()
        raise SystemExit(0)
    # argparse ends the process after its usage; the last line of what it says is the mistake.
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return TrlParser(dataclass_types, prog=prog, usage=usage).parse_args_and_config(argv)
    except SystemExit as error:
        last_line = complaint.getvalue().strip().splitlines()[-1]
        raise ValueError(last_line.removeprefix(f"{prog}: error: ")) from error


def model_init_kwargs(config, model_config, dtype: str | None = None) -> dict:
    """Arguments of a policy's or reward model's `from_pretrained`: TRL's ModelConfig, and `config`'s own on top."""
    return {
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "dtype": model_config.dtype or dtype,
        **(config.model_init_kwargs or {}),
    }
