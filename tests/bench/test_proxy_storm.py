"""Ten thousand requests through real servers, some of which are killed and restarted."""

import asyncio

from helpers.processes import bad_day


def test_ten_thousand_requests_survive_killed_servers(tmp_path):
    """Four servers answer 10,000 requests correctly despite five kills at random moments.

    `bad_day` describes what is checked.
    """
    asyncio.run(bad_day(tmp_path, servers=4, requests=10_000, kills=5))
