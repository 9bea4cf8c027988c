"""Configs of the models of the catalogue, as their makers publish them but shorter."""

import json
from pathlib import Path

ROWS = Path(__file__).parents[1] / "data" / "model_configs.jsonl"
CONFIGS = {row["name"]: row["config"] for row in map(json.loads, ROWS.read_text().splitlines())}
