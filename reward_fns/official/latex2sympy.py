"""What of latex2sympy2 the Qwen2.5-Math grader can reach."""


def parse_matrix_latex(text):
    raise ValueError("todo")
