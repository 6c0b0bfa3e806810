"""What versions weigh is counted once, and kept of the newest ones."""

from echo2d.core.cluster.sent_versions import VERSIONS_MEASURED_MAX, SentVersions


def test_the_newest_versions_are_kept_and_all_are_counted() -> None:
    sent = SentVersions()
    for version in range(2 * VERSIONS_MEASURED_MAX):
        sent.encoded(version, 10, 100)
        sent.seed_sent(version, 1.5)
        sent.check()
    newest = range(VERSIONS_MEASURED_MAX, 2 * VERSIONS_MEASURED_MAX)
    assert list(sent.by_version) == list(sent.seed_copies) == list(newest)
    assert (sent.wire_bytes, sent.full_bytes) == (
        20 * VERSIONS_MEASURED_MAX,
        200 * VERSIONS_MEASURED_MAX,
    )


def test_a_version_that_is_measured_again_is_the_newest() -> None:
    sent = SentVersions()
    for version in (1, 2, 1):
        sent.seed_sent(version, float(version))
    assert list(sent.seed_copies.items()) == [(2, 2.0), (1, 1.0)]
