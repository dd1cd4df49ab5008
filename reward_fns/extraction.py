"""Finds the final answer in a completion, and the gold answer in a column's value.

Order of precedence (the first that is there counts, and within one the last occurrence):

1. `\\boxed{...}` / `\\fbox{...}` with balanced braces. Neighbouring boxes joined by nothing, a comma, "and" or "or"
   are one list; an earlier box with other words in between was retracted.
2. `#### answer`.
3. "final answer is ...", "the answer is ...", "Answer: ...".
4. `<answer>...</answer>`.
5. bold: `**answer**`.
6. The whole completion, when it is nothing but a short answer; else "math": the last formula between math delimiters
   (in "gsm8k" mode only for a gold that is no number).
7. "last number" ("gsm8k" mode). In "auto" mode "conclusion", the end of a last sentence such as `Thus x = 3.`, or the
   number in it.

Before that: what stands before the last `</think>` never counts, nor what follows an end-of-text token or, after an
answer, a new question that a base model ran on into.

All scans are linear in the length of the text.
"""

import re
from typing import Any, NamedTuple

from .clean import matching_brace

__all__ = ["Found", "extract", "read_gold", "to_text"]

MAX_COMPLETION = 400_000
# Without a box or marker the end of the text is enough.
WINDOW = 20_000
TAIL = 6_000
BOX_WINDOW = 60_000
MAX_ANSWER = 4_000


class Found(NamedTuple):
    """An answer and how it was found. `text` is None when there is none."""

    text: str | None
    method: str


NOTHING = Found(None, "none")


def to_text(completion: Any) -> str:
    """A completion in any of its shapes as text.

    That is: str, None, a message, a list of messages (the last assistant turn that says anything), content in parts.
    """
    if completion is None:
        return ""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, bytes):
        return completion.decode("utf-8", "replace")
    if isinstance(completion, dict):
        return _message_text(completion)
    if isinstance(completion, (list, tuple)):
        if completion and all(_is_part(part) for part in completion):
            return _parts_text(completion)
        turns = [m for m in completion if isinstance(m, dict)]
        assistant = [m for m in turns if m.get("role") in ("assistant", "model", "gpt", None)]
        for message in reversed(assistant):
            text = _message_text(message)
            if text.strip():
                return text
        return ""
    return _number_text(completion) if isinstance(completion, (int, float)) else ""


def _is_part(part: Any) -> bool:
    if isinstance(part, str):
        return True
    return (
        isinstance(part, dict) and "role" not in part and ("text" in part or "type" in part) and "content" not in part
    )


def _parts_text(parts: Any) -> str:
    out = []
    for part in parts:
        if isinstance(part, str):
            out.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            out.append(part["text"])
    return "".join(out)


def _message_text(message: dict) -> str:
    content = message.get("content", message.get("text", message.get("value")))
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        return _parts_text(content)
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return content["text"]
    return ""


_END_TOKENS = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|end|end_of_text|eom_id|im_start|start_header_id|user|assistant)\|>|</s>|<eos>"
    r"|<end_of_turn>|<start_of_turn>|<｜end▁of▁sentence｜>|<｜User｜>"
)
_RUN_ON = re.compile(
    r"\n[ \t]*(?:#{1,6}[ \t]*|\*\*[ \t]*)?"
    r"(?:(?:New |Next |Another |Example |Test )?(?:Question|Problem|Exercise)[ \t]*\d{0,4}[ \t]*[:.]"
    r"|Q[ \t]*\d{0,4}[ \t]*[:.]|(?:Human|User|Instruction)[ \t]*:|\[INST\])",
)
_THINK_OPEN = re.compile(r"<(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_THINK_CLOSE = re.compile(r"</(?:think|thinking|thought|reasoning)>|<\|end_of_thought\|>|◁/think▷", re.IGNORECASE)


_SPACE_RUN = re.compile(r"[^\S\n]{3,}|[\t\r\x0b\x0c\x1c-\x1f]+")
_LINE_RUN = re.compile(r"(?:[^\S\n]{0,2}\n){3,}")


def _without_long_gaps(text: str) -> str:
    """Runs of white space shortened: the searches below are linear only as long as these are short."""
    if "   " in text or "\t" in text or "\r" in text or not text.isascii():
        text = _SPACE_RUN.sub("  ", text)
    return _LINE_RUN.sub("\n\n", text) if "\n\n" in text or "\n " in text else text


def _visible(text: str, unfinished: str) -> str | None:
    """What may hold the answer: after the thinking, before the end token and before a run-on question."""
    if len(text) > MAX_COMPLETION:
        text = text[-MAX_COMPLETION:]
    text = _without_long_gaps(text)
    if "</" in text or "<|" in text or "◁" in text:
        closed = [match.end() for match in _THINK_CLOSE.finditer(text)]
        if closed:
            text = text[closed[-1] :]
    opened = _THINK_OPEN.search(text) if any(mark in text for mark in ("<t", "<T", "<r", "<R")) else None
    if opened:
        if unfinished == "no answer":
            text = text[: opened.start()]
            if not text.strip():
                return None
        else:
            text = text[opened.end() :]
    cut = _END_TOKENS.search(text) if any(mark in text for mark in ("<|", "</s>", "<eos>", "_turn>", "<｜")) else None
    while cut and not text[: cut.start()].strip():
        text = text[cut.end() :]
        cut = _END_TOKENS.search(text)
    if cut:
        text = text[: cut.start()]
    if _RUN_ON.search(text):
        first = min((m.end() for p in (_BOX, _HASHES, _ANSWER_WORD) if (m := p.search(text))), default=None)
        run_on = _RUN_ON.search(text, first) if first is not None else None
        if run_on:
            return text[: run_on.start()]
    return text


_BOX = re.compile(r"\\{1,2}(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BOX_JOINT = re.compile(
    r"(?:\s|\$|\\\(|\\\)|\\\[|\\\]|[,;&~]|\\(?:quad|qquad|,|;|:|!|\s)|(?:\\(?:text|mbox|textrm|mathrm)\s*\{)?\s*(?:\band\b|\bor\b)?"
    r"(?:\s*for part \([a-z]\))?\s*(?:\band\b|\bor\b)?\s*\}?)*"
)


_CALCULATOR = re.compile(r"<<[^<>]*>>")


class _Box(NamedTuple):
    inside: str
    start: int
    end: int


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def _brace_pairs(text: str) -> dict[int, int]:
    """Where each brace that is closed closes. Escaped braces do not count."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs


def _boxes(text: str) -> list[_Box]:
    """All outermost boxes with balanced braces, in order."""
    if "box" not in text or not _BOX.search(text):
        return []
    pairs = _brace_pairs(text)
    escaped = text.rfind("\\}")
    if text[escaped + 2 :].strip(" .$\n"):
        escaped = -1
    found = []
    at = 0
    while True:
        match = _BOX.search(text, at)
        if not match:
            return found
        at = match.end()
        if at < len(text) and text[at] == "{":
            end = pairs.get(at, -1)
            if end < 0 and escaped > at:
                # `\\boxed{185\\}`: the closing brace was escaped by mistake.
                found.append(_Box(text[at + 1 : escaped], match.start(), escaped + 2))
                return found
            if end < 0:
                # Unbalanced: no later brace can close it, but a later box can still be whole.
                continue
            found.append(_Box(text[at + 1 : end], match.start(), end + 1))
            at = end + 1
        elif at < len(text) and not text[at].isspace() and text[at] not in "}$\\":
            word = re.compile(r"-?[\w.,/]+").match(text, at)
            if word and match.end() > match.start() + 6:
                found.append(_Box(word[0].rstrip(".,"), match.start(), word.end()))
                at = word.end()


def _boxed(text: str) -> Found | None:
    text = text[-BOX_WINDOW:]
    boxes = _boxes(text)
    # `\boxed{12} = 6` uses the box as a sign of its own.
    boxes = [box for box in boxes if not _is_operator(box, text)]
    if not boxes:
        return None
    last = boxes[-1]
    group = [last]
    for box in reversed(boxes[:-1]):
        joint = text[box.end : group[0].start]
        if len(joint) > 80 or not _is_joint(joint):
            break
        group.insert(0, box)
    tail = text[last.end : last.end + 40]
    if len(group) == 1:
        inside = last.inside
        percent = re.match(r"\s*(?:\$|\\\)|\\\])?\s*(?:\\?%|percent\b|pct\b)", tail)
        if percent and not re.search(r"%|percent", inside):
            inside += r"\%"
        nested = _boxes(inside)
        if len(nested) == 1 and inside.strip().startswith("\\"):
            inside = nested[0].inside
        return Found(inside, "boxed")
    return Found(", ".join(dict.fromkeys(box.inside.strip() for box in group)), "boxed")


_NUMBER_AFTER = re.compile(r"\s*=\s*(-?\d{1,15}(?:\.\d{1,15})?)(?![\d.]*\s*[\w\\^!/({*+])")


def _is_operator(box: _Box, text: str) -> bool:
    """`\\boxed{12} = 6` states something about 12 and is no answer."""
    match = _NUMBER_AFTER.match(text, box.end, box.end + 40)
    inside = box.inside.strip()
    if not match or not re.fullmatch(r"-?\d{1,15}(?:\.\d{1,15})?", inside):
        return False
    return float(inside) != float(match[1])


def _is_joint(joint: str) -> bool:
    """Nothing but separators, delimiters and the words "and", "or", "for part (a)"."""
    rest = re.sub(r"\\(?:text|mbox|textrm|mathrm)\s*\{", " ", joint)
    rest = re.sub(r"\bfor part \(?[a-z0-9]\)?", " ", rest)
    rest = re.sub(r"\\(?:quad|qquad|\(|\)|\[|\]|[,;:! ])|\b(?:and|or)\b|[\s$,;&~}]", "", rest)
    return not rest and "\n\n" not in joint


_HASHES = re.compile(r"#{3,}[ \t]*(?:\n[ \t]{0,2}(?=[-$\d]))?(?=\S)([^\n]*)")
_NUMBER_START = re.compile(
    r"\s*(?:\*\*)?(?:the\s+)?(?:final\s+)?(?:answer)?(?:\s+is)?\s*[:=]?\s*(?:\*\*)?\s*[$€£¥]?\s*(?:\\?\$)?[-+−–]?[$€£¥]?\s*[\d.０-９]",
    re.IGNORECASE,
)


_FORMULA_START = re.compile(r"[\\$({\[]|-?\s*\\|[a-zA-Z]\s*=|[A-Z]\s*$|\([A-Z]\)\s*$")
_ONE_OR_TWO_WORDS = re.compile(r"(?:the\s+(?:final\s+)?answer\s*(?:is|:)\s*)?(?:[A-Za-z]+\s?){1,2}\.?", re.IGNORECASE)
_HEADING_WORD = re.compile(
    r"(?:step|final|solution|answer|conclusion|explanation|part|case|given|note|summary)\b", re.IGNORECASE
)


def _hashed(text: str) -> Found | None:
    """`#### answer`. A markdown heading is none: with three or more than four signs only a number counts."""
    best = None
    for match in _HASHES.finditer(text) if "###" in text else ():
        if match.start() and text[match.start() - 1] == "#":
            continue
        line = match[1].strip().strip("#").strip()
        if not line or len(line) > 300:
            continue
        four = match[0].startswith("####") and not match[0].startswith("#####")
        if _NUMBER_START.match(line):
            # `### 1. Find x` is a heading.
            best = best if re.match(r"\d+[.)]\s+[A-Za-z]", line) else line
        elif four and (
            _FORMULA_START.match(line) or (_ONE_OR_TWO_WORDS.fullmatch(line) and not _HEADING_WORD.match(line))
        ):
            best = line
    if best is None:
        return None
    stripped = re.sub(
        r"^\s*(?:\*\*)?(?:the\s+)?(?:final\s+)?answer\s*(?:is)?\s*[:=]?\s*", "", best, flags=re.IGNORECASE
    )
    return Found(_first_sentence(stripped or best), "####")


_ANSWER_WORD = re.compile(
    r"(?:(?<![a-z])answer|correct\s+(?:option|choice))(?P<gap>[^.:\n=]{0,60}?)"
    r"(?:\s+(?:is|are|would\s+be|=)(?:\s+therefore|\s+thus)?\s*:?|\s*[:=：])(?P<mark>\s*\**)[ \t]*\n?\s*(?=\S)",
    re.IGNORECASE,
)
# What stands before "answer" in "$6$ is our answer".
_IS_OUR = re.compile(
    r"(?:\$(?P<a>[^$\n]{1,200})\$|\\\((?P<b>[^\n]{1,200}?)\\\)|(?<![\d.,])(?P<c>-?\d[\d,]{0,40}(?:\.\d{1,40})?(?:/\d{1,20})?))"
    r"\s{0,3}(?:is|are)\s{1,3}(?:our|the|my)\s{1,3}(?:final\s{1,3}|correct\s{1,3})?$",
    re.IGNORECASE,
)
# `**Final Answer**` or `### Answer` as a heading, and the answer on the next line.
_HEADING_BEFORE = re.compile(r"(?:^|\n)[ \t]*(?:#{1,6}[ \t]*|\*\*[ \t]*)?(?:the[ \t])?(?:final[ \t])?$", re.IGNORECASE)
_HEADING_AFTER = re.compile(r"answer[ \t]*(?:\*\*)?[ \t]*\n{1,2}[ \t]*(?=\S)", re.IGNORECASE)
_A_LINE = re.compile(r"[ \t]*A[ \t]*:[ \t]*(?=\S)(.*)")
_WORDS_OF_ANSWER = re.compile("answer|correct option|correct choice", re.IGNORECASE)
MAX_STATEMENTS = 40


def _stated(text: str) -> Found | None:
    """The last "answer is ...", "Answer: ..." or "... is our answer", or a last line `A: ...`."""
    text = text[-WINDOW:]
    last_line = text.rstrip().rpartition("\n")[2]
    match = _A_LINE.match(last_line)
    if match and re.search(r"\d|\\|\$", match[1]):
        return Found(_first_sentence(match[1]), "final answer")
    for at in _last_places(text):
        match = _ANSWER_WORD.match(text, at)
        if match is None and _HEADING_BEFORE.search(text, max(0, at - 20), at):
            match = _HEADING_AFTER.match(text, at)
        answer = _statement(text[match.end() : match.end() + 800]) if match else None
        if answer is None and text[max(0, at - 1) : at].isspace():
            match = _IS_OUR.search(text[max(0, at - 260) : at])
            answer = (match["a"] or match["b"] or match["c"]).strip() if match else None
        if answer:
            return Found(answer, "final answer")
    return None


def _last_places(text: str) -> list[int]:
    """Where "answer" and the like stand, from the end."""
    if text.isascii():
        # `str.find` is many times faster than a search without case.
        lowered = text.lower()
        if "correct " not in lowered:
            places = []
            at = lowered.rfind("answer")
            while at >= 0 and len(places) < MAX_STATEMENTS:
                places.append(at)
                at = lowered.rfind("answer", 0, at)
            return places
    return [match.start() for match in _WORDS_OF_ANSWER.finditer(text)][: -MAX_STATEMENTS - 1 : -1]


_MATH_SPAN = re.compile(
    r"\$\$(?P<d>[^$]{1,1500})\$\$|\\\[(?P<b>(?:[^\\]|\\(?![\[\]])){1,1500})\\\]|(?<![\\$])\$(?P<i>(?:\\\$|[^$\n]){1,600}?)(?<!\\)\$(?!\d)"
    r"|\\\((?P<p>(?:[^\\\n]|\\(?![()])){1,600})\\\)"
    r"|\\begin\{(?:align|equation|gather|eqnarray|multline)\*?\}(?P<e>(?:[^\\]|\\(?!end|begin)){1,1500})\\end\{[a-z]{1,10}\*?\}"
)


_VERB = re.compile(r"\b(?:is|are|equals|will be|was|were)\s+(?=\S)")
_WORD3 = re.compile(r"[A-Za-z]{3,}")


_FILLER = re.compile(
    r'(?:therefore|thus|simply|just|given by|equal to|approximately|about|then|the|option|choice|a|an)\s+|["“]', re.I
)
# A number and the end of the sentence or text.
_NUMBER_ALONE = re.compile(r"(\d[\d,]*(?:\.\d+)?)\.?(?=\s*$|\s*\n)")


def _statement(rest: str) -> str | None:
    """The answer at the start of what follows "answer is"."""
    rest = rest.lstrip("*: \t\n")
    if rest[:1].isdigit():
        number = _NUMBER_ALONE.match(rest)
        if number:
            return number[1]
    leading = _FILLER.match(rest)
    while leading:
        if leading[0].strip().lower() in ("a", "an") and not re.match(r"\w+\s", rest[leading.end() :]):
            break
        rest = rest[leading.end() :]
        leading = re.match(r'(?:the|a|an|option|choice)\s+|["“]', rest, re.IGNORECASE)
    math = _MATH_SPAN.match(rest)
    if math:
        group = [math.group(math.lastgroup)]
        at = math.end()
        while True:
            joint = re.compile(r"\s*(?:,?\s*(?:and|or)|,)\s*(?=\$|\\\(|\\\[)").match(rest, at)
            more = _MATH_SPAN.match(rest, joint.end()) if joint else None
            if not more:
                break
            group.append(more.group(more.lastgroup))
            at = more.end()
        inside = ", ".join(group)
        after = re.match(r"\s*(\\?%|percent\b|pct\b|°|degrees\b)", rest[at:])
        return inside + (" " + after[1] if after else "")
    bold = re.match(r"\*\*\s*([^*\n]{1,300}?)\s*\*\*", rest)
    if bold:
        return bold[1]
    sentence = _first_sentence(rest)
    verbs = list(_VERB.finditer(sentence[:300]))
    if verbs and re.search(r"\d|\\|\$", sentence[verbs[-1].end() :]) and _WORD3.search(sentence[: verbs[-1].start()]):
        # "The area of the square is 16."
        sentence = sentence[verbs[-1].end() :].strip()
        math = _MATH_SPAN.match(sentence)
        if math and math.end() >= len(sentence) - 1:
            return math.group(math.lastgroup)
    return sentence if sentence and _answer_like(sentence) else None


_SENTENCE_END = re.compile(
    r"(?<!\bp)(?<!\ba)(?<!\bsq)[.!?](?=\s+(?:[A-Z\"“(]|I hope|$)|\s*$)"
    r"|,?\s+(?:I hope it|because|since|so that|which|where|not)\b"
    r"|\s*\((?:since|because|as|i\.e|which|where|note|not|that is|obtained|from)\b"
    r"|\*\*\s*$|</answer>|<\|"
)


def _first_sentence(text: str) -> str:
    """Up to the end of the sentence or line; a point inside a number is none."""
    line = text.strip().split("\n", 1)[0].strip()
    match = _SENTENCE_END.search(line)
    if match:
        line = line[: match.start()]
    return line.strip().strip("*").rstrip("!?,;").strip()


def _answer_like(text: str) -> bool:
    """A statement that can be an answer: short, or with mathematics in it."""
    if len(text) > 300:
        return False
    if re.search(r"[\d\\$=]", text):
        return True
    return len(text.split()) <= 4


_ANSWER_TAG = re.compile(r"<answer>", re.IGNORECASE)
_ANSWER_TAG_END = re.compile(r"</answer>", re.IGNORECASE)


def _tagged(text: str) -> Found | None:
    starts = [match.end() for match in _ANSWER_TAG.finditer(text)] if "<" in text else []
    if not starts:
        return None
    end = _ANSWER_TAG_END.search(text, starts[-1])
    inside = text[starts[-1] : end.start() if end else len(text)].strip()
    if not inside:
        return None
    return _inside_text(inside, "<answer>")


def _inside_text(inside: str, method: str) -> Found:
    for finder in (_boxed, _hashed, _stated):
        found = finder(inside)
        if found:
            return Found(found.text, method)
    if len(inside) > 120 and "\n" in inside:
        last = [line for line in inside.splitlines() if line.strip()][-1]
        return Found(last.strip(), method)
    return Found(inside, method)


_BOLD = re.compile(r"\*\*(?P<a>[^*\n]{1,300})\*\*|(?<!_)__(?P<b>[^_\n]{1,300})__|\\textbf\s*(?=\{)")


def _bold(text: str) -> Found | None:
    best = None
    text = text[-WINDOW:]
    for match in _BOLD.finditer(text) if "**" in text or "__" in text or "\\textbf" in text else ():
        if match["a"] or match["b"]:
            inside = match["a"] or match["b"]
        else:
            end = matching_brace(text, match.end())
            if end < 0 or end - match.end() > 300:
                continue
            inside = text[match.end() + 1 : end]
        inside = inside.strip()
        if inside.endswith(":") or re.match(r"(?:step|part|case)\b|\d+[.)]\s+[A-Za-z]", inside, re.I):
            continue
        # A heading like **Understanding 2 cases** is prose: an answer has digits or mathematics and few words.
        words = re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[a-zA-Z]+", "", inside))
        if re.search(r"\d|\\[a-z]|\$", inside) and len(words) <= 4:
            best = inside
    return Found(best, "bold") if best else None


_CONCLUDES = re.compile(
    r"\b(?:so|thus|therefore|hence|is|are|was|were|be|get|gets|gives|have|has|find|finds|equals?|obtain|conclude|makes?|"
    r"made|it's|that's|total|left|altogether|costs?|pays?|paid|need|needs|takes?|answer|solution|result)\b|=|\\therefore|≈|:",
    re.IGNORECASE,
)


def _last_row(formula: str) -> str:
    """The last row of a chain of equations; matrices are left alone."""
    if "&" not in formula or "matrix" in formula or "array" in formula or "cases" in formula:
        return formula.strip()
    rows = [row for row in formula.split("\\\\") if row.strip()]
    return rows[-1].replace("&", "").strip() if rows else ""


_CONCLUDING_VERB = re.compile(r"=\s*|\b(?:is|are|equals)\s+(?:equal to\s+)?")
_CONCLUDING_START = re.compile(r"(?:so|thus|therefore|hence|consequently|this means)\b", re.IGNORECASE)


def _concluding_statement(text: str) -> Found | None:
    """`Thus, x = \\frac{3}{4}.`, `The point is (1, 2).`, `So the fastest is Evelyn.` as the last sentence."""
    line = _CALCULATOR.sub("", text.strip().rpartition("\n")[2][-400:])
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", line)[-1].strip()
    verbs = list(_CONCLUDING_VERB.finditer(sentence))
    answer = sentence[verbs[-1].end() :].rstrip(".").strip() if verbs else ""
    if not answer or len(answer) > 80 or answer.startswith("not "):
        return None
    if re.match(r"[-\d.,]+[A-Za-z]", answer):
        # A number and its unit in one word: that is for the search for numbers.
        return None
    words = re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[a-zA-Z]+", "", answer))
    if re.search(r"\d|\\[a-z]|√|π", answer):
        return Found(answer, "conclusion") if len(words) <= 2 else None
    named = len(words) == 1 and answer[:1].isupper() and _CONCLUDING_START.match(sentence)
    return Found(answer, "conclusion") if named else None


def _last_math(text: str) -> Found | None:
    """The last formula, with those that it is joined to, when its sentence is the last or concludes something."""
    spans = list(_MATH_SPAN.finditer(text[-TAIL:]))
    text = text[-TAIL:]
    if not spans:
        return None
    group = [spans[-1]]
    for span in reversed(spans[:-1]):
        if not re.fullmatch(r"\s*(?:,|,?\s*(?:and|or))\s*", text[span.end() : group[0].start()]):
            break
        group.insert(0, span)
    inside = [_last_row(span.group(span.lastgroup)) for span in group]
    after = re.match(r"\s*(\\?%|percent\b|pct\b|°|degrees\b)", text[group[-1].end() :])
    joined = ", ".join(inside) + (" " + after[1] if after else "")
    # `$` as a currency sign gives spans of prose.
    if re.search(r"[a-zA-Z]{3,}\s+[a-zA-Z]{2,}\s+[a-zA-Z]{2,}", re.sub(r"\\[a-zA-Z]+\s*(?:\{[^{}]*\})?", "", joined)):
        return None
    rest = text[group[-1].end() :]
    if len(re.findall(r"\w+", rest)) > 25:
        return None
    return Found(joined, "math")


def _after_last_math(text: str) -> str:
    spans = list(_MATH_SPAN.finditer(text[-TAIL:]))
    return text[-TAIL:][spans[-1].end() :] if spans else ""


_NUMBER = re.compile(
    r"(?<![\w.])(?:-|−|–)?\s?(?:\\?[$€£¥₹]\s?)?(?:-|−|–)?"
    r"(?P<n>\\[dt]?frac\{\d{1,20}\}\{\d{1,20}\}|\d{1,3}(?:[,\u2009\u202f\u00a0]\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:\s?/\s?\d+)?|\.\d+|\d{1,3}(?:\s\d{3})+(?!\d))"
    r"(?:\s?(?P<pct>\\?%|percent\b|pct\b))?"
)
_NUMBER_COMMA = re.compile(r"(?<![\w.])-?\d+,\d{1,2}(?!\d)")


def _last_number(text: str) -> Found | None:
    """The last number, with its sign, currency, thousands separators and per cent sign."""
    text = text[-TAIL:]
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    sign = ""
    before = text[: last.start("n")]
    match = re.search(r"([-−–])\s?(?:\\?[$€£¥₹]\s?)?$", before)
    # After a digit or bracket it is a subtraction or a range, and right after a letter a hyphen.
    if match and not re.search(r"(?:[\d)\]}%]\s*|\w)$", before[: match.start()]):
        sign = "-"
    if last["n"].startswith("\\"):
        return Found(sign + last["n"], "last number")
    number = last["n"].replace(",", "") if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", last["n"]) else last["n"]
    return Found(sign + number + ("\\%" if last["pct"] else ""), "last number")


def _concluding_number(text: str) -> Found | None:
    """The last number of a last sentence that concludes something."""
    text = text[-TAIL:].strip()
    lines = [line for line in text.splitlines() if re.search(r"\d", line)]
    if not lines:
        return None
    if _NUMBER.fullmatch(lines[-1].strip()):
        return _last_number(lines[-1])
    sentences = [s for s in re.split(r"(?<=[.!?])\s+(?=[A-Z])", lines[-1]) if re.search(r"\d", s)]
    if not sentences or not _CONCLUDES.search(sentences[-1]):
        return None
    after = text[text.rfind(sentences[-1]) + len(sentences[-1]) :]
    if len(after.split()) > 25:
        return None
    equals = re.search(r"=\s*([^=]+?)\.?\s*$", sentences[-1])
    if equals and re.fullmatch(r"\\?\$?\s*-?[\d.,]+(?:\s*/\s*\d+)?", equals[1].strip()):
        return _last_number(equals[1])
    counted = re.search(
        r"\bthere (?:are|is|were|will be)\s+(?:only\s+|exactly\s+)?(-?[\d,]+(?:\.\d+)?)\b", sentences[-1]
    )
    if counted:
        return Found(counted[1], "last number")
    comma = _NUMBER_COMMA.findall(sentences[-1])
    found = _last_number(sentences[-1])
    if comma and found and comma[-1].endswith("," + (found.text or "").lstrip("-")):
        return Found(comma[-1], "last number")
    return found


def _whole(text: str) -> Found | None:
    """The completion when it is nothing but a short answer."""
    stripped = text.strip()
    if not stripped or len(stripped) > 600 or len([x for x in stripped.splitlines() if x.strip()]) > 12:
        return None
    plain = re.sub(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+|[$]", " ", stripped)
    words = re.findall(r"[A-Za-z]{2,}", plain)
    if len(words) > 6:
        return None
    return Found(_without_delimiters(stripped), "whole text")


def extract(text: str, mode: str = "auto", numeric_gold: bool = True, unfinished_thinking: str = "no answer") -> Found:
    """Finds the answer. `mode` is "auto", "math" or "gsm8k"; see the module's docstring."""
    visible = _visible(text, unfinished_thinking)
    if visible is None or not visible.strip():
        return NOTHING
    for finder in (_boxed, _hashed, _stated, _tagged, _bold):
        found = finder(visible)
        if found and found.text is not None and found.text.strip():
            return Found(found.text.strip()[:MAX_ANSWER], found.method) if len(found.text) <= MAX_ANSWER else found
        if found and found.method == "boxed":
            return Found(None, "boxed")
    if "box" in visible and re.search(r"\\(?:boxed|fbox)\s*\{", visible) and not _boxes(visible[-BOX_WINDOW:]):
        # A box that was cut off: what stands in it is not finished, and what stands before it was not the answer.
        return NOTHING
    whole = _whole(visible)
    if whole and _bare_answer(whole.text):
        return whole
    if mode != "gsm8k" or not numeric_gold:
        found = _last_math(visible)
        later = _after_last_math(visible) if found and mode == "auto" and numeric_gold else ""
        found = (_concluding_number(later) if re.search(r"\d", later) else None) or found
        if found:
            return found
    if mode == "gsm8k":
        found = _last_number(visible)
        if found:
            return found
    if mode == "auto":
        found = _concluding_statement(visible) or (_concluding_number(visible) if numeric_gold else None)
        if found:
            return found
    return whole or NOTHING


def _bare_answer(text: str) -> bool:
    """No prose around it: `1,000.99`, `28 pct`, `$x = 3$`, `\\frac{10}{9}`, `Evelyn`."""
    if "\n" in text and "\\begin" not in text:
        return False
    before = re.split(r"\$|\\\(|\\\[|\d", text, maxsplit=1)
    if len(before) > 1:
        lead = re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[a-zA-Z]+|\{[^{}]*\}", " ", before[0]))
        if lead and not re.match(r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|option|choice)", lead[0], re.I):
            return False
    outside = re.sub(r"\$[^$]*\$|\\\([^)]*\\\)|\\\[.*?\\\]", " ", text)
    outside = re.sub(r"\\(?:text|mbox|textbf|mathrm|textrm)\s*\{[^{}]*\}", " ", outside)
    outside = re.sub(r"\\[a-zA-Z]+", " ", outside)
    words = re.findall(r"[A-Za-z]{2,}", outside)
    return len(words) <= 2 or (len(words) <= 4 and bool(re.match(r"\s*-?\\?\$?\d", text)))


# --- golds -----------------------------------------------------------------------------------------------------------


def read_gold(value: Any) -> list[Found]:
    """The gold answers in a column's value, in any usual form; more than one only for a list of alternatives.

    An empty list means that there is none. `method` is "bare", "boxed", "####", "final answer", "<answer>" or
    "number"; "bold", "math" or "prose" where the value is a text without a marked answer, so that this is a guess.
    """
    if value is None or isinstance(value, bool):
        return [] if value is None else [Found(str(value), "bare")]
    if isinstance(value, (int, float)):
        return [] if value != value else [Found(_number_text(value), "number")]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in read_gold(item)]
    if isinstance(value, dict):
        for key in ("answer", "final_answer", "solution", "ground_truth", "target", "value", "text"):
            if key in value:
                return read_gold(value[key])
        return []
    if hasattr(value, "item") and not isinstance(value, str):
        return read_gold(value.item() if getattr(value, "ndim", 0) == 0 else value.tolist())
    text = value.decode("utf-8", "replace") if isinstance(value, (bytes, bytearray)) else str(value)
    found = _gold_text(text)
    return [found] if found and found.text and found.text.strip() else []


def _number_text(value: int | float) -> str:
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() < 4000 else hex(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


def _gold_text(text: str) -> Found | None:
    stripped = _without_long_gaps(text.strip()[-MAX_COMPLETION:])
    if not stripped:
        return None
    if "####" in stripped:
        last = stripped.rsplit("####", 1)[1].strip()
        if last:
            return Found(last.splitlines()[0].strip(), "####")
    found = _boxed(stripped)
    if found:
        return found if (found.text or "").strip() else Found(None, "boxed")
    opened = _BOX.search(stripped)
    if opened and stripped[opened.end() : opened.end() + 1] == "{":
        return Found(stripped[opened.end() + 1 :], "boxed")
    if "<<" in stripped or "\n" in stripped:
        for finder in (_stated, _tagged):
            found = finder(stripped)
            if found:
                return found
    if len(stripped) <= 300 and "<<" not in stripped and not _is_prose(stripped):
        return Found(_without_delimiters(stripped), "bare")
    for finder in (_stated, _tagged):
        found = finder(stripped)
        if found:
            return found
    if _CALCULATOR.search(stripped):
        return _last_number(_CALCULATOR.sub("", stripped))
    return _bold(stripped) or _last_math(stripped) or Found(stripped[:MAX_ANSWER], "prose")


def _is_prose(text: str) -> bool:
    plain = re.sub(r"\$[^$]*\$|\\(?:text|mbox|textbf|mathrm|textrm)\s*\{[^{}]*\}|\\[a-zA-Z]+", " ", text)
    return len(re.findall(r"[A-Za-z]{2,}", plain)) > 6


def _without_delimiters(text: str) -> str:
    """`$1$ and $2$` as `1 , 2`; `$125$ miles` as `125 miles`."""
    spans = list(_MATH_SPAN.finditer(text))
    if not spans:
        return text
    out, at = [], 0
    for span in spans:
        out.append(text[at : span.start()])
        out.append(span.group(span.lastgroup))
        at = span.end()
    out.append(text[at:])
    return " ".join(part.strip() for part in out if part.strip())
