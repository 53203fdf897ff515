"""Two hundred made-up secrets in the places where they occur, and texts of logs that are none."""

from __future__ import annotations

import json
import random
import string
import time
from pathlib import Path

import pytest

from paceline.errors import RequestError
from paceline.host import redaction
from paceline.host.environment import is_secret

LETTERS = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
# What is random, by one letter: a and w (letters and digits), h (hexadecimal), u (upper case, digits), b (base64).
ALPHABETS = {"a": LETTERS, "h": HEX, "u": string.ascii_uppercase + string.digits, "b": LETTERS + "+/", "w": LETTERS}
# Shapes of keys that are known wherever they stand: (beginning, what follows, how many).
SHAPES = (
    ("hf_", "a", 34), ("sk-proj-", "a", 48), ("sk-ant-api03-", "a", 40), ("sk_live_", "a", 24), ("rk_test_", "a", 24),
    ("ghp_", "a", 36), ("gho_", "a", 36), ("ghs_", "a", 36), ("github_pat_", "a", 60), ("glpat-", "a", 20),
    ("xoxb-", "a", 30), ("xapp-1-", "a", 30), ("AKIA", "u", 16), ("ASIA", "u", 16), ("AIza", "a", 35),
    ("ya29.", "a", 60), ("eyJhbGciOiJIUzI1NiJ9.", "a", 40), ("nvapi-", "a", 64), ("npm_", "a", 36),
    ("pypi-AgEI", "a", 60),
    ("dckr_pat_", "a", 27), ("dop_v1_", "h", 64), ("r8_", "a", 37), ("gsk_", "a", 52), ("xai-", "a", 64),
    ("SG.abcdefghij.", "a", 40), ("shpat_", "h", 32), ("hvs.", "a", 24), ("dapi", "h", 32), ("tskey-auth-", "a", 24),
    ("whsec_", "a", 32), ("https://hooks.slack.com/services/T0/B0/", "a", 24),
    ("https://discord.com/api/webhooks/1/", "a", 60), ("5123456789:AA", "a", 33),
)  # fmt: skip
# Secrets that only their name or place shows; {} is random.
PLACES = (
    ("aws_secret_access_key = {}", "b", 40), ("AWS_SECRET_ACCESS_KEY={}", "b", 40),
    ('"SecretAccessKey": "{}"', "b", 40),
    ("export HF_TOKEN={}", "w", 20), ("WANDB_API_KEY={}", "h", 40), ("OPENAI_API_KEY: {}", "a", 32),
    ("https://x.blob.core.windows.net/c?sv=2024&sig={}%3D", "a", 43),
    ("DefaultEndpointsProtocol=https;AccountKey={}==", "b", 86), ("Endpoint=sb://x/;SharedAccessKey={}=", "b", 43),
    ("https://b.s3.amazonaws.com/k?X-Amz-Signature={}", "h", 64), ("?X-Goog-Signature={}", "h", 64),
    ("Authorization: Basic {}==", "b", 24), ("authorization: Bearer {}", "a", 40),
    ("'Authorization': 'Token {}'", "h", 40),
    ("Proxy-Authorization: Basic {}", "b", 20), ("X-Api-Key: {}", "a", 32), ("x-api-key={}", "a", 32),
    ("Ocp-Apim-Subscription-Key: {}", "h", 32), ("Cookie: session={}", "a", 40),
    ("Set-Cookie: sid={}; Path=/", "a", 40),
    ("serve --api-key {} --port 80", "a", 24), ("serve --api-key={}", "a", 24), ("login --token {}", "a", 24),
    ("login --password {}", "a", 12), ("cli --hub-token {}", "a", 24), ("--client-secret={}", "a", 32),
    ("POST /?token={}&x=1", "a", 24), ("token={}", "a", 24), ("client_secret={}", "a", 40),
    ("client-secret: {}", "a", 40),
    ("password: {}", "a", 12), ("passwd={}", "a", 12), ("db_password={}", "a", 12), ("passphrase: {}", "a", 16),
    ("access_token={}", "a", 40), ("refresh_token: {}", "a", 40), ("session_token={}", "b", 60), ("apikey={}", "a", 32),
    ("secret = {}", "a", 24), ("postgres://bench:{}@db/x", "a", 12), ("git clone https://u:{}@example.org/x", "a", 20),
    ("origin https://{}@example.org/x.git (push)", "h", 40),
    ("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----", "b", 64),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\n{}", "b", 64),
)  # fmt: skip


def corpus() -> list[tuple[str, str]]:
    """Text and the random part of it that must not remain. The digit makes sure that it looks like a key."""
    draw = random.Random(18)

    def made(kind: str, count: int) -> str:
        return "7" + "".join(draw.choices(ALPHABETS[kind], k=count - 2)) + draw.choice(HEX)

    texts = []
    for start, kind, count in SHAPES:
        for place in ("{}", "connecting with {}, retry", '{{"note": "key {}"}}', "url?x={}"):
            secret = made(kind, count)
            texts.append((place.format(start + secret), secret))
    for place, kind, count in PLACES:
        for around in ("{}", "[rank0] 12:00:01 {}"):
            secret = made(kind, count)
            texts.append((around.format(place.format(secret)), secret))
    return texts


CORPUS = corpus()


def test_two_hundred_secrets_are_redacted() -> None:
    assert len(CORPUS) >= 200
    remaining = [text for text, secret in CORPUS if secret[:12] in redaction.clean_text(text)]
    assert remaining == []


def test_files_of_a_run_are_searched_in_each_form() -> None:
    for text, secret in CORPUS:
        assert secret not in redaction.clean("log.txt", f"start\n{text}\nend\n".encode(), "log")[0].decode()
        value = json.dumps({"error": text}).encode()
        assert secret not in redaction.clean("outcome-0.json", value, "o")[0].decode()
        with pytest.raises(RequestError, match="looks like a secret"):
            redaction.clean("spec.json", value, "spec.json")


UNKNOWN = ["".join(random.Random(i).choices(LETTERS, k=40 + i % 20)) + "4aB" for i in range(6)] + [
    "".join(random.Random(i).choices(HEX, k=40)) for i in range(6)
]


@pytest.mark.parametrize("secret", UNKNOWN)
def test_a_log_with_a_random_word_is_refused_by_its_line_and_without_it(secret: str) -> None:
    with pytest.raises(RequestError) as refused:
        redaction.clean("log.txt", f"one\nconnected as {secret}\n".encode(), "run/log.txt")
    assert "run/log.txt: line 2 contains a word that looks random" in str(refused.value)
    assert secret not in str(refused.value)


INNOCENT = """\
step 12: loss 3.4567, 8192 tokens, tokens_per_s: 123456.7, grad_norm=0.98765432
W1117 12:00:01.123456 281473512345 torch/distributed/run.py:793] *****************************************
[rank1]:   File "/usr/local/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _wrapped_call_impl
[rank1]: KeyError: 'transformer.h.11.attn.c_attn.weight'
Missing key(s) in state_dict: model.layers.0.self_attn.q_proj.weight; unexpected token: <unk>
pad_token=50256 eos_token: <|endoftext|> token: 12345678 tokenizer: LlamaTokenizerFast secret: none
frame #12: c10::detail::torchCheckFail(char const*, char const*, unsigned int) + 0x7c (0xffff8a5d1c3c in libc10.so)
_ZN5torch8autograd6Engine17evaluate_functionERSt10shared_ptrINS0_9GraphTaskEEPNS0_4NodeE
ddp-gpt2-124m-8x-r0-5e7ce447cd: ok, digest sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
GPU-1b2c3d4e-5f60-7182-93a4-b5c6d7e8f901 NCCL_SOCKET_IFNAME=eth0 CUDA_VISIBLE_DEVICES=0,1,2,3
paceline.launchers.node.torchrun --nproc-per-node=8 -m paceline.workloads.worker results/quick/run --api-key $KEY
the key of the mapping is missing; author: someone; basic usage: see bearer of news
origin ssh://git@github.com/x, https://example.org/a@b, https://someone@example.org, s3://bucket-of-2026/model@v1
HF_HOME=/data TOKENIZERS_PARALLELISM=false KEY=1 password: <hidden> password: ******
"""


def test_ordinary_text_of_a_log_stays() -> None:
    for line in INNOCENT.splitlines():
        assert redaction.clean_text(line) == line
    assert redaction.clean("log.txt", INNOCENT.encode(), "log") == (INNOCENT.encode(), 0)


def test_variables_that_carry_a_known_key_are_secrets() -> None:
    secrets = [text for text, _ in CORPUS[: 4 * len(SHAPES) : 4]]
    assert [text for text in secrets if not is_secret("NOTE", text)] == []


def test_a_long_log_is_searched_in_linear_time() -> None:
    """Each repetition is ten times longer; what backtracks takes a hundred times longer."""
    for piece in (
        "a" * 100,
        "token",
        "://" * 30,
        "--api-",
        "x-" * 50,
        "Authorization ",
        "-----BEGIN PRIVATE KEY-----",
        "=" * 99,
        ":" * 50,
        "TOKEN_" * 10,
        "secret:",
        "--api-key=",
        "' , " * 20,
    ):
        spent = []
        for count in (200, 2000):
            began = time.process_time()
            redaction.clean_text(f"://{piece * count}")
            spent.append(time.process_time() - began)
        assert spent[1] < 40 * spent[0] + 0.5, piece


def test_options_of_a_command_are_redacted_also_in_a_list_of_its_words() -> None:
    words = ["t.py", "--hub_token", "abcdef123", "--wandb_key", "0123456789abcdef0123456789abcdef", "--lr", "0.1"]
    for text in (f"failed: {words}", " ".join(words), json.dumps(words)):
        cleaned = redaction.clean_text(text)
        assert "abcdef" not in cleaned
        assert "--lr" in cleaned


def test_a_log_is_masked_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that look like a secret, and values of secret variables of any shape, also across pieces of a large log."""
    monkeypatch.setattr(redaction, "_PIECE", 20)
    log, token = tmp_path / "log.txt", "hf_" + "a1B2" * 8
    lines = ["schön: step 1", f"login with {token}", "the word is correct horse", "step 2, tokens=512", "cut off"]
    log.write_text("\n".join(lines))
    late = log.open("ab")
    assert redaction.mask_log(log, {"MY_PASSWORD": "correct horse", "SHORT_KEY": "step", "HOME": "schön"}) == 2
    late.write(b", and more\n")
    late.close()
    masked = [lines[0], f"login with {'*' * len(token)}", f"the word is {'*' * 13}", *lines[3:]]
    assert log.read_text() == "\n".join(masked) + ", and more\n"
