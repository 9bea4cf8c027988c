"""The verb, run as a click command."""

from click.testing import CliRunner

from kvcore_reuse import reuse


def test_blocks_are_counted():
    """Of two prompts with 16 blocks in common and one more each, 16 are used again."""
    workload = "zipf:requests=2,prefixes=1,prefix_tokens=256,suffix_tokens=16"
    assert CliRunner().invoke(reuse, [workload]).output.startswith("16 of 18 blocks are")
