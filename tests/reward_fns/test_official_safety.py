"""The official modes on text that breaks the programs they stand for."""

import json
import subprocess
import sys
import threading
import time

import pytest

from reward_fns import workers
from reward_fns.official import OFFICIAL_MODES, _sympy_runtime

SYMPY_MODES = ("minerva_math", "deepseek_math", "qwen25_math")


def complete(answer):
    return f"\\boxed{{{answer}}} Final Answer: The final answer is ${answer}$. I hope it is correct."


@pytest.mark.parametrize("mode", SYMPY_MODES)
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('touch {path}')",
        "open('{path}','w')",
        "exec(\"open('{path}','w')\")",
        "().__class__.__base__.__subclasses__()",
        "sympify(\"open('{path}','w')\")",
        "Symbol('x').func.__init__.__globals__",
        "lambda: open('{path}','w')",
        "[open('{path}','w') for x in (1,)]",
        "print(open('{path}','w'))",
        "S(\"__import__('os').system('touch {path}')\")",
        "preview(x)",
    ],
)
def test_model_text_is_not_run(tmp_path, mode, answer):
    target = tmp_path / "ran"
    correct, _, _ = OFFICIAL_MODES[mode]("5", complete(answer.replace("{path}", str(target))))
    assert correct is False
    assert not target.exists()


def test_the_python_reader_refuses_what_is_no_mathematics():
    """In a process of its own, as in a worker: importing the reader changes sympy's version check."""
    program = r"""
import pytest
import sympy
from reward_fns.official.symbolic import Refused, parse_python, sympify_text

x, y = sympy.symbols("x y")
good = {
    "2*x+1": 2*x + 1, "3!": 6, "(1,2)": (1, 2), "{1,2}": {1, 2}, "sqrt(8)": 2*sympy.sqrt(2), "x**2/2": x**2/2,
    "max(1,2)": 2, "pi": sympy.pi, "f(x)": sympy.Function("f")(x), "1.5": sympy.Float("1.5"),
    "1 < x": sympy.Integer(1) < x,
    "0.2[1]": sympy.Rational(19, 90), "-x": -x, "Rational(1,3)": sympy.Rational(1, 3), "E": sympy.E,
}
for text, value in good.items():
    assert parse_python(text) == value, text
    assert parse_python(text) == sympy.parse_expr(text), text
assert sympify_text("x^2") == x**2
assert sympify_text("0.5", rational=True) == sympy.Rational(1, 2)
bad = ["x.args", "x[0]", "'a'", "eval(x)", "lambdify(x,x)", "Symbol('a b')", "(lambda: 1)()", "f(*x)", "f(a=1)",
       "[x for x in y]", "x if y else 1", "f'{x}'", "open(x)", "(y := 1)", "print(1)", "sympify(x)", "var(x)"]
for text in bad:
    with pytest.raises((Refused, SyntaxError, sympy.SympifyError)):
        parse_python(text)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def check_hostile(mode, gold, answer):
    begin = time.monotonic()
    correct, extracted, _ = OFFICIAL_MODES[mode](gold, complete(answer))
    # The last number of the text is what the harness' flexible filter is about, whatever the text is.
    assert correct is (mode == "gsm8k_flexible" and extracted == gold), answer
    # One comparison, 1.8 seconds by the clock at most, and what a busy machine adds.
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("mode", list(OFFICIAL_MODES))
@pytest.mark.parametrize("answer", ["(10!)!", "9^{9^{9^{9}}}", r"\sin(10^{10^{8}})"])
def test_hostile_answers_do_not_hang_and_are_not_paid(mode, answer):
    check_hostile(mode, "7", answer)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(OFFICIAL_MODES))
def test_all_hostile_cases(shared_data, mode):
    with shared_data("grader_cases/bugs.jsonl").open(encoding="utf-8") as lines:
        cases = [case for case in map(json.loads, lines) if case["group"] == "hostile"]
    assert len(cases) > 20
    for case in cases:
        check_hostile(mode, case["gold"], case["pred"].removeprefix("\\boxed{").removesuffix("}"))


@pytest.mark.parametrize("mode", list(OFFICIAL_MODES))
@pytest.mark.parametrize(
    "completion",
    [
        "1" * 200_000,
        "\\boxed{" * 20_000,
        "\\boxed{" + "\\text{" * 20_000 + "}",
        "\\boxed{" + "(" * 20_000 + "}",
        "Final Answer: The final answer is " * 5_000,
        "Final Answer: The final answer is " + "$" * 50_000 + ". I hope it is correct.",
        "Final Answer: The final answer is " + "sqrt[" * 10_000 + ". I hope it is correct.",
        "#### " * 40_000,
        "\n" * 100_000,
        "he answer is " + "," * 100_000,
        "\\boxed{" + "{1," * 5_000 + "}" * 5_000 + "}",
        "\ud800\x00\\boxed{\ud800}",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_long_and_odd_texts_end(mode, completion):
    begin = time.monotonic()
    assert OFFICIAL_MODES[mode]("5", completion)[0] is False
    assert time.monotonic() - begin < 5


def test_the_same_verdicts_in_a_thread(shared_data):
    pairs = [(r"\sqrt{8}", complete(r"2\sqrt{2}")), ("x+1", complete("1+x")), ("x+1", complete("x+2"))]
    expected = [[OFFICIAL_MODES[mode](*pair) for mode in SYMPY_MODES] for pair in pairs]
    found = []
    thread = threading.Thread(
        target=lambda: found.extend([OFFICIAL_MODES[mode](*pair) for mode in SYMPY_MODES] for pair in pairs)
    )
    thread.start()
    thread.join(60)
    assert found == expected
    assert [row[0][0] for row in found] == [True, True, False]


def test_a_worker_that_dies_costs_one_pair_only(monkeypatch):
    grade = OFFICIAL_MODES["qwen25_math"]
    assert grade("q+3", complete("(9999999999!)!"))[0] is False
    assert grade("q+3", complete("3+q"))[0] is True


def test_nothing_of_sympy_is_imported_by_the_caller():
    program = (
        "import sys, time; t = time.perf_counter(); import reward_fns.official as o; t = time.perf_counter() - t\n"
        "assert o.OFFICIAL_MODES['qwen25_math']('x+1', r'\\boxed{1+x}')[0]\n"
        "assert not {'sympy', 'antlr4', 'torch', 'trl', 'transformers'} & set(sys.modules)\n"
        "print(t)"
    )
    result = subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True)
    assert float(result.stdout) < 1.0


def test_an_antlr_that_cannot_read_the_tables_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_sympy_runtime, "runtime_version", lambda: "4.9.3")
    for mode in SYMPY_MODES:
        with pytest.raises(ImportError, match=rf"{mode}.*4\.9\.3.*pip install 'math-verify\[antlr4_13_2\]'"):
            OFFICIAL_MODES[mode]("x+1", complete("x+7"))


def test_time_outs_are_not_remembered(monkeypatch):
    from reward_fns.official import _common

    answers = [workers.TIMEOUT, True]
    monkeypatch.setattr(_common, "run_guarded", lambda *_: answers.pop(0))
    grade = OFFICIAL_MODES["minerva_math"]
    pair = ("w+41", complete("41+w"))
    assert [grade(*pair)[0], grade(*pair)[0], grade(*pair)[0]] == [False, True, True]
    assert answers == []
