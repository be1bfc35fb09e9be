from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from octavo.router.metrics import TOKEN_SECONDS, TokenHistogram

SECONDS = st.one_of(st.sampled_from(TOKEN_SECONDS), st.floats(0, 100))


@given(st.lists(SECONDS, max_size=20))
def test_a_token_histogram_counts_as_a_histogram_does(amounts):
    found = []
    for kind in (Histogram, TokenHistogram):
        registry = CollectorRegistry()
        child = kind("h", "Text.", ["model"], registry=registry, buckets=TOKEN_SECONDS).labels("m")
        for amount in amounts:
            child.observe(amount)
        (family,) = registry.collect()
        found.append([s for s in family.samples if not s.name.endswith("_created")])
    assert found[0] == found[1]
