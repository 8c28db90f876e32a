"""`page4 generate`: what comes out, where, and what is refused."""

from __future__ import annotations

import io
import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from page4.experiments.cli import run
from page4.experiments.generate import continue_text
from page4.experiments.generate_config import GenerateConfig
from page4.experiments.tokenizer import TextStream, load_tokenizer
from page4.kvcache import RECOMMENDED
from tests.experiments.acceptance.tiny_study import write_checkpoint

PROMPT = "Anne thought of the sea and of nothing else. "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def generated(checkpoint: Path, **options: Any) -> dict[str, Any]:
    defaults = {"model": checkpoint, "device": "cpu", "max_new_tokens": 12, "ignore_eos": True}
    pieces: list[str] = []
    report = continue_text(GenerateConfig(**(defaults | options)), PROMPT, pieces.append)
    assert "".join(pieces) == report["text"]
    return report


@pytest.mark.parametrize("options", [{}, {"kv_format": "e4m3,1:e3m4"}, {"temperature": 0.9, "seed": 4}])
def test_speculation_changes_how_fast_not_what(checkpoint: Path, options: dict[str, Any]) -> None:
    """When drafts are greedy and the target samples, tokens differ, as other numbers are drawn."""
    speculative = generated(checkpoint, **options)
    plain = generated(checkpoint, num_draft_tokens=0, **options)
    if not options.get("temperature"):
        assert speculative["tokens"] == plain["tokens"]
    assert plain["acceptance"] is None and 0 <= speculative["acceptance"] <= 1
    assert len(speculative["tokens"]) == speculative["new_tokens"] == 12
    assert speculative["prefill_tokens"] == speculative["prompt_tokens"] - 1


@pytest.mark.parametrize("kv_format", ["fp16", "int8"])
def test_a_prefix_cache_changes_what_is_computed_not_what_comes_out(
    checkpoint: Path, tmp_path: Path, kv_format: str
) -> None:
    options = {"kv_format": kv_format, "prefill_chunk": 16}
    cold = generated(checkpoint, **options)
    first, second = (generated(checkpoint, **options, prefix_cache=tmp_path / "prefixes") for _ in range(2))
    assert cold["tokens"] == first["tokens"] == second["tokens"]
    assert cold["accepted"] == first["accepted"] == second["accepted"]
    assert (first["prefill_tokens"], second["prefill_tokens"]) == (cold["prompt_tokens"] - 1, 0)
    assert cold["prefix"] is None
    assert first["prefix"]["hits"] == 0 and first["prefix"]["files"]["bytes_written"] > 0
    found = second["prefix"]
    assert found["file_hits"] == 1 and found["reused_tokens"] == cold["prompt_tokens"] - 1
    assert found["files"]["bytes_read"] == found["host"]["to_device"]["bytes"] > 0
    assert found["host"]["to_device"]["bytes_per_second"] > 0
    assert sum(found["pages"][state] for state in ("held", "idle", "free")) == found["pages"]["total"]


def prompt_file(tmp_path: Path) -> str:
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    return str(tmp_path / "prompt.txt")


def records(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return record


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (RECOMMENDED, RECOMMENDED, "shipped")),
        (["--format", "e4m3", "--scales", "shipped"], ("e4m3", "e4m3", "shipped")),
        (["--format", "e4m3", "--draft-format", "e2m5"], ("e4m3", "e2m5", "shipped")),
        (["--format", "e4m3,3:fp16"], ("e4m3,3:fp16", "e4m3", "shipped")),
        (["--format", "e3m4"], ("e3m4", "e3m4", "prompt")),
        (["--format", "int8"], ("int8", "int8", None)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_shipped_checkpoint_decodes_with_these_formats_and_scales(
    options: list[str],
    expected: tuple[str, str, str | None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And what comes out is exact: the same tokens without speculation."""
    arguments = ["generate", prompt_file(tmp_path), "--device", "cpu", "-n", "8", "--json", *options]
    assert run(arguments) == 0
    record = records(capsys)
    assert (record["kv_format"], record["draft_kv_format"], record["scales"]) == expected
    assert run([*arguments, "--no-spec"]) == 0
    assert records(capsys)["tokens"] == record["tokens"]


def test_the_default_is_the_recommended_format_with_its_shipped_scales(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", prompt_file(tmp_path), "--device", "cpu", "-n", "8"]
    assert run(arguments) == 0
    default = capsys.readouterr()
    assert run([*arguments, "--format", RECOMMENDED, "--scales", "shipped"]) == 0
    assert capsys.readouterr() == default and default.err == ""
    assert run(["generate", "--help"]) == 0
    assert RECOMMENDED in capsys.readouterr().out


def test_the_default_keeps_prefixes_and_says_what_was_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "prefixes"
    arguments = ["generate", prompt_file(tmp_path), "--device", "cpu", "-n", "8", "--json"]
    seen = []
    for _ in range(2):
        assert run([*arguments, "--prefix-cache", str(folder)]) == 0
        captured = capsys.readouterr()
        record = json.loads(captured.out.splitlines()[-1])
        reused, length = record["prefix"]["reused_tokens"], record["prompt_tokens"]
        assert captured.err == f"page4: {reused} of {length} prompt tokens reused from {folder}\n"
        seen.append((reused, record["tokens"]))
    assert seen == [(0, record["tokens"]), (length - 1, record["tokens"])]
    assert (record["kv_format"], record["scales"]) == (RECOMMENDED, "shipped")


class Terminal(io.StringIO):
    """Standard error as a person sees it."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("options", [[], ["--scales", "prompt"]], ids=["shipped scales", "the prompt's"])
def test_who_waits_at_a_terminal_sees_what_for_and_the_text_stays_clean(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", prompt_file(tmp_path), "--device", "cpu", "-n", "8", *options]
    assert run(arguments) == 0
    piped = capsys.readouterr()
    assert piped.err == "", "a pipe gets no progress"
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    at_first_write: list[str] = []
    write = sys.stdout.write
    monkeypatch.setattr(
        sys.stdout, "write", lambda text: at_first_write.append(terminal.getvalue()) or write(text)
    )
    assert run(arguments) == 0
    assert capsys.readouterr().out == piped.out
    shown = terminal.getvalue()
    for stage in ("loading PyTorch", "reading the prompt"):
        assert stage in shown
    assert at_first_write[0] == shown, "the bar has gone before the text comes"
    assert shown.endswith("\x1b[2K"), "and its line is empty"


def test_a_refusal_at_a_terminal_is_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal)
    assert run(["generate", prompt_file(tmp_path), "--format", "e3m4", "--scales", "shipped"]) == 2
    assert (
        terminal.getvalue()
        .splitlines()[-1]
        .endswith("page4: the overlays' scales are made for e4m3 and e2m5, the target's KV format is e3m4")
    )


def test_the_seed_repeats_a_sample(checkpoint: Path) -> None:
    options = {"temperature": 1.0, "sample_drafts": True}
    first, again, other = (generated(checkpoint, seed=seed, **options)["tokens"] for seed in (1, 1, 2))
    assert first == again != other


def test_the_command_streams_and_ends_with_json(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    options = ["--model", str(checkpoint), "--device", "cpu", "-n", "6", "--ignore-eos", "--json"]
    assert run(["generate", str(file), *options]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out.splitlines()[-1])
    assert captured.out.startswith(record["text"])
    assert record["new_tokens"] == 6 and (record["kv_format"], record["scales"]) == ("fp16", None)

    stdin = io.TextIOWrapper(io.BytesIO(PROMPT.encode()), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", stdin)
    assert run(["generate", *options, "--no-spec"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] == record["tokens"]


def test_a_prefix_that_does_not_fit_on_the_disk_is_said_in_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a limit on the size of files makes it, that of the folder's own description aside."""
    (tmp_path / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    arguments = [
        "generate",
        str(tmp_path / "prompt.txt"),
        "--model",
        str(checkpoint),
        "--device",
        "cpu",
        "-n",
        "6",
    ]
    assert run(arguments) == 0
    expected = capsys.readouterr().out
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        status = run([*arguments, "--prefix-cache", str(tmp_path / "cache")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    captured = capsys.readouterr()
    assert status == 2
    assert expected.startswith(captured.out.removesuffix("\n")), "it is said as soon as it is known"
    assert captured.out == "" or captured.out.endswith("\n")
    assert captured.err.startswith(f"page4: {tmp_path / 'cache'}") and captured.err.count("\n") == 1
    assert captured.err.endswith("File too large\n")
    assert {file.name for file in (tmp_path / "cache").iterdir()} == {"identity.json", "lock"}


def test_who_types_the_text_is_told_how_to_end_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8")
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", stdin)
    assert run(["generate"]) == 2, "what was typed is no UTF-8, so nothing is computed"
    hint, refusal = capsys.readouterr().err.splitlines()
    assert hint == "page4: type a text to continue, then Ctrl-D on a new line"
    assert "standard input is not UTF-8" in refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.txt"], "missing.txt: No such file or directory"),
        (["latin.txt"], "latin.txt is not UTF-8"),
        (["empty.txt"], "the prompt is empty"),
        (["prompt.txt", "--format", "fp8"], "KV format 'fp8' is unknown"),
        (["prompt.txt", "--format", "e4m3,0:fp16"], "names layer 0; the QSA layers are 1"),
        (["prompt.txt", "-K", "9"], "num_draft_tokens is 9, expected 0 to 7"),
        (["prompt.txt", "-K", "3", "--no-spec"], "--no-spec and --drafts 3 contradict each other"),
        (["prompt.txt", "--temperature", "-1"], "temperature is -1.0"),
        (["prompt.txt", "--top-p", "0"], "top_p is 0.0"),
        (["prompt.txt", "-n", "0"], "max_new_tokens is 0"),
        (["prompt.txt", "-n", "5000000"], "the model's positions end at"),
        (["prompt.txt", "--model", "nowhere"], "nowhere holds no tokenizer.json"),
        (["prompt.txt", "--set", "sed=1"], "unknown key 'sed'"),
        (
            ["prompt.txt", "--format", "e4m3", "--prefix-cache", "x"],
            "scales that are the same for all",
        ),
        (["prompt.txt", "--prefix-cache", "x", "--set", "prefill_chunk=40"], "a multiple of 16 tokens"),
        (["prompt.txt", "--prefix-cache", "x", "--set", "host_gib=0"], "a file tier needs a host tier"),
        (["prompt.txt", "--prefix-cache", "x", "--set", "folder_gib=0"], "folder_gib is 0.0, expected more"),
        (["prompt.txt", "--prefix-cache", "x", "--set", "folder_gib=1e-9"], "one group takes"),
        (["prompt.txt", "--prefix-cache", "prompt.txt"], "prompt.txt is a file, expected a folder"),
        (["prompt.txt", "--prefix-cache", "."], "and no prefix cache: name an empty folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(
    checkpoint: Path,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("empty.txt").touch()
    Path("prompt.txt").write_text(PROMPT, encoding="utf-8")
    extra = [] if "--model" in arguments else ["--model", str(checkpoint)]
    assert run(["generate", *arguments, *extra, "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("page4: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_character_waits_for_all_its_bytes() -> None:
    from page4.experiments.info import CHECKPOINT

    tokenizer = load_tokenizer(CHECKPOINT)
    text = "Zwölf Boxkämpfer — 日本 🙂."
    stream = TextStream(tokenizer)
    pieces = [stream.add([token]) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + stream.end() == text
    assert not any("\ufffd" in piece for piece in pieces)
