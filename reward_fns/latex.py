"""Reads one mathematical expression, in LaTeX or plain notation, into a tree. Raises rather than guesses.

Trees: `("n", Fraction)`, `("v", name)`, `("c", "pi" | "e" | "i")`, `("+", ...)`, `("-", a)`, `("*", ...)`,
`("/", a, b)`, `("^", a, b)`, `("root", k, a)`, `("!", a)`, `("binom", n, k)`, `("abs", a)`, `("floor", a)`,
`("ceil", a)`, `("gcd", ...)`, `("fn", name, arguments...)`.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from .clean import words
from .exact import Refused, Unsupported, substituted

__all__ = ["MAX_DIGITS", "MAX_LENGTH", "Token", "parse_expression", "tokenize"]

MAX_LENGTH = 2000
MAX_TOKENS = 800
MAX_DIGITS = 1200
MAX_DEPTH = 60

GREEK = frozenset(
    words(
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho "
        "varrho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi "
        "Omega ell hbar"
    )
)
TRIG = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "ln")},
    **{"arcsin": "arcsin", "arccos": "arccos", "arctan": "arctan", "asin": "arcsin", "acos": "arccos"},
    **{"atan": "arctan", "cosec": "csc"},
}
FUNCTION_LETTERS = frozenset("fghFGH")
_SPACING = frozenset(
    words("left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr")
    + words("middle displaystyle textstyle scriptstyle limits nolimits quad qquad hfill phantom")
    + words("thinspace enspace nobreak strut null mathstrut ensuremath relax normalsize large")
    + ["rm", "bf", "it", ",", "!", ";", ":", " ", ">", "/"]
)
_STYLES = frozenset(
    words("mathbf boldsymbol bm mathit mathsf mathtt mathnormal pmb mathbb mathcal mathscr")
    + words("mathfrak overline underline vec hat bar tilde overrightarrow widehat dot ddot")
)
_PLAIN_STYLES = frozenset(words("mathbf boldsymbol bm mathit mathsf mathtt mathnormal pmb underline"))

_TOKEN = re.compile(
    r"(?P<space>\s+|~)"
    r"|(?P<row>\\\\)"
    r"|\\(?P<cmd>[a-zA-Z]+|.)"
    r"|(?P<num>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<word>[a-zA-Z]+)"
    r"|(?P<sym>.)",
    re.DOTALL,
)


class Token(NamedTuple):
    kind: str  # "num", "word", "cmd", "sym", "row"
    text: str
    spaced: bool  # white space before it
    start: int
    end: int


def tokenize(text: str) -> list[Token]:
    if len(text) > MAX_LENGTH:
        raise Refused("too long")
    tokens = []
    spaced = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        value = match.group(kind)
        if kind == "space" or (kind == "cmd" and value in _SPACING):
            spaced = spaced or value not in ("!", "left", "right")
            continue
        if kind == "num" and len(value) > MAX_DIGITS:
            raise Refused("too many digits")
        tokens.append(Token(kind, value, spaced, match.start(), match.end()))
        spaced = False
    if len(tokens) > MAX_TOKENS:
        raise Refused("too long")
    return tokens


_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_END = Token("end", "", False, 0, 0)


class _Parser:
    def __init__(self, text: str):
        self.text = text
        self.tokens = tokenize(text)
        self.at = 0
        self.depth = 0
        self.bars = 0

    def peek(self, ahead: int = 0) -> Token:
        i = self.at + ahead
        return self.tokens[i] if i < len(self.tokens) else _END

    def next(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def sees(self, *texts: str) -> bool:
        token = self.peek()
        return token.kind in ("sym", "cmd") and token.text in texts

    def expect(self, text: str) -> None:
        token = self.next()
        if token.kind not in ("sym", "cmd") or token.text != text:
            raise Unsupported(f"expected {text}")

    def whole(self) -> tuple:
        tree = self.sum()
        if self.peek() is not _END:
            raise Unsupported(f"unexpected {self.peek().text!r}")
        return tree

    def sum(self) -> tuple:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Refused("nested too deeply")
        terms = [self.product()]
        while self.sees("+", "-"):
            sign = self.next().text
            term = self.product()
            terms.append(("-", term) if sign == "-" else term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else ("+", *terms)

    def product(self) -> tuple:
        sign = 1
        while self.sees("+", "-"):
            sign = -sign if self.next().text == "-" else sign
        tree = self.factor(first=True)
        while True:
            token = self.peek()
            if token.kind == "cmd" and token.text in ("cdot", "times", "ast", "bullet"):
                self.next()
                tree = ("*", tree, self.signed_factor())
            elif token.kind == "sym" and token.text == "*":
                self.next()
                if self.sees("*"):
                    raise Unsupported("**")
                tree = ("*", tree, self.signed_factor())
            elif (token.kind == "sym" and token.text == "/") or (token.kind == "cmd" and token.text == "div"):
                self.next()
                tree = ("/", tree, self.signed_factor())
            elif token.kind == "cmd" and token.text == "bmod":
                self.next()
                tree = ("mod", tree, self.signed_factor())
            elif self.starts_factor(token):
                if token.kind == "num":
                    raise Unsupported("two numbers side by side")
                tree = ("*", tree, self.factor())
            else:
                break
        return ("-", tree) if sign < 0 else tree

    def signed_factor(self) -> tuple:
        if self.sees("-"):
            self.next()
            return ("-", self.factor())
        if self.sees("+"):
            self.next()
        return self.factor()

    def starts_factor(self, token: Token) -> bool:
        if token.kind in ("num", "word"):
            return True
        if token.kind == "sym":
            return token.text in "([{" or (token.text == "|" and self.bars == 0)
        return token.kind == "cmd" and (
            token.text in GREEK or token.text in TRIG or token.text in _STYLES or token.text in _MORE_STARTS
        )

    def factor(self, first: bool = False) -> tuple:
        tree = self.postfix(self.primary(first))
        if self.degree_sign():
            return ("*", tree, ("/", ("c", "pi"), ("n", Fraction(180))))
        if self.sees("^"):
            self.next()
            exponent = self.argument(script=True)
            tree = self.postfix(("^", tree, exponent))
        return tree

    def degree_sign(self) -> bool:
        """Takes `^\\circ` or `^{\\circ}` when it comes next."""
        if not self.sees("^"):
            return False
        if self.peek(1).text == "circ" and self.peek(1).kind == "cmd":
            self.at += 2
            return True
        if [self.peek(i).text for i in (1, 2, 3)] == ["{", "circ", "}"]:
            self.at += 4
            return True
        return False

    def postfix(self, tree: tuple) -> tuple:
        while self.sees("!"):
            self.next()
            tree = ("!", tree)
        return tree

    def argument(self, script: bool = False) -> tuple:
        """A macro's argument: a group in braces, or the single next character as in `\\frac16` and `x^23`."""
        token = self.peek()
        if token.kind == "sym" and token.text == "{":
            return self.group("{")
        if token.kind == "num":
            # LaTeX takes one digit; written by hand, an exponent without braces is meant whole.
            if not script and len(token.text) > 1 and "." not in token.text:
                self.tokens[self.at] = Token("num", token.text[1:], False, token.start + 1, token.end)
                return ("n", Fraction(token.text[0]))
            self.next()
            return ("n", Fraction(token.text))
        if script and token.kind == "sym" and token.text in "+-":
            self.next()
            inner = self.argument(script=True)
            return ("-", inner) if token.text == "-" else inner
        if script and token.kind == "sym" and token.text == "(":
            return self.group("(")
        if token.kind == "word":
            self.next()
            if len(token.text) > 1:
                self.at -= 1
                self.tokens[self.at] = Token("word", token.text[1:], False, token.start + 1, token.end)
            return self.letter(token.text[0], called=False)
        if token.kind == "cmd":
            return self.primary()
        raise Unsupported("argument")

    def group(self, opener: str) -> tuple:
        self.expect(opener)
        bars, self.bars = self.bars, 0
        tree = self.sum()
        self.bars = bars
        self.expect(_CLOSERS[opener])
        return tree

    def primary(self, first: bool = False) -> tuple:
        token = self.next()
        if token.kind == "num":
            return self.number(token, first)
        if token.kind == "word":
            return self.word(token)
        if token.kind == "sym":
            if token.text in "([{":
                self.at -= 1
                return self.group(token.text)
            if token.text == "|":
                self.bars += 1
                inner = self.sum()
                self.bars -= 1
                self.expect("|")
                return ("abs", inner)
            raise Unsupported(f"symbol {token.text!r}")
        if token.kind != "cmd":
            raise Unsupported("end of text")
        return self.command(token)

    def number(self, token: Token, first: bool) -> tuple:
        value = Fraction(token.text)
        if self.sees("_"):
            raise Unsupported("number with a base")
        if "." not in token.text:
            mixed = self.mixed_part()
            if mixed is not None:
                return ("n", value + mixed)
        return self.exponent_notation(token, value)

    def exponent_notation(self, token: Token, value: Fraction) -> tuple:
        """`3e8` and `3.5E-7`, written without spaces."""
        word = self.peek()
        if word.kind != "word" or word.text not in ("e", "E") or word.spaced or word.start != token.end:
            return ("n", value)
        i, sign = 1, 1
        if self.peek(i).kind == "sym" and self.peek(i).text in "+-":
            sign = -1 if self.peek(i).text == "-" else 1
            i += 1
        digits = self.peek(i)
        if digits.kind != "num" or "." in digits.text or digits.spaced or self.peek(i).start != self.peek(i - 1).end:
            return ("n", value)
        if int(digits.text[:6]) > 4000 or len(digits.text) > 6:
            raise Refused("exponent too large")
        self.at += i + 1
        return ("n", value * Fraction(10) ** (sign * int(digits.text)))

    def mixed_part(self) -> Fraction | None:
        """The proper fraction right after a whole number, as in `2\\frac{1}{2}` and `1 1/2`."""
        start = self.at
        token = self.peek()
        if token.kind == "cmd" and token.text in ("frac", "dfrac", "tfrac", "cfrac"):
            self.next()
            saved = list(self.tokens)
            try:
                top, bottom = self.argument(), self.argument()
            except Unsupported:
                top = bottom = ("?",)
            whole = top[0] == bottom[0] == "n" and top[1].denominator == bottom[1].denominator == 1
            if whole and 0 < top[1] < bottom[1] and not self.sees("^", "!"):
                return Fraction(top[1], bottom[1])
            self.tokens, self.at = saved, start
            return None
        if token.kind == "num" and token.spaced and "." not in token.text:
            slash, bottom = self.peek(1), self.peek(2)
            fraction = slash.kind == "sym" and slash.text == "/" and bottom.kind == "num" and "." not in bottom.text
            if fraction and 0 < int(token.text) < int(bottom.text):
                self.at += 3
                return Fraction(int(token.text), int(bottom.text))
        return None

    def word(self, token: Token) -> tuple:
        text = token.text
        if text in TRIG or text in ("log", "exp", "sqrt", "pi", "gcd", "lcm", "max", "min", "abs", "floor", "ceil"):
            return self.named(text, plain=True)
        if text in GREEK:
            return self.subscript(text)
        if len(text) > 4 or (len(text) > 1 and text.isupper() and self.peek() is _END and self.at == 1):
            raise Unsupported(f"word {text!r}")
        if len(text) == 4 and len(set(text)) < 4:
            raise Unsupported(f"word {text!r}")
        if len(text) > 1:
            self.at -= 1
            self.tokens[self.at] = Token("word", text[1:], False, token.start + 1, token.end)
            return self.letter(text[0], called=False)
        return self.letter(text, called=True)

    def letter(self, letter: str, called: bool) -> tuple:
        if called and letter in FUNCTION_LETTERS and self.sees("("):
            self.next()
            arguments = [self.sum()]
            while self.sees(","):
                self.next()
                arguments.append(self.sum())
            self.expect(")")
            return ("fn", f"call {letter}", *arguments)
        if letter in "ei" and not self.sees("_"):
            return ("c", letter)
        return self.subscript(letter)

    def subscript(self, name: str) -> tuple:
        while self.sees("'"):
            self.next()
            name += "'"
        if self.sees("_"):
            self.next()
            token = self.peek()
            if token.kind == "sym" and token.text == "{":
                self.next()
                inside = []
                while not self.sees("}"):
                    if self.peek() is _END or self.sees("{"):
                        raise Unsupported("subscript")
                    inside.append(self.next().text)
                self.next()
                name += "_" + "".join(inside)
            elif token.kind in ("num", "word", "cmd"):
                self.next()
                name += "_" + token.text[:1] if token.kind != "cmd" else "_" + token.text
                if token.kind != "cmd" and len(token.text) > 1:
                    self.at -= 1
                    self.tokens[self.at] = Token(token.kind, token.text[1:], False, token.start + 1, token.end)
            else:
                raise Unsupported("subscript")
            while self.sees("'"):
                self.next()
                name += "'"
        return ("v", name)

    def command(self, token: Token) -> tuple:
        name = token.text
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            top = self.argument()
            return ("/", top, self.argument())
        if name in ("binom", "dbinom", "tbinom"):
            top = self.argument()
            return ("binom", top, self.argument())
        if name in GREEK:
            return self.subscript(name)
        if name in TRIG or name in ("pi", "sqrt", "log", "lg", "exp", "gcd", "lcm", "max", "min"):
            return self.named(name, plain=False)
        if name in _PLAIN_STYLES:
            return self.argument()
        if name in _STYLES:
            return self.styled(name)
        if name in ("operatorname", "mathop", "mathrm"):
            self.expect("{")
            word = self.next()
            self.expect("}")
            if word.kind != "word":
                raise Unsupported(name)
            if word.text in TRIG or word.text in ("log", "gcd", "lcm", "max", "min", "exp"):
                return self.named(word.text, plain=False)
            if word.text in ("e", "i"):
                return ("c", word.text)
            raise Unsupported(f"operator {word.text}")
        if name in ("lfloor", "lceil"):
            inner = self.sum()
            self.expect("rfloor" if name == "lfloor" else "rceil")
            return ("floor" if name == "lfloor" else "ceil", inner)
        if name in ("lvert", "vert", "lVert"):
            inner = self.sum()
            self.expect({"lvert": "rvert", "vert": "vert", "lVert": "rVert"}[name])
            return ("abs", inner)
        if name in ("sum", "prod", "int"):
            return self.series(name)
        if name in ("imath", "jmath"):
            return ("c", "i")
        if name in ("lbrace", "lbrack"):
            raise Unsupported("bracket")
        raise Unsupported(f"command {name}")

    def series(self, name: str) -> tuple:
        """`\\sum_{k=1}^{n} ...`, `\\int_0^1 ... \\,dx`: an opaque function of variable, limits and body."""
        self.expect("_")
        if name == "int":
            low = self.argument(script=True)
            variable = None
        else:
            self.expect("{")
            variable = self.primary()
            self.expect("=")
            low = self.sum()
            self.expect("}")
            if variable[0] != "v" and variable != ("c", "i"):
                raise Unsupported("index of a sum")
        self.expect("^")
        high = self.argument(script=True)
        body = self.product()
        if name == "int":
            raise Unsupported("integral")
        bound = ("v", f"bound {self.depth}")
        return ("fn", name, bound, low, high, substituted(body, variable, bound))

    def styled(self, style: str) -> tuple:
        """A decorated name such as `\\vec{v}` or `\\overline{AB}`: one variable of its own."""
        token = self.next()
        inside = []
        if token.kind == "sym" and token.text == "{":
            while not self.sees("}"):
                if self.peek() is _END or self.sees("{"):
                    raise Unsupported(style)
                inside.append(self.next())
            self.next()
        elif token.kind == "word" and len(token.text) == 1:
            inside.append(token)
        else:
            raise Unsupported(style)
        if not inside or any(t.kind not in ("word", "num", "cmd") and t.text not in "_'" for t in inside):
            raise Unsupported(style)
        if style in ("overline", "bar") and any(t.kind == "num" for t in inside):
            raise Unsupported("repeating decimal")
        return self.subscript(f"{style}:{''.join(t.text for t in inside)}")

    def named(self, name: str, plain: bool) -> tuple:
        if name == "pi":
            return ("c", "pi")
        if name == "sqrt":
            order = 2
            if not plain and self.sees("["):
                self.next()
                digits = self.next()
                self.expect("]")
                if digits.kind != "num" or "." in digits.text or len(digits.text) > 3 or int(digits.text) < 2:
                    raise Unsupported("root of that order")
                order = int(digits.text)
            inner = self.group("(") if self.sees("(") else self.argument()
            return ("root", order, inner)
        if name in ("gcd", "lcm", "max", "min"):
            opener = "{" if self.sees("{") else "("
            self.expect(opener)
            arguments = [self.sum()]
            while self.sees(","):
                self.next()
                arguments.append(self.sum())
            self.expect(_CLOSERS[opener])
            return (name, *arguments)
        if name in ("abs", "floor", "ceil"):
            return (name, self.group("("))
        base = None
        if name in ("log", "lg") and self.sees("_"):
            self.next()
            base = self.argument()
        power = None
        if self.sees("^"):
            self.next()
            power = self.argument(script=True)
        inner = self.function_argument()
        if name == "exp":
            tree = ("^", ("c", "e"), inner)
        elif name in ("log", "lg"):
            if name == "lg":
                base = ("n", Fraction(10))
            tree = ("fn", "log", inner) if base is None else ("fn", "log", inner, base)
        else:
            canonical = TRIG[name]
            if power == ("-", ("n", Fraction(1))):
                if f"arc{canonical}" not in TRIG:
                    raise Unsupported("inverse function")
                canonical, power = f"arc{canonical}", None
            tree = ("fn", canonical, inner)
        return tree if power is None else ("^", tree, power)

    def function_argument(self) -> tuple:
        """The argument of `\\sin 2x` or `\\log(3)`: a bracket, or the following factors up to a sign or function."""
        if self.sees("(", "{", "["):
            return self.group(self.peek().text)
        tree = self.signed_factor()
        while True:
            token = self.peek()
            stops = token.kind == "cmd" and (token.text in TRIG or token.text == "log")
            stops = stops or (token.kind == "word" and (token.text in TRIG or token.text in ("log", "cos", "sin")))
            if stops or not self.starts_factor(token) or (token.kind == "sym" and token.text in "(["):
                if token.kind == "sym" and token.text == "/" and self.peek(1).kind == "num":
                    self.next()
                    tree = ("/", tree, self.factor())
                    continue
                return tree
            if token.kind == "num":
                raise Unsupported("two numbers side by side")
            tree = ("*", tree, self.factor())


_MORE_STARTS = frozenset(
    words("sum prod frac dfrac tfrac cfrac sqrt pi binom dbinom tbinom log lg exp gcd lcm")
    + words("max min operatorname mathrm lfloor lceil lvert vert imath")
)


def parse_expression(text: str) -> tuple:
    """Reads an expression.

    Raises:
        Unsupported: It is not an expression, or one that is not treated here.
        Refused: It is too long, too deep or has too many digits.
    """
    try:
        return _Parser(text).whole()
    except RecursionError:
        raise Refused("nested too deeply") from None
