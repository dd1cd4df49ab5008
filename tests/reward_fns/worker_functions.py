"""Functions that the tests run inside grading workers."""

import os
import subprocess


def add(a, b):
    return a + b


def pid():
    return [os.getpid(), os.getppid()]


def spin():
    while True:
        pass


def hold_gil():
    return 7 ** (7**9)


def eat_memory():
    return len(bytearray(6 << 30))


def die():
    os._exit(9)


def fail():
    raise ValueError("no")


def noisy():
    print("noise " * 1000)
    return "done"


def write_file(path):
    with open(path, "w") as file:
        file.write("x")


def start_process():
    return subprocess.run(["true"]).returncode
