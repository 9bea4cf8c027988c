"""The verbs of runs on tensors."""
