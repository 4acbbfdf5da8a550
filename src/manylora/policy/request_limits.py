"""What one request may ask for: as much as the context and the pool have room for. Knows no other requests."""

from __future__ import annotations

from manylora.config import PolicyConfig
from manylora.policy.residency import Residency
from manylora.types import AdapterId, Request, RequestError


class RequestLimits:
    """Of requests for adapters that are known."""

    def __init__(self, config: PolicyConfig, residency: Residency) -> None:
        self._config = config
        self._residency = residency

    def num_tokens(self, request: Request) -> int:
        """Tokens that one sample may generate: as asked, or as many as the context and the pool allow."""
        if request.params.max_tokens is not None:
            return request.params.max_tokens
        kv_pages = self._kv_pages_beside(request.adapter)
        # The last token generated is never computed, so it needs no room in a page.
        in_pool = kv_pages * self._config.page_tokens + 1
        return min(self._config.max_model_len, in_pool) - len(request.prompt)

    def _kv_pages_beside(self, adapter: AdapterId) -> int:
        """Device pages that KV can have while the adapter is resident."""
        if self._residency.has_parts:
            return self._config.num_pages - self._residency.adapter_limit
        return self._config.num_pages - self._residency.tree.node(adapter).num_pages

    def refusal(self, request: Request) -> RequestError | None:
        """Why the request can never be served as asked, if so."""
        if not request.prompt:
            return RequestError(400, "the prompt is empty", "prompt")
        num_prompt, limit = len(request.prompt), self._config.max_model_len
        asked = request.params.max_tokens
        num_generated = 1 if asked is None else asked
        if num_prompt + num_generated > limit:
            return RequestError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{num_prompt + num_generated} tokens ({num_prompt} in the prompt, {num_generated} for the "
                "completion).",
                "max_tokens" if num_prompt < limit else "prompt",
            )
        adapter_pages = self._residency.tree.node(request.adapter).num_pages
        num_computed = max(num_prompt, num_prompt + num_generated - 1)
        kv_pages = -(-num_computed // self._config.page_tokens)
        room = self._kv_pages_beside(request.adapter)
        if kv_pages > room:
            return RequestError(
                400,
                f"the request needs {adapter_pages + kv_pages} pages ({adapter_pages} for its adapter, "
                f"{kv_pages} for {num_computed} tokens) but the pool has "
                f"{self._config.num_pages}"
                + (f", of which {room} for tokens" if self._residency.has_parts else ""),
                "max_tokens",
            )
        return None
