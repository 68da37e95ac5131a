"""The studies that ship with leakgauge, with their titles. Does not import torch, so that listing is fast."""

from __future__ import annotations

import tomllib
from importlib import resources


def shipped() -> dict[str, str]:
    """The name and the title of each study that ships with leakgauge."""
    files = sorted(resources.files("leakgauge.studies").iterdir(), key=lambda item: item.name)
    texts = {item.name.removesuffix(".toml"): item.read_text("utf-8") for item in files if item.name.endswith(".toml")}
    return {name: str(tomllib.loads(text).get("title", "")) for name, text in texts.items()}
