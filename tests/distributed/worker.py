"""One rank of a test: runs the script named first with what follows, then leaves the process group in order."""

import runpy
import sys

from trl_grpo_plus._ranks import end_process_group

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    end_process_group()
