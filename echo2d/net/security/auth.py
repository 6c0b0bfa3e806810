"""Authenticates peers, callers and the run: token files, keys, proofs of possession, signatures.

    enrolment     bearer secret + public key + proof (signature over a hash of the secret)
                  -> peer id
    control link  client: peer id, nonce (headers)
                  server: Challenge(nonce, the run key's signature over both nonces and the peer id)
                  client: Answer(the peer key's signature over both nonces and the run's key),
                  then its Hello
    HTTP API      bearer secret
    succession    when the run's authority is changed on purpose, the old key signs the new one
                  (in the Challenge); a member that has followed never obeys a lower number again

A recorded control link therefore cannot be replayed, and a worker talks to no coordinator but its
own. Every signed text begins with a prefix of its kind, so that no signature can be used for another text.
Not here: the table of issued credentials (`runtime/run_dir/access_table.py`).
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo2d.core.base.codec import Codec
from echo2d.core.base.ids import PEER_ID_CHARS, PeerId, RunId
from echo2d.errors import IntegrityFault, OperatorFault, PeerFault, path_fault

Role = Literal[
    "worker", "learner", "gateway", "agent", "tinker", "viewer", "operator", "seed", "auditor"
]
# The roles of the coordinator's child processes, the seed and the auditor. It gives them their keys directly.
OWN_ROLES = ("seed", "auditor")
TokenRole = Literal["worker", "learner", "gateway", "agent", "tinker", "viewer", "operator"]

PEER_KEY_BYTES = 32
AUTH_NONCE_BYTES = 32
SUCCESSIONS_MAX = (
    8  # in a Challenge: a member may have been away while the authority changed this often
)
# A token file is about 1 KB, most of it the certificate.
TOKEN_FILE_BYTES_MAX = 16 << 10
_COPY_AGAIN = ": expected a file of `echo2d token create`, such as box-1.token; copy it again if it was cut off"

ENROL_PATH = "/v1/enrol"
CONTROL_LINK_PATH = "/v1/worker"
PEER_HEADER = "X-Echo2d-Peer"
NONCE_HEADER = "X-Echo2d-Nonce"

log = logging.getLogger("echo2d.auth")


class Denied(PeerFault):
    """The caller may not do this.

    status: 401 (caller not known) or 403 (known, but not allowed). code: a short word.
    """

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a valid token."""

    name: str
    role: Role


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A peer whose key is bound to a valid token."""

    peer: PeerId
    public_key: bytes
    role: Role
    trusted: bool = False  # by the run's operator
    cordoned: bool = False  # the operator has taken it out of service
    token: str = ""  # the token's name; empty: it is one of our own processes


# --- keys


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def peer_id_of(public_key: bytes) -> PeerId:
    return PeerId(blake3(public_key).hexdigest()[:PEER_ID_CHARS])


def run_id_of(run_key: bytes) -> RunId:
    """The run's id, derived from its public key."""
    return RunId(blake3(run_key).hexdigest()[:16])


def load_or_make_key(path: Path) -> Ed25519PrivateKey:
    """The key in the file, which is created (mode 0600) if it does not exist.

    Processes that create it at the same time all get the same key.
    OperatorFault: the file is not a readable key, or cannot be written.
    """
    try:
        return _key_in(path.read_text())
    except FileNotFoundError:
        keep_key(path, Ed25519PrivateKey.generate())
        return load_or_make_key(path)
    except (OSError, ValueError) as error:
        raise OperatorFault(f"{path} is not a readable key: {error}") from error


def _key_in(text: str) -> Ed25519PrivateKey:
    """The key in a key file. ValueError: the file was damaged; a flipped bit would make another run or worker."""
    key, _, check = text.partition(" ")
    if check != _check_of(key):
        raise ValueError("the file is damaged")
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key))


def _check_of(key: str) -> str:
    # A key file has a check sum of 4 bytes.
    return blake3(key.encode()).hexdigest(4)


def keep_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Create the key file, unless another process was first."""
    # `os.link` fails if another process made the key first; a rename would replace that key.
    mine = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    text = key.private_bytes_raw().hex()
    write_private(mine, f"{text} {_check_of(text)}")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    except OSError as error:
        raise path_fault(f"cannot write {path}", error) from error
    finally:
        mine.unlink()


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, replacing an old one whole or not at all."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise path_fault(f"cannot write {path}", error) from error


# --- token files


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The content of a file from `echo2d token create`."""

    name: str
    role: TokenRole
    secret: str
    run_key: str  # hex
    url: str = ""  # empty: it was not known when the token was created
    authority: str = ""  # the certificate, PEM
    run: str = ""  # the run's id; empty: the id that follows from run_key
    number: int = 0  # how often the authority had been changed

    @property
    def run_id(self) -> RunId:
        return RunId(self.run) if self.run else run_id_of(bytes.fromhex(self.run_key))


def write_token_file(path: Path, token: TokenFile) -> None:
    write_private(path, json.dumps(asdict(token), indent=2) + "\n")


def read_token_file(path: Path) -> TokenFile:
    """The token in the file. OperatorFault: missing, unreadable, or not a token file."""
    try:
        with path.open("rb") as file:
            _warn_of_readers(path, file.fileno())
            facts = json.loads(file.read(TOKEN_FILE_BYTES_MAX))
            # A newer echo2d may have written more fields.
            names = [field.name for field in dataclasses.fields(TokenFile) if field.name in facts]
            token = TokenFile(**{name: facts[name] for name in names})
        right = all(
            type(value) is (int if name == "number" else str)
            for name, value in asdict(token).items()
        ) and token.role in get_args(TokenRole)
        right = right and len(bytes.fromhex(token.run_key)) == PEER_KEY_BYTES
        # The secret becomes a header.
        right = right and token.secret.isascii() and token.secret.isprintable()
    except FileNotFoundError as error:
        raise OperatorFault(
            f"there is no token file {path}: start `echo2d coordinate` first, which makes the token files "
            "of its own host; `echo2d token create` makes all others"
        ) from error
    except OSError as error:
        raise path_fault(f"cannot read token file {path}", error) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise OperatorFault(f"{path} is not a token file{_COPY_AGAIN}") from error
    if not right:
        raise OperatorFault(f"{path} is not a token file{_COPY_AGAIN}")
    return token


def _warn_of_readers(path: Path, descriptor: int) -> None:
    if os.fstat(descriptor).st_mode & 0o077:
        log.warning("token file %s can be read by other users; chmod 600 it", path)


def secret_hash(secret: str) -> bytes:
    """The stored form of a secret. It has 256 bits of entropy, so a plain hash is enough."""
    return hashlib.sha256(b"echo2d secret\0" + secret.encode()).digest()


# --- proofs


def verifies(public_key: bytes, signature: bytes, text: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Succession:
    """A change of the run's authority, signed by the previous key."""

    run_key: bytes  # the new public key
    authority: str  # its certificate, PEM
    number: int  # of the changes so far
    signature: bytes = b""

    @property
    def text(self) -> bytes:
        """The text that the previous key signs."""
        number = self.number.to_bytes(8, "big")
        return b"echo2d succession 1\0" + number + self.run_key + self.authority.encode()


@dataclass(frozen=True, slots=True)
class Challenge:
    """The first frame of a control link: the coordinator proves that it holds the run's key.

    successions: how this key followed from the earlier ones, the oldest first.
    """

    nonce: bytes
    signature: bytes
    successions: tuple[Succession, ...] = ()


@dataclass(frozen=True, slots=True)
class ChallengeAnswer:
    """The peer's first frame: it proves that it holds its own key."""

    signature: bytes


CHALLENGE = Codec({"Challenge": Challenge}, bytes_max=16 << 10)
ANSWER = Codec({"Answer": ChallengeAnswer}, bytes_max=1024)


def _enrol_text(secret: str) -> bytes:
    return b"echo2d enrol 1\0" + secret_hash(secret)


def enrol_proof(key: Ed25519PrivateKey, secret: str) -> bytes:
    return key.sign(_enrol_text(secret))


def is_enrol_proof(public_key: bytes, proof: bytes, secret: str) -> bool:
    return verifies(public_key, proof, _enrol_text(secret))


def _challenge_text(client_nonce: bytes, nonce: bytes, peer: PeerId) -> bytes:
    return b"echo2d challenge 1\0" + client_nonce + nonce + peer.encode()


def _answer_text(client_nonce: bytes, nonce: bytes, run_key: bytes) -> bytes:
    return b"echo2d answer 1\0" + client_nonce + nonce + run_key


def challenge(
    run_key: Ed25519PrivateKey,
    client_nonce: bytes,
    peer: PeerId,
    successions: tuple[Succession, ...] = (),
) -> Challenge:
    nonce = secrets.token_bytes(AUTH_NONCE_BYTES)
    return Challenge(nonce, run_key.sign(_challenge_text(client_nonce, nonce, peer)), successions)


def answer(
    key: Ed25519PrivateKey, run_key: bytes, client_nonce: bytes, asked: Challenge
) -> ChallengeAnswer:
    """The answer to a challenge. IntegrityFault: the challenger does not hold the run's key."""
    text = _challenge_text(client_nonce, asked.nonce, peer_id_of(public_bytes(key)))
    if len(asked.nonce) != AUTH_NONCE_BYTES or not verifies(run_key, asked.signature, text):
        raise IntegrityFault("the coordinator does not hold the key of this run")
    return ChallengeAnswer(key.sign(_answer_text(client_nonce, asked.nonce, run_key)))


def is_answer(
    public_key: bytes, run_key: bytes, client_nonce: bytes, asked: Challenge, given: ChallengeAnswer
) -> bool:
    return verifies(public_key, given.signature, _answer_text(client_nonce, asked.nonce, run_key))


# --- successions


def last_of(run_key: bytes, number: int, named: Sequence[Succession]) -> Succession | None:
    """The last succession of the chain that begins at this key, each signed by the previous key. None: the chain is
    empty.
    """
    found = None
    for each in named[:SUCCESSIONS_MAX]:
        if each.number > number and verifies(run_key, each.signature, each.text):
            found, run_key, number = each, each.run_key, each.number
    return found


def signed(old: Ed25519PrivateKey, follows: Succession) -> Succession:
    signature = old.sign(follows.text)
    return Succession(follows.run_key, follows.authority, follows.number, signature)


# --- roots


def _root_text(root: bytes) -> bytes:
    return b"echo2d root 1\0" + root


def sign_root(run_key: Ed25519PrivateKey, root: bytes) -> bytes:
    return run_key.sign(_root_text(root))


def verify_root(run_key: bytes, root: bytes, signature: bytes) -> None:
    """IntegrityFault unless the run's key signed these root bytes."""
    if not verifies(run_key, signature, _root_text(root)):
        raise IntegrityFault("the signature of a root is not by the key of this run")
