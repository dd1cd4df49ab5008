r"""Prompt templates: zero-shot chat with the DeepSeekMath suffix, the published few-shot prompts, and your own.

A template turns a question into a `Prompt`: either chat messages or plain text. What the model really saw, chat
template included, is stored next to the results by the sampling backend.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# arXiv 2402.03300 and the DeepSeekMath repository: appended to every English question of a chat model.
BOXED_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."

# Wei et al. 2022 (arXiv 2201.11903), table 20: the eight exemplars of chain-of-thought prompting for GSM8K.
COT_8_SHOT = (
    (
        "There are 15 trees in the grove. Grove workers will plant trees in the grove today. After they are done, "
        "there will be 21 trees. How many trees did the grove workers plant today?",
        "There are 15 trees originally. Then there were 21 trees after some more were planted. So there must have "
        "been 21 - 15 = 6. The answer is 6.",
    ),
    (
        "If there are 3 cars in the parking lot and 2 more cars arrive, how many cars are in the parking lot?",
        "There are originally 3 cars. 2 more cars arrive. 3 + 2 = 5. The answer is 5.",
    ),
    (
        "Leah had 32 chocolates and her sister had 42. If they ate 35, how many pieces do they have left in total?",
        "Originally, Leah had 32 chocolates. Her sister had 42. So in total they had 32 + 42 = 74. After eating 35, "
        "they had 74 - 35 = 39. The answer is 39.",
    ),
    (
        "Jason had 20 lollipops. He gave Denny some lollipops. Now Jason has 12 lollipops. How many lollipops did "
        "Jason give to Denny?",
        "Jason started with 20 lollipops. Then he had 12 after giving some to Denny. So he gave Denny 20 - 12 = 8. "
        "The answer is 8.",
    ),
    (
        "Shawn has five toys. For Christmas, he got two toys each from his mom and dad. How many toys does he have "
        "now?",
        "Shawn started with 5 toys. If he got 2 toys each from his mom and dad, then that is 4 more toys. 5 + 4 = 9. "
        "The answer is 9.",
    ),
    (
        "There were nine computers in the server room. Five more computers were installed each day, from monday to "
        "thursday. How many computers are now in the server room?",
        "There were originally 9 computers. For each of 4 days, 5 more computers were added. So 5 * 4 = 20 computers "
        "were added. 9 + 20 is 29. The answer is 29.",
    ),
    (
        "Michael had 58 golf balls. On tuesday, he lost 23 golf balls. On wednesday, he lost 2 more. How many golf "
        "balls did he have at the end of wednesday?",
        "Michael started with 58 golf balls. After losing 23 on tuesday, he had 58 - 23 = 35. After losing 2 more, "
        "he had 35 - 2 = 33 golf balls. The answer is 33.",
    ),
    (
        "Olivia has $23. She bought five bagels for $3 each. How much money does she have left?",
        "Olivia had 23 dollars. 5 bagels for 3 dollars each will be 5 x 3 = 15 dollars. So she has 23 - 15 dollars "
        "left. 23 - 15 is 8. The answer is 8.",
    ),
)

# Lewkowycz et al. 2022 (Minerva, arXiv 2206.14858), appendix D.2: the four exemplars for MATH.
MINERVA_4_SHOT = (
    (
        r"Find the domain of the expression  $\frac{\sqrt{x-2}}{\sqrt{5-x}}$.",
        r"The expressions inside each square root must be non-negative. Therefore, $x-2 \ge 0$, so $x\ge2$, and "
        r"$5 - x \ge 0$, so $x \le 5$. Also, the denominator cannot be equal to zero, so $5-x>0$, which gives $x<5$. "
        r"Therefore, the domain of the expression is $\boxed{[2,5)}$."
        "\nFinal Answer: The final answer is $[2,5)$. I hope it is correct.",
    ),
    (
        r"If $\det \mathbf{A} = 2$ and $\det \mathbf{B} = 12,$ then find $\det (\mathbf{A} \mathbf{B}).$",
        r"We have that $\det (\mathbf{A} \mathbf{B}) = (\det \mathbf{A})(\det \mathbf{B}) = (2)(12) = \boxed{24}.$"
        "\nFinal Answer: The final answer is $24$. I hope it is correct.",
    ),
    (
        "Terrell usually lifts two 20-pound weights 12 times. If he uses two 15-pound weights instead, how many times "
        "must Terrell lift them in order to lift the same total weight?",
        r"If Terrell lifts two 20-pound weights 12 times, he lifts a total of $2\cdot 12\cdot20=480$ pounds of "
        r"weight.  If he lifts two 15-pound weights instead for $n$ times, he will lift a total of "
        r"$2\cdot15\cdot n=30n$ pounds of weight.  Equating this to 480 pounds, we can solve for $n$:"
        "\n"
        "\\begin{align*}\n30n&=480\\\\\n\\Rightarrow\\qquad n&=480/30=\\boxed{16}\n\\end{align*}\n"
        "Final Answer: The final answer is $16$. I hope it is correct.",
    ),
    (
        "If the system of equations\n\n\\begin{align*}\n6x-4y&=a,\\\\\n6y-9x &=b.\n\\end{align*}has a solution "
        "$(x, y)$ where $x$ and $y$ are both nonzero,\nfind $\\frac{a}{b},$ assuming $b$ is nonzero.",
        "If we multiply the first equation by $-\\frac{3}{2}$, we obtain\n\n$$6y-9x=-\\frac{3}{2}a.$$Since we also "
        "know that $6y-9x=b$, we have\n\n$$-\\frac{3}{2}a=b\\Rightarrow\\frac{a}{b}=\\boxed{-\\frac{2}{3}}.$$\n"
        "Final Answer: The final answer is $-\\frac{2}{3}$. I hope it is correct.",
    ),
)


class PromptError(ValueError):
    """The prompt template cannot be used as given."""


@dataclass(frozen=True)
class Prompt:
    """What is put to the model: chat `messages`, or plain `text` (the other is None)."""

    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None


@dataclass(frozen=True)
class PromptTemplate:
    """A named way to ask.

    Attributes:
        name: as in `PROMPTS`, or the file's name.
        chat: whether `render` gives chat messages.
        question: Jinja template of the last user message or of the text's last block, with `question`.
        answer: text style: Jinja template of an exemplar's answer, with `answer`.
        exemplars: (question, answer) pairs shown first.
        separator: text style: between blocks.
        system: chat style: system message.
        stop: strings that end a completion; they are cut off.
    """

    name: str
    chat: bool
    question: str
    answer: str = "{{ answer }}"
    exemplars: tuple[tuple[str, str], ...] = ()
    separator: str = "\n\n"
    system: str | None = None
    stop: tuple[str, ...] = field(default=())

    def render(self, question: str) -> Prompt:
        """The prompt of one question."""
        ask = _jinja(self.question)
        if self.chat:
            messages = [] if self.system is None else [{"role": "system", "content": self.system}]
            for q, a in self.exemplars:
                messages.append({"role": "user", "content": ask(question=q)})
                messages.append({"role": "assistant", "content": _jinja(self.answer)(answer=a)})
            messages.append({"role": "user", "content": ask(question=question)})
            return Prompt(messages=tuple(messages))
        blocks = [ask(question=q) + _jinja(self.answer)(answer=a) for q, a in self.exemplars]
        return Prompt(text=self.separator.join([*blocks, ask(question=question)]))

    def with_exemplars(self, exemplars: Sequence[tuple[str, str]]) -> PromptTemplate:
        """The same template with other exemplars."""
        from dataclasses import replace

        return replace(self, exemplars=tuple((str(q), str(a)) for q, a in exemplars))


PROMPTS: dict[str, PromptTemplate] = {
    t.name: t
    for t in (
        PromptTemplate("chat", chat=True, question="{{ question }}" + BOXED_SUFFIX),
        PromptTemplate(
            "deepseekmath",
            chat=False,
            question="User: {{ question }}" + BOXED_SUFFIX + "\n\nAssistant:",
            stop=("\nUser:",),
        ),
        # Exemplars are the first five rows of GSM8K's training split, read when the prompt is used.
        PromptTemplate(
            "gsm8k-5shot",
            chat=False,
            question="Question: {{ question }}\nAnswer:",
            answer=" {{ answer }}",
            stop=("Question:", "</s>", "<|im_end|>"),
        ),
        PromptTemplate(
            "gsm8k-8shot",
            chat=False,
            question="Q: {{ question }}\nA:",
            answer=" {{ answer }}",
            exemplars=COT_8_SHOT,
            stop=("Q:", "</s>", "<|im_end|>"),
        ),
        PromptTemplate(
            "math-4shot",
            chat=False,
            question="Problem:\n{{ question }}\n\nSolution:",
            answer=" {{ answer }}",
            exemplars=MINERVA_4_SHOT,
            stop=("Problem:", "</s>", "<|im_end|>"),
        ),
        PromptTemplate("plain", chat=False, question="{{ question }}"),
    )
}


def load_template(
    name_or_file: str, *, kind: str, has_chat_template: bool, fewshot_file: str | None = None
) -> PromptTemplate:
    """Finds a template.

    Args:
        name_or_file: a name of `PROMPTS`; "auto" ("chat" where the model has a chat template, otherwise the few-shot
            prompt of the kind of data set); or a file: text with `{{ question }}`, or JSON with "messages" (a list of
            role and content, the last one with `{{ question }}`) and optionally "stop".
        kind: "gsm8k" or "math".
        has_chat_template: whether the model can take chat messages.
        fewshot_file: exemplars for "gsm8k-5shot" (first five rows); by default they come from the hub.

    Raises:
        PromptError: unknown name, a file without `{{ question }}`, or chat messages for a model without chat template.
    """
    if name_or_file == "auto":
        name_or_file = "chat" if has_chat_template else {"gsm8k": "gsm8k-8shot", "math": "math-4shot"}[kind]
    if name_or_file in PROMPTS:
        template = PROMPTS[name_or_file]
    elif Path(name_or_file).is_file():
        template = _from_file(Path(name_or_file))
    else:
        raise PromptError(f"prompt {name_or_file!r} is neither a file nor one of auto, {', '.join(PROMPTS)}")
    if template.chat and not has_chat_template:
        raise PromptError(
            f"prompt {template.name!r} is a chat, but the model's tokenizer has no chat template; "
            f"use --prompt {'gsm8k-8shot' if kind == 'gsm8k' else 'math-4shot'}, plain, or a text template of your own"
        )
    if template.name == "gsm8k-5shot":
        template = template.with_exemplars(_gsm8k_exemplars(fewshot_file, 5))
    elif fewshot_file is not None:
        raise PromptError(f"a few-shot file is read by prompt 'gsm8k-5shot' only, not by {template.name!r}")
    return template


def _gsm8k_exemplars(fewshot_file: str | None, count: int) -> list[tuple[str, str]]:
    from trl_grpo_plus.evaluation.datasets import DatasetError, load_problems

    try:
        if fewshot_file is None:
            rows = load_problems("gsm8k", split="train", limit=count)
        else:
            rows = load_problems(fewshot_file, limit=count)
    except DatasetError as error:
        raise PromptError(
            f"prompt 'gsm8k-5shot' takes its exemplars from GSM8K's training split: {error}; "
            "a local copy can be given with --fewshot-file"
        ) from error
    if len(rows) < count:
        raise PromptError(f"prompt 'gsm8k-5shot' needs {count} exemplars, {fewshot_file} has {len(rows)}")
    return [(p.question, p.gold) for p in rows.problems]


def _from_file(path: Path) -> PromptTemplate:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            spec = json.loads(text)
            messages = [(m["role"], m["content"]) for m in spec["messages"]]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise PromptError(f"{path} must be a JSON object with 'messages', each with role and content") from error
        system = None
        if messages and messages[0][0] == "system":
            system = messages.pop(0)[1]
        roles = [role for role, _ in messages]
        if not messages or roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            raise PromptError(f"{path}: messages must be an optional system one, then user and assistant in turn")
        if "question" not in messages[-1][1]:
            raise PromptError(f"{path}: the last message has no {{{{ question }}}}")
        fixed = tuple(messages[:-1])
        return _FileChat(
            path.name,
            chat=True,
            question=messages[-1][1],
            system=system,
            stop=tuple(spec.get("stop", ())),
            fixed=fixed,
        )
    if "question" not in text:
        raise PromptError(f"{path} has no {{{{ question }}}}")
    return PromptTemplate(path.name, chat=False, question=text)


@dataclass(frozen=True)
class _FileChat(PromptTemplate):
    """A chat whose earlier turns are verbatim."""

    fixed: tuple[tuple[str, str], ...] = ()

    def render(self, question: str) -> Prompt:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages += [{"role": role, "content": content} for role, content in self.fixed]
        messages.append({"role": "user", "content": _jinja(self.question)(question=question)})
        return Prompt(messages=tuple(messages))


def _jinja(source: str):
    from jinja2 import Environment, StrictUndefined, TemplateError

    try:
        return Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(source).render
    except TemplateError as error:
        raise PromptError(f"prompt template is not valid Jinja: {error}") from error
