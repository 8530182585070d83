"""The peer of the benchmarks: a mitmproxy addon that answers every request itself, with one canned answer."""

from mitmproxy import ctx, http

ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":0,"model":"any","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"' + b" word" * 50 + b'"},"finish_reason":"length"}],"usage":{"prompt_tokens":9,'
    b'"completion_tokens":50,"total_tokens":59}}'
)


def load(_: object) -> None:
    """No connection to a provider, as the interceptor has none."""
    ctx.options.update(connection_strategy="lazy", upstream_cert=False, flow_detail=0)


def request(flow: http.HTTPFlow) -> None:
    """Answer."""
    flow.response = http.Response.make(200, ANSWER, {"content-type": "application/json"})
