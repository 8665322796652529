"""Credentials in text are found by shape, in URLs and by name; what programs and records are made of is not."""

import random
import time

import pytest

from bench.base import credentials

HEX = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        (f"export WANDB_API_KEY={HEX}", "export WANDB_API_KEY=SECRET"),
        ("hf_" + "aB3d" * 8, "SECRET"),
        ("see ghp_" + "A1b2" * 9 + ", or", "see SECRET, or"),
        ("sk-proj-" + "a1" * 30, "SECRET"),
        ("AKIAABCDEFGHIJKLMNOP", "SECRET"),
        ("https://u:pw@host/x", "https://USER:PASSWORD@host/x"),
        ("https://TOK@host", "https://SECRET@host"),
        ("--api-key hunter22", "--api-key SECRET"),
        ("https://h/x?a=1&token=abc&b=2", "https://h/x?a=1&token=SECRET&b=2"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----.", "SECRET."),
        ('{"password": "hunter2"}', '{"password": "SECRET"}'),
        ("xoxb-123456789012-abcdefabcdef", "SECRET"),
        # further forms of these
        ("https://u:p/a@host/x", "https://USER:PASSWORD@host/x"),
        ('https://u:p"a@host/x', "https://USER:PASSWORD@host/x"),
        ("https://u:p@ss@host/x", "https://USER:PASSWORD@host/x"),
        ("[--url,https://u:PW@h/x,--b,https://TOK@h/x]", "[--url,https://USER:PASSWORD@h/x,--b,https://SECRET@h/x]"),
        ('["--api-key", "abcd"] --token=abc', '["--api-key", "SECRET"] --token=SECRET'),
        ("PGPASSWORD=ab(c;ls", "PGPASSWORD=SECRET;ls"),
        ("password: hunter2abc", "password: SECRET"),
        (f"wandb_key={HEX} openai_key='{HEX}' hf_key: {HEX}", "wandb_key=SECRET openai_key='SECRET' hf_key: SECRET"),
        (f"machine wandb.ai\n  login user\n  password {HEX}", "machine wandb.ai\n  login user\n  password SECRET"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer SECRET"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.abc-_d", "SECRET"),
    ],
)
def test_a_credential_is_taken_out_and_nothing_beside_it(text, clean):
    assert credentials.redacted(text) == clean
    assert credentials.redacted(clean) == clean and not credentials.find(clean)


@pytest.mark.parametrize(
    "text",
    [
        "data.eos_token=50256 --max_tokens 100 --eos_token x1x2x3x4 --bos-token '<|a|>' tokens_per_s: 12345678",
        "api_key=args.api_key, password=getpass.getpass(), token: torch.Tensor, self.key = nn.Linear(64, 64)",
        "PWD=/home/ada OLDPWD=/tmp HF_TOKEN=$HF_TOKEN WANDB_API_KEY=${KEY} TOKENIZERS_PARALLELISM=false",
        '["file://a","b:c@d"] https://medium.com/@me https://host:8080/a@b ssh://git@host:22/x',
        '{"a":"http://h:1/x","b":"c@d"} task-sk-12 hf_hub_download monkey=12345678a model.key_dim=64',
        "key=step_12345678 sort_key: 0f0f0f0f0f --key lr1e4x10 wandb_key=args.wandb_key half_key=12345678a",
        "source_sha256 " + "0f" * 32 + " uuid 123e4567-e89b-12d3-a456-426614174000",
    ],
)
def test_what_programs_and_records_are_made_of_is_no_credential(text):
    assert credentials.find(text) == []


def test_the_sources_and_the_records_of_this_repository_hold_none(repo):
    folders = [repo / name for name in ("bench", "models", "conf", "results/published", "docs")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".png"]
    wrong = {
        path.name: [secret.kind for secret in credentials.find(path.read_text(errors="replace"))]
        for path in paths
        if path.suffix != ".pyc" and path.name != "credentials.py" and path.parent.name != "assets"  # others' programs
    }
    assert len(wrong) > 400 and {name: kinds for name, kinds in wrong.items() if kinds} == {}


def test_values_are_credentials_by_their_names_and_stay_where_they_are():
    deep = {"password": "hunter2", "eos_token": "<|end|>", "batch_tokens": 5, "tokenizer": "gpt2"}
    env = {"MY_KEY": "abcd", "CACHE": "/x", "SSH_KEY_PATH": "/home/a"}
    args = "--lr 0.1 --api-key abcd --eos_token x --url=https://u:p@h --token 12"
    clean, changed = credentials.hidden({"args": args.split(), "env": env, "deep": [deep]})
    clean_args = "--lr 0.1 --api-key SECRET --eos_token x --url=https://USER:PASSWORD@h --token 12"
    assert clean["args"] == clean_args.split() and clean["env"] == env | {"MY_KEY": "SECRET"}
    assert clean["deep"] == [deep | {"password": "SECRET"}]
    were = {("args", 3): "abcd", ("args", 6): "--url=https://u:p@h", ("env", "MY_KEY"): "abcd"}
    assert changed == were | {("deep", 0, "password"): "hunter2"}
    assert credentials.hidden(clean) == (clean, {})


def test_the_value_of_a_secret_variable_is_found_anywhere_and_short_or_harmless_ones_are_not():
    environ = {"MY_TOKEN": "correct-horse", "OTHER_KEY": "true", "A_SECRET": "ab", "PATH": "/usr/bin:/bin"}
    kinds = [secret.kind for secret in credentials.find("it said correct-horse, true, ab, /usr/bin:/bin", environ)]
    assert kinds == ["the value of $MY_TOKEN"]


@pytest.mark.parametrize(
    "text",
    ["a_" * 200_000 + "token", "://a:" * 20_000, "sk-" * 50_000, "eyJ" + "a" * 200_000, "-----BEGIN " * 20_000]
    + ["://" + "'" * 100_000, "token=" * 50_000, 'password="' * 20_000, "login " * 50_000],
    ids=lambda text: text[:12],
)
def test_no_text_takes_long(text):
    started_s = time.process_time()
    credentials.find(text, {})
    assert time.process_time() - started_s < 10  # quadratic: minutes


def test_any_text_can_be_searched():
    chance = random.Random(0)
    pieces = [*"@:='\" \n/é\0", "://", "token", "--", "sk-", "password", "-----BEGIN "]
    for _ in range(2000):
        text = "".join(chance.choices(pieces, k=30))
        edges = [edge for secret in credentials.find(text) for edge in (secret.start, secret.end)]
        assert edges == sorted(edges) and all(0 <= edge <= len(text) for edge in edges)


@pytest.mark.parametrize("text", [HEX[:20] + "\n" + HEX[20:], "d2FuZGJfYXBpX2tleT1odW50ZXIyMg==", "colour=hunter22"])
def test_a_secret_in_two_lines_encoded_or_under_a_harmless_name_is_not_found(text):
    """The limit that docs/reference/guarantees.md states."""
    assert credentials.find(text) == []
