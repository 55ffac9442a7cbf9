"""Headers of the clients that call from a browser."""

SDK_HEADERS = (
    *("authorization", "content-type", "user-agent", "x-request-id", "idempotency-key"),
    *("openai-beta", "openai-organization", "openai-project"),
    *("x-api-key", "anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
    *("x-stainless-arch", "x-stainless-lang", "x-stainless-os", "x-stainless-package-version", "x-stainless-runtime"),
    *("x-stainless-runtime-version", "x-stainless-retry-count", "x-stainless-timeout", "x-stainless-helper"),
    *("x-stainless-helper-method", "x-stainless-poll-helper", "x-stainless-custom-poll-interval"),
)
"""Headers of OpenAI's and Anthropic's clients in a browser; a preflight must allow each by name."""
