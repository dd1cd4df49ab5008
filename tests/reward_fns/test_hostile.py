"""Text that hangs, crashes or cheats graders: never paid, never slow, the same verdict wherever it is graded."""

import asyncio
import json
import multiprocessing
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reward_fns import GradePolicy, grade, grade_batch
from reward_fns.grading import clear_cache

# Seconds for one pair, with the start of a worker.
LIMIT = 2.0
N = 20_000
HOSTILE = {
    "tower": r"\boxed{9^{9^{9^{9}}}}",
    "tower without braces": r"\boxed{9^9^9^9}",
    "python tower": "9**9**9**9",
    "tower of brackets": r"\boxed{(9^9)^{(9^9)}}",
    "power": r"\boxed{7^{999999999}}",
    "gcd": r"\boxed{\gcd(10^{5000},10^{4500})}",
    "factorial": r"\boxed{99999999!}",
    "factorial of a factorial": r"\boxed{(9999!)!}",
    "many factorials": r"\boxed{5" + "!" * 300 + "}",
    "binomial": r"\boxed{\binom{999999}{500000}}",
    "sum": r"\boxed{\sum_{k=1}^{1000000000} \frac{1}{k^2+k+1}}",
    "infinite sum": r"\boxed{\sum_{n=1}^{\infty}\frac{1}{n^{3}+n+1}}",
    "product": r"\boxed{\prod_{k=1}^{90}(x+k)}",
    "integral": r"\boxed{\int_0^1 e^{\sin(x^{x})}\,dx}",
    "root": r"\boxed{\sqrt[99999999]{2}}",
    "trigonometry": r"\boxed{\tan(10^{30})}",
    "long number": "7" * N,
    "long number after ####": "#### " + "9" * N,
    "long decimal": r"\boxed{0." + "3" * 5000 + "}",
    "exponent notation": r"\boxed{1e999999999}",
    "determinant": r"\boxed{\det\begin{pmatrix}"
    + r"\\".join("&".join(f"x_{{{i}{j}}}" for i in range(9)) for j in range(9))
    + r"\end{pmatrix}}",
    "deep fractions": r"\boxed{" + r"\frac{1}{" * 200 + "2" + "}" * 201,
    "deep roots": r"\boxed{" + r"\sqrt{" * 300 + "2" + "}" * 301,
    "deep functions": r"\boxed{" + r"\sin(" * 60 + "x" + ")" * 60 + "}",
    "deep brackets": "(" * 5000 + "8" + ")" * 5000,
    "deep powers": r"\boxed{" + "x^{" * 200 + "2" + "}" * 201,
    "many terms": r"\boxed{" + "x+" * 2000 + "8}",
    "many factors": r"\boxed{" + "(x+1)" * 300 + "}",
    "many factors with names": r"\boxed{" + "*".join(f"(x_{{{i}}}+y_{{{i}}})" for i in range(60)) + "}",
    "many signs": r"\boxed{" + "-" * 3000 + "8}",
    "many plus-minus": r"\boxed{\pm1\pm2\pm3\pm4\pm5\pm6\pm7\pm8}",
    "many items": r"\boxed{" + ",".join(rf"\sqrt{{{i}+\sqrt{{{i + 1}}}}}" for i in range(55)) + "}",
    "open boxes": r"\boxed{" * 8000,
    "nested boxes": r"\boxed{" * 3000 + "8" + "}" * 3000,
    "open braces": "{" * N,
    "open text": r"\boxed{" + r"\text{" * 900 + "}",
    "many units": r"\boxed{8 " + r"\text{ a } " * 60 + "x}",
    "many currency signs": r"\boxed{" + "$" * 2000 + "8 x}",
    "dollars": "$" * N,
    "brackets of display math": r"\[" * N,
    "hashes": "#" * N,
    "marks": "#### " * 5000,
    "stars": "**" * N,
    "answer is": "answer is " * 5000,
    "final answer is": "final answer is " * 5000,
    "questions": "\nQuestion:" * 5000,
    "answers and lines": "A: \n" * 5000,
    "think": "<think>" * 5000,
    "answer tags": "<answer>" * 5000,
    "new lines": "\n" * N,
    "spaces in front": " " * N + "The answer is 8",
    "spaces between": "The answer" + " " * N + "is 8",
    "spaces and lines": "The answer is" + " \n" * N,
    "spaces in a number": r"\boxed{1" + " " * 3000 + "000}",
    "spaces": "The answer is " + " " * N,
    "sentences": ". " * N,
    "one word": "The answer is " + "a" * N,
    "control characters": "\x00\x01\x02\x03\x04" * 1000,
    "lone surrogate": r"\boxed{\ud800}" + "\ud800",
    "struck out": "7\u0338",
    "division by zero": r"\boxed{7/0}",
    "zero by zero": r"\boxed{0/0}",
    "infinity": r"\boxed{\infty-\infty+7}",
    "not a number": r"\boxed{nan}",
    "code": r'\boxed{__import__("os").system("exit 1")}',
    "code in sympy": r"\boxed{exec(chr(49))}",
    "comprehension": r"\boxed{[x for x in range(10**9)]}",
    "hedge": r"\boxed{6, 7, 8}",
    "hedge in words": r"\boxed{7 \text{ or } 8}",
    "thirty boxes": " ".join(rf"\boxed{{{i}}}" for i in range(30)),
    "false statement": r"\boxed{1=7}",
    "retracted": r"It is \boxed{7}. No, it is \boxed{8}.",
    "thought only": r"<think>\boxed{7}</think>I am not sure.",
}
GOLDS = ["7", "$x^2+1$", "$(0,7)$", r"\sqrt{2}+\sqrt{3}", r"\text{seven}", r"$\begin{pmatrix}1\\2\end{pmatrix}$"]


def _check(gold: str, completion: str) -> tuple[bool, str]:
    start = time.monotonic()
    result = grade(gold, completion)
    assert time.monotonic() - start < LIMIT, result.reason
    return result.correct, result.reason


@pytest.fixture(scope="module", autouse=True)
def started_workers():
    grade(r"\tan^2 x + 1", r"\sec^2 x")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_not_paid_and_not_slow(name):
    for gold in GOLDS:
        correct, reason = _check(gold, HOSTILE[name])
        assert not correct, (gold, reason)


def test_the_verdict_does_not_depend_on_where_it_is_asked():
    pairs = [("7", text) for text in HOSTILE.values()] + [
        ("7", "7"),
        (r"\tan^2 x + 1", r"\sec^2 x"),
        ("7", r"\boxed{8}"),
    ]

    def run():
        clear_cache()
        return [grade(gold, text).correct for gold, text in pairs]

    main = run()
    threaded = []
    thread = threading.Thread(target=lambda: threaded.extend(run()))
    thread.start()
    thread.join()

    async def coroutine():
        return run()

    assert main == threaded == asyncio.run(coroutine())
    assert main[-3:] == [True, True, False]


def _in_daemon(queue):
    queue.put(
        [grade(*pair).correct for pair in ((r"\tan^2 x + 1", r"\sec^2 x"), ("7", HOSTILE["integral"]), ("7", "7"))]
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_daemonic_processes_grade_too(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_in_daemon, args=(queue,), daemon=True)
    process.start()
    assert queue.get(timeout=60) == [True, False, True]
    process.join(20)


def test_a_batch_has_a_budget():
    golds = [rf"\lim_{{n\to\infty}} \sin(n^{{{i}}}) + {i}" for i in range(2, 40)]
    start = time.monotonic()
    results = grade_batch(golds, [rf"\boxed{{{gold} + x^x}}" for gold in golds], budget=1.0)
    assert time.monotonic() - start < 3.0
    assert len(results) == len(golds) and not any(result.correct for result in results)


def test_equal_pairs_are_compared_once(monkeypatch):
    from reward_fns import workers

    seen = []
    original = workers.run_guarded_many
    monkeypatch.setattr(
        workers, "run_guarded_many", lambda tasks, *a: seen.append(len(tasks := list(tasks))) or original(tasks, *a)
    )
    results = grade_batch([r"\sin^2 x + 3"] * 50, [r"\boxed{4 - \cos^2 x}"] * 50)
    assert all(result.correct for result in results)
    assert seen == [1]
    grade_batch([r"\sin^2 x + 3"], [r"\boxed{4 - \cos^2 x}"])
    assert seen == [1]


_LATEX_PIECES = [
    r"\frac",
    r"\sqrt",
    r"\boxed{",
    r"\text{",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    r"\left(",
    r"\right)",
]
_LATEX_PIECES += [
    r"\cup",
    r"\pm",
    r"\le",
    r"\in",
    r"\infty",
    r"\pi",
    r"\sum_{",
    r"\int",
    r"^\circ",
    r"\%",
    r"\$",
    r"\\",
]
_LATEX_PIECES += [r"\{", r"\}", *"{}()[]^_+-*/=<>,;:!|&.$\n ", "x", "y", "e", "i", "f(x)", "sin", "log", "A", "0", "1"]
_PROSE_PIECES = ["####", "**", "<think>", "</think>", "<answer>", "The answer is ", " and ", " or ", " cm"]
_PROSE_PIECES += ["7", "12", "3.5", ".5", "1,000", "−", "²", "½", "√"]
_PIECES = st.sampled_from(_LATEX_PIECES + _PROSE_PIECES)
_TEXT = st.one_of(
    st.lists(_PIECES, max_size=25).map("".join),
    st.lists(_PIECES, max_size=12).map(lambda pieces: r"\boxed{" + "".join(pieces) + "}"),
    st.text(max_size=60),
)


def _fuzz_once(gold, completion):
    start = time.monotonic()
    result = grade(gold, completion, GradePolicy(timeout=0.5))
    assert time.monotonic() - start < LIMIT
    assert result.correct is (result.reason == "correct")


@settings(max_examples=1500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_TEXT, _TEXT)
def test_fuzz(gold, completion):
    _fuzz_once(gold, completion)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(_TEXT, _TEXT)
def test_fuzz_long(gold, completion):
    _fuzz_once(gold, completion)


def test_real_hostile_cases(shared_data):
    with open(shared_data("grader_cases/bugs.jsonl")) as file:
        cases = [case for case in map(json.loads, file) if case["group"] == "hostile"]
    assert len(cases) > 20
    for case in cases:
        assert _check(case["gold"], case["pred"])[0] is case["expect"] is False
