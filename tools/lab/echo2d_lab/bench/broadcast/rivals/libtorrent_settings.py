"""The settings of libtorrent that were tried; the broadcast page has the result of each. Standard library only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

PIECE_KIB = 256
NO_LIMIT = -1  # of unchoke slots
RATE_BASED = 2  # of libtorrent's choking_algorithm_t
FASTEST_UPLOAD = 1  # of libtorrent's seed_choking_algorithm_t
PLAIN = 2  # libtorrent's enc_policy.pe_disabled


@dataclass(frozen=True, slots=True)
class TorrentSettings:
    """changed: values that are not libtorrent's defaults. super_seeding: of the seed. v1_only: no hash trees of
    BitTorrent v2.
    """

    changed: Mapping[str, object] = field(default_factory=dict)
    super_seeding: bool = False
    piece_kib: int = PIECE_KIB
    v1_only: bool = False


QUEUES = {
    "max_out_request_queue": 2000,
    "max_allowed_in_request_queue": 10_000,
    "request_queue_time": 10,
    "send_buffer_watermark": 4 << 20,
    "send_buffer_low_watermark": 256 << 10,
    "send_buffer_watermark_factor": 200,
}
QUICK_START = {"out_enc_policy": PLAIN, "in_enc_policy": PLAIN, "smooth_connects": False}
SMALL_QUEUES = {
    "max_out_request_queue": 16,
    "request_queue_time": 1,
    "send_buffer_watermark": 128 << 10,
    "whole_pieces_threshold": 1,
}
COMBINED = {
    **QUICK_START,
    **SMALL_QUEUES,
    "unchoke_slots_limit": NO_LIMIT,
    "strict_end_game_mode": False,
    "initial_picker_threshold": 0,
}
# The settings by the NAME in `--against libtorrent:NAME`.
TRIED: Mapping[str, TorrentSettings] = {
    "default": TorrentSettings(),
    "unlimited-unchokes": TorrentSettings({"unchoke_slots_limit": NO_LIMIT}),
    "super-seeding": TorrentSettings(super_seeding=True),
    "loose-end-game": TorrentSettings({"strict_end_game_mode": False}),
    "large-queues": TorrentSettings(QUEUES),
    "small-queues": TorrentSettings(SMALL_QUEUES),
    "rate-based-choker": TorrentSettings({"choking_algorithm": RATE_BASED}),
    "fastest-upload": TorrentSettings({"seed_choking_algorithm": FASTEST_UPLOAD}),
    "two-slots": TorrentSettings({"unchoke_slots_limit": 2, "unchoke_interval": 1}),
    "plain-v1": TorrentSettings(QUICK_START, v1_only=True),
    "rarest-first": TorrentSettings({"initial_picker_threshold": 0}),
    "small-pieces": TorrentSettings(piece_kib=64),
    "tiny-pieces": TorrentSettings(piece_kib=16),
    "large-pieces": TorrentSettings(piece_kib=1024),
    "combined": TorrentSettings(COMBINED, piece_kib=64, v1_only=True),
}
BEST = "combined"
