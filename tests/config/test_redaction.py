"""Secrets in command lines, variables and messages are hidden; ordinary keys, paths and texts stay as they are."""

from __future__ import annotations

import pytest

from megappo.commands.cli import main
from megappo.config.errors import ConfigError, problem
from megappo.config.redaction import HIDDEN, hide_secrets, is_secret_name, redacted

TOKEN = "hf_" + "aB3" * 12
SECRETS = {
    "token in a variable": "HF_TOKEN=s3cret",
    "password in a variable": "x --export=ALL,HF_PASS=s3cret,B=1",
    "quoted": "PGPASSWORD='s3cret two words s3cret'",
    "url": "https://me:s3cret@host.example/simple",
    "url without a user": "https://s3cret@host/x?y=1",
    "url with an @ in the password": "http://me:s3@cret@proxy:3128",
    "url with a slash in the password": "postgresql://me:s3/cret@db:5432/x",
    "two urls": "http://a:s3cret@b https://c:s3cret@d",
    "in another value": "--index-url=https://me:s3cret@host/simple",
    "parameter": "https://host/x?token=s3cret&size=3",
    "option": "--api-key=s3cret",
    "key of another program": "hf_token=s3cret",
    "message": 'wandb_api_key = "s3cret": unknown key',
    "header": "Authorization: Bearer s3cret.s3cret.s3cret",
    "form of a token": f"git clone with {TOKEN}",
}


@pytest.mark.parametrize("case", SECRETS)
def test_a_secret_is_hidden(case: str) -> None:
    hidden = hide_secrets(SECRETS[case])
    assert HIDDEN in hidden and not any(part in hidden for part in ("s3cret", "cret@", "s3@", "s3/", TOKEN)), hidden
    assert hide_secrets(hidden) == hidden


PLAIN = [
    "data.prompt_key=question data.answer_key=answer data.max_prompt_tokens=16",
    'policy.model = "models/x": tokenizer.json names no eos_token; for example "eos_token": "</s>"',
    "data.tokenizer=models/tok policy.micro_batch_tokens=16384",
    "OMP_NUM_THREADS=1 PATH=/bin:/usr/bin CUDA_VISIBLE_DEVICES=0,1",
    "https://host.example:8080/path and nvcr.io#nvidia/pytorch:26.01-py3",
    "me@host.example wrote at 12:30",
    "runs/hf_llama_small/task-of-the-long-winter-evenings",
]


@pytest.mark.parametrize("text", PLAIN)
def test_what_is_no_secret_stays(text: str) -> None:
    assert hide_secrets(text) == text


def test_names_of_variables() -> None:
    secret = """HF_TOKEN HF_PASS HUGGINGFACE_PAT GITHUB_PAT SSH_PASSPHRASE VLLM_BEARER AWS_CRED DB_CREDENTIALS DB_PWD OPENAI_APIKEY
    WANDB_API_KEY CONDA_PW PW_OF_PROXY PROXY_PSW ENROOT_LOGIN REGISTRY_LOGIN_URL SENTRY_DSN SLURM_JWT MEGAPPO_SECRET AUTH_HEADER"""
    plain = """PATH LD_LIBRARY_PATH PWD HOSTNAME SLURM_JOB_ID OMP_NUM_THREADS NCCL_DEBUG PYTHONPATH SLURM_STEP_PATTERN LOGNAME
    OLDPWD PWR_CAP"""
    assert all(map(is_secret_name, secret.split())) and not any(map(is_secret_name, plain.split()))


def test_a_command_line_is_recorded_without_the_word_after_an_option() -> None:
    command = ["megappo", "launch", "x.yaml", "--token", "s3cret", "--sbatch=--export=A_KEY=s3cret", "run.seed=3", "--resume"]
    expected = ["megappo", "launch", "x.yaml", "--token", HIDDEN, f"--sbatch=--export=A_KEY={HIDDEN}", "run.seed=3", "--resume"]
    assert redacted(command) == expected


def test_messages_hide_what_they_quote(capsys) -> None:
    assert "s3cret" not in str(ConfigError(problem("data.train", "https://me:s3cret@host/x.jsonl", "does not exist")))
    assert main(["train", "absent.yaml", "hf_token=s3cret"]) == 2
    assert main(["export", "https://me:s3cret@host", "out", "--api-key", "s3cret"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 2 and said.count("megappo: ") == 2 and "https://(hidden)@host" not in said.splitlines()[0]
    assert "s3cret" not in said, said
