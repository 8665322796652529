"""Finds credentials in text: tokens of a known shape, logins in URLs, and values whose name says what they are.

redacted(text) removes them from what is recorded; find(text) applies the same rules to what is to be published.  A
secret that is split over two lines, encoded (base64) or has a harmless name is not found.

detect-secrets 1.5.0 was measured for this on 2026-11-23: without its entropy plugins, which flag every sha256, it found
6 of the 12 forms that tests/test_credentials.py begins with (no Hugging Face, W&B or OpenAI project key, no token in a
URL, no --api-key VALUE), and importing it takes 0.3 s.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SECRET = "SECRET"  # recorded instead of a credential
LOGIN = "USER:PASSWORD"
# Environment variables with such a name hold credentials, whose values are never recorded.
VARIABLE = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.I)
MIN_KNOWN_CHARS = 8  # shorter values of variables are not searched for in text: "true" is not a password

# {literal prefixes: regular expression of the rest}; str.find finds a prefix much faster than a regular expression.
SHAPES = {
    ("hf_", "gsk_", "r8_", "npm_"): r"[A-Za-z0-9]{20,}",  # Hugging Face, Groq, Replicate, npm
    ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"): r"[A-Za-z0-9]{30,}",  # GitHub
    ("github_pat_", "wandb_v1_", "dckr_pat_", "glpat-", "xai-", "hvs.", "ya29."): r"[\w-]{20,}",
    ("sk-", "pypi-"): r"(?=[\w-]{0,64}\d)[\w-]{20,}",  # OpenAI, Anthropic and others; PyPI
    ("sk_live_", "sk_test_", "rk_live_", "dop_v1_"): r"[A-Za-z0-9]{16,}",  # Stripe, DigitalOcean
    ("AKIA", "ASIA"): r"[A-Z0-9]{16}(?![A-Za-z0-9])",  # AWS
    ("AIza",): r"[\w-]{35}",  # Google
    ("dapi",): r"[0-9a-f]{32}",  # Databricks
    ("xoxa-", "xoxb-", "xoxe-", "xoxp-", "xoxr-", "xoxs-"): r"[\w-]{10,}",  # Slack
    ("hooks.slack.com/services/",): r"[\w/]{20,}",
    ("SG.",): r"[\w-]{16,128}\.[\w-]{16,}",  # SendGrid
    ("eyJ",): r"[\w-]{10,2048}\.eyJ[\w-]{10,4096}\.[\w-]*",  # a JSON web token
    ("-----BEGIN ",): r"[A-Z ]{0,40}PRIVATE KEY-----(?s:.*?-----END [A-Z ]{0,40}PRIVATE KEY-----|.*)",
}
BEGINNINGS = {start: re.compile(re.escape(start) + rest) for starts, rest in SHAPES.items() for start in starts}

# A URL's login: up to the last @ before the path; a password may also hold slashes, but HOST:PORT/PATH@TAG has none.
QUOTE = r"[\"'](?![\s,:;}\])]|$)"  # within a password; one that ends a JSON or YAML string is followed by one of these
IN_URL = re.compile(
    rf"://((?:[^\s/?#@\"'<>`]|{QUOTE}){{1,512}}(?:@[^\s/?#@\"'<>`,]{{0,512}}){{0,4}})@(?![^\s/?#\"'<>,@]{{0,512}}@)"
    rf"|://([^\s/?#@:\"'<>`\[]{{0,128}}:(?!\d{{1,5}}/)(?:[^\s@\"'<>`]|{QUOTE}){{1,512}})@"
)
IN_QUERY = re.compile(
    r"[?&;](?:[\w.]{1,40}[_-])?(?:token|key|secret|passw\w{0,8}|pwd|sig|signature|auth|credentials?)=([^\s&;#\"'<>]+)",
    re.I,
)
WORD = r"pass(?:word|wd|phrase)|pwd|secret|credentials?"
KEY = (
    r"(?:api|access|secret|private|auth|account|encryption|signing|client|ssh|hf|huggingface|wandb|openai|anthropic"
    r"|github|gitlab)[_-]?key|apikey"
)
TOKEN = r"(?:access|auth|api|refresh|bearer|session|hf|hub|huggingface|wandb|gh|github|gitlab|bot|private)[_-]?token"
NAMED = re.compile(rf".*pass(?:word|wd|phrase)|(?:.*[_.-])?(?:{WORD}|{KEY}|{TOKEN})", re.I)
# "token" is also a term of language models: its value is a credential only if it follows an option or looks random.
ALONE = re.compile(r"(?:.*[_.-])?token", re.I)
OF_TEXT = re.compile(
    r"(?:.*[_.-])?(?:eos|bos|pad|unk|sep|cls|mask|end|start|stop|image|next|last|first|special|page|num|max|min|per)"
    r"[_-]?token",
    re.I,
)
ASSIGNED = re.compile(  # the last word of a name of a credential, the separator, the value
    rf"(?:{WORD}|key|token)([\"']?\]?\s{{0,3}}[=:]\s{{0,3}}|[\"']?,\s{{0,3}}|\s{{1,3}})"
    r"(?:([\"'])([^\n]{1,4096}?)\2|([^\s\"'`,;()\[\]{}<>|&]{1,4096}))",
    re.I,
)
BEFORE = re.compile(r"[\w.-]*\Z")  # the part of the name before ASSIGNED's match
MAX_NAME_CHARS = 80
TO_BLANK = re.compile(r"[^\s\"'`;]*")  # the rest of a shell word
NETRC = re.compile(r"\blogin[ \t]{1,8}\S{1,256}\s{1,8}password[ \t]{1,8}(\S+)")
BEARER = re.compile(r"\bAuthorization[\"']?\s*[:=]\s*[\"']?(?:Bearer|Basic|Token)\s+([\w.~+/=-]+)", re.I)
HARMLESS = re.compile(
    r"SECRET|PASSWORD|USER:PASSWORD|USER|TOKEN|VALUE|KEY|none|null|true|false|str|string|int|bytes|optional"
    r"|\W*|x+|your\W.*|change_?me"
    r"|example|redacted|hidden|[<${%].*|[-+]?[\d.,_]+(?:e[-+]?\d+)?",
    re.I | re.S,
)


@dataclass(frozen=True)
class Found:
    """The place of a credential in a text, and how it was recognized."""

    start: int
    end: int
    kind: str
    shown: str = SECRET  # what replaces the credential


Path = tuple[str | int, ...]  # the keys and indices that lead to a value in nested dicts and lists

_known: set[str] = set()


def remember(value: str) -> None:
    """Adds a text that contains a credential, and the credential alone, to what this process finds."""
    spans = find(value, {})
    login = [text for span in spans if span.shown == LOGIN for text in value[span.start : span.end].split(":", 1)[1:]]
    for text in (value, *login, *(value[span.start : span.end] for span in spans)):
        if len(text) >= MIN_KNOWN_CHARS and not HARMLESS.fullmatch(text):
            _known.add(text)


def find(text: str, environ: Mapping[str, str] | None = None) -> list[Found]:
    """Returns the credentials in a text, in order and without overlaps.

    environ: variables whose secret values are also searched for; None: those of this process at the first call.
    """
    spans_in_order, end = [], 0
    spans = [
        *_by_shape(text),
        *_in_urls(text),
        *_named(text),
        *_literal(text, _shell_variables() if environ is None else _variables(environ)),
    ]
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.start >= end:
            spans_in_order.append(span)
            end = span.end
        elif span.end > end:  # the part that the previous span does not cover
            spans_in_order.append(Found(end, span.end, span.kind, ""))
            end = span.end
    return spans_in_order


def redacted(text: str) -> str:
    """Returns the text with SECRET, or in a URL USER:PASSWORD, in place of each credential."""
    parts, end = [], 0
    for span in find(text):
        parts += [text[end : span.start], span.shown]
        end = span.end
    return "".join([*parts, text[end:]]) if parts else text


def is_named(name: str, value: Any) -> bool:
    """Whether a setting, a variable or an argument with this name and value holds a credential."""
    if not isinstance(value, str) or HARMLESS.fullmatch(value) or OF_TEXT.fullmatch(name):
        return False
    if name.lower().endswith("pwd") and os.path.isabs(value):  # a shell's working folder
        return False
    return bool(NAMED.fullmatch(name)) or (_looks_random(value) and bool(ALONE.fullmatch(name)))


def is_variable(name: str, value: Any) -> bool:
    """Whether an environment variable holds a credential: its name is enough, unless the value is a path."""
    if is_named(name, value):
        return True
    is_text = isinstance(value, str) and not HARMLESS.fullmatch(value) and not os.path.isabs(value)
    return is_text and name.isupper() and bool(VARIABLE.search(name)) and not OF_TEXT.fullmatch(name)


def hidden(
    values: Any,
    clean_text: Callable[[str], str] = redacted,
    clean_name: Callable[[str], str] | None = None,
    path: Path = (),
) -> tuple[Any, dict[Path, str]]:
    """Returns nested dicts and lists without credentials, and {path: original text} of the values that changed.

    The name of a value is its key in a dict, or in a list the option before it (--api-key, VALUE).  clean_text is
    applied to texts whose name is not that of a credential, and clean_name to names; None: names stay.
    """
    if isinstance(values, str):
        clean = clean_text(values)
        return clean, {path: values} if clean != values else {}
    if isinstance(values, dict):
        parts = [(key, value, is_variable(str(key), value)) for key, value in values.items()]
    elif isinstance(values, (list, tuple)):
        before = [None, *values]
        parts = [(number, value, _is_option(before[number], value)) for number, value in enumerate(values)]
    else:
        return values, {}
    clean_by_key: dict[str | int, Any] = {}
    changed: dict[Path, str] = {}
    for key, value, is_secret in parts:
        name = clean_name(key) if clean_name and isinstance(key, str) else key
        name = f"{name}-{len(clean_by_key)}" if name in clean_by_key else name  # two that differed in what is private
        clean_by_key[name], inside = (
            (SECRET, {(*path, name): value}) if is_secret else hidden(value, clean_text, clean_name, (*path, name))
        )
        changed |= inside
    return (clean_by_key if isinstance(values, dict) else list(clean_by_key.values())), changed


def _is_option(before: Any, value: Any) -> bool:
    """Whether an argument is the value of a secret option before it, such as --api-key or --token."""
    if not isinstance(before, str) or not before.startswith("-") or "=" in before:
        return False
    name = before.lstrip("-")
    is_text = isinstance(value, str) and not HARMLESS.fullmatch(value) and not value.startswith("--")
    is_token = name.lower().endswith("token") and not OF_TEXT.fullmatch(name)
    return is_text and (is_token or bool(NAMED.fullmatch(name)))


# ---- each kind


def _by_shape(text: str) -> Iterator[Found]:
    for start, pattern in BEGINNINGS.items():
        at = text.find(start)
        while at >= 0:
            match = pattern.match(text, at)
            if match and not (start[0].isalnum() and at and (text[at - 1].isalnum() or text[at - 1] == "_")):
                yield Found(at, match.end(), "a private key" if start[0] == "-" else f"a token ({start}...)")
                at = match.end() - 1
            at = text.find(start, at + 1)


def _in_urls(text: str) -> Iterator[Found]:
    if "://" not in text:
        return
    for match in IN_URL.finditer(text):
        group = 1 if match[1] is not None else 2
        login, scheme = match[group], text[: match.start()][-12:].lower()
        is_user = ":" not in login and (login == "git" or scheme.endswith(("ssh", "sftp", "git")))
        if not HARMLESS.fullmatch(login) and not is_user:
            yield Found(*match.span(group), "a login in a URL", LOGIN if ":" in login else SECRET)
    for match in IN_QUERY.finditer(text):
        if match[1] != SECRET:
            yield Found(*match.span(1), "a key in a URL")


def _named(text: str) -> Iterator[Found]:
    for match in ASSIGNED.finditer(text):
        start, separator = match.start(), match[1]
        before = BEFORE.search(text, max(0, start - MAX_NAME_CHARS), start)
        name = (before[0] if before else "") + text[start : match.start(1)]
        group = 3 if match[2] else 4
        value, end = match[group], match.end(group)
        if name.startswith("-"):
            is_secret = _is_option(name, value)
        elif not re.search("[=:]", separator):
            is_secret = False
        elif group == 3:
            is_secret = is_named(name, value) and len(value) > 3
        elif name.isupper() and separator == "=":
            is_secret = is_named(name, value) or (_looks_random(value) and is_variable(name, value))
            end = blank.end() if (blank := TO_BLANK.match(text, end)) else end
        else:  # in source code the value may be an expression: password=args.password
            is_secret = _looks_random(value) and is_named(name, value)
        if is_secret:
            yield Found(match.start(group), end, f"the value of {name}")
    for pattern, kind in ((NETRC, "a password of .netrc"), (BEARER, "a header that authorizes")):
        for match in pattern.finditer(text):
            if not HARMLESS.fullmatch(match[1]):
                yield Found(*match.span(1), kind)


def _looks_random(value: str) -> bool:
    return len(value) >= MIN_KNOWN_CHARS and bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value))


@functools.cache
def _shell_variables() -> dict[str, str]:
    return _variables(os.environ)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns {value: name} of the variables that hold credentials and are distinctive enough to search for."""
    return {
        value: name
        for name, value in environ.items()
        if VARIABLE.search(name) and len(value) >= MIN_KNOWN_CHARS
        if not value.startswith("/") and not HARMLESS.fullmatch(value)
    }


def _literal(text: str, names_by_value: Mapping[str, str]) -> Iterator[Found]:
    for value in {*_known, *names_by_value}:
        if value not in text:
            continue
        for match in re.finditer(rf"(?<![\w]){re.escape(value)}(?![\w])", text):
            name = names_by_value.get(value)
            yield Found(*match.span(), f"the value of ${name}" if name else "what was given as a credential")
