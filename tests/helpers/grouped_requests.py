"""Cache groups, and requests for servers with them."""

from __future__ import annotations

from random import Random

from kvcore import Request
from kvcore_plugins.cache_groups import LayerGroup

FULL, STATE, WINDOW = LayerGroup("full", 8), LayerGroup("state", 8), LayerGroup("window", 8, 30)
GROUPS = {
    "window": [FULL, WINDOW],
    "state": [FULL, STATE],
    "three": [FULL, WINDOW, STATE],
    "chunk": [FULL, LayerGroup("chunk", 8, 32)],
    "two sizes": [LayerGroup("full", 16), LayerGroup("window", 8, 20)],
}


def grouped_requests(seed, count=40):
    """Return requests whose prompts continue each other, some with keys for their output."""
    rng, made, known, now = Random(seed), [], [], 0
    for number in range(count):
        now += rng.randrange(30_000_000)
        keys = [f"{number}/{index}" for index in range(rng.randint(1, 20))]
        if known and rng.random() < 0.6:
            earlier = rng.choice(known)
            keys = earlier[: rng.randint(1, len(earlier))] + keys[:6]
        known.append(keys)
        prompt, output = max(1, len(keys) * 8 - rng.randrange(8)), rng.choice((1, 5, 40, 80))
        generated = (prompt + output) // 8 - prompt // 8
        made.append(
            Request(
                id=number,
                arrival=now,
                prompt_tokens=prompt,
                output_tokens=output,
                keys=keys,
                output_keys=[f"o{number}/{index}" for index in range(generated)]
                if rng.random() < 0.3
                else [],
                key_tokens=8,
            )
        )
    return made
