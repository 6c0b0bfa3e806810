"""The authority of a run: the key that signs for it, and the changes of that key.

    run.key    authority.json (once the key was changed): the run's id, the key of its seeds, the number of
               changes, and the statements and certificates with which members of older authorities follow

`change_authority` writes run.key.next, then authority.json, then renames the key. If a kill interrupts any
of these steps, the next start has either the old authority or the new one.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.core.base.ids import RunId
from echo2d.core.protocol.seeds import seed_key
from echo2d.errors import OperatorFault, path_fault
from echo2d.net.security.auth import (
    SUCCESSIONS_MAX,
    Succession,
    keep_key,
    load_or_make_key,
    public_bytes,
    read_token_file,
    run_id_of,
    signed,
    write_private,
)
from echo2d.net.security.tls import Authority
from echo2d.store.sealed import sealed, unsealed

KEY_FILE = "run.key"
NEXT_KEY_FILE = "run.key.next"
AUTHORITY_FILE = "authority.json"


@dataclass(frozen=True, slots=True)
class RunAuthority:
    """The run's keys. crossed, older: as in `Authority`."""

    key: Ed25519PrivateKey
    run_id: RunId
    # The key of all samples' seeds. It is never changed, because answers are audited with it.
    seeds: bytes
    number: int = 0  # of changes
    crossed: str = ""
    older: str = ""
    # For members of older authorities, the oldest first.
    successions: tuple[Succession, ...] = ()

    @property
    def certifier(self) -> Authority:
        return Authority(self.key, self.crossed, self.older)


def open_authority(run_dir: Path) -> RunAuthority:
    """The authority of this run; the first start makes its key. OperatorFault: a file is damaged or lost."""
    facts = _facts(run_dir)
    if facts is None:
        key = load_or_make_key(run_dir / KEY_FILE)
        return RunAuthority(key, run_id_of(public_bytes(key)), _seeds_of(key))
    wanted = bytes.fromhex(facts["run_key"])
    for name in (KEY_FILE, NEXT_KEY_FILE):
        path = run_dir / name
        if path.exists() and public_bytes(key := load_or_make_key(path)) == wanted:
            path.replace(run_dir / KEY_FILE)
            return RunAuthority(
                key,
                RunId(facts["run_id"]),
                bytes.fromhex(facts["seeds"]),
                facts["number"],
                facts["crossed"],
                facts["older"],
                tuple(_succession(each) for each in facts["successions"]),
            )
    raise OperatorFault(
        f"{run_dir / KEY_FILE} is not the key that {AUTHORITY_FILE} names: take both from one backup"
    )


def change_authority(run_dir: Path, now: RunAuthority, *, named: bool) -> RunAuthority:
    """Give the run a new key. named: the old key signs the new one, so that members follow; else none follows."""
    key = Ed25519PrivateKey.generate()
    number, certifier = now.number + 1, Authority(key)
    successions: tuple[Succession, ...] = ()
    crossed = older = ""
    if named:
        follows = Succession(public_bytes(key), certifier.certificate, number)
        successions = (*now.successions, signed(now.key, follows))[-SUCCESSIONS_MAX:]
        crossed = now.certifier.cross(certifier)
        older = now.certifier.certificate + now.older
    changed = replace(
        now, key=key, number=number, successions=successions, crossed=crossed, older=older
    )
    next_key = run_dir / NEXT_KEY_FILE
    next_key.unlink(missing_ok=True)
    keep_key(next_key, key)
    write_private(run_dir / AUTHORITY_FILE, sealed(_as_facts(changed), indent=2).decode() + "\n")
    return open_authority(run_dir)


def known_authority(run_dir: Path) -> RunAuthority:
    """Like `open_authority`, but run.key may be lost: then the returned authority has a new key, which signs nothing.

    OperatorFault: no file here says which run it is.
    """
    if (run_dir / KEY_FILE).exists():
        return open_authority(run_dir)
    key, facts = Ed25519PrivateKey.generate(), _facts(run_dir)
    if facts is not None:
        return RunAuthority(key, facts["run_id"], bytes.fromhex(facts["seeds"]), facts["number"])
    for path in sorted((run_dir / "tokens").glob("*.token")):
        return RunAuthority(key, read_token_file(path).run_id, _seeds_of(key))
    raise OperatorFault(
        f"{run_dir} has neither {KEY_FILE} nor {AUTHORITY_FILE} nor a token file: nothing says which run it is"
    )


def _seeds_of(key: Ed25519PrivateKey) -> bytes:
    return seed_key(key.private_bytes_raw())


def _facts(run_dir: Path) -> dict[str, Any] | None:
    """The fields of authority.json; None: the run has its first key. OperatorFault: the file is damaged."""
    path = run_dir / AUTHORITY_FILE
    try:
        facts = unsealed(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise path_fault(f"cannot read {path}", error) from error
    except ValueError as error:
        raise OperatorFault(
            f"{path} is damaged: {error}; take it and {KEY_FILE} from one backup"
        ) from error
    return facts


def _as_facts(authority: RunAuthority) -> dict[str, Any]:
    return {
        "run_id": authority.run_id,
        "number": authority.number,
        "run_key": public_bytes(authority.key).hex(),
        "seeds": authority.seeds.hex(),
        "crossed": authority.crossed,
        "older": authority.older,
        "successions": [
            {**asdict(each), "run_key": each.run_key.hex(), "signature": each.signature.hex()}
            for each in authority.successions
        ],
    }


def _succession(facts: Mapping[str, Any]) -> Succession:
    key, signature = bytes.fromhex(facts["run_key"]), bytes.fromhex(facts["signature"])
    return Succession(key, facts["authority"], facts["number"], signature)
