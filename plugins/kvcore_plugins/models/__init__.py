"""Models from the files of others: `huggingface.py`, with `quantisation.py` below it."""
