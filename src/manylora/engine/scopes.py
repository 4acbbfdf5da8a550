"""Which requests may share KV: each scope is a short text that tells nothing of the key and the salt behind it."""

from __future__ import annotations

import hashlib
import secrets

from manylora.types import InvalidRequest

_DIGEST_BYTES = 16
_PURPOSE = b"cache scopes"


class CacheScopes:
    """Makes scopes with a secret, so that a journal's scopes cannot be guessed from keys and salts.

    ``secret``: what processes that are to make the same scopes have in common; None: one of its own.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        secret = secrets.token_bytes(32) if secret is None else secret
        self._secret = hashlib.blake2b(secret, person=_PURPOSE, digest_size=32).digest()

    def scope(self, owner: bytes | None, salt: str | None) -> str:
        """The scope of an owner's requests with a salt; "" where there is neither, which all such requests share.

        ``owner``: the digest of an API key, always of one length. Raises InvalidRequest for an empty salt.
        """
        if salt is not None and not (isinstance(salt, str) and salt):
            raise InvalidRequest("cache_salt must be a non-empty string", "cache_salt")
        if owner is None and salt is None:
            return ""
        state = hashlib.blake2b(key=self._secret, digest_size=_DIGEST_BYTES)
        # One byte tells an owner from none; an owner's length is fixed, so what follows is the salt.
        state.update(b"\0" if owner is None else b"\1" + owner)
        state.update((salt or "").encode("utf-8", "surrogatepass"))
        return state.hexdigest()
