"""One spelling for the many ways in which the same symbols are written. Strings in, strings out."""

import re
import unicodedata

__all__ = ["TEXT_CLOSE", "TEXT_OPEN", "canonical", "clean", "matching_brace", "words"]


def words(text: str) -> list[str]:
    return text.split()


# `\text{...}` that is neither punctuation nor a number is kept between these.
TEXT_OPEN, TEXT_CLOSE = "\x02", "\x03"
_ROW = "\x04"

_SYMBOLS = {
    **dict.fromkeys("−‐‑‒–—―﹣", "-"),
    **dict.fromkeys("＋", "+"),
    **dict.fromkeys("×✕✖⨯", "\\times "),
    **dict.fromkeys("·⋅∙•∗", "\\cdot "),
    **dict.fromkeys("÷", "\\div "),
    **dict.fromkeys("∕⁄", "/"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u2061\u2062\u2063\u200e\u200f", ""),
    **dict.fromkeys("≤⩽≦", "\\le "),
    **dict.fromkeys("≥⩾≧", "\\ge "),
    **dict.fromkeys("≠", "\\ne "),
    **dict.fromkeys("≈≃≅≐", "\\approx "),
    **dict.fromkeys("∞", "\\infty "),
    **dict.fromkeys("∪", "\\cup "),
    **dict.fromkeys("∩", "\\cap "),
    **dict.fromkeys("∈", "\\in "),
    **dict.fromkeys("∅⌀", "\\emptyset "),
    **dict.fromkeys("±", "\\pm "),
    **dict.fromkeys("∓", "\\mp "),
    **dict.fromkeys("°º˚", "^{\\circ}"),
    **dict.fromkeys("∠", "\\angle "),
    **dict.fromkeys("△∆", "\\triangle "),
    **dict.fromkeys("→⟶⇒⟹", "\\to "),
    **dict.fromkeys("′’‘`", "'"),
    **dict.fromkeys("“”", '"'),
    **dict.fromkeys("⟨〈", "\\langle "),
    **dict.fromkeys("⟩〉", "\\rangle "),
    **dict.fromkeys("【〔", "["),
    **dict.fromkeys("】〕", "]"),
    "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}",
    "ℕ": "\\mathbb{N}",
    "ℚ": "\\mathbb{Q}",
    "ℂ": "\\mathbb{C}",
    "∖": "\\setminus ",
    "，": ", ",
    "、": ", ",
    "；": "; ",
    "：": ":",
    "。": ". ",
    "％": "%",
    "﹪": "%",
    "＄": "$",
    "∣": "|",
    "‖": "\\|",
    "⌊": "\\lfloor ",
    "⌋": "\\rfloor ",
    "⌈": "\\lceil ",
    "⌉": "\\rceil ",
}
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩϕϑϵ",
        words(
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon "
            "phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega phi vartheta epsilon"
        ),
        strict=True,
    )
)
_SYMBOLS.update({char: f"\\{name} " for char, name in _GREEK.items()})
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPT = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n")


def _ascii(text: str) -> str:
    """Unicode look-alikes in ASCII or LaTeX. Control characters become spaces: some are our marks."""
    if text.isascii():
        return _CONTROL.sub(" ", text)
    text = _CONTROL.sub(" ", text)
    text = re.sub("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPT) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+", lambda m: "_{" + m[0].translate(_SUBSCRIPT) + "}", text)
    text = re.sub(r"([√∛∜])\s*(\d+(?:\.\d+)?|[a-zA-Z]|(?=[({]))", _root, text)
    out = []
    for char in text:
        if char < "\x7f":
            out.append(char)
        elif char in _SYMBOLS:
            out.append(_SYMBOLS[char])
        else:
            # Full-width and mathematical letters and digits, vulgar fractions, digits of other scripts.
            plain = unicodedata.normalize("NFKC", char)
            if "⁄" in plain and len(plain) >= 3:
                top, _, bottom = plain.partition("⁄")
                out.append(f"\\frac{{{top}}}{{{bottom}}}" if top and bottom else plain)
            elif len(plain) == 1 and plain.isdigit() and unicodedata.digit(plain, None) is not None:
                out.append(str(unicodedata.digit(plain)))
            else:
                out.append(_SYMBOLS.get(plain, plain))
    return "".join(out)


def _root(match: re.Match) -> str:
    order = {"√": "", "∛": "[3]", "∜": "[4]"}[match[1]]
    return f"\\sqrt{order}{{{match[2]}}}" if match[2] else f"\\sqrt{order}"


_TEXT_MACRO = re.compile(
    r"\\(text|textbf|textit|textrm|textnormal|textsf|texttt|textsc|mbox|hbox|mathrm|emph|operatorname|rm|bf)\s*\{"
)
_AND_OR = re.compile(r"\s*[,;]?\s*(?:and|or|&|,|;)?\s*[,;]?\s*", re.IGNORECASE)
_OPERATOR_NAMES = frozenset(
    words("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp gcd lcm max min")
)


def matching_brace(text: str, start: int) -> int:
    """Index of the brace that closes the one at `start`, or -1. Escaped braces do not count."""
    depth = 0
    i = start
    while i < len(text):
        char = text[i]
        if char == "\\":
            i += 2
            continue
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return -1


def _expand_text(text: str) -> str:
    """Replaces text macros: separators by a comma, numbers and single letters by themselves, words by marked words."""
    out = []
    at = 0
    while True:
        match = _TEXT_MACRO.search(text, at)
        if not match:
            break
        end = matching_brace(text, match.end() - 1)
        if end < 0:
            break
        inside = text[match.end() : end]
        macro = match[1]
        out.append(text[at : match.start()])
        names_operator = inside.strip() in _OPERATOR_NAMES and not (
            inside.strip() in ("min", "sec") and (macro == "text" or _follows_number(out))
        )
        if macro in ("mathrm", "operatorname", "text", "rm", "bf") and names_operator:
            out.append(f"\\{inside.strip()} ")
        elif macro in ("mathrm", "rm", "bf") and re.fullmatch(r"\s*[A-Za-z]\s*", inside) and not _follows_number(out):
            out.append(inside.strip())
        elif not inside.strip():
            out.append(" ")
        elif _AND_OR.fullmatch(inside):
            out.append(" , ")
        elif re.fullmatch(r"[\s\d.,+\-/%]*\d[\s\d.,+\-/%]*", inside):
            out.append(inside)
        else:
            inside = inside.replace("$", "").replace("\\%", "%").replace("\\ ", " ").replace("~", " ")
            out.append(f"{TEXT_OPEN}{inside}{TEXT_CLOSE}")
        at = end + 1
    out.append(text[at:])
    return "".join(out)


def _follows_number(parts: list[str]) -> bool:
    return bool(re.search(r"[\d}]\s*(?:\\[,;: ])?\s*$", parts[-1])) if parts else False


_SEPARATORS = (r"\{,\}", r",\\!", r"\\,", r"\\;", r"\\:", r"\\ ", r"\{\\,\}", r"\{\s*,\s*\}", r"\\!", " ")
_GROUPED = [re.compile(rf"(?<![\d.,])(\d{{1,3}})\s*((?:{s}\s*\d{{3}})+)(?!\d)") for s in _SEPARATORS]


def _join_thousands(text: str) -> str:
    if not re.search(r"\d\s*(?:\{|,\s*\\!|\\|\s)", text):
        return text
    text = re.sub(r"(\d)\s*,\s*\\!\s*(?=\d{3})", r"\1,\\!", text)
    text = re.sub(r"(\d)\\!\s*,\s*(?:\\!)?\s*(?=\d{3})", r"\1,\\!", text)
    for pattern in _GROUPED:
        text = pattern.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), text)
    return text


_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_DELIMITER_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?|middle)(?![a-zA-Z])\s*")
_SPACES = re.compile(r"\\(?:[,;:> ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|hspace\*?\{[^{}]*\}|hfill(?![a-zA-Z]))|~")
_DROPPED = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|Large|large|small|normalsize|ensuremath|strut|mathstrut"
    r"|hline|centering|noindent)(?![a-zA-Z])|\\!|\\/"
)
_PHANTOM = re.compile(r"\\[vh]?phantom\s*\{[^{}]*\}|\\(?:label|tag)\*?\s*\{[^{}]*\}")
_RENAMED = {
    "leq": "le",
    "leqslant": "le",
    "geq": "ge",
    "geqslant": "ge",
    "neq": "ne",
    "lt": "<",
    "gt": ">",
    "varnothing": "emptyset",
    "lbrace": "{",
    "rbrace": "}",
    "lbrack": "[",
    "rbrack": "]",
    "degree": "^{\\circ}",
    "dotsc": "ldots",
    "dots": "ldots",
    "cdots": "ldots",
    "implies": "to",
    "Rightarrow": "to",
    "Longrightarrow": "to",
    "rightarrow": "to",
    "therefore": "",
    "simeq": "approx",
    "doteq": "approx",
    "backslash": "setminus",
    "percent": "%",
    "dollar": "$",
    "colon": ":",
    "slash": "/",
    "lparen": "(",
    "rparen": ")",
    "infin": "infty",
    "R": "mathbb{R}",
    "reals": "mathbb{R}",
    "union": "cup",
}
_COMMAND = re.compile(r"\\([a-zA-Z]+)")


def _rename(match: re.Match) -> str:
    new = _RENAMED.get(match[1])
    if new is None:
        return match[0]
    if new in ("{", "}", "%", "$"):
        return "\\" + new
    return new if not new or not new[0].isalpha() else "\\" + new


def clean(text: str) -> str:
    """Returns the answer in plain LaTeX: ASCII, one name for each symbol, no spacing commands, text macros marked."""
    text = re.sub(r"\s{2,}", " ", _ascii(text))
    # A double-escaped answer (JSON written into text) has `\\frac`; in a matrix `\\` ends a row.
    if "\\\\" in text and "\\begin" not in text and "\\substack" not in text:
        text = re.sub(r"\\\\(?=[a-zA-Z{}])", r"\\", text)
    text = text.replace("\\\\", _ROW)
    text = _join_thousands(text)
    if "\\" in text:
        text = _PHANTOM.sub(" ", text)
        text = _DELIMITER_SIZES.sub(_unsized, text).replace("\x00.", "")
        text = _DROPPED.sub("", text)
        text = _SPACES.sub(" ", text)
        text = _FRACTIONS.sub(r"\\frac", text)
        text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
        text = _COMMAND.sub(_rename, text)
        text = _OLD_STYLE.sub(r"\\mathrm{\1}", text)
        text = _expand_text(text)
    if "**" in text and not text.startswith("**"):
        text = re.sub(r"(?<=[\w)\]}])\s*\*\*\s*(?=[\w({\\-])", "^", text)
    text = text.replace("<=", "\\le ").replace(">=", "\\ge ").replace("!=", "\\ne ").replace("=<", "\\le ")
    if "oo" in text:
        text = re.sub(r"(?<![a-zA-Z])oo(?![a-zA-Z])", r"\\infty ", text)
    if "." in text:
        text = _REPEATING.sub(_repeating, text)
    text = text.replace(_ROW, "\\\\" if "\\begin" in text else " ")
    return re.sub(r"\s+", " ", text).strip()


_OLD_STYLE = re.compile(r"\{\s*\\(?:rm|bf|it|tt)(?![a-zA-Z])\s*([^{}]*)\}")
_CHOOSE = re.compile(r"\{([^{}]{1,40}?)\\choose\s*([^{}]{1,40})\}")
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)(?:\\overline\s*\{(\d+)\}|\\(?:dot|bar)\s*\{?(\d)\}?|\((\d+)\)(?=\s*$))"
)


def _repeating(match: re.Match) -> str:
    """`0.1\\overline{6}` as a fraction."""
    period = match[3] or match[4] or match[5]
    if len(match[1]) + len(match[2]) + len(period) > 40:
        return match[0]
    fixed = match[1] + match[2] or "0"
    top = int(fixed + period) - int(fixed)
    return f"\\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(match[2])}}}"


def _unsized(match: re.Match) -> str:
    end = match.end()
    if match.string[end : end + 1] == ".":
        return "\x00"
    return ""


def canonical(text: str) -> str:
    """A key: two cleaned answers with the same key are written alike. Case counts, white space and braces do not."""
    text = text.replace("\\cdot", "*").replace("\\times", "*")
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)", r"\\frac{\1}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"([_^])\s*\{(\w)\}", r"\1\2", text)
    text = re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", r"\1␣", text)
    text = re.sub(r"(?<=\d)\s+(?=[\d.])", "␣", text)
    return re.sub(r"\s+", "", text).rstrip(".,;:").lstrip(",;:")
