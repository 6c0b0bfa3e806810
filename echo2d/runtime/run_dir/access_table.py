"""The access table: the tokens of a run and the peers enrolled with them, in SQLite.

`echo2d token` and a running coordinator share the table. Every write is a transaction, and the
coordinator rereads the table every second (`AccessTable.reload`). A token is valid until it expires
or is revoked, and its peers lose access with it. Secrets are stored as hashes. `now_s` is Unix
time. Methods that write or reload block; `caller` and `peer` answer from memory.
"""

import re
import secrets
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast, get_args

from echo2d.core.base.ids import PeerId
from echo2d.core.cluster.membership import CONVICTED
from echo2d.errors import OperatorFault, StoreFault
from echo2d.net.security.auth import (
    Caller,
    Denied,
    KnownPeer,
    Role,
    TokenFile,
    TokenRole,
    is_enrol_proof,
    peer_id_of,
    secret_hash,
)
from echo2d.runtime.run_dir.run_directory import RunDirectory

# A token's name becomes a file name.
NAME_RULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# The whole table is read every second.
TOKENS_MAX = 10_000
# Enrolled peers, for the same reason; twenty times the largest fleet.
ENROLLED_MAX = 10_000
SCHEMA = (
    """CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, secret_hash BLOB NOT NULL UNIQUE,
    max_workers INTEGER, expires_at REAL, revoked INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE IF NOT EXISTS peers (
    peer TEXT PRIMARY KEY, public_key BLOB NOT NULL, token TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS convictions (
    peer TEXT PRIMARY KEY, reason TEXT NOT NULL, at REAL NOT NULL)""",
)

# Peers of revoked and expired tokens are kept, so that they are told why, until their room is needed.
FORGET_INVALID = """DELETE FROM peers WHERE token IN
    (SELECT name FROM tokens WHERE revoked OR expires_at <= ?)"""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of the table. max_workers, expires_at (Unix time): None means no limit."""

    name: str
    role: TokenRole
    secret_hash: bytes
    max_workers: int | None
    expires_at: float | None
    revoked: bool

    def fault(self, now_s: float) -> Denied | None:
        """Why the token is not valid now; None if it is valid."""
        if self.revoked:
            return Denied(403, "revoked", f"token {self.name} was revoked")
        if self.expires_at is not None and now_s >= self.expires_at:
            return Denied(403, "expired", f"token {self.name} has expired")
        return None


@dataclass(frozen=True, slots=True)
class Conviction:
    """Why an audit convicted a peer, and when (Unix time)."""

    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Enrolment:
    """A worker's request: its token's secret, its key, and the proof that it owns the key."""

    secret: str
    public_key: bytes
    proof: bytes


class AccessTable:
    """Tokens and peers of one run: on disk, and in memory as last read."""

    def __init__(self, run: RunDirectory, trusted: Collection[str] = ()) -> None:
        """trusted: the names of tokens whose workers the operator trusts."""
        self._run = run
        self._trusted = frozenset(trusted)
        self._path = run.path / "access.sqlite"
        self._own: dict[PeerId, KnownPeer] = {}
        self._convicted: dict[PeerId, Conviction] = {}
        self._tokens: dict[bytes, TokenRow] = {}
        self._peers: dict[PeerId, tuple[bytes, TokenRow]] = {}
        try:
            with self._database() as database:
                for statement in SCHEMA:
                    database.execute(statement)
            self._path.chmod(0o600)
            self.reload()
        except StoreFault as fault:
            raise OperatorFault(f"cannot open the access table {fault}") from fault

    # --- people --------------------------------------------------------------

    def create(
        self,
        name: str,
        role: str,
        *,
        max_workers: int | None = None,
        expires_at: float | None = None,
    ) -> TokenFile:
        """Create a token. Its secret exists only in the returned file.

        OperatorFault: the name is taken or malformed, the role is unknown, or the table is full.
        """
        if NAME_RULE.fullmatch(name) is None:
            raise OperatorFault(
                f"token name {name!r}: expected up to 64 letters, digits, dots, dashes, underscores"
            )
        if role not in get_args(TokenRole):
            raise OperatorFault(f"role {role!r}: expected {', '.join(get_args(TokenRole))}")
        secret = secrets.token_urlsafe(32)
        with self._database() as database:
            if database.execute("SELECT count(*) FROM tokens").fetchone()[0] >= TOKENS_MAX:
                raise OperatorFault(
                    f"expected fewer than {TOKENS_MAX} tokens in this run; it has that many already"
                )
            row = (name, role, secret_hash(secret), max_workers, expires_at)
            if (
                database.execute(
                    "INSERT OR IGNORE INTO tokens VALUES (?, ?, ?, ?, ?, 0)", row
                ).rowcount
                == 0
            ):
                raise OperatorFault(f"a token named {name} exists already")
        self.reload()
        facts = {
            "run_key": self._run.public_key.hex(),
            "authority": self._run.authority.certificate,
        }
        return TokenFile(name, cast("TokenRole", role), secret, **facts)

    def revoke(self, name: str) -> None:
        """Revoke a token: its callers and peers lose access within a second."""
        with self._database() as database:
            if (
                database.execute("UPDATE tokens SET revoked = 1 WHERE name = ?", (name,)).rowcount
                == 0
            ):
                raise OperatorFault(f"there is no token named {name}")
        self.reload()

    def discard(self, name: str) -> None:
        """Delete a token whose secret was given to no one."""
        with self._database() as database:
            database.execute("DELETE FROM tokens WHERE name = ?", (name,))
        self.reload()

    def retire(self, name: str) -> None:
        """Delete a token and its peers.

        Rented boxes use up tokens by the thousand, and revoked ones would fill the table.
        """
        with self._database() as database:
            database.execute("DELETE FROM peers WHERE token = ?", (name,))
            database.execute("DELETE FROM tokens WHERE name = ?", (name,))
        self.reload()

    def tokens(self) -> list[TokenRow]:
        """All tokens, as last read, by name."""
        return sorted(self._tokens.values(), key=lambda token: token.name)

    # --- the coordinator -----------------------------------------------------

    def admit_own(self, public_key: bytes, role: Role) -> PeerId:
        """Admit a child process of the coordinator, by its key, until this process ends."""
        peer = peer_id_of(public_key)
        self._own[peer] = KnownPeer(peer, public_key, role)
        return peer

    def caller(self, secret: str, *, now_s: float) -> Caller:
        """The caller with this secret. Denied: the secret is unknown or no longer valid."""
        token = self._token(secret, now_s)
        return Caller(token.name, token.role)

    def peer(self, peer: PeerId, *, now_s: float) -> KnownPeer:
        """A known peer. Denied: it is not enrolled, is convicted, or its token is not valid now."""
        if peer in self._own:
            return self._own[peer]
        if peer not in self._peers:
            raise Denied(401, "credential", "this peer is not enrolled in this run")
        public_key, token = self._peers[peer]
        if fault := token.fault(now_s):
            raise fault
        if peer in self._convicted:
            raise Denied(403, "convicted", CONVICTED)
        return KnownPeer(peer, public_key, token.role, token.name in self._trusted)

    def convict(self, peer: PeerId, reason: str, *, now_s: float) -> None:
        """Refuse this peer until it is pardoned. reason: for the operator."""
        with self._database() as database:
            row = (peer, reason, now_s)
            database.execute("INSERT OR REPLACE INTO convictions VALUES (?, ?, ?)", row)
        self.reload()

    def pardon(self, peer: PeerId) -> None:
        """Let a convicted peer in again. OperatorFault: it is not convicted."""
        with self._database() as database:
            gone = database.execute("DELETE FROM convictions WHERE peer = ?", (peer,))
            if not gone.rowcount:
                raise OperatorFault(f"worker {peer} is not convicted")
        self.reload()

    def convicted(self) -> dict[PeerId, "Conviction"]:
        """The convicted peers, as last read."""
        return dict(self._convicted)

    def trusted(self) -> frozenset[PeerId]:
        """The enrolled peers that the operator trusts, as last read."""
        return frozenset(
            peer for peer, (_, token) in self._peers.items() if token.name in self._trusted
        )

    def token_of(self, peer: PeerId) -> str | None:
        """The name of the token with which a peer enrolled; None: it is not enrolled."""
        return self._peers[peer][1].name if peer in self._peers else None

    def enrol(self, secret: str, public_key: bytes, proof: bytes, *, now_s: float) -> PeerId:
        """Enrol one peer. Denied: the secret, the key or the proof is not accepted."""
        (outcome,) = self.enrol_all([Enrolment(secret, public_key, proof)], now_s=now_s)
        if isinstance(outcome, Denied):
            raise outcome
        return outcome

    def enrol_all(self, asked: Sequence[Enrolment], *, now_s: float) -> list[PeerId | Denied]:
        """Bind workers' keys to their tokens in one transaction.

        Enrolling again changes nothing. A peer that enrols with another token belongs to that one.
        """
        # A token may have been made a moment ago.
        self.reload()
        with self._database() as database:
            outcomes = [self._enrol(database, each, now_s) for each in asked]
        self.reload()
        return outcomes

    def reload(self) -> None:
        """Reread the table. StoreFault: it cannot be read; the last one stays in memory."""
        with self._database() as database:
            rows = database.execute(
                "SELECT name, role, secret_hash, max_workers, expires_at, revoked FROM tokens"
            )
            tokens = [TokenRow(*row) for row in rows]
            peers = database.execute("SELECT peer, public_key, token FROM peers").fetchall()
            convicted = database.execute("SELECT peer, reason, at FROM convictions").fetchall()
        by_name = {token.name: token for token in tokens}
        self._convicted = {
            PeerId(peer): Conviction(reason, at_s) for peer, reason, at_s in convicted
        }
        self._tokens = {token.secret_hash: token for token in tokens}
        self._peers = {
            PeerId(peer): (public_key, by_name[token]) for peer, public_key, token in peers
        }

    # --- the table -----------------------------------------------------------

    def _enrol(
        self, database: sqlite3.Connection, asked: Enrolment, now_s: float
    ) -> PeerId | Denied:
        try:
            token = self._token(asked.secret, now_s)
        except Denied as denied:
            return denied
        if token.role != "worker":
            return Denied(
                403,
                "role",
                f"token {token.name} is for a {token.role}; workers enrol with a worker's",
            )
        if not is_enrol_proof(asked.public_key, asked.proof, asked.secret):
            return Denied(403, "proof", "the signature does not prove possession of the key")
        peer = peer_id_of(asked.public_key)
        # The peer itself does not count: it may enrol again when its token is full.
        others = "SELECT count(*) FROM peers WHERE token = ? AND peer != ?"
        enrolled = database.execute(others, (token.name, peer)).fetchone()[0]
        if token.max_workers is not None and enrolled >= token.max_workers:
            return Denied(
                403,
                "workers",
                f"token {token.name} has enrolled its {token.max_workers} workers already",
            )
        if self._enrolled(database, peer) >= ENROLLED_MAX:
            database.execute(FORGET_INVALID, (now_s,))
        if self._enrolled(database, peer) >= ENROLLED_MAX:
            return Denied(403, "workers", f"this run has enrolled {ENROLLED_MAX} workers already")
        database.execute(
            "INSERT OR REPLACE INTO peers VALUES (?, ?, ?)", (peer, asked.public_key, token.name)
        )
        return peer

    @staticmethod
    def _enrolled(database: sqlite3.Connection, but: PeerId) -> int:
        (count,) = database.execute("SELECT count(*) FROM peers WHERE peer != ?", (but,)).fetchone()
        return int(count)

    def _token(self, secret: str, now_s: float) -> TokenRow:
        token = self._tokens.get(secret_hash(secret))
        if token is None:
            raise Denied(401, "credential", "unknown credential; is the token file of this run?")
        if fault := token.fault(now_s):
            raise fault
        return token

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """One transaction, rolled back by an exception. StoreFault: the database failed."""
        try:
            database = sqlite3.connect(self._path, isolation_level=None)
            try:
                # IMMEDIATE takes the write lock first, so two writers never fail half-way.
                database.execute("BEGIN IMMEDIATE")
                yield database
                database.execute("COMMIT")
            finally:
                database.close()
        except sqlite3.Error as error:
            raise StoreFault(f"{self._path}: {error}") from error
