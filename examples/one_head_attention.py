"""Work the attention of one head out by hand: what a KV cache is read for, in plain Python.

Run it with `python examples/one_head_attention.py`.
"""

from __future__ import annotations

from kvcore_lab.demo import OneHead

QUERY = [1, 0]
KEYS = [[2, 0], [1, 0], [0, 0], [-1, 0]]
VALUES = [[10, 0], [5, 0], [1, 0], [0, 0]]


def main() -> None:
    """Print one decode step, and what the next one has to add."""
    head = OneHead(QUERY, KEYS, VALUES)
    print("1. score each cached key against the query  ", _row(head.scores, 0))
    print("2. raise e to the scores                    ", _row(head.exponentials))
    print("3. add these up                             ", _row([head.total]))
    print("4. divide by the sum: weights               ", _row(head.weights))
    print("5. weigh the cached values: the output      ", _row(head.output))

    later = OneHead([0, 1], [*KEYS, [0, 1]], [*VALUES, [3, 4]])
    print("   the next token, with one row more to read", _row(later.output))


def _row(numbers: list[float], places: int = 3) -> str:
    return " ".join(f"{number:6.{places}f}" for number in numbers)


if __name__ == "__main__":
    main()
