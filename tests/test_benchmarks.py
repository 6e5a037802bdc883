"""The model benchmark at its smallest: every proxy, mode and provider of this machine, compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_models(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "bench_models.py", "--tiny", "--tokens", "70",
               "--batch", "3", "--rounds", "1", "--out", tmp_path]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (figures,) = tmp_path.glob("*.json")
    found = json.loads(figures.read_text())
    assert [row["model"] for row in found["models"]] == [
        "Qwen3.5-9B", "Kimi-Linear", "GLM-5-Flash-like",
    ]  # fmt: skip
    for row in found["models"]:
        assert set(row["ms"]) == {"transformers", "short-conv"} and not row["failed"]
        for modes in row["ms"].values():
            assert set(modes) == {"prefill", "decode", "train"} and min(modes.values()) > 0
    assert set(found["loop"][0]["tokens_per_s"]) == {"transformers", "short-conv"}
    assert figures.with_suffix(".png").stat().st_size > 10000
