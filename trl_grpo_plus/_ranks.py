"""The end of a run on several ranks."""

import gc
import sys
import time


def end_process_group() -> None:
    """
    Ends `torch.distributed`'s process group, if there is one, after the last collective has returned on this rank.

    A gloo worker thread lets go of its last tensor only after the collective has returned. If the interpreter is being
    torn down by then, the process aborts ("terminate called without an active exception", exit code 134) although all
    its work is done and saved. Destroying the group is not enough, since DistributedDataParallel keeps it alive: the
    thread is given time to finish first.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    gc.collect()
    time.sleep(0.5)
    distributed.destroy_process_group()
