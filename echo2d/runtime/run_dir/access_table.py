"""The access table: the tokens of a run and the peers enrolled with them, in SQLite.

    worker's token --expires, or is rotated--> enrols no new machine; its peers stay
    any token      --revoked or deleted-----> its callers and peers lose access within a second

`echo2d token` and a running coordinator share the table. Every write is a transaction, and the
coordinator rereads the table every second (`AccessTable.reload`). Secrets are stored as hashes. The
expiry of a worker's token limits enrolment only: an enrolled machine has its own key, and a fleet
that joined on one day must not end on one day. All other tokens are invalid once they expire. `now_s`
is Unix time. Methods that write or reload block; `caller` and `peer` answer from memory.
"""

import math
import re
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

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
from echo2d.runtime.run_dir.run_directory import ACCESS_FILE, RunDirectory
from echo2d.store.disk import is_of_the_host, sqlite_words, store_faults
from echo2d.store.formats import require_format
from echo2d.store.row_sums import TableSum

# The tokens are limited because the whole table is read every second.
ACCESS_TOKENS_MAX = 10_000
# Enrolled peers are limited for the same reason; this is twenty times the largest fleet.
ENROLLED_MAX = 10_000
# This many old secrets of a token are kept, the newest ones: its own peers may still return with them.
OLD_SECRETS_MAX = 16
# Last uses are written this often. A longer interval would show older times, a shorter one write more.
USES_WRITTEN_S = 60.0
# A machine that has been away for this long loses its place if its token has expired and others need it.
AWAY_S = 7 * 86400.0
# `PRAGMA user_version` of the table; it is 0 in a file that was just made.
ACCESS_FORMAT = 2
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS tokens (
    name TEXT PRIMARY KEY, role TEXT NOT NULL, secret_hash BLOB NOT NULL UNIQUE,
    max_workers INTEGER, expires_at REAL, revoked INTEGER NOT NULL DEFAULT 0)""",
    """CREATE TABLE IF NOT EXISTS peers (
    peer TEXT PRIMARY KEY, public_key BLOB NOT NULL, token TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS convictions (
    peer TEXT PRIMARY KEY, reason TEXT NOT NULL, at REAL NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS old_secrets (
    secret_hash BLOB PRIMARY KEY, token TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS uses (
    holder TEXT PRIMARY KEY, at REAL NOT NULL)""",
    "CREATE TABLE IF NOT EXISTS cordons (peer TEXT PRIMARY KEY, at REAL NOT NULL)",
)
# The checksum of the tables that decide on access; `uses` only has times.
_SUM = TableSum(ACCESS_FORMAT, ("tokens", "peers", "convictions", "old_secrets", "cordons"))

# Peers of revoked tokens are kept until their room is needed, so that they are told why they are refused.
# Machines of expired tokens are kept as well: they are members as long as they keep returning.
FORGET_INVALID = """DELETE FROM peers WHERE token IN (SELECT name FROM tokens WHERE revoked)
    OR (token IN (SELECT name FROM tokens WHERE expires_at <= ?)
        AND peer NOT IN (SELECT holder FROM uses WHERE at > ?))"""
# Cordons of peers that are not enrolled are deleted, so there are no more cordons than enrolled peers.
FORGET_CORDONS = "DELETE FROM cordons WHERE peer NOT IN (SELECT peer FROM peers)"
FORGET_USES = """DELETE FROM uses WHERE holder NOT LIKE 'token %'
    AND holder NOT IN (SELECT peer FROM peers)"""


NEW_FILE = "ask the run's operator for a new token file"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One token of the table. max_workers, expires_at (Unix time): None means no limit."""

    name: str
    role: TokenRole
    secret_hash: bytes
    max_workers: int | None
    expires_at: float | None
    revoked: bool

    def expired(self, now_s: float) -> bool:
        return self.expires_at is not None and now_s >= self.expires_at

    def fault(self, now_s: float) -> Denied | None:
        """Why the token's callers and peers have no access now; None: they have."""
        if self.revoked:
            return Denied(403, "revoked", f"token {self.name} was revoked: {NEW_FILE}")
        return None if self.role == "worker" else self.expiry(now_s)

    def expiry(self, now_s: float) -> Denied | None:
        """The refusal if the token has expired; None: it has not."""
        if not self.expired(now_s):
            return None
        ends = " and enrols no new machine" if self.role == "worker" else ""
        extend = f"`echo2d token change {self.name} --expires 30d`"
        text = f"token {self.name} has expired{ends}: ask the run's operator to type {extend}"
        return Denied(403, "expired", text)


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
    """Tokens and peers of one run: on disk, and in memory as they were last read."""

    def __init__(self, run: RunDirectory, trusted: Collection[str] = ()) -> None:
        """trusted: the names of tokens whose workers the operator trusts."""
        self._run = run
        self._trusted = frozenset(trusted)
        self._path = run.path / ACCESS_FILE
        self._own: dict[PeerId, KnownPeer] = {}
        self._convicted: dict[PeerId, Conviction] = {}
        self._cordoned: frozenset[PeerId] = frozenset()
        self._tokens: dict[bytes, TokenRow] = {}
        self._peers: dict[PeerId, tuple[bytes, TokenRow]] = {}
        self._peers_of: dict[str, list[PeerId]] = {}
        # Tokens by secrets that they had before they were rotated.
        self._old: dict[bytes, TokenRow] = {}
        # Last uses by peer id or "token NAME": not written yet, and as last read.
        self._used: dict[str, float] = {}
        self._uses: dict[str, float] = {}
        self._uses_written_at = 0.0
        # The number of the last transaction when the table was read.
        self._read_of = b""
        try:
            with self._database() as database:
                found = database.execute("PRAGMA user_version").fetchone()[0]
                require_format(
                    f"access table {self._path}",
                    found or ACCESS_FORMAT,
                    ACCESS_FORMAT,
                    older="go on with the echo2d that wrote it",
                )
                for statement in _SCHEMA:
                    database.execute(statement)
                if not found:
                    _SUM.write(database)
                database.execute(f"PRAGMA user_version = {ACCESS_FORMAT}")
            self._path.chmod(0o600)
            self.reload()
        except StoreFault as fault:
            if isinstance(fault.__cause__, Exception) and is_of_the_host(fault.__cause__):
                raise
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

        A revoked token of this name is deleted first, with its peers. OperatorFault: the name is taken
        or malformed, the role is unknown, or the table is full.
        """
        # A token's name becomes a file name.
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is None:
            raise OperatorFault(
                f"token name {name!r}: expected up to 64 letters, digits, dots, dashes, underscores"
            )
        if role not in get_args(TokenRole):
            raise OperatorFault(f"role {role!r}: expected {', '.join(get_args(TokenRole))}")
        secret = secrets.token_urlsafe(32)
        with self._database() as database:
            valid = "SELECT 1 FROM tokens WHERE name = ? AND NOT revoked"
            if not database.execute(valid, (name,)).fetchone():
                _forget(database, name)
            if database.execute("SELECT count(*) FROM tokens").fetchone()[0] >= ACCESS_TOKENS_MAX:
                raise OperatorFault(
                    f"expected fewer than {ACCESS_TOKENS_MAX} tokens in this run; it has that many already: "
                    "delete some with `echo2d token revoke NAME --delete`"
                )
            row = (name, role, secret_hash(secret), max_workers, expires_at)
            if (
                database.execute(
                    "INSERT OR IGNORE INTO tokens VALUES (?, ?, ?, ?, ?, 0)", row
                ).rowcount
                == 0
            ):
                raise OperatorFault(
                    f"a token named {name} exists already: choose another name, or make its file "
                    f"again with `echo2d token change {name} --new-secret`"
                )
        self.reload()
        return self._file(name, cast("TokenRole", role), secret)

    def revoke(self, name: str) -> None:
        """Revoke a token: its callers and peers lose access within a second."""
        with self._database() as database:
            _one(database, "UPDATE tokens SET revoked = 1 WHERE name = ?", (name,))
        self.reload()

    def extend(self, name: str, expires_at: float | None) -> None:
        """Let a token expire at another time; None: never. OperatorFault: it is revoked, or unknown."""
        with self._database() as database:
            _require_valid(database, name)
            _one(database, "UPDATE tokens SET expires_at = ? WHERE name = ?", (expires_at, name))
        self.reload()

    def rotate(self, name: str, keep: Callable[[TokenFile], None] | None = None) -> TokenFile:
        """Give a token a new secret. Its peers stay; the old secret enrols no new machine.

        keep: stores the secret. If it raises, the token keeps its old secret.

        A peer of this token may still return with an old secret, because its owner may not have the new
        file yet. OperatorFault: the token is revoked, or unknown.
        """
        secret = secrets.token_urlsafe(32)
        with self._database() as database:
            _require_valid(database, name)
            database.execute(
                "INSERT INTO old_secrets SELECT secret_hash, name FROM tokens WHERE name = ?",
                (name,),
            )
            database.execute(
                "DELETE FROM old_secrets WHERE token = ?1 AND rowid NOT IN (SELECT rowid FROM "
                "old_secrets WHERE token = ?1 ORDER BY rowid DESC LIMIT ?2)",
                (name, OLD_SECRETS_MAX),
            )
            new = (secret_hash(secret), name)
            _one(database, "UPDATE tokens SET secret_hash = ? WHERE name = ?", new)
            role = database.execute("SELECT role FROM tokens WHERE name = ?", (name,))
            file = self._file(name, role.fetchone()[0], secret)
            if keep is not None:
                keep(file)
        self.reload()
        return file

    def discard(self, name: str) -> None:
        """Delete a token whose secret was not given to any caller."""
        self.retire(name)

    def retire(self, name: str) -> bool:
        """Delete a token and its peers; returns whether there was one.

        Rented boxes use up tokens by the thousand, and revoked ones would fill the table.
        """
        with self._database() as database:
            found = _forget(database, name)
        self.reload()
        return found

    def accepts(self, token: TokenFile, *, now_s: float) -> bool:
        """Whether this token file gives access under its name, by the table as last read."""
        found = self._tokens.get(secret_hash(token.secret))
        return found is not None and found.name == token.name and found.fault(now_s) is None

    def tokens(self) -> list[TokenRow]:
        """All tokens, as last read, by name."""
        return sorted(self._tokens.values(), key=lambda token: token.name)

    def peers_of(self, name: str) -> list[PeerId]:
        """The machines that are enrolled with a token, as last read."""
        return list(self._peers_of.get(name, ()))

    def last_use(self, name: str) -> float | None:
        """When a coordinator was last called by this token's callers or peers (Unix time), to the minute."""
        holders = (_caller_key(name), *self.peers_of(name))
        return max((self._uses[each] for each in holders if each in self._uses), default=None)

    def expiries(self, *, now_s: float) -> dict[str, float]:
        """When the first valid token of each role expires; roles without such a token are absent."""
        first: dict[str, float] = {}
        for token in self._tokens.values():
            if token.expires_at is not None and not (token.revoked or token.expired(now_s)):
                first[token.role] = min(token.expires_at, first.get(token.role, math.inf))
        return first

    def expiring(self, *, now_s: float, within_s: float) -> list[TokenRow]:
        """The tokens that expire within this time, or have expired within it, and may still be used: a worker's
        token that has enrolled all its workers is left out.
        """
        enrolled = Counter(token.name for _, token in self._peers.values())
        return [
            token
            for token in self.tokens()
            if token.expires_at is not None
            and abs(token.expires_at - now_s) < within_s
            and not token.revoked
            and (token.max_workers is None or enrolled[token.name] < token.max_workers)
        ]

    # --- the coordinator -----------------------------------------------------

    def admit_own(self, public_key: bytes, role: Role) -> PeerId:
        """Admit a child process of the coordinator, by its key, until this process ends."""
        peer = peer_id_of(public_key)
        self._own[peer] = KnownPeer(peer, public_key, role)
        return peer

    def caller(self, secret: str, *, now_s: float) -> Caller:
        """The caller with this secret. Denied: the secret is unknown or no longer valid."""
        token = self._token(secret, now_s)
        self._used[_caller_key(token.name)] = now_s
        return Caller(token.name, token.role)

    def recognise(self, secret: str, *, now_s: float) -> None:
        """Denied: no machine can enrol with this secret, not even one that has enrolled before."""
        self._joining(secret, now_s)

    def peer(self, peer: PeerId, *, now_s: float) -> KnownPeer:
        """A known peer. Denied: it is not enrolled, is convicted, or its token was revoked."""
        if peer in self._own:
            return self._own[peer]
        if peer not in self._peers:
            raise Denied(401, "credential", "this peer is not enrolled in this run")
        public_key, token = self._peers[peer]
        if fault := token.fault(now_s):
            raise fault
        if peer in self._convicted:
            raise Denied(403, "convicted", CONVICTED)
        self._used[peer] = now_s
        trusted, cordoned = token.name in self._trusted, peer in self._cordoned
        return KnownPeer(peer, public_key, token.role, trusted, cordoned, token.name)

    def convict(self, peer: PeerId, reason: str, *, now_s: float) -> None:
        """Refuse this peer until it is pardoned. reason: what the operator is shown."""
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

    def cordon(self, peer: PeerId, *, cordoned: bool, now_s: float) -> None:
        """Take a peer out of service, or into service again. OperatorFault: it is not enrolled."""
        if peer not in self._peers:
            raise OperatorFault(f"no worker with id {peer} has enrolled in this run")
        with self._database() as database:
            database.execute("DELETE FROM cordons WHERE peer = ?", (peer,))
            if cordoned:
                database.execute("INSERT INTO cordons VALUES (?, ?)", (peer, now_s))
            database.execute(FORGET_CORDONS)
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

        Enrolling again changes nothing, and may be done with a token that has expired or been
        rotated since. A peer that enrols with another token belongs to that one.
        """
        with self._database() as database:
            # The table is read first: a token may have been made, rotated or deleted a moment ago.
            self._read(database)
            outcomes = [self._enrol(database, each, now_s) for each in asked]
        self.reload()
        return outcomes

    def reload(self) -> None:
        """Reread the table if it has changed, and write the last uses every USES_WRITTEN_S.

        StoreFault: it cannot be read; the last one stays in memory.
        """
        used = self._uses_to_write()
        if not used and self._read_of == self._transaction():
            return
        with self._database() as database:
            database.executemany("INSERT OR REPLACE INTO uses VALUES (?, ?)", used.items())
            self._read(database)

    # --- the table -----------------------------------------------------------

    def _read(self, database: sqlite3.Connection) -> None:
        # No other process can write now. The writes of this transaction are read again by the next reload.
        self._read_of = self._transaction()
        rows = database.execute(
            "SELECT name, role, secret_hash, max_workers, expires_at, revoked FROM tokens"
        )
        tokens = [TokenRow(*row) for row in rows]
        peers = database.execute("SELECT peer, public_key, token FROM peers").fetchall()
        convicted = database.execute("SELECT peer, reason, at FROM convictions").fetchall()
        old = database.execute("SELECT secret_hash, token FROM old_secrets").fetchall()
        uses = database.execute("SELECT holder, at FROM uses").fetchall()
        cordoned = database.execute("SELECT peer FROM cordons").fetchall()
        by_name = {token.name: token for token in tokens}
        self._convicted = {
            PeerId(peer): Conviction(reason, at_s) for peer, reason, at_s in convicted
        }
        self._cordoned = frozenset(PeerId(peer) for (peer,) in cordoned)
        self._tokens = {token.secret_hash: token for token in tokens}
        self._old = {digest: by_name[token] for digest, token in old if token in by_name}
        self._uses = dict(uses)
        self._peers = {
            PeerId(peer): (public_key, by_name[token])
            for peer, public_key, token in peers
            if token in by_name
        }
        peers_of: dict[str, list[PeerId]] = {}
        for peer in sorted(self._peers):
            peers_of.setdefault(self._peers[peer][1].name, []).append(peer)
        self._peers_of = peers_of

    def _enrol(
        self, database: sqlite3.Connection, asked: Enrolment, now_s: float
    ) -> PeerId | Denied:
        try:
            token = self._joining(asked.secret, now_s)
        except Denied as denied:
            return denied
        if token.role != "worker":
            return Denied(
                403,
                "role",
                f"token {token.name} has the role {token.role}; this needs worker",
            )
        peer = peer_id_of(asked.public_key)
        query = "SELECT 1 FROM peers WHERE peer = ? AND token = ?"
        known = database.execute(query, (peer, token.name)).fetchone() is not None
        if not known and secret_hash(asked.secret) in self._old:
            return Denied(403, "rotated", _rotated(token))
        if not known and (expiry := token.expiry(now_s)):
            return expiry
        # `echo2d doctor` sends no proof. This refusal tells it that a new machine could enrol.
        if not is_enrol_proof(asked.public_key, asked.proof, asked.secret):
            return Denied(403, "proof", "the signature does not prove possession of the key")
        if known:
            return peer
        # A peer that has enrolled before is not counted among the others.
        others = "SELECT count(*) FROM peers WHERE token = ? AND peer != ?"
        enrolled = database.execute(others, (token.name, peer)).fetchone()[0]
        if token.max_workers is not None and enrolled >= token.max_workers:
            return Denied(
                403,
                "workers",
                f"token {token.name} has enrolled its {token.max_workers} workers already: use the "
                "state directory with which this machine enrolled, or ask the run's operator for a "
                "token of its own",
            )
        if self._enrolled(database, peer) >= ENROLLED_MAX:
            database.execute(FORGET_INVALID, (now_s, now_s - AWAY_S))
            database.execute(FORGET_USES)
        if self._enrolled(database, peer) >= ENROLLED_MAX:
            return Denied(
                403,
                "workers",
                f"this run has enrolled {ENROLLED_MAX} workers already: its operator can delete "
                "tokens with `echo2d token revoke NAME --delete`",
            )
        database.execute(
            "INSERT OR REPLACE INTO peers VALUES (?, ?, ?)", (peer, asked.public_key, token.name)
        )
        return peer

    @staticmethod
    def _enrolled(database: sqlite3.Connection, but: PeerId) -> int:
        (count,) = database.execute("SELECT count(*) FROM peers WHERE peer != ?", (but,)).fetchone()
        return int(count)

    def _token(self, secret: str, now_s: float) -> TokenRow:
        token = self._joining(secret, now_s)
        if token.secret_hash != secret_hash(secret):
            raise Denied(401, "credential", _rotated(token))
        return token

    def _joining(self, secret: str, now_s: float) -> TokenRow:
        """The token of this secret, which may be an old secret from before a rotation."""
        digest = secret_hash(secret)
        token = self._tokens.get(digest) or self._old.get(digest)
        if token is None:
            raise _unknown()
        if fault := token.fault(now_s):
            raise fault
        return token

    def _file(self, name: str, role: TokenRole, secret: str) -> TokenFile:
        return self._run.believed(TokenFile(name, role, secret, run_key=""))

    def _transaction(self) -> bytes:
        """SQLite's number of the file's last transaction, and its number of pages."""
        with store_faults("reading", self._path), self._path.open("rb") as file:
            return file.read(32)[24:]

    def _uses_to_write(self) -> dict[str, float]:
        """The last uses, if it is time to write them. Each is returned once."""
        newest = max(self._used.values(), default=self._uses_written_at)
        # The difference is negative if the clock was set back.
        if 0 <= newest - self._uses_written_at < USES_WRITTEN_S:
            return {}
        used, self._used, self._uses_written_at = self._used, {}, newest
        # Return a copy, because the loop's thread may add another use at this moment.
        return used.copy()

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """One transaction, rolled back by an exception. StoreFault: the database failed, or is damaged."""
        try:
            database = sqlite3.connect(self._path, isolation_level=None)
            try:
                # IMMEDIATE takes the write lock first, so two writers never fail half-way.
                database.execute("BEGIN IMMEDIATE")
                require_whole(database, self._path)
                before = database.total_changes
                yield database
                if database.total_changes != before:
                    _SUM.write(database)
                database.execute("COMMIT")
            finally:
                database.close()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreFault(f"{self._path}: {sqlite_words(self._path, error)}") from error


def require_whole(database: sqlite3.Connection, path: Path) -> None:
    """StoreFault: a row of an access table was changed on disk."""
    if not _SUM.fits(database):
        raise StoreFault(
            f"{path} is damaged: its rows are not those that were written; take that file from a backup, or remove "
            "it and create all tokens again"
        )


def _unknown() -> Denied:
    text = f"unknown credential: its token was deleted, or is of another run; {NEW_FILE}"
    return Denied(401, "credential", text)


def _rotated(token: TokenRow) -> str:
    return f"token {token.name} has a new secret: ask the run's operator for its new file"


def _caller_key(name: str) -> str:
    """The key under which the uses of a token's callers are kept. A peer id contains no blank."""
    return f"token {name}"


def _one(database: sqlite3.Connection, statement: str, values: tuple[Any, ...]) -> None:
    """Change the row of one token, whose name comes last. OperatorFault: there is no such token."""
    if database.execute(statement, values).rowcount == 0:
        raise OperatorFault(
            f"there is no token named {values[-1]}; `echo2d token list` shows those of the run"
        )


def _require_valid(database: sqlite3.Connection, name: str) -> None:
    """OperatorFault: the token was revoked, which cannot be undone."""
    if database.execute("SELECT 1 FROM tokens WHERE name = ? AND revoked", (name,)).fetchone():
        raise OperatorFault(
            f"token {name} was revoked, which cannot be undone: make it again with "
            f"`echo2d token create {name}`"
        )


def _forget(database: sqlite3.Connection, name: str) -> bool:
    """Delete a token with its peers, old secrets and uses; returns whether there was one."""
    peers = "SELECT peer FROM peers WHERE token = ?1"
    database.execute(
        f"DELETE FROM uses WHERE holder = ?2 OR holder IN ({peers})",  # noqa: S608
        (name, _caller_key(name)),
    )
    database.execute("DELETE FROM peers WHERE token = ?", (name,))
    database.execute("DELETE FROM old_secrets WHERE token = ?", (name,))
    return database.execute("DELETE FROM tokens WHERE name = ?", (name,)).rowcount > 0
