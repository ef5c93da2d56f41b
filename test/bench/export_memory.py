"""Memory and time of exporting a model: what is resident at most, against its weights in the dtype that is exported.

``python test/bench/export_memory.py FOLDER --dtype bfloat16 --quantize 4w``, where FOLDER is a Hugging Face model; with
``--config`` it is written first, with random weights in bfloat16 (``--tokenizer`` names a folder to copy one from).
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch

from executorch_mlx.examples.llm.checkpoint import load_checkpoint, random_model
from executorch_mlx.examples.llm.export import QUANTIZATIONS, export_model


class Peak(threading.Thread):
    """Watches what this process has resident; Linux only."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0.0

    def run(self) -> None:
        """Look every 20 ms."""
        while True:
            self.most = max(self.most, resident_gb())
            time.sleep(0.02)


def resident_gb() -> float:
    """Return what is resident, mapped files included."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) / 1e6


def write_random(folder: Path, config: str, tokenizer: Path) -> None:
    """Write a model of random weights in shards, with a tokenizer."""
    random_model(config, torch.bfloat16).save_pretrained(folder, max_shard_size="700MB")
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Hugging Face model")
    parser.add_argument("--config", help="write the folder first, with random weights of this configuration")
    parser.add_argument("--tokenizer", type=Path, help="with --config: a folder with a tokenizer")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--quantize", choices=QUANTIZATIONS)
    options = parser.parse_args()
    if options.config:
        if options.tokenizer is None:
            parser.error("--config needs --tokenizer")
        write_random(options.folder, options.config, options.tokenizer)
        print("written; run again without --config: what writing took is still resident")
        return
    before, peak = resident_gb(), Peak()
    peak.start()
    start = time.perf_counter()
    model = load_checkpoint(str(options.folder), getattr(torch, options.dtype)).model
    load_s = time.perf_counter() - start
    weights = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    with tempfile.TemporaryDirectory() as output:
        report = export_model(model, output, quantize=options.quantize)
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
    print(f"load {load_s:.1f} s, {stages}; {report.size_bytes / 1e9:.2f} GB written")
    print(
        f"peak {peak.most:.2f} GB, {peak.most / weights:.2f} of {weights:.2f} GB of weights in {options.dtype};"
        f" {before:.2f} GB of it before the model was loaded"
    )


if __name__ == "__main__":
    main()
