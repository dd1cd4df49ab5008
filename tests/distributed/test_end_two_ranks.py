"""A run on two ranks ends with exit code 0; without `end_process_group` one in five aborted in the teardown."""

from pathlib import Path

import pytest
from launch import launch


@pytest.mark.distributed
@pytest.mark.slow
def test_the_command_line_leaves_the_process_group_in_order():
    for _ in range(8):
        launch(Path(__file__).with_name("run_end.py"))
