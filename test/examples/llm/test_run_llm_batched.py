"""Many prompts at once by command: the answers of each prompt alone, and what it says to bad input."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from executorch_mlx.examples.llm import answers, command, run_llm, run_llm_batched
from executorch_mlx.extension.llm.engine import Engine

KINDS = ("batched", "batched-cell", "batched-sequence")
PROMPTS = ("Hello, world", "a", "Hello, moon", "Näive café ☕", "The quick brown fox jumps over the lazy dog, twice.")
Capture = pytest.CaptureFixture[str]


def rows_of(main: Any, tiny: Any, capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    """Run a command with --json; return what it printed."""
    main(["--model-dir", str(tiny.folder), "--json", *arguments])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def batched(tiny: Any, capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    return rows_of(run_llm_batched.main, tiny, capsys, *arguments)


def alone(tiny: Any, capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    return rows_of(run_llm.main, tiny, capsys, *arguments)


def answer(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["prompt"], row["tokens"], row["text"], row["finish_reason"]


def flags_of(prompts: tuple[str, ...]) -> list[str]:
    return [argument for prompt in prompts for argument in ("--prompt", prompt)]


def jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", [[], ["--max-seqs", "2"], ["--kv-capacity", "80", "--step-tokens", "3"]], ids=str)
def test_answers_are_those_of_each_prompt_alone_in_the_prompts_order(
    tiny: Any, capsys: Capture, kind: str, limits: list[str]
) -> None:
    arguments = [*flags_of(PROMPTS), "--max-new-tokens", "9", "--no-chat"]
    got = batched(tiny, capsys, *arguments, "--cache-kind", kind, *limits)
    assert [answer(row) for row in got] == [answer(row) for row in alone(tiny, capsys, *arguments)]
    assert [(row["index"], row["sample"]) for row in got] == [(number, 0) for number in range(1, 6)]
    assert set(got[0]) == {"index", "sample", "prompt", "text", "tokens", "finish_reason", "timings"}


def test_prompts_of_a_text_file_are_its_lines(tiny: Any, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\n  two \n{three}\nfo\u2028ur\n".encode())
    rows = batched(tiny, capsys, "--prompts", str(path), "--prompt", "zero", "--max-new-tokens", "1")
    assert [row["prompt"] for row in rows] == ["zero", "one", "  two ", "{three}", "fo\u2028ur"]


def test_settings_of_a_jsonl_line_override_the_flags(tiny: Any, tmp_path: Path, capsys: Capture) -> None:
    given = [
        {"prompt": "abc"},
        {"prompt": "abc", "max_new_tokens": 3, "chat": False},
        {"prompt": "abc", "temperature": 2, "top_k": 7, "top_p": 0.9, "seed": 4, "n": 2},
        {"prompt": "abc", "seed": None, "temperature": None},
    ]
    got = batched(tiny, capsys, "--prompts", jsonl(tmp_path, *given), "--max-new-tokens", "6", "--seed", "1")
    sampled = ["--temperature", "2", "--top-k", "7", "--top-p", "0.9"]
    expected = [
        *alone(tiny, capsys, "--prompt", "abc", "--max-new-tokens", "6"),
        *alone(tiny, capsys, "--prompt", "abc", "--max-new-tokens", "3", "--no-chat"),
        *alone(tiny, capsys, "--prompt", "abc", "--max-new-tokens", "6", *sampled, "--seed", "4"),
        *alone(tiny, capsys, "--prompt", "abc", "--max-new-tokens", "6", *sampled, "--seed", "5"),
        *alone(tiny, capsys, "--prompt", "abc", "--max-new-tokens", "6"),
    ]
    assert [answer(row) for row in got] == [answer(row) for row in expected]
    assert [(row["index"], row["sample"]) for row in got] == [(1, 0), (2, 0), (3, 0), (3, 1), (4, 0)]


def test_system_prompt_is_computed_once_and_begins_every_prompt(tiny: Any, capsys: Capture) -> None:
    system, prompts = "Be brief, be kind.", ("Hello", "Good bye", "What?")
    rows = batched(tiny, capsys, *flags_of(prompts), "--system", system, "--max-new-tokens", "6")
    reference = AutoTokenizer.from_pretrained(tiny.source)
    for row, prompt in zip(rows, prompts, strict=True):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        ids = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        tokens = torch.tensor([ids])
        out = tiny.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False)
        assert row["tokens"] == [token for token in out[0, len(ids) :].tolist() if token != 0]
        assert row["timings"]["prompt_tokens"] == len(ids)
        assert row["timings"]["shared_tokens"] >= len(system)


def test_system_prompt_that_is_too_long_is_the_error_of_its_prompts_only(
    tiny: Any, tmp_path: Path, capsys: Capture
) -> None:
    long = {"system": "x" * 60, "chat": False, "max_new_tokens": 2}
    path = jsonl(tmp_path, {"prompt": "a", **long}, {"prompt": "b", **long}, {"prompt": "c", "max_new_tokens": 2})
    with pytest.raises(ValueError, match="2 of 3 answers failed"):
        batched(tiny, capsys, "--prompts", path, "--kv-capacity", "50")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["finish_reason"] for row in rows] == ["error", "error", "length"]


def test_no_more_answers_run_than_may_though_a_system_prompt_is_kept(tiny: Any, capsys: Capture) -> None:
    arguments = [*flags_of(("Hello", "Good bye", "What?")), "--system", "Be brief.", "--max-new-tokens", "4"]
    one_by_one = batched(tiny, capsys, *arguments, "--max-seqs", "1", "--n", "2")
    run_llm_batched.main(["--model-dir", str(tiny.folder), *arguments, "--max-seqs", "1"])
    assert "steps of at most 1 sequences" in capsys.readouterr().err
    together = batched(tiny, capsys, *arguments, "--n", "2")
    assert [answer(row) for row in one_by_one] == [answer(row) for row in together]


def test_system_text_without_a_chat_template_comes_before_each_prompt(tiny: Any, capsys: Capture) -> None:
    got = batched(tiny, capsys, "--no-chat", "--system", "Once ", "--prompt", "upon", "--prompt", "a")
    expected = alone(tiny, capsys, "--no-chat", "--prompt", "Once upon", "--prompt", "Once a")
    assert [row["tokens"] for row in got] == [row["tokens"] for row in expected]


def test_stop_text_ends_an_answer_before_it(tiny: Any, capsys: Capture) -> None:
    arguments = ["--prompt", "Hello, world", "--max-new-tokens", "20", "--no-chat"]
    (whole,) = alone(tiny, capsys, *arguments)
    stop = whole["text"][5:8]
    (row,) = batched(tiny, capsys, *arguments, "--stop", "never there", "--stop", stop)
    assert row["text"] == whole["text"][: whole["text"].index(stop)]
    assert row["finish_reason"] == "stop"
    assert row["tokens"] == whole["tokens"][: len(row["tokens"])]
    assert len(row["tokens"]) < len(whole["tokens"])


def test_windows_may_be_kept_whole(windowed: Any, tiny: Any, capsys: Capture) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (windowed.folder / name).write_bytes((tiny.folder / name).read_bytes())
    arguments = [*flags_of(PROMPTS[::2]), "--max-new-tokens", "9", "--no-chat"]
    expected = [answer(row) for row in alone(windowed, capsys, *arguments)]
    for kind in KINDS:
        for windows in ("program", "none"):
            got = batched(windowed, capsys, *arguments, "--kv-windows", windows, "--cache-kind", kind)
            assert [answer(row) for row in got] == expected


def test_prompt_that_never_fits_is_one_error_and_the_others_are_answered(tiny: Any, capsys: Capture) -> None:
    arguments = ["--max-new-tokens", "3", "--no-chat", "--prompt", "abc", "--prompt", "x" * 97, "--prompt", "de"]
    with pytest.raises(ValueError, match="1 of 3 answers failed"):
        batched(tiny, capsys, *arguments)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["finish_reason"] for row in rows] == ["length", "error", "length"]
    assert "the prompt has 97 tokens and there is room for 96" in rows[1]["error"]
    with pytest.raises(ValueError, match="1 of 3 answers failed"):
        run_llm_batched.main(["--model-dir", str(tiny.folder), *arguments])
    captured = capsys.readouterr()
    assert "error: prompt 2: the prompt has 97 tokens" in captured.err
    assert "[3] de\n" in captured.out


NO_CHAT = ("--no-chat",)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), ValueError, "nothing to answer: give --prompt, or --prompts with a file"),
        (("--prompts", "{folder}/none.txt"), FileNotFoundError, "none.txt"),
        (("--prompts", "{folder}"), OSError, "directory"),
        (("--prompts", "{folder}/empty.txt"), ValueError, "empty.txt: no prompt in it"),
        (("--prompts", "{folder}/blank.jsonl"), ValueError, "blank.jsonl: no prompt in it"),
        (("--prompts", "{folder}/binary.txt"), ValueError, "binary.txt: expected a text file in UTF-8"),
        (
            ("--prompts", "{folder}/torn.jsonl"),
            ValueError,
            "torn.jsonl, line 2: expected a JSON object, got '{\"prompt",
        ),
        (
            ("--prompts", "{folder}/list.jsonl"),
            ValueError,
            'list.jsonl, line 1: expected a JSON object with a text "pro',
        ),
        (
            ("--prompts", "{folder}/key.jsonl"),
            ValueError,
            "key.jsonl, line 3: unknown key 'promt'; known are prompt",
        ),
        (("--prompts", "{folder}/type.jsonl"), ValueError, "type.jsonl, line 1: n: expected an integer, got True"),
        (("--prompts", "{folder}/range.jsonl"), ValueError, "range.jsonl, line 2: top_p: expected more than 0"),
        (("--prompts", "{folder}/surrogate.jsonl"), ValueError, "surrogate.jsonl, line 1: "),
        (("--prompts", "{folder}/stop.jsonl"), ValueError, "stop.jsonl, line 1: stop: expected a list of texts that"),
        (("--prompts", "{folder}/nothing.jsonl", *NO_CHAT), ValueError, "nothing.jsonl, line 2: the prompt has no tok"),
        (("--prompt", "a", "--prompt", "", *NO_CHAT), ValueError, "prompt 2: the prompt has no tokens"),
        (("--prompt", "a", "--max-new-tokens", "-1"), ValueError, "--max-new-tokens: expected 1 or more, got -1"),
        (("--prompt", "a", "--max-seqs", "0"), ValueError, "--max-seqs: expected 1 or more, got 0"),
        (("--prompt", "a", "--kv-capacity", "-5"), ValueError, "--kv-capacity: expected 1 or more, got -5"),
        (("--prompt", "a", "--step-tokens", "0"), ValueError, "--step-tokens: expected 1 or more, got 0"),
        (("--prompt", "a", "--n", "0"), ValueError, "--n: expected 1 or more, got 0"),
        (("--prompt", "a", "--temperature", "-1"), ValueError, "prompt 1: temperature: expected 0 or more, got -1.0"),
        (("--prompt", "a", "--stop", ""), ValueError, "prompt 1: stop: expected a list of texts that are not empty"),
        (
            ("--prompt", "a", "--cache-kind", "paged"),
            LookupError,
            "no cache kind 'paged' .* 'batched-cell' on",
        ),
        (("--prompt", "a", "--cache-kind", "sequence"), ValueError, "'sequence' holds one sequence; use a batched one"),
    ],
)
def test_wrong_input_is_one_error_before_any_work(
    tiny: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    error: type[Exception],
    message: str,
) -> None:
    files = {
        "empty.txt": "",
        "blank.jsonl": "\n \n",
        "binary.txt": b"\xff\xfe\x00",
        "torn.jsonl": '{"prompt": "a"}\n{"prompt": "b"',
        "list.jsonl": '["a"]',
        "key.jsonl": '{"prompt": "a"}\n\n{"prompt": "a", "promt": "b"}',
        "type.jsonl": '{"prompt": "a", "n": true}',
        "range.jsonl": '{"prompt": "a"}\n{"prompt": "a", "top_p": 0}',
        "surrogate.jsonl": '{"prompt": "\\ud800"}',
        "stop.jsonl": '{"prompt": "a", "stop": ""}',
        "nothing.jsonl": '{"prompt": "a"}\n{"prompt": ""}',
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr(run_llm_batched, "LanguageModel", lambda path: pytest.fail("the model was loaded"))
    given = [argument.format(folder=tmp_path) for argument in arguments]
    with pytest.raises(error, match=message):
        run_llm_batched.main(["--model-dir", str(tiny.folder), *given])


def test_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder; export a model with export_llm first"):
        run_llm_batched.main(["--model-dir", str(tmp_path / "none"), "--prompt", "a"])


def test_step_larger_than_the_programs_is_an_error(tiny: Any) -> None:
    with pytest.raises(ValueError, match="step_tokens: expected 1 to 16, the model's limit, got 17"):
        run_llm_batched.main(["--model-dir", str(tiny.folder), "--prompt", "a", "--step-tokens", "17"])


@pytest.fixture
def interrupted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C during the eighth step."""
    step, steps = Engine.step, iter(range(1, 100))

    def stepped(engine: Engine) -> Any:
        if next(steps) == 8:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", stepped)


@pytest.mark.usefixtures("interrupted_step")
def test_ctrl_c_prints_what_is_done_and_how_far_the_rest_is(tiny: Any, tmp_path: Path, capsys: Capture) -> None:
    before = signal.getsignal(signal.SIGINT)
    given = [
        {"prompt": text, "max_new_tokens": new, "chat": False} for text, new in (("abc", 20), ("de", 2), ("fg", 9))
    ]
    arguments = ["--prompts", jsonl(tmp_path, *given), "--max-seqs", "2"]
    with pytest.raises(KeyboardInterrupt):
        batched(tiny, capsys, *arguments)
    captured = capsys.readouterr()
    rows = [json.loads(line) for line in captured.out.splitlines()]
    assert [(row["prompt"], len(row["tokens"]), row["finish_reason"]) for row in rows] == [
        ("abc", 8, "interrupted"),
        ("de", 2, "length"),
        ("fg", 6, "interrupted"),
    ]
    assert "interrupted: 1 of 3 answers are complete" in captured.err
    assert signal.getsignal(signal.SIGINT) is before


def test_failing_step_loses_no_answer_that_is_complete(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    step, steps = Engine.step, iter(range(1, 100))

    def stepped(engine: Engine) -> Any:
        if next(steps) == 6:
            raise RuntimeError("the device is gone")
        return step(engine)

    monkeypatch.setattr(Engine, "step", stepped)
    given = [{"prompt": text, "max_new_tokens": new, "chat": False} for text, new in (("abc", 20), ("de", 2))]
    with pytest.raises(RuntimeError, match="the device is gone"):
        batched(tiny, capsys, "--prompts", jsonl(tmp_path, *given))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["prompt"], row["finish_reason"]) for row in rows] == [("abc", "interrupted"), ("de", "length")]


@pytest.mark.parametrize(("prompt", "status"), [("x" * 97, 2), ("a", 0)], ids=["too long", "good"])
def test_exit_status_says_whether_all_prompts_were_answered(tiny: Any, prompt: str, status: int) -> None:
    code = "from executorch_mlx.examples.llm import command, run_llm_batched; command.run(run_llm_batched.main)"
    arguments = ["--model-dir", str(tiny.folder), "--max-new-tokens", "2", "--no-chat", "--prompt", prompt]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr


def test_progress_and_totals_are_plain_lines_where_there_is_no_terminal(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(answers, "LINE_EVERY_S", 0)
    run_llm_batched.main(
        ["--model-dir", str(tiny.folder), *flags_of(PROMPTS[:2]), "--max-new-tokens", "3", "--kv-capacity", "64"]
    )
    captured = capsys.readouterr()
    assert captured.out.startswith("[1] Hello, world\n")
    assert "\n\n[2] a\n" in captured.out
    assert "0 of 2 answers; 2 running, 0 waiting; cache" in captured.err
    assert "of 64 tokens;" in captured.err
    assert re.search(
        r"\d new tokens in \d+\.\d s, [\d.]+ tokens/s; \d steps of at most 2 sequences, 0 preemptions; the cache held"
        r" at most \d+ tokens",
        captured.err,
    )
    assert "KV cache: batched, float32, 64 tokens; MLX on" in captured.err
    assert "\x1b" not in captured.err + captured.out


def test_progress_is_live_on_a_terminal_and_answers_do_not_mix_with_it(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(command, "console", Console(file=screen, force_terminal=True, width=200))
    rows = batched(tiny, capsys, *flags_of(PROMPTS), "--max-new-tokens", "3")
    assert [row["prompt"] for row in rows] == list(PROMPTS)
    assert re.search(r"/5 answers; \d running, \d waiting", re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", screen.getvalue()))


@pytest.mark.smollm2
@pytest.mark.parametrize("kind", KINDS)
def test_smollm2_answers_in_a_batch_are_those_alone(smollm2: Any, capsys: Capture, kind: str) -> None:
    prompts = ("What is the capital of France?", "Say hello.", "Count to three.", "Why is the sky blue?")
    arguments = [*flags_of(prompts), "--max-new-tokens", "12"]
    got = batched(smollm2, capsys, *arguments, "--cache-kind", kind)
    assert [answer(row) for row in got] == [answer(row) for row in alone(smollm2, capsys, *arguments)]
    assert got[0]["text"] == "The capital of France is Paris."
