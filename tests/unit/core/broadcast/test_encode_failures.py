"""Forms that the seed cannot make, or has lost; through the whole machine."""

from echo2d.core.base.ids import Digest, FormId, SegmentId
from echo2d.core.broadcast.publishing import ENCODE_FAILURES_MAX, ENCODE_RETRY_S
from echo2d.core.protocol.control_messages import (
    EncodeFailed,
    EncodeVersion,
    ForgetForm,
    FormEncoded,
    Heartbeat,
    SegmentEncoded,
    VersionsRevoked,
)
from tests.support.catch_up import served
from tests.support.coordinator_world import (
    World,
    form_of,
    messages,
    publish_step,
    rules,
    train,
    version_digest,
)
from tests.support.publishing import broadcast, deliver_seed, publish_again, published


def test_a_failed_encoding_is_tried_again_and_then_given_up() -> None:
    world = published("a")
    world.pending.clear()
    seed = world.peers["seed"]
    for number in range(1, ENCODE_FAILURES_MAX):
        world.say(seed, EncodeFailed(form_of(world), "disk full"))
        assert len(messages(seed, EncodeVersion)) == number
        world.pass_time(ENCODE_RETRY_S)
        assert len(messages(seed, EncodeVersion)) == number + 1
        world.pending.clear()
    world.say(seed, EncodeFailed(form_of(world), "disk full"))
    assert world.stopped == "version 0 cannot be encoded: disk full"


def trained(*workers: str, steps: int) -> World:
    """A run with these workers after so many train steps; the last version may still be on its way."""
    world = World(rules(shape="chain", staleness_max=2))
    world.connect("seed", kind="seed", slots=0)
    for name in workers:
        world.connect(name)
    train(world, steps)
    return world


def serving(*workers: str) -> World:
    """They serve version 1, and version 2 is whole at the seed; nobody has it."""
    world = trained(*workers, steps=1)
    publish_step(world, 2)
    deliver_seed(world)
    world.pending.clear()
    for peer in world.peers.values():
        peer.ready = None
    return world


def fail_for_good(world: World) -> FormId:
    """The seed has lost a frame, and cannot encode the form again."""
    seed, form = world.peers["seed"], form_of(world)
    if messages(seed, EncodeVersion)[-1].base_path is not None:
        world.say(seed, EncodeFailed(form, "the base is gone", lacks_base=True))
        world.pending.clear()
        form = form_of(world)
    for _ in range(ENCODE_FAILURES_MAX):
        for peer in world.peers.values():
            world.say(peer, Heartbeat(0))
        world.say(seed, EncodeFailed(form, "frame 3 is lost"))
        world.pass_time(ENCODE_RETRY_S)
    return form


def test_a_version_whose_frames_are_gone_is_given_up_and_the_next_one_spreads() -> None:
    world = serving("a", "b")
    form = fail_for_good(world)
    assert world.stopped is None
    assert world.state.status().broadcast is None
    assert world.state.status().faults[-1].text == (
        "version 2 is given up, older ones are served until the next is published: frame 3 is lost"
    )
    assert all(messages(peer, ForgetForm)[-1].form == form for peer in world.peers.values())
    orders = len(messages(world.peers["seed"], EncodeVersion))
    world.connect("seed", kind="seed", slots=0)  # and it is not asked for again
    assert len(messages(world.peers["seed"], EncodeVersion)) == orders
    publish_step(world, 3)
    world.work()
    assert served(world) == {3}


def test_a_run_stops_without_a_version_that_its_learner_needs() -> None:
    world = published("a")
    deliver_seed(world)
    fail_for_good(world)
    assert world.stopped == "version 0 cannot be encoded: frame 3 is lost"


def test_a_waiting_version_replaces_one_whose_frames_are_gone() -> None:
    world = published("a")
    deliver_seed(world)
    publish_again(world)
    form = fail_for_good(world)
    assert world.stopped is None
    assert broadcast(world).form != form


def test_a_form_that_differs_from_its_signed_root_fails() -> None:
    world = published("a")
    deliver_seed(world)
    other = SegmentEncoded(form_of(world), SegmentId(0), Digest(bytes([1]) * 32))
    world.say(world.peers["seed"], other)
    assert not world.peers["seed"].closed
    assert "segment 0 is not the one that was signed" in world.state.status().faults[-1].text
    world.pass_time(ENCODE_RETRY_S)
    assert len(messages(world.peers["seed"], EncodeVersion)) == 2


def test_only_the_seed_encodes_and_only_what_was_published() -> None:
    world = published("a")
    world.pending.clear()
    form = form_of(world)
    world.say(world.peers["a"], SegmentEncoded(form, SegmentId(0), Digest(bytes(32))))
    assert world.peers["a"].closed
    world.say(world.peers["seed"], SegmentEncoded(form, SegmentId(0), Digest(bytes(32))))
    world.say(world.peers["seed"], FormEncoded(form, version_digest(9), 1, 1, 1, 0.1))
    assert world.peers["seed"].closed
    assert broadcast(world).whole is False


DIFFERS = "versions/2-0 is not the snapshot that was published"


def differ(world: World) -> None:
    """The seed reads other bytes than were published, and again when it tries once more."""
    for _ in range(2):
        for peer in world.peers.values():
            world.say(peer, Heartbeat(0))
        world.say(world.peers["seed"], EncodeFailed(form_of(world), DIFFERS, differs=True))
        world.pass_time(ENCODE_RETRY_S)


def publish_wrong(*workers: str) -> World:
    """Workers serve version 1; of version 2 nothing is encoded yet."""
    world = trained(*workers, steps=1)
    publish_step(world, 2)
    world.pending.clear()
    return world


def test_a_version_whose_files_differ_from_the_published_ones_is_revoked() -> None:
    world = publish_wrong("a", "b")
    form = form_of(world)
    differ(world)
    assert world.stopped is None
    assert world.state.status().broadcast is None
    assert world.state.status().faults[-1].text == f"version 2 is revoked: {DIFFERS}"
    (revoked,) = messages(world.peers["a"], VersionsRevoked)
    assert [key.version for key in revoked.versions] == [2]
    world.say(world.peers["seed"], EncodeFailed(form, DIFFERS, differs=True))
    assert len(messages(world.peers["a"], VersionsRevoked)) == 1, "it was said before"
    publish_step(world, 3)
    world.work()
    assert served(world) == {3}


def test_a_run_whose_only_version_differs_stops_and_waits_for_another_publish() -> None:
    world = published("a")
    world.pending.clear()
    differ(world)
    assert world.stopped == f"version 0 is revoked: {DIFFERS}"
    before = len(messages(world.peers["seed"], EncodeVersion))
    world.crash()
    world.connect("seed", kind="seed", slots=0)
    assert len(messages(world.peers["seed"], EncodeVersion)) == before
    assert world.state.status().newest_version is None


def test_a_copy_that_rots_later_revokes_no_version() -> None:
    world = trained("a", "b", steps=2)
    world.work()
    assert served(world) == {2}
    world.connect("c")
    seed = world.peers["seed"]
    order = messages(seed, EncodeVersion)[-1]
    for _ in range(ENCODE_FAILURES_MAX):
        for peer in world.peers.values():
            world.say(peer, Heartbeat(0))
        world.say(seed, EncodeFailed(order.form, DIFFERS, differs=True))
        world.pass_time(ENCODE_RETRY_S)
    assert world.stopped is None
    assert messages(world.peers["a"], VersionsRevoked) == []
    assert served(world) >= {2}
