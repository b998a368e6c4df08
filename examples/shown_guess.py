"""An environment that answers with a picture: the policy says how many squares a picture has, sees as many as it said, drawn at
that moment, and tries again.

    scripts/quickstart.sh --images        # once: makes the model, the pictures and the data that the configuration names
    megappo train configs/quickstart_images.yaml run.name=shown_guess rollout.max_response_tokens=64 \\
        rollout.environment.path=examples/shown_guess.py rollout.environment.function=show rollout.environment.max_turns=3 \\
        rollout.environment.images=2 'reward.parts=[{path: examples/second_guess.py, function: last_guess}]'

docs/environments.md has everything that an environment sees and may return.
"""

from __future__ import annotations

from typing import Any

from PIL import Image

from megappo.rollout.turn import TextTurn

CELL = 16
"""Pixels of a square with its margin."""


def show(turn: TextTurn, says: str = "No: <image>") -> dict[str, Any] | None:
    """A message with the picture of this guess, or None: the guess is right, and the trajectory ends."""
    if turn.response.strip() == turn.answer:
        return None
    return {"role": "user", "content": says, "images": [picture(turn.response)]}


def picture(guess: str) -> Image.Image:
    """As many red squares as the guess says, at most 31; of a guess that is no number as many as it has characters."""
    count = (int(guess) if guess.strip().isdecimal() else len(guess)) % 32
    image = Image.new("RGB", (8 * CELL, 4 * CELL), (245, 245, 240))
    for place in range(count):
        x, y = CELL * (place % 8), CELL * (place // 8)
        image.paste((220, 40, 40), (x + 2, y + 2, x + CELL - 2, y + CELL - 2))
    return image
