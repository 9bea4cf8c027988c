"""The workload `zipf`: popularity, prefixes, arrivals and the bounds of its options."""

from bisect import bisect_right
from collections import Counter
from decimal import Decimal, localcontext
from itertools import accumulate, groupby, islice, pairwise
from types import SimpleNamespace

import pytest

from kvcore.errors import InputError
from kvcore.plugins.manager import Plugins
from kvcore_plugins import hooks
from kvcore_plugins.workload import Zipf, _plain

SECOND = 10**9


def prefixes(workload, blocks):
    """Count the requests of each prefix, identified by the key of its last block."""
    return Counter(request.keys[blocks - 1] for request in workload)


def test_popularity_is_zipf():
    """The prefix of rank r is drawn in proportion to r^-skew."""
    workload = Zipf(requests=20_000, prefixes=5, prefix_tokens=16, levels=1, skew=1.0)
    counts = prefixes(workload, 1)
    harmonic = sum(1 / rank for rank in range(1, 6))
    for prefix in range(5):
        assert counts[prefix] / 20_000 == pytest.approx(1 / (prefix + 1) / harmonic, rel=0.1)


def test_sibling_prefixes_share_all_levels_but_the_last():
    """Prefixes are paths of a tree: siblings share all levels except the last."""
    workload = Zipf(requests=2_000, prefixes=4, skew=0, prefix_tokens=48, levels=3, branching=2)
    paths = {tuple(request.keys[:3]) for request in workload}
    assert [len({path[:length] for path in paths}) for length in (1, 2, 3)] == [1, 2, 4]


def test_block_across_the_prefix_border_is_unique():
    """A block with both prefix and suffix tokens is unique to its request."""
    first, second = Zipf(requests=2, prefixes=1, prefix_tokens=24, suffix_tokens=8)
    assert first.keys[0] == second.keys[0]
    assert first.keys[1] != second.keys[1]


def test_prompts_that_are_all_prefix_are_equal():
    """Without a suffix, equal prefixes are equal prompts, their partial block included."""
    first, second = Zipf(requests=2, prefixes=1, prefix_tokens=24, suffix_tokens=0)
    assert first.keys == second.keys
    assert len(first.keys) == 2


def test_arrivals_are_equal_on_every_machine():
    """Poisson arrivals are the same to the nanosecond on every machine."""
    assert [request.arrival for request in Zipf(requests=5)] == [
        0,
        135_213_201,
        235_125_657,
        384_512_182,
        557_123_733,
    ]


def test_uniform_arrivals_are_evenly_spaced():
    """Uniform arrivals are exactly one mean gap apart."""
    requests = Zipf(requests=4, arrivals="uniform", rate=4)
    assert [request.arrival for request in requests] == [
        0,
        SECOND // 4,
        SECOND // 2,
        750_000_000,
    ]


def test_poisson_gaps_have_mean_and_deviation_of_one_gap():
    """Poisson gaps have the mean 1/rate, and a standard deviation equal to it."""
    arrivals = [request.arrival for request in Zipf(requests=20_000, rate=5)]
    gaps = [after - before for before, after in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(SECOND / 5, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.05)


def test_bursts_arrive_at_once():
    """Bursty requests arrive in groups of `burst`, at the same mean rate."""
    workload = Zipf(requests=20_000, arrivals="bursty", burst=10, rate=5)
    arrivals = [request.arrival for request in workload]
    sizes = {len(list(group)) for _, group in groupby(arrivals)}
    assert sizes == {10}
    assert arrivals[-1] / 20_000 == pytest.approx(SECOND / 5, rel=0.1)


@pytest.mark.parametrize("arrivals", ["poisson", "bursty", "uniform"])
def test_first_request_arrives_at_zero(arrivals):
    """The first request arrives at 0."""
    assert next(iter(Zipf(arrivals=arrivals))).arrival == 0


def test_seed_changes_the_requests():
    """Another seed gives other prefixes, other arrivals and another digest."""
    one, other = Zipf(requests=100, seed=1), Zipf(requests=100, seed=2)
    assert [request.keys for request in one] != [request.keys for request in other]
    assert [request.arrival for request in one] != [request.arrival for request in other]
    assert one.digest != other.digest


def test_prefixes_are_equal_on_every_machine():
    """The first prefixes of the default workload are the same on every machine."""
    heads = [request.keys[127] // 128 for request in Zipf(requests=10)]
    assert heads == [69, 57, 0, 206, 0, 0, 298, 390, 16, 133]


def test_prompts_must_have_tokens():
    """A workload with neither prefix nor suffix tokens raises InputError."""
    with pytest.raises(InputError, match="'prefix_tokens' and 'suffix_tokens' must not both"):
        Zipf(prefix_tokens=0, suffix_tokens=0)


def test_a_seed_beyond_64_bits_has_no_digest():
    """The digest of a workload with a seed beyond 64 bits raises InputError."""
    with pytest.raises(InputError, match="workload zipf: its options have no digest: Int"):
        _ = Zipf(seed=2**70).digest


def test_options_given_as_text_are_converted():
    """Options given as text are converted to their types, `key_tokens` included."""
    plugins = Plugins(extra=[hooks], entry_points=[])
    workload = plugins.build("workload", "zipf:requests=3,rate=2,key_tokens=32")
    assert workload.options() == Zipf(requests=3, rate=2.0, key_tokens=32).options()


def test_requests_are_the_same_without_the_core_in_c(monkeypatch):
    """A request that the core in C copies has the fields of one that Python makes."""
    copied = list(Zipf(requests=50))
    monkeypatch.setattr(_plain, "core", lambda: None)
    assert list(Zipf(requests=50)) == copied


@pytest.mark.parametrize("options", [{}, {"skew": 0, "prefixes": 7}, {"skew": 100, "seed": 5}])
def test_a_prefix_is_the_exact_inverse_of_its_draw(monkeypatch, options):
    """A draw gives the prefix that integers give, at the border of two prefixes too."""
    workload = Zipf(levels=1, **options)
    skew = Decimal(repr(workload.skew))
    with localcontext(prec=24):
        weights = [int(2**60 / Decimal(r) ** skew) for r in range(1, workload.prefixes + 1)]
    ends = list(accumulate(weights))
    borders = {-(-(end << 53) // ends[-1]) for end in ends} - {2**53}  # draws are below 1
    numbers = [*borders, *(border - 1 for border in borders), 0, 2**53 - 1]
    generator = SimpleNamespace(random=iter([number / 2**53 for number in numbers]).__next__)
    monkeypatch.setattr(Zipf, "_generator", lambda *_: generator)
    exact = [bisect_right(ends, number * ends[-1] >> 53) for number in numbers]
    assert list(islice(workload._popular(), len(numbers))) == exact
